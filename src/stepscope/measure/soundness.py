"""Checks of measurement quality, made during a timing and kept with it.

A remark never changes a number. It appears next to it in the table, so that nobody unknowingly compares a throttled run
with a cool one.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stepscope.explain.statistics import summarise
from stepscope.measure import nvml
from stepscope.measure.timing import Samples
from stepscope.recording.rows.bench import Doubt
from stepscope.units import count_noun, say_share

if TYPE_CHECKING:  # loads the compiler, which a user's training process may not need
    from stepscope.step import Step

SPREAD_LIMIT = 0.10  # of the middle 60% of steps, relative to the median
FEWEST_STEPS = 5
COLD_RATIO = 1.25  # first timed step relative to the median
CLOCK_LIMIT = 0.02  # CPU clock relative to CUDA events...
CLOCK_SLACK_NS = 100_000  # ...beyond the cost of one wait for the device
# If the device finishes this soon after the CPU launched its last kernel, nothing was queued: it waited for the CPU.
# Seen on an H200: about 65 µs when starved, over 1 ms when the GPU was behind. The share of the step that the CPU
# spends launching does not show it: a full launch queue makes the CPU wait inside the launch, and the share is high
# either way.
STARVED_NS = 200_000
LEAST_WATCH_S = 0.5
OTHERS_LIMIT = 0.10  # of all cores, used by other processes
NVML_INTERVAL_NS = 100_000_000
LEAST_DENORMAL = 0.001  # of all parameters, gradients and optimizer state
_WIDE = (torch.float32, torch.float64, torch.bfloat16)


class MachineWatch:
    """Watches the machine while steps run: throttling and other processes on CUDA, load of other processes on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reasons: set[str] = set()
        self._others: set[int] = set()
        self._next_look_ns = 0
        self._start = _cpu_times()

    def look(self) -> None:
        """Called between steps, outside the timing. A look takes tens of microseconds; ten per second suffice."""
        if self._device.type != "cuda" or time.perf_counter_ns() < self._next_look_ns:
            return
        self._next_look_ns = time.perf_counter_ns() + NVML_INTERVAL_NS
        self._reasons |= nvml.throttle_reasons(self._device) or set()
        self._others |= set(nvml.other_processes(self._device) or ())

    def doubts(self) -> list[Doubt]:
        if self._device.type != "cuda":
            return self._doubt_load()
        doubts = []
        if self._reasons:
            clocks = nvml.clocks(self._device)
            at = f" (SM clock {clocks.sm_mhz} of {clocks.max_sm_mhz} MHz)" if clocks else ""
            doubts.append(Doubt(code="throttled", text=f"clocks throttled: {', '.join(sorted(self._reasons))}{at}"))
        if self._others:
            doubts.append(
                Doubt(
                    code="shared",
                    text=f"{count_noun(len(self._others), 'other process', 'other processes')} on the GPU",
                )
            )
        return doubts

    def _doubt_load(self) -> list[Doubt]:
        busy, own, wall = (end - start for end, start in zip(_cpu_times(), self._start, strict=True))
        others = max(0.0, busy - own) / (wall * (os.cpu_count() or 1))
        # The kernel counts in ticks of 10 ms: over a few ticks the share means nothing.
        if wall < LEAST_WATCH_S or others <= OTHERS_LIMIT:
            return []
        return [Doubt(code="shared", text=f"other processes used {others:.0%} of the CPU during the measurement")]


def doubt_spread(*timings: Sequence[int], of: str) -> list[Doubt]:
    """At most one, for the worst of the timings: too few samples, or a spread that is too large."""
    fewest = min(map(len, timings))
    if fewest < FEWEST_STEPS:
        return [Doubt(code="few", text=f"{count_noun(fewest, of.removesuffix('s'))}: too few to estimate the spread")]
    spread = max(summarise(samples).spread for samples in timings)
    if spread > SPREAD_LIMIT:
        return [Doubt(code="spread", text=f"the middle 60% of {of} spread over {spread:.0%} of the median")]
    return []


def doubt_samples(samples: Samples, *, warmup: int, waits: bool = False) -> list[Doubt]:
    """Check the samples against each other. `waits` if the step itself waits for the device."""
    step = summarise(samples.step_ns)
    doubts = doubt_spread(samples.step_ns, of="steps")
    if len(samples.step_ns) > 1 and samples.step_ns[0] > COLD_RATIO * step.median:
        first = samples.step_ns[0] / step.median
        after = f"after {count_noun(warmup, 'warm-up step')}" if warmup else "without warm-up steps"
        doubts.append(Doubt(code="cold", text=f"the first step {after} took {first:.1f}× the median"))
    return doubts + _doubt_clocks(samples, step.median, waits=waits)


def doubt_numbers(step: "Step") -> list[Doubt]:
    """Check the numbers that a step leaves behind. On a CPU this takes memory: call it after measuring the peak."""
    doubts = []
    if not step.loss_is_finite():
        doubts.append(Doubt(code="not-finite", text="the loss of the last step is not finite"))
    share = _denormal_share(step) if step.device.type == "cpu" else 0.0
    if share >= LEAST_DENORMAL:
        text = f"{say_share(share)} of parameters, gradients and optimizer state are denormal numbers, which are slow"
        doubts.append(Doubt(code="denormal", text=text))
    return doubts


def _denormal_share(step: "Step") -> float:
    parameters = list(step.module.parameters())
    gradients = [one.grad for one in parameters if one.grad is not None]
    tensors = [one.detach() for one in (*parameters, *gradients, *(state for _, state in step.optimizer_state()))]
    # CPUs compute narrower dtypes in fp32, where their denormal numbers are normal.
    tensors = [one for one in tensors if one.dtype in _WIDE and one.layout is torch.strided]
    denormal = sum(int(((one != 0) & (one.abs() < torch.finfo(one.dtype).tiny)).sum()) for one in tensors)
    return denormal / max(1, sum(one.numel() for one in tensors))


def _doubt_clocks(samples: Samples, step_median: float, *, waits: bool) -> list[Doubt]:
    host_median = summarise(samples.host_step_ns).median
    doubts = []
    if abs(host_median - step_median) > CLOCK_SLACK_NS + CLOCK_LIMIT * step_median:
        off = host_median / step_median - 1
        doubts.append(Doubt(code="clocks", text=f"the CPU clock differs from CUDA events by {off:+.1%}"))
    if samples.enqueue_ns != samples.host_step_ns and not waits:
        lags = [total - issued for total, issued in zip(samples.host_step_ns, samples.enqueue_ns, strict=True)]
        lag_ns = summarise(lags).median
        if lag_ns < STARVED_NS:
            text = f"the GPU finished {lag_ns / 1e3:.0f} µs after the last kernel launch: it was waiting for the CPU"
            doubts.append(Doubt(code="host-bound", text=text))
    return doubts


def _cpu_times() -> tuple[float, float, float]:
    """Seconds that all cores were busy, this process's share of them, and the wall-clock time."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = fields
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return busy, time.process_time(), time.perf_counter()
