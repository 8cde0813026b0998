"""Several runs in order, each compared with one of them, the baseline: as a table, as a trend and as stacked bars.

A difference is judged by the same test as between two runs. Results of `bench` with several cases are compared case by
case, and a case is one line of the trend.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stepscope.explain.memory.categories import CATEGORIES
from stepscope.explain.story.comparison.changes import DECIDES_WORK
from stepscope.explain.story.comparison.run_figures import RunFigures
from stepscope.explain.story.comparison.step_verdict import are_comparable, judge_steps, say_doubt
from stepscope.explain.story.phrases import say_started
from stepscope.explain.trace.profile import order_phases
from stepscope.explain.trace.run_labels import label_runs
from stepscope.findings import Bars, Cell, Column, Quantity, Table
from stepscope.findings.compared import Trend, TrendLine, TrendPoint
from stepscope.units import count_noun, say_list

_MS = 1e6
_MOST_LINES = 8  # of a trend: more cannot be distinguished
_MOST_COLUMNS = 2  # last runs in a table of cases
_MOST_PARTS = 9  # of a stacked bar; the others are one
_REST, _IDLE = "the rest", "idle"
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
        return cls(labels=label_runs([run.identity for run in runs]), cases=cases, baseline=baseline)

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


def tabulate_runs(series: RunSeries) -> Table:
    """A row per run; with several cases, the rows of a case follow each other."""
    columns = [one for one in _list_columns(series) if any(cell is not None for cell in one[1])]
    return Table(
        title="Runs",
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        notes=tuple(_write_notes(series)),
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
    columns = (Column(key=f"{name or _IDLE}_ms", label=name or _IDLE, kind="ms") for name in names)
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


# --- Charts -----------------------------------------------------------------------------------------------------------


def draw_step_trend(series: RunSeries) -> Trend | None:
    """The step time of every run; of runs with several cases, relative to the baseline. None if no two are known."""
    title = "Step time" if series.is_step else "Length of the trace"
    if series.is_of_runs:
        return _make_trend(series, title, title.lower(), "ms", _list_lines(series, _place_step))
    lines = [line for line in _list_lines(series, _place_ratio) if len(line.points) > 1]
    shown = sorted(lines, key=lambda line: -max(abs(point.value - 1) for point in line.points))[:_MOST_LINES]
    rest = len(lines) - len(shown)
    notes = (f"the {len(shown)} cases that change most; {rest} more are in the table",) if rest else ()
    kept = [line for line in lines if line in shown]
    relative = f"{title}, relative to {series.labels[series.baseline]}"
    return _make_trend(series, relative, title.lower(), "ratio", kept, notes)


def _list_lines(series: RunSeries, place: Callable[[CasePoint], TrendPoint | None]) -> list[TrendLine]:
    """A line per case with the points that have a place."""
    lines = []
    for case in series.cases:
        points = [placed for one in series.points if one.case is case and (placed := place(one)) is not None]
        lines += [TrendLine(name=case.name, points=tuple(points))] if points else []
    return lines


def _place_step(point: CasePoint) -> TrendPoint | None:
    step, spread = point.figures.step, point.figures.spread
    if step is None:
        return None
    low, high = (spread.p20 / _MS, spread.p80 / _MS) if spread else (None, None)
    return TrendPoint(run=point.run, value=step.step_ns / _MS, low=low, high=high, verdict=point.verdict)


def _place_ratio(point: CasePoint) -> TrendPoint | None:
    spread, base = point.figures.spread, point.base.step if point.base else None
    if base is None or point.ratio is None:
        return None
    low, high = (spread.p20 / base.step_ns, spread.p80 / base.step_ns) if spread else (None, None)
    return TrendPoint(run=point.run, value=point.ratio, low=low, high=high, verdict=point.verdict)


def draw_memory_trend(series: RunSeries) -> Trend | None:
    """The peak memory of every run with one case; None if no two differ, or they were measured in different ways."""
    known = [point.figures for point in series.points if point.figures.peak_bytes is not None]
    ways, sizes = {one.is_of_process for one in known}, {one.peak_bytes for one in known}
    if not series.is_of_runs or len(ways) > 1 or len(sizes) < 2:
        return None
    return _make_trend(series, "Peak memory", "peak memory", "bytes", _list_lines(series, _place_peak))


def _place_peak(point: CasePoint) -> TrendPoint | None:
    peak = point.figures.peak_bytes
    return None if peak is None else TrendPoint(run=point.run, value=float(peak))


def draw_throughput_trend(series: RunSeries) -> Trend | None:
    """The tokens per second of runs that do not do the same work, which their step times cannot compare."""
    if not series.is_of_runs or len({point.figures.work for point in series.points}) == 1:
        return None
    lines = _list_lines(series, _place_tokens)
    return _make_trend(series, "Tokens per second", "tokens per second", "count", lines)


def _place_tokens(point: CasePoint) -> TrendPoint | None:
    tokens = point.figures.facts.get("tokens")
    return TrendPoint(run=point.run, value=float(tokens)) if isinstance(tokens, int | float) else None


def _make_trend(
    series: RunSeries,
    title: str,
    label: str,
    kind: Quantity,
    lines: Sequence[TrendLine],
    notes: tuple[str, ...] = (),
) -> Trend | None:
    assert kind in ("ms", "bytes", "count", "ratio"), "kinds of a trend"
    if sum(len(line.points) for line in lines) < 2:
        return None
    return Trend(
        title=title,
        label=label,
        kind=kind,
        runs=series.labels,
        lines=tuple(lines),
        baseline=series.baseline,
        notes=notes,
    )


def stack_parts(series: RunSeries) -> Iterator[tuple[str, Bars]]:
    """Yield the steps of runs with one case each by class and by phase, and their peaks by category, with a key."""
    if not series.is_of_runs:
        return
    figures = [point.figures for point in series.in_order]
    names = [series.labels[point.run] for point in series.in_order]
    what = "Step" if series.is_step else "Trace"
    classes = [{name or _IDLE: time / _MS for name, time in one.classes.items()} for one in figures]
    phases = [{name: time / _MS for name, time in one.phases.items()} for one in figures]
    categories = [{name: float(size) for name, size in one.categories.items() if size} for one in figures]
    of_bench = any(one.phases and not one.classes for one in figures)
    means = ("means, which add up; the table has medians",) if of_bench else ()
    if bars := _stack(f"{what} time by kernel class", "ms", names, classes):
        yield "classes", bars
    if bars := _stack(f"{what} time by phase", "ms", names, phases, order_phases, means):
        yield "phases", bars
    if bars := _stack("Peak memory by category", "bytes", names, categories, _order_categories):
        yield "categories", bars


def _order_categories(names: Iterable[str]) -> list[str]:
    return sorted(names, key=CATEGORIES.index)


def _stack(
    title: str,
    kind: Quantity,
    labels: Sequence[str],
    values: Sequence[dict[str, float]],
    order: Callable[[Iterable[str]], list[str]] | None = None,
    notes: tuple[str, ...] = (),
) -> Bars | None:
    """One bar per run that has the values; None if fewer than two do."""
    known = [(label, one) for label, one in zip(labels, values, strict=True) if one]
    if len(known) < 2:
        return None
    sums: dict[str, float] = {}
    for _, one in known:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    largest = sorted(sums, key=lambda name: (name == _IDLE, -sums[name], name))
    shown = largest if len(largest) <= _MOST_PARTS else [*largest[: _MOST_PARTS - 1], *largest[-1:]]
    series = order(shown) if order else shown
    rest = [name for name in largest if name not in shown]
    columns = [tuple(one.get(name, 0.0) for _, one in known) for name in series]
    columns += [tuple(sum(one.get(name, 0.0) for name in rest) for _, one in known)] if rest else []
    absent = len(labels) - len(known)
    lacking = (f"{count_noun(absent, 'run')} without these figures",) if absent else ()
    return Bars(
        title=title,
        kind=kind,
        labels=tuple(label for label, _ in known),
        series=(*series, *([_REST] if rest else [])),
        values=tuple(columns),
        is_stacked=True,
        notes=(*notes, *lacking),
    )
