"""The timeline of a step in print: phases and layers above the streams, coloured by class.

A step has thousands of kernels and a page a few hundred columns. Wide spans are drawn as they are. Narrow ones are
merged into columns that show the share of each class as stacked heights: many short kernels with pauses between them
stay visible, and do not look like one long kernel. Paler colours were tried instead, but a mostly idle stream could
hardly be seen. The page has a canvas that zooms (`site/lanes.js`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepscope.findings import Lanes, Track
from stepscope.render.drawing.axes import draw_x_axis, find_ticks
from stepscope.render.drawing.colours import Palette, assign_colours, choose_ink, mix
from stepscope.render.drawing.svg import PAGE_WIDTH, Bounds, Canvas, Sign, Text, finish, fit, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import format_tick, format_value
from stepscope.units import TIME_UNITS, count_noun

_MOST_NAME, _NAME_SIZE, _INSIDE_SIZE = 110.0, 11.5, 10.0
_HEIGHTS = {"phase": 20.0, "layer": 16.0, "module": 16.0, "stream": 42.0, "host": 18.0, "rank": 18.0}
_GAP = 6.0
_MOST_TRACKS = 16
# Spans narrower than this, in pixels, are merged into columns; columns are wider if there are many streams.
_LEAST_BOX, _COLUMN, _WIDE_COLUMN = 1.5, 1.5, 4.0
_MANY_STREAMS = 3
_MOST_INSIDE, _MOST_SIGNS = 120, 14
# Layers and modules alternate between two greys. The palest is behind all tracks.
_NEUTRAL, _EMPTY = ("#D9DEE3", "#EBEEF1"), "#F5F5F5"
# Phases are wide and have names: pale colours keep them behind the streams.
_PHASE_TINT = 0.45

Places = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One rectangle of a track: from `start` to `end` in pixels, from `low` to `high` as shares of the track's height.
    It has no name if several spans share it."""

    start: float
    end: float
    fill: str
    low: float = 0.0
    high: float = 1.0
    name: str = ""
    short: str = ""


def draw_lanes(lanes: Lanes) -> str:
    """Return the step as an SVG file."""
    palette = Palette(assign_colours([lanes]))
    canvas = Canvas(palette)
    tracks = [track for track in lanes.tracks if track.spans.starts_ns][:_MOST_TRACKS]
    labels = [clean(track.label, 40) for track in tracks]
    names_width = min(_MOST_NAME, max((width_of(label, _NAME_SIZE) for label in labels), default=0.0) + 10)
    width = PAGE_WIDTH - names_width
    column = _WIDE_COLUMN if sum(track.kind == "stream" for track in tracks) > _MANY_STREAMS else _COLUMN
    top = 0.0
    for track, label in zip(tracks, labels, strict=True):
        height = _HEIGHTS[track.kind]
        bottom, middle = top + height, top + height / 2
        boxes = place_spans(lanes, track, width, column)
        canvas.box(0.0, top, width, bottom, _EMPTY)
        for box in boxes:
            canvas.box(box.start, bottom - box.high * height, box.end, bottom - box.low * height, box.fill)
        name = fit(label, names_width - 10, _NAME_SIZE)
        canvas.write([Text(x=-8, y=middle, text=name, align="end", size=_NAME_SIZE), *_place_names(boxes, middle)])
        top = bottom + _GAP
    if lanes.span_ns > 0:
        _draw_axis(canvas, lanes.span_ns, Bounds(left=0.0, top=0.0, right=width, bottom=top))
        top += 44
    bounds = Bounds(left=-names_width, top=0.0, right=width, bottom=top)
    signs = _make_signs(palette, lanes)
    return finish(canvas, bounds, title=lanes.title, signs=signs, notes=_make_notes(lanes, tracks))


def place_spans(lanes: Lanes, track: Track, width: float, column: float) -> list[Box]:
    """Return the spans of a track as boxes on the given number of pixels, with narrow ones merged into columns."""
    spans, scale = track.spans, width / max(1, lanes.span_ns)
    starts = np.clip(np.array(spans.starts_ns, dtype=np.float64) * scale, 0, width)
    ends = np.clip(starts + np.array(spans.lengths_ns, dtype=np.float64) * scale, 0, width)
    fills = _choose_fills(lanes, track)
    is_wide = ends - starts >= _LEAST_BOX
    thin = np.flatnonzero(~is_wide)
    boxes = _put_together(starts[thin], ends[thin], [fills[at] for at in thin], width, column)
    if track.kind != "stream":
        # Only streams show shares as heights: on other tracks a column shows its largest share, which is the lowest.
        boxes = [replace(box, high=1.0) for box in boxes if not box.low]
    for at in np.flatnonzero(is_wide):
        start, end = float(starts[at]), float(ends[at])
        # A thin gap after a wide box keeps equal neighbours apart.
        end -= 0.5 if end - start > 4 else 0.0
        name = lanes.names[spans.names[at]]
        boxes.append(Box(start=start, end=end, fill=fills[at], name=name, short=_shorten(track, name)))
    return boxes


def _shorten(track: Track, name: str) -> str:
    """Return the number of a layer, to use where its name has no room."""
    numbers = re.findall(r"\d{1,4}", name[-40:]) if track.kind == "layer" else []
    return numbers[-1] if numbers else ""


def _choose_fills(lanes: Lanes, track: Track) -> list[str]:
    """Return the colour of each span of a track."""
    if track.kind in ("layer", "module"):
        return [_NEUTRAL[at % len(_NEUTRAL)] for at in range(len(track.spans.groups))]
    palette = Palette(assign_colours([lanes]))
    tint = 0.0 if track.kind in ("stream", "rank") else _PHASE_TINT
    fills = [mix(palette.fill(group), "#ffffff", tint) for group in lanes.groups]
    return [fills[group] for group in track.spans.groups]


def _put_together(starts: Places, ends: Places, fills: Sequence[str], width: float, column: float) -> list[Box]:
    """Return narrow spans as columns: each fill as high as its share of the column's time, the largest lowest."""
    if not fills:
        return []
    num_columns = int(np.ceil(width / column))
    totals: dict[str, Places] = {}
    for fill, start, end in zip(fills, starts.tolist(), ends.tolist(), strict=True):
        place = min(int((start + end) / 2 / column), num_columns - 1)
        totals.setdefault(fill, np.zeros(num_columns))[place] += (end - start) / column
    ranked = sorted(totals, key=lambda fill: -totals[fill].sum())
    # A span that starts in the previous column can fill more than the column.
    tops = np.minimum(np.cumsum([totals[fill] for fill in ranked], axis=0), 1.0)
    boxes = []
    for row, fill in enumerate(ranked):
        lows = tops[row - 1] if row else np.zeros(num_columns)
        for at in np.flatnonzero(tops[row] > lows).tolist():
            start, end = at * column, min((at + 1) * column, width)
            boxes.append(Box(start=start, end=end, fill=fill, low=float(lows[at]), high=float(tops[row][at])))
    return boxes


def _place_names(boxes: Sequence[Box], y: float) -> list[Text]:
    """Draw names, or their short forms, inside the widest boxes that have room."""
    widest = sorted((box for box in boxes if box.name), key=lambda box: box.start - box.end)[:_MOST_INSIDE]
    texts = []
    for box in widest:
        room, name = box.end - box.start - 5, clean(box.name, 60)
        if box.short and width_of(name, _INSIDE_SIZE) > room:
            name = box.short
        if text := fit(name, room, _INSIDE_SIZE):
            middle, ink = (box.start + box.end) / 2, choose_ink(box.fill)
            texts.append(Text(x=middle, y=y, text=text, align="middle", size=_INSIDE_SIZE, colour=ink))
    return texts


def _draw_axis(canvas: Canvas, span_ns: int, plot: Bounds) -> None:
    unit, size = next((pair for pair in TIME_UNITS if span_ns >= 2 * pair[1]), TIME_UNITS[-1])
    ticks = find_ticks(0.0, span_ns / size, 9)
    places = [(tick * size / span_ns * plot.right, format_tick(tick)) for tick in ticks]
    draw_x_axis(canvas, plot, places, f"time ({unit})", grid=False)


def sum_groups(lanes: Lanes) -> list[tuple[int, int]]:
    """Return each group with its time, longest first: on streams, without streams on the CPU, otherwise on all
    tracks."""
    kinds = {track.kind for track in lanes.tracks if track.spans.starts_ns}
    told = next((kind for kind in ("stream", "host") if kind in kinds), None)
    times: dict[int, int] = {}
    for track in lanes.tracks:
        if told is None or track.kind == told:
            for group, length in zip(track.spans.groups, track.spans.lengths_ns, strict=True):
                times[group] = times.get(group, 0) + length
    return sorted(((group, time) for group, time in times.items() if time > 0), key=lambda pair: -pair[1])


def _make_signs(palette: Palette, lanes: Lanes) -> list[Sign]:
    """Return the legend: each class with its share of the step, largest first. Of several ranks, the mean."""
    ranks = sum(track.kind == "rank" for track in lanes.tracks)
    span_ns = max(1, lanes.span_ns) * max(1, ranks)
    ranked = [(lanes.groups[group], time / span_ns) for group, time in sum_groups(lanes)[:_MOST_SIGNS]]
    return [
        Sign(fill=palette.fill(group), text=f"{clean(group, 30) or 'unknown'} {_format_share(share)}")
        for group, share in ranked
    ]


def _format_share(share: float) -> str:
    return format_value("share", share) if share >= 0.001 else "<0.1%"


def _make_notes(lanes: Lanes, tracks: Sequence[Track]) -> list[str]:
    hidden = sum(1 for track in lanes.tracks if track.spans.starts_ns) - len(tracks)
    notes = ["Nothing to draw."] if not tracks else []
    if hidden > 0:
        notes.append(f"{count_noun(hidden, 'more track')} not drawn.")
    lengths = (length for track in tracks if track.kind == "stream" for length in track.spans.lengths_ns)
    if any(length < lanes.span_ns / PAGE_WIDTH for length in lengths):
        notes.append("Where kernels are too short to draw, each color is as high as its share of the time.")
    return [*notes, *lanes.notes]
