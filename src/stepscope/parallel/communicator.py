"""Every collective of this package goes through a `Communicator`: it is named, logged in the journal, and timed.

With plain `torch.distributed`, a failed collective reports "Connection closed by peer" and neither the rank nor the
tensor. Here it has a name and a number, and the error names the rank that fell behind and where. The communicator also
measures when a collective started, when it ended, and how long the rank waited for it: communication, and exposed
communication.

With gloo, CUDA tensors are copied through CPU memory, which is meant for tests and machines without NCCL.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.errors import StepscopeError
from stepscope.parallel.clocks import CudaClock, HostClock, Span, Waitable
from stepscope.parallel.exchange import Background, Exchange
from stepscope.parallel.journal import FOLDER_VARIABLE, Journal, blame

T = TypeVar("T")
# torch 2.13 renamed these two.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class CollectiveError(StepscopeError, RuntimeError):
    """A collective that failed on this rank, usually because of another rank."""


class CommunicationTime(NamedTuple):
    """Between two readings: how long collectives ran, and how long this rank waited for them."""

    busy_ns: int
    exposed_ns: int
    issued: int
    message_bytes: int


class Communicator:
    """The collectives of one process group."""

    _default: ClassVar["tuple[dist.ProcessGroup, Communicator] | None"] = None

    def __init__(self, group: dist.ProcessGroup | None = None, *, journal: Journal | None = None) -> None:
        if not dist.is_initialized():
            raise StepscopeError(
                "the default process group has not been initialized",
                detail="wrapping a model requires a process group",
                hint="call torch.distributed.init_process_group(), and start with torchrun --nproc-per-node 2 train.py",
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        folder = os.environ.get(FOLDER_VARIABLE)
        self.journal = journal or _open_journal(folder, dist.get_rank(), os.getpid())
        self._clock = CudaClock() if self.backend == "nccl" else HostClock()
        self._background: Background | None = None
        self._message_bytes = 0
        self._issued = 0

    @classmethod
    def default(cls) -> "Communicator":
        """The communicator of torch's default process group: the same object as long as that exists."""
        group = dist.group.WORLD
        if group is None or cls._default is None or cls._default[0] is not group:
            made = cls()
            assert dist.group.WORLD is not None
            cls._default = (dist.group.WORLD, made)
        return cls._default[1]

    def all_reduce(self, tensor: Tensor, name: str, *, average: bool = True) -> "Pending":
        """Works in place. The average is the sum, divided in `wait`."""
        staged = self._stage(tensor)
        pending = self._begin(
            f"all-reduce of {name}",
            tensor.nbytes,
            lambda: dist.all_reduce(staged, group=self.group, async_op=True),
        )
        pending.finally_do(lambda: self._bring_back(staged, tensor, self.world if average else 1))
        return pending

    def all_gather(self, whole: Tensor, shard: Tensor, name: str) -> "Pending":
        """Gather `shard` of every rank into `whole`; it may be the part of `whole` at this rank."""
        _check_parts(whole, shard, self.world)
        staged_whole, staged_shard = self._empty_or_same(whole), self._stage(shard)
        pending = self._begin(
            f"all-gather of {name}",
            whole.nbytes,
            lambda: self._issue_all_gather(staged_whole, staged_shard),
        )
        pending.finally_do(lambda: self._bring_back(staged_whole, whole, 1))
        return pending

    def reduce_scatter(self, shard: Tensor, whole: Tensor, name: str, *, average: bool = True) -> "Pending":
        """Write this rank's part of the sum of `whole` over ranks to `shard`, which may be that part of it. The content
        of `whole` is undefined afterwards.
        """
        _check_parts(whole, shard, self.world)
        staged_whole, staged_shard = self._stage(whole), self._empty_or_same(shard)
        pending = self._begin(
            f"reduce-scatter of {name}",
            whole.nbytes,
            lambda: self._issue_reduce_scatter(staged_shard, staged_whole),
        )
        pending.finally_do(lambda: self._bring_back(staged_shard, shard, self.world if average else 1))
        return pending

    def broadcast(self, tensor: Tensor, source: int, name: str) -> "Pending":
        """Send from the rank `source` of this group to all others."""
        staged = self._stage(tensor)
        pending = self._begin(
            f"broadcast of {name}",
            tensor.nbytes,
            lambda: dist.broadcast(staged, group=self.group, group_src=source, async_op=True),
        )
        pending.finally_do(lambda: self._bring_back(staged, tensor, 1))
        return pending

    def share(self, parts: Sequence[tuple[int, Tensor]], name: str) -> list["Pending"]:
        """Overwrite each tensor in place with that of the rank it is paired with; all of them are sent concurrently."""
        if self.backend != "gloo":
            return [self.broadcast(tensor, source, f"{name} from rank {source}") for source, tensor in parts]
        staged = [(source, self._stage(tensor)) for source, tensor in parts]
        pending = self._begin(
            f"exchange of {name}",
            sum(tensor.nbytes for _, tensor in parts),
            lambda: Exchange.share(self._threads(), staged, self.group),
        )

        def bring_back() -> None:
            for (_, ours), (_, tensor) in zip(staged, parts, strict=True):
                self._bring_back(ours, tensor, 1)

        pending.finally_do(bring_back)
        return [pending]

    def share_objects(self, value: T, name: str) -> list[T]:
        """Return small Python values of all ranks, in rank order."""
        values: list[T | None] = [None] * self.world
        self._run(f"object all-gather of {name}", lambda: dist.all_gather_object(values, value, group=self.group))
        return values  # type: ignore[return-value]

    def barrier(self, name: str) -> None:
        self._run(f"barrier {name}", lambda: dist.barrier(group=self.group))

    def take_time(self) -> CommunicationTime:
        """Return the communication since the last call; the first call starts the clock. Collectives still running
        belong to the next reading.
        """
        busy_ns, exposed_ns = self._clock.take()
        taken = CommunicationTime(busy_ns, exposed_ns, self._issued, self._message_bytes)
        self._issued = self._message_bytes = 0
        return taken

    def _issue_all_gather(self, whole: Tensor, shard: Tensor) -> Waitable | None:
        if self.backend != "gloo":
            work: dist.Work | None = _all_gather(whole, shard, group=self.group, async_op=True)
            return work
        parts = whole.detach().chunk(self.world) if whole.numel() else ()
        if parts and parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        return Exchange.share(self._threads(), list(enumerate(parts)), self.group)

    def _issue_reduce_scatter(self, shard: Tensor, whole: Tensor) -> Waitable | None:
        if self.backend != "gloo":
            work: dist.Work | None = _reduce_scatter(shard, whole, group=self.group, async_op=True)
            return work
        return Exchange.reduce_scatter(self._threads(), shard, whole, self.group)

    def _threads(self) -> Background:
        if self._background is None:
            self._background = Background()
        return self._background

    def _begin(self, name: str, message_bytes: int, issue: Callable[[], Waitable | None]) -> "Pending":
        self.journal.begin(name)
        self._issued += 1
        self._message_bytes += message_bytes
        try:
            work = issue()
        except RuntimeError as error:
            raise self._explain(name, error) from error
        assert work is not None, "asked for asynchronous work"
        return Pending(self, name, work, self._clock.begin(work))

    def _run(self, name: str, collective: Callable[[], object]) -> None:
        self.journal.begin(name)
        try:
            collective()
        except RuntimeError as error:
            raise self._explain(name, error) from error
        self.journal.end()

    def _explain(self, name: str, error: RuntimeError) -> CollectiveError:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        return CollectiveError(
            f"rank {self.rank} could not complete the {name}: {blame(self.journal.entries())}",
            detail=f"{self.backend} reported: {reason}",
            hint="see the log of the rank named above",
        )

    def _stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or a copy in CPU memory if the backend cannot read other memory."""
        if self.backend != "gloo" or not tensor.is_cuda:
            return tensor
        torch.cuda.current_stream(tensor.device).synchronize()  # computing the tensor is not communication; the copy is
        assert isinstance(self._clock, HostClock), "gloo's"
        with self._clock.standing_still():
            return tensor.cpu()

    def _empty_or_same(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu") if self.backend == "gloo" and tensor.is_cuda else tensor

    def _bring_back(self, staged: Tensor, tensor: Tensor, divisor: int) -> None:
        if staged is not tensor:
            assert isinstance(self._clock, HostClock), "gloo's"
            with self._clock.standing_still():
                tensor.copy_(staged)
        if divisor > 1:
            tensor.div_(divisor)


class Pending:
    """A running collective."""

    def __init__(self, communicator: Communicator, name: str, work: Waitable, span: Span | None) -> None:
        self._communicator = communicator
        self._name = name
        self._work: Waitable | None = work
        self._span = span
        self._after: Callable[[], None] = lambda: None

    def finally_do(self, after: Callable[[], None]) -> None:
        self._after = after

    def wait(self) -> None:
        """Wait for the result: gloo blocks the CPU, NCCL makes the current stream wait. Does nothing the second
        time.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        communicator = self._communicator
        try:
            communicator._clock.wait(work, self._span)
        except RuntimeError as error:
            raise communicator._explain(self._name, error) from error
        communicator.journal.end()
        self._after()


@cache
def _open_journal(folder: str | None, rank: int, process: int) -> Journal:  # noqa: ARG001  # a fork has its own
    """One per process, whatever groups it is in."""
    return Journal(Path(folder) if folder else None, rank)


def _check_parts(whole: Tensor, shard: Tensor, world: int) -> None:
    if whole.numel() != world * shard.numel() or not whole.is_contiguous() or not shard.is_contiguous():
        raise ValueError(
            f"expected `whole` to be {world} contiguous shards of {shard.numel()} elements, but got "
            f"{whole.numel()} elements"
        )
