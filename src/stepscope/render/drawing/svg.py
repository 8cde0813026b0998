"""SVG elements, text measurement, and what surrounds a printed chart: title, legend and notes.

Every chart is laid out here, once. A file gets the elements with literal colours; the page gets the same elements with
CSS variables, so that they follow its theme. Coordinates are pixels from the upper left corner of the plot, and may be
outside it.
"""

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Literal

from stepscope.render.drawing.colours import Palette
from stepscope.render.formats import clean

# How wide a chart can be for its text to stay readable at a page width of 16 cm.
PAGE_WIDTH = 640.0
_FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"
_PADDING = 14.0
_TITLE_SIZE, _SUBTITLE_SIZE, _NOTE_SIZE = 18.0, 12.5, 11.0
_TITLE_LEADING, _SUBTITLE_LEADING, _NOTE_LEADING, _LEGEND_LEADING = 23.0, 17.0, 15.0, 19.0
_TITLE_CHARACTERS, _NOTE_CHARACTERS = 300, 900
_LETTER = 0.5  # average width of a letter, in units of the font size

MarkShape = Literal["circle", "square", "up", "diamond", "down", "cross"]
# Fewer shapes than colours: a series that repeats a colour has another shape.
SHAPES: tuple[MarkShape, ...] = ("circle", "square", "up", "diamond", "down", "cross")
# The corners of each shape, in units of its size; a circle has none.
_CORNERS: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "up": ((0, -1.1), (1.05, 0.8), (-1.05, 0.8)),
    "diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    "down": ((0, 1.1), (1.05, -0.8), (-1.05, -0.8)),
    "cross": tuple(
        (across * sign, down * sign)
        for sign in (1, -1)
        for across, down in ((-0.4, -1.1), (0.4, -1.1), (0.4, -0.4), (1.1, -0.4), (1.1, 0.4), (0.4, 0.4))
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of text; `y` is its vertical centre. Without a colour it has the colour of ink."""

    x: float
    y: float
    text: str
    align: Literal["start", "middle", "end"] = "start"
    size: float = 12.0
    colour: str = ""
    bold: bool = False
    # An outline in the background colour, for text on top of lines.
    rim: bool = False
    turned: bool = False  # rotated, read upwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One legend entry: a mark and its label."""

    fill: str
    text: str
    shape: MarkShape | Literal["dash"] = "square"
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The rectangle that a drawing covers."""

    left: float
    top: float
    right: float
    bottom: float


class Canvas:
    """Elements in drawing order."""

    def __init__(self, palette: Palette) -> None:
        self.palette = palette
        self.elements: list[str] = []

    def add(self, tag: str, **attributes: str | float) -> None:
        self.elements.append(f"<{tag}{_write_attributes(attributes)}/>")

    @contextmanager
    def group(self, **attributes: str | float) -> Iterator[None]:
        with self.group_of("g", **attributes):
            yield

    @contextmanager
    def group_of(self, tag: str, **attributes: str | float) -> Iterator[None]:
        self.elements.append(f"<{tag}{_write_attributes(attributes)}>")
        yield
        self.elements.append(f"</{tag}>")

    def box(self, x: float, y: float, x2: float, y2: float, fill: str) -> None:
        self.add("rect", x=x, y=y, width=max(x2 - x, 0.0), height=max(y2 - y, 0.0), fill=fill)

    def line(self, x: float, y: float, x2: float, y2: float, stroke: str, width: float = 1.0, dash: str = "") -> None:
        self.add("line", x1=x, y1=y, x2=x2, y2=y2, stroke=stroke, stroke_width=width, stroke_dasharray=dash)

    def trace(self, points: Iterable[tuple[float, float]], stroke: str, width: float, dash: str = "") -> None:
        """Add a line through points."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        style: dict[str, str | float] = {"fill": "none", "stroke": stroke, "stroke_width": width}
        self.add("polyline", points=path, stroke_dasharray=dash, stroke_linejoin="round", **style)

    def mark(self, shape: MarkShape, x: float, y: float, size: float, **style: str | float) -> None:
        if shape == "circle":
            self.add("circle", cx=x, cy=y, r=size, **style)
        else:
            corners = " ".join(f"{_number(x + a * size)},{_number(y + d * size)}" for a, d in _CORNERS[shape])
            self.add("polygon", points=corners, **style)

    def sign(self, sign: Sign, x: float, y: float, size: float = 6.0) -> None:
        if sign.shape == "dash":
            self.line(x - 1.3 * size, y, x + 1.3 * size, y, sign.fill, 0.24 * size, f"{0.9 * size:g} {0.5 * size:g}")
        elif sign.hollow:
            self.mark(sign.shape, x, y, 0.8 * size, fill="none", stroke=sign.fill, stroke_width=0.36 * size)
        else:
            self.mark(sign.shape, x, y, size, fill=sign.fill)

    def write(self, texts: Iterable[Text]) -> None:
        for text in texts:
            # The middle of lower-case letters and digits is about a third of the font size above the baseline.
            place = {"x": text.x, "y": text.y + 0.35 * text.size}
            style: dict[str, str | float] = {
                "text_anchor": "" if text.align == "start" else text.align,
                "font_size": "" if text.size == 12.0 else text.size,
                "font_weight": "bold" if text.bold else "",
                "transform": f"rotate(-90 {_number(text.x)} {_number(text.y)})" if text.turned else "",
                "fill": text.colour or self.palette.ink,
            }
            if text.rim:
                style |= {"stroke": self.palette.paper, "stroke_width": 4, "paint_order": "stroke"}
                style |= {"stroke_linejoin": "round"}
            self.elements.append(f"<text{_write_attributes({**place, **style})}>{escape(text.text)}</text>")

    def wrap(self, bounds: Bounds, background: str = "", **attributes: str | float) -> str:
        """Return all elements as one SVG that shows `bounds`."""
        width, height = bounds.right - bounds.left, bounds.bottom - bounds.top
        box = " ".join(map(_number, (bounds.left, bounds.top, width, height)))
        head = _write_attributes({"viewBox": box, "font_size": 12, **attributes})
        size = _write_attributes({"width": width, "height": height})
        corner = _write_attributes({"x": bounds.left, "y": bounds.top, "fill": background})
        behind = f"<rect{corner}{size}/>" if background else ""
        # Only a file needs to declare its language.
        namespace = "" if self.palette.on_page else ' xmlns="http://www.w3.org/2000/svg"'
        return f"<svg{namespace}{size}{head}>{behind}{''.join(self.elements)}</svg>"


def _number(value: float) -> str:
    return f"{round(value, 2):z.10g}"


def _write_attributes(attributes: "dict[str, str | float]") -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else _number(value)}"'
        for name, value in attributes.items()
        if value != ""
    )


# --- around a printed chart -----------------------------------------------------------------------------------------


def finish(
    canvas: Canvas,
    bounds: Bounds,
    *,
    title: str,
    subtitle: Sequence[str] = (),
    notes: Sequence[str] = (),
    signs: Sequence[Sign] = (),
    width: float = PAGE_WIDTH,
) -> str:
    """Return the drawing as a file: title above, legend and notes below, both `width` pixels wide."""
    left, top = bounds.left, bounds.top
    legend_end = place_signs(canvas, signs, left=left, top=bounds.bottom + 16, width=width) if signs else bounds.bottom
    lines = [line for note in notes for line in wrap_text(note, width, _NOTE_SIZE)]
    first = legend_end + (14 if lines else 0)
    canvas.write(
        Text(x=left, y=first + row * _NOTE_LEADING, text=line, size=_NOTE_SIZE, colour=canvas.palette.faint)
        for row, line in enumerate(lines)
    )
    above = [line for text in subtitle for line in wrap_text(text, width, _SUBTITLE_SIZE)]
    titles = textwrap.wrap(clean(title, _TITLE_CHARACTERS), int(width / (0.55 * _TITLE_SIZE)))
    start = top - 16 - len(above) * _SUBTITLE_LEADING - len(titles) * _TITLE_LEADING
    canvas.write(
        Text(x=left, y=start + (row + 0.5) * _TITLE_LEADING, text=line, size=_TITLE_SIZE, bold=True)
        for row, line in enumerate(titles)
    )
    start += len(titles) * _TITLE_LEADING + 2
    canvas.write(
        Text(
            x=left,
            y=start + (row + 0.5) * _SUBTITLE_LEADING,
            text=line,
            size=_SUBTITLE_SIZE,
            colour=canvas.palette.faint,
        )
        for row, line in enumerate(above)
    )
    whole = Bounds(
        left=left - _PADDING,
        top=top - 18 - len(above) * _SUBTITLE_LEADING - len(titles) * _TITLE_LEADING - _PADDING,
        right=max(bounds.right, left + width if lines or above or titles else bounds.right) + _PADDING,
        bottom=max(first + len(lines) * _NOTE_LEADING - 4 if lines else legend_end, bounds.bottom) + _PADDING,
    )
    return canvas.wrap(whole, canvas.palette.paper, font_family=_FONT)


def place_signs(canvas: Canvas, signs: Sequence[Sign], *, left: float, top: float, width: float) -> float:
    """Draw a legend in as many rows as needed; return the lower edge."""
    x, y = left, top
    for sign in signs:
        room = 15 + width_of(sign.text, 12.0) + 16
        if x > left and x + room > left + width:
            x, y = left, y + _LEGEND_LEADING
        canvas.sign(sign, x + 5, y)
        canvas.write([Text(x=x + 15, y=y, text=sign.text)])
        x += room
    return y + _LEGEND_LEADING / 2


def wrap_text(text: str, width: float, size: float) -> list[str]:
    return textwrap.wrap(clean(text, _NOTE_CHARACTERS), int(width / (_LETTER * size)))


# --- text that fits -------------------------------------------------------------------------------------------------


def width_of(text: str, size: float) -> float:
    """Return an estimate of a text's width in pixels, rounded up, so that a text that should fit does."""
    return size * sum(map(_advance_of, text))


def _advance_of(character: str) -> float:
    """Return the width of a character in DejaVu Sans in units of the font size, by kind and rounded up. It is the
    widest font that a page may get: many Linux machines have no other."""
    if character in "iljI.,:;'|/ ·":
        return 0.34
    if character in "tfr!()[]-":
        return 0.41
    if character in "mW@%…":
        return 1.0
    if character in "wM+=<>#&×→−±":
        return 0.86
    if unicodedata.east_asian_width(character) in ("W", "F"):
        return 1.05
    return 0.74 if character.isupper() else 0.64


def fit(text: str, width: float, size: float) -> str:
    """Return as much of the text as fits the width, or nothing if that is too little to read."""
    if width_of(text, size) <= width:
        return text
    kept = text
    while kept and width_of(kept + "…", size) > width:
        kept = kept[:-1]
    return f"{kept.rstrip()}…" if len(kept) >= 4 else ""
