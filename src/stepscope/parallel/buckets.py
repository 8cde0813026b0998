"""Gradients in one contiguous buffer, which is one message.

A bucket holds gradients of one dtype on one device. A gradient is scaled by 1/ranks while it is copied in, so that the
sum over ranks is the average and no division is needed; the all-reduce is in place, and afterwards each parameter's
`.grad` is its part of the buffer. Each gradient has a flag in the same message that says whether this rank had one: a
parameter that no rank used must keep `.grad` None, or the optimizer would apply weight decay to it.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.errors import StepscopeError
from stepscope.parallel.communicator import Communicator, Pending


class BucketLimits(NamedTuple):
    """The maximum size of each bucket in bytes. A larger parameter gets its own bucket.

    Buckets grow from `edge` to `usual` and shrink again. The first is small, so that communication starts early.
    Towards the end each holds half of what is left: it is sent while the other half is being computed, and little is
    left to wait for after the backward pass.
    """

    edge: float
    usual: float

    def next_bytes(self, before_bytes: int, left_bytes: int) -> float:
        """The size of a bucket, given the bytes before it, and the bytes in it and after it."""
        return min(self.usual, max(self.edge, min(before_bytes, left_bytes / 2)))


SEPARATE = BucketLimits(0, 0)
TOGETHER = BucketLimits(inf, inf)
EDGE_BYTES = 1 << 20


def plan_buckets(sizes: Sequence[tuple[Hashable, int]], limits: BucketLimits) -> list[list[int]]:
    """Return indices, bucket by bucket, in the order in which buckets become complete.

    `sizes` has a kind and a number of bytes for each gradient, in the order in which they become ready; a bucket holds
    one kind.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for position, (kind, _) in enumerate(sizes):
        by_kind.setdefault(kind, []).append(position)
    sizes_bytes = [size_bytes for _, size_bytes in sizes]
    buckets = [bucket for positions in by_kind.values() for bucket in _cut(positions, sizes_bytes, limits)]
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _cut(positions: list[int], sizes_bytes: list[int], limits: BucketLimits) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    before_bytes, filled_bytes = 0, 0
    left_bytes = sum(sizes_bytes[position] for position in positions)
    limit_bytes = limits.next_bytes(before_bytes, left_bytes)
    for position in positions:
        if buckets[-1] and filled_bytes + sizes_bytes[position] > limit_bytes:
            buckets.append([])
            before_bytes, left_bytes = before_bytes + filled_bytes, left_bytes - filled_bytes
            limit_bytes, filled_bytes = limits.next_bytes(before_bytes, left_bytes), 0
        buckets[-1].append(position)
        filled_bytes += sizes_bytes[position]
    return buckets


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter, and its position in a bucket."""

    index: int
    name: str
    param: Tensor
    bucket: "Bucket"
    view: Tensor | None = None
    filled: bool = False
    # How often its gradient arrived since gradients were last averaged, and how often it did the time before: autograd
    # calls once per backward pass, and once per use under reentrant checkpointing.
    arrived: int = 0
    expected: int = 1


class Bucket:
    """Some gradients, and the message they are sent in."""

    def __init__(self, slots: Sequence[Slot], name: str, scale: float) -> None:
        self.slots = slots
        self.name = name
        self._scale = scale
        # Multiplying a small tensor by a Python number takes 13 µs, and by a zero-dimensional tensor 2 µs.
        self._factor = torch.tensor(scale, dtype=torch.float64)
        self._buffer: Tensor | None = None
        self._flags: Tensor | None = None
        self._nothing_missing: Tensor | None = None
        self._missing = False
        self._pending: Pending | None = None
        # Slots whose gradient has not arrived as often as expected.
        self.awaited = len(slots)
        for slot in slots:
            slot.bucket = self
            slot.view = None

    @property
    def is_out(self) -> bool:
        """Sent, and not yet delivered: the buffer must not be touched."""
        return self._pending is not None

    def take(self, slot: Slot) -> None:
        """Move the parameter's gradient into the buffer.

        `.grad` is None from here on, until it is delivered. So a later backward pass finds nothing to add to, and
        cannot write into a buffer that is being sent.
        """
        grad = slot.param.grad
        assert grad is not None, "called with a gradient"
        if grad.layout != torch.strided:
            raise _refuse_sparse(slot.name)
        slot.param.grad = None
        view = slot.view if slot.view is not None else self._lay_out(slot)
        if grad.requires_grad:  # under create_graph
            grad = grad.detach()
        if slot.filled:
            view.add_(grad, alpha=self._scale)
        else:
            # In place if the gradient is in the bucket already.
            torch.mul(grad, self._factor, out=view)
        slot.filled = True

    def send(self, communicator: Communicator, *, late: bool) -> None:
        """Start the all-reduce, with zeros where this rank has no gradient. `late` tells the other ranks that this one
        has more for a bucket that was already sent.
        """
        buffer, flags = self._complete(late=late)
        self._missing = not all(slot.filled for slot in self.slots)
        if self._missing:
            self._fill_gaps(flags)
        self._pending = communicator.all_reduce(buffer, self.name, average=False)

    def deliver(self) -> None:
        """Wait for the averages, and set them as `.grad` where any rank had one."""
        assert self._pending is not None, "delivered only once"
        assert self._flags is not None, "sent"
        self._pending.wait()
        self._pending = None
        # On a GPU a read waits for all work before it, so only read what is not known otherwise.
        used = self._flags.tolist() if self._missing else None
        for position, slot in enumerate(self.slots):
            if used is None or used[position] > 0:
                _deliver(slot)
            slot.filled = False
        self.awaited = len(self.slots)

    def reports_late(self) -> bool:
        """Whether any rank marked this message with more gradients for another bucket."""
        assert self._flags is not None, "sent"
        return self._flags[-1].item() > 0

    def _complete(self, *, late: bool) -> tuple[Tensor, Tensor]:
        for slot in self.slots:
            if slot.param.grad is not None:
                self.take(slot)
        if self._buffer is None:
            self._lay_out(self.slots[0])
        assert self._buffer is not None
        assert self._flags is not None
        assert self._nothing_missing is not None
        self._flags.copy_(self._nothing_missing)
        if late:
            self._flags[-1:].fill_(self._scale)
        return self._buffer, self._flags

    def _fill_gaps(self, flags: Tensor) -> None:
        for position, slot in enumerate(self.slots):
            if not slot.filled:
                assert slot.view is not None, "already laid out"
                slot.view.zero_()
                flags[position : position + 1].zero_()

    def _lay_out(self, wanted: Slot) -> Tensor:
        """Allocate the buffer when it is first needed: not before the first backward pass, and not while gradients are
        still in the buckets that these replace.
        """
        first = self.slots[0].param
        sizes = [slot.param.numel() for slot in self.slots]
        total = sum(sizes)
        self._buffer = torch.empty(total + len(sizes) + 1, dtype=first.dtype, device=first.device)
        self._flags = self._buffer[total:]
        self._nothing_missing = torch.full_like(self._flags, self._scale)
        self._nothing_missing[-1:].zero_()
        for slot, part in zip(self.slots, torch.split(self._buffer[:total], sizes), strict=True):
            # In the parameter's memory layout: optimizers are fastest when gradients have the same.
            strides = torch.empty_like(slot.param, device="meta").stride()
            slot.view = part.as_strided(slot.param.shape, strides)
        assert wanted.view is not None, "belongs to this bucket"
        return wanted.view


def build_buckets(slots: Iterable[Slot], limits: BucketLimits, scale: float) -> list[Bucket]:
    """Build buckets for slots in the order in which their gradients become ready."""
    in_order = list(slots)
    sizes = [((slot.param.dtype, slot.param.device), slot.param.nbytes) for slot in in_order]
    plan = plan_buckets(sizes, limits)
    buckets = []
    for number, positions in enumerate(plan, 1):
        members = [in_order[position] for position in positions]
        single = limits is SEPARATE
        name = f"the gradient of {members[0].name}" if single else f"gradients, bucket {number} of {len(plan)}"
        buckets.append(Bucket(members, name, scale))
    return buckets


def _deliver(slot: Slot) -> None:
    late, slot.param.grad = slot.param.grad, slot.view
    if late is not None:
        assert slot.view is not None, "already laid out"
        slot.view.add_(late)


def _refuse_sparse(name: str) -> StepscopeError:
    return StepscopeError(
        f"sparse gradients are not supported: `{name}`",
        detail="ranks may have different rows, which an all-reduce cannot sum",
        hint="torch.nn.Embedding(..., sparse=False)",
    )
