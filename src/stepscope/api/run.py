"""A run: a recording and everything that can be derived from it.

    run = stepscope.load("trace.json.gz")
    run.step_ms, run.classes, run.findings, run.questions(), run.compare(other)

Modules that only some methods need are imported inside them: a large cached recording opens in less than a second, and
importing everything would take a tenth of that.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from stepscope.api.arguments import require_amount, require_choice, require_count
from stepscope.api.display import (
    DataTable,
    Picture,
    RunPart,
    StrPath,
    encode_document,
    name_rank,
    write_frame,
    write_table,
)
from stepscope.api.rank_files import Opened, expand_ranks, open_ranks, sort_ranks
from stepscope.errors import StepscopeError
from stepscope.explain.ranks.lateness import RankLateness, RankTimes
from stepscope.explain.rules import find_once
from stepscope.explain.trace import profile_tables
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.explain.trace.ranges_table import short_ranges
from stepscope.explain.trace.summary import SCHEMA, Summary, summarise
from stepscope.findings import Finding, Page, Table
from stepscope.recording import store
from stepscope.recording.store import Recording

if TYPE_CHECKING:
    import polars as pl

    from stepscope.explain.memory import MemoryProfile
    from stepscope.explain.memory.timeline import By as StackedBy
    from stepscope.explain.questions import Answer
    from stepscope.explain.ranks.activity import RankActivity
    from stepscope.explain.trace.bounded import BoundedProfile
    from stepscope.explain.trace.compare import By, ProfileComparison
    from stepscope.recording.rows.memory_summary import MemorySummary

_ON_A_PAGE = 5  # kernels on the page; `table` shows all
_COUNTED_ON_A_PAGE = 12
_ALL_ROWS = sys.maxsize


class RanksSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The document for several files, with one summary each. `lateness` has one entry per rank, empty if no collective
    could be matched across ranks."""

    schema: str = SCHEMA
    files: tuple[Summary, ...]
    lateness: tuple[RankLateness, ...] = ()


def load(*paths: StrPath, cache: bool = True, bounded: bool = False) -> "Run":
    """Read a recording and return it as a `Run`.

    `paths` is a directory that stepscope wrote, a PyTorch profiler trace, an Nsight Systems export, an Nsight Compute
    CSV file or a CUDA memory snapshot. Several files, or a directory of traces, are the ranks of one run; they are
    ordered by rank.

    `cache` keeps a decoded copy of a large file, which the next call reads instead. `bounded` reads a PyTorch trace
    that is larger than memory: slower, and without findings, questions and comparisons. Raises `StepscopeError` if a
    file cannot be read.
    """
    if not paths:
        raise ValueError("expected at least one file, got none")
    if bounded:
        if len(paths) > 1:
            raise ValueError(f"bounded=True reads a single file, got {len(paths)}")
        return BoundedRun(Path(paths[0]))
    opened = [
        one.named(one.path.name) if one.path.is_dir() and not one.is_of_memory else one
        for one in open_ranks(expand_ranks([Path(path) for path in paths]), cached=cache)
    ]
    if len(opened) > 1 and any(one.is_of_memory for one in opened):
        raise StepscopeError("a memory snapshot cannot be combined with other files", hint="read each file separately")
    return Run(sort_ranks(opened))


class Answers(tuple["Answer", ...]):
    """Answers to common questions about a training step, each with a `key`, a `figure` and a `sentence`."""

    __slots__ = ()

    @property
    def table(self) -> DataTable:
        from stepscope.explain.questions import answers_table

        return DataTable.of(answers_table(self))

    @property
    def evidence(self) -> tuple[DataTable, ...]:
        """The tables behind the answers."""
        from stepscope.explain.questions import evidence_tables

        return tuple(map(DataTable.of, evidence_tables(self)))

    def text(self, width: int | None = None) -> str:
        from stepscope.explain.questions import answers_text

        return answers_text(self, width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Answers: {len(self)} questions, {sum(one.status == 'answered' for one in self)} answered>"

    def _repr_html_(self) -> str:
        return write_table(self.table)


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Two runs compared part by part. `comparison` holds the figures; the parts add up to the step time."""

    comparison: "ProfileComparison"

    @property
    def table(self) -> DataTable:
        from stepscope.explain.trace.compare import comparison_table

        return DataTable.of(comparison_table(self.comparison))

    def is_slower(self, limit: float = 0.0) -> bool:
        """Whether the second run is slower by more than `limit` (0.03 is 3%) and by more than the noise. If there are
        too few steps to estimate the noise, only `limit` counts. False if only one of the runs was timed under the
        profiler."""
        from stepscope.explain.trace.compare import regressed

        require_amount("limit", limit)
        return regressed(self.comparison, limit)

    def verdict(self, limit: float = 0.0) -> str:
        """The result of `is_slower` as a sentence."""
        from stepscope.explain.trace.compare import gate_sentence

        require_amount("limit", limit)
        return gate_sentence(self.comparison, limit)

    def __repr__(self) -> str:
        gate = self.comparison.wall
        return f"<RunComparison {gate.a_ns / 1e6:.4g} ms and {gate.b_ns / 1e6:.4g} ms per step: {gate.verdict}>"

    def _repr_html_(self) -> str:
        return write_table(self.table)


class Run:
    """A trace of one or more ranks, or a memory snapshot. `load` and `profile` return it.

    Figures are per step and for the first rank; `ranks` has each rank as its own run.
    """

    def __init__(self, opened: Sequence[Opened]) -> None:
        self.opened = tuple(opened)
        if not self.opened:
            raise ValueError("expected at least one recording, got none")

    def __getstate__(self) -> dict[str, object]:
        """Copies keep only the recordings and derive everything else again."""
        return {"opened": self.opened}

    @classmethod
    def of(cls, recording: Recording, path: Path) -> "Run":
        """The run of a new recording, named after its directory."""
        return cls([Opened.of(path, recording.with_manifest(file=path.name))])

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(one.path for one in self.opened)

    @property
    def name(self) -> str:
        """The script, or a description of the workload if it is known, or else the file name."""
        from stepscope.explain.experiments.cases import describe_case

        manifest = self.opened[0].manifest
        if manifest.loop is not None:
            return manifest.loop.script
        return describe_case(manifest.case) if manifest.case is not None else manifest.file or self.files[0].name

    @property
    def device(self) -> str:
        return self.opened[0].manifest.device

    @property
    def is_of_memory(self) -> bool:
        return self.opened[0].is_of_memory

    @cached_property
    def ranks(self) -> "tuple[Run, ...]":
        return (self,) if len(self.opened) == 1 else tuple(Run([one]) for one in self.opened)

    @cached_property
    def profile(self) -> Profile:
        """Every kernel of the first rank, with its phase, module and operator."""
        if len(self.opened) > 1:
            return self.ranks[0].profile
        return make_profile(self.opened[0].recording, self.opened[0].folder)

    @cached_property
    def rank_times(self) -> "RankTimes | None":
        """When the ranks arrived at their collectives; None for a single rank, or if none can be matched."""
        if len(self.opened) == 1:
            return None
        from stepscope.explain.ranks.matching import match_ranks

        return match_ranks(self.activities)

    @cached_property
    def activities(self) -> "tuple[RankActivity, ...]":
        """What each rank did, as far as ranks are compared by it. Of many ranks, this is all that is in memory."""
        from stepscope.explain.ranks.activity import reduce_rank

        return tuple(
            one.activity.named(one.manifest.file) if one.activity is not None else reduce_rank(rank.require_kernels())
            for one, rank in zip(self.opened, self.ranks, strict=True)
        )

    @cached_property
    def memory(self) -> "MemoryProfile":
        """Every allocation of a memory snapshot."""
        from stepscope.explain.memory import make_memory_profile

        return make_memory_profile(self.opened[0].recording)

    # --- Figures ------------------------------------------------------------------------------------------------------

    @property
    def step_ms(self) -> float:
        """Wall time per step in milliseconds; of the whole trace if it has no marked steps."""
        return self.profile.step_ns / 1e6

    @property
    def idle_share(self) -> float | None:
        """The fraction of a step in which no kernel runs, from 0 to 1; None if it is unknown, as in counters."""
        return None if self.profile.is_serialized else self.profile.idle_share

    @property
    def peak_bytes(self) -> int:
        """Peak allocated memory in bytes; requires a memory snapshot."""
        if not self.is_of_memory:
            raise StepscopeError(
                f"peak_bytes requires a memory snapshot; `{self.name}` is a trace", hint="stepscope memory"
            )
        return self.memory.peak_bytes

    @property
    def classes(self) -> "pl.DataFrame":
        """Time per kernel class: GEMM, attention, elementwise, ..."""
        return self.table("classes").frame

    @property
    def phases(self) -> "pl.DataFrame":
        """Time per phase: forward, loss, backward, optimizer. For a memory snapshot, bytes per phase."""
        return self.table("phases").frame

    @property
    def kernels(self) -> "pl.DataFrame":
        """Time per kernel name, longest first."""
        return self.table("kernels").frame

    @property
    def modules(self) -> "pl.DataFrame":
        """Time per module of the model. For a memory snapshot, bytes at the peak per module."""
        return self.table("modules").frame

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What costs time and how to fix it, what matters most first."""
        return find_once(self.require_kernels(), self.rank_times)

    def require_kernels(self) -> Profile:
        """Return `profile`, which has every kernel. `BoundedRun` raises StepscopeError instead."""
        return self.profile

    # --- Answers ------------------------------------------------------------------------------------------------------

    def table(self, name: RunPart, *, top: int | None = None) -> DataTable:
        """Return a table of `stepscope explain --table`. `top` limits the rows of long tables; None means all."""
        require_choice("table", name, RunPart)
        require_count("top", top)
        if self.is_of_memory:
            from stepscope.explain.memory.memory_tables import make_part

            return DataTable.of(make_part(self.memory, name, top=top or _ALL_ROWS))
        if name in ("ranks", "collectives"):
            return DataTable.of(self._rank_part(name, top))
        return self._time_table(self.profile, name, top)

    def tables(self, name: RunPart, *, top: int | None = None) -> tuple[DataTable, ...]:
        """Return `table` for each rank, or a single one if it compares the ranks."""
        if len(self.opened) == 1 or name in ("ranks", "collectives"):
            return (self.table(name, top=top),)
        require_choice("table", name, RunPart)
        require_count("top", top)
        from stepscope.explain.ranks.rank_tables import label_ranks

        return tuple(
            name_rank(self._time_table(rank.profile, name, top), label)
            for rank, label in zip(self.ranks, label_ranks(self.activities), strict=True)
        )

    def _time_table(self, profile: Profile, name: str, top: int | None) -> DataTable:
        """The table of one rank. Its findings include those that compare it with the other ranks."""
        if name == "findings":
            return DataTable.of(profile_tables.findings_table(self._findings_of(profile)))
        return DataTable.of(_time_part(profile, name, top))

    def _findings_of(self, profile: Profile) -> tuple[Finding, ...]:
        """The findings of one rank, which for the first one are computed once."""
        return self.findings if profile is self.profile else find_once(profile, self.rank_times)

    def _rank_part(self, name: str, top: int | None) -> Table:
        from stepscope.explain.ranks import rank_tables

        if name == "ranks":
            return rank_tables.ranks_table(self.activities, self.rank_times)
        if self.rank_times is not None:
            return rank_tables.late_table(self.rank_times, top=top)
        return rank_tables.collectives_table(self.require_kernels(), top=top)

    def questions(self) -> Answers:
        """Return answers to common questions about a training step, or about memory."""
        if self.is_of_memory:
            from stepscope.explain.memory.answers import answer_memory

            return Answers(answer_memory(self.memory))
        from stepscope.explain.questions import answer

        return Answers(answer([rank.require_kernels() for rank in self.ranks]))

    def compare(self, other: "Run", *, by: "By" = "class") -> RunComparison:
        """Compare this run with `other` by `class`, `phase`, `module` or `kernel`, and tell changes from noise."""
        from stepscope.explain.trace.compare import By, compare

        require_choice("by", by, By)
        if not isinstance(other, Run):
            raise ValueError(f"other must be a run returned by stepscope.load, got {type(other).__name__}")
        a, b = self._same_rank(other), other._same_rank(self)
        names = tuple(
            str(one.files[0]) + (f" (rank {one.rank})" if len(run.opened) > 1 and one.rank is not None else "")
            for run, one in ((self, a), (other, b))
        )
        chosen = tuple(
            f"compared trace: `{one.files[0]}` (one of {len(run.opened)})"
            for run, one in ((self, a), (other, b))
            if len(run.opened) > 1
        )
        profiles = a.require_kernels(), b.require_kernels()
        return RunComparison(compare(*profiles, by=by, names=(names[0], names[1]), remarks=chosen))

    @property
    def rank(self) -> int | None:
        """The rank whose figures these are; None if it is unknown."""
        return self.opened[0].manifest.rank

    def _same_rank(self, other: "Run") -> "Run":
        """The first rank that the other run has as well, else the first."""
        theirs = [one.rank for one in other.ranks]
        return next((one for one in self.ranks if one.rank in theirs), self.ranks[0])

    def figure(self, *, by: "StackedBy" = "category", step: int | str = "last") -> Picture:
        """Return a chart of memory over time, stacked by `category` or `module`. `step` is a step number, counted from
        1, `last` or `all`."""
        from stepscope.explain.memory.timeline import By, memory_timeline

        require_choice("by", by, By)
        return Picture(memory_timeline(self.memory, by=by, step=_choose_step(self.memory, str(step))))

    def page(self, *, overhead: bool = False) -> Page:
        """Return what `stepscope explain` shows: the first rank in full, after a summary of all ranks if there are
        several. `overhead` adds the profiling overhead if it was measured."""
        if self.is_of_memory:
            from stepscope.explain.memory.memory_tables import memory_page

            return memory_page(self.memory)
        has_loop = self.profile.recording.manifest.loop is not None
        tables = [
            *([profile_tables.make_part(self.profile, "loop")] if has_loop else []),
            profile_tables.classes_table(self.profile),
            profile_tables.phases_table(self.profile),
            profile_tables.kernels_table(self.profile, top=_ON_A_PAGE),
            *short_ranges(self.profile),
            *_counters_tables(self.profile, _COUNTED_ON_A_PAGE),
        ]
        if overhead and self.profile.recording.manifest.overhead:
            tables.append(profile_tables.overhead_table(self.profile.recording.manifest))
        headline = profile_tables.headline(self.profile)
        if len(self.opened) > 1:
            from stepscope.explain.ranks.rank_tables import label_ranks, ranks_headline

            shown = label_ranks(self.activities)[0]
            headline = f"{ranks_headline(self.activities, self.rank_times)}\n\nbelow: {shown}\n{headline}"
            late = [self._rank_part("collectives", _ON_A_PAGE)] if self.rank_times is not None else []
            tables = [self._rank_part("ranks", None), *late, *(name_rank(table, shown) for table in tables)]
        return Page(headline=headline, tables=tuple(tables), findings=self.findings)

    @property
    def summary(self) -> "Summary | RanksSummary | MemorySummary":
        """The whole analysis as a typed document."""
        if self.is_of_memory:
            return self.memory.summary
        summaries = tuple(summarise(rank.profile, self._findings_of(rank.profile)) for rank in self.ranks)
        if len(summaries) == 1:
            return summaries[0]
        return RanksSummary(files=summaries, lateness=self.rank_times.lateness if self.rank_times else ())

    def to_json(self) -> str:
        """The document that `stepscope explain --format json` prints."""
        return encode_document(self.summary)

    def to_dict(self) -> dict[str, Any]:
        """The document of `to_json` as a dict."""
        return msgspec.json.decode(self.to_json(), type=dict[str, Any])

    # --- Files --------------------------------------------------------------------------------------------------------

    def save(self, folder: StrPath, *, force: bool = False) -> None:
        """Save the recording as a directory that `load` reads quickly. A recording that cannot be analyzed is not
        saved."""
        assert self.memory if self.is_of_memory else self.require_kernels()
        store.save(self._only().recording, Path(folder), force=force)

    def write_perfetto(self, path: StrPath, *, force: bool = False) -> None:
        """Write a trace for Perfetto in which each kernel has its class, phase, module and layer."""
        from stepscope.render.perfetto import write_perfetto

        recording, kernels = self._only().recording, self.require_kernels().kernels
        write_perfetto(Path(path), kernels, recording.ops, recording.ranges, force=force)

    def _only(self) -> Opened:
        if len(self.opened) > 1:
            raise ValueError(
                f"a run with {len(self.opened)} ranks cannot be saved as one recording; save each rank: run.ranks[0]"
            )
        return self.opened[0]

    def __repr__(self) -> str:
        ranks = f", {len(self.opened)} ranks" if len(self.opened) > 1 else ""
        if self.is_of_memory:
            return f"<Run {self.name!r}: peak {self.peak_bytes:,} bytes>"
        idle = "" if self.idle_share is None else f", {self.idle_share:.0%} idle"
        return f"<Run {self.name!r}{ranks}: {self.step_ms:,.4g} ms {self.profile.clock.say_per_step}{idle}>"

    def _repr_html_(self) -> str:
        from stepscope.api.report import report

        return write_frame(report(self).html)


class BoundedRun(Run):
    """A trace larger than memory. The breakdown is complete; anything that needs single kernels raises
    `StepscopeError`."""

    profile: "BoundedProfile"  # sums over kernels instead of single kernels

    def __init__(self, path: Path) -> None:
        from stepscope.explain.trace.bounded import make_bounded_profile
        from stepscope.recording.readers.formats import require_trace

        require_trace(path)
        self.profile = make_bounded_profile(path)
        super().__init__([Opened.of(path, self.profile.recording)])

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a run loaded with bounded=True cannot be copied or pickled; load it again")

    def table(self, name: RunPart, *, top: int | None = None) -> DataTable:
        from stepscope.explain.trace.bounded import make_part

        require_count("top", top)
        return DataTable.of(make_part(self.profile, name, top=top))

    def page(self, *, overhead: bool = False) -> Page:
        from stepscope.explain.trace.bounded import make_page

        if overhead:
            raise ValueError(
                "overhead=True requires a recording made by stepscope; a trace has no overhead measurement"
            )
        return make_page(self.profile)

    @property
    def summary(self) -> Summary:
        return summarise(self.profile, ())

    def require_kernels(self) -> NoReturn:
        raise StepscopeError(
            "this requires the whole trace in memory", hint="stepscope.load(path), without bounded=True"
        )


def _choose_step(profile: "MemoryProfile", step: str) -> int | None:
    """The index of a step, or None for all steps. `step` is `last`, `all`, or a step number, counted from 1."""
    if step == "all" or (step == "last" and not profile.steps):
        return None
    if not profile.steps:
        raise StepscopeError(
            f"step `{step}` not found: this recording has no step markers", detail="expected last or all"
        )
    if step == "last":
        return profile.last_plain_step
    if step.isdecimal() and int(step) - 1 in profile.steps:
        return int(step) - 1
    raise StepscopeError(
        f"step `{step}` not found in this recording",
        detail=f"expected last, all, or a number from {profile.steps[0] + 1} to {profile.steps[-1] + 1}",
    )


def _time_part(profile: Profile, name: str, top: int | None) -> Table:
    match name:
        case "roofline":
            from stepscope.explain.trace.roofline import roofline_table

            return roofline_table(profile, top=top or _ALL_ROWS)
        case "counters":
            for table in _counters_tables(profile, top):
                return table
            raise StepscopeError(
                "this recording has no hardware counters", hint="on a machine with a GPU: stepscope profile --counters"
            )
        case _ if name in profile_tables.PARTS:
            return profile_tables.make_part(profile, name, top=top)
        case _:
            raise StepscopeError(f"table `{name}` requires a memory snapshot; this is a trace", hint="stepscope memory")


def _counters_tables(profile: Profile, top: int | None) -> list[Table]:
    """The counters table, or nothing if the recording has no counters that it shows."""
    if not profile.recording.counters.height:
        return []
    from stepscope.explain.trace.counters import has_counters, kernels_table

    return [kernels_table(profile.recording, top=top)] if has_counters(profile.recording) else []
