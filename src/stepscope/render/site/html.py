"""Texts and tables of a report as HTML.

A table is complete as it stands; the script only hides, orders and finds rows. Numbers are written by
`render.numbers`, as everywhere; their raw value stands in `data-v`, which is what is sorted by.
"""

import re
from collections.abc import Sequence
from html import escape

from stepscope.findings import Cell, Column, Table
from stepscope.render.formats import NAME, PROSE, clean
from stepscope.render.numbers import format_cells

_SEARCHED_FROM, _SCROLLED_FROM = 15, 30  # rows; more than these get a search box, and scroll by themselves
FOLDED_FROM = 12  # rows; a longer table that is not the first thing of its section waits to be opened

_MOST_LABEL = 60  # characters above a column
_LONG = 40  # characters from which on a text needs a wide column to be read
_QUOTED = re.compile(r"`([^`]{1,200})`")
_UNIT_APART = re.compile(r"(?<=\d) (?=(?:%|ns|[µm]?s|[KMGT]?i?B|×)(?![\w]))")


def markup(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """Clean text for HTML, in elements and in attributes."""
    return escape(clean(text, most, lines=lines))


def prose(text: str, most: int = PROSE) -> str:
    """Sentences for HTML, with what stands in `backticks` set as code, and units kept on the line of their number."""
    return _QUOTED.sub(r"<code>\1</code>", _UNIT_APART.sub("&nbsp;", markup(text, most)))


def write_table(table: Table, key: str, *, titled: bool = True, run: str = "", folded: bool = False) -> str:
    """A table; `run` is whose it is where two stand side by side."""
    if folded and table.title:
        summary = write_summary(table.title, len(table.rows))
        inner = write_table(table, "", titled=False, run=run).replace(' id=""', "", 1)
        return f'<details class="fold" id="{key}">{summary}{inner}</details>'
    title = f"<figcaption><h3>{markup(table.title)}</h3></figcaption>" if titled and table.title else ""
    notes = write_notes(table.notes)
    if not table.rows:
        return f'<figure class="table" id="{key}">{title}<p class="quiet">Nothing to list.</p>{notes}</figure>'
    written = [format_cells(table, at) for at in range(len(table.columns))]
    classes = [_classes(column, texts) for column, texts in zip(table.columns, written, strict=True)]
    head = "".join(map(_write_header, table.columns, classes))
    body = "".join(
        f"<tr>{''.join(map(_write_cell, table.columns, classes, row, texts))}</tr>"
        for row, texts in zip(table.rows, zip(*written, strict=True), strict=True)
    )
    return (
        f'<figure class="table" id="{key}">{title}{_write_tools(table)}'
        f"<div {_describe_box(table, run)}>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes}</figure>"
    )


def write_summary(title: str, num_rows: int) -> str:
    """The line of what can be opened."""
    return f'<summary><h3>{markup(title)}</h3> <span class="quiet">{num_rows:,} rows</span></summary>'


def _describe_box(table: Table, run: str) -> str:
    """A box that scrolls by itself is a place of its own, with a name, that keys can reach."""
    if len(table.rows) <= _SCROLLED_FROM:
        return 'class="scroll"'
    name = f"{table.title or 'table'}{f', run {run}' if run else ''}"
    return f'class="scroll tall" tabindex="0" role="region" aria-label="{markup(name)}"'


def write_notes(notes: tuple[str, ...]) -> str:
    if not notes:
        return ""
    return f'<ul class="notes">{"".join(f"<li>{prose(note)}</li>" for note in notes)}</ul>'


def _write_tools(table: Table) -> str:
    """What the script needs, hidden until it runs."""
    tools = []
    if len(table.rows) > _SEARCHED_FROM:
        tools.append('<input type="search" class="search" placeholder="Search rows" aria-label="Search rows">')
        tools.append(f'<output class="found">{len(table.rows):,} rows</output>')
    if count := sum(column.detail for column in table.columns):
        label = f"{count} more column{'s' if count > 1 else ''}"
        tools.append(f'<button type="button" class="quiet more-columns" aria-pressed="false">{label}</button>')
    return f'<div class="tools" hidden>{"".join(tools)}</div>' if tools else ""


def _classes(column: Column, texts: Sequence[str]) -> str:
    is_long = column.kind == "text" and max(map(len, texts)) > _LONG
    asked = {"number": column.kind != "text", "detail": column.detail, "long": is_long}
    names = [name for name, is_asked in asked.items() if is_asked]
    return f' class="{" ".join(names)}"' if names else ""


def _write_header(column: Column, classes: str) -> str:
    label = f'<button type="button" class="sort">{markup(column.label, _MOST_LABEL) or "&nbsp;"}</button>'
    return f'<th scope="col"{classes}>{label}</th>'


def _write_cell(column: Column, classes: str, cell: Cell, text: str) -> str:
    if column.kind == "text":
        return f"<td{classes}>{prose(text, 2 * NAME)}</td>"
    raw = f' data-v="{cell!r}"' if isinstance(cell, int | float) else ""
    return f"<td{classes}{raw}>{markup(text, 2 * NAME)}</td>"
