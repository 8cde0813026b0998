"""Line charts in panels.

Each series has a colour and a shape: the colours work for colour-blind readers, the shapes in black and white. Spread
is drawn as bars rather than a band: a band would suggest values between two measured contexts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.findings import Axis, Figure, Point
from stepscope.render.drawing.axes import Scale, Ticks, choose_ticks, draw_x_axis, draw_y_axis, measure_gutter
from stepscope.render.drawing.colours import Palette, assign_colours
from stepscope.render.drawing.svg import SHAPES, Bounds, Canvas, MarkShape, Sign, Text, finish, fit, width_of
from stepscope.render.formats import clean

_WIDTH, _HEIGHT, _GAP = 340.0, 280.0, 26.0
_HEADER = 24.0  # of a panel with a name
_PANELS_PER_ROW = 3
_MARK, _MOST_NAME = 4.4, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A figure with its axes, and with panels and series in order. Panels are in the order of the points, and so are
    series that the figure does not order itself."""

    figure: Figure
    points: tuple[Point, ...]  # those that fit on the axes, by panel, series and x
    panels: tuple[str, ...]
    series: tuple[str, ...]
    x: Ticks
    y: Ticks

    @property
    def gutter(self) -> float:
        return max(measure_gutter(self.y.texts), 24.0)

    @property
    def top(self) -> float:
        """The room above a plot: for the name of the axis, and of the panel if it has one."""
        return 26.0 + (_HEADER if any(self.panels) else 0.0)

    @property
    def bounds(self) -> Bounds:
        return Bounds(left=-self.gutter, top=-self.top, right=_WIDTH + 10, bottom=_HEIGHT + 44)


def arrange(figure: Figure) -> LineChart:
    points = [point for point in figure.points if _has_place(figure.x, point.x) and _has_place(figure.y, point.y)]
    drawn = list(dict.fromkeys(point.series for point in points))
    series = tuple(dict.fromkeys([*(name for name in figure.series if name in drawn), *drawn]))
    panels = tuple(dict.fromkeys(point.panel for point in points))
    points.sort(key=lambda point: (panels.index(point.panel), series.index(point.series), point.x))
    heights = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    return LineChart(
        figure=figure,
        points=tuple(points),
        panels=panels,
        series=series,
        x=choose_ticks(figure.x, [point.x for point in points], 6, are_measured=True),
        y=choose_ticks(figure.y, heights, 6),
    )


def _has_place(axis: Axis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def shape_of(lines: LineChart, series: str) -> MarkShape:
    return SHAPES[lines.series.index(series) % len(SHAPES)]


def describe_missing(lines: LineChart) -> str:
    """Return a note on points that cannot be drawn on these axes: they must not vanish silently."""
    num_all = len(lines.figure.points)
    missing = num_all - len(lines.points)
    said = "" if lines.points else "No points to draw. "
    if missing:
        said += f"{missing} of {num_all} points not drawn: not finite, or not positive on a log axis."
    return said.strip()


def draw_panel(canvas: Canvas, lines: LineChart, panel: str) -> None:
    """Draw one panel. The marks of its points are groups with their index in `lines.points`."""
    x = Scale(low=lines.x.low, high=lines.x.high, start=0.0, end=_WIDTH, log=lines.figure.x.log)
    y = Scale(low=lines.y.low, high=lines.y.high, start=_HEIGHT, end=0.0, log=lines.figure.y.log)
    plot = Bounds(left=0.0, top=0.0, right=_WIDTH, bottom=_HEIGHT)
    draw_y_axis(canvas, plot, [(y(value), text) for value, text in _pairs(lines.y)], lines.y.title)
    draw_x_axis(canvas, plot, [(x(value), text) for value, text in _pairs(lines.x)], lines.x.title, grid=True)
    if panel:
        label = clean(lines.figure.panel_label, _MOST_NAME)
        name = f"{label}: {clean(panel, _MOST_NAME)}" if label else clean(panel, _MOST_NAME)
        shown = fit(name, _WIDTH + lines.gutter, 13.0)
        canvas.write([Text(x=-lines.gutter, y=-lines.top + 10, text=shown, size=13.0, bold=True)])
    for number, series in enumerate(lines.series):
        own = [(at, point) for at, point in enumerate(lines.points) if (point.panel, point.series) == (panel, series)]
        if own:
            with canvas.group(data_group=number):
                _draw_series(canvas, lines, own, x, y)


def _pairs(ticks: Ticks) -> Iterable[tuple[float, str]]:
    return zip(ticks.values, ticks.texts, strict=True)


def _draw_series(canvas: Canvas, lines: LineChart, own: Sequence[tuple[int, Point]], x: Scale, y: Scale) -> None:
    series = own[0][1].series
    fill = canvas.palette.fill(series)
    canvas.trace([(x(point.x), y(point.y)) for _, point in own], fill, 2.0)
    for at, point in own:
        if point.low is not None and point.high is not None and math.isfinite(point.low + point.high):
            # A logarithmic axis has no zero: a spread that reaches it ends at the frame.
            canvas.line(x(point.x), y(point.low), x(point.x), y(point.high), fill, 1.5)
        with canvas.group(class_="mark", data_mark=at):
            canvas.mark(shape_of(lines, series), x(point.x), y(point.y), _MARK, fill=fill)


def draw_figure(figure: Figure) -> str:
    """Return the figure as an SVG file, with the legend to the right."""
    lines = arrange(figure)
    canvas = Canvas(Palette(assign_colours([figure])))
    panels = lines.panels or ("",)
    num_rows = math.ceil(len(panels) / _PANELS_PER_ROW)
    num_columns = math.ceil(len(panels) / num_rows)
    across, down = _WIDTH + _GAP + lines.gutter, lines.bounds.bottom - lines.bounds.top + 8
    for at, panel in enumerate(panels):
        row, column = divmod(at, num_columns)
        with canvas.group(transform=f"translate({column * across:g} {row * down:g})"):
            draw_panel(canvas, lines, panel)
    right = (num_columns - 1) * across + lines.bounds.right
    right = _draw_legend(canvas, lines, right + 14)
    bottom = max((num_rows - 1) * down + lines.bounds.bottom, 40.0 + 19 * len(lines.series))
    bounds = Bounds(left=-lines.gutter, top=-lines.top, right=right, bottom=bottom)
    subtitle = [text for text in (figure.subtitle, describe_missing(lines)) if text]
    return finish(canvas, bounds, title=figure.title, subtitle=subtitle, width=right + lines.gutter)


def _draw_legend(canvas: Canvas, lines: LineChart, left: float) -> float:
    """Draw the legend and return its right edge. A single series without a name needs none."""
    if not any(lines.series):
        return left - 14
    label = clean(lines.figure.series_label, _MOST_NAME)
    names = [clean(name, 40) for name in lines.series]
    with canvas.group(class_="legend"):
        canvas.write([Text(x=left, y=6, text=label, size=12.5, bold=True)] if label else [])
        for row, (series, name) in enumerate(zip(lines.series, names, strict=True)):
            y = (26.0 if label else 6.0) + row * 19
            sign = Sign(fill=canvas.palette.fill(series), text=name, shape=shape_of(lines, series))
            canvas.sign(sign, left + 6, y, 5.5)
            canvas.write([Text(x=left + 17, y=y, text=name, size=12.5)])
    return left + max(width_of(label, 13.0), *(17 + width_of(name, 12.5) for name in names))
