"""Everything known about one run, and which clock its page uses. What is missing is None or empty; `absent` may have
the reason.

A step is timed by `bench`, timed again before profiling, and timed while profiled. The three differ, by a third for a
CPU-bound step. A reader cannot check a share of one against a time of another, so a page has a single step time: that
of `bench` if it belongs to the same run, else that of the profile.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal

import msgspec

from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.story.bounds import Shares
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Missing
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.precision_report import PrecisionReport
from stepscope.spec import Case, Workload

NOISE = 0.05  # kernels may exceed the step time by this much, because the two were measured separately
# Timed by `bench`, by `profile` without profiling, or while profiling.
ClockKind = Literal["timed", "plain", "recorded"]


@dataclass(frozen=True, kw_only=True)
class Materials:
    """`bench` starts with the row of the run itself; other rows are variants, such as other precisions. `ranks` has all
    ranks if there are several, including `profile`. `absent` is keyed by stage: bench, profile, memory, precision,
    attention."""

    name: str  # the case in a few words, or the file
    command: str = ""  # repeats this run
    profile: Profile | None = None
    ranks: tuple[Profile, ...] = ()
    memory: MemoryProfile | None = None
    bench: tuple[BenchRow, ...] = ()
    precision: PrecisionReport | None = None
    attention: tuple[AttentionRow, ...] = ()
    absent: dict[str, Missing] = field(default_factory=dict)
    is_partial: bool = False

    @property
    def timed_row(self) -> BenchRow | None:
        """The row of the run itself, if it finished."""
        return self.bench[0] if self.bench and self.bench[0].measurement is not None else None

    @cached_property
    def timed_ns(self) -> float | None:
        timed = step_ms(self.timed_row) if self.timed_row else None
        return timed.median * 1e6 if timed else None

    @cached_property
    def is_bench_too_short(self) -> bool:
        """Whether the kernels of a step take longer than its measured time, which means that one of the two is wrong.
        Never on a CPU, where profiling slows the operators themselves."""
        if self.timed_ns is None or self.profile is None or self.profile.on_cpu or not self._is_of_bench(self.profile):
            return False
        return self.profile.busy_step_ns > (1 + NOISE) * self.timed_ns

    def _is_of_bench(self, profile: Profile) -> bool:
        """Whether a profile has the steps that `bench` timed, as far as its case is known."""
        case = profile.recording.manifest.case
        return profile.has_steps and (case is None or is_same_run(case, self.bench[0].case))

    @cached_property
    def row(self) -> BenchRow | None:
        """The timed row that gives the page's step time."""
        return None if self.is_bench_too_short else self.timed_row

    @cached_property
    def step_ns(self) -> float | None:
        """THE step time of the page: measured by `bench` if available, else by the profile; None if no steps are
        marked."""
        if self.row is not None:
            return self.timed_ns
        return self.profile.step_ns if self.profile is not None and self.profile.has_steps else None

    @property
    def clock_kind(self) -> ClockKind:
        """The clock that measured `step_ns`."""
        if self.row is not None:
            return "timed"
        return "recorded" if self.profile is None or self.profile.clock.is_recorded else "plain"

    @cached_property
    def step_samples(self) -> tuple[Fraction, ...]:
        """The step times behind `step_ns`; empty if they were not kept individually."""
        if self.row is not None and self.row.measurement is not None:
            return tuple(map(Fraction, self.row.measurement.step_ns))
        if self.profile is None:
            return ()
        if self.clock_kind == "plain":
            return self.profile.plain_steps
        return tuple(Fraction(end - start) for start, end in self.profile.step_windows)

    @cached_property
    def is_profile_of_step(self) -> bool:
        """Whether the profile explains the page's step: it belongs to the same run and marks steps."""
        if self.profile is None or self.step_ns is None:
            return False
        return self._is_of_bench(self.profile) if self.row is not None else True

    @cached_property
    def profile_step_ns(self) -> float | None:
        """The step time that shares of the profile refer to: the page's step if the profile explains it."""
        if self.profile is None:
            return None
        return self.step_ns if self.is_profile_of_step else self.profile.step_ns

    @cached_property
    def shares(self) -> Shares | None:
        """The profile's shares, computed once: for a million kernels this takes seconds."""
        if self.profile is None or self.profile_step_ns is None:
            return None
        return Shares(self.profile, self.profile_step_ns)


def is_same_run(case: Case, other: Case) -> bool:
    """Whether two cases are equal apart from device and seed."""
    return _plain(case) == _plain(other)


def _plain(case: Case) -> Workload:
    return msgspec.structs.replace(case.workload, device="auto", seed=0)
