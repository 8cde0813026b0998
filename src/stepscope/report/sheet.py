"""A table as strings: what text, Markdown and LaTeX have in common before each escapes and lays out in its
own way.

Cells come out as one printable line. A kernel name from someone else's trace may hold a newline, which
would break a row in every format, or an escape sequence, which would run in the reader's terminal.
"""

from dataclasses import dataclass

from stepscope.findings import Table
from stepscope.report.formats import visible
from stepscope.report.numbers import format_cells

NO_ROWS = "(no rows)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One column as strings. `names_row` is true for the leading columns that say which case a row is."""

    label: str
    cells: tuple[str, ...]
    is_text: bool
    names_row: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    title: str
    lanes: tuple[Lane, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*(lane.cells for lane in self.lanes), strict=True))


def lay_out(table: Table, *, detail: bool) -> Sheet:
    """The table's visible columns as strings. Where all are detail columns, they are shown all the same."""
    shown = [index for index, column in enumerate(table.columns) if detail or not column.detail]
    indices = shown or range(len(table.columns))
    lanes: list[Lane] = []
    for index in indices:
        column = table.columns[index]
        cells = format_cells(table, index)
        names_row = column.kind in ("text", "count") and all(lane.names_row for lane in lanes)
        lane = Lane(
            label=one_line(column.label),
            cells=tuple(one_line(cell) for cell in cells),
            is_text=column.kind == "text",
            names_row=names_row or not lanes,
        )
        lanes.append(lane)
    notes = table.notes if table.rows else (NO_ROWS, *table.notes)
    return Sheet(title=one_line(table.title), lanes=tuple(lanes), notes=tuple(map(one_line, notes)))


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))
