"""A roofline in print: the limits of the device as lines, operators as points whose area is their share of the time.

Names at the points would lie on each other, as the operators of a model are few kinds in many shapes. So the largest
have numbers, and the names stand in a list below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.findings import Roofline, RoofPoint
from stepscope.report.chart import find_log_ticks
from stepscope.report.marks import (
    PAGE_WIDTH,
    Row,
    Sign,
    Text,
    chart_of,
    draw_boxes,
    draw_frame,
    draw_rules,
    make_axis,
    make_title,
    place_at,
    place_legend,
    place_notes,
    write_texts,
)
from stepscope.report.palette import FAINT, INK
from stepscope.report.site.colours import colour_of
from stepscope.report.site.text import format_value
from stepscope.report.style import set_style
from stepscope.report.timeline_layout import choose_ink, clean, fit, width_of

if TYPE_CHECKING:
    import altair as alt

_LEFT = 62.0  # of the vertical axis and its title
_WIDTH, _HEIGHT = PAGE_WIDTH - _LEFT, 330.0
_MOST_POINTS, _MOST_NUMBERED, _MOST_ROOFS, _MOST_SIGNS = 1500, 12, 6, 14
_SHAPES = ("circle", "diamond", "square", "triangle-up")
_LEAST_AREA, _MOST_AREA = 20.0, 1500.0
# From this radius on, a number fits into its point.
_ROOMY = 7.5
_MARGIN = 1.8
_LINE = 16.0
_FIGURE = 46.0  # room for a share
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """Both axes, logarithmic, from `low` to `high`."""

    low: tuple[float, float]
    high: tuple[float, float]

    def x(self, intensity: float) -> float:
        return _WIDTH * math.log(intensity / self.low[0]) / math.log(self.high[0] / self.low[0])

    def y(self, rate: float) -> float:
        return _HEIGHT * (1 - math.log(rate / self.low[1]) / math.log(self.high[1] / self.low[1]))


def define_roofline(roofline: Roofline) -> "alt.LayerChart":
    import altair as alt

    drawn = [point for point in roofline.points if _can_be_drawn(point)]
    drawn = sorted(drawn, key=lambda point: -point.share)[:_MOST_POINTS]
    roofs = [roof for roof in roofline.roofs if roof.flops_per_s > 0][:_MOST_ROOFS]
    plane = _span(drawn, [roof.flops_per_s for roof in roofs], roofline.bytes_per_s)
    numbered = drawn[:_MOST_NUMBERED]
    signs, legend, listed = place_legend(_make_signs(drawn), left=-_LEFT, top=_HEIGHT + 58, width=PAGE_WIDTH)
    names, end = _list_names(roofline, numbered, listed)
    notes = place_notes(_make_notes(roofline, drawn), left=-_LEFT, top=end, width=PAGE_WIDTH)
    lines, roof_names = _place_roofs(roofline, plane)
    numbers, leaders = _place_numbers(drawn, len(numbered), plane)
    layers = [
        draw_frame(_WIDTH, _HEIGHT, _x_axis(plane), _y_axis(plane)),
        *([draw_rules(lines, INK, 1.4)] if lines else []),
        *_draw_points(drawn, plane),
        *([draw_rules(leaders, INK, 0.6)] if leaders else []),
        *([draw_boxes(signs)] if signs else []),
        *write_texts([*roof_names, *numbers, *legend, *names, *notes]),
    ]
    chart = alt.LayerChart(layer=layers, width=_WIDTH, height=_HEIGHT)
    return set_style(chart.properties(title=make_title(roofline.title)))


def _can_be_drawn(point: RoofPoint) -> bool:
    values = (point.intensity, point.flops_per_s)
    return all(math.isfinite(value) and value > 0 for value in values) and math.isfinite(point.share)


def _span(points: Sequence[RoofPoint], roofs: Sequence[float], bytes_per_s: float) -> _Plane:
    """Both axes around all points, all roofs and the ridge of the lowest roof, with a margin."""
    ridges = [roof / bytes_per_s for roof in roofs] if bytes_per_s > 0 else []
    xs = [*(point.intensity for point in points), *ridges] or [1.0]
    ys = [*(point.flops_per_s for point in points), *roofs] or [1.0]
    low, high = (min(xs) / 2, min(ys) / 2), (max(xs) * 4, max(ys) * _MARGIN)
    return _Plane(low=low, high=high)


def _place_roofs(roofline: Roofline, plane: _Plane) -> tuple[list[Row], list[Text]]:
    """The memory's slope up to the highest roof, and each roof from the slope to the right."""
    bandwidth = roofline.bytes_per_s
    if not bandwidth > 0 or not math.isfinite(bandwidth):
        return [], []
    roofs = sorted((roof for roof in roofline.roofs if roof.flops_per_s > 0), key=lambda roof: -roof.flops_per_s)
    top = roofs[0].flops_per_s if roofs else plane.high[1]
    start = max(plane.low[0], plane.low[1] / bandwidth)
    end = min(top / bandwidth, plane.high[0])
    if end <= start:
        return [], []
    lines = [_line(plane, (start, start * bandwidth), (end, end * bandwidth))]
    texts = [_name_slope(plane, start, end, bandwidth)]
    lowest_free = math.inf
    for roof in roofs[:_MOST_ROOFS]:
        rate, y = roof.flops_per_s, plane.y(roof.flops_per_s)
        lines.append(_line(plane, (max(plane.low[0], rate / bandwidth), rate), (plane.high[0], rate)))
        # Roofs of a device may lie close together: a name that would lie on the one above is left to the note.
        if y - 8 > lowest_free or lowest_free is math.inf:
            text = f"{clean(roof.label, 30)}, {_format_rate(rate)}FLOP/s"
            texts.append(Text(x=_WIDTH - 2, y=y - 8, text=text, align="right", size=11.0, rim=True))
            lowest_free = y + 8
    return lines, texts


def _line(plane: _Plane, start: tuple[float, float], end: tuple[float, float]) -> Row:
    return {"x": plane.x(start[0]), "y": plane.y(start[1]), "x2": plane.x(end[0]), "y2": plane.y(end[1])}


def _name_slope(plane: _Plane, start: float, end: float, bandwidth: float) -> Text:
    """Left of the slope, a third of the way up, where points cannot be."""
    middle = start * (end / start) ** 0.6
    text = f"memory, {_format_rate(bandwidth)}B/s"
    room = width_of(text, 11.0) + 4
    x = plane.x(middle) - 13
    if x < room:
        return Text(x=max(x, 0), y=plane.y(middle * bandwidth) - 12, text=text, size=11.0, rim=True)
    return Text(x=x, y=plane.y(middle * bandwidth), text=text, align="right", size=11.0, rim=True)


def _format_rate(rate: float) -> str:
    size, prefix = next((pair for pair in _PREFIXES if rate >= pair[0]), _PREFIXES[-1])
    return f"{rate / size:.3g} {prefix}"


def _x_axis(plane: _Plane) -> "alt.Axis":
    ticks = find_log_ticks(plane.low[0], plane.high[0])
    return make_axis("intensity", "FLOP/byte", [(plane.x(tick), f"{tick:,.9g}") for tick in ticks], grid=True)


def _y_axis(plane: _Plane) -> "alt.Axis":
    ticks = find_log_ticks(plane.low[1], plane.high[1])
    # The margin above the highest roof does not decide the unit.
    size, prefix = next((pair for pair in _PREFIXES if plane.high[1] / _MARGIN >= pair[0]), _PREFIXES[-1])
    places = [(plane.y(tick), f"{float(f'{tick / size:.9g}'):,.9g}") for tick in ticks]
    return make_axis("speed", f"{prefix}FLOP/s", places, grid=True)


def _draw_points(points: Sequence[RoofPoint], plane: _Plane) -> "list[alt.Chart]":
    """A layer for each run, as Vega takes a shape by mark; the largest first, so that none hides another."""
    import altair as alt

    layers = []
    for run in sorted({point.run for point in points}):
        rows = [
            {
                "x": round(plane.x(point.intensity), 2),
                "y": round(plane.y(point.flops_per_s), 2),
                "fill": colour_of(point.group)[0],
                "size": round(_area_of(point), 1),
            }
            for point in points
            if point.run == run
        ]
        shape = _SHAPES[run % len(_SHAPES)]
        mark = chart_of(rows).mark_point(shape=shape, filled=True, opacity=0.85, stroke="white", strokeWidth=0.8)
        layers.append(
            mark.encode(
                **place_at(x="x", y="y"), fill=alt.Fill("fill:N", scale=None), size=alt.Size("size:Q", scale=None)
            )
        )
    return layers


def _area_of(point: RoofPoint) -> float:
    return _LEAST_AREA + _MOST_AREA * min(max(point.share, 0.0), 1.0)


def _radius_of(point: RoofPoint) -> float:
    return math.sqrt(_area_of(point) / math.pi)


def _place_numbers(points: Sequence[RoofPoint], num_numbered: int, plane: _Plane) -> tuple[list[Text], list[Row]]:
    """A number in each of the first, or beside it with a line between, at the first of a few places where it lies on
    nothing else."""
    centres = [(plane.x(point.intensity), plane.y(point.flops_per_s)) for point in points]
    taken: list[tuple[float, float]] = list(centres)
    texts: list[Text] = []
    lines: list[Row] = []
    for number, (point, (x, y)) in enumerate(zip(points[:num_numbered], centres, strict=False), start=1):
        radius, fill = _radius_of(point), colour_of(point.group)[0]
        crowded = sum(1 for centre in centres[:num_numbered] if not _lie_apart((x, y), centre)) > 1
        if radius >= _ROOMY + 2.5 * (number > 9) and not crowded:
            texts.append(_number(number, x, y + 0.5, choose_ink(fill)))
            continue
        place = _find_place(x, y, radius, taken)
        taken.append(place)
        texts.append(_number(number, *place, INK))
        lines.append({"x": x, "y": y, "x2": (place[0] * 2 + x) / 3, "y2": (place[1] * 2 + y) / 3})
    return texts, lines


def _find_place(x: float, y: float, radius: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    places = [
        (x + (radius + reach) * math.cos(angle), y - (radius + reach) * math.sin(angle))
        for reach in (9, 16, 24, 34, 46)
        for angle in (math.pi / 4, 0.0, -math.pi / 4, math.pi, 3 * math.pi / 4, -3 * math.pi / 4)
    ]
    inside = [place for place in places if 8 < place[0] < _WIDTH - 8 and 8 < place[1] < _HEIGHT - 8]
    free = (place for place in inside if all(_lie_apart(place, other) for other in taken))
    return next(free, places[0])


def _number(number: int, x: float, y: float, colour: str) -> Text:
    return Text(x=x, y=y, text=str(number), align="center", size=10.5, weight="bold", colour=colour)


def _lie_apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) > 12 or abs(one[1] - other[1]) > 11


def _list_names(roofline: Roofline, points: Sequence[RoofPoint], top: float) -> tuple[list[Text], float]:
    """The numbered points in two columns: name, share of the time, share of what the device allows."""
    num_rows = math.ceil(len(points) / 2)
    column_width = PAGE_WIDTH / 2
    texts: list[Text] = []
    for column in range(min(2, len(points))):
        right = -_LEFT + (column + 1) * column_width - 14
        texts += [_figure("of time", right - _FIGURE, top + 2), _figure("of limit", right, top + 2)]
    for at, point in enumerate(points):
        column, row = divmod(at, num_rows)
        left, y = -_LEFT + column * column_width, top + 4 + (row + 1) * _LINE
        run = roofline.runs[point.run] if point.run < len(roofline.runs) else ""
        label = _tell_apart(point)
        name = clean(f"{run}: {label}" if run else label, 80)
        right = left + column_width - 14
        reached = format_value("share", point.reached)
        texts += [
            Text(x=left + 14, y=y, text=str(at + 1), align="right", size=10.5, weight="bold"),
            Text(x=left + 20, y=y, text=fit(name, column_width - 34 - 2 * _FIGURE, 11.0), size=11.0),
            _figure(format_value("share", point.share), right - _FIGURE, y),
            _figure(reached, right, y),
        ]
    return texts, top + (num_rows + 1) * _LINE + 12


def _tell_apart(point: RoofPoint) -> str:
    """The label, with the shapes where the first line of the details goes on with them."""
    first = point.detail.partition("\n")[0]
    return first if first.startswith(point.label) else point.label


def _figure(text: str, right: float, y: float) -> Text:
    return Text(x=right, y=y, text=text, align="right", size=11.0, colour=FAINT)


def _make_signs(points: Sequence[RoofPoint]) -> list[Sign]:
    shares: dict[str, float] = {}
    for point in points:
        shares[point.group] = shares.get(point.group, 0.0) + point.share
    ranked = sorted(shares, key=lambda group: -shares[group])[:_MOST_SIGNS]
    return [Sign(fill=colour_of(group)[0], text=clean(group, 30) or "unknown") for group in ranked]


def _make_notes(roofline: Roofline, points: Sequence[RoofPoint]) -> list[str]:
    notes = [] if points else ["No operators to draw."]
    if points:
        notes.append("A point is all calls of one operator with one shape; its area is its share of the time.")
    if len(roofline.runs) > 1:
        shapes = ", ".join(
            f"{clean(run, 40)} {_SHAPES[at % len(_SHAPES)].removesuffix('-up')}s"
            for at, run in enumerate(roofline.runs)
        )
        notes.append(f"Runs by shape: {shapes}.")
    hidden = len(roofline.points) - len(points)
    if hidden:
        notes.append(f"{hidden} of {len(roofline.points)} points are not drawn: no finite place, or too small a share.")
    return [*notes, *roofline.notes]
