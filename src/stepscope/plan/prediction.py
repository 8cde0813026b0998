"""What `stepscope plan` says about one workload, computed in a worker: a simulated step, and the time of its kernels."""

import time
from collections.abc import Callable

import torch

from stepscope import cost
from stepscope.plan.assumptions import Accelerator
from stepscope.plan.simulation import simulate_workload
from stepscope.recording.rows.plan_result import StepPrediction
from stepscope.spec import ModelShape, Workload

STEPS = 3


def predict_workload(
    workload: Workload, gpu: Accelerator, *, on_stage: Callable[[str], None] = lambda _: None
) -> StepPrediction:
    started = time.monotonic()
    on_stage("simulating")
    simulation = simulate_workload(workload, gpu, STEPS)
    on_stage("predicting the time")
    return StepPrediction(
        workload=workload,
        parameters=cost.parameters(workload.model).total if isinstance(workload.model, ModelShape) else 0,
        peak_allocated_bytes=simulation.peak_allocated_bytes,
        peak_requested_bytes=simulation.peak_requested_bytes,
        reserved_bytes=simulation.reserved_bytes,
        context_bytes=gpu.context_bytes,
        workspace_bytes=0,
        categories=(),
        phases=(),
        modules=(),
        timeline=None,
        time=None,
        assumptions=(),
        forward_flops=_forward_flops(workload),
        versions={"torch": str(torch.__version__)},
        simulated_s=time.monotonic() - started,
    )


def _forward_flops(workload: Workload) -> int | None:
    if not isinstance(workload.model, ModelShape):
        return None
    return cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
