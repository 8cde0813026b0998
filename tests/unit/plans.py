"""Predictions without a simulation, for tests of `stepscope plan`: memory and time by a formula."""

from collections.abc import Callable, Sequence

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.plan import assemble
from stepscope.jobs.plan_target import Target, choose_gpu
from stepscope.recording.rows.memory_summary import CategoryBytes, ModuleBytes
from stepscope.recording.rows.plan_result import (
    FitResult,
    Limit,
    PlannedPhase,
    PlannedRanks,
    PlannedStretch,
    PlannedTime,
    PlannedTimeline,
    PlanResult,
    Proposal,
    StepPrediction,
)
from stepscope.spec import Scalar, Workload, build_case
from stepscope.units import GIB, MIB

CONTEXT = 512 * MIB
TIMELINE = PlannedTimeline(
    areas={"parameters": (GIB, GIB, GIB), "activations": (0, GIB, 0)},
    stretches=(PlannedStretch(phase="forward", start=0, end=2), PlannedStretch(phase="backward", start=2, end=3)),
)


def workload(**settings: Scalar) -> Workload:
    return build_case({"size": "small", "context": 256, **settings}).workload


def predict(
    one: Workload,
    *,
    allocated: int,
    memory: int,
    reserved: tuple[int, int] | None = None,
    step_ns: int | None = 10_000_000,
) -> StepPrediction:
    reserved = reserved or (allocated, allocated)
    time = None
    if step_ns is not None:
        interval = (round(0.9 * step_ns), round(1.1 * step_ns))
        time = PlannedTime(
            step_ns=step_ns, interval_ns=interval, bound="launch", kernels=1000, table="H200 SXM", host="a CPU"
        )
    return StepPrediction(
        workload=one,
        parameters=128_600_000,
        fits=reserved[1] + CONTEXT <= memory,
        peak_allocated_bytes=allocated,
        peak_requested_bytes=allocated,
        reserved_bytes=reserved,
        context_bytes=CONTEXT,
        workspace_bytes=64 * MIB,
        categories=(
            CategoryBytes(category="parameters", bytes=allocated // 2),
            CategoryBytes(category="activations", bytes=allocated - allocated // 2),
        ),
        phases=(PlannedPhase(phase="forward", peak_bytes=allocated, step_ns=step_ns),),
        modules=(ModuleBytes(module="blocks.0", bytes=allocated),),
        timeline=TIMELINE,
        time=time,
        assumptions=("SDPA takes cuDNN's kernel",),
        peak_phase="backward",
        forward_flops=10**12,
    )


def plan_of(
    one: Workload,
    *,
    allocated: int,
    reserved: tuple[int, int] | None = None,
    step_ns: int | None = 10_000_000,
    memory: int | None = None,
) -> PlanResult:
    target = choose_gpu("H200", memory)
    memory = target.planned.memory_bytes
    return assemble(predict(one, allocated=allocated, memory=memory, reserved=reserved, step_ns=step_ns), target)


def fit_of(
    one: Workload, *proposals: Proposal, gib: float = 8.0, step_ns: int = 100_000_000, batch: int | None = None
) -> FitResult:
    """A search on an H200. With `batch`, that is the largest one that fits."""
    start = plan_of(one, allocated=round(gib * GIB), step_ns=step_ns)
    limit = Limit(
        setting="batch",
        value=batch,
        beyond=None if batch is None else batch + 1,
        command="stepscope bench",
        peak_allocated_bytes=120 * GIB,
        tokens_per_s=2 * (start.tokens_per_s or 0),
    )
    return FitResult(
        gpu=start.gpu,
        command="stepscope plan --size small --fit 141GB",
        start=start,
        limits=() if batch is None else (limit,),
        proposals=(Proposal(title="as it is", changes={}, command=""), *proposals),
        simulations=7,
    )


class Formula:
    """A predictor whose memory and time are functions of a workload. It remembers what it was asked."""

    def __init__(
        self,
        memory: int,
        allocated: Callable[[Workload], int],
        step_ns: Callable[[Workload], int] = lambda one: 1_000_000 * one.batch,
        refuses: Callable[[Workload], bool] = lambda _: False,
    ) -> None:
        self.target: Target = choose_gpu("H200", memory)
        self.asked: list[Workload] = []
        self.shared: list[PlannedRanks] = []
        self._allocated, self._step_ns, self._refuses = allocated, step_ns, refuses

    @property
    def simulations(self) -> int:
        return len(set(self.asked))

    def predict_all(self, workloads: Sequence[Workload]) -> list[PlanResult | StepscopeError]:
        self.asked += workloads
        return [self._answer(one) for one in workloads]

    def predict_shares(self, workload: Workload, choices: Sequence[PlannedRanks]) -> list[PlanResult | StepscopeError]:
        self.shared += choices
        return [self._answer(msgspec.structs.replace(workload, batch=workload.batch * one.count)) for one in choices]

    def _answer(self, one: Workload) -> PlanResult | StepscopeError:
        if self._refuses(one):
            return StepscopeError("too many positions")
        memory = self.target.planned.memory_bytes
        prediction = predict(one, allocated=self._allocated(one), memory=memory, step_ns=self._step_ns(one))
        return assemble(prediction, self.target)
