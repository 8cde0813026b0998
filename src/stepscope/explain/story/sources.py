"""Everything known about one run, and which clock its page uses. What is missing is None or empty; `absent` may have
the reason.

A step is timed by `bench`, timed again before profiling, and timed while profiled. The three differ, by a third for a
CPU-bound step. A reader cannot check a share of one against a time of another, so a page has a single step time: that
of the profile's clock, which explains it, or that of `bench` if the run has no profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.memory.out_of_memory import MemoryFailure, find_out_of_memory
from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.lateness import RankTimes
from stepscope.explain.ranks.matching import match_ranks
from stepscope.explain.rules import find_once
from stepscope.explain.statistics import Statistics
from stepscope.explain.story.bounds import Shares
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.loop.loop_time import LoopTime, measure_loop
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Finding, Missing
from stepscope.hardware import Hardware
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.optimisation import OptimiseReport
from stepscope.recording.rows.plan_result import FitResult
from stepscope.recording.rows.precision_report import PrecisionReport
from stepscope.recording.store import Manifest
from stepscope.spec import Case, Workload

TimedBy = Literal["bench", "unprofiled", "profiled"]
_Described = TypeVar("_Described", BenchRow, AttentionRow, Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step time, the samples behind it (none if they were not kept), and what measured it. `has_overhead` if a
    profiler may have made it longer."""

    step_ns: float
    samples: tuple[Fraction, ...]
    timed_by: TimedBy
    has_overhead: bool = False


@dataclass(frozen=True, kw_only=True)
class Materials:
    """`bench` starts with the row of the run itself; other rows are variants, such as other precisions. `ranks` has all
    ranks if there are several; `profile` is the one at place `shown`. `absent` is keyed by stage: bench, profile,
    memory, precision, attention, plan, optimise."""

    name: str  # the case in a few words, or the file
    command: str = ""  # repeats this run
    profile: Profile | None = None
    ranks: tuple[RankActivity, ...] = ()
    shown: int = 0
    memory: MemoryProfile | None = None
    oom: MemoryProfile | None = None  # of the moment at which memory ran out, if that is not `memory`
    bench: tuple[BenchRow, ...] = ()
    precision: PrecisionReport | None = None
    attention: tuple[AttentionRow, ...] = ()
    plan: FitResult | None = None
    optimisation: OptimiseReport | None = None
    absent: dict[str, Missing] = field(default_factory=dict)
    is_partial: bool = False

    @cached_property
    def rank_times(self) -> RankTimes | None:
        """When the ranks arrived at their collectives; None for a single rank, or if none can be matched."""
        return match_ranks(self.ranks) if len(self.ranks) > 1 else None

    @cached_property
    def out_of_memory(self) -> MemoryFailure | None:
        """The request for memory that failed, if one did."""
        profile = self.oom or self.memory
        return None if profile is None else find_out_of_memory(profile)

    @property
    def timed_row(self) -> BenchRow | None:
        """The row of the run itself, if it finished."""
        return self.bench[0] if self.bench and self.bench[0].measurement is not None else None

    @cached_property
    def timed(self) -> Statistics | None:
        """The step times of `bench` in milliseconds."""
        return step_ms(self.timed_row) if self.timed_row else None

    @cached_property
    def clock(self) -> Clock | None:
        """The profile's clock, if it marks steps of this run, as far as its case is known. None if the page's step is
        that of `bench`, or unknown."""
        if self.profile is None or not self.profile.has_steps:
            return None
        case, row = self.profile.recording.manifest.case, self.timed_row
        return self.profile.clock if case is None or row is None or is_same_run(case, row.case) else None

    @property
    def row(self) -> BenchRow | None:
        """The timed row that gives the page's step time."""
        return self.timed_row if self.clock is None else None

    @cached_property
    def step_ns(self) -> float | None:
        """THE step time of the page; None if no steps are marked or timed."""
        if self.clock is not None:
            return self.clock.step_ns
        return self.timed.median * 1e6 if self.timed else None

    @property
    def timed_by(self) -> TimedBy:
        """What measured `step_ns`."""
        return self.clock.kind if self.clock is not None else "bench"

    @cached_property
    def step_samples(self) -> tuple[Fraction, ...]:
        """The step times behind `step_ns`; empty if they were not kept individually."""
        if self.clock is not None:
            return self.clock.step_samples
        row = self.timed_row
        return tuple(map(Fraction, row.measurement.step_ns)) if row and row.measurement else ()

    @property
    def step_times(self) -> StepTimes | None:
        """What comparisons with other runs need; None if no step is known."""
        if self.step_ns is None:
            return None
        return StepTimes(
            step_ns=self.step_ns,
            samples=self.step_samples,
            timed_by=self.timed_by,
            has_overhead=self.clock is not None and self.clock.has_overhead,
        )

    @cached_property
    def loop(self) -> LoopTime | None:
        """The time of the training loop; None for a run of stepscope's own, which has a step without one."""
        if self.profile is None or self.profile.recording.manifest.case is not None:
            return None
        return measure_loop(self.profile)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What the profile shows, computed once: for a million kernels this takes seconds."""
        return find_once(self.profile, self.rank_times) if self.profile is not None else ()

    @cached_property
    def shares(self) -> Shares | None:
        """The profile's shares, computed once, for the same reason."""
        return None if self.profile is None else Shares(self.profile, next(iter(self.findings), None))


# --- Measured peaks ---------------------------------------------------------------------------------------------------


def share_peaks(materials: Materials) -> Materials:
    """The run with one peak per precision. A device without a data sheet is measured anew by every stage. The best of
    these counts, because other processes only lower it; a page with several would contradict itself."""
    profile = materials.profile
    known = [rank.manifest.environment for rank in materials.ranks]
    known += [profile.recording.manifest.environment] if profile is not None else []
    known += [row.environment for row in materials.bench] + [row.environment for row in materials.attention]
    measured = [one.hardware for one in known if one is not None and one.hardware.source == "measured"]
    if all(one == measured[0] for one in measured):
        return materials
    return replace(
        materials,
        bench=tuple(_with_best(row, measured) for row in materials.bench),
        attention=tuple(_with_best(row, measured) for row in materials.attention),
        profile=_with_best_peaks(profile, measured) if profile is not None else None,
    )


def _with_best_peaks(profile: Profile, measured: Sequence[Hardware]) -> Profile:
    recording = profile.recording
    return replace(profile, recording=replace(recording, manifest=_with_best(recording.manifest, measured)))


def _with_best(one: _Described, measured: Sequence[Hardware]) -> _Described:
    environment = one.environment
    if environment is None or environment.hardware.source != "measured":
        return one
    peaks: dict[str, float] = {}
    for hardware in measured:
        if hardware.name == environment.hardware.name:
            peaks |= {name: max(peak, peaks.get(name, 0.0)) for name, peak in hardware.peak_flops.items()}
    best = msgspec.structs.replace(environment.hardware, peak_flops=dict(sorted(peaks.items())))
    return msgspec.structs.replace(one, environment=msgspec.structs.replace(environment, hardware=best))


# --- Runs -------------------------------------------------------------------------------------------------------------


def is_same_run(case: Case, other: Case) -> bool:
    """Whether two cases are equal apart from device and seed."""
    return plain_workload(case) == plain_workload(other)


def plain_workload(case: Case) -> Workload:
    """What identifies a case on any device."""
    return msgspec.structs.replace(case.workload, device="auto", seed=0)
