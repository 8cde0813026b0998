"""Marks at places in pixels, for pictures whose layout is computed here and not by Vega.

Places are from the upper left corner of the plot and may lie outside of it. Vega draws what it is given and has no say
in stacking, order or legend.

altair takes most of a second to import, hence the imports inside functions.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.report.palette import FAINT, INK
from stepscope.report.timeline_layout import clean, width_of

if TYPE_CHECKING:
    import altair as alt

Row = dict[str, Any]

# How wide a picture may be for its type to be read in a page of 16 cm, and what a line of its title and notes holds.
PAGE_WIDTH = 640
_TITLE_SIZE, _NOTE_SIZE, _NOTE_LEADING = 18.0, 11.0, 15.0
_LEGEND_ROW = 19.0
_TITLE_CHARACTERS, _NOTE_CHARACTERS = 300, 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text at a place; `y` is its middle."""

    x: float
    y: float
    text: str
    align: str = "left"
    size: float = 12.0
    colour: str = INK
    weight: str = "normal"
    # A rim of paper around the letters, for a text that lies on lines.
    rim: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One entry of a legend: a square of this colour and what it stands for."""

    fill: str
    text: str


def chart_of(rows: Iterable[Row]) -> "alt.Chart":
    """A chart of these rows, as one string: of a list altair checks and copies every row, for most of the time."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=json.dumps(list(rows)), format=alt.JsonDataFormat(type="json")))


def place_at(**places: str) -> "dict[str, Any]":
    """Channels of these fields of numbers. As objects: what altair makes of a short text takes it ten times as long."""
    import altair as alt

    makers: dict[str, Any] = {"x": alt.X, "x2": alt.X2, "y": alt.Y, "y2": alt.Y2}
    return {
        channel: makers[channel](field=field, **({} if channel in ("x2", "y2") else {"type": "quantitative"}))
        for channel, field in places.items()
    }


def draw_frame(width: float, height: float, x_axis: "alt.Axis | None", y_axis: "alt.Axis | None") -> "alt.Chart":
    """Both axes in the units of a reader, over pixels. The first layer decides the scales of all."""
    import altair as alt

    x = alt.X("x:Q", scale=alt.Scale(domain=[0, width], nice=False, zero=False), axis=x_axis)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[height, 0], nice=False, zero=False), axis=y_axis)
    frame: alt.Chart = chart_of([{"x": 0, "y": 0}]).mark_point(opacity=0).encode(x=x, y=y)
    return frame


def make_axis(label: str, unit: str, ticks: Sequence[tuple[float, str]], *, grid: bool) -> "alt.Axis":
    """An axis whose ticks are given as pixel and label, which Vega looks up."""
    import altair as alt

    places = [round(place, 3) for place, _ in ticks]
    labels = [text for _, text in ticks]
    return alt.Axis(
        title=f"{clean(label, 60)} ({clean(unit, 20)})" if unit else clean(label, 60),
        values=places,
        labelExpr=f"{json.dumps(labels)}[indexof({json.dumps(places)}, datum.value)]",
        grid=grid,
        labelFlush=False,
        labelOverlap=True,
    )


def draw_rules(rows: Iterable[Row], colour: str, width: float, dash: Sequence[float] = ()) -> "alt.Chart":
    import altair as alt

    mark = chart_of(rows).mark_rule(
        strokeWidth=width, color=colour, strokeDash=list(dash) or alt.Undefined, strokeCap="butt"
    )
    rule: alt.Chart = mark.encode(**place_at(x="x", x2="x2", y="y", y2="y2"))
    return rule


def draw_boxes(rows: Iterable[Row]) -> "alt.Chart":
    """Rectangles from `x`, `y` to `x2`, `y2`, each in its `fill`, in the order of the rows."""
    import altair as alt

    mark = chart_of(rows).mark_rect(strokeWidth=0)
    fill = alt.Fill(field="fill", type="nominal", scale=None)
    boxes: alt.Chart = mark.encode(**place_at(x="x", x2="x2", y="y", y2="y2"), fill=fill)
    return boxes


def write_texts(texts: Iterable[Text]) -> "list[alt.Chart]":
    """The texts, a layer for each way of writing: Vega takes alignment and weight by mark and not by row."""
    import altair as alt

    groups = defaultdict(list)
    for text in texts:
        groups[text.align, text.size, text.weight, text.colour, text.rim].append(text)
    layers = []
    for (align, size, weight, colour, rim), group in groups.items():
        rows = [{"x": round(text.x, 2), "y": round(text.y, 2), "text": text.text} for text in group]
        style: dict[str, Any] = {"align": align, "baseline": "middle", "fontSize": size, "fontWeight": weight}
        if rim:
            layers.append(chart_of(rows).mark_text(**style, color="white", stroke="white", strokeWidth=4))
        layers.append(chart_of(rows).mark_text(**style, color=colour))
    return [layer.encode(**place_at(x="x", y="y"), text=alt.Text(field="text", type="nominal")) for layer in layers]


def make_title(title: str, subtitle: str = "", *, width: float = PAGE_WIDTH) -> "alt.TitleParams":
    """Title and subtitle, broken where they would make the picture wider than it is."""
    import altair as alt

    lines = textwrap.wrap(clean(title, _TITLE_CHARACTERS), int(width / (0.55 * _TITLE_SIZE)))
    return alt.TitleParams(lines or [""], subtitle=wrap_note(subtitle, width) or alt.Undefined)


def wrap_note(note: str, width: float) -> list[str]:
    return textwrap.wrap(clean(note, _NOTE_CHARACTERS), int(width / (0.5 * _NOTE_SIZE)))


def place_notes(notes: Iterable[str], *, left: float, top: float, width: float) -> list[Text]:
    """The notes below a picture, from `top` down."""
    lines = [line for note in notes for line in wrap_note(note, width)]
    return [
        Text(x=left, y=top + row * _NOTE_LEADING, text=line, size=_NOTE_SIZE, colour=FAINT)
        for row, line in enumerate(lines)
    ]


def place_legend(
    signs: Sequence[Sign], *, left: float, top: float, width: float
) -> tuple[list[Row], list[Text], float]:
    """The squares and the texts of a legend in as many rows as it takes, and where the last of them ends."""
    boxes: list[Row] = []
    texts: list[Text] = []
    x, y = left, top
    for sign in signs:
        room = 15 + width_of(sign.text, 12.0) + 12
        if x > left and x + room > left + width:
            x, y = left, y + _LEGEND_ROW
        boxes.append({"x": x, "x2": x + 10, "y": y - 5, "y2": y + 5, "fill": sign.fill})
        texts.append(Text(x=x + 15, y=y, text=sign.text))
        x += room
    return boxes, texts, y + (_LEGEND_ROW if signs else 0)
