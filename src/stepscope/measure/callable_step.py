"""Times any function as a training step, in the process that calls it."""

import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent

from stepscope.explain.trace.profile import make_profile
from stepscope.measure.timing import settle_heap, time_steps
from stepscope.recording.readers.formats import open_recording

_MACHINERY = ("autograd::", "torch::autograd::")  # has operators inside and is none itself


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableStep:
    """A function as a step with a single phase."""

    phases: tuple[tuple[str, Callable[[], object]], ...]
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTimes:
    """`peak_bytes` is the peak of PyTorch's allocator during the timed steps, None on a CPU; `kernels` are counted per
    step, None if nobody asked."""

    device: torch.device
    step_ns: tuple[int, ...]
    peak_bytes: int | None
    kernels: int | None


def time_callable(run: Callable[[], object], *, warmup: int, steps: int, count_kernels: bool) -> CallableTimes:
    """Call `run` until it is warm, then time it. CUDA events are the clock if the process has used CUDA by then.

    Nothing else in the process is changed: garbage that is frozen while the clock runs is released afterwards.
    """
    for _ in range(warmup):
        run()
    device = torch.device("cpu")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.reset_peak_memory_stats(device)
    settle_heap()
    try:
        samples = time_steps(CallableStep(phases=(("step", run),), device=device), steps)
    finally:
        gc.unfreeze()
    return CallableTimes(
        device=device,
        step_ns=tuple(samples.step_ns),
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        kernels=_count_kernels(run) if count_kernels else None,
    )


def _count_kernels(run: Callable[[], object]) -> int:
    """Kernels of one call, counted as in a recording; on a CPU the operators that no other operator calls."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # the profiler's own; the caller's project may treat them as errors
        with torch.profiler.profile() as profiler:
            run()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        profile = make_profile(open_recording(trace))
    if profile.on_cpu:
        return sum(_is_outermost(event) for event in profiler.events())
    return int(profile.kernels["count"].sum())


def _is_outermost(event: FunctionEvent) -> bool:
    callers = [event]
    while callers[-1].cpu_parent is not None:
        callers.append(callers[-1].cpu_parent)
    return [one for one in callers if "::" in one.name and not one.name.startswith(_MACHINERY)] == [event]
