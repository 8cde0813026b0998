"""Charts that stand on the page as SVG: lines, rooflines and bars. They can be seen without a script.

The script (`drawings.js`) answers to pointer and keys: marks carry their number, and what is said of each is packed
here, in words. A chart that does not consist of panels is drawn twice, and the style sheet shows the one that fits:
type keeps its size on a narrow screen.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.findings import Axis, Bars, Figure, Roofline, RoofPoint
from stepscope.report.drawing.bars import BarChart, chart_bars, place_bars
from stepscope.report.drawing.colours import Palette
from stepscope.report.drawing.lines import LineChart, arrange, describe_missing, draw_panel, shape_of
from stepscope.report.drawing.roofline import (
    MOST_NUMBERED,
    choose_points,
    list_signs,
    name_point,
    place_roofline,
    rank_groups,
)
from stepscope.report.drawing.svg import Bounds, Canvas, Sign
from stepscope.report.formats import clean
from stepscope.report.numbers import format_measured, format_on, format_rate, format_value
from stepscope.report.site.html import markup, prose

Drawn = Figure | Roofline | Bars

_WIDE, _NARROW = 860.0, 400.0
_WIDE_BARS = 720.0
_ROOFLINE_HEIGHTS = {_WIDE: 400.0, _NARROW: 320.0}
_REACHES = {Figure: 28, Roofline: 6, Bars: 2}  # in pixels around a mark, within which it is pointed at
_MOST_LABEL, _MOST_DETAIL, _MOST_READ = 60, 600, 60
_HELP = (
    "Under the slope memory is the limit, under a flat line arithmetic; how far a point lies below its line is what "
    "could be gained. A point's area is its time in a step."
)
_SIGN = Bounds(left=-1.4, top=-1.4, right=1.4, bottom=1.4)


def write_drawing(part: Drawn, palette: Palette) -> str:
    """The inside of a chart's body."""
    match part:
        case Figure():
            return _write_lines(arrange(part), palette)
        case Roofline():
            return _write_roofline(part, palette)
        case Bars():
            return _write_bars(chart_bars(part), palette)


def pack_drawing(part: Drawn, what: str) -> dict[str, Any]:
    """What the script knows of a chart's marks. `what` is what runs on the device."""
    match part:
        case Figure():
            packed = _pack_lines(arrange(part))
        case Roofline():
            packed = _pack_roofline(part, choose_points(part), what)
        case Bars():
            packed = _pack_bars(chart_bars(part))
    return packed | {"reach": _REACHES[type(part)]}


def _write_nothing(text: str) -> str:
    return f'<p class="nothing">{prose(text)}</p>'


def _write_plot(svgs: Iterable[str], label: str, kind: str) -> str:
    """A box that takes keys, which a screen reader would keep from a picture."""
    attributes = f'class="plot {kind}" tabindex="0" role="application" aria-label="{markup(label, 600)}"'
    return f"<div {attributes}>{''.join(svgs)}</div>"


def _write_sign(palette: Palette, sign: Sign) -> str:
    canvas = Canvas(palette)
    canvas.sign(sign, 0.0, 0.0, 1.0)
    return canvas.wrap(_SIGN, class_="sign", aria_hidden="true")


def _write_legend(palette: Palette, signs: Sequence[Sign], label: str, *, num_buttons: int, pressed: bool) -> str:
    """Its first signs are buttons that the script gives their work."""
    items = []
    for at, sign in enumerate(signs):
        inner = f"{_write_sign(palette, sign)}<span>{markup(sign.text)}</span>"
        if at < num_buttons:
            state = str(pressed).lower()
            items.append(f'<li><button type="button" data-group="{at}" aria-pressed="{state}">{inner}</button></li>')
        else:
            items.append(f'<li class="run">{inner}</li>')
    return f'<ul class="legend" aria-label="{markup(label)}">{"".join(items)}</ul>'


# --- lines ----------------------------------------------------------------------------------------------------------


def _write_lines(lines: LineChart, palette: Palette) -> str:
    missing = describe_missing(lines)
    if not lines.points:
        return _write_nothing(missing)
    svgs = []
    for panel in lines.panels:
        canvas = Canvas(palette)
        draw_panel(canvas, lines, panel)
        svgs.append(canvas.wrap(lines.bounds, class_="drawing"))
    signs = [Sign(fill=palette.fill(name), text=clean(name), shape=shape_of(lines, name)) for name in lines.series]
    label = clean(lines.figure.series_label, _MOST_LABEL) or "series"
    legend = _write_legend(palette, signs, label, num_buttons=len(signs), pressed=True) if any(lines.series) else ""
    help_text = f'<p class="help">{prose(missing)}</p>' if missing else ""
    return f"{legend}{_write_plot(svgs, _describe_lines(lines), 'panels')}{help_text}"


def _describe_lines(lines: LineChart) -> str:
    def span(axis: Axis, values: Sequence[float]) -> str:
        return f"{format_on(axis, min(values))} to {format_on(axis, max(values))}"

    figure, points = lines.figure, lines.points
    names = ", ".join(clean(name) for name in lines.series if name)
    return (
        f"{clean(figure.title)}: {lines.y.title} from {span(figure.y, [point.y for point in points])} over "
        f"{lines.x.title} from {span(figure.x, [point.x for point in points])}{f', for {names}' if names else ''}. "
        "Arrow keys go from point to point."
    )


def _pack_lines(lines: LineChart) -> dict[str, Any]:
    """A point is told with all others of its panel at the same x, so it names that place."""
    figure = lines.figure
    places: dict[str, int] = {}
    marks = []
    for point in lines.points:
        place = f"{clean(figure.x.label, _MOST_LABEL)} {format_on(figure.x, point.x)}"
        place = f"{clean(point.panel, _MOST_LABEL)}, {place}" if point.panel else place
        text = format_on(figure.y, point.y)
        if point.low is not None and point.high is not None:
            text += f" ({format_on(figure.y, point.low)} to {format_on(figure.y, point.high)})"
        text = f"{clean(point.series)}: {text}" if point.series else text
        group = lines.series.index(point.series)
        marks.append({"group": group, "place": places.setdefault(place, len(places)), "lines": [text]})
    groups = [clean(name) for name in lines.series]
    return {"groups": groups, "places": list(places), "marks": marks, "isOnlyOne": False}


# --- the roofline ---------------------------------------------------------------------------------------------------


def _write_roofline(roofline: Roofline, palette: Palette) -> str:
    points = choose_points(roofline)
    if not points:
        return _write_nothing("No points to draw.")
    svgs = []
    for name, width in (("wide", _WIDE), ("narrow", _NARROW)):
        canvas = Canvas(palette)
        bounds = place_roofline(canvas, roofline, points, width, _ROOFLINE_HEIGHTS[width])
        svgs.append(canvas.wrap(bounds, class_=f"drawing {name}"))
    signs = list_signs(palette, roofline, points)
    num_groups = len(signs) - (len(roofline.runs) if len(roofline.runs) > 1 else 0)
    legend = _write_legend(palette, signs, "classes", num_buttons=num_groups, pressed=False)
    plot = _write_plot(svgs, _describe_roofline(roofline, points), "sized")
    hidden = len(roofline.points) - len(points)
    left_out = f" {hidden} of {len(roofline.points)} points have no place on these axes." if hidden else ""
    listed = "".join(_write_point(roofline, at, point) for at, point in enumerate(points[:_MOST_READ]))
    return f'{legend}{plot}<p class="help">{prose(_HELP + left_out)}</p><ol class="points">{listed}</ol>'


def _write_point(roofline: Roofline, at: int, point: RoofPoint) -> str:
    """Numbered as in the drawing; those that have no number there are for a screen reader."""
    reached = f", {format_value('share', point.reached)} of the limit" if point.reached is not None else ""
    figures = f"{format_value('share', point.share)} of the time{reached}"
    hidden = "" if at < MOST_NUMBERED else ' class="unseen"'
    return (
        f'<li{hidden} data-mark="{at}"><span class="name">{markup(name_point(roofline, point))}</span> '
        f'<span class="of">{figures}</span></li>'
    )


def _describe_roofline(roofline: Roofline, points: Sequence[RoofPoint]) -> str:
    most = "; ".join(f"{clean(point.label)} at {format_rate(point.flops_per_s, 'FLOP/s')}" for point in points[:3])
    return (
        f"{clean(roofline.title)}: {len(points)} operators under {len(roofline.roofs)} limits of arithmetic and one of "
        f"memory of {format_rate(roofline.bytes_per_s, 'B/s', exact=True)}. Most time: {most}. Arrow keys go from "
        "point to point."
    )


def _pack_roofline(roofline: Roofline, points: Sequence[RoofPoint], what: str) -> dict[str, Any]:
    groups = rank_groups(points)
    marks = [{"group": groups.index(point.group), "lines": _tell_point(roofline, point, what)} for point in points]
    return {"groups": [clean(group) for group in groups], "marks": marks, "isOnlyOne": True}


def _tell_point(roofline: Roofline, point: RoofPoint, what: str) -> list[str]:
    run = f", run {clean(roofline.runs[point.run], _MOST_LABEL)}" if len(roofline.runs) > 1 else ""
    lines = [
        clean(point.label),
        f"{clean(point.group) or 'other'}{run}",
        f"{format_value('ms', point.time_ms)} a step, {format_value('share', point.share)} of all {what}",
        f"{format_rate(point.flops_per_s, 'FLOP/s')} at {format_measured(point.intensity)} FLOP a byte",
    ]
    if point.reached is not None:
        lines.append(f"{format_value('share', point.reached)} of what the device allows")
    lines.append(f"bound by {clean(point.bound, _MOST_LABEL)}")
    return lines + clean(point.detail, _MOST_DETAIL, lines=True).splitlines()


# --- bars -----------------------------------------------------------------------------------------------------------


def _write_bars(chart: BarChart, palette: Palette) -> str:
    if not chart.bars.labels or not chart.bars.series:
        return _write_nothing("Nothing to draw.")
    svgs = []
    for name, width in (("wide", _WIDE_BARS), ("narrow", _NARROW)):
        canvas = Canvas(palette)
        bounds = place_bars(canvas, chart, width)
        svgs.append(canvas.wrap(bounds, class_=f"drawing {name}"))
    label = f"{clean(chart.bars.title)}: {len(chart.bars.labels)} bars. Arrow keys go from bar to bar."
    return _write_plot(svgs, label, "sized")


def _pack_bars(chart: BarChart) -> dict[str, Any]:
    bars = chart.bars
    marks = []
    for series, column in zip(bars.series, bars.values, strict=True):
        for label, value in zip(bars.labels, column, strict=True):
            text = format_value(bars.kind, value)
            said = f"{clean(series)}: {text}" if len(bars.series) > 1 else text
            marks.append({"group": -1, "lines": [clean(label), said]})
    return {"groups": [], "marks": marks, "isOnlyOne": False}
