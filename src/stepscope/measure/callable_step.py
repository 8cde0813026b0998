"""Times any function as a training step, in the process that calls it."""

import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stepscope.explain.trace.profile import make_profile
from stepscope.measure.timing import settle_heap, time_steps
from stepscope.recording.readers.formats import open_recording


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
    """Kernels of one call, or operators on a CPU, counted as in a recording."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # the profiler's own; the caller's project may treat them as errors
        with torch.profiler.profile() as profiler:
            run()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        profile = make_profile(open_recording(trace))
    return int(profile.kernels["count"].sum())
