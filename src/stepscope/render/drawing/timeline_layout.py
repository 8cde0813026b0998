"""The layout of a timeline: which slices are drawn, how the areas stack, and where the pieces are inside them.

Pieces are at the bottom of their area, the oldest lowest, and the rest of the area is on top of them. The other order
was tried: small allocations come and go all the time, and every piece above them jitters. When a piece ends, those
above it move down, because heights are amounts and not addresses.

Neighbouring slices that share a column are drawn as the highest of them. A mean would be smoother, but would show a
peak that never occurred. The canvas of the page stacks the same way, at any zoom (`site/timeline.js`).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepscope.findings import Axis, Piece, Stretch, Timeline
from stepscope.render.numbers import BYTE_UNITS, format_measured, format_value

DEFAULT_DETAIL = 0.1
_MOST_LANES = 3  # lanes of stretches

Heights = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest instant: its slice, time and height."""

    slice: int
    time: float
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceShape:
    """One piece in the drawing: from column `first` on, between `low` and `high`."""

    piece: Piece
    first: int
    low: Heights
    high: Heights


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A timeline in columns. `edges` has one more time than there are columns; `low` and `high` are by area, then by
    column."""

    edges: NDArray[np.float64]
    low: Heights
    high: Heights
    line: Heights | None
    shapes: tuple[PieceShape, ...]
    slices: NDArray[np.int64]  # the slice that each column shows


def check_detail(detail: float) -> None:
    if not 0 <= detail <= 1:
        raise ValueError(f"detail must be from 0 to 1, got {detail!r}")


def count_told_apart(timeline: Timeline, detail: float) -> int:
    """Return how many pieces a share is, rounded up: a little detail of three pieces is the largest one, not none."""
    return min(len(timeline.pieces), math.ceil(round(detail * len(timeline.pieces), 6)))


def find_peak(timeline: Timeline) -> Peak | None:
    """Return the first of the highest slices, or None if there are none."""
    if not timeline.times:
        return None
    totals = _heights(timeline).sum(axis=0)
    index = int(totals.argmax())
    return Peak(slice=index, time=timeline.times[index], value=int(totals[index]))


def find_end(timeline: Timeline) -> float:
    """Return where the last slice ends. Only starts are known, so its length is the average one."""
    times = timeline.times
    if len(times) < 2:
        return times[0] + 1.0 if times else 1.0
    return times[-1] + (times[-1] - times[0]) / (len(times) - 1)


def lay_out(timeline: Timeline, *, num_told_apart: int, most_columns: int, least_size: float) -> Layout:
    """Return the layout in at most `most_columns` columns. Pieces below `least_size` are invisible and merge into their
    area."""
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
    """Return the first slice of every column, and its highest one, which is drawn."""
    num_columns = min(len(totals), most_columns)
    edges = np.arange(num_columns + 1, dtype=np.int64) * len(totals) // max(num_columns, 1)
    return edges[:-1], np.array([start + totals[start:end].argmax() for start, end in pairwise(edges)], dtype=np.int64)


def _stack(pieces: list[Piece], low: Heights, high: Heights, slices: NDArray[np.int64]) -> tuple[PieceShape, ...]:
    """Put each piece on top of the older ones of its area, and never above the area itself."""
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
    """Return each stretch with its lane: the innermost free one, shorter stretches first, because longer ones enclose
    them."""
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
    """Return whether heights are bytes, which is the default."""
    return axis.unit in (*BYTE_UNITS, "")


def format_height(axis: Axis, value: float) -> str:
    """Return a height as text, bytes in the units of the tables."""
    return format_value("bytes", value) if counts_bytes(axis) else f"{format_value('number', value)} {axis.unit}"


def format_moment(axis: Axis, value: float) -> str:
    return f"{format_measured(value)} {axis.unit}".rstrip()
