"""A breakdown on paper: where the page narrows one view by another, a paper has bars and a table for each dimension."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.findings import Bars, Breakdown, Cell, Column, Dimension, Table
from stepscope.report.bars_chart import format_length
from stepscope.report.numbers import MISSING
from stepscope.report.site.colours import colour_of
from stepscope.report.site.text import format_value

_MOST_BARS = 20
_MS, _US = 1e6, 1e3
# Too many for bars: kernels are in the table alone.
_TABLE_ONLY = ("kernel",)
# These have an order of their own; the others stand by time.
_ORDERED = ("phase", "layer")

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarsOfTime:
    """Bars with what is written beside them and the colours of their labels, none where all have one."""

    key: str
    bars: Bars
    texts: tuple[tuple[str, ...], ...]
    colours: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """A dimension's values, in the order in which they are shown, and their totals, a row a run."""

    dimension: Dimension
    order: tuple[int, ...]
    times_ns: Numbers
    counts: Numbers
    shortest_ns: Numbers
    longest_ns: Numbers


def draw_dimensions(breakdown: Breakdown) -> Iterable[BarsOfTime]:
    """Bars for each dimension that has values to compare."""
    for place, dimension in enumerate(breakdown.dimensions):
        if dimension.key not in _TABLE_ONLY and dimension.values:
            yield _draw(breakdown, _add_up(breakdown, place))


def _draw(breakdown: Breakdown, totals: _Totals) -> BarsOfTime:
    dimension = totals.dimension
    shown = totals.order if dimension.key in _ORDERED else totals.order[:_MOST_BARS]
    labels = [dimension.values[at] or "unknown" for at in shown]
    times = [[float(own[at]) / _MS for at in shown] for own in totals.times_ns]
    wholes = [max(float(own.sum()) / _MS, 1e-12) for own in totals.times_ns]
    texts = tuple(
        tuple(f"{format_length('ms', time)}, {time / whole:.1%}" if time else MISSING for time in own)
        for own, whole in zip(times, wholes, strict=True)
    )
    bars = Bars(
        title=f"{breakdown.title}, by {dimension.label.lower()}",
        kind="ms",
        labels=tuple(labels),
        series=breakdown.runs,
        values=tuple(map(tuple, times)),
        notes=(*_describe_rest(totals, len(shown)), *breakdown.notes),
    )
    colours = tuple(colour_of(label)[0] for label in labels) if dimension.key == "class" else ()
    return BarsOfTime(key=dimension.key, bars=bars, texts=texts, colours=colours)


def _describe_rest(totals: _Totals, num_shown: int) -> Iterable[str]:
    """How much has no bar."""
    rest = list(totals.order[num_shown:])
    if rest:
        shares = [float(own[rest].sum()) / max(float(own.sum()), 1e-12) for own in totals.times_ns]
        listed = " and ".join(f"{share:.1%}" for share in shares)
        yield f"{len(rest):,} others, each shorter, take {listed} of the time."


def tabulate_dimensions(breakdown: Breakdown) -> Iterable[tuple[str, Table]]:
    """A table for each dimension, kernels with their class and how long one of them takes."""
    for place, dimension in enumerate(breakdown.dimensions):
        totals = _add_up(breakdown, place)
        columns = [Column(key=dimension.key, label=dimension.label.lower())]
        cells: list[Sequence[Cell]] = [[dimension.values[at] or "unknown" for at in totals.order]]
        if dimension.key in _TABLE_ONLY:
            _add_class(breakdown, place, totals, columns, cells)
        for run, name in enumerate(breakdown.runs):
            _add_run(totals, run, name, columns, cells)
        if len(breakdown.runs) == 2:
            _add_change(totals, columns, cells)
        if dimension.details:
            columns.append(Column(key="detail", label="detail", detail=True))
            cells.append([dimension.details[at] for at in totals.order])
        title = f"{breakdown.title}, by {dimension.label.lower()}"
        notes = (*_describe_walls(breakdown), *breakdown.notes)
        rows = tuple(zip(*cells, strict=True))
        yield dimension.key, Table(title=title, columns=tuple(columns), rows=rows, notes=notes)


def _add_up(breakdown: Breakdown, place: int) -> _Totals:
    dimension = breakdown.dimensions[place]
    size = len(dimension.values)
    members = np.array([row[place] for row in breakdown.places], dtype=np.int64)
    times = np.array([np.bincount(members, _numbers(own), size) for own in breakdown.times_ns])
    counts = np.array([np.bincount(members, _numbers(own), size) for own in breakdown.counts])
    shortest = np.full(times.shape, np.inf)
    longest = np.full(times.shape, -np.inf)
    for run in range(len(breakdown.runs)):
        np.minimum.at(shortest[run], members, _numbers(breakdown.shortest_ns[run], np.inf))
        np.maximum.at(longest[run], members, _numbers(breakdown.longest_ns[run], -np.inf))
    order: Iterable[int] = range(size)
    if dimension.key == "layer":
        order = sorted(order, key=lambda at: _by_number(dimension.values[at]))
    elif dimension.key not in _ORDERED:
        weights = times.max(axis=0) if len(times) else np.zeros(size)
        order = sorted(order, key=lambda at: -weights[at])
    return _Totals(
        dimension=dimension,
        order=tuple(order),
        times_ns=times,
        counts=counts,
        shortest_ns=shortest,
        longest_ns=longest,
    )


def _numbers(values: Sequence[float | None], instead: float = 0.0) -> Numbers:
    return np.array([instead if value is None else value for value in values], dtype=np.float64)


def _by_number(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Layer 10 after layer 9, and what has no number last."""
    parts = re.findall(r"\d{1,9}|\D+", name[:200])
    numbers = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return not any(number >= 0 for number, _ in numbers), numbers


def _add_class(
    breakdown: Breakdown, place: int, totals: _Totals, columns: list[Column], cells: list[Sequence[Cell]]
) -> None:
    """The class of each kernel: that of its first row, as a name has one class."""
    keys = [dimension.key for dimension in breakdown.dimensions]
    if "class" not in keys:
        return
    at = keys.index("class")
    classes = {row[place]: breakdown.dimensions[at].values[row[at]] for row in reversed(breakdown.places)}
    columns.append(Column(key="class", label="class"))
    cells.append([classes.get(value, "") for value in totals.order])


def _add_run(totals: _Totals, run: int, name: str, columns: list[Column], cells: list[Sequence[Cell]]) -> None:
    suffix, label = (f"_{'abcdefgh'[run]}", f"{name} ") if name else ("", "")
    times, counts = totals.times_ns[run], totals.counts[run]
    whole = max(float(times.sum()), 1e-12)
    order = totals.order
    columns += [
        Column(key=f"ms{suffix}", label=f"{label}ms", kind="ms"),
        Column(key=f"share{suffix}", label=f"{label}share", kind="share"),
        Column(key=f"count{suffix}", label=f"{label}count", kind="number", detail=bool(name)),
    ]
    cells += [
        [float(times[at]) / _MS for at in order],
        [float(times[at]) / whole for at in order],
        [float(counts[at]) for at in order],
    ]
    if totals.dimension.key in _TABLE_ONLY:
        columns += [
            Column(key=f"mean_us{suffix}", label=f"{label}mean µs", kind="us", detail=bool(name)),
            Column(key=f"min_us{suffix}", label=f"{label}min µs", kind="us", detail=True),
            Column(key=f"max_us{suffix}", label=f"{label}max µs", kind="us", detail=True),
        ]
        cells += [
            [float(times[at]) / float(counts[at]) / _US if counts[at] else None for at in order],
            [_finite(totals.shortest_ns[run][at]) for at in order],
            [_finite(totals.longest_ns[run][at]) for at in order],
        ]


def _finite(value_ns: float) -> float | None:
    return float(value_ns) / _US if np.isfinite(value_ns) else None


def _add_change(totals: _Totals, columns: list[Column], cells: list[Sequence[Cell]]) -> None:
    before, after = totals.times_ns
    columns.append(Column(key="change_ms", label="change ms", kind="ms"))
    cells.append([float(after[at] - before[at]) / _MS for at in totals.order])


def _describe_walls(breakdown: Breakdown) -> Iterable[str]:
    for name, wall, idle in zip(breakdown.runs, breakdown.walls_ns, breakdown.idles_ns, strict=True):
        who = f"{name}: a" if name else "A"
        wall_text, idle_text = format_value("ms", wall / _MS), format_value("ms", idle / _MS)
        yield f"{who} step takes {wall_text}; nothing runs for {idle_text} of it."
