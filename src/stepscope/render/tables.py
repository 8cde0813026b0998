"""A `Table` in the requested format.

Text, Markdown and LaTeX are for people: rounded, with units, without detail columns unless requested. CSV and JSON are
for programs: every column under its key, every value in full precision. `None` is an en dash for people, an empty field
in CSV and null in JSON. CSV text that a spreadsheet would run as a formula starts with an apostrophe, which
spreadsheets read as the mark of text.

A number that is not finite is shown as it is (`nan`, `inf`), except in JSON, which has no such number and gets null: an
overflow must not look like a case that did not run.
"""

import csv
import io
import re
from collections.abc import Sequence

import msgspec

from stepscope.findings import Cell, Column, Table
from stepscope.render.formats import Format
from stepscope.render.markup import render_latex, render_markdown
from stepscope.render.numbers import lay_out
from stepscope.render.terminal import render_text

# Characters that start a formula in spreadsheets. Some locales also evaluate the fullwidth forms of `=`, `+`, `-` and
# `@`. A number with a sign is not a formula.
_FORMULA = re.compile("[=+@\t\r\uff1d\uff0b\uff0d\uff20]|-.")
_NUMBER = re.compile(r"[+-]?((\d[\d,]*)?\.?\d+([eE][+-]?\d+)?\s?%?|inf|nan)")


class _JsonTable(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of a JSON table. Rows are objects, so that a new column does not break readers."""

    title: str
    columns: tuple[Column, ...]
    rows: list[dict[str, Cell]]
    notes: tuple[str, ...]


def render(table: Table, format: Format, *, detail: bool = False, width: int | None = None) -> str:  # noqa: A002
    """Return the table as a complete file that ends in a newline. `detail` shows the detail columns, which CSV and JSON
    always have. `width` is the terminal's, for text."""
    match format:
        case Format.TEXT:
            return render_text(lay_out(table, detail=detail), width)
        case Format.MD:
            return render_markdown(lay_out(table, detail=detail))
        case Format.LATEX:
            return render_latex(lay_out(table, detail=detail))
        case Format.CSV:
            return _render_csv(table)
        case Format.JSON:
            return _render_json(table)


def render_all(tables: Sequence[Table], format: Format, *, detail: bool = False, width: int | None = None) -> str:  # noqa: A002
    """Return tables as one file, separated by empty lines. In JSON, one table is an object, and several are an array of
    objects."""
    parts = [render(table, format, detail=detail, width=width) for table in tables]
    if format is Format.JSON and len(parts) != 1:
        return f"[{','.join(parts)}]\n"
    return "\n".join(parts)


def _render_csv(table: Table) -> str:
    return "".join(map(_csv_line, ([column.key for column in table.columns], *table.rows)))


def _csv_line(cells: Sequence[Cell]) -> str:
    """Return one line. Python 3.11 quotes a carriage return only if the line ending has one, hence the detour."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerow([_harmless(cell) for cell in cells])
    return buffer.getvalue().removesuffix("\r\n") + "\n"


def _harmless(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def _render_json(table: Table) -> str:
    keys = [column.key for column in table.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    content = _JsonTable(title=table.title, columns=table.columns, rows=rows, notes=table.notes)
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"
