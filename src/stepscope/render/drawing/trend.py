"""One quantity over several runs: a line through the runs in their order, with the spread of each.

The shape of a mark says how a run compares with the baseline, which is a dashed line. Runs are evenly spaced, and have
their names below them if these fit, or else their number in the table. Differences of a few percent matter here, so the
axis starts at zero only if the values differ a lot, and says where it starts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.findings.compared import Trend, TrendLine, TrendPoint
from stepscope.render.drawing.axes import Scale, draw_x_axis, draw_y_axis, find_ticks, measure_gutter
from stepscope.render.drawing.brackets import NARROW
from stepscope.render.drawing.colours import Palette
from stepscope.render.drawing.svg import (
    Bounds,
    Canvas,
    MarkShape,
    Sign,
    Text,
    place_signs,
    width_of,
)
from stepscope.render.formats import clean
from stepscope.render.numbers import find_binary_unit, format_tick, format_value

_HEIGHT, _SMALL_HEIGHT = 240.0, 200.0
_NAME_SIZE, _VALUE_SIZE = 12.0, 11.0
_MARK = 5.0
# The axis starts at zero if the least value is a smaller share of the largest.
_FROM_ZERO = {"ms": 0.6, "bytes": 0.6, "count": 0.6, "ratio": 0.3}
_MOST_VALUES = 12  # runs with their value next to the mark
_SHAPES: dict[str, tuple[MarkShape, str]] = {
    "baseline": ("square", "baseline"),
    "faster": ("down", "faster than the baseline"),
    "slower": ("up", "slower"),
    "noise": ("circle", "within noise"),
    "same": ("circle", "within noise"),
    "cannot tell": ("diamond", "cannot tell"),
}
_HOLLOW = ("noise", "same", "cannot tell")
_UNITS = {"ms": "ms", "ratio": "×", "count": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendMark:
    """A point of the trend, in the order of the marks."""

    line: TrendLine
    point: TrendPoint


def list_marks(trend: Trend) -> list[TrendMark]:
    return [TrendMark(line=line, point=point) for line in trend.lines for point in line.points]


def say_verdict(point: TrendPoint) -> str:
    """Return the verdict in words; empty if there is none."""
    return _SHAPES[point.verdict][1] if point.verdict else ""


def describe_trend(trend: Trend) -> str:
    """Return the trend as sentences, for readers who do not see it."""
    said = []
    for line in trend.lines:
        values = [
            f"{clean(trend.runs[point.run])} {format_value(trend.kind, point.value)}"
            + (f" ({say_verdict(point)})" if point.verdict else "")
            for point in line.points
        ]
        said.append(f"{f'{clean(line.name)}: ' if line.name else ''}{', '.join(values)}.")
    return " ".join(said)


def place_trend(canvas: Canvas, trend: Trend, width: float) -> Bounds:
    """Draw the lines, axes and legend in `width` pixels. Each mark is a group with its number."""
    height = _SMALL_HEIGHT if width < NARROW else _HEIGHT
    ticks, unit, size = _choose_ticks(trend)
    texts = [format_tick(tick / size) for tick in ticks]
    gutter = max(measure_gutter(texts), 24.0)
    plot = Bounds(left=gutter, top=26.0, right=width - 8, bottom=26.0 + height)
    y = Scale(low=ticks[0], high=ticks[-1], start=plot.bottom, end=plot.top)
    title = f"{clean(trend.label, 80)} ({unit})" if unit else clean(trend.label, 80)
    title += f", axis starts at {texts[0]}" if ticks[0] else ""
    draw_y_axis(canvas, plot, list(zip(map(y, ticks), texts, strict=True)), title)
    slot = (plot.right - plot.left) / len(trend.runs)
    places = [plot.left + (run + 0.5) * slot for run in range(len(trend.runs))]
    bottom = _draw_runs(canvas, trend, plot, places, slot)
    _draw_baseline(canvas, trend, plot, y)
    number = 0
    for line in trend.lines:
        colour = canvas.palette.fill(line.name) if line.name else canvas.palette.plain
        canvas.trace([(places[point.run], y(point.value)) for point in line.points], colour, 1.8)
        for point in line.points:
            # Several lines keep their own colours, which distinguish them.
            fill = colour if len(trend.lines) > 1 else _fill(canvas.palette, point.verdict, colour)
            _draw_point(canvas, point, number, places[point.run], y, (colour, fill))
            number += 1
    if len(trend.lines) == 1 and len(trend.runs) <= _MOST_VALUES:
        _write_values(canvas, trend, places, slot, y)
    bottom = place_signs(canvas, _list_signs(canvas, trend), left=0.0, top=bottom + 16, width=width)
    return Bounds(left=0.0, top=0.0, right=width, bottom=bottom)


def _choose_ticks(trend: Trend) -> tuple[list[float], str, float]:
    """Return round values that enclose all points, their unit, and its size."""
    points = [mark.point for mark in list_marks(trend)]
    values = [value for point in points for value in (point.value, point.low, point.high) if value is not None]
    highest, lowest = max(values), min(values)
    unit, size = find_binary_unit(highest) if trend.kind == "bytes" else (_UNITS[trend.kind], 1.0)
    if lowest < _FROM_ZERO[trend.kind] * highest:
        lowest = 0.0
    room = 0.08 * (highest - lowest) or 0.1 * highest or 1.0
    low, high = (max(0.0, lowest - room) if lowest else 0.0) / size, (highest + room) / size
    ticks = find_ticks(low, high, 6)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    inner = [tick * size for tick in ticks]
    first = [] if low >= ticks[0] else [max(0.0, ticks[0] - step) * size]
    last = [] if high <= ticks[-1] else [(ticks[-1] + step) * size]
    return [*first, *inner, *last], unit, size


def _draw_runs(canvas: Canvas, trend: Trend, plot: Bounds, places: Sequence[float], slot: float) -> float:
    """Write the names of the runs below the axis if they fit, or else their numbers. Return the lower edge."""
    names = [clean(name, 60) for name in trend.runs]
    lines = [_break_name(name, slot - 6) for name in names]
    if all(lines):
        draw_x_axis(canvas, plot, [(x, "") for x in places], "", grid=False)
        for x, rows in zip(places, lines, strict=True):
            canvas.write(
                Text(x=x, y=plot.bottom + 15 + 15 * row, text=text, align="middle", colour=canvas.palette.faint)
                for row, text in enumerate(rows)
            )
        return plot.bottom + 10 + 15 * max(map(len, lines))
    numbers = [(x, str(run)) for run, x in enumerate(places, start=1)]
    draw_x_axis(canvas, plot, numbers, "run, numbered as in the table", grid=False)
    return plot.bottom + 44


def _break_name(name: str, room: float) -> list[str]:
    """Return the name in up to three lines, broken between words; nothing if it does not fit."""
    rows: list[str] = []
    for word in name.split():
        longer = f"{rows[-1]} {word}" if rows else word
        if rows and width_of(longer, _NAME_SIZE) <= room:
            rows[-1] = longer
        else:
            rows.append(word)
    return rows if len(rows) <= 3 and all(width_of(row, _NAME_SIZE) <= room for row in rows) else []


def _draw_baseline(canvas: Canvas, trend: Trend, plot: Bounds, y: Scale) -> None:
    value = 1.0 if trend.kind == "ratio" else _find_baseline(trend)
    if value is None:
        return
    canvas.line(plot.left, y(value), plot.right, y(value), canvas.palette.faint, 1.0, "5 4")


def _find_baseline(trend: Trend) -> float | None:
    points = [point for line in trend.lines for point in line.points if point.run == trend.baseline]
    return points[0].value if len(trend.lines) == 1 and points else None


def _draw_point(canvas: Canvas, point: TrendPoint, number: int, x: float, y: Scale, colours: tuple[str, str]) -> None:
    """`colours` are those of the line and of the mark."""
    colour, fill = colours
    if point.low is not None and point.high is not None and abs(y(point.low) - y(point.high)) > 1:
        canvas.line(x, y(point.low), x, y(point.high), colour, 1.4)
        for level in (y(point.low), y(point.high)):
            canvas.line(x - 4, level, x + 4, level, colour, 1.4)
    shape = _SHAPES[point.verdict][0] if point.verdict else "circle"
    with canvas.group(class_="mark", data_mark=number):
        if point.verdict in _HOLLOW:
            canvas.mark(shape, x, y(point.value), _MARK, fill=canvas.palette.paper, stroke=colour, stroke_width=1.8)
        else:
            canvas.mark(shape, x, y(point.value), _MARK + 0.4, fill=fill)


def _fill(palette: Palette, verdict: str, colour: str) -> str:
    if verdict in ("slower", "faster"):
        return palette.change(1 if verdict == "slower" else -1)
    return colour


def _write_values(canvas: Canvas, trend: Trend, places: Sequence[float], slot: float, y: Scale) -> None:
    """Write the value above each mark and its interval, if there is room."""
    for point in trend.lines[0].points:
        text = format_value(trend.kind, point.value)
        top = min(y(point.value), y(point.high) if point.high is not None else y(point.value))
        if width_of(text, _VALUE_SIZE) <= slot:
            canvas.write([Text(x=places[point.run], y=top - 13, text=text, align="middle", size=_VALUE_SIZE, rim=True)])


def _list_signs(canvas: Canvas, trend: Trend) -> list[Sign]:
    palette = canvas.palette
    signs = [Sign(fill=palette.fill(line.name), text=clean(line.name, 60)) for line in trend.lines if line.name]
    return [*signs, *_list_verdicts(palette, trend)]


def _list_verdicts(palette: Palette, trend: Trend) -> Iterable[Sign]:
    """The shapes of the marks, each once."""
    found = {mark.point.verdict for mark in list_marks(trend)}
    own = palette.plain if len(trend.lines) == 1 else palette.faint
    signs = {}
    for verdict, (shape, text) in _SHAPES.items():
        if verdict in found:
            fill = own if len(trend.lines) > 1 else _fill(palette, verdict, own)
            signs[text] = Sign(fill=fill, text=text, shape=shape, hollow=verdict in _HOLLOW)
    return signs.values()
