"""Text from a report made fit for the page, and numbers with their units.

Nothing reaches the page but through `clean`: home folders become `~`, what cannot be seen or turns the line around is
spelt out, and what is endless is cut in its middle, as both ends of a kernel's name say something.
"""

import re
import unicodedata
from html import escape

from stepscope.findings import Cell, Column, Quantity
from stepscope.report.numbers import format_column
from stepscope.report.private import hide_private

NAME, PROSE, COPYABLE = 240, 1_200, 20_000
# Looked at of a text at either end beyond what is kept, so that no half of a home folder is left at the cut.
_MARGIN = 4_096
_QUOTED = re.compile(r"`([^`]{1,200})`")
_UNIT_APART = re.compile(r"(?<=\d) (?=(?:%|ns|[µm]?s|[KMGT]?i?B|×)(?![\w]))")
_UNITS: dict[Quantity, str] = {"ms": " ms", "us": " µs"}


def clean(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """At most so many characters, all of them visible. `lines` keeps breaks between lines."""
    looked_at = most + _MARGIN
    if len(text) > 2 * looked_at:
        text = f"{text[:looked_at]}…{text[-looked_at:]}"
    shown = cut(hide_private(text), most)
    if shown.isascii() and shown.isprintable():
        return shown
    return cut("".join(_spell(character, lines=lines) for character in shown), most)


def cut(text: str, most: int) -> str:
    """The text, or its beginning and its end with … between."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def _spell(character: str, *, lines: bool) -> str:
    if lines and character in "\n\t":
        return character
    # Marks that combine pile up without end above a letter, so they are spelt out like what cannot be seen.
    if character.isprintable() and unicodedata.category(character) not in ("Mn", "Me"):
        return character
    return f"\\u{ord(character):04x}"


def markup(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """Clean text for HTML, in elements and in attributes."""
    return escape(clean(text, most, lines=lines))


def prose(text: str, most: int = PROSE) -> str:
    """Sentences for HTML, with what stands in `backticks` set as code, and units kept on the line of their number."""
    return _QUOTED.sub(r"<code>\1</code>", _UNIT_APART.sub("&nbsp;", markup(text, most)))


def format_value(kind: Quantity, value: Cell) -> str:
    """One value on its own, with its unit."""
    text = format_column(Column(key="value", label="", kind=kind), [value])[0]
    return f"{text}{_UNITS.get(kind, '')}" if isinstance(value, int | float) else text
