"""What a timeline looks like in print: one altair definition of areas, pieces, phases and the peak.

Everything comes in pixels from `timeline_scene`; Vega draws what it is given and has no say in the stacking, the order
or the legend. Left to Vega, a million events stack in a transform of its own, the legend runs against the stack, and
names lie on each other.

altair takes most of a second to import, hence the imports inside functions.
"""

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.findings import Stretch, Timeline
from stepscope.report.palette import FAINT, FONT, FRAME, GRID, INK
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
    Text,
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

Row = dict[str, Any]


def define_timeline(timeline: Timeline, detail: float) -> "alt.LayerChart":
    """The chart of a timeline, with this share of its pieces told apart."""
    import altair as alt

    scene = set_scene(timeline, count_told_apart(timeline, detail))
    layers = _draw_nothing(timeline) if scene is None else _draw(scene)
    return _style(alt.LayerChart(layer=layers, width=WIDTH, height=HEIGHT).properties(title=_title(timeline)))


def _draw_nothing(timeline: Timeline) -> "list[alt.Chart]":
    text = Text(x=WIDTH / 2, y=HEIGHT / 2, text="Nothing to draw.", align="center", colour=FAINT)
    return [_frame(None, None), *_write([text, *place_notes(timeline, ())])]


def _draw(scene: Scene) -> "list[alt.Chart]":
    """From back to front. Bounds of phases lie under the pieces, so that they cross no name."""
    placed = place_stretches(scene.timeline)
    phases, phase_note = place_stretch_texts(scene, placed)
    names, unnamed = name_pieces(scene)
    legend, swatches = place_legend(scene)
    texts = [*phases, *names, *legend, *place_notes(scene.timeline, unnamed, phase_note)]
    return [
        _frame(_x_axis(scene), _y_axis(scene)),
        _draw_areas(scene),
        *_draw_stretches(scene, placed),
        *_draw_pieces(scene),
        *_draw_line(scene),
        *_write([*texts, place_peak_text(scene)]),
        *_draw_peak(scene),
        *_draw_swatches(swatches),
    ]


def _title(timeline: Timeline) -> "alt.TitleParams":
    import altair as alt

    title = textwrap.wrap(clean(timeline.title, 300), 100)
    return alt.TitleParams(title or [""], subtitle=textwrap.wrap(clean(timeline.subtitle, 900), LINE_CHARACTERS))


def _frame(x_axis: "alt.Axis | None", y_axis: "alt.Axis | None") -> "alt.Chart":
    """Both axes in the units of a reader, over pixels. The first layer decides the scales of all."""
    import altair as alt

    x = alt.X("x:Q", scale=alt.Scale(domain=[0, WIDTH], nice=False, zero=False), axis=x_axis)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[HEIGHT, 0], nice=False, zero=False), axis=y_axis)
    frame: alt.Chart = _chart([{"x": 0, "y": 0}]).mark_point(opacity=0).encode(x=x, y=y)
    return frame


def _chart(rows: Iterable[Row]) -> "alt.Chart":
    """A chart of these rows, as one string: of a list altair checks and copies every row, for most of the time."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=json.dumps(list(rows)), format=alt.JsonDataFormat(type="json")))


def _x_axis(scene: Scene) -> "alt.Axis":
    """Ticks at round numbers. A single slice has a beginning and no length, so it has one tick."""
    axis, times = scene.timeline.x, scene.timeline.times
    start, end = float(scene.layout.edges[0]), float(scene.layout.edges[-1])
    step = find_ticks(end - start, 8)[1]
    numbers = range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1)
    ticks = [number * step for number in numbers] if len(times) > 1 else [start]
    return _axis(axis.label, axis.unit, [(scene.x(tick), tick) for tick in ticks], grid=False)


def _y_axis(scene: Scene) -> "alt.Axis":
    axis = scene.timeline.y
    unit, unit_size = find_unit(axis, scene.top)
    ticks = find_ticks(scene.top / unit_size, 8)
    return _axis(axis.label, unit, [(scene.y(tick * unit_size), tick) for tick in ticks], grid=True)


def _axis(label: str, unit: str, ticks: Sequence[tuple[float, float]], *, grid: bool) -> "alt.Axis":
    """An axis whose ticks are given as pixel and value: Vega looks its label up."""
    import altair as alt

    places = [round(place, 3) for place, _ in ticks]
    labels = [f"{value:,.9g}" for _, value in ticks]
    return alt.Axis(
        title=f"{clean(label, 60)} ({clean(unit, 20)})" if unit else clean(label, 60),
        values=places,
        labelExpr=f"{json.dumps(labels)}[indexof({json.dumps(places)}, datum.value)]",
        grid=grid,
        labelFlush=False,
        labelOverlap=True,
    )


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

    mark = _chart(rows).mark_area(interpolate="step-after", strokeWidth=stroke_width, opacity=1)
    mark = mark.encode(x="x:Q", y=alt.Y("low:Q", stack=None), y2="high:Q", detail="key:N")
    filled: alt.Chart = mark.encode(fill=alt.Fill("fill:N", scale=None))
    outlined: alt.Chart = filled.encode(stroke=alt.Stroke("stroke:N", scale=None))
    return outlined if stroke_width else filled


def _draw_line(scene: Scene) -> "list[alt.Chart]":
    line = scene.layout.line
    if line is None:
        return []
    mark = _chart(_outline(scene, 0, line, line))
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
    return [_rule(rows, FRAME, width) for rows, width in ((bars, 1.2), (bounds, 0.6)) if rows]


def _rule(rows: list[Row], colour: str, width: float) -> "alt.Chart":
    mark = _chart(rows).mark_rule(strokeWidth=width, color=colour)
    rule: alt.Chart = mark.encode(x="x:Q", x2="x2:Q", y="y:Q", y2="y2:Q")
    return rule


def _draw_peak(scene: Scene) -> "list[alt.Chart]":
    x, y = find_peak_place(scene)
    dot = _chart([{"x": x, "y": y}]).mark_point(
        filled=True, size=42, fill=INK, stroke="white", strokeWidth=1.2, opacity=1
    )
    leader = _rule([{"x": x, "x2": x, "y": place_peak_text(scene).y + 7, "y2": y}], INK, 0.8)
    return [leader, dot.encode(x="x:Q", y="y:Q")]


def _draw_swatches(swatches: Sequence[Swatch]) -> "list[alt.Chart]":
    import altair as alt

    squares = [
        {"x": swatch.x + 5, "y": swatch.y, "fill": mix(colour_of(swatch.area), "#ffffff", _SWATCH_TINT)}
        for swatch in swatches
        if swatch.area is not None
    ]
    dashes = [{"x": swatch.x - 2, "x2": swatch.x + 12, "y": swatch.y} for swatch in swatches if swatch.area is None]
    mark = _chart(squares).mark_point(shape="square", size=110, filled=True, opacity=1)
    layers = [mark.encode(x="x:Q", y="y:Q", fill=alt.Fill("fill:N", scale=None))]
    if dashes:
        mark = _chart(dashes).mark_rule(strokeDash=[5, 3], strokeWidth=1.3, color=INK)
        layers.append(mark.encode(x="x:Q", x2="x2:Q", y="y:Q"))
    return layers


def _write(texts: Iterable[Text]) -> "list[alt.Chart]":
    """The texts, a layer for each way of writing: Vega takes alignment and weight by mark and not by row."""
    groups = defaultdict(list)
    for text in texts:
        groups[text.align, text.size, text.weight, text.colour, text.rim].append(text)
    layers = []
    for (align, size, weight, colour, rim), group in groups.items():
        rows = [{"x": round(text.x, 2), "y": round(text.y, 2), "text": text.text} for text in group]
        style: dict[str, Any] = {"align": align, "baseline": "middle", "fontSize": size, "fontWeight": weight}
        if rim:
            layers.append(_chart(rows).mark_text(**style, color="white", stroke="white", strokeWidth=4))
        layers.append(_chart(rows).mark_text(**style, color=colour))
    return [layer.encode(x="x:Q", y="y:Q", text="text:N") for layer in layers]


def _style(chart: "alt.LayerChart") -> "alt.LayerChart":
    """Fonts, greys and sizes, as in `chart`."""
    styled: alt.LayerChart = (
        chart.configure(font=FONT, background="white", padding=14)
        .configure_view(stroke=None)
        .configure_title(
            anchor="start",
            frame="group",
            fontSize=18,
            subtitleFontSize=12.5,
            color=INK,
            subtitleColor=FAINT,
            subtitlePadding=6,
            offset=16,
        )
        .configure_axis(
            labelFontSize=12,
            titleFontSize=13,
            titleFontWeight="normal",
            labelColor=FAINT,
            titleColor=INK,
            gridColor=GRID,
            domainColor=FRAME,
            tickColor=FRAME,
            titlePadding=9,
        )
    )
    return styled
