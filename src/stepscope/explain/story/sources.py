"""What there is to tell of one run, and which clock its page goes by. Whatever is missing is None or empty, and
`absent` may say why.

A step is timed by itself, timed again around the recording, and timed while recorded; the three differ, by a third for
a step that waits for its host. A share of one beside a time of another cannot be checked by a reader, so a page has one
step: the bench's where it is of the same run, else the profile's.
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

NOISE = 0.05  # so much longer than the step its kernels may be: the two were not measured at once
# By `bench`, by `profile` without its recorder, or while it recorded.
ClockKind = Literal["timed", "plain", "recorded"]


@dataclass(frozen=True, kw_only=True)
class Materials:
    """`bench` begins with the row of the run itself; others stand beside it, such as other precisions. `ranks` are all
    of several ranks, `profile` among them. `absent` is keyed by stage: bench, profile, memory, precision, attention."""

    name: str  # in a few words: the case, or the file
    command: str = ""  # makes this run again
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
        """The row of the run itself, where it came to an end."""
        return self.bench[0] if self.bench and self.bench[0].measurement is not None else None

    @cached_property
    def timed_ns(self) -> float | None:
        timed = step_ms(self.timed_row) if self.timed_row else None
        return timed.median * 1e6 if timed else None

    @cached_property
    def is_bench_too_short(self) -> bool:
        """Whether the kernels of a step alone take longer than the step was timed at: one of the two is not what it
        seems. Not on a CPU, where the recorder slows the operators themselves."""
        if self.timed_ns is None or self.profile is None or self.profile.on_cpu or not self._is_of_bench(self.profile):
            return False
        return self.profile.busy_step_ns > (1 + NOISE) * self.timed_ns

    def _is_of_bench(self, profile: Profile) -> bool:
        """Whether the steps of a profile are those that `bench` timed, as far as the profile says what it is of."""
        case = profile.recording.manifest.case
        return profile.has_steps and (case is None or is_same_run(case, self.bench[0].case))

    @cached_property
    def row(self) -> BenchRow | None:
        """The timed row that the page's step is taken from."""
        return None if self.is_bench_too_short else self.timed_row

    @cached_property
    def step_ns(self) -> float | None:
        """THE step of the page: by the bench's clock where there is one, else by the profile's; None where no step is
        marked."""
        if self.row is not None:
            return self.timed_ns
        return self.profile.step_ns if self.profile is not None and self.profile.has_steps else None

    @property
    def clock_kind(self) -> ClockKind:
        """Whose clock `step_ns` is by."""
        if self.row is not None:
            return "timed"
        return "recorded" if self.profile is None or self.profile.clock.is_recorded else "plain"

    @cached_property
    def step_samples(self) -> tuple[Fraction, ...]:
        """The steps that `step_ns` is made of; none where they were not kept one by one."""
        if self.row is not None and self.row.measurement is not None:
            return tuple(map(Fraction, self.row.measurement.step_ns))
        if self.profile is None:
            return ()
        if self.clock_kind == "plain":
            return self.profile.plain_steps
        return tuple(Fraction(end - start) for start, end in self.profile.step_windows)

    @cached_property
    def is_profile_of_step(self) -> bool:
        """Whether the profile tells where the page's step goes: not one of another run, nor one without steps."""
        if self.profile is None or self.step_ns is None:
            return False
        return self._is_of_bench(self.profile) if self.row is not None else True

    @cached_property
    def profile_step_ns(self) -> float | None:
        """What shares of the profile's step are of: the page's step, where the profile tells of it."""
        if self.profile is None:
            return None
        return self.step_ns if self.is_profile_of_step else self.profile.step_ns

    @cached_property
    def shares(self) -> Shares | None:
        """Where the profile's time goes, found out once: of a million kernels it takes seconds."""
        if self.profile is None or self.profile_step_ns is None:
            return None
        return Shares(self.profile, self.profile_step_ns)


def is_same_run(case: Case, other: Case) -> bool:
    """Whether two cases are one, without what makes no other run of it."""
    return _plain(case) == _plain(other)


def _plain(case: Case) -> Workload:
    return msgspec.structs.replace(case.workload, device="auto", seed=0)
