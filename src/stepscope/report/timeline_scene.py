"""Where the words of a drawn timeline stand: names of pieces and phases, the peak, the legend and the notes, in pixels.

Whether a name fits decides whether it is written at all, so places are computed and not left to a drawing library. A
piece is named inside itself: pieces never overlap, so neither do their names. Names beside the picture with lines
leading to the pieces were the other choice, and cross each other as soon as there are five.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.findings import Stretch, Timeline
from stepscope.report.marks import Text
from stepscope.report.palette import FAINT
from stepscope.report.timeline_layout import (
    Layout,
    Peak,
    Shape,
    choose_ink,
    clean,
    fill_of,
    find_end,
    find_peak,
    fit,
    format_height,
    format_time,
    lay_out,
    width_of,
)

# With the legend beside it, a picture whose type can still be read in a page of 16 cm.
WIDTH, HEIGHT = 660, 400
LANE_HEIGHT = 19.0
LINE_CHARACTERS = 130
_MOST_COLUMNS = 1000
# Below this height, in pixels, a piece is its own outline and nothing else.
_LEAST_PIECE = 2.0
_NAME_SIZE, _NAME_ROOM, _NAME_LEADING = 10.5, 12.0, 12.5
_MOST_NAMED, _MOST_LISTED = 12, 5
_MOST_LANES = 3
_LEGEND_LEFT, _LEGEND_ROW, _MOST_LEGEND = WIDTH + 22.0, 20.0, 18
_SWATCH, _VALUE = 18.0, 66.0
_NAME_CHARACTERS = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Swatch:
    """The sign of a row in the legend: an area's colour, or a dash for the line."""

    area: int | None
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A laid-out timeline and its scales: pixels for times and heights."""

    timeline: Timeline
    layout: Layout
    peak: Peak
    top: float  # the height at the upper edge of the plot

    def x(self, time: float) -> float:
        start, end = self.layout.edges[0], self.layout.edges[-1]
        return float((time - start) / (end - start) * WIDTH)

    def y(self, height: float) -> float:
        return float(HEIGHT * (1 - height / self.top))


def set_scene(timeline: Timeline, num_told_apart: int) -> Scene | None:
    """The scene of a timeline; None where there is nothing to draw."""
    peak = find_peak(timeline)
    if peak is None or not peak.value:
        return None
    highest = max(peak.value, *(timeline.line.values if timeline.line else (0,)))
    # Above the highest there is room for the peak's label.
    top = highest * 1.13
    least = _LEAST_PIECE * top / HEIGHT
    layout = lay_out(timeline, num_told_apart=num_told_apart, most_columns=_MOST_COLUMNS, least_size=least)
    return Scene(timeline=timeline, layout=layout, peak=peak, top=top)


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


def find_span(scene: Scene, stretch: Stretch) -> tuple[float, float]:
    times = scene.timeline.times
    end = times[stretch.end] if stretch.end < len(times) else find_end(scene.timeline)
    return scene.x(times[stretch.start]), scene.x(end)


def place_stretch_texts(scene: Scene, placed: Sequence[tuple[Stretch, int]]) -> tuple[list[Text], str]:
    """The labels over the stretches. One without room is shortened to its first letters, and the note says of what."""
    texts, shortened = [], {}
    initials = _shorten_apart({stretch.label for stretch, _ in placed})
    for stretch, lane in placed:
        start, end = find_span(scene, stretch)
        label = clean(stretch.label, 60)
        if width_of(label, 12.0) > end - start - 4:
            label = initials[stretch.label]
            if width_of(label, 12.0) > end - start - 2:
                continue
            shortened[label] = clean(stretch.label, 60)
        y = -13.5 - lane * LANE_HEIGHT
        texts.append(Text(x=(start + end) / 2, y=y, text=label, align="center", colour=FAINT))
    pairs = [f"{short} {label}" for short, label in sorted(shortened.items()) if short != label]
    return texts, f"At the top: {', '.join(pairs)}." if pairs else ""


def _shorten_apart(labels: set[str]) -> dict[str, str]:
    """Each label's first letters, as few as tell all of them apart."""
    for length in range(1, 8):
        short = {label: clean(label, 60)[:length] for label in labels}
        if len(set(short.values())) == len(labels):
            return short
    return {label: clean(label, 60) for label in labels}


def find_peak_place(scene: Scene) -> tuple[float, float]:
    """The middle of the column that shows the peak, and its height."""
    column = int(np.searchsorted(scene.layout.slices, scene.peak.slice))
    left, right = scene.layout.edges[column], scene.layout.edges[column + 1]
    return scene.x((left + right) / 2), scene.y(scene.peak.value)


def place_peak_text(scene: Scene) -> Text:
    """The peak's label, above whatever is highest where it stands."""
    timeline, layout = scene.timeline, scene.layout
    value, time = format_height(timeline.y, scene.peak.value), format_time(timeline.x, scene.peak.time)
    text = f"peak {value} at {time}"
    x, y = find_peak_place(scene)
    half = width_of(text, 12.5) / 2 + 4
    x = min(max(x, half), WIDTH - half)
    highest = y
    if layout.line is not None:
        pixels = np.array([scene.x(edge) for edge in layout.edges])
        under = (pixels[1:] >= x - half) & (pixels[:-1] <= x + half)
        highest = min(y, scene.y(int(layout.line[under].max())))
    return Text(x=x, y=min(y - 16, highest - 11), text=text, align="center", size=12.5, weight="bold", rim=True)


def name_pieces(scene: Scene) -> tuple[list[Text], list[Shape]]:
    """Names inside the largest pieces, and those of the few largest that have no room for one."""
    shapes = sorted(enumerate(scene.layout.shapes), key=lambda pair: -pair[1].piece.size)[:_MOST_NAMED]
    texts: list[Text] = []
    unnamed = []
    for rank, (index, shape) in enumerate(shapes):
        fill = fill_of(shape.piece.area, told_apart=True, odd=bool(index % 2))
        inside = _name_inside(scene, shape, choose_ink(fill))
        texts += inside
        if not inside and rank < _MOST_LISTED:
            unnamed.append(shape)
    return texts, unnamed


def _name_inside(scene: Scene, shape: Shape, colour: str) -> list[Text]:
    """Label and size in the longest passage of the piece, in two lines where one is too long and two fit."""
    start, end = _find_passage(scene, shape)
    edges = scene.layout.edges
    left, right = scene.x(edges[shape.first + start]), scene.x(edges[shape.first + end])
    label, size = clean(shape.piece.label, 80), format_height(scene.timeline.y, shape.piece.size)
    if start == end or width_of(size, _NAME_SIZE) > right - left - 8:
        return []
    low, high = scene.y(int(shape.low[start:end].max())), scene.y(int(shape.high[start:end].min()))
    room = right - left - 8
    lines = [f"{label}, {size}"]
    if width_of(lines[0], _NAME_SIZE) > room:
        lines = [fit(label, room, _NAME_SIZE), size] if low - high >= 2 * _NAME_LEADING else []
    if not lines:
        short = fit(label, room - width_of(f", {size}", _NAME_SIZE), _NAME_SIZE)
        lines = [f"{short}, {size}"] if short else []
    middle = (low + high) / 2 + 0.5 - (len(lines) - 1) / 2 * _NAME_LEADING
    return [
        Text(
            x=(left + right) / 2,
            y=middle + row * _NAME_LEADING,
            text=line,
            align="center",
            size=_NAME_SIZE,
            colour=colour,
        )
        for row, line in enumerate(lines)
    ]


def _find_passage(scene: Scene, shape: Shape) -> tuple[int, int]:
    """The longest range of columns through which a line of text as high as it is goes straight."""
    room = _NAME_ROOM * scene.top / HEIGHT
    best, start = (0, 0), 0
    for end in range(1, len(shape.low) + 1):
        while start < end and shape.high[start:end].min() - shape.low[start:end].max() < room:
            start += 1
        if end - start > best[1] - best[0]:
            best = (start, end)
    return best


def place_legend(scene: Scene) -> tuple[list[Text], list[Swatch]]:
    """Areas from the top of the stack down, each with its height at the peak: that is what a reader adds up."""
    timeline = scene.timeline
    listed = [*range(len(timeline.areas))][::-1][:_MOST_LEGEND]
    rows: list[tuple[int | None, str, str]] = [
        (index, timeline.areas[index].name, _height_at_peak(scene, timeline.areas[index].values)) for index in listed
    ]
    if timeline.line:
        rows.append((None, timeline.line.name, _height_at_peak(scene, timeline.line.values)))
    names = [clean(name, _NAME_CHARACTERS) for _, name, _ in rows]
    left = _LEGEND_LEFT + _SWATCH
    right = left + max(width_of(name, 12.5) for name in names) + _VALUE
    texts = [Text(x=right, y=-13, text="at the peak", align="right", size=11, colour=FAINT)]
    swatches = []
    for row, ((area, _, value), name) in enumerate(zip(rows, names, strict=True)):
        y = 8 + row * _LEGEND_ROW + (6 if area is None else 0)
        swatches.append(Swatch(area=area, x=_LEGEND_LEFT, y=y))
        texts += [Text(x=left, y=y, text=name, size=12.5), Text(x=right, y=y, text=value, align="right", colour=FAINT)]
    if len(listed) < len(timeline.areas):
        y = 14 + len(rows) * _LEGEND_ROW
        texts.append(Text(x=left, y=y, text=f"and {len(timeline.areas) - len(listed)} more below", colour=FAINT))
    return texts, swatches


def _height_at_peak(scene: Scene, values: Sequence[int]) -> str:
    return format_height(scene.timeline.y, values[scene.peak.slice])


def place_notes(timeline: Timeline, unnamed: Sequence[Shape], *others: str) -> Iterable[Text]:
    """The notes below the picture, after what had no room in it."""
    listed = "; ".join(
        f"{clean(shape.piece.label, 60)}, {format_height(timeline.y, shape.piece.size)}" for shape in unnamed
    )
    notes = [f"Among the largest, without room for a name above: {listed}."] if unnamed else []
    notes += [clean(note, 900) for note in (*others, *timeline.notes)]
    lines = [line for note in notes for line in textwrap.wrap(note, LINE_CHARACTERS)]
    for row, line in enumerate(lines):
        yield Text(x=0, y=HEIGHT + 68 + row * 16, text=line, size=11.5, colour=FAINT)
