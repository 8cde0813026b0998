"""Where everything of a timeline lies: which slices are drawn, how the areas stack, where the pieces are inside them.

Pieces lie at the bottom of their area, the oldest lowest, and what is not told apart lies on top of them. The other way
round was tried: the small allocations come and go all the time, and every piece above them trembles. When a piece ends,
those above it come down, as what is drawn is how much there is and not at which address.

Neighbouring slices that share a place in the picture are drawn as the highest of them. Means would be smoother, and
would show a peak that never was. The canvas of the page stacks in the same way, at any zoom (`site/timeline.js`).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepscope.findings import Axis, Piece, Stretch, Timeline
from stepscope.render.numbers import BYTE_UNITS, format_measured, format_value

DEFAULT_DETAIL = 0.1
_MOST_LANES = 3  # of stretches over one another

Heights = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest instant: in which slice, when, and how high."""

    slice: int
    time: float
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceShape:
    """One piece as it lies in the picture: in columns `first` and on, from `low` to `high`."""

    piece: Piece
    first: int
    low: Heights
    high: Heights


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A timeline in columns. `edges` has one time more than there are columns; `low` and `high` are area by column."""

    edges: NDArray[np.float64]
    low: Heights
    high: Heights
    line: Heights | None
    shapes: tuple[PieceShape, ...]
    slices: NDArray[np.int64]  # the slice that each column shows


def check_detail(detail: float) -> None:
    if not 0 <= detail <= 1:
        raise ValueError(f"detail is a share from 0 to 1, not {detail!r}")


def count_told_apart(timeline: Timeline, detail: float) -> int:
    """How many pieces a share of them is. Rounded up: a little detail of three pieces is the largest, not none."""
    return min(len(timeline.pieces), math.ceil(round(detail * len(timeline.pieces), 6)))


def find_peak(timeline: Timeline) -> Peak | None:
    """The first of the highest slices; None where there is nothing."""
    if not timeline.times:
        return None
    totals = _heights(timeline).sum(axis=0)
    index = int(totals.argmax())
    return Peak(slice=index, time=timeline.times[index], value=int(totals[index]))


def find_end(timeline: Timeline) -> float:
    """Where the last slice ends. Only beginnings are known, so it is as long as the slices are on average."""
    times = timeline.times
    if len(times) < 2:
        return times[0] + 1.0 if times else 1.0
    return times[-1] + (times[-1] - times[0]) / (len(times) - 1)


def lay_out(timeline: Timeline, *, num_told_apart: int, most_columns: int, least_size: float) -> Layout:
    """The layout in at most so many columns. Pieces below `least_size` cannot be seen and melt into their area."""
    heights = _heights(timeline)
    starts, slices = _choose_slices(heights.sum(axis=0), most_columns)
    high = heights[:, slices].cumsum(axis=0)
    low = high - heights[:, slices]
    seen = [piece for piece in timeline.pieces[:num_told_apart] if piece.size >= least_size]
    line = np.array(timeline.line.values, dtype=np.int64)[slices] if timeline.line else None
    edges = np.append(np.array(timeline.times, dtype=np.float64)[starts], find_end(timeline))
    return Layout(edges=edges, low=low, high=high, line=line, shapes=_stack(seen, low, high, slices), slices=slices)


def _heights(timeline: Timeline) -> Heights:
    values = [area.values for area in timeline.areas]
    return np.array(values, dtype=np.int64).reshape(len(values), len(timeline.times))


def _choose_slices(totals: Heights, most_columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first slice of every column, and the highest one, which is the one that is drawn."""
    num_columns = min(len(totals), most_columns)
    edges = np.arange(num_columns + 1, dtype=np.int64) * len(totals) // max(num_columns, 1)
    return edges[:-1], np.array([start + totals[start:end].argmax() for start, end in pairwise(edges)], dtype=np.int64)


def _stack(pieces: list[Piece], low: Heights, high: Heights, slices: NDArray[np.int64]) -> tuple[PieceShape, ...]:
    """Each piece on top of the older ones of its area, and never above the area itself."""
    filled = low.copy()
    shapes = []
    for piece in sorted(pieces, key=lambda piece: (piece.start, -piece.size)):
        first, last = (int(column) for column in np.searchsorted(slices, (piece.start, piece.end)))
        below = filled[piece.area, first:last].copy()
        above = np.minimum(below + piece.size, high[piece.area, first:last])
        filled[piece.area, first:last] = above
        if (above > below).any():
            shapes.append(PieceShape(piece=piece, first=first, low=below, high=above))
    return tuple(shapes)


def place_stretches(timeline: Timeline) -> list[tuple[Stretch, int]]:
    """Each stretch with its lane: the innermost that is free, shorter ones first, as longer ones enclose them."""
    lanes: list[list[Stretch]] = []
    placed = []
    for stretch in sorted(timeline.stretches, key=lambda stretch: stretch.end - stretch.start):
        free = (at for at, lane in enumerate(lanes) if all(_lie_apart(stretch, other) for other in lane))
        lane = next(free, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(stretch)
        if lane < _MOST_LANES and stretch.start < min(stretch.end, len(timeline.times)):
            placed.append((stretch, lane))
    return placed


def _lie_apart(one: Stretch, other: Stretch) -> bool:
    return one.end <= other.start or other.end <= one.start


def counts_bytes(axis: Axis) -> bool:
    """Whether heights are bytes, as they are where nothing else is said."""
    return axis.unit in (*BYTE_UNITS, "")


def format_height(axis: Axis, value: float) -> str:
    """A height as text, bytes in the units of the tables."""
    return format_value("bytes", value) if counts_bytes(axis) else f"{format_value('number', value)} {axis.unit}"


def format_moment(axis: Axis, value: float) -> str:
    return f"{format_measured(value)} {axis.unit}".rstrip()
