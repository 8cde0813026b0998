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

import polars as pl

from stepscope.explain.statistics import summarise

ClockKind = Literal["unprofiled", "profiled"]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """`busy_ns` + `idle_ns` = `step_ns`, per step. Without marked steps, the recording counts as one step."""

    steps: pl.DataFrame  # one row per marked step: step, start_ns, end_ns
    window: tuple[int, int]
    find_busy_ns: Callable[[], float]  # in the window, overlapping kernels counted once; mean over devices
    find_launched_before: Callable[[], float]  # the share of kernel time that was launched before the window began
    find_step_windows: Callable[[], tuple[tuple[int, int], ...]]  # start and end of each profiled step on the device
    unprofiled_ns: int | None = None  # the median of unprofiled steps
    unprofiled_steps: tuple[Fraction, ...] = ()  # their times in nanoseconds, if they were kept

    # --- Steps

    @property
    def wall_ns(self) -> int:
        return self.window[1] - self.window[0]

    @property
    def has_steps(self) -> bool:
        return bool(self.steps.height)

    @cached_property
    def num_steps(self) -> int:
        """The number of marked steps, at least 1."""
        return max(1, self.steps["step"].n_unique())

    @cached_property
    def steps_in_window(self) -> float:
        """The number of steps to divide by: more than are marked if work was launched before the window began."""
        before = self.find_launched_before()
        return self.num_steps / (1 - before) if self.has_steps and before < 1 else float(self.num_steps)

    def per_step(self, value: float) -> float:
        """Return a time or a count of the whole window per step."""
        return value / self.steps_in_window

    @property
    def say_per_step(self) -> str:
        """What follows a time or a count per step."""
        return "per step" if self.has_steps else "in the trace"

    @property
    def say_of_step(self) -> str:
        """What follows a share of `step_ns`."""
        return "of the step" if self.has_steps else "of the trace"

    @property
    def say_unmarked(self) -> str:
        """A remark if more steps of work ran than are marked; empty otherwise."""
        if self.steps_in_window <= 1.01 * self.num_steps:
            return ""
        return (
            f"the recording has about {self.steps_in_window:.1f} steps of work, {self.num_steps} of them marked; "
            "per-step figures use the former"
        )

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
        return tuple(Fraction(end - start) for start, end in self.find_step_windows())

    @cached_property
    def profiled_ns(self) -> float:
        """Wall time per profiled step; only for remarks about the profiler's overhead."""
        return self.per_step(self.wall_ns)


def find_step_windows(
    steps: pl.DataFrame, kernels: pl.DataFrame, window: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Return start and end of each step. If the CPU waits for the device between steps, a step runs from its start to
    that of the next. If the CPU runs ahead, its clock says nothing about the device, and a step runs from its first
    kernel to the first kernel of the next. Without marked steps, the whole window is one step."""
    marked = steps.unique("step", keep="first", maintain_order=True).sort("start_ns")
    if not marked.height:
        return (window,)
    ran = kernels.group_by("step").agg(first_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max())
    known = marked.join(ran, on="step", how="left", maintain_order="left")
    starts, last = known["start_ns"].to_list(), known["last_ns"].fill_null(known["end_ns"])
    end = max(int(known["end_ns"][-1]), int(last[-1]))
    firsts = known["first_ns"].to_list()
    runs_ahead = bool((last.head(-1) > known["start_ns"].tail(-1)).any())
    if runs_ahead and known["first_ns"].null_count() == 0 and firsts == sorted(set(firsts)):
        starts, end = firsts, int(last[-1])
    return tuple(zip(starts, [*starts[1:], end], strict=True))
