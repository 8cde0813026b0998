"""Memory over time in print: areas, pieces, phases and the peak.

A name is written only if it fits. It is inside its piece: pieces never overlap, so names do not either. The
alternative, names next to the chart with leader lines, crosses its lines with as few as five names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.findings import Stretch, Timeline
from stepscope.render.drawing.axes import draw_x_axis, draw_y_axis, find_ticks, name_quantity
from stepscope.render.drawing.colours import Palette, assign_colours, choose_ink, mix
from stepscope.render.drawing.svg import Bounds, Canvas, Sign, Text, finish, fit, width_of
from stepscope.render.drawing.timeline_layout import (
    Heights,
    Layout,
    Peak,
    PieceShape,
    count_told_apart,
    counts_bytes,
    find_end,
    find_peak,
    format_height,
    format_moment,
    lay_out,
    place_stretches,
)
from stepscope.render.formats import clean
from stepscope.render.numbers import find_binary_unit, format_tick

# Including the legend to its right, so that the text stays readable at a page width of 16 cm.
WIDTH, HEIGHT = 660.0, 400.0
_LANE_HEIGHT = 19.0
_MOST_COLUMNS = 1000
# Below this height a piece is only an outline; narrower than this, the outline has the colour of the piece.
_LEAST_PIECE, _LEAST_OUTLINED = 2.0, 4.0
_NAME_SIZE, _NAME_ROOM, _NAME_LEADING = 10.5, 12.0, 12.5
_MOST_NAMED, _MOST_LISTED = 12, 5
_LEGEND_LEFT, _LEGEND_ROW, _MOST_LEGEND = WIDTH + 22.0, 20.0, 18
_SWATCH, _VALUE, _NAME_CHARACTERS = 18.0, 66.0, 36
_REST_TINT, _SWATCH_TINT, _PIECE_TINTS = 0.45, 0.2, (0.12, 0.28)  # two alternating tints separate neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A laid-out timeline and its scales: pixels for times and heights."""

    timeline: Timeline
    layout: Layout
    peak: Peak
    top: float  # the height at the top of the plot
    colours: tuple[str, ...]  # of the areas

    def x(self, time: float) -> float:
        start, end = self.layout.edges[0], self.layout.edges[-1]
        return float((time - start) / (end - start) * WIDTH)

    def y(self, height: float) -> float:
        return float(HEIGHT * (1 - height / self.top))

    def fill_of(self, index: int, shape: PieceShape) -> str:
        return mix(self.colours[shape.piece.area], "#ffffff", _PIECE_TINTS[index % 2])


def set_scene(timeline: Timeline, num_told_apart: int) -> Scene | None:
    """Return the scene of a timeline, or None if it is empty."""
    peak = find_peak(timeline)
    if peak is None or not peak.value:
        return None
    highest = max(peak.value, *(timeline.line.values if timeline.line else (0,)))
    # Room for the peak's label above the highest point.
    top = highest * 1.13
    least = _LEAST_PIECE * top / HEIGHT
    layout = lay_out(timeline, num_told_apart=num_told_apart, most_columns=_MOST_COLUMNS, least_size=least)
    palette = Palette(assign_colours([timeline]))
    colours = tuple(palette.fill(area.name) for area in timeline.areas)
    return Scene(timeline=timeline, layout=layout, peak=peak, top=top, colours=colours)


def draw_timeline(timeline: Timeline, detail: float) -> str:
    """Return the timeline as an SVG file, with this share of its pieces drawn one by one."""
    canvas = Canvas(Palette({}))
    scene = set_scene(timeline, count_told_apart(timeline, detail))
    notes = list(timeline.notes)
    if scene is None:
        middle = Text(x=WIDTH / 2, y=HEIGHT / 2, text="Nothing to draw.", align="middle", colour=canvas.palette.faint)
        canvas.write([middle])
        right, top = WIDTH, 0.0
    else:
        right, top, said = _draw(canvas, scene)
        notes = said + notes
    bounds = Bounds(left=-56.0, top=top, right=right, bottom=HEIGHT + 44)
    subtitle = [timeline.subtitle] if timeline.subtitle else []
    return finish(canvas, bounds, title=timeline.title, subtitle=subtitle, notes=notes, width=WIDTH + 56)


def _draw(canvas: Canvas, scene: Scene) -> tuple[float, float, list[str]]:
    """Draw from back to front. Phase boundaries are under the pieces, so that they cross no name. Return the right and
    upper edge, and notes on what had no room."""
    placed = place_stretches(scene.timeline)
    phases, shortened = _name_stretches(canvas, scene, placed)
    names, unnamed = name_pieces(scene)
    _draw_axes(canvas, scene)
    low, high = scene.layout.low, scene.layout.high
    for area, colour in enumerate(scene.colours):
        _fill_area(canvas, scene, 0, low[area], high[area], mix(colour, "#ffffff", _REST_TINT))
    _draw_stretches(canvas, scene, placed)
    for index, shape in enumerate(scene.layout.shapes):
        _draw_piece(canvas, scene, index, shape)
    if scene.layout.line is not None:
        line = [(x, high) for x, _, high in _find_corners(scene, 0, scene.layout.line, scene.layout.line)]
        canvas.trace(_step_through(line), canvas.palette.ink, 1.3, "5 3")
    canvas.write([*phases, *names])
    _draw_peak(canvas, scene)
    right = _draw_legend(canvas, scene)
    notes = [shortened] if shortened else []
    if unnamed:
        listed = "; ".join(
            f"{clean(shape.piece.label, 60)}, {format_height(scene.timeline.y, shape.piece.size)}" for shape in unnamed
        )
        notes.insert(0, f"Large pieces without room for a name: {listed}.")
    lanes = 1 + max((lane for _, lane in placed), default=-1)
    return right, min(-lanes * _LANE_HEIGHT, -18.0), notes


def _draw_axes(canvas: Canvas, scene: Scene) -> None:
    """Return ticks at round numbers. A single slice has a start and no length, so it gets one tick."""
    timeline, plot = scene.timeline, Bounds(left=0.0, top=0.0, right=WIDTH, bottom=HEIGHT)
    unit, size = find_binary_unit(scene.top) if counts_bytes(timeline.y) else (clean(timeline.y.unit, 20), 1.0)
    heights = [(scene.y(tick * size), format_tick(tick)) for tick in find_ticks(0.0, scene.top / size, 8)]
    draw_y_axis(canvas, plot, heights, name_quantity(timeline.y.label, unit), title_left=True)
    start, end = float(scene.layout.edges[0]), float(scene.layout.edges[-1])
    ticks = find_ticks(start, end, 8) if len(timeline.times) > 1 else [start]
    places = [(scene.x(tick), format_tick(tick)) for tick in ticks]
    draw_x_axis(canvas, plot, places, name_quantity(timeline.x.label, clean(timeline.x.unit, 20)), grid=False)


def _find_corners(scene: Scene, first: int, low: Heights, high: Heights) -> list[tuple[float, float, float]]:
    """Return where a stepped shape changes and where it ends: x, and the lower and upper edge from there on."""
    changes = np.flatnonzero(np.diff(low, prepend=-1) | np.diff(high, prepend=-1)).tolist()
    columns = [*((change, change) for change in changes), (len(low), len(low) - 1)]
    return [
        (scene.x(scene.layout.edges[first + column]), scene.y(int(low[source])), scene.y(int(high[source])))
        for column, source in columns
    ]


def _step_through(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line that keeps its height until the next point."""
    return [
        corner
        for (_, before), (x, y) in zip([points[0], *points], points, strict=False)
        for corner in ([(x, before), (x, y)] if before != y else [(x, y)])
    ]


def _fill_area(
    canvas: Canvas, scene: Scene, first: int, low: Heights, high: Heights, fill: str, stroke: str = ""
) -> None:
    corners = _find_corners(scene, first, low, high)
    upper = _step_through([(x, above) for x, _, above in corners])
    lower = _step_through([(x, below) for x, below, _ in corners])
    path = "L".join(f"{x:.2f},{y:.2f}" for x, y in [*upper, *reversed(lower)])
    canvas.add("path", d=f"M{path}Z", fill=fill, stroke=stroke, stroke_width=0.6 if stroke else "")


def _draw_piece(canvas: Canvas, scene: Scene, index: int, shape: PieceShape) -> None:
    edges = scene.layout.edges
    width = scene.x(edges[shape.first + len(shape.low)]) - scene.x(edges[shape.first])
    fill = scene.fill_of(index, shape)
    stroke = mix(scene.colours[shape.piece.area], "#000000", 0.3) if width >= _LEAST_OUTLINED else fill
    _fill_area(canvas, scene, shape.first, shape.low, shape.high, fill, stroke)


# --- phases ---------------------------------------------------------------------------------------------------------


def _find_span(scene: Scene, stretch: Stretch) -> tuple[float, float]:
    times = scene.timeline.times
    end = times[stretch.end] if stretch.end < len(times) else find_end(scene.timeline)
    return scene.x(times[stretch.start]), scene.x(end)


def _draw_stretches(canvas: Canvas, scene: Scene, placed: Sequence[tuple[Stretch, int]]) -> None:
    """Draw a bar over each stretch, and vertical lines at its start and end unless they would overlap."""
    bounds: list[float] = []
    for stretch, lane in placed:
        start, end = _find_span(scene, stretch)
        level = -5 - lane * _LANE_HEIGHT
        canvas.line(start + 1.5, level, max(end - 1.5, start + 2), level, canvas.palette.frame, 1.2)
        for x in (start, end):
            if 1 < x < WIDTH - 1 and all(abs(x - other) > 3 for other in bounds):
                bounds.append(x)
                canvas.line(x, level, x, HEIGHT, canvas.palette.frame, 0.6)


def _name_stretches(canvas: Canvas, scene: Scene, placed: Sequence[tuple[Stretch, int]]) -> tuple[list[Text], str]:
    """Draw the labels over the stretches. One without room is shortened to its first letters, and a note explains
    them."""
    texts, shortened = [], {}
    initials = _shorten_apart({stretch.label for stretch, _ in placed})
    for stretch, lane in placed:
        start, end = _find_span(scene, stretch)
        label = clean(stretch.label, 60)
        if width_of(label, 12.0) > end - start - 4:
            label = initials[stretch.label]
            if width_of(label, 12.0) > end - start - 2:
                continue
            shortened[label] = clean(stretch.label, 60)
        y = -13.5 - lane * _LANE_HEIGHT
        texts.append(Text(x=(start + end) / 2, y=y, text=label, align="middle", colour=canvas.palette.faint))
    pairs = [f"{short} {label}" for short, label in sorted(shortened.items()) if short != label]
    return texts, f"Phases at the top: {', '.join(pairs)}." if pairs else ""


def _shorten_apart(labels: set[str]) -> dict[str, str]:
    """Return the first letters of each label, as few as keep all of them distinct."""
    for length in range(1, 8):
        short = {label: clean(label, 60)[:length] for label in labels}
        if len(set(short.values())) == len(labels):
            return short
    return {label: clean(label, 60) for label in labels}


# --- the peak -------------------------------------------------------------------------------------------------------


def _draw_peak(canvas: Canvas, scene: Scene) -> None:
    """Draw a dot in the middle of the column with the peak, and a label above the highest point there."""
    timeline, layout = scene.timeline, scene.layout
    column = int(np.searchsorted(layout.slices, scene.peak.slice))
    x, y = scene.x((layout.edges[column] + layout.edges[column + 1]) / 2), scene.y(scene.peak.value)
    text = f"peak {format_height(timeline.y, scene.peak.value)} at {format_moment(timeline.x, scene.peak.time)}"
    half = width_of(text, 12.5) / 2 + 4
    middle = min(max(x, half), WIDTH - half)
    highest = y
    if layout.line is not None:
        pixels = np.array([scene.x(edge) for edge in layout.edges])
        under = (pixels[1:] >= middle - half) & (pixels[:-1] <= middle + half)
        highest = min(y, scene.y(int(layout.line[under].max())))
    level = min(y - 16, highest - 11)
    canvas.line(x, level + 7, x, y, canvas.palette.ink, 0.8)
    canvas.mark("circle", x, y, 3.7, fill=canvas.palette.ink, stroke=canvas.palette.paper, stroke_width=1.2)
    canvas.write([Text(x=middle, y=level, text=text, align="middle", size=12.5, bold=True, rim=True)])


# --- names of pieces ------------------------------------------------------------------------------------------------


def name_pieces(scene: Scene) -> tuple[list[Text], list[PieceShape]]:
    """Draw names inside the largest pieces, and return those of the few largest that have no room."""
    shapes = sorted(enumerate(scene.layout.shapes), key=lambda pair: -pair[1].piece.size)[:_MOST_NAMED]
    texts: list[Text] = []
    unnamed = []
    for rank, (index, shape) in enumerate(shapes):
        inside = list(_name_inside(scene, shape, choose_ink(scene.fill_of(index, shape))))
        texts += inside
        if not inside and rank < _MOST_LISTED:
            unnamed.append(shape)
    return texts, unnamed


def _name_inside(scene: Scene, shape: PieceShape, colour: str) -> Iterable[Text]:
    """Draw label and size in the longest straight stretch of the piece, in two lines if one is too long and two fit."""
    start, end = _find_passage(scene, shape)
    edges = scene.layout.edges
    left, right = scene.x(edges[shape.first + start]), scene.x(edges[shape.first + end])
    label, size = clean(shape.piece.label, 80), format_height(scene.timeline.y, shape.piece.size)
    room = right - left - 8
    if start == end or width_of(size, _NAME_SIZE) > room:
        return
    low, high = scene.y(int(shape.low[start:end].max())), scene.y(int(shape.high[start:end].min()))
    lines = [f"{label}, {size}"]
    if width_of(lines[0], _NAME_SIZE) > room:
        lines = [fit(label, room, _NAME_SIZE), size] if low - high >= 2 * _NAME_LEADING else []
    if not lines:
        short = fit(label, room - width_of(f", {size}", _NAME_SIZE), _NAME_SIZE)
        lines = [f"{short}, {size}"] if short else []
    first = (low + high) / 2 + 0.5 - (len(lines) - 1) / 2 * _NAME_LEADING
    for row, line in enumerate(lines):
        y = first + row * _NAME_LEADING
        yield Text(x=(left + right) / 2, y=y, text=line, align="middle", size=_NAME_SIZE, colour=colour)


def _find_passage(scene: Scene, shape: PieceShape) -> tuple[int, int]:
    """Return the longest range of columns in which a line of text fits into the piece."""
    room = _NAME_ROOM * scene.top / HEIGHT
    best, start = (0, 0), 0
    for end in range(1, len(shape.low) + 1):
        while start < end and shape.high[start:end].min() - shape.low[start:end].max() < room:
            start += 1
        if end - start > best[1] - best[0]:
            best = (start, end)
    return best


# --- the legend -----------------------------------------------------------------------------------------------------


def list_heights(scene: Scene) -> list[tuple[int | None, str, str]]:
    """Return the areas, top of the stack first, each with its height at the peak, so that a reader can add them up. The
    line comes last."""
    timeline, slice_ = scene.timeline, scene.peak.slice
    rows: list[tuple[int | None, str, str]] = [
        (at, area.name, format_height(timeline.y, area.values[slice_])) for at, area in enumerate(timeline.areas)
    ]
    rows = rows[::-1][:_MOST_LEGEND]
    if timeline.line:
        rows.append((None, timeline.line.name, format_height(timeline.y, timeline.line.values[slice_])))
    return rows


def _draw_legend(canvas: Canvas, scene: Scene) -> float:
    """Draw the legend right of the plot; return its right edge."""
    rows, faint = list_heights(scene), canvas.palette.faint
    names = [clean(name, _NAME_CHARACTERS) for _, name, _ in rows]
    left = _LEGEND_LEFT + _SWATCH
    right = left + max(width_of(name, 12.5) for name in names) + _VALUE
    canvas.write([Text(x=right, y=-13, text="at the peak", align="end", size=11, colour=faint)])
    for row, ((area, _, value), name) in enumerate(zip(rows, names, strict=True)):
        y = 8 + row * _LEGEND_ROW + (6 if area is None else 0)
        sign = Sign(fill=canvas.palette.ink, text=name, shape="dash")
        if area is not None:
            sign = Sign(fill=mix(scene.colours[area], "#ffffff", _SWATCH_TINT), text=name)
        canvas.sign(sign, _LEGEND_LEFT + 5, y)
        value_text = Text(x=right, y=y, text=value, align="end", colour=faint)
        canvas.write([Text(x=left, y=y, text=name, size=12.5), value_text])
    hidden = len(scene.timeline.areas) - _MOST_LEGEND
    if hidden > 0:
        y = 14 + len(rows) * _LEGEND_ROW
        canvas.write([Text(x=left, y=y, text=f"and {hidden} more below", colour=faint)])
    return right
