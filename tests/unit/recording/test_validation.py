"""Validation: valid values of columns, repairs, and notes about them."""

from typing import Any

import polars as pl
import pytest

from stepscope.recording import tables
from stepscope.recording.validation import MisfitError, Repairs, check, check_references, fit_in_time, repair, settle

_SAMPLES = {pl.String: "a", pl.Int32: 1, pl.Int64: 1, pl.Float64: 1.0, pl.Boolean: True}
_TEXTS = {"shapes": "[[2, 3], [], [[4], [5]]]", "dtypes": '["float"]', "strides": "[[3, 1]]", "arguments": '["", "1"]'}


def row(table: str, **other: Any) -> dict[str, Any]:
    """A valid row, except for `other`."""
    fits = {name: _SAMPLES[column.kind] for name, column in tables.TABLES[table].items()}
    texts = {name: _TEXTS.get(name, "[2, 3]") for name, column in tables.TABLES[table].items() if column.json}
    return fits | texts | other


def frame(table: str, *rows: dict[str, Any]) -> pl.DataFrame:
    """Numbers as wide as in the readers of other tools' files."""
    wide: dict[type[pl.DataType], type[pl.DataType]] = {pl.Int32: pl.Int64}
    schema = {name: wide.get(kind, kind) for name, kind in tables.SCHEMAS[table].items()}
    return pl.DataFrame(rows, schema=schema)


@pytest.mark.parametrize("table", tables.TABLES)
def test_valid_rows_are_unchanged(table: str) -> None:
    given, repairs = frame(table, row(table)), Repairs()
    assert repair(table, given, repairs).equals(given)
    check(table, tables.conform(table, given))
    assert repairs.notes() == []


@pytest.mark.parametrize(
    ("table", "other"),
    [
        ("kernels", {"end_ns": 0}),
        ("kernels", {"start_ns": None}),
        ("kernels", {"end_ns": tables.LONGEST_KERNEL_NS + 2}),
        ("kernels", {"start_ns": -(2**62), "end_ns": 2**62}),
        ("launches", {"end_ns": tables.LONGEST_NS + 2}),
        ("ops", {"end_ns": None}),
        ("ranges", {"start_ns": 2**63 - 1, "end_ns": 2**63 - 1}),
        ("links", {"forward_ns": -(2**62)}),
        ("links", {"backward_ns": None}),
        ("spans", {"start_event": 3, "end_event": 2}),
        ("allocations", {"bytes": -1}),
    ],
)
def test_row_with_invalid_times_or_sizes_is_left_out_and_counted(table: str, other: dict[str, Any]) -> None:
    repairs = Repairs()
    kept = repair(table, frame(table, row(table), row(table, **other), row(table)), repairs)
    assert kept.height == 2
    (note,) = repairs.notes()
    assert note.startswith("1 ")


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("kernels", "registers", 2**31),
        ("kernels", "shared_bytes", 2**40),
        ("kernels", "grid_x", -5),
        ("kernels", "bytes", -1),
        ("ops", "sequence", -7),
        ("ops", "shapes", "5"),
        ("ops", "shapes", f"[[{'9' * 600}]]"),
        ("ops", "shapes", "[[-1]]"),
        ("ops", "shapes", "[" * 5000),
        ("ops", "shapes", "[[true]]"),
        ("ops", "dtypes", '[1, "float"]'),
        ("ops", "arguments", "[1, "),
        ("counters", "value", float("inf")),
        ("counters", "value", float("nan")),
        ("counters", "value", 1e300),
        ("allocations", "start_ns", 2**62),
        ("allocations", "shape", "[[2]]"),
        ("allocations", "stack", -1),
        ("saved", "shape", "{}"),
    ],
)
def test_invalid_value_is_null_and_counted(table: str, column: str, value: object) -> None:
    repairs = Repairs()
    kept = repair(table, frame(table, row(table), row(table, **{column: value})), repairs)
    assert kept[column].is_null().to_list() == [False, True]
    (note,) = repairs.notes()
    assert f"`{column}`" in note
    assert tables.conform(table, kept).schema == pl.Schema(tables.SCHEMAS[table])


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("kernels", "device", None),
        ("kernels", "device", 2**31),
        ("kernels", "device", -2),
        ("kernels", "stream", None),
        ("ops", "thread", None),
        ("ranges", "thread", None),
    ],
)
def test_missing_device_stream_or_thread_becomes_zero(table: str, column: str, value: int | None) -> None:
    repairs = Repairs()
    kept = repair(table, frame(table, row(table), row(table, **{column: value})), repairs)
    assert kept[column].to_list() == [1, 0]
    (note,) = repairs.notes()
    assert f"{column} 0" in note


def test_missing_column_becomes_zero() -> None:
    repairs = Repairs()
    kept = repair("kernels", frame("kernels", row("kernels")).drop("device"), repairs)
    assert kept["device"].to_list() == [0]
    assert len(repairs.notes()) == 1


@pytest.mark.parametrize(
    ("table", "other", "one", "many"),
    [
        ("kernels", {"end_ns": 0}, "1 event has", "1,002 events have"),
        ("allocations", {"bytes": -1}, "1 row of `allocations` is", "1,002 rows of `allocations` are"),
        ("ops", {"shapes": "5"}, "1 text of `shapes` in `ops` is", "1,002 texts of `shapes` in `ops` are"),
        ("kernels", {"registers": -1}, "1 value of `registers`", "1,002 values of `registers`"),
        ("kernels", {"device": None}, "1 kernel has no device and is", "1,002 kernels have no device and are"),
        ("launches", {"thread": None}, "1 launch has no thread and is", "1,002 launches have no thread and are"),
        ("ops", {"thread": None}, "1 op has no thread and is", "1,002 ops have no thread and are"),
        ("ranges", {"thread": None}, "1 range has no thread and is", "1,002 ranges have no thread and are"),
    ],
)
@pytest.mark.parametrize("count", [1, 1002])
def test_notes_use_singular_and_plural(table: str, other: dict[str, Any], one: str, many: str, count: int) -> None:
    repairs = Repairs()
    repair(table, frame(table, *[row(table, **other)] * count), repairs)
    (note,) = repairs.notes()
    assert note.startswith(f"{one if count == 1 else many} ")


def test_repairs_add_up_over_blocks() -> None:
    repairs = Repairs()
    for _ in range(3):
        repair("ops", frame("ops", row("ops", end_ns=0), row("ops", shapes="5")), repairs)
    assert [note.split()[0] for note in repairs.notes()] == ["3", "3"]


@pytest.mark.parametrize(
    ("table", "other", "column"),
    [
        ("kernels", {"name": None}, "name"),
        ("kernels", {"kind": None}, "kind"),
        ("kernels", {"end_ns": 0}, "end_ns"),
        ("kernels", {"device": -2}, "device"),
        ("kernels", {"block_z": -1}, "block_z"),
        ("ranges", {"source": None}, "source"),
        ("steps", {"duration_ns": -1}, "duration_ns"),
        ("steps", {"clock": None}, "clock"),
        ("counters", {"metric": None}, "metric"),
        ("counters", {"kernel": -1}, "kernel"),
        ("counters", {"value": float("inf")}, "value"),
        ("allocations", {"start_event": -1}, "start_event"),
        ("allocations", {"start_event": 5, "end_event": 4}, "end_event"),
        ("allocations", {"bytes": None}, "bytes"),
        ("segments", {"bytes": 2**60}, "bytes"),
        ("spans", {"end_event": None}, "end_event"),
        ("stacks", {"frames": None}, "frames"),
        ("saved", {"storage_bytes": -1}, "storage_bytes"),
    ],
)
def test_first_invalid_value_of_a_recording_is_named(table: str, other: dict[str, Any], column: str) -> None:
    damaged = tables.conform(table, frame(table, row(table), row(table, **other)))
    with pytest.raises(MisfitError, match=f"column `{column}`, row 1: "):
        check(table, damaged)


def test_column_of_another_type_is_an_error() -> None:
    other = tables.conform("kernels", frame("kernels", row("kernels"))).cast({"device": pl.String})
    with pytest.raises(MisfitError, match="column `device` is `String`, expected `Int32`"):
        check("kernels", other)


@pytest.mark.parametrize(("table", "column"), [("counters", "metric"), ("stacks", "stack")])
def test_duplicate_rows_are_an_error(table: str, column: str) -> None:
    twice = tables.conform(table, frame(table, row(table), row(table)))
    with pytest.raises(MisfitError, match=f"column `{column}`, row 0"):
        check(table, twice)


def test_impossible_total_size_is_an_error() -> None:
    rows = [row("allocations", bytes=2**48) for _ in range(2**12 + 1)]
    with pytest.raises(MisfitError, match="`bytes` adds up"):
        check("allocations", tables.conform("allocations", frame("allocations", *rows)))


def test_reference_beyond_a_table_is_an_error() -> None:
    counters = frame("counters", row("counters", kernel=0), row("counters", kernel=3))
    check_references(counters, {"kernel": 4})
    with pytest.raises(MisfitError, match="column `kernel`, row 1: got `3`, expected a number below 3"):
        check_references(counters, {"kernel": 3})


def test_invalid_json_text_of_a_recording_is_null() -> None:
    repairs = Repairs()
    ops = settle("ops", frame("ops", row("ops", shapes="[[2")), repairs)
    assert ops["shapes"].to_list() == [None]
    assert len(repairs.notes()) == 1


def test_time_limits_are_the_same_everywhere() -> None:
    rows = [row("kernels"), row("kernels", end_ns=0), row("kernels", start_ns=None), row("kernels", end_ns=2**50)]
    assert frame("kernels", *rows).select(fit_in_time("kernels")).to_series().to_list() == [True, False, False, False]
