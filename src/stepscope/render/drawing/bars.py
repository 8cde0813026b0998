"""Bar charts with horizontal bars, so that names can be read, and with values next to the bars.

A printed chart has no tooltips: the number is next to the bar, and the axis below is for comparing lengths. Long names
take room from the bars up to a limit and are then shortened. A breakdown, where the page narrows one view by another,
is printed as bars for each dimension.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from stepscope.explain.story.sections.breakdown import ORDERED, Totals, add_up, fold_layers
from stepscope.findings import Bars, Breakdown, Quantity
from stepscope.render.drawing.axes import Scale, draw_x_axis, find_ticks, name_quantity
from stepscope.render.drawing.colours import Palette, assign_colours, colour_of
from stepscope.render.drawing.svg import Bounds, Canvas, Sign, Text, finish, fit, place_signs, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import MISSING, find_binary_unit, format_tick, format_value

# The width of a printed chart: names, bars and values. Narrow enough for one column of a page.
_WIDTH = 430.0
_NAME_SHARE, _NAME_SIZE, _VALUE_SIZE, _INSIDE_SIZE = 0.44, 12.0, 11.5, 10.5
_BAR, _THIN_BAR, _GAP = 15.0, 13.0, 7.0
_LEAST_PLOT = 140.0
MOST_BARS, _MOST_SIGNS = 60, 16
_FEW_MS = 0.01
_AXES: dict[Quantity, tuple[str, str, float]] = {
    "ms": ("time", "ms", 1.0),
    "us": ("time", "µs", 1.0),
    "share": ("share", "%", 0.01),
    "ratio": ("ratio", "", 1.0),
}
# The most bars of a dimension of a breakdown, and the dimensions with too many values for bars: only a table has them.
_MOST_OF_DIMENSION, _TABLE_ONLY = 20, ("kernel",)
_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Bars with the texts next to them, one sequence per series. `groups` give each label a colour; without them, all
    labels of a series share one. The texts of stacked bars are totals."""

    key: str
    bars: Bars
    texts: tuple[tuple[str, ...], ...]
    groups: tuple[str, ...] = ()


def chart_bars(bars: Bars) -> BarChart:
    """Return the first bars with their values as texts."""
    values = tuple(tuple(map(_finite, column[:MOST_BARS])) for column in bars.values)
    shown: Bars = msgspec.structs.replace(bars, labels=bars.labels[:MOST_BARS], values=values)
    columns: Sequence[Sequence[float | None]] = values
    if bars.is_stacked:
        columns = [[_find_total(shown, row) for row in range(len(shown.labels))]]
    texts = tuple(tuple(format_length(bars.kind, value) for value in column) for column in columns)
    hidden = len(bars.labels) - len(shown.labels)
    notes = (f"{hidden} more not drawn.", *bars.notes) if hidden else bars.notes
    return BarChart(key="", bars=msgspec.structs.replace(shown, notes=notes), texts=texts)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _find_total(bars: Bars, row: int) -> float:
    return sum(column[row] or 0.0 for column in bars.values)


def format_length(kind: Quantity, value: float | None) -> str:
    """Return the text next to a bar: short times in microseconds, and nothing for a missing bar."""
    if not value:
        return MISSING
    if kind == "ms" and abs(value) < _FEW_MS:
        return format_value("us", value * 1e3)
    return format_value(kind, value)


def draw_bars(chart: BarChart) -> str:
    """Return the bars as an SVG file."""
    groups = assign_colours([chart.bars]) | {group: colour_of(group) for group in chart.groups}
    canvas = Canvas(Palette(groups))
    bounds = place_bars(canvas, chart, _WIDTH)
    notes = chart.bars.notes if chart.bars.labels else ("Nothing to draw.", *chart.bars.notes)
    return finish(canvas, bounds, title=chart.bars.title, notes=notes, width=_WIDTH)


def place_bars(canvas: Canvas, chart: BarChart, width: float) -> Bounds:
    """Draw bars, axis and legend in `width` pixels. Each bar is a group with its number, counted series by series."""
    bars = chart.bars
    names_width = max((width_of(clean(name, 60), _NAME_SIZE) for name in bars.labels), default=0.0) + 8
    names_width = min(_NAME_SHARE * width, names_width)
    room = max((width_of(text, _VALUE_SIZE) for column in chart.texts for text in column), default=0.0) + 12
    plot_width = max(_LEAST_PLOT, width - names_width - room)
    num_series = 1 if bars.is_stacked else max(1, len(bars.series))
    thickness = _BAR if num_series == 1 else _THIN_BAR
    step = num_series * thickness + _GAP
    x = _scale(bars, plot_width)
    for row, name in enumerate(bars.labels):
        top = row * step + _GAP / 2 + 1
        shown = fit(clean(name, 60), names_width - 8, _NAME_SIZE)
        middle = top + (step - _GAP) / 2
        canvas.write([Text(x=-7, y=middle, text=shown, align="end", size=_NAME_SIZE)])
        _draw_row(canvas, chart, row, x, top, thickness)
    bottom = len(bars.labels) * step + _GAP / 2
    if bars.labels:
        canvas.line(x(0.0), 0.0, x(0.0), bottom, canvas.palette.frame)
        _draw_axis(canvas, bars, x, Bounds(left=0.0, top=0.0, right=plot_width, bottom=bottom))
        bottom += 44
    names = bars.series[:_MOST_SIGNS] if len(bars.series) > 1 else ()
    signs = [Sign(fill=canvas.palette.fill(name), text=clean(name, 40)) for name in names]
    if signs:
        bottom = place_signs(canvas, signs, left=-names_width, top=bottom + 14, width=width)
    return Bounds(left=-names_width, top=0.0, right=width - names_width, bottom=bottom)


def _scale(bars: Bars, width: float) -> Scale:
    if bars.is_stacked:
        ends = [_find_total(bars, row) for row in range(len(bars.labels))]
    else:
        ends = [value for column in bars.values for value in column if value is not None]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    return Scale(low=low, high=high if high > low else low + 1.0, start=0.0, end=width)


def _draw_row(canvas: Canvas, chart: BarChart, row: int, x: Scale, top: float, thickness: float) -> None:
    """Draw the bars of one label: stacked with their values inside, or below each other with their values next to them.
    A negative bar has its value right of zero, where there is room."""
    bars, start = chart.bars, 0.0
    texts = []
    for series, column in enumerate(bars.values):
        value = column[row] or 0.0
        y = top + (0.0 if bars.is_stacked else series * thickness)
        if value:
            left, right = sorted((x(start), x(start + value)))
            with canvas.group(class_="mark", data_mark=series * len(bars.labels) + row):
                canvas.box(left, y, right, y + thickness - 1, _fill(canvas, chart, series, row))
            inside = format_length(bars.kind, value)
            if bars.is_stacked and width_of(inside, _INSIDE_SIZE) + 6 <= right - left:
                place, ink = (left + right) / 2, canvas.palette.ink_on(bars.series[series])
                level = y + (thickness - 1) / 2
                canvas.write([Text(x=place, y=level, text=inside, align="middle", size=_INSIDE_SIZE, colour=ink)])
        if bars.is_stacked:
            start += value
        else:
            texts.append((max(0.0, value), y, chart.texts[series][row]))
    if bars.is_stacked and bars.values:
        texts.append((max(0.0, start), top, chart.texts[0][row]))
    canvas.write(
        Text(x=x(value) + 5, y=y + (thickness - 1) / 2, text=text, size=_VALUE_SIZE, colour=canvas.palette.faint)
        for value, y, text in texts
    )


def _fill(canvas: Canvas, chart: BarChart, series: int, row: int) -> str:
    """Return the colour of the label where labels have their own, otherwise the colour of the series."""
    if len(chart.bars.series) == 1:
        return canvas.palette.fill(chart.groups[row]) if chart.groups else canvas.palette.plain
    return canvas.palette.fill(chart.bars.series[series])


def _draw_axis(canvas: Canvas, bars: Bars, x: Scale, plot: Bounds) -> None:
    """Return round numbers on both sides of zero."""
    if bars.kind == "bytes":
        unit, size = find_binary_unit(x.high)
        label = "memory"
    else:
        label, unit, size = _AXES.get(bars.kind, ("", "", 1.0))
    # A short negative side must not reduce the ticks of the longer one.
    most = math.ceil(5 * (x.high - x.low) / max(x.high, -x.low))
    ticks = find_ticks(x.low / size, x.high / size, most)
    places = [(x(tick * size), format_tick(tick)) for tick in ticks]
    draw_x_axis(canvas, plot, places, name_quantity(label, unit) if label else "", grid=False)


# --- a breakdown in print -------------------------------------------------------------------------------------------


def chart_dimensions(breakdown: Breakdown) -> Iterable[BarChart]:
    """Return bars for each dimension with values to compare; alike layers share a bar."""
    folded = fold_layers(breakdown)
    for place, dimension in enumerate(folded.dimensions):
        if dimension.key not in _TABLE_ONLY and dimension.values:
            yield _chart_dimension(folded, add_up(folded, place))


def _chart_dimension(breakdown: Breakdown, totals: Totals) -> BarChart:
    dimension = totals.dimension
    shown = totals.order if dimension.key in ORDERED else totals.order[:_MOST_OF_DIMENSION]
    labels = tuple(dimension.values[at] or "unknown" for at in shown)[:MOST_BARS]
    times = [[float(own[at]) / _MS for at in shown] for own in totals.times_ns]
    wholes = [max(float(own.sum()) / _MS, 1e-12) for own in totals.times_ns]
    texts = tuple(
        tuple(
            f"{format_length('ms', time)}, {format_value('share', time / whole)}" if time else MISSING for time in own
        )
        for own, whole in zip(times, wholes, strict=True)
    )
    hidden = len(shown) - len(labels)
    bars = Bars(
        title=f"{breakdown.title}, by {dimension.label.lower()}",
        kind="ms",
        labels=labels,
        series=breakdown.runs,
        values=tuple(tuple(own[: len(labels)]) for own in times),
        notes=(
            *([f"{hidden} more not drawn."] if hidden else []),
            *_describe_rest(totals, len(shown)),
            *breakdown.notes,
        ),
    )
    return BarChart(key=dimension.key, bars=bars, texts=texts, groups=labels if dimension.key == "class" else ())


def _describe_rest(totals: Totals, num_shown: int) -> Iterable[str]:
    """Return a note on how much has no bar."""
    rest = list(totals.order[num_shown:])
    if rest:
        shares = [float(own[rest].sum()) / max(float(own.sum()), 1e-12) for own in totals.times_ns]
        listed = " and ".join(format_value("share", share) for share in shares)
        yield f"{len(rest):,} others, each shorter, take {listed} of the time."
