"""Digits and units, one column at a time."""

from typing import Literal

import pytest

from stepscope.findings import Cell, Column, Table
from stepscope.render.numbers import MISSING, format_cells, format_column

Kind = Literal["text", "ms", "bytes", "count", "number", "share", "ratio"]


def write(kind: Kind, *cells: Cell) -> list[str]:
    return format_column(Column(key="k", label="k", kind=kind), cells)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("ms", 0.01234, "0.0123"),
        ("ms", 1.234, "1.23"),
        ("ms", 12.34, "12.3"),
        ("ms", 123.44, "123.4"),
        ("ms", 1234.4, "1,234"),
        ("ms", 9.999, "10.0"),
        ("ms", 99.99, "100.0"),
        ("ms", 999.96, "1,000"),
        ("ms", -12.34, "−12.3"),
        ("ms", -0.0, "0"),
        ("ms", 1.234e-7, "1.23e-07"),
        ("number", 312.44, "312.4"),
        ("number", 0, "0"),
        ("number", 1.5e12, "1.50e+12"),
        ("count", 1234567, "1,234,567"),
        ("count", 28444.4, "28,444"),
        ("count", 2_700_000_000_000, "2,700,000,000,000"),
        ("share", 0.4321, "43.2%"),
        ("share", 0.0000001, "0.0%"),
        ("share", 1.0, "100.0%"),
        ("ratio", 1.853, "1.85×"),
        ("ratio", 12.34, "12.3×"),
        ("ratio", 123.4, "123×"),
        ("ratio", 0.0123, "0.012×"),
        ("bytes", 0, "0 B"),
        ("bytes", 999, "999 B"),
        ("bytes", 1000, "0.977 KiB"),
        ("bytes", 1536, "1.50 KiB"),
        ("bytes", 512 * 2**20, "512 MiB"),
        ("bytes", 1023 * 2**20, "0.999 GiB"),
        ("bytes", 75_161_927_680, "70.0 GiB"),
        ("bytes", 99.96 * 2**30, "100 GiB"),
        ("bytes", 9.996 * 2**30, "10.0 GiB"),
        ("bytes", -3 * 2**20, "−3.00 MiB"),
        ("text", 3, "3"),
        ("text", 0.1, "0.1"),
    ],
)
def test_single_value_has_its_unit(kind: Kind, value: Cell, expected: str) -> None:
    assert write(kind, value) == [expected]


def test_values_of_similar_size_share_their_decimals() -> None:
    assert write("ms", 5.58, 10.8, 271.234) == ["5.58", "10.80", "271.23"]


def test_values_of_different_size_keep_their_own_digits() -> None:
    assert write("ms", 0.01234, 1.234, 1234.5, 0.0) == ["0.0123", "1.23", "1,234", "0"]


@pytest.mark.parametrize("kind", ["text", "ms", "bytes", "count", "number", "share", "ratio"])
def test_missing_values_are_a_dash_and_text_is_unchanged(kind: Kind) -> None:
    assert write(kind, None, "oom") == [MISSING, "oom"]


@pytest.mark.parametrize("kind", ["ms", "bytes", "count", "number", "share", "ratio"])
def test_overflow_is_shown_and_changes_no_other_value(kind: Kind) -> None:
    alone = write(kind, 2.5)
    assert write(kind, float("nan"), float("inf"), float("-inf"), 2.5) == ["nan", "inf", "-inf", *alone]


def test_columns_that_are_compared_share_their_decimals() -> None:
    columns = tuple(Column(key=key, label=key, kind="ms") for key in ("a", "b", "other"))
    rows = ((38.79, 3.124, 0.5), (12.3, 0.25, 0.25))
    apart = Table(title="", columns=columns, rows=rows)
    assert [format_cells(apart, at)[0] for at in range(3)] == ["38.8", "3.124", "0.500"]
    table = Table(title="", columns=columns, rows=rows, compared=("a", "b"))
    assert [format_cells(table, at)[0] for at in range(3)] == ["38.8", "3.12", "0.500"]
