"""Optimize the step of a workload: try changes one after another, in this process, and report each as it is measured.

The built-in model is a textbook: its operations and its optimizer are plain Python, which the rewrites of
`stepscope.fast` do not look for. So its first change builds the same model from PyTorch's operations, and the others
start from there. All are compared with the model as it was given.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from stepscope.fast.accuracy import GradientAccuracy, Reference
from stepscope.fast.ladder import (
    NOISE,
    START_TITLE,
    CandidateChange,
    OptimiseJob,
    Rung,
    climb,
    list_candidates,
    make_reference_of,
)
from stepscope.fast.program import Changes
from stepscope.measure.memory.limits import limit_memory
from stepscope.recording.rows.optimisation import GradientCheck, MeasuredChange
from stepscope.spec import Case, Factory, ModelShape, Workload
from stepscope.step.builder import build_optimizer, build_parts
from stepscope.step.whole_step import choose_changes
from stepscope.units import say_list

OnStage = Callable[[str], None]
OnChange = Callable[[MeasuredChange], None]

# Attention that runs in float64, for the reference; a kernel requested by name raises.
_ANY_DTYPE = (None, "naive", "sdpa", "flash")


def optimise_case(
    case: Case, device: torch.device, *, on_stage: OnStage, on_change: OnChange, compiler: str = "inductor"
) -> None:
    """Try every change, and report each one. The process cannot be reused: its memory is limited from here."""
    if case.timing.memory_limit is not None:
        limit_memory(device, case.timing.memory_limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_stage("building")
    given, other = case.workload, in_pytorch(case.workload)
    job = build_job(given, device)
    on_stage("computing gradients in float64")
    reference = _make_reference(given, device, job)
    tried = list_candidates(job, compiler=compiler) if other == given else ()
    tell = _telling(START_TITLE, tried, on_stage, on_change)
    start = _start_of(given, job, compiler)
    _, (first, *_) = climb(job, tried, start=start, reference=reference, on_rung=tell)
    if other == given:
        return
    del job  # and its memory
    job, title = build_job(other, device), _name_operations(given, other)
    tried = list_candidates(job, compiler=compiler)
    tell = _telling(title, tried, on_stage, on_change)
    climb(
        job,
        tried,
        start=_start_of(given, job, compiler),
        reference=reference,
        on_rung=lambda rung: tell(_as_change(rung, title, first) if rung.status == "start" else rung),
    )


def in_pytorch(workload: Workload) -> Workload:
    """The workload with PyTorch's operations in place of the textbook ones. The user's own model is left as it is."""
    if isinstance(workload.model, Factory):
        return workload
    has_own_class = workload.optimizer == "adamw-onelaunch" and not workload.is_program  # `kernels.OneLaunchAdamW`
    return msgspec.structs.replace(
        workload,
        attention="sdpa" if workload.attention == "naive" else workload.attention,
        optimizer="adamw-torch" if workload.optimizer == "adamw" or has_own_class else workload.optimizer,
        fuse=workload.fuse or isinstance(workload.model, ModelShape),  # then built from operations that are recognized
    )


def build_job(workload: Workload, device: torch.device) -> OptimiseJob:
    parts = build_parts(workload, device)
    module = parts.module.train()

    def loss_of(module: nn.Module, batch: Any) -> Tensor:
        return parts.loss(parts.call(module, batch), batch)

    return OptimiseJob(
        module=module,
        optimizer=parts.optimizer or build_optimizer(workload, module),
        loss_of=loss_of,
        batches=parts.inputs,
        autocast=torch.bfloat16 if workload.precision == "bf16" else None,
        device=device,
    )


def describe(rung: Rung) -> MeasuredChange:
    """A rung as it is saved."""
    return MeasuredChange(
        name=rung.name,
        title=rung.title,
        status=rung.status,
        step_ns=None if rung.step_ms is None else max(1, round(rung.step_ms * 1e6)),
        peak_bytes=rung.peak_bytes,
        prepare_s=rung.prepare_s,
        notes=rung.notes,
        check=None if rung.accuracy is None else _describe_check(rung.accuracy),
    )


def _describe_check(accuracy: GradientAccuracy) -> GradientCheck:
    numbers = {name: value for name, value in accuracy._asdict().items() if isinstance(value, float)}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return GradientCheck(
        parameter=accuracy.parameter, truth="float64" if accuracy.truth == "float64" else "fp32", **finite
    )


def _telling(
    first: str, tried: Sequence[CandidateChange], on_stage: OnStage, on_change: OnChange
) -> Callable[[Rung], None]:
    """A function that reports each rung, and what is tried next."""
    waiting = [one.title for one in tried]
    on_stage(f"measuring {first}")

    def tell(rung: Rung) -> None:
        on_change(describe(rung))
        if waiting:
            on_stage(f"trying {waiting.pop(0)}")

    return tell


def _make_reference(workload: Workload, device: torch.device, job: OptimiseJob) -> Reference:
    """The gradients of the model as it was given; if its attention has no float64, of the same with plain attention."""
    if workload.attention in _ANY_DTYPE:
        return make_reference_of(job)
    return make_reference_of(build_job(msgspec.structs.replace(workload, attention="naive"), device))


def _start_of(workload: Workload, job: OptimiseJob, compiler: str) -> Changes:
    """What the settings of the workload have already."""
    assert job.optimizer is not None, "a workload that trains has an optimizer"
    changes, _ = choose_changes(workload, job.optimizer)
    return replace(
        changes,
        compiler=changes.compiler and compiler,
        graph=changes.graph and job.device.type == "cuda",
    )


def _name_operations(given: Workload, other: Workload) -> str:
    names = ["attention"] * (given.attention != other.attention)
    if isinstance(given.model, ModelShape):
        names += ["linear layers", "cross entropy"]
    names += ["AdamW"] * (given.optimizer != other.optimizer)
    return f"PyTorch's {say_list(names)}"


def _as_change(rung: Rung, title: str, first: Rung) -> Rung:
    """The start of the model in PyTorch's operations, as a change of the first one. Other changes are made to it even
    if it gains nothing."""
    rung = rung._replace(name="operations", title=title)
    if rung.accuracy is not None and not rung.accuracy.passes:
        return rung._replace(status="failed", notes=(*rung.notes, "its gradients differ from those of the model"))
    gains = rung.step_ms is not None and first.step_ms is not None and rung.step_ms < first.step_ms * (1 - NOISE)
    if gains:
        return rung._replace(status="kept")
    return rung._replace(status="no gain", notes=(*rung.notes, "the changes below are made to it"))
