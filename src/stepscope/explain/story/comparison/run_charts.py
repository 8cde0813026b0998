"""Charts of several runs: trends of step times, tokens per second and peaks, and bars of what each consists of."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from stepscope.explain.memory.categories import CATEGORIES
from stepscope.explain.story.comparison.run_series import IDLE, CasePoint, RunSeries
from stepscope.explain.trace.profile import order_phases
from stepscope.findings import Bars, Quantity
from stepscope.findings.compared import Trend, TrendLine, TrendPoint
from stepscope.units import count_noun

_MS = 1e6
_MOST_LINES = 8  # of a trend: more cannot be distinguished
_MOST_PARTS = 9  # of a stacked bar; the others are one
_REST = "the rest"


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
    classes = [{name or IDLE: time / _MS for name, time in one.classes.items()} for one in figures]
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
    largest = sorted(sums, key=lambda name: (name == IDLE, -sums[name], name))
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
