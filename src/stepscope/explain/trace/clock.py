"""The clock of a recording: when its steps ran, how long a step takes, and how long the device is busy.

A step is timed while it is profiled and, in a recording of stepscope, also unprofiled. A profiler makes the CPU up to
2× slower and leaves kernels unchanged, so it adds idle time. All code that needs step time, busy time or idle time
reads it here. A page may have a third clock, that of `bench` (`story.sources.Materials`), and asks for the idle share
of its step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import polars as pl


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock of a whole profile, or of some steps of one device. Times per step are means over the window."""

    steps: pl.DataFrame  # one row per marked step: step, start_ns, end_ns
    window: tuple[int, int]
    find_busy_ns: Callable[[], float]  # in the window, overlapping kernels counted once; mean over devices
    # The share of kernel time that was launched before the window began.
    find_launched_before: Callable[[], float] = lambda: 0.0
    plain_ns: int | None = None  # an unprofiled step

    @property
    def wall_ns(self) -> int:
        return self.window[1] - self.window[0]

    @cached_property
    def num_steps(self) -> int:
        """At least 1: a recording without marked steps counts as one step."""
        return max(1, self.steps["step"].n_unique())

    @cached_property
    def steps_in_window(self) -> float:
        """Return how many steps of work the window has: more than are marked if work was launched before it began."""
        before = self.find_launched_before()
        return self.num_steps / (1 - before) if self.steps.height and before < 1 else float(self.num_steps)

    @property
    def recorded_step_ns(self) -> float:
        """Wall time per profiled step; of the whole window if no steps are marked."""
        return self.wall_ns / self.steps_in_window

    @cached_property
    def busy_step_ns(self) -> float:
        """Time per step in which any kernel ran."""
        return self.find_busy_ns() / self.steps_in_window

    @property
    def step_ns(self) -> float:
        """Wall time per step: unprofiled if it is known and the kernels fit into it, otherwise profiled."""
        if self.plain_ns is None or self.plain_ns < self.busy_step_ns:
            return self.recorded_step_ns
        return self.plain_ns

    @property
    def plain_step_ns(self) -> float:
        """Wall time per unprofiled step if it is known, even if the profiled kernels took longer; otherwise per
        profiled step. Rules and the MFU use it."""
        return self.recorded_step_ns if self.plain_ns is None else float(self.plain_ns)

    @property
    def is_recorded(self) -> bool:
        """Whether `step_ns` is the time of a profiled step."""
        return self.step_ns == self.recorded_step_ns

    @property
    def idle_share(self) -> float:
        return self.idle_share_of(self.step_ns)

    def idle_share_of(self, step_ns: float) -> float:
        """Return the idle share of a step that another clock may have timed."""
        return max(0.0, 1 - self.busy_step_ns / max(1.0, step_ns))


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
