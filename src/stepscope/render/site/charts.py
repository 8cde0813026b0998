"""The body of each chart on the page.

Lines, rooflines and bars are SVG and need no script. For pointer and keys, the script (`drawings.js`) finds a mark by
its number, and the text of its tooltip is packed here. A chart without panels is drawn twice, wide and narrow, and the
style sheet shows the one that fits, so that text keeps its size on a narrow screen.
"""

import math
from collections.abc import Sequence
from typing import Any

from stepscope.findings import (
    Axis,
    Bars,
    Column,
    Figure,
    Lanes,
    OfSeveral,
    Roofline,
    RoofPoint,
    StepPicture,
    Table,
    Timeline,
)
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend
from stepscope.render.drawing.bars import BarChart, chart_bars, place_bars
from stepscope.render.drawing.colours import Palette
from stepscope.render.drawing.lanes import sum_groups
from stepscope.render.drawing.lines import LineChart, arrange, describe_missing, draw_panel, shape_of
from stepscope.render.drawing.roofline import (
    MOST_NUMBERED,
    choose_points,
    list_signs,
    name_point,
    place_roofline,
    rank_groups,
)
from stepscope.render.drawing.step import describe_picture, list_segments, name_phase, place_step_picture
from stepscope.render.drawing.svg import Canvas, Sign
from stepscope.render.drawing.timeline_layout import counts_bytes, find_end, find_peak, format_height, format_moment
from stepscope.render.formats import clean
from stepscope.render.numbers import format_measured, format_on, format_rate, format_time, format_value, name_idle
from stepscope.render.site.comparison_charts import pack_compared, write_compared
from stepscope.render.site.html import markup, prose
from stepscope.render.site.plots import NARROW, WIDE, write_canvas, write_entry, write_legend, write_nothing, write_plot
from stepscope.units import count_noun

Drawn = Figure | Roofline | Bars | StepPicture | OfSeveral

_WIDE_BARS = 720.0
_ROOFLINE_HEIGHTS = {WIDE: 400.0, NARROW: 320.0}
# Pixels around a mark in which a pointer selects it.
_REACHES = {Figure: 28, Roofline: 6, Bars: 2, StepPicture: 2, AlignedSteps: 2, AlignedMemory: 2, Trend: 28}
_MOST_LABEL, _MOST_DETAIL, _MOST_READ = 60, 600, 60
_MOST_PIECES = 200


def write_body(part: Drawn | Lanes | Timeline, palette: Palette) -> str:
    """Return the inside of a chart's body."""
    match part:
        case Figure():
            return _write_lines(arrange(part), palette)
        case Roofline():
            return _write_roofline(part, palette)
        case Bars():
            return _write_bars(chart_bars(part), palette)
        case StepPicture():
            return _write_step(part, palette)
        case AlignedSteps() | AlignedMemory() | Trend():
            return write_compared(part, palette)
        case Lanes():
            return _write_lanes(part, palette)
        case Timeline():
            return _write_timeline(part, palette)


def pack_drawing(part: Drawn, what: str) -> dict[str, Any]:
    """Return what the script needs to know about a chart's marks. `what` is "kernels", or "operators" on a CPU."""
    match part:
        case Figure():
            packed = _pack_lines(arrange(part))
        case Roofline():
            packed = _pack_roofline(part, choose_points(part), what)
        case Bars():
            packed = _pack_bars(chart_bars(part))
        case StepPicture():
            packed = _pack_step(part)
        case AlignedSteps() | AlignedMemory() | Trend():
            packed = pack_compared(part)
    return packed | {"reach": _REACHES[type(part)]}


# --- lines ----------------------------------------------------------------------------------------------------------


def _write_lines(lines: LineChart, palette: Palette) -> str:
    missing = describe_missing(lines)
    if not lines.points:
        return write_nothing(missing)
    svgs = []
    for panel in lines.panels:
        canvas = Canvas(palette)
        draw_panel(canvas, lines, panel)
        svgs.append(canvas.wrap(lines.bounds, class_="drawing"))
    signs = [Sign(fill=palette.fill(name), text=clean(name), shape=shape_of(lines, name)) for name in lines.series]
    entries = [write_entry(palette, sign, at, pressed=True) for at, sign in enumerate(signs)]
    label = clean(lines.figure.series_label, _MOST_LABEL) or "Series"
    legend = write_legend(entries, label) if any(lines.series) else ""
    help_text = f'<p class="help">{prose(missing)}</p>' if missing else ""
    return f"{legend}{write_plot(svgs, _describe_lines(lines), 'panels')}{help_text}"


def _describe_lines(lines: LineChart) -> str:
    def span(axis: Axis, values: Sequence[float]) -> str:
        return f"{format_on(axis, min(values))} to {format_on(axis, max(values))}"

    figure, points = lines.figure, lines.points
    names = ", ".join(clean(name) for name in lines.series if name)
    return (
        f"{clean(figure.title)}: {lines.y.title} from {span(figure.y, [point.y for point in points])} over "
        f"{lines.x.title} from {span(figure.x, [point.x for point in points])}{f', for {names}' if names else ''}. "
        "Arrow keys move from point to point."
    )


def _pack_lines(lines: LineChart) -> dict[str, Any]:
    """A tooltip lists all points of a panel at the same x, so each point has the index of that place."""
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
        return write_nothing("No points to draw.")
    svgs = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        canvas = Canvas(palette)
        bounds = place_roofline(canvas, roofline, points, width, _ROOFLINE_HEIGHTS[width])
        svgs.append(canvas.wrap(bounds, class_=f"drawing {name}"))
    signs = list_signs(palette, roofline, points)
    num_groups = len(signs) - (len(roofline.runs) if len(roofline.runs) > 1 else 0)
    entries = [write_entry(palette, sign, at if at < num_groups else None) for at, sign in enumerate(signs)]
    legend = write_legend(entries, "Classes")
    plot = write_plot(svgs, _describe_roofline(roofline, points), "sized")
    hidden = len(roofline.points) - len(points)
    rest = sum(point.share for point in roofline.points) - sum(point.share for point in points)
    fits, takes = ("it does not fit", "takes") if hidden == 1 else ("they do not fit", "take")
    share = f" and {takes} {format_value('share', rest)} of the time" if math.isfinite(rest) and rest >= 0.0005 else ""
    said = f"{hidden} of {len(roofline.points)} points not drawn: {fits} on these axes{share}."
    left_out = f'<p class="help">{said}</p>' if hidden else ""
    listed = "".join(_write_point(roofline, at, point) for at, point in enumerate(points[:_MOST_READ]))
    return f'{legend}{plot}{left_out}<ol class="points">{listed}</ol>'


def _write_point(roofline: Roofline, at: int, point: RoofPoint) -> str:
    """A list item, numbered as in the chart; points without a number there are for screen readers only."""
    reached = f", {format_value('share', point.reached)} of the limit" if point.reached is not None else ""
    figures = f"{format_value('share', point.share)} of the time{reached}"
    hidden = "" if at < MOST_NUMBERED else ' class="unseen"'
    return (
        f'<li{hidden} data-mark="{at}"><span class="name">{markup(name_point(roofline, point))}</span> '
        f'<span class="of">{figures}</span></li>'
    )


def _describe_roofline(roofline: Roofline, points: Sequence[RoofPoint]) -> str:
    most = "; ".join(f"{clean(point.label)} at {_say_rate(point)}" for point in points[:3])
    return (
        f"{clean(roofline.title)}: {count_noun(len(points), 'operator')}, "
        f"{count_noun(len(roofline.roofs), 'compute limit')} and a memory bandwidth of "
        f"{format_rate(roofline.bytes_per_s, 'B/s', exact=True)}. Most time: {most}. "
        "Arrow keys move from point to point."
    )


def _say_rate(point: RoofPoint) -> str:
    """Return the throughput: of memory, for an operator without FLOPs."""
    if point.flops_per_s:
        return format_rate(point.flops_per_s, "FLOP/s")
    return format_rate(point.bytes_per_s, "B/s")


def _pack_roofline(roofline: Roofline, points: Sequence[RoofPoint], what: str) -> dict[str, Any]:
    groups = rank_groups(points)
    marks = [{"group": groups.index(point.group), "lines": _describe_point(roofline, point, what)} for point in points]
    return {"groups": [clean(group) for group in groups], "marks": marks, "isOnlyOne": True}


def _describe_point(roofline: Roofline, point: RoofPoint, what: str) -> list[str]:
    run = f", {clean(roofline.runs[point.run], _MOST_LABEL)}" if len(roofline.runs) > 1 else ""
    unit = "per step" if roofline.unit == "step" else "in the trace"
    lines = [
        clean(point.label),
        f"{clean(point.group) or 'other'}{run}",
        f"{format_value('ms', point.time_ms)} {unit}, {format_value('share', point.share)} of all {what[:-1]} time",
        f"{_say_rate(point)} at {format_measured(point.intensity)} FLOP/byte"
        if point.flops_per_s
        else f"{_say_rate(point)}, only moves memory",
    ]
    if point.reached is not None:
        lines.append(f"{format_value('share', point.reached)} of the device's limit")
    if point.bound != "unknown":
        lines.append(f"{clean(point.bound, _MOST_LABEL)}-bound")
    return lines + clean(point.detail, _MOST_DETAIL, lines=True).splitlines()


# --- bars -----------------------------------------------------------------------------------------------------------


def _write_bars(chart: BarChart, palette: Palette) -> str:
    if not chart.bars.labels or not chart.bars.series:
        return write_nothing("Nothing to draw.")
    svgs = []
    for name, width in (("wide", _WIDE_BARS), ("narrow", NARROW)):
        canvas = Canvas(palette)
        bounds = place_bars(canvas, chart, width)
        svgs.append(canvas.wrap(bounds, class_=f"drawing {name}"))
    label = f"{clean(chart.bars.title)}: {count_noun(len(chart.bars.labels), 'bar')}. Arrow keys move from bar to bar."
    return write_plot(svgs, label, "sized")


def _pack_bars(chart: BarChart) -> dict[str, Any]:
    bars = chart.bars
    marks = []
    for series, column in zip(bars.series, bars.values, strict=True):
        for label, value in zip(bars.labels, column, strict=True):
            text = format_value(bars.kind, value)
            said = f"{clean(series)}: {text}" if len(bars.series) > 1 else text
            marks.append({"group": -1, "lines": [clean(label), said]})
    return {"groups": [], "marks": marks, "isOnlyOne": False}


# --- the step as a bar ----------------------------------------------------------------------------------------------


def _write_step(picture: StepPicture, palette: Palette) -> str:
    svgs = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        canvas = Canvas(palette)
        bounds = place_step_picture(canvas, picture, width, f"idle-{name}")
        svgs.append(canvas.wrap(bounds, class_=f"drawing {name}"))
    told = f'<p class="unseen">{prose(describe_picture(picture))}</p>'
    return told + write_plot(svgs, f"{clean(picture.title)}. Arrow keys move from part to part.", "sized")


def _pack_step(picture: StepPicture) -> dict[str, Any]:
    groups = list(dict.fromkeys(segment.name for segment in list_segments(picture) if segment.name))
    marks = []
    for segment in list_segments(picture):
        bar = picture.bars[segment.bar]
        assert bar is not None, "only drawn bars have segments"
        phase, run = name_phase(segment.phase), clean(picture.runs[segment.bar], _MOST_LABEL)
        whole = segment.phase.busy_ns + segment.phase.idle_ns
        what = "step" if bar.is_step else "trace"
        lines = [
            ", ".join(filter(None, (run, phase, clean(segment.name, _MOST_LABEL) or name_idle(bar)))),
            f"{format_time(segment.time_ns)}, {format_value('share', segment.time_ns / bar.step_ns)} of the {what}",
        ]
        if phase:
            lines.append(f"{format_value('share', segment.time_ns / whole)} of {phase}, {format_time(whole)}")
        marks.append({"group": groups.index(segment.name) if segment.name else -1, "lines": lines})
    return {"groups": [clean(group) for group in groups], "marks": marks, "isOnlyOne": False}


# --- a step, and memory over time -----------------------------------------------------------------------------------


def _write_lanes(lanes: Lanes, palette: Palette) -> str:
    tracks = [track for track in lanes.tracks if track.spans.starts_ns]
    if not tracks:
        return write_nothing("Nothing was recorded in this step.")
    times = [(group, clean(lanes.groups[group]) or "other", format_time(time)) for group, time in sum_groups(lanes)]
    entries = (
        write_entry(palette, Sign(fill=palette.fill(lanes.groups[group]), text=name), group, note=time)
        for group, name, time in times
    )
    num_spans = sum(len(track.spans.starts_ns) for track in tracks)
    label = (
        f"{clean(lanes.title)}: {format_time(lanes.span_ns)}, {count_noun(len(lanes.tracks), 'track')}, "
        f"{count_noun(num_spans, 'span')}. Most time: {', '.join(f'{name} {time}' for _, name, time in times[:4])}. "
        "Arrow keys move, plus and minus zoom, 0 shows the whole step, N and P select the next and the previous span."
    )
    below = (
        '<div class="below"><span class="status"></span><span class="linked"></span>'
        '<button type="button" class="quiet whole">Reset zoom</button></div>'
    )
    legend = write_legend(entries, "Classes, longest time first")
    strip = '<canvas class="map" aria-hidden="true"></canvas>'
    return f"{legend}{strip}{write_canvas(label)}{below}"


def _write_timeline(timeline: Timeline, palette: Palette) -> str:
    """The legend lists areas from the top of the stack down; the line has the number after theirs."""
    named = [(at, area.name) for at, area in enumerate(timeline.areas)][::-1]
    entries = [
        write_entry(palette, Sign(fill=palette.fill(name), text=clean(name)), at, pressed=True) for at, name in named
    ]
    if timeline.line is not None:
        sign = Sign(fill=palette.ink, text=clean(timeline.line.name), shape="dash")
        entries.append(write_entry(palette, sign, len(named), pressed=True))
    peak = find_peak(timeline)
    said = "Nothing to draw."
    if peak is not None:
        said = f"Peak {format_height(timeline.y, peak.value)} at {format_moment(timeline.x, peak.time)}."
    label = f"{clean(timeline.y.label, _MOST_LABEL)} over {clean(timeline.x.label, _MOST_LABEL)}. {said}"
    controls = (
        f'<div class="controls"{"" if timeline.pieces else " hidden"}><label>Detail '
        '<input type="range" min="0" max="100" step="0.1"></label><output class="shown"></output>'
        '<button type="button" class="quiet whole">Reset zoom</button></div>'
    )
    legend = write_legend(entries, "Areas, top of the stack first")
    return f"{legend}{write_canvas(label)}{controls}"


def tabulate_pieces(timeline: Timeline) -> Table:
    """Return a table of the largest pieces, in the order of the timeline."""
    shown = timeline.pieces[:_MOST_PIECES]
    ends = (*timeline.times, find_end(timeline))
    unit = clean(timeline.x.unit, 20)
    num_slices = len(timeline.times)
    hidden = len(timeline.pieces) - len(shown)
    return Table(
        title="Largest pieces",
        columns=(
            Column(key="size", label="size", kind="bytes" if counts_bytes(timeline.y) else "number"),
            Column(key="what", label="what"),
            Column(key="area", label="area"),
            Column(key="from", label=f"from {unit}", kind="number"),
            Column(key="to", label=f"to {unit}", kind="number"),
        ),
        rows=tuple(
            (
                piece.size,
                piece.label,
                timeline.areas[piece.area].name,
                ends[min(piece.start, num_slices)],
                ends[min(piece.end, num_slices)],
            )
            for piece in shown
        ),
        notes=(f"The largest {len(shown)} of {len(timeline.pieces):,}.",) if hidden else (),
    )
