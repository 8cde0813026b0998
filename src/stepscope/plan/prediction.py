"""What `stepscope plan` says about one workload, computed in a worker from simulated steps."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import torch

from stepscope import cost
from stepscope.plan.assumptions import Accelerator
from stepscope.plan.data_sheets import assume_links
from stepscope.plan.owners import CATEGORIES
from stepscope.plan.places import BUILD, FORWARD
from stepscope.plan.ranks import simulate_rank, time_ranks
from stepscope.plan.replayed_memory import ReplayedMemory, TimelinePoint
from stepscope.plan.simulation import Simulation, simulate_workload
from stepscope.plan.step_time import PredictedStep, predict_step
from stepscope.recording.rows.calibration import Calibration
from stepscope.recording.rows.memory_summary import CategoryBytes, ModuleBytes
from stepscope.recording.rows.plan_result import (
    ALONE,
    PlannedPhase,
    PlannedRanks,
    PlannedStretch,
    PlannedTime,
    PlannedTimeline,
    StepPrediction,
)
from stepscope.spec import ModelShape, Training, Workload
from stepscope.spec.workload import WHOLE_STEP

STEPS = 3
OUTSIDE = "(no module)"


def predict_workload(
    workload: Workload,
    gpu: Accelerator,
    calibration: Calibration | None = None,
    ranks: PlannedRanks = ALONE,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
) -> StepPrediction:
    """The memory of a step on `gpu`, and its time if there is a table of times."""
    started = time.monotonic()
    on_stage("simulating")
    # Compiling or tracing a step would run its operators on real tensors of a GPU.
    eager = msgspec.structs.replace(workload, **dict.fromkeys(("compile", *WHOLE_STEP), False))
    training = _train(eager, ranks) if ranks.count > 1 else None
    simulation = simulate_rank(training, gpu, STEPS) if training else simulate_workload(eager, gpu, STEPS)
    on_stage("predicting the time")
    timed, remarks = _time(simulation, workload, calibration)
    memory = simulation.memory
    return StepPrediction(
        workload=workload,
        parameters=_count_parameters(workload, simulation),
        fits=simulation.fits(),
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_requested_bytes=memory.peak_requested_bytes,
        reserved_bytes=memory.reserved_bytes,
        context_bytes=gpu.context_bytes,
        workspace_bytes=memory.workspace_bytes,
        categories=tuple(CategoryBytes(category=one.category, bytes=one.bytes) for one in memory.categories),
        phases=_phases(memory, timed),
        modules=tuple(ModuleBytes(module=one.module or OUTSIDE, bytes=one.bytes) for one in memory.modules),
        timeline=_timeline(memory.timeline),
        time=_describe_time(timed, training, gpu) if timed else None,
        assumptions=(*_assume(simulation, workload), *remarks, *(_assume_links(training, gpu) if training else ())),
        ranks=ranks,
        peak_phase=memory.peak_phase,
        has_tokens=bool(workload.context),
        forward_flops=_forward_flops(workload, timed),
        versions={"torch": str(torch.__version__)},
        simulated_s=time.monotonic() - started,
    )


def _time(
    simulation: Simulation, workload: Workload, calibration: Calibration | None
) -> tuple[PredictedStep | None, list[str]]:
    """The predicted time, if there is one, and what it assumes or why there is none."""
    if calibration is None:
        return None, []
    try:
        timed = predict_step(
            simulation.operations,
            calibration,
            graph=workload.graph,
            compiled=workload.compile,
            tf32=workload.precision == "tf32",
        )
    except KeyError as missing:  # an operation of which the table has no measurement at all
        return None, [f"no step time: the table of {calibration.gpu} has {missing.args[0]}"]
    return timed, list(timed.assumptions)


def _describe_time(timed: PredictedStep, training: Training | None, gpu: Accelerator) -> PlannedTime:
    shared = time_ranks(training, gpu.name, timed) if training else None
    step_ns = shared.step_ns if shared else timed.ns
    low, high = (step_ns / timed.ns * edge for edge in timed.interval_ns)
    return PlannedTime(
        step_ns=round(step_ns),
        interval_ns=(round(low), round(high)),
        bound="communication" if shared and shared.exposed_share > 0.5 else timed.bound,
        kernels=timed.launches,
        table=timed.gpu,
        host=timed.host,
        is_rough=timed.is_rough,
        communication_ns=round(shared.communication_ns) if shared else 0,
        exposed_ns=round(shared.exposed_ns) if shared else 0,
    )


def _train(workload: Workload, ranks: PlannedRanks) -> Training:
    return Training(
        workload=workload, ranks=ranks.count, strategy=ranks.strategy, shard_optimizer=ranks.shard_optimizer
    )


def _assume_links(training: Training, gpu: Accelerator) -> list[str]:
    _, are_assumed = assume_links(gpu.name, training.ranks)
    said = "what data sheets suggest" if are_assumed else "what `stepscope comm` measured"
    return [f"links between {training.ranks} GPUs of one machine: {said}", "memory of NCCL itself is not counted"]


def _count_parameters(workload: Workload, simulation: Simulation) -> int:
    """Those of the whole model, of which a rank may have a part."""
    return cost.parameters(workload.model).total if isinstance(workload.model, ModelShape) else simulation.parameters


def _phases(memory: ReplayedMemory, timed: PredictedStep | None) -> tuple[PlannedPhase, ...]:
    times = {one.name: one for one in timed.phases} if timed else {}
    return tuple(
        PlannedPhase(
            phase=one.phase,
            peak_bytes=one.bytes,
            step_ns=round(times[one.phase].ns) if one.phase in times else None,
            bound=times[one.phase].bound if one.phase in times else None,
            kernels=times[one.phase].launches if one.phase in times else None,
        )
        for one in memory.phases
        if one.phase != BUILD
    )


def _timeline(points: Sequence[TimelinePoint]) -> PlannedTimeline:
    areas = {name: tuple(point.categories[place] for point in points) for place, name in enumerate(CATEGORIES)}
    stretches, start = [], 0
    for phase, inside in groupby(points, key=lambda point: point.phase):
        end = start + len(list(inside))
        stretches.append(PlannedStretch(phase=phase, start=start, end=end))
        start = end
    return PlannedTimeline(
        areas={name: values for name, values in areas.items() if any(values)}, stretches=tuple(stretches)
    )


def _assume(simulation: Simulation, workload: Workload) -> list[str]:
    said = [*simulation.assumptions, f"PyTorch {torch.__version__} with the default settings of its allocator"]
    if simulation.sdpa_kernels:
        said.append(f"scaled_dot_product_attention takes the kernel: {', '.join(sorted(simulation.sdpa_kernels))}")
    if workload.compile or workload.is_program:
        said.append("memory is that of the same step without torch.compile, fused kernels and CUDA graphs")
    return said


def _forward_flops(workload: Workload, timed: PredictedStep | None) -> int | None:
    if isinstance(workload.model, ModelShape):
        return cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
    return sum(one.flops for one in timed.kernels if one.phase == FORWARD) if timed else None
