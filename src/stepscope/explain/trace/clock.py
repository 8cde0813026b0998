"""The clock of a recording: one step time, one busy time and one idle time, which add up, and the number of steps.

A step is timed while it is profiled and, in a recording of stepscope, also unprofiled. A profiler makes the CPU up to
2× slower and leaves kernels unchanged, so it adds idle time: unprofiled steps are the clock if they are clearly faster
than the profiled ones and the kernels fit into them. If they are slower, or the two differ by less than steps differ
from each other, the difference says nothing about the profiler, and the profiled steps are the clock. Everything that
needs a step time, busy time, idle time or a count per step reads it here, so that the figures of a page agree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from stepscope.explain.statistics import summarise
from stepscope.explain.trace.extent import StepExtent

ClockKind = Literal["unprofiled", "profiled"]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """`busy_ns` + `idle_ns` = `step_ns`, per step. Without marked steps, the recording counts as one step."""

    extent: StepExtent  # the profiled steps
    find_busy_ns: Callable[[], float]  # in these steps, overlapping kernels counted once; mean over devices
    unprofiled_ns: int | None = None  # the median of unprofiled steps
    unprofiled_steps: tuple[Fraction, ...] = ()  # their times in nanoseconds, if they were kept

    # --- Steps

    @property
    def wall_ns(self) -> int:
        return self.extent.window[1] - self.extent.window[0]

    @property
    def has_steps(self) -> bool:
        return bool(self.extent.steps.height)

    @property
    def num_steps(self) -> int:
        return len(self.extent.windows)

    def per_step(self, value: float) -> float:
        """Return a time or a count of all steps per step."""
        return value / self.num_steps

    @property
    def say_per_step(self) -> str:
        """What follows a time or a count per step."""
        return "per step" if self.has_steps else "in the trace"

    @property
    def say_of_step(self) -> str:
        """What follows a share of `step_ns`."""
        return "of the step" if self.has_steps else "of the trace"

    def reword(self, text: str) -> str:
        """Return a text about a step as one about the trace, if it has no marked steps."""
        return text.replace("per step", self.say_per_step).replace("of the step", self.say_of_step)

    # --- Times per step

    @cached_property
    def kind(self) -> ClockKind:
        if self.unprofiled_ns is None or self.unprofiled_ns >= self.profiled_ns:
            return "profiled"
        fits = self.busy_ns <= self.unprofiled_ns
        return "unprofiled" if fits and not self._do_clocks_agree else "profiled"

    @property
    def has_overhead(self) -> bool:
        """Whether the profiler may have made `step_ns` longer."""
        return self.kind == "profiled" and (self.unprofiled_ns is None or not self._do_clocks_agree)

    @cached_property
    def _do_clocks_agree(self) -> bool:
        """Whether the middle 60% of unprofiled and of profiled steps overlap."""
        assert self.unprofiled_ns is not None
        unprofiled = summarise([float(one) for one in self.unprofiled_steps] or [float(self.unprofiled_ns)])
        profiled = summarise([float(one) for one in self.profiled_steps])
        return unprofiled.p20 <= profiled.p80 and profiled.p20 <= unprofiled.p80

    @cached_property
    def step_ns(self) -> float:
        if self.kind == "profiled":
            return self.profiled_ns
        assert self.unprofiled_ns is not None
        return float(self.unprofiled_ns)

    @cached_property
    def busy_ns(self) -> float:
        """Time in which any kernel ran; mean over devices."""
        return self.per_step(self.find_busy_ns())

    @property
    def idle_ns(self) -> float:
        return self.step_ns - self.busy_ns

    @property
    def idle_share(self) -> float:
        return self.idle_ns / max(1.0, self.step_ns)

    @property
    def step_samples(self) -> tuple[Fraction, ...]:
        """The step times behind `step_ns`; empty if they were not kept individually."""
        return self.profiled_steps if self.kind == "profiled" else self.unprofiled_steps

    @cached_property
    def profiled_steps(self) -> tuple[Fraction, ...]:
        return tuple(Fraction(end - start) for start, end in self.extent.windows)

    @cached_property
    def profiled_ns(self) -> float:
        """Mean of `profiled_steps`; only for remarks about the profiler's overhead."""
        return self.per_step(self.wall_ns)
