"""Several runs in order, each compared with one of them, the baseline, and their tables.

A difference is judged by the same test as between two runs. Results of `bench` with several cases are compared case by
case, and a case is one line of the trend.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stepscope.explain.story.comparison.changes import DECIDES_WORK
from stepscope.explain.story.comparison.run_figures import RunFigures
from stepscope.explain.story.comparison.step_verdict import are_comparable, judge_steps, say_doubt
from stepscope.explain.story.phrases import say_started
from stepscope.explain.trace.profile import order_phases
from stepscope.explain.trace.run_labels import label_runs
from stepscope.findings import Cell, Column, Quantity, Table
from stepscope.units import count_noun, say_list

_MS = 1e6
_MOST_COLUMNS = 2  # last runs in a table of cases
_MOST_NAME = 40  # characters of a run: several settings may differ, of which the last ones tell runs apart
IDLE = "idle"  # the name of idle time among classes
_FACTS: tuple[tuple[str, str, Quantity], ...] = (
    ("tokens", "tokens/s", "count"),
    ("mfu", "MFU", "share"),
    ("busy", "GPU busy", "share"),
)
Work = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrendCase:
    """The same work in every run, None where a run does not have it. The name is empty if all runs do one work."""

    name: str
    figures: tuple[RunFigures | None, ...]

    def find_base(self, baseline: int) -> RunFigures | None:
        """What the others are compared with: the baseline, or the first run that has the case if the baseline does not.
        None if no other run does the same work."""
        known = [one for one in self.figures if one is not None]
        base = self.figures[baseline] or known[0]
        return base if sum(one.work == base.work for one in known) > 1 else None


@dataclass(frozen=True, kw_only=True)
class CasePoint:
    """One case in one run, next to the figures that it is compared with, if there are any."""

    case: TrendCase
    run: int
    figures: RunFigures
    base: RunFigures | None

    @property
    def ratio(self) -> float | None:
        """The step as a multiple of the baseline's; None if one is unknown."""
        if self.base is None or self.base.step is None or self.figures.step is None:
            return None
        return self.figures.step.step_ns / self.base.step.step_ns

    @cached_property
    def verdict(self) -> str:
        """Empty where there is no ratio."""
        if self.ratio is None or self.base is None:
            return ""
        return "baseline" if self.figures is self.base else judge_steps(self.base.step, self.figures.step)


@dataclass(frozen=True, kw_only=True)
class RunSeries:
    """Runs in order under their labels, the cases that they share, and which of the runs is the baseline."""

    labels: tuple[str, ...]
    cases: tuple[TrendCase, ...]
    baseline: int = 0

    @classmethod
    def of_runs(cls, runs: Sequence[RunFigures], baseline: int = 0) -> "RunSeries":
        """Runs of one case each. Those that do the same work are a case, unless no two of them do."""
        works = list(dict.fromkeys(run.work for run in runs))
        groups = [(work, [run if run.work == work else None for run in runs]) for work in works]
        if len(works) in (1, len(runs)):
            groups = [(works[0], list(runs))]
        names = _name_works([work for work, _ in groups])
        cases = tuple(TrendCase(name=name, figures=tuple(some)) for name, (_, some) in zip(names, groups, strict=True))
        labels = label_runs([run.identity for run in runs], most=_MOST_NAME)
        return cls(labels=labels, cases=cases, baseline=baseline)

    @cached_property
    def points(self) -> tuple[CasePoint, ...]:
        """Every case in every run that has it."""
        return tuple(
            CasePoint(case=case, run=run, figures=figures, base=case.find_base(self.baseline))
            for case in self.cases
            for run, figures in enumerate(case.figures)
            if figures is not None
        )

    @property
    def last(self) -> int:
        """The last run that is not the baseline."""
        return len(self.labels) - (2 if self.baseline == len(self.labels) - 1 else 1)

    @property
    def in_order(self) -> list[CasePoint]:
        """The points by run, for runs of one case each."""
        return sorted(self.points, key=lambda point: point.run)

    @property
    def is_single(self) -> bool:
        """Whether there is one case."""
        return len(self.cases) == 1

    @property
    def is_of_runs(self) -> bool:
        """Whether each run has one case."""
        return len(self.points) == len(self.labels) == len({point.run for point in self.points})

    @property
    def is_step(self) -> bool:
        """Whether times are those of steps, not of whole traces."""
        return all(point.figures.is_step for point in self.points if point.figures.step is not None)

    @cached_property
    def differing(self) -> dict[str, list[str]]:
        """The settings, devices and versions that differ between the runs, with the value of each point; of several
        cases, those that differ between the runs of one."""
        settings = [point.figures.settings for point in self.points]
        known = [settings]
        if not self.is_of_runs:
            known = [[one.settings for one in case.figures if one is not None] for case in self.cases]
        names = dict.fromkeys(name for one in settings for name in one)
        found = [name for name in names if any(len({one.get(name) for one in some}) > 1 for some in known)]
        return {name: [one.get(name, "") for one in settings] for name in found}


def _name_works(works: Sequence[Work]) -> list[str]:
    """The works by what differs between them; empty for a single one."""
    if len(works) < 2:
        return [""] * len(works)
    names = [name for name in DECIDES_WORK if name != "device"]
    differing = [at for at in range(len(names)) if len({work[at] for work in works}) > 1]
    return [", ".join(_say_work(names[at], work[at]) for at in differing) for work in works]


def _say_work(name: str, value: str) -> str:
    if not value:
        return f"unknown {name}"
    return value if name in ("model", "mode") else f"{name} {value}"


# --- Tables -----------------------------------------------------------------------------------------------------------


def tabulate_runs(series: RunSeries, *, warnings: Iterable[str] = ()) -> Table:
    """A row per run; with several cases, the rows of a case follow each other. Its notes begin with `warnings`."""
    columns = [one for one in _list_columns(series) if any(cell is not None for cell in one[1])]
    return Table(
        title="Runs",
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        notes=(*warnings, *_write_notes(series)),
    )


def _list_columns(series: RunSeries) -> Iterator[tuple[Column, list[Cell]]]:
    points, figures = series.points, [point.figures for point in series.points]
    steps, spreads = [one.step for one in figures], [one.spread for one in figures]
    if not series.is_single:
        yield Column(key="case", label="case"), [point.case.name for point in points]
    yield Column(key="number", label="#", kind="count"), [point.run + 1 for point in points]
    yield Column(key="run", label="run"), [series.labels[point.run] for point in points]
    label = "step ms" if series.is_step else "trace ms"
    yield Column(key="step_ms", label=label, kind="ms"), [one.step_ns / _MS if one else None for one in steps]
    yield Column(key="spread", label="spread", kind="share"), [one.spread if one else None for one in spreads]
    ratios: list[Cell] = [point.ratio for point in points]
    label = f"vs {series.labels[series.baseline]}" if series.is_single else "vs baseline"
    yield Column(key="ratio", label=label, kind="ratio"), ratios
    yield Column(key="verdict", label="verdict"), [point.verdict or point.figures.failure or None for point in points]
    yield Column(key="peak_bytes", label="peak memory", kind="bytes"), [one.peak_bytes for one in figures]
    for key, name, kind in _FACTS:
        yield Column(key=key, label=name, kind=kind), [one.facts.get(key) for one in figures]
    started: list[Cell] = [say_started(one.started) or None for one in figures]
    is_one_day = len({one.started[:10] for one in figures}) < 2
    yield Column(key="started", label="recorded", detail=is_one_day), started
    are_commits = len({one.commit for one in figures}) > 1
    yield Column(key="commit", label="commit", detail=not are_commits), [one.commit or None for one in figures]
    for key in ("p20", "p80"):
        cells: list[Cell] = [getattr(one, key) / _MS if one else None for one in spreads]
        yield Column(key=f"{key}_ms", label=key, kind="ms", detail=True), cells
    counts: list[Cell] = [len(one.samples) if one else None for one in steps]
    yield Column(key="steps", label="steps", kind="count", detail=True), counts
    yield Column(key="timed_by", label="timed by", detail=True), [one.timed_by if one else None for one in steps]
    yield Column(key="device", label="device", detail=True), [one.identity.device or None for one in figures]
    yield Column(key="torch", label="torch", detail=True), [one.identity.torch or None for one in figures]
    yield Column(key="file", label="file", detail=True), [one.path for one in figures]


def tabulate_cases(series: RunSeries) -> Table | None:
    """The step of every case in the last runs, the largest change first: that from the baseline to the last run. None
    for runs of one case each."""
    if series.is_of_runs:
        return None
    shown = sorted({series.baseline, *range(len(series.labels))[-_MOST_COLUMNS:]})
    points = {(point.case.name, point.run): point for point in series.points}
    rows: list[tuple[Cell, ...]] = []
    for case in series.cases:
        here = [points.get((case.name, run)) for run in shown]
        steps = [one.figures.step.step_ns / _MS if one and one.figures.step else None for one in here]
        end = points.get((case.name, series.last))
        verdict = (end.verdict or end.figures.failure or None) if end else None
        rows.append((case.name, end.ratio if end else None, verdict, *steps))
    rows.sort(key=lambda row: -abs(ratio - 1) if isinstance(ratio := row[1], float) else 1.0)
    keys = [f"run_{run + 1}_ms" for run in shown]
    left_out = len(series.labels) - len(shown)
    notes = [f"ratio and verdict: {series.labels[series.last]} compared with {series.labels[series.baseline]}"]
    notes += [f"{count_noun(left_out, 'run')} in between not shown"] if left_out else []
    return Table(
        title="Step time of every case, in ms",
        columns=(
            Column(key="case", label="case"),
            Column(key="ratio", label="ratio", kind="ratio"),
            Column(key="verdict", label="verdict"),
            *(Column(key=key, label=series.labels[run], kind="ms") for key, run in zip(keys, shown, strict=True)),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
        compared=tuple(keys),
    )


def tabulate_parts(series: RunSeries, by: Literal["class", "phase"]) -> Table | None:
    """The step of each run by class or phase, a column each. None if no run has them."""
    known = [(point, point.figures.classes if by == "class" else point.figures.phases) for point in series.points]
    known = [(point, parts) for point, parts in known if parts]
    sums: dict[str, float] = {}
    for _, parts in known:
        for name, time in parts.items():
            sums[name] = sums.get(name, 0.0) + time
    names = order_phases(sums) if by == "phase" else sorted(sums, key=lambda name: (not name, -sums[name], name))
    rows = [
        (
            *(() if series.is_of_runs else (point.case.name,)),
            series.labels[point.run],
            *(parts.get(name, 0.0) / _MS for name in names),
        )
        for point, parts in known
    ]
    if not rows:
        return None
    case = () if series.is_of_runs else (Column(key="case", label="case"),)
    columns = (Column(key=f"{name or IDLE}_ms", label=name or IDLE, kind="ms") for name in names)
    title = f"{'Step' if series.is_step else 'Trace'} time by {by}, in ms"
    return Table(title=title, columns=(*case, Column(key="run", label="run"), *columns), rows=tuple(rows))


def find_slower(series: RunSeries, limit: float) -> list[CasePoint]:
    """The points whose step is longer than the baseline's by more than `limit` and by more than noise. With too few
    steps to judge noise, only the limit counts."""
    found = []
    for point in series.points:
        base = point.base.step if point.base is not None else None
        is_judged = point.verdict == "slower" or (
            point.verdict == "cannot tell" and are_comparable(base, point.figures.step)
        )
        if is_judged and point.ratio is not None and point.ratio > 1 + limit:
            found.append(point)
    return found


def _write_notes(series: RunSeries) -> Iterator[str]:
    verdicts = {point.verdict for point in series.points}
    if verdicts & {"slower", "faster", "noise"}:
        yield "verdicts: by Welch's 95% interval over the steps of each run; two identical runs can differ by more"
    doubts = [
        say_doubt(point.base.step if point.base else None, point.figures.step)
        for point in series.points
        if point.verdict == "cannot tell"
    ]
    if doubts:
        yield f"cannot tell: {'; '.join(dict.fromkeys(doubts))}"
    if any(point.figures.spread for point in series.points):
        yield "spread: p20 to p80 of the steps, relative to their median"
    if len({point.figures.is_of_process for point in series.points if point.figures.peak_bytes is not None}) > 1:
        yield "peak memory was measured in different ways, and is not comparable"
    if series.is_of_runs and (work := [name for name in series.differing if name in DECIDES_WORK and name != "device"]):
        yield f"the runs differ in {say_list(work)}; only runs that do the same work are compared"


def list_warnings(series: RunSeries) -> Iterator[str]:
    """Yield what a comparison of two runs warns of, besides settings that differ."""
    profilers = list(dict.fromkeys(point.figures.profiler for point in series.points if point.figures.profiler))
    if len(profilers) > 1:
        yield f"warning: the profilers differ, and so does their overhead: {say_list(profilers)}"
    if any(not any(point.figures.work) for point in series.points):
        yield "workload unknown: check that all runs have the same model and settings"
    for point in series.points:
        for doubt in point.figures.doubts:
            yield f"warning: {series.labels[point.run]}: {doubt}"


def tabulate_settings(series: RunSeries) -> Table | None:
    """The settings that differ, a column each; None if there are none."""
    differing = series.differing
    if not differing:
        return None
    points = series.points
    names: list[list[Cell]] = [[series.labels[point.run] for point in points]]
    columns = [Column(key="run", label="run")]
    if not series.is_single:
        names.insert(0, [point.case.name for point in points])
        columns.insert(0, Column(key="case", label="case"))
    columns += [Column(key=name.replace(" ", "_"), label=name) for name in differing]
    cells = [*names, *([value or None for value in values] for values in differing.values())]
    notes = ("all other known settings are equal",)
    return Table(
        title="Settings that differ", columns=tuple(columns), rows=tuple(zip(*cells, strict=True)), notes=notes
    )
