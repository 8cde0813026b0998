"""Where everything of a timeline lies: which slices are drawn, how the areas stack, where the pieces are inside them.

Pieces lie at the bottom of their area, the oldest lowest, and what is not told apart lies on top of them. The other way
round was tried: the small allocations come and go all the time, and every piece above them trembles. When a piece ends,
those above it come down, as what is drawn is how much there is and not at which address.

Neighbouring slices that share a place in the picture are drawn as the highest of them. Means would be smoother, and
would show a peak that never was.
"""

import math
import unicodedata
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepscope.findings import Axis, Column, Piece, Timeline
from stepscope.report.numbers import format_column
from stepscope.report.palette import AREAS

DEFAULT_DETAIL = 0.1
_REST_TINT, _PIECE_TINTS = 0.45, (0.12, 0.28)
BYTE_UNITS = ("bytes", "B", "")
_STEPS = (1.0, 2.0, 5.0, 10.0)

Heights = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest instant: in which slice, when, and how high."""

    slice: int
    time: float
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
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
    shapes: tuple[Shape, ...]
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


def _stack(pieces: list[Piece], low: Heights, high: Heights, slices: NDArray[np.int64]) -> tuple[Shape, ...]:
    """Each piece on top of the older ones of its area, and never above the area itself."""
    filled = low.copy()
    shapes = []
    for piece in sorted(pieces, key=lambda piece: (piece.start, -piece.size)):
        first, last = (int(column) for column in np.searchsorted(slices, (piece.start, piece.end)))
        below = filled[piece.area, first:last].copy()
        above = np.minimum(below + piece.size, high[piece.area, first:last])
        filled[piece.area, first:last] = above
        if (above > below).any():
            shapes.append(Shape(piece=piece, first=first, low=below, high=above))
    return tuple(shapes)


def format_height(axis: Axis, value: float) -> str:
    """A height as text, bytes in the units of the tables."""
    if axis.unit in BYTE_UNITS:
        return format_column(Column(key="y", label="", kind="bytes"), [value])[0]
    return f"{format_column(Column(key='y', label='', kind='number'), [value])[0]} {axis.unit}"


def format_time(axis: Axis, value: float) -> str:
    # As a measured time, which keeps its digits where it happens to be whole, as on the page.
    return f"{format_column(Column(key='x', label='', kind='ms'), [value])[0]} {axis.unit}".rstrip()


def find_unit(axis: Axis, highest: float) -> tuple[str, float]:
    """The unit of an axis that reaches so high, and how much one of it is."""
    if axis.unit not in BYTE_UNITS:
        return axis.unit, 1.0
    exponent = 0
    while highest >= 1000 * 1024.0**exponent and exponent < 5:
        exponent += 1
    return ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[exponent], 1024.0**exponent


def find_ticks(highest: float, most: int = 7) -> list[float]:
    """Round numbers from zero up to `highest`, at most `most` of them above zero."""
    if highest <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(factor * power for factor in _STEPS if factor * power * most >= highest)
    return [float(f"{index * step:.12g}") for index in range(math.floor(highest / step * (1 + 1e-9)) + 1)]


def colour_of(area: int) -> str:
    """The colour of an area. Beyond the palette it comes round again, darker, as tints are what pieces have."""
    turn, index = divmod(area, len(AREAS))
    return mix(AREAS[index], "#000000", 0.4 * (turn % 2))


def fill_of(area: int, *, told_apart: bool, odd: bool = False) -> str:
    """What an area is filled with, or a piece that is told apart from it; two tints tell neighbours apart."""
    tint = _PIECE_TINTS[odd] if told_apart else _REST_TINT
    return mix(colour_of(area), "#ffffff", tint)


def choose_ink(fill: str) -> str:
    """Black or white, whichever can be read on this colour."""
    red, green, blue = (int(fill[at : at + 2], 16) for at in (1, 3, 5))
    return "#222222" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#ffffff"


def mix(colour: str, other: str, share: float) -> str:
    """`colour` with a share of `other` in it."""
    pairs = [(int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(own + (its - own) * share):02x}" for own, its in pairs)


def clean(text: str, most: int) -> str:
    """Text fit for a picture: at most so many characters, and none that is invisible or turns the line around."""
    shown = text[:most]
    visible = "".join(character if _can_stand(character) else f"\\u{ord(character):04x}" for character in shown)
    return visible if len(visible) <= most and len(text) <= most else f"{visible[: most - 1]}…"


def _can_stand(character: str) -> bool:
    # Marks that combine pile up without end above a letter, so they are spelt out like what cannot be seen.
    return character.isprintable() and unicodedata.category(character) not in ("Mn", "Me")


def width_of(text: str, size: float) -> float:
    """About how wide a text is in pixels, on the wide side, so that what is said to fit does."""
    return size * sum(_advance_of(character) for character in text)


def _advance_of(character: str) -> float:
    """The width of a character in Helvetica, in units of the font's size, by kind and rounded up."""
    if character in "iljtfrI.,:;'|!()[]/ ":
        return 0.34
    if character in "mwMW@%":
        return 0.92
    if unicodedata.east_asian_width(character) in ("W", "F"):
        return 1.05
    return 0.74 if character.isupper() else 0.58


def fit(text: str, width: float, size: float) -> str:
    """As much of the text as the width holds, or nothing where that would be too little to be read."""
    if width_of(text, size) <= width:
        return text
    kept = text
    while kept and width_of(kept + "…", size) > width:
        kept = kept[:-1]
    return f"{kept.rstrip()}…" if len(kept) >= 4 else ""
