"""The time of a step: the host calls operators, the GPU runs their kernels, and whichever is later decides.

The host runs ahead of the GPU as long as it can, and the GPU waits for a kernel that is not there yet. Phases end where
their last kernel does, as CUDA events see it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

import msgspec

from stepscope.planner.step_time.compiled_step import compile_step
from stepscope.planner.step_time.fusion import name_values
from stepscope.planner.step_time.host_time import HostModel, share_modules
from stepscope.planner.step_time.kernels_of import Bound, KernelModel, PlannedKernel
from stepscope.planner.step_time.measured_times import MeasuredTimes
from stepscope.planner.step_time.operator_kinds import FREE, GROUPED, short_name, waits_for_gpu
from stepscope.planner.step_time.rewritten_step import merge_products, use_working_weights
from stepscope.recording.rows.calibration import Calibration

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation

_SIGMAS = 2.0
_HOSTS = 5  # to average over
_REPEATED = 8  # operators in a row that no backward pass has in common with its forward pass
_SCALED_ERROR = 0.25  # of times that were scaled by data sheets
_MODEL_ERROR = 0.04  # of sums of kernels, beyond the error of single ones
_HOST_NOISE = 0.1  # between machines of the same kind, and between moments of one


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

    @cache
    def follow(host_factor: float, gpu_factor: float) -> _TwoClocks:
        """The step on a host and a GPU that take so much longer than expected."""
        timeline = _TwoClocks(latency_ns)
        for position, operation in enumerate(operations):
            timeline.enter(operation.phase)
            timeline.call(host_factor * costs[position])
            if kernel := launched.get(position):
                timeline.launch(gpu_factor * max(500.0, kernel.ns - saved_ns * kernel.launches))
            if waits_for_gpu(operation):
                timeline.wait(calibration.constants.get("item_ns", 10_000.0))
        timeline.finish()
        return timeline

    timeline = follow(1.0, 1.0)
    errors = _host_error(timeline, host), math.hypot(_gpu_error(kernels), _MODEL_ERROR)
    scaled = _SCALED_ERROR if calibration.scaled_from else 0.0
    low, high = (_edge(follow, errors, scaled, sigmas) for sigmas in (-_SIGMAS, _SIGMAS))
    return _summarize(timeline, _average(follow, errors[0]), kernels, calibration, interval_ns=(low, high))


def _average(follow: Callable[[float, float], "_TwoClocks"], error: float) -> dict[str, float]:
    """The phases of a step, averaged over hosts. Where host and GPU take about as long, a slower host makes the step
    longer, and a faster one does not make it shorter."""
    hosts = [math.exp(error * NormalDist().inv_cdf((number + 0.5) / _HOSTS)) for number in range(_HOSTS)]
    totals = [follow(host, 1.0).totals for host in hosts]
    return {name: fmean(one[name] for one in totals) for name in totals[0]}


def _edge(
    follow: Callable[[float, float], "_TwoClocks"], errors: tuple[float, float], scaled: float, sigmas: float
) -> float:
    """The time of a step that is off by so many standard deviations. How much a host or a GPU that is slower than
    expected matters depends on which one the step waits for, and near the balance of both, one of them matters only if
    it is slower."""
    usual_ns, other_host_ns, other_gpu_ns = (
        follow(host_factor, gpu_factor).total_ns
        for host_factor, gpu_factor in (
            (1.0, 1.0),
            (math.exp(sigmas * errors[0]), 1.0),
            (1.0, math.exp(sigmas * errors[1])),
        )
    )
    if not usual_ns:
        return 0.0
    off = math.hypot(math.log(other_host_ns / usual_ns), math.log(other_gpu_ns / usual_ns), sigmas * scaled)
    return usual_ns * math.exp(math.copysign(off, sigmas))


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

    @property
    def total_ns(self) -> float:
        return sum(self.totals.values())

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
    again, checkpointed = find_repeated(operations)
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


def find_repeated(operations: Sequence["Operation"]) -> tuple[set[int], set[int]]:
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
    timeline: _TwoClocks,
    phases_ns: Mapping[str, float],
    kernels: Sequence[PlannedKernel],
    calibration: Calibration,
    *,
    interval_ns: tuple[float, float],
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
        for name, took_ns in phases_ns.items()
    )
    return PredictedStep(
        ns=sum(phases_ns.values()),
        interval_ns=interval_ns,
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


def _host_error(timeline: _TwoClocks, host: HostModel) -> float:
    """The relative standard deviation of the host's time, which is off for all calls of a phase together."""
    costs = timeline.host_by_phase
    fitted = math.hypot(*(cost * host.errors.get(phase, 0.2) for phase, cost in costs.items()))
    return math.hypot(fitted / max(1.0, sum(costs.values())), _HOST_NOISE)


def _gpu_error(kernels: Sequence[PlannedKernel]) -> float:
    """The same of the kernels. Those of one kind err together."""
    by_name: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_name[kernel.name] += kernel.ns * kernel.error
    return math.hypot(*by_name.values()) / max(1.0, sum(kernel.ns for kernel in kernels))
