"""What the charts of a page share: the box of a plot, which takes keys, and the legend."""

from collections.abc import Iterable

from stepscope.render.drawing.colours import Palette
from stepscope.render.drawing.svg import Bounds, Canvas, Sign
from stepscope.render.site.html import markup, prose

WIDE, NARROW = 860.0, 400.0  # pixels of a chart that is drawn twice; the style sheet shows the one that fits
_SIGN = Bounds(left=-1.4, top=-1.4, right=1.4, bottom=1.4)


def write_nothing(text: str) -> str:
    return f'<p class="nothing">{prose(text)}</p>'


def describe_box(label: str) -> str:
    """Return the attributes of an element that takes keys. A screen reader would not pass keys to an image."""
    return f'tabindex="0" role="application" aria-label="{markup(label, 600)}"'


def write_plot(svgs: Iterable[str], label: str, kind: str) -> str:
    return f'<div class="plot {kind}" {describe_box(label)}>{"".join(svgs)}</div>'


def write_canvas(label: str) -> str:
    """A canvas, and one in front of it for the pointer."""
    front = '<canvas class="front" aria-hidden="true"></canvas>'
    return f'<div class="plot"><canvas class="back" {describe_box(label)}></canvas>{front}</div>'


def write_entry(palette: Palette, sign: Sign, number: int | None, *, pressed: bool = False, note: str = "") -> str:
    """A legend entry; with a number it is a button, which the script connects."""
    canvas = Canvas(palette)
    canvas.sign(sign, 0.0, 0.0, 1.0)
    drawn = canvas.wrap(_SIGN, class_="sign", aria_hidden="true")
    inner = f"{drawn}<span>{markup(sign.text)}</span>" + (f'<span class="of">{note}</span>' if note else "")
    if number is None:
        return f'<li class="run">{inner}</li>'
    state = str(pressed).lower()
    return f'<li><button type="button" data-group="{number}" aria-pressed="{state}">{inner}</button></li>'


def write_legend(entries: Iterable[str], label: str) -> str:
    return f'<ul class="legend" aria-label="{markup(label)}">{"".join(entries)}</ul>'
