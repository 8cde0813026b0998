"""Times a step.

On a GPU the CPU only launches work, so a CPU clock without a wait measures the launching. We record CUDA events between
the phases and wait once, at the end of the step: the events see each phase on the device's own timeline, nothing inside
the step is delayed, and the phases add up to the step. The CPU clock over the same step is kept as a check, and so is
the time at which the CPU had launched everything: if the device finishes right after it, nothing was queued, and the
GPU was waiting for Python. Waiting between phases instead, as is often done, keeps the CPU from running ahead and makes
every phase longer.

On a CPU there is only one clock, and nothing is asynchronous.
"""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

TURNS_S = 2.0
STEPS_A_TURN = 4


class TimedStep(Protocol):
    """What can be timed: named phases that run one after the other on a device. `stepscope.step.Step` is one."""

    @property
    def phases(self) -> tuple[tuple[str, Callable[[], object]], ...]: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(slots=True, kw_only=True)
class Samples:
    """Nanoseconds, one entry per step. `phases_ns` follows the order of the step; a phase that a step runs several
    times counts as their sum.
    """

    phases_ns: dict[str, list[int]]
    step_ns: list[int] = field(default_factory=list)
    host_step_ns: list[int] = field(default_factory=list)
    enqueue_ns: list[int] = field(default_factory=list)


def time_steps(step: TimedStep, count: int, *, after_step: Callable[[], None] = lambda: None) -> Samples:
    """Run and time `count` steps. `after_step` runs between steps, outside the timing."""
    time_one = _time_on_cuda if step.device.type == "cuda" else _time_on_host
    samples = Samples(phases_ns={name: [] for name, _ in step.phases})
    for _ in range(count):
        time_one(step, samples)
        after_step()
    return samples


def time_in_turns(
    step: TimedStep, recording: Callable[[], AbstractContextManager[object]], *, least: int, most: int
) -> tuple[list[int], list[int]]:
    """Return nanoseconds of alternating steps without and within `recording`, so that changes on the machine affect
    both.

    The first step after each switch is left out: Python runs it slowly, because its specializations of the changed
    functions are void (5% of a 6 ms step on a 2-core VM). Alternation ends after a few seconds, between `least` and
    `most`.
    """
    without, within = [], []
    started = time.monotonic()
    for turn in range(most):
        if turn >= least and time.monotonic() - started > TURNS_S:
            break
        without += time_steps(step, STEPS_A_TURN).step_ns[1:]
        with recording():
            within += time_steps(step, STEPS_A_TURN).step_ns[1:]
    return without, within


def wait_for(step: TimedStep) -> None:
    """Wait until all work that the step has launched is done."""
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)


def settle_heap() -> None:
    """Call once before timing: existing objects are garbage or permanent, and the collector's full passes over them
    would land in some steps and not in others.
    """
    gc.collect()
    gc.freeze()


def _time_on_host(step: TimedStep, samples: Samples) -> None:
    clock = time.perf_counter_ns
    marks = [clock()]
    for _, phase in step.phases:
        phase()
        marks.append(clock())
    _add_phases(step, samples, [end - start for start, end in pairwise(marks)])
    for kept in (samples.step_ns, samples.host_step_ns, samples.enqueue_ns):
        kept.append(marks[-1] - marks[0])


def _time_on_cuda(step: TimedStep, samples: Samples) -> None:
    stream = torch.cuda.current_stream(step.device)
    events = [make_event() for _ in range(len(step.phases) + 1)]
    torch.cuda.synchronize(step.device)
    start = time.perf_counter_ns()
    events[0].record(stream)
    for (_, phase), event in zip(step.phases, events[1:], strict=True):
        phase()
        event.record(stream)
    issued = time.perf_counter_ns()
    torch.cuda.synchronize(step.device)
    end = time.perf_counter_ns()
    _add_phases(step, samples, [elapsed_ns(before, after) for before, after in pairwise(events)])
    samples.step_ns.append(elapsed_ns(events[0], events[-1]))
    samples.host_step_ns.append(end - start)
    samples.enqueue_ns.append(issued - start)


def _add_phases(step: TimedStep, samples: Samples, durations_ns: list[int]) -> None:
    totals = dict.fromkeys(samples.phases_ns, 0)
    for (name, _), duration_ns in zip(step.phases, durations_ns, strict=True):
        totals[name] += duration_ns
    for name, total_ns in totals.items():
        samples.phases_ns[name].append(total_ns)


def make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def elapsed_ns(before: torch.cuda.Event, after: torch.cuda.Event) -> int:
    milliseconds: float = before.elapsed_time(after)
    return round(milliseconds * 1e6)
