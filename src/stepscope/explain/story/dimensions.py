"""A breakdown dimension by dimension, added up: what a list of values shows, and a table for each."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.findings import Breakdown, Cell, Column, Dimension, Table
from stepscope.units import say_time

_MS, _US = 1e6, 1e3
# Of these a row also says its class, and how long one of them takes.
_SINGLE = "kernel"
# These have an order of their own; the others stand by time.
ORDERED = ("phase", "layer")

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A dimension's values, in the order in which they are shown, and their totals, a row a run."""

    dimension: Dimension
    order: tuple[int, ...]
    times_ns: Numbers
    counts: Numbers
    shortest_ns: Numbers
    longest_ns: Numbers


def tabulate_dimensions(breakdown: Breakdown) -> Iterable[tuple[str, Table]]:
    """A table for each dimension, kernels with their class and how long one of them takes."""
    for place, dimension in enumerate(breakdown.dimensions):
        totals = add_up(breakdown, place)
        columns = [Column(key=dimension.key, label=dimension.label.lower())]
        cells: list[Sequence[Cell]] = [[dimension.values[at] or "unknown" for at in totals.order]]
        if dimension.key == _SINGLE:
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


def add_up(breakdown: Breakdown, place: int) -> Totals:
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
    elif dimension.key not in ORDERED:
        weights = times.max(axis=0) if len(times) else np.zeros(size)
        order = sorted(order, key=lambda at: -weights[at])
    return Totals(
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
    breakdown: Breakdown, place: int, totals: Totals, columns: list[Column], cells: list[Sequence[Cell]]
) -> None:
    """The class of each kernel: that of its first row, as a name has one class."""
    keys = [dimension.key for dimension in breakdown.dimensions]
    if "class" not in keys:
        return
    at = keys.index("class")
    classes = {row[place]: breakdown.dimensions[at].values[row[at]] for row in reversed(breakdown.places)}
    columns.append(Column(key="class", label="class"))
    cells.append([classes.get(value, "") for value in totals.order])


def _add_run(totals: Totals, run: int, name: str, columns: list[Column], cells: list[Sequence[Cell]]) -> None:
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
    if totals.dimension.key == _SINGLE:
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


def _add_change(totals: Totals, columns: list[Column], cells: list[Sequence[Cell]]) -> None:
    before, after = totals.times_ns
    columns.append(Column(key="change_ms", label="change ms", kind="ms"))
    cells.append([float(after[at] - before[at]) / _MS for at in totals.order])


def _describe_walls(breakdown: Breakdown) -> Iterable[str]:
    for name, wall, idle in zip(breakdown.runs, breakdown.walls_ns, breakdown.idles_ns, strict=True):
        who = f"{name}: a" if name else "A"
        yield f"{who} step takes {say_time(wall)}; nothing runs for {say_time(idle)} of it."
