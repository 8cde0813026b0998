"""The clock of a recording: when its steps ran, how long one takes, and for how much of it the device is busy.

A step is timed while it is recorded and, in a recording of ours, also without the recorder. A recorder lengthens what
the host does, up to twofold, and leaves kernels as they are: idle time is what it invents. Everything that tells a
step's time, busy time or idle time reads it here. A page may know a third clock, that of `bench`
(`story.sources.Materials`), and asks for the idle share of its step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import polars as pl


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Of a whole profile, or of some steps of one device. Times a step are means over the window."""

    steps: pl.DataFrame  # one row a marked step: step, start_ns, end_ns
    window: tuple[int, int]
    find_busy_ns: Callable[[], float]  # of the window, kernels side by side counted once; mean over devices
    # The share of the kernels' time that was launched before the window began.
    find_launched_before: Callable[[], float] = lambda: 0.0
    plain_ns: int | None = None  # a step without the recorder

    @property
    def wall_ns(self) -> int:
        return self.window[1] - self.window[0]

    @cached_property
    def num_steps(self) -> int:
        """At least one: a recording without marked steps is taken as one."""
        return max(1, self.steps["step"].n_unique())

    @cached_property
    def steps_in_window(self) -> float:
        """How many steps' work the window holds: more than are marked where work was launched before it began."""
        before = self.find_launched_before()
        return self.num_steps / (1 - before) if self.steps.height and before < 1 else float(self.num_steps)

    @property
    def recorded_step_ns(self) -> float:
        """Wall time a step while it was recorded; over the whole window where steps are not marked."""
        return self.wall_ns / self.steps_in_window

    @cached_property
    def busy_step_ns(self) -> float:
        """Time a step in which any kernel ran."""
        return self.find_busy_ns() / self.steps_in_window

    @property
    def step_ns(self) -> float:
        """Wall time a step: without the recorder where that is known and kernels fit into it, else as recorded."""
        if self.plain_ns is None or self.plain_ns < self.busy_step_ns:
            return self.recorded_step_ns
        return self.plain_ns

    @property
    def plain_step_ns(self) -> float:
        """Wall time a step without the recorder wherever that is known, even where its kernels took longer while they
        were recorded: what rules and the utilisation go by. Else as recorded."""
        return self.recorded_step_ns if self.plain_ns is None else float(self.plain_ns)

    @property
    def is_recorded(self) -> bool:
        """Whether `step_ns` is a step while it was recorded."""
        return self.step_ns == self.recorded_step_ns

    @property
    def idle_share(self) -> float:
        return self.idle_share_of(self.step_ns)

    def idle_share_of(self, step_ns: float) -> float:
        """Of a step that another clock may have timed."""
        return max(0.0, 1 - self.busy_step_ns / max(1.0, step_ns))


def find_step_windows(
    steps: pl.DataFrame, kernels: pl.DataFrame, window: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Where each step begins and ends. Where the host waits for the device between steps, from a step's beginning to
    the next one's. Where it runs ahead, its clock says nothing about the device, and a step is from its first kernel to
    the first of the next. Without marked steps everything is one."""
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
