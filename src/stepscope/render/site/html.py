"""Text and tables of a report as HTML.

A table is complete without the script, which only hides, sorts and searches its rows. `render.numbers` formats the
numbers; their raw values are in `data-v`, and the script sorts by those.
"""

import re
from collections.abc import Sequence
from html import escape

from stepscope.findings import Cell, Column, Table
from stepscope.render.formats import NAME, PROSE, clean
from stepscope.render.numbers import format_cells
from stepscope.units import count_noun

# A table with more rows than this is folded, gets a search box, and scrolls on its own. The style sheet, which hides
# the rows after the first few, has the first number too.
MOST_OPEN, _SEARCHED_FROM, _SCROLLED_FROM = 8, 15, 30

_MOST_LABEL = 60  # characters above a column
_LONG = 40  # characters; longer text needs a wide column
_QUOTED = re.compile(r"`([^`]{1,200})`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]{,30}(?![\w-])")
_UNIT_APART = re.compile(r"(?<=\d) (?=(?:%|ns|[µm]?s|[KMGT]?i?B|×)(?![\w]))")


def markup(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """Return clean text, escaped for elements and attributes."""
    return escape(clean(text, most, lines=lines))


def prose(text: str, most: int = PROSE) -> str:
    """Return sentences as HTML: text in `backticks` becomes code, and neither a flag nor a number and its unit is
    broken into two lines."""
    written = _QUOTED.sub(r"<code>\1</code>", _UNIT_APART.sub("&nbsp;", markup(text, most)))
    return _FLAG.sub(r'<span class="flag">\g<0></span>', written)


def write_table(
    table: Table, key: str, *, titled: bool = True, run: str = "", is_closed: bool = False, is_whole: bool = False
) -> str:
    """Return a table as HTML; without a key it has no id. `run` names its run where two are side by side. A long table
    shows its first rows and a button; one that `is_closed` only its title, and one that `is_whole` all rows."""
    if is_closed and table.title:
        head, _, rest = table.title.partition(": ")
        inner = write_table(table, "", titled=False, run=run, is_whole=True)
        about = f'<p class="quiet">{prose(rest)}</p>' if rest else ""
        return f'<details class="fold" id="{key}">{write_summary(head, len(table.rows))}{about}{inner}</details>'
    name = f' id="{key}"' if key else ""
    figure = f'<figure class="table"{name}>'
    title = _write_title(table.title) if titled else ""
    notes = write_notes(table.notes)
    if not table.rows:
        return f'{figure}{title}<p class="quiet">No rows.</p>{notes}</figure>'
    written = [format_cells(table, at) for at in range(len(table.columns))]
    classes = [_classes(column, texts) for column, texts in zip(table.columns, written, strict=True)]
    head = "".join(map(_write_header, table.columns, classes))
    body = "".join(
        f"<tr>{''.join(map(_write_cell, table.columns, classes, row, texts))}</tr>"
        for row, texts in zip(table.rows, zip(*written, strict=True), strict=True)
    )
    return (
        f"{figure}{title}{_write_tools(table)}"
        f"<div {_describe_box(table, run)}>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{'' if is_whole else _write_fold(len(table.rows))}{notes}</figure>"
    )


def _write_title(title: str) -> str:
    """Return the caption of a table: the title up to a colon, and the rest as a line below."""
    if not title:
        return ""
    head, _, rest = title.partition(": ")
    about = f"<p>{prose(rest)}</p>" if rest else ""
    return f"<figcaption><h3>{markup(head)}</h3>{about}</figcaption>"


def _write_fold(num_rows: int) -> str:
    """The button that shows all rows of a long table, hidden until the script runs."""
    if num_rows <= MOST_OPEN:
        return ""
    return f'<button type="button" class="quiet all-rows" hidden>Show all {num_rows:,} rows</button>'


def write_summary(title: str, num_rows: int) -> str:
    """The line that opens a closed table."""
    return f'<summary><h3>{markup(title)}</h3> <span class="quiet">{count_noun(num_rows, "row")}</span></summary>'


def _describe_box(table: Table, run: str) -> str:
    """Return the attributes of the box around a table. One that scrolls is a named region that keys can reach."""
    if len(table.rows) <= _SCROLLED_FROM:
        return 'class="scroll"'
    name = f"{table.title or 'Table'}{f', run {run}' if run else ''}"
    return f'class="scroll tall" tabindex="0" role="region" aria-label="{markup(name)}"'


def write_notes(notes: tuple[str, ...]) -> str:
    if not notes:
        return ""
    return f'<ul class="notes">{"".join(f"<li>{prose(note)}</li>" for note in notes)}</ul>'


def _write_tools(table: Table) -> str:
    """The controls above a table, hidden until the script runs."""
    tools = []
    if len(table.rows) > _SEARCHED_FROM:
        tools.append('<input type="search" class="search" placeholder="Search rows" aria-label="Search rows">')
        tools.append(f'<output class="found">{len(table.rows):,} rows</output>')
    if any(column.detail for column in table.columns):
        tools.append('<button type="button" class="quiet more-columns">Show more columns</button>')
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
