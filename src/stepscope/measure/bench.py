"""Measure one case: build it, warm it up, time it, and assess measurement quality."""

from collections.abc import Callable
from typing import Literal

import torch

from stepscope import cost
from stepscope.kernels.attention import chosen_backends
from stepscope.measure.failures import is_out_of_memory
from stepscope.measure.flops import count_forward_flops
from stepscope.measure.memory.limits import HostMemory, limit_memory
from stepscope.measure.soundness import MachineWatch, doubt_numbers, doubt_samples
from stepscope.measure.timing import settle_heap, time_steps
from stepscope.recording.rows.bench import Doubt, Measurement
from stepscope.spec import Case, ModelShape
from stepscope.step import Step, build

Stage = Literal["building", "warming up", "timing", "counting operations"]


def measure(
    case: Case, device: torch.device, *, on_stage: Callable[[Stage], None]
) -> tuple[Measurement, tuple[Doubt, ...]]:
    """The process cannot be reused: its memory is limited and its peak counted from here. One case, one process."""
    host = HostMemory() if device.type == "cpu" else None
    if case.timing.memory_limit is not None:
        limit_memory(device, case.timing.memory_limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_stage("building")
    step = build(case.workload, device)
    on_stage("warming up")
    settle_heap()
    warmup = time_steps(step, case.timing.warmup)
    on_stage("timing")
    watch = MachineWatch(device)
    scale = step.loss_scale
    samples = time_steps(step, case.timing.steps, after_step=watch.look)
    doubts = watch.doubts() + doubt_samples(samples, warmup=case.timing.warmup, waits=step.waits_inside)
    if step.loss_scale < scale:
        text = f"the loss scale fell from {scale:g} to {step.loss_scale:g}: infinite gradients, updates skipped"
        doubts.append(Doubt(code="skipped", text=text))
    peak_bytes = host.peak_bytes() if host else torch.cuda.max_memory_allocated(device)
    reserved_bytes = None if host else torch.cuda.max_memory_reserved(device)
    doubts += [*doubt_numbers(step), *step.remarks]
    on_stage("counting operations")
    flops, more = _forward_flops(step)
    measurement = Measurement(
        clock="cuda events" if device.type == "cuda" else "host",
        phases_ns={name: tuple(values) for name, values in samples.phases_ns.items()},
        step_ns=tuple(samples.step_ns),
        host_step_ns=tuple(samples.host_step_ns),
        enqueue_ns=tuple(samples.enqueue_ns),
        warmup_ns=tuple(warmup.step_ns),
        parameters=step.parameters,
        sizes=step.sizes,
        has_tokens=step.has_tokens,
        has_samples=step.has_samples,
        optimizer=step.optimizer_name,
        forward_flops=flops,
        flops_source="closed form" if isinstance(case.workload.model, ModelShape) else "counted",
        peak_bytes=peak_bytes,
        peak_kind="rss above start" if host else "cuda allocator",
        reserved_bytes=reserved_bytes,
        attention_kernels=tuple(sorted({backend for backend, _ in chosen_backends()})),
    )
    return measurement, (*doubts, *more)


def _forward_flops(step: Step) -> tuple[int | None, list[Doubt]]:
    workload = step.workload
    if isinstance(workload.model, ModelShape):
        return cost.forward_flops(workload.model, batch=workload.batch, context=workload.context), []
    # The timings are done and stay. A compiled step can fit in memory where the same uncompiled pass does not, and a
    # custom model may do anything under the counter: any failure costs the count, and is reported.
    try:
        flops = count_forward_flops(step)
    except Exception as error:  # noqa: BLE001
        reason = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"[:200]
        return None, [Doubt(code="uncounted", text=f"could not count the FLOPs: {reason}")]
    if flops == 0:
        return None, [Doubt(code="uncounted", text="the FLOP counter recognized no operator")]
    return flops, []
