"""What `stepscope plan` says about one workload, computed in a worker from simulated steps."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from stepscope import cost
from stepscope.plan.assumptions import Accelerator
from stepscope.plan.owners import CATEGORIES
from stepscope.plan.places import BUILD
from stepscope.plan.replayed_memory import ReplayedMemory, TimelinePoint
from stepscope.plan.simulation import Simulation, simulate_workload
from stepscope.recording.rows.memory_summary import CategoryBytes, ModuleBytes
from stepscope.recording.rows.plan_result import PlannedPhase, PlannedStretch, PlannedTimeline, StepPrediction
from stepscope.spec import ModelShape, Workload

STEPS = 3
OUTSIDE = "(outside of modules)"


def predict_workload(
    workload: Workload, gpu: Accelerator, *, on_stage: Callable[[str], None] = lambda _: None
) -> StepPrediction:
    started = time.monotonic()
    on_stage("simulating")
    simulation = simulate_workload(workload, gpu, STEPS)
    on_stage("predicting the time")
    memory = simulation.memory
    return StepPrediction(
        workload=workload,
        parameters=simulation.parameters,
        fits=simulation.fits(),
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_requested_bytes=memory.peak_requested_bytes,
        reserved_bytes=memory.reserved_bytes,
        context_bytes=gpu.context_bytes,
        workspace_bytes=memory.workspace_bytes,
        categories=tuple(CategoryBytes(category=one.category, bytes=one.bytes) for one in memory.categories),
        phases=_phases(memory),
        modules=tuple(ModuleBytes(module=one.module or OUTSIDE, bytes=one.bytes) for one in memory.modules),
        timeline=_timeline(memory.timeline),
        time=None,
        assumptions=tuple(_assume(simulation, workload)),
        peak_phase=memory.peak_phase,
        has_tokens=bool(workload.context),
        forward_flops=_forward_flops(workload),
        versions={"torch": str(torch.__version__)},
        simulated_s=time.monotonic() - started,
    )


def _phases(memory: ReplayedMemory) -> tuple[PlannedPhase, ...]:
    return tuple(PlannedPhase(phase=one.phase, peak_bytes=one.bytes) for one in memory.phases if one.phase != BUILD)


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
        said.append("memory is that of the same step without torch.compile and CUDA graphs")
    return said


def _forward_flops(workload: Workload) -> int | None:
    if not isinstance(workload.model, ModelShape):
        return None
    return cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
