"""What a figure looks like: one altair definition for print, screen and browser.

Each series has a colour and a shape: the Okabe-Ito colours can be told apart by colour-blind readers, and
the shapes in a black-and-white print. Spread is drawn as bars and not as a band: a band claims to know what
happens between two contexts that were measured, a bar does not. Ticks of a log axis are chosen here,
because Vega labels 100 and 1000 where the reader wants the contexts that ran.

altair takes most of a second to import, hence the imports inside functions.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stepscope.findings import Axis, Figure, Point
from stepscope.report.palette import LINES
from stepscope.report.style import set_style

if TYPE_CHECKING:
    import altair as alt

# Fewer shapes than colours: a series that repeats a colour has another shape.
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_PANEL_WIDTH, _PANEL_HEIGHT = 340, 280
_PANELS_PER_ROW = 3
# What fits above one panel and its share of the legend, in the fonts below.
_TITLE_CHARACTERS, _SUBTITLE_CHARACTERS = 42, 66
# A log axis labels every value of x up to this many; beyond it the labels would run into each other.
_MOST_EXACT_TICKS = 8
# Steps of a decade, coarse to fine: the first that gives an axis enough ticks is taken.
_LADDERS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
_FEWEST_TICKS = 4


def define(figure: Figure) -> "alt.FacetChart | alt.LayerChart":
    """The chart of a figure. Panels stand in the order in which the points name them, and so do series that the figure
    does not put in another."""
    points = [point for point in figure.points if _can_be_drawn(figure, point)]
    panels = _distinct(_panel_title(figure, point) for point in points)
    num_rows = max(1, math.ceil(len(panels) / _PANELS_PER_ROW))
    num_columns = max(1, math.ceil(len(panels) / num_rows))
    layers = _layers(figure, points)
    chart = _in_panels(layers, panels, num_columns) if len(panels) > 1 else layers
    return set_style(chart.properties(title=_title(figure, len(points), num_columns)))


def _can_be_drawn(figure: Figure, point: Point) -> bool:
    pairs = ((figure.x, point.x), (figure.y, point.y))
    return all(math.isfinite(value) and (value > 0 or not axis.log) for axis, value in pairs)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _panel_title(figure: Figure, point: Point) -> str:
    return f"{figure.panel_label}: {point.panel}" if figure.panel_label else point.panel


def _title(figure: Figure, num_drawn: int, num_columns: int) -> "alt.TitleParams":
    """Title and subtitle, broken where they would make the picture wider than its panels."""
    import altair as alt

    subtitle = [
        line
        for text in (figure.subtitle, _missing_points(figure, num_drawn))
        for line in textwrap.wrap(text, _SUBTITLE_CHARACTERS * num_columns)
    ]
    return alt.TitleParams(textwrap.wrap(figure.title, _TITLE_CHARACTERS * num_columns), subtitle=subtitle)


def _missing_points(figure: Figure, num_drawn: int) -> str:
    """A word on points that have no place on these axes: they must not vanish in silence."""
    if not num_drawn:
        return "No points to draw."
    missing = len(figure.points) - num_drawn
    reason = "not finite, or not positive on a log axis"
    return f"{missing} of {len(figure.points)} points not drawn: {reason}." if missing else ""


def _in_panels(layers: "alt.LayerChart", panels: Sequence[str], num_columns: int) -> "alt.FacetChart":
    import altair as alt

    facet = alt.Facet("panel:N", sort=list(panels), header=alt.Header(title=None))
    chart = layers.facet(facet=facet, columns=num_columns, spacing=24)
    # In more than one row, Vega draws a shared axis under the empty place of a panel that is not there.
    return chart if num_columns == len(panels) else chart.resolve_axis(x="independent", y="independent")


def _layers(figure: Figure, points: Sequence[Point]) -> "alt.LayerChart":
    """Lines, spread bars and marks over each other; the marks carry the values for a mouse over the page."""
    import altair as alt

    y_values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    x_scale, x_axis = _scale(figure.x, [point.x for point in points]), _x_axis(figure.x, points)
    y_scale, y_axis = _scale(figure.y, y_values), _y_axis(figure.y, y_values)
    y = alt.Y("y:Q", scale=y_scale, axis=y_axis)
    low = alt.Y("low:Q", scale=y_scale, axis=y_axis)
    drawn = _distinct(point.series for point in points)
    names = _distinct([name for name in figure.series if name in drawn] + drawn)
    colour, shape = _colour(figure, names), _shape(figure, names)
    rows = [_row(figure, point) for point in points]
    base = alt.Chart(alt.InlineData(values=rows), width=_PANEL_WIDTH, height=_PANEL_HEIGHT)
    base = base.encode(x=alt.X("x:Q", scale=x_scale, axis=x_axis))
    lines = base.mark_line(strokeWidth=2).encode(y=y, color=colour)
    bars = base.mark_rule(strokeWidth=1.5, clip=True).encode(y=low, y2="high:Q", color=colour)
    marks = base.mark_point(size=64, filled=True, opacity=1)
    marks = marks.encode(y=y, color=colour, shape=shape, tooltip=_tooltip(figure))
    bars = bars.transform_filter("isValid(datum.low) && isValid(datum.high)")
    return alt.LayerChart(layer=[lines, bars, marks])


def _row(figure: Figure, point: Point) -> dict[str, str | float | None]:
    """One point as Vega reads it. A log axis has no zero: a spread that reaches it ends at the frame."""
    low = point.low
    if low is not None and low <= 0 and figure.y.log:
        low = point.y * 1e-9
    return {
        "panel": _panel_title(figure, point),
        "series": point.series,
        "x": point.x,
        "y": point.y,
        "low": low,
        "high": point.high,
    }


def _scale(axis: Axis, values: Sequence[float]) -> "alt.Scale":
    """Linear from zero, or logarithmic over the values with a margin so that no mark touches the frame."""
    import altair as alt

    if not axis.log:
        return alt.Scale(zero=True, nice=True)
    domain = _log_domain(values)
    return alt.Scale(type="log", nice=False, domain=list(domain) if domain else alt.Undefined)


def _log_domain(values: Sequence[float]) -> tuple[float, float] | None:
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    if not positive:
        return None
    margin = max(1.1, (max(positive) / min(positive)) ** 0.05)
    return min(positive) / margin, max(positive) * margin


def _x_axis(axis: Axis, points: Sequence[Point]) -> "alt.Axis":
    """A log axis labels the x that were measured, where they are few or powers of two: 128, 256, 512."""
    measured = sorted({point.x for point in points})
    if not axis.log:
        return _axis(axis, [], "")
    if len(measured) <= _MOST_EXACT_TICKS:
        return _axis(axis, measured, "")
    if all(math.log2(value).is_integer() for value in measured):
        return _axis(axis, measured[:: math.ceil(len(measured) / _MOST_EXACT_TICKS)], "")
    return _axis(axis, _log_ticks(measured), "")


def _y_axis(axis: Axis, values: Sequence[float]) -> "alt.Axis":
    return _axis(axis, _log_ticks(values) if axis.log else [], ",")


def _axis(axis: Axis, ticks: Sequence[float], separator: str) -> "alt.Axis":
    """An axis with these ticks, or with those that Vega finds where there are none."""
    import altair as alt

    return alt.Axis(
        title=_quantity(axis),
        values=list(ticks) or alt.Undefined,
        tickCount=6,
        # Twelve digits at most and no trailing zeros: 1024 and 0.05 rather than 1k and 5e-2.
        format=f"{separator}.12~g",
        labelOverlap=True,
        labelFlush=False,
    )


def _quantity(axis: Axis) -> str:
    return f"{axis.label} ({axis.unit})" if axis.unit else axis.label


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers over the values; none where all lie too close."""
    domain = _log_domain(values)
    return [] if domain is None else find_log_ticks(*domain)


def find_log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, from the coarsest ladder with enough; none where it has too few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for ladder in _LADDERS:
        # Through text, because 5 * 10.0**-2 is not the float 0.05 and would be labelled with all its digits.
        candidates = [float(f"{step}e{decade}") for decade in decades for step in ladder]
        ticks = [tick for tick in candidates if low <= tick <= high]
        if len(ticks) >= _FEWEST_TICKS:
            return ticks
    return []


def _colour(figure: Figure, names: Sequence[str]) -> "alt.Color":
    import altair as alt

    colours = [LINES[index % len(LINES)] for index in range(len(names))]
    scale = alt.Scale(domain=list(names), range=colours)
    return alt.Color("series:N", scale=scale, legend=_legend(figure, names))


def _shape(figure: Figure, names: Sequence[str]) -> "alt.Shape":
    import altair as alt

    shapes = [_SHAPES[index % len(_SHAPES)] for index in range(len(names))]
    scale = alt.Scale(domain=list(names), range=shapes)
    return alt.Shape("series:N", scale=scale, legend=_legend(figure, names))


def _legend(figure: Figure, names: Sequence[str]) -> "alt.Legend | None":
    """The same legend for colour and shape, which Vega draws as one. A single nameless series needs none."""
    import altair as alt

    if list(names) in ([], [""]):
        return None
    return alt.Legend(title=figure.series_label or None, symbolOpacity=1)


def _tooltip(figure: Figure) -> "list[alt.Tooltip]":
    import altair as alt

    quantities = [("x", _quantity(figure.x)), ("y", _quantity(figure.y)), ("low", "low"), ("high", "high")]
    return [
        alt.Tooltip("series:N", title=figure.series_label or "series"),
        *(alt.Tooltip(f"{field}:Q", title=title, format=",.5~r") for field, title in quantities),
    ]
