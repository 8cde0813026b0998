"""CSV and JSON have everything in full precision; every format ends with a newline."""

import csv
import io
import json
import math
import re
import subprocess
import sys

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.findings import Cell, Column, Table
from stepscope.render.formats import Format
from stepscope.render.tables import render

from .examples import bench_table

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
cells = st.one_of(st.none(), texts, st.integers(), st.floats())


def two_columns(rows: list[tuple[Cell, Cell]]) -> Table:
    columns = (Column(key="a_ms", label="a", kind="ms"), Column(key="b", label="b", detail=True))
    return Table(title="t", columns=columns, rows=tuple(rows))


def as_csv(cell: Cell) -> str:
    return "" if cell is None else str(cell)


@given(st.lists(st.tuples(cells, cells), max_size=5))
@example([("a\rb", 'say "hi", twice\r\n')])
@example([(None, None)])
@example([("a", "space at the end ")])
@example([(0.1 + 0.2, float("nan"))])
def test_csv_reads_back_with_every_digit(rows: list[tuple[Cell, Cell]]) -> None:
    source = render(two_columns(rows), Format.CSV)
    header, *body = csv.reader(io.StringIO(source, newline=""))
    assert header == ["a_ms", "b"]
    assert [[unmarked(cell) for cell in row] for row in body] == [
        [unmarked(as_csv(cell)) for cell in row] for row in rows
    ]


def test_csv_of_one_empty_cell_is_still_a_row() -> None:
    table = Table(title="t", columns=(Column(key="a", label="a"),), rows=((None,), ("x",)))
    assert list(csv.reader(io.StringIO(render(table, Format.CSV)))) == [["a"], [""], ["x"]]


@given(st.lists(st.tuples(cells, cells), max_size=5))
def test_json_reads_back_and_what_is_not_finite_is_null(rows: list[tuple[Cell, Cell]]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(render(two_columns(rows), Format.JSON), parse_constant=refuse)
    expected = [[None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row] for row in rows]
    assert [[row["a_ms"], row["b"]] for row in content["rows"]] == expected


def test_json_holds_title_columns_rows_and_notes() -> None:
    table = bench_table()
    content = json.loads(render(table, Format.JSON))
    assert list(content) == ["title", "columns", "rows", "notes"]
    assert content["title"] == table.title
    assert content["notes"] == list(table.notes)
    assert content["columns"] == [msgspec.to_builtins(column) for column in table.columns]
    assert [tuple(row.values()) for row in content["rows"]] == list(table.rows)
    assert list(content["rows"][0]) == [column.key for column in table.columns]


def test_csv_holds_detail_columns_and_neither_title_nor_notes() -> None:
    table = bench_table()
    source = render(table, Format.CSV)
    header, *rows = csv.DictReader(io.StringIO(source)), *csv.DictReader(io.StringIO(source))
    assert header.fieldnames == [column.key for column in table.columns]
    assert [float(row["step_p20_ms"]) for row in rows[:6]] == [row[9] for row in table.rows[:6]]
    assert table.title not in source
    assert table.notes[0] not in source


@pytest.mark.parametrize("format_", list(Format))
@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_every_format_ends_in_one_newline(format_: Format, num_rows: int) -> None:
    table = bench_table()
    source = render(msgspec.structs.replace(table, rows=table.rows[:num_rows]), format_)
    assert source.endswith("\n")
    assert not source.endswith("\n\n")


def test_formats_are_the_words_of_the_command_line() -> None:
    assert [str(format_) for format_ in Format] == ["text", "md", "latex", "csv", "json"]


def test_importing_render_imports_neither_torch_nor_a_converter() -> None:
    code = (
        "import sys, stepscope.render.tables, stepscope.render.figures\n"
        "sys.exit(' '.join({'torch', 'vl_convert', 'triton'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "-2+3", "--fast", "\t=1", "\r=1", "-x", "-info"]
)
def test_a_cell_that_a_spreadsheet_would_run_is_marked_as_text(text: str) -> None:
    assert cells_of_csv(text) == [f"'{text}"]


@pytest.mark.parametrize("sign", ["\uff1d", "\uff0b", "\uff0d", "\uff20"])
def test_a_formula_in_fullwidth_characters_is_marked_as_text(sign: str) -> None:
    assert cells_of_csv(f"{sign}1+1") == [f"'{sign}1+1"]


@pytest.mark.parametrize("value", ["-inf", "+inf", "-nan", "+nan", "inf", float("-inf")])
def test_numbers_that_are_not_finite_are_left_as_they_are(value: str | float) -> None:
    assert cells_of_csv(value) == [str(value)]


@pytest.mark.parametrize("value", ["a=b", "-5", "+1.5e-3", "-1,234.5", "-12.5%", "-", "", "'=1", -5, -0.25, "– no"])
def test_numbers_and_other_texts_are_left_as_they_are(value: str | float) -> None:
    assert cells_of_csv(value) == [str(value)]


def unmarked(text: str) -> str:
    """Without the apostrophe before what would be a formula."""
    return text[1:] if re.match("'[=+@\t\r\uff1d\uff0b\uff0d\uff20-]", text) else text


def cells_of_csv(value: str | float) -> list[str]:
    table = Table(title="t", columns=(Column(key="a", label="a"),), rows=((value,),))
    (_, *rows) = csv.reader(io.StringIO(render(table, Format.CSV), newline=""))
    return [cell for row in rows for cell in row] or [""]
