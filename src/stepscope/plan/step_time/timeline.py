"""The time of a step: the host calls operators, the GPU runs their kernels, and whichever is later decides.

The host runs ahead of the GPU as long as it can, and the GPU waits for a kernel that is not there yet. Phases end where
their last kernel does, as CUDA events see it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.plan.step_time.compiled_step import compile_step
from stepscope.plan.step_time.fusion import name_values
from stepscope.plan.step_time.host_time import HostModel, share_modules
from stepscope.plan.step_time.kernels_of import Bound, KernelModel, PlannedKernel
from stepscope.plan.step_time.measured_times import MeasuredTimes
from stepscope.plan.step_time.operator_kinds import FREE, GROUPED, short_name, waits_for_gpu
from stepscope.plan.step_time.rewritten_step import merge_products, use_working_weights
from stepscope.recording.rows.calibration import Calibration

if TYPE_CHECKING:
    from stepscope.plan.operation import Operation

_SIGMAS = 2.0
_REPEATED = 8  # operators in a row that no backward pass has in common with its forward pass
_SCALED_ERROR = 0.25  # of times that were scaled by data sheets
_MODEL_ERROR = 0.04  # of sums of kernels, beyond the error of single ones
_HOST_NOISE = 0.1  # of steps that wait for the host, next to the same step on another machine of the same kind
_EARLY = 0.7  # of a step: if the host needs less, the step does not wait for it


class PredictedPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase: its time, the GPU's busy time, the host's time, and what most of the time goes to."""

    name: str
    ns: float
    gpu_ns: float
    host_ns: float
    bound: Bound
    launches: int


class PredictedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted step. `interval_ns` has the true time in about nineteen of twenty cases. `gpu` and `host` are those
    of the calibration; it `is_rough` if the GPU's times were scaled from another one's."""

    ns: float
    interval_ns: tuple[float, float]
    bound: Bound
    phases: tuple[PredictedPhase, ...]
    gpu: str
    host: str
    is_rough: bool
    assumptions: tuple[str, ...]
    gpu_ns: float
    host_ns: float
    launches: int
    flops: int
    kernels: tuple[PlannedKernel, ...]


def predict_step(
    operations: Sequence["Operation"],
    calibration: Calibration,
    *,
    graph: bool = False,
    compiled: bool = False,
    tf32: bool = False,
    working_weights: bool = False,
    merge: bool = False,
) -> PredictedStep:
    """Predict the step that calls these operators. With `graph` it is replayed from a CUDA graph, without the host. The
    other settings are those of a `Workload`; the operators are those of the step without them."""
    operations = name_values(operations) if compiled else operations
    operations = use_working_weights(operations) if working_weights else operations
    operations = merge_products(operations) if merge else operations
    model = KernelModel(MeasuredTimes(calibration), tf32=tf32)
    host = HostModel(calibration)
    costs = host_costs(operations, host)
    if compiled:
        kernels, costs = compile_step(operations, model, costs, host, calibration.hardware, with_loss=graph)
    else:
        kernels = [kernel for position, one in enumerate(operations) if (kernel := model.kernels_of(position, one))]
    if graph:
        costs = [0.0] * len(operations)
    kernels = slow_down(kernels, calibration, host_ns=sum(costs))
    predicted = _run(operations, kernels, calibration, host, costs, graph=graph)
    if any(short_name(one.name) == GROUPED for one in operations):
        said = "grouped GEMMs are timed as ordinary ones, with equally many tokens for every expert: approximate"
        predicted = msgspec.structs.replace(predicted, assumptions=(*predicted.assumptions, said))
    return predicted


def slow_down(kernels: Sequence[PlannedKernel], calibration: Calibration, *, host_ns: float) -> list[PlannedKernel]:
    """Kernels under continuous load. A GPU that multiplies matrices all the time reaches its power limit and lowers its
    clock; the more of the time it does something else or waits, the less. The square of the share fits a mix of
    products and copies, which runs 7% slower after a second on an H200."""
    gpu_ns = sum(kernel.ns for kernel in kernels)
    multiplying_ns = sum(kernel.ns for kernel in kernels if kernel.bound == "compute")
    share = multiplying_ns / max(1.0, gpu_ns, host_ns)
    changed = []
    for kernel in kernels:
        if kernel.bound == "compute":
            factor = 1 + (_load_ratio(calibration, kernel.precision) - 1) * share**2
            kernel = msgspec.structs.replace(kernel, ns=kernel.ns * factor)
        changed.append(kernel)
    return changed


def _load_ratio(calibration: Calibration, precision: str) -> float:
    """How much slower a large product is after a second of them."""
    precision = "bf16" if precision == "fp16" else precision
    for side in (8192, 4096):
        burst = calibration.constants.get(f"burst_{precision}_{side}_ns")
        sustained = calibration.constants.get(f"sustained_{precision}_{side}_ns")
        if burst and sustained:
            return max(1.0, sustained / burst)
    return 1.0


def _run(
    operations: Sequence["Operation"],
    kernels: Sequence[PlannedKernel],
    calibration: Calibration,
    host: HostModel,
    costs: Sequence[float],
    *,
    graph: bool,
) -> PredictedStep:
    launched = {kernel.position: kernel for kernel in kernels}
    latency_ns = 0.0 if graph else calibration.constants.get("launch_to_start_ns", 8000.0) / 2
    saved_ns = _gap_saved(calibration) if graph else 0.0
    timeline = _TwoClocks(latency_ns)
    for position, operation in enumerate(operations):
        timeline.enter(operation.phase)
        timeline.call(costs[position])
        if kernel := launched.get(position):
            timeline.launch(max(500.0, kernel.ns - saved_ns * kernel.launches))
        if waits_for_gpu(operation):
            timeline.wait(calibration.constants.get("item_ns", 10_000.0))
    timeline.finish()
    return _summarize(timeline, kernels, host, calibration)


class _TwoClocks:
    """Two clocks, in nanoseconds from the start of the step, and where each phase ended on the GPU."""

    def __init__(self, latency_ns: float) -> None:
        self._latency_ns = latency_ns
        self.host_ns = self.gpu_ns = 0.0
        self.phase = ""
        self.ends: dict[str, float] = {}
        self.host_by_phase: dict[str, float] = defaultdict(float)
        self.gpu_by_phase: dict[str, float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)
        self._marked_ns = 0.0

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.finish()
            self.phase = phase

    def finish(self) -> None:
        """The event at the end of a phase runs when the GPU reaches it."""
        if self.phase:
            now_ns = max(self.gpu_ns, self.host_ns + self._latency_ns)
            self.totals[self.phase] += now_ns - self._marked_ns
            self._marked_ns = now_ns

    def call(self, cost_ns: float) -> None:
        self.host_ns += cost_ns
        self.host_by_phase[self.phase] += cost_ns

    def launch(self, kernel_ns: float) -> None:
        self.gpu_ns = max(self.gpu_ns, self.host_ns + self._latency_ns) + kernel_ns
        self.gpu_by_phase[self.phase] += kernel_ns

    def wait(self, cost_ns: float) -> None:
        self.host_ns = max(self.host_ns, self.gpu_ns) + cost_ns


def host_costs(operations: Sequence["Operation"], host: HostModel) -> list[float]:
    """The host's time before each operator's launch."""
    again, checkpointed = _find_repeated(operations)
    phases = ["forward" if position in again else one.phase for position, one in enumerate(operations)]
    costs = [host.cost(one, phase) for one, phase in zip(operations, phases, strict=True)]
    for position, entered in share_modules(operations).items():
        costs[position] += entered * host.module_call(phases[position])
    for positions, factor in ((again, host.again), (checkpointed, host.checkpointed)):
        for position in positions:
            costs[position] *= factor
    before = ""
    for position, one in enumerate(operations):
        if one.phase != before:
            costs[position] += host.start(one.phase)
            before = one.phase
    _replace_update(operations, costs, host)
    if not any(one.phase == "backward" for one in operations):  # inference: autograd records nothing
        costs = [host.free_of_graph * cost for cost in costs]
    return costs


def _replace_update(operations: Sequence["Operation"], costs: list[float], host: HostModel) -> None:
    """An optimizer that works on lists takes most of its time between the operators."""
    positions = [position for position, one in enumerate(operations) if one.phase == "optimizer"]
    took_ns = host.update([operations[position] for position in positions])
    if took_ns is not None:
        for position in positions:
            costs[position] = took_ns / len(positions)


def _find_repeated(operations: Sequence["Operation"]) -> tuple[set[int], set[int]]:
    """The operators of backward that belong to a forward pass that a checkpoint repeats, and those of forward that are
    repeated: runs of operators that are the same, in the same modules and the same order."""
    listed = [position for position, one in enumerate(operations) if short_name(one.name) not in FREE]
    keys = [
        (one.name, one.module, tuple(fact.shape for fact in one.outputs))
        for one in (operations[position] for position in listed)
    ]
    starts: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place in range(len(listed) - _REPEATED):
        if operations[listed[place]].phase == "forward":
            starts[tuple(keys[place : place + _REPEATED])].append(place)
    again: set[int] = set()
    checkpointed: set[int] = set()
    place = 0
    while place < len(listed):
        length, first = 0, 0
        if operations[listed[place]].phase == "backward":
            found = starts.get(tuple(keys[place : place + _REPEATED]), [])
            length, first = max(((_common_length(keys, start, place), start) for start in found), default=(0, 0))
        again.update(listed[place : place + length])
        checkpointed.update(listed[first : first + length])
        place += max(1, length)
    return again, checkpointed


def _common_length(keys: Sequence[object], first: int, second: int) -> int:
    length = 0
    while second + length < len(keys) and first + length < second and keys[first + length] == keys[second + length]:
        length += 1
    return length


def _gap_saved(calibration: Calibration) -> float:
    """How much closer kernels follow each other in a CUDA graph than in a stream."""
    constants = calibration.constants
    saved = [
        constants.get(f"{size}_kernel_in_stream_ns", 0.0) - constants.get(f"{size}_kernel_in_graph_ns", 0.0)
        for size in ("tiny", "large")
    ]
    return max(0.0, *saved)


def _summarize(
    timeline: _TwoClocks, kernels: Sequence[PlannedKernel], host: HostModel, calibration: Calibration
) -> PredictedStep:
    phases = tuple(
        PredictedPhase(
            name=name,
            ns=took_ns,
            gpu_ns=timeline.gpu_by_phase[name],
            host_ns=timeline.host_by_phase[name],
            bound=_bound(name, took_ns, timeline.gpu_by_phase[name], kernels),
            launches=sum(kernel.launches for kernel in kernels if kernel.phase == name),
        )
        for name, took_ns in timeline.totals.items()
    )
    total_ns = sum(phase.ns for phase in phases)
    error = math.hypot(_SCALED_ERROR if calibration.scaled_from else 0.0, _error(phases, kernels, host))
    return PredictedStep(
        ns=total_ns,
        interval_ns=(total_ns * math.exp(-_SIGMAS * error), total_ns * math.exp(_SIGMAS * error)),
        bound=max(phases, key=lambda phase: phase.ns).bound if phases else "launch",
        phases=phases,
        gpu=calibration.gpu,
        host=calibration.host,
        is_rough=bool(calibration.scaled_from),
        assumptions=_assumptions(calibration),
        gpu_ns=sum(timeline.gpu_by_phase.values()),
        host_ns=timeline.host_ns,
        launches=sum(kernel.launches for kernel in kernels),
        flops=sum(kernel.flops for kernel in kernels),
        kernels=tuple(kernels),
    )


def _assumptions(calibration: Calibration) -> tuple[str, ...]:
    scaled = calibration.scaled_from
    table = f"times of {calibration.gpu}" + (f", scaled by data sheets from {scaled}" if scaled else ", measured")
    host = f"a host like the calibrated one: {calibration.host}"
    if not calibration.trials:
        host = "a typical host, because the calibration has no trials of one"
    return (f"{table} with PyTorch {calibration.torch}", host)


def _bound(name: str, took_ns: float, gpu_ns: float, kernels: Sequence[PlannedKernel]) -> Bound:
    if gpu_ns < 0.85 * took_ns:
        return "launch"
    by_bound: dict[Bound, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.phase == name:
            by_bound[kernel.bound] += kernel.ns
    return max(by_bound, key=lambda bound: by_bound[bound], default="memory")


def _error(phases: Sequence[PredictedPhase], kernels: Sequence[PlannedKernel], host: HostModel) -> float:
    """The relative standard deviation. Kernels of one kind err together, and so do the calls of a phase."""
    by_name: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_name[kernel.name] += kernel.ns * kernel.error
    gpu_ns = sum(phase.gpu_ns for phase in phases)
    gpu_error = math.sqrt(sum(value**2 for value in by_name.values())) / max(1.0, gpu_ns)
    variance, total_ns = 0.0, sum(phase.ns for phase in phases)
    for phase in phases:
        error = host.errors.get(phase.name, 0.2) if phase.bound == "launch" else math.hypot(gpu_error, _MODEL_ERROR)
        variance += (phase.ns * error) ** 2
    waits = sum(phase.host_ns for phase in phases) > _EARLY * total_ns
    return math.hypot(math.sqrt(variance) / max(1.0, total_ns), _HOST_NOISE if waits else 0.0)
