"""What a timeline looks like in print: one altair definition of areas, pieces, phases and the peak.

Everything comes in pixels from `timeline_scene`; Vega draws what it is given and has no say in the stacking, the order
or the legend. Left to Vega, a million events stack in a transform of its own, the legend runs against the stack, and
names lie on each other.

altair takes most of a second to import, hence the imports inside functions.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stepscope.findings import Stretch, Timeline
from stepscope.report.marks import Row, Text, chart_of, draw_frame, draw_rules, make_axis, write_texts
from stepscope.report.palette import FAINT, FRAME, INK
from stepscope.report.style import set_style
from stepscope.report.timeline_layout import (
    Heights,
    Shape,
    clean,
    colour_of,
    count_told_apart,
    fill_of,
    find_ticks,
    find_unit,
    mix,
)
from stepscope.report.timeline_scene import (
    HEIGHT,
    LANE_HEIGHT,
    LINE_CHARACTERS,
    WIDTH,
    Scene,
    Swatch,
    find_peak_place,
    find_span,
    name_pieces,
    place_legend,
    place_notes,
    place_peak_text,
    place_stretch_texts,
    place_stretches,
    set_scene,
)

if TYPE_CHECKING:
    import altair as alt

_SWATCH_TINT = 0.2
# Narrower than this, in pixels, a piece with an outline is all outline.
_LEAST_OUTLINED = 4.0


def define_timeline(timeline: Timeline, detail: float) -> "alt.LayerChart":
    """The chart of a timeline, with this share of its pieces told apart."""
    import altair as alt

    scene = set_scene(timeline, count_told_apart(timeline, detail))
    layers = _draw_nothing(timeline) if scene is None else _draw(scene)
    chart = alt.LayerChart(layer=layers, width=WIDTH, height=HEIGHT).properties(title=_title(timeline))
    return set_style(chart, title_over="group")


def _draw_nothing(timeline: Timeline) -> "list[alt.Chart]":
    text = Text(x=WIDTH / 2, y=HEIGHT / 2, text="Nothing to draw.", align="center", colour=FAINT)
    return [draw_frame(WIDTH, HEIGHT, None, None), *write_texts([text, *place_notes(timeline, ())])]


def _draw(scene: Scene) -> "list[alt.Chart]":
    """From back to front. Bounds of phases lie under the pieces, so that they cross no name."""
    placed = place_stretches(scene.timeline)
    phases, phase_note = place_stretch_texts(scene, placed)
    names, unnamed = name_pieces(scene)
    legend, swatches = place_legend(scene)
    texts = [*phases, *names, *legend, *place_notes(scene.timeline, unnamed, phase_note)]
    return [
        draw_frame(WIDTH, HEIGHT, _x_axis(scene), _y_axis(scene)),
        _draw_areas(scene),
        *_draw_stretches(scene, placed),
        *_draw_pieces(scene),
        *_draw_line(scene),
        *write_texts([*texts, place_peak_text(scene)]),
        *_draw_peak(scene),
        *_draw_swatches(swatches),
    ]


def _title(timeline: Timeline) -> "alt.TitleParams":
    import altair as alt

    title = textwrap.wrap(clean(timeline.title, 300), 100)
    return alt.TitleParams(title or [""], subtitle=textwrap.wrap(clean(timeline.subtitle, 900), LINE_CHARACTERS))


def _x_axis(scene: Scene) -> "alt.Axis":
    """Ticks at round numbers. A single slice has a beginning and no length, so it has one tick."""
    axis, times = scene.timeline.x, scene.timeline.times
    start, end = float(scene.layout.edges[0]), float(scene.layout.edges[-1])
    step = find_ticks(end - start, 8)[1]
    numbers = range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1)
    ticks = [number * step for number in numbers] if len(times) > 1 else [start]
    return make_axis(axis.label, axis.unit, [(scene.x(tick), f"{tick:,.9g}") for tick in ticks], grid=False)


def _y_axis(scene: Scene) -> "alt.Axis":
    axis = scene.timeline.y
    unit, unit_size = find_unit(axis, scene.top)
    ticks = find_ticks(scene.top / unit_size, 8)
    return make_axis(axis.label, unit, [(scene.y(tick * unit_size), f"{tick:,.9g}") for tick in ticks], grid=True)


def _draw_areas(scene: Scene) -> "alt.Chart":
    low, high = scene.layout.low, scene.layout.high
    rows = [
        row | {"key": area, "fill": fill_of(area, told_apart=False)}
        for area in range(len(scene.timeline.areas))
        for row in _outline(scene, 0, low[area], high[area])
    ]
    return _mark_areas(rows, stroke_width=0)


def _draw_pieces(scene: Scene) -> "list[alt.Chart]":
    rows = [
        row | {"key": index} | _colour(index, shape, _find_width(scene, shape))
        for index, shape in enumerate(scene.layout.shapes)
        for row in _outline(scene, shape.first, shape.low, shape.high)
    ]
    return [_mark_areas(rows, stroke_width=0.6)] if rows else []


def _colour(index: int, shape: Shape, width: float) -> Row:
    fill = fill_of(shape.piece.area, told_apart=True, odd=bool(index % 2))
    stroke = mix(colour_of(shape.piece.area), "#000000", 0.3)
    return {"fill": fill, "stroke": stroke if width >= _LEAST_OUTLINED else fill}


def _find_width(scene: Scene, shape: Shape) -> float:
    edges = scene.layout.edges
    return scene.x(edges[shape.first + len(shape.low)]) - scene.x(edges[shape.first])


def _outline(scene: Scene, first: int, low: Heights, high: Heights) -> Iterable[Row]:
    """The corners of a stepped shape: a row where it changes, and one where it ends."""
    changes = np.flatnonzero(np.diff(low, prepend=-1) | np.diff(high, prepend=-1))
    for column, source in [*((int(change), int(change)) for change in changes), (len(low), len(low) - 1)]:
        yield {
            "x": round(scene.x(scene.layout.edges[first + column]), 2),
            "low": round(scene.y(int(low[source])), 2),
            "high": round(scene.y(int(high[source])), 2),
        }


def _mark_areas(rows: list[Row], stroke_width: float) -> "alt.Chart":
    """All shapes of a kind as one mark, which draws them in the order of the rows."""
    import altair as alt

    mark = chart_of(rows).mark_area(interpolate="step-after", strokeWidth=stroke_width, opacity=1)
    mark = mark.encode(x="x:Q", y=alt.Y("low:Q", stack=None), y2="high:Q", detail="key:N")
    filled: alt.Chart = mark.encode(fill=alt.Fill("fill:N", scale=None))
    outlined: alt.Chart = filled.encode(stroke=alt.Stroke("stroke:N", scale=None))
    return outlined if stroke_width else filled


def _draw_line(scene: Scene) -> "list[alt.Chart]":
    line = scene.layout.line
    if line is None:
        return []
    mark = chart_of(_outline(scene, 0, line, line))
    mark = mark.mark_line(interpolate="step-after", strokeDash=[5, 3], strokeWidth=1.3, color=INK)
    return [mark.encode(x="x:Q", y="high:Q", order="x:Q")]


def _draw_stretches(scene: Scene, placed: Sequence[tuple[Stretch, int]]) -> "list[alt.Chart]":
    """A bar over each stretch, and lines down where it begins and ends, unless they would lie on each other."""
    bars: list[Row] = []
    bounds: list[Row] = []
    for stretch, lane in placed:
        start, end = find_span(scene, stretch)
        level = -5 - lane * LANE_HEIGHT
        bars.append({"x": start + 1.5, "x2": max(end - 1.5, start + 2), "y": level, "y2": level})
        for x in (start, end):
            if 1 < x < WIDTH - 1 and all(abs(x - other["x"]) > 3 for other in bounds):
                bounds.append({"x": x, "x2": x, "y": level, "y2": HEIGHT})
    return [draw_rules(rows, FRAME, width) for rows, width in ((bars, 1.2), (bounds, 0.6)) if rows]


def _draw_peak(scene: Scene) -> "list[alt.Chart]":
    x, y = find_peak_place(scene)
    dot = chart_of([{"x": x, "y": y}]).mark_point(
        filled=True, size=42, fill=INK, stroke="white", strokeWidth=1.2, opacity=1
    )
    leader = draw_rules([{"x": x, "x2": x, "y": place_peak_text(scene).y + 7, "y2": y}], INK, 0.8)
    return [leader, dot.encode(x="x:Q", y="y:Q")]


def _draw_swatches(swatches: Sequence[Swatch]) -> "list[alt.Chart]":
    import altair as alt

    squares = [
        {"x": swatch.x + 5, "y": swatch.y, "fill": mix(colour_of(swatch.area), "#ffffff", _SWATCH_TINT)}
        for swatch in swatches
        if swatch.area is not None
    ]
    dashes = [{"x": swatch.x - 2, "x2": swatch.x + 12, "y": swatch.y} for swatch in swatches if swatch.area is None]
    mark = chart_of(squares).mark_point(shape="square", size=110, filled=True, opacity=1)
    layers = [mark.encode(x="x:Q", y="y:Q", fill=alt.Fill("fill:N", scale=None))]
    if dashes:
        mark = chart_of(dashes).mark_rule(strokeDash=[5, 3], strokeWidth=1.3, color=INK)
        layers.append(mark.encode(x="x:Q", x2="x2:Q", y="y:Q"))
    return layers
