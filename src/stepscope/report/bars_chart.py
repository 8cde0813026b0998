"""Bars in print: lying, so that names can be read, with their values written beside them.

A reader of a paper has no mouse: the number stands at the bar, and the axis below is for comparing lengths. Long names
take room from the bars up to a limit and are then shortened.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.findings import Axis, Bars, Quantity
from stepscope.report.marks import (
    Row,
    Sign,
    Text,
    draw_boxes,
    draw_frame,
    draw_rules,
    make_axis,
    make_title,
    place_legend,
    place_notes,
    write_texts,
)
from stepscope.report.numbers import MISSING
from stepscope.report.palette import FAINT, FRAME, LINES
from stepscope.report.site.colours import colour_of
from stepscope.report.site.text import format_value
from stepscope.report.style import set_style
from stepscope.report.timeline_layout import clean, find_ticks, find_unit, fit, width_of

if TYPE_CHECKING:
    import altair as alt

# All of a picture: names, bars and values. Narrower than a page, so that it can stand in a column, too.
_WIDTH = 430.0
_MOST_NAME, _NAME_SIZE, _VALUE_SIZE = 170.0, 12.0, 11.5
_BAR, _THIN_BAR, _GAP = 15.0, 13.0, 7.0
_LEAST_PLOT = 140.0
MOST_BARS = 40
_MOST_SIGNS = 16
_FEW_MS = 0.01
_UNITS = {"ms": "ms", "us": "µs", "share": "%"}
_AXES = {"ms": "time", "us": "time", "bytes": "memory", "share": "share", "ratio": "ratio"}
_BYTES = Axis(label="", unit="bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where things are: values from `low` to `high` lie on `width` pixels, `step` pixels a label."""

    bars: Bars
    values: tuple[tuple[float | None, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    colours: tuple[tuple[str, ...], ...]
    low: float
    high: float
    width: float
    names_width: float
    step: float
    thickness: float

    @property
    def height(self) -> float:
        return max(1, len(self.bars.labels)) * self.step + _GAP / 2

    def x(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * self.width


def define_bars(bars: Bars, *, texts: Sequence[Sequence[str]] = (), colours: Sequence[str] = ()) -> "alt.LayerChart":
    """The chart of some bars. `texts` are written beside them instead of their values, a sequence a series; `colours`
    tell the labels apart where there is one series."""
    import altair as alt

    hidden = len(bars.labels) - MOST_BARS
    shown = _cut(bars)
    plan = _lay_out(shown, tuple(tuple(column[:MOST_BARS]) for column in texts), colours)
    boxes, values = _place_bars(plan)
    signs, legend, end = _place_signs(plan)
    notes = ([f"{hidden} more are not drawn."] if hidden > 0 else []) + list(bars.notes)
    if not bars.labels:
        notes = ["Nothing to draw.", *notes]
    left = -plan.names_width
    layers = [
        draw_frame(plan.width, plan.height, _axis(plan), None),
        draw_boxes(boxes + signs),
        draw_rules([{"x": plan.x(0), "x2": plan.x(0), "y": 0, "y2": plan.height}], FRAME, 1.0),
        *write_texts([*_place_names(plan), *values, *legend, *place_notes(notes, left=left, top=end, width=_WIDTH)]),
    ]
    chart = alt.LayerChart(layer=layers, width=plan.width, height=plan.height)
    return set_style(chart.properties(title=make_title(bars.title, width=_WIDTH)))


def _cut(bars: Bars) -> Bars:
    return Bars(
        title=bars.title,
        kind=bars.kind,
        labels=bars.labels[:MOST_BARS],
        series=bars.series,
        values=tuple(tuple(map(_number, column[:MOST_BARS])) for column in bars.values),
        is_stacked=bars.is_stacked,
        notes=bars.notes,
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _lay_out(bars: Bars, texts: Sequence[Sequence[str]], colours: Sequence[str]) -> _Plan:
    written = texts or _format_values(bars)
    ends = [_find_total(bars, row) for row in range(len(bars.labels))] if bars.is_stacked else _all_values(bars)
    low, high = min([0.0, *ends]), max([0.0, *ends])
    high = high if high > low else low + 1.0
    names_width = min(_MOST_NAME, max((width_of(clean(name, 60), _NAME_SIZE) for name in bars.labels), default=0) + 8)
    room = max((width_of(text, _VALUE_SIZE) for column in written for text in column), default=0) + 12
    # What is below zero has its value on the other side.
    width = max(_LEAST_PLOT, _WIDTH - names_width - room)
    num_beside = 1 if bars.is_stacked else max(1, len(bars.series))
    thickness = _BAR if num_beside == 1 else _THIN_BAR
    return _Plan(
        bars=bars,
        values=bars.values,
        texts=tuple(map(tuple, written)),
        colours=_choose_colours(bars, colours),
        low=low,
        high=high,
        width=width,
        names_width=names_width,
        step=num_beside * thickness + _GAP,
        thickness=thickness,
    )


def _all_values(bars: Bars) -> list[float]:
    return [value for column in bars.values for value in column if value is not None]


def _find_total(bars: Bars, row: int) -> float:
    return sum(column[row] or 0.0 for column in bars.values)


def _choose_colours(bars: Bars, colours: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """A colour for each bar: of its label where those are told apart, and of its series otherwise."""
    if len(bars.series) == 1 and colours:
        return (tuple(colours[: len(bars.labels)]),)
    if len(bars.series) == 1:
        return ((LINES[0],) * len(bars.labels),)
    return tuple((colour,) * len(bars.labels) for colour in _colour_series(bars))


def _colour_series(bars: Bars) -> list[str]:
    """As on the page: those that have a colour keep it, and the others get what is left."""
    taken: list[tuple[str, str]] = []
    for name in bars.series:
        taken.append(colour_of(name, tuple(taken)))
    return [light for light, _ in taken]


def _format_values(bars: Bars) -> list[list[str]]:
    """Each value as text; where bars are stacked, only the whole, at the end."""
    if bars.is_stacked:
        columns: list[list[float | None]] = [[_find_total(bars, row) for row in range(len(bars.labels))]]
    else:
        columns = [list(own) for own in bars.values]
    return [[format_length(bars.kind, value) for value in own] for own in columns]


def format_length(kind: Quantity, value: float | None) -> str:
    """A value beside its bar: times too short for milliseconds in microseconds, and nothing for a bar of none."""
    if not value:
        return MISSING
    if kind == "ms" and abs(value) < _FEW_MS:
        return format_value("us", value * 1e3)
    return format_value(kind, value)


def _axis(plan: _Plan) -> "alt.Axis | None":
    """Round numbers on the axis, on both sides of zero."""
    kind = plan.bars.kind
    if not plan.bars.labels:
        return None
    unit, size = find_unit(_BYTES, plan.high) if kind == "bytes" else (_UNITS.get(kind, ""), 1.0)
    size = 0.01 if kind == "share" else size
    step = find_ticks(max(plan.high, -plan.low) / size, 5)[1]
    first, last = math.ceil(plan.low / size / step - 1e-9), math.floor(plan.high / size / step + 1e-9)
    ticks = [(plan.x(at * step * size), f"{float(f'{at * step:.9g}'):,.9g}") for at in range(first, last + 1)]
    return make_axis(_AXES.get(kind, ""), unit, ticks, grid=False)


def _place_bars(plan: _Plan) -> tuple[list[Row], list[Text]]:
    boxes: list[Row] = []
    texts: list[Text] = []
    for row in range(len(plan.bars.labels)):
        start = 0.0
        for series, column in enumerate(plan.values):
            value = column[row]
            top = _top_of(plan, row) + (0 if plan.bars.is_stacked else series * plan.thickness)
            if value:
                places = sorted((plan.x(start), plan.x(start + value)))
                fill = plan.colours[series][row]
                boxes.append({"x": places[0], "x2": places[1], "y": top, "y2": top + plan.thickness - 1, "fill": fill})
            if plan.bars.is_stacked:
                start += value or 0.0
            else:
                texts.append(_place_value(plan, value or 0.0, top, plan.texts[series][row]))
        if plan.bars.is_stacked and plan.values:
            texts.append(_place_value(plan, max(0.0, start), _top_of(plan, row), plan.texts[0][row]))
    return boxes, texts


def _top_of(plan: _Plan, row: int) -> float:
    return row * plan.step + _GAP / 2 + 1


def _place_value(plan: _Plan, value: float, top: float, text: str) -> Text:
    """Beside the end of a bar. A bar below zero has its value right of zero, where there is room."""
    x = plan.x(max(0.0, value)) + 5
    return Text(x=x, y=top + (plan.thickness - 1) / 2 + 1.0, text=text, size=_VALUE_SIZE, colour=FAINT)


def _place_names(plan: _Plan) -> list[Text]:
    inner = plan.step - _GAP
    return [
        Text(
            x=-7,
            y=_top_of(plan, row) + inner / 2,
            text=fit(clean(name, 60), plan.names_width - 8, _NAME_SIZE),
            align="right",
            size=_NAME_SIZE,
        )
        for row, name in enumerate(plan.bars.labels)
    ]


def _place_signs(plan: _Plan) -> tuple[list[Row], list[Text], float]:
    """The legend below the axis, where there are several series, and where the notes begin."""
    colours = _colour_series(plan.bars)[:_MOST_SIGNS] if len(plan.bars.series) > 1 else []
    pairs = zip(colours, plan.bars.series, strict=False)
    signs = [Sign(fill=colour, text=clean(name, 40)) for colour, name in pairs]
    top = plan.height + (58 if plan.bars.labels else 14)
    return place_legend(signs, left=-plan.names_width, top=top, width=_WIDTH)
