"""What `stepscope plan` says about one workload, computed in a worker from simulated steps."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import torch

from stepscope import cost
from stepscope.cost.sharding import Sharding
from stepscope.planner.assumptions import Accelerator
from stepscope.planner.places import BUILD, FORWARD
from stepscope.planner.ranks import RankMemory
from stepscope.planner.replayed_memory import ReplayedMemory, TimelinePoint
from stepscope.planner.simulation import Simulation, simulate_workload, without_collector
from stepscope.planner.step_time import NotCalibratedError, PredictedStep, predict_step
from stepscope.planner.step_time.rank_time import time_ranks
from stepscope.recording.memory.labels import CATEGORIES
from stepscope.recording.rows.calibration import Calibration
from stepscope.recording.rows.memory_summary import ModuleBytes
from stepscope.recording.rows.plan_result import (
    ALONE,
    NO_TIME,
    PlannedPhase,
    PlannedRanks,
    PlannedStretch,
    PlannedTime,
    PlannedTimeline,
    StepPrediction,
)
from stepscope.spec import ModelShape, Workload

STEPS = 3
OUTSIDE = "(no module)"
HALF = 0.5  # of a step: above that, communication is what bounds it


def predict_workload(
    workload: Workload,
    gpu: Accelerator,
    calibration: Calibration | None = None,
    choices: Sequence[PlannedRanks] = (ALONE,),
    *,
    on_stage: Callable[[str], None] = lambda _: None,
) -> tuple[StepPrediction, ...]:
    """The memory of a step on `gpu`, and its time if there is a table of times. `choices` are numbers of GPUs that each
    have the batch of the workload; the memory is that of one of them. All of them need one simulation."""
    with without_collector():
        started = time.monotonic()
        on_stage("simulating")
        simulation = simulate_workload(workload, gpu, STEPS, calibration)
        on_stage("predicting the time")
        timed, remarks = _time(simulation, workload, calibration)
        took_s = time.monotonic() - started
        return tuple(_describe(simulation, workload, timed, remarks, ranks, took_s) for ranks in choices)


def _describe(
    simulation: Simulation,
    workload: Workload,
    timed: PredictedStep | None,
    remarks: Sequence[str],
    ranks: PlannedRanks,
    simulated_s: float,
) -> StepPrediction:
    rank = _divide(simulation, ranks)
    workload = msgspec.structs.replace(workload, batch=workload.batch * ranks.count)
    described, links = _describe_time(timed, simulation, workload, ranks) if timed else (None, [])
    memory = rank.memory
    return StepPrediction(
        workload=workload,
        parameters=simulation.parameters,
        fits=rank.fits(),
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_requested_bytes=memory.peak_requested_bytes,
        reserved_bytes=memory.reserved_bytes,
        context_bytes=simulation.gpu.context_bytes,
        workspace_bytes=memory.workspace_bytes,
        categories=memory.categories,
        phases=_phases(memory, timed),
        modules=tuple(ModuleBytes(module=one.module or OUTSIDE, bytes=one.bytes) for one in memory.modules),
        timeline=_timeline(memory.timeline),
        time=described,
        assumptions=(*simulation.assumptions, *_assume_ranks(rank), *remarks, *links),
        ranks=ranks,
        peak_phase=memory.peak_phase,
        has_tokens=bool(workload.context),
        forward_flops=_forward_flops(workload, timed, ranks),
        versions={"torch": str(torch.__version__)},
        simulated_s=simulated_s,
    )


def _divide(simulation: Simulation, ranks: PlannedRanks) -> Simulation | RankMemory:
    """The memory of one rank, from the simulation of one that has all parameters."""
    if ranks.count == 1:
        return simulation
    sharding: Sharding = "fsdp" if ranks.strategy == "fsdp" else "optimizer" if ranks.shard_optimizer else "none"
    return RankMemory(simulation, ranks=ranks.count, sharding=sharding)


def _assume_ranks(rank: Simulation | RankMemory) -> list[str]:
    if isinstance(rank, Simulation):
        return []
    return [rank.assumption, "What NCCL takes outside PyTorch's allocator is not counted."]


def _time(
    simulation: Simulation, workload: Workload, calibration: Calibration | None
) -> tuple[PredictedStep | None, list[str]]:
    """The predicted time, if there is one, and what it assumes or why there is none."""
    if calibration is None:
        return None, []
    if simulation.launched:
        kernels = ", ".join(f"`{name}`" for name in simulation.launched)
        return None, [f"{NO_TIME}the calibration has no times of the Triton kernels {kernels}."]
    card, precision = calibration.hardware, workload.precision
    if precision == "bf16" and precision not in card.peak_flops:
        return None, [f"{NO_TIME}the data sheet of the {card.name} has no {precision}."]
    try:
        timed = predict_step(
            simulation.operations,
            calibration,
            graph=workload.graph,
            compiled=workload.compile,
            tf32=workload.precision == "tf32",
            working_weights=workload.working_weights,
            merge=workload.merge,
        )
    except NotCalibratedError as missing:  # the memory is still known
        return None, [f"{NO_TIME}{missing.message}."]
    return timed, [f"{one[:1].upper()}{one[1:]}." for one in timed.assumptions]


def _describe_time(
    timed: PredictedStep, simulation: Simulation, workload: Workload, ranks: PlannedRanks
) -> tuple[PlannedTime, list[str]]:
    """The time as `plan` says it, and which links between GPUs it assumes."""
    shared, said = None, []
    if ranks.count > 1:
        is_half = workload.precision in ("bf16", "fp16")
        shared, links = time_ranks(timed, simulation.parameter_sizes, ranks, timed.gpu, is_half=is_half)
        said = [links]
    step_ns = shared.step_ns if shared else timed.ns
    low, high = (step_ns / timed.ns * edge for edge in timed.interval_ns)
    described = PlannedTime(
        step_ns=round(step_ns),
        interval_ns=(round(low), round(high)),
        bound="communication" if shared and shared.exposed_share > HALF else timed.bound,
        kernels=timed.launches,
        table=timed.gpu,
        host=timed.host,
        is_rough=timed.is_rough,
        communication_ns=round(shared.communication_ns) if shared else 0,
        exposed_ns=round(shared.exposed_ns) if shared else 0,
    )
    return described, said


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


def _forward_flops(workload: Workload, timed: PredictedStep | None, ranks: PlannedRanks) -> int | None:
    """Of all ranks together."""
    if isinstance(workload.model, ModelShape):
        return cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
    return ranks.count * sum(one.flops for one in timed.kernels if one.phase == FORWARD) if timed else None
