"""One rank of `parallel_speed.py`: builds every strategy for one model, checks them, and times steps on request.

A rank lives as long as its network: importing torch and sending a model's parameters to the other rank take longer than
many measurements. It serves the requests below, one at a time, over a pipe; both ranks get the same.
"""

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shaped_link import Side, enter
from stepscope.measure.collectives import measure_collectives
from stepscope.nn import TransformerLM
from stepscope.parallel import DDP, FSDP, Communicator, ShardedOptimizer
from stepscope.parallel.group import join
from stepscope.recording.rows.collective_case import CommCase, CommOutcome
from stepscope.spec import ModelShape

LEARNING_RATE = 1e-3
TIMEOUT_S = 120.0
BUCKET_MB = 25.0
ALONE = "alone"  # the step without synchronization, which all others are compared with
DDP_NAMES = ("naive", "flat", "overlap", "bucketed")
TORCH_DDP_NAMES = ("torch DDP", "torch DDP, bucket view")
ZERO_NAMES = ("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer, bucket view")
NAMES = (ALONE, *DDP_NAMES, *TORCH_DDP_NAMES, "ShardedOptimizer", *ZERO_NAMES, "FSDP", "fully_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained: a model, and each rank's own tokens."""

    shape: ModelShape
    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step on one rank. Only our strategies have the communicator's own count."""

    forward_ns: int
    backward_ns: int  # including the wait for remaining communication
    optimizer_ns: int
    waited_ns: int | None = None
    communicated_ns: int | None = None

    @property
    def step_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.optimizer_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the parameters after two steps are from the reference's, relative to how far they moved."""

    largest: float
    bitwise: bool


Question = (
    tuple[Literal["measure"], tuple[CommCase, ...]]
    | tuple[Literal["copy"]]
    | tuple[Literal["check"], tuple[str, ...]]
    | tuple[Literal["run"], str, int]
    | tuple[Literal["leave"]]
)


def serve(rank: int, world: int, side: Side | None, meeting: Path, job: Job, pipe: Connection) -> None:
    """The process of a rank. It exits on request, or when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that started this one
    if side is not None:
        enter(side)
    torch.set_num_threads(1)
    with join(backend="gloo", timeout_s=TIMEOUT_S, meeting=meeting, rank=rank, world=world) as communicator:
        pipe.send("joined")
        one = _Rank(job, communicator)
        while True:
            try:
                question = pipe.recv()
            except EOFError:  # the run was killed
                os._exit(1)
            if question[0] == "leave":
                break
            pipe.send(one.answer(question))


@dataclass(kw_only=True)
class Way:
    """One strategy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]
    whole: Callable[[], list[Tensor]]
    ours: bool = False


class _Rank:
    def __init__(self, job: Job, communicator: Communicator) -> None:
        self._job = job
        self._communicator = communicator
        self._ways: dict[str, Way] = {}
        generator = torch.Generator().manual_seed(0)
        shape = (communicator.world, job.batch, job.context + 1)
        self._tokens_RBL = torch.randint(job.shape.vocab, shape, generator=generator)

    def answer(self, question: Question) -> object:
        match question:
            case ("measure", cases):
                return list(self._measure(cases))
            case ("copy",):
                return self._time_copies()
            case ("check", names):
                return {name: self._check(name) for name in names}
            case ("run", name, steps):
                return [self._time_step(self._ways[name]) for _ in range(steps)]
        raise AssertionError(f"unknown request: {question[0]}")

    def _measure(self, cases: tuple[CommCase, ...]) -> list[CommOutcome]:
        return list(measure_collectives(cases, self._communicator, device="cpu"))

    def _time_copies(self) -> int:
        """The cost of moving all gradients into buffers, which our strategies do during backward."""
        sizes = [param.numel() for param in self._build_model().parameters()]
        pairs = [(torch.ones(size), torch.empty(size)) for size in sizes]
        times = []
        for _ in range(5):
            start = time.perf_counter_ns()
            for gradient, buffer in pairs:
                torch.mul(gradient, 0.5, out=buffer)
            times.append(time.perf_counter_ns() - start)
        return sorted(times)[2]

    # --- Correctness first
    # ------------------------------------------------------------------------------------------------

    def _check(self, name: str) -> Agreement:
        """Two steps, compared with one process that has the batches of all ranks. The step without synchronization is
        not compared.
        """
        self._ways[name] = way = build_way(name, self._build_model())
        for _ in range(2):
            self._step(way)
        if name == ALONE:
            return Agreement(largest=0.0, bitwise=True)
        found, wanted = way.whole(), self._reference()
        before = [param.detach() for param in self._build_model().parameters()]
        bitwise = all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        return Agreement(largest=_distance(found, wanted) / _distance(wanted, before), bitwise=bitwise)

    def _reference(self) -> list[Tensor]:
        """Plain training on the batches of all ranks, with averaged gradients, once for all checks."""
        if not hasattr(self, "_wanted"):
            model = self._build_model()
            optimizer = _make_adam(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                for rank in range(self._communicator.world):
                    (self._loss(model, rank) / self._communicator.world).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            self._wanted = [param.detach() for param in model.parameters()]
        return self._wanted

    # --- Then time
    # ----------------------------------------------------------------------------------------------------------

    def _time_step(self, way: Way) -> Sample:
        self._communicator.barrier("before a step")
        self._communicator.take_time()
        marks = self._step(way)
        forward_ns, backward_ns, optimizer_ns = (end - start for start, end in itertools.pairwise(marks))
        taken = self._communicator.take_time()
        return Sample(
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            optimizer_ns=optimizer_ns,
            waited_ns=taken.exposed_ns if way.ours else None,
            communicated_ns=taken.busy_ns if way.ours else None,
        )

    def _step(self, way: Way) -> list[int]:
        clock = time.perf_counter_ns
        marks = [clock()]
        way.optimizer.zero_grad()
        loss = self._loss(way.model, self._communicator.rank)
        marks.append(clock())
        loss.backward()  # type: ignore[no-untyped-call]
        way.finish()
        marks.append(clock())
        way.optimizer.step()
        marks.append(clock())
        return marks

    def _loss(self, model: nn.Module, rank: int) -> Tensor:
        tokens_BL = self._tokens_RBL[rank]
        logits_BLV = model(tokens_BL[:, :-1])
        return nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())

    def _build_model(self) -> TransformerLM:
        torch.manual_seed(0)
        shape = self._job.shape
        return TransformerLM(
            vocab=shape.vocab,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            max_context=self._job.context,
        )


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    return math.sqrt(sum(float((one - other).square().sum()) for one, other in zip(some, others, strict=True)))


def _make_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def build_way(name: str, model: TransformerLM) -> Way:
    if name in TORCH_DDP_NAMES:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=name == TORCH_DDP_NAMES[1])
        return _whole_way(wrapped, _make_adam(wrapped.parameters()), model)
    match name:
        case "alone":
            return _whole_way(model, _make_adam(model.parameters()), model)
        case "naive" | "flat" | "overlap" | "bucketed":
            ddp = DDP(model, name, bucket_mb=BUCKET_MB)
            return _whole_way(ddp, _make_adam(ddp.parameters()), model, ddp.finish_gradient_synchronization)
        case "FSDP":
            names = [name for name, _ in model.named_parameters()]
            fsdp = FSDP(model)
            return Way(
                model=fsdp,
                optimizer=_make_adam(fsdp.parameters()),
                finish=fsdp.finish_gradient_synchronization,
                whole=lambda: _pick(fsdp.gather_full_params(), names),
                ours=True,
            )
        case "fully_shard":
            return _build_fully_shard(model)
        case _:
            return _build_sharded(name, model)


def _pick(params: Mapping[str, Tensor], names: list[str]) -> list[Tensor]:
    return [params[name] for name in names]


def _whole_way(
    model: nn.Module, optimizer: torch.optim.Optimizer, inner: nn.Module, finish: Callable[[], None] | None = None
) -> Way:
    """For strategies that keep parameters whole on every rank. `finish` is what ours have and torch's do not."""
    return Way(
        model=model,
        optimizer=optimizer,
        finish=finish or (lambda: None),
        whole=lambda: [param.detach() for param in inner.parameters()],
        ours=finish is not None,
    )


def _build_sharded(name: str, model: TransformerLM) -> Way:
    """Our bucketed DDP under all of them, so that they differ only in the optimizer."""
    ddp = DDP(model, "bucketed", bucket_mb=BUCKET_MB)
    optimizer: torch.optim.Optimizer
    if name == "ShardedOptimizer":
        optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    else:
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=name == ZERO_NAMES[1],
            lr=LEARNING_RATE,
            fused=True,
        )
    way = _whole_way(ddp, optimizer, model, ddp.finish_gradient_synchronization)
    way.ours = name == "ShardedOptimizer"  # the other's messages bypass our communicator
    return way


def _build_fully_shard(model: TransformerLM) -> Way:
    """As its authors recommend: each block, and the rest at the root."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def whole() -> list[Tensor]:
        return [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[attr-defined]

    return Way(model=model, optimizer=_make_adam(model.parameters()), finish=lambda: None, whole=whole)
