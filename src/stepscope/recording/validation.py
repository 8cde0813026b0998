"""Validation: every table of a recording is checked against `recording.tables` here, once.

Files from other tools are repaired. A row without a valid time is left out, an invalid value becomes null, and a note
counts both, so the rest of the file stays usable. A recording of stepscope was valid when it was written, so the first
invalid value is an error that names its table, column and row. In both, JSON text that does not decode becomes null,
and kernels and operators without a device, stream or thread get 0.

Checks run on whole columns and each distinct text is decoded once: on a 128 MB trace this is below 2% of the reading
time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl

from stepscope.recording.tables import MOST_BYTES, ORDERED, TABLES, UNIQUE, ColumnRule
from stepscope.units import count_noun

_OF_EVENTS = ("kernels", "launches", "ops", "ranges", "links")
_SINGULAR = {"kernels": "kernel", "launches": "launch", "ops": "op", "ranges": "range"}  # of tables with `absent`
_MOST_IN_ALL = 2.0**60
_LIMITS: dict[type[pl.DataType], tuple[float | None, float | None]] = {pl.Int32: (-(2**31), 2**31 - 1)}


class MisfitError(Exception):
    """An invalid value in a table; the message says which, where, and what was expected."""


@dataclass(frozen=True, slots=True)
class Repairs:
    """Counts of what was left out of a file from another tool, over all of its tables and blocks."""

    lost_rows: Counter[str] = field(default_factory=Counter)  # by table
    lost_values: Counter[tuple[str, str]] = field(default_factory=Counter)  # by table and column

    def notes(self) -> list[str]:
        notes = []
        events = sum(count for table, count in self.lost_rows.items() if table in _OF_EVENTS)
        if events:
            had = count_noun(events, "event has invalid times and is", "events have invalid times and are")
            notes.append(f"{had} left out")
        for table, count in self.lost_rows.items():
            if table not in _OF_EVENTS:
                outside = (f"row of `{table}` is out of range and is", f"rows of `{table}` are out of range and are")
                notes.append(f"{count_noun(count, *outside)} left out")
        for (table, name), count in self.lost_values.items():
            column = TABLES[table][name]
            where = f"of `{name}` in `{table}`"
            if column.json is not None:
                bad = count_noun(
                    count, f"text {where} is invalid JSON and is", f"texts {where} are invalid JSON and are"
                )
                notes.append(f"{bad} left out")
            elif column.absent is None:
                bad = count_noun(
                    count, f"value {where} is out of range and is", f"values {where} are out of range and are"
                )
                notes.append(f"{bad} left out")
            else:
                bare = count_noun(count, f"{_SINGULAR[table]} has no {name} and is", f"{table} have no {name} and are")
                notes.append(f"{bare} counted as {name} {column.absent}")
        return notes


def repair(table: str, frame: pl.DataFrame, repairs: Repairs) -> pl.DataFrame:
    """Return the valid rows and values of a file from another tool; `repairs` counts the others. `frame` may lack
    columns of the table, and may have numbers in place of texts."""
    if not frame.height:
        return frame
    missing = [name for name, column in TABLES[table].items() if column.absent is not None and name not in frame]
    frame = frame.with_columns(pl.lit(None, pl.Int64).alias(name) for name in missing)
    columns = _comparable(table, frame)
    misfits = {name: test for name, column in columns.items() if (test := _misfits(name, column)) is not None}
    tests = [misfits.pop(name) for name in columns if name in misfits and columns[name].required]
    tests += [~_in_order(*pair) for pair in ORDERED.get(table, ()) if pair[0] in frame and pair[1] in frame]
    if tests and (lost := frame.select(pl.any_horizontal(tests).sum()).item()):
        repairs.lost_rows[table] += lost
        frame = frame.filter(~pl.any_horizontal(tests))
    counts = frame.select(**{name: test.sum() for name, test in misfits.items()}).to_dicts() if misfits else [{}]
    impossible = {name: count for name, count in counts[0].items() if count}
    for name, count in impossible.items():
        if columns[name].absent is None:
            repairs.lost_values[table, name] += count
    frame = frame.with_columns(pl.when(~misfits[name]).then(pl.col(name)).alias(name) for name in impossible)
    return settle(table, frame, repairs)


def settle(table: str, frame: pl.DataFrame, repairs: Repairs) -> pl.DataFrame:
    """Replace values that no source guarantees: JSON text that does not decode becomes null, and null becomes `absent`
    in a column that must not have nulls."""
    for name, column in TABLES[table].items():
        if name not in frame:
            continue
        if column.absent is not None and (nulls := frame[name].null_count()):
            repairs.lost_values[table, name] += nulls
            frame = frame.with_columns(pl.col(name).fill_null(column.absent))
        if column.json is not None and (bad := _undecodable(frame[name], column)):
            misfit = pl.col(name).is_in(bad).fill_null(value=False)
            repairs.lost_values[table, name] += frame.select(misfit.sum()).item()
            frame = frame.with_columns(pl.when(~misfit).then(pl.col(name)).alias(name))
    return frame


def fit_in_time(table: str) -> pl.Expr:
    """Whether the times of a row are valid."""
    columns = TABLES[table]
    times = [pl.col(name).is_between(columns[name].least, columns[name].most) for name in ("start_ns", "end_ns")]
    return pl.all_horizontal(*times, *(_in_order(*pair) for pair in ORDERED[table])).fill_null(value=False)


def check(table: str, frame: pl.DataFrame) -> None:
    """Raise MisfitError if a table of a stepscope recording is damaged."""
    for name, column in TABLES[table].items():
        if frame.schema[name] != column.kind:
            raise MisfitError(f"column `{name}` is `{frame.schema[name]}`, expected `{column.kind.__name__}`")
        misfit = _misfits(name, column)
        if misfit is not None:
            _refuse_first(frame, misfit, name, _expected(column))
        if column.most == MOST_BYTES and float(frame[name].cast(pl.Float64).sum()) > _MOST_IN_ALL:
            raise MisfitError(f"column `{name}` adds up to an impossible number of bytes")
    for start, end, longest in ORDERED.get(table, ()):
        expected = f"at least `{start}`" + (f" and at most `{start}` + {longest}" if longest else "")
        _refuse_first(frame, ~_in_order(start, end, longest), end, expected)
    for keys in [UNIQUE[table]] if table in UNIQUE else []:
        _refuse_first(frame, pl.struct(keys).is_duplicated(), keys[-1], "unique values")


def check_references(frame: pl.DataFrame, limits: Mapping[str, int]) -> None:
    """Raise MisfitError if a value is not below the limit of its column, given in `limits`."""
    for name, below in limits.items():
        _refuse_first(frame, pl.col(name) >= below, name, f"a number below {below}")


def _comparable(table: str, frame: pl.DataFrame) -> dict[str, ColumnRule]:
    """The columns that have the type of the table, or a wider number."""
    return {
        name: column
        for name, column in TABLES[table].items()
        if name in frame and (frame.schema[name] == pl.String) == (column.kind == pl.String)
    }


def _misfits(name: str, column: ColumnRule) -> pl.Expr | None:
    """Return an expression for invalid values, or None if every value is valid."""
    value, (least, most) = pl.col(name), _range(column)
    tests = [value < least] if least is not None else []
    tests += [value > most] if most is not None else []
    tests = [test.fill_null(value=False) for test in tests]
    tests += [value.is_null()] if column.required else []
    return pl.any_horizontal(tests) if tests else None


def _range(column: ColumnRule) -> tuple[float | None, float | None]:
    least, most = _LIMITS.get(column.kind, (None, None))
    return (least if column.least is None else column.least), (most if column.most is None else column.most)


def _in_order(start: str, end: str, longest: int | None) -> pl.Expr:
    first, last = pl.col(start), pl.col(end)
    ordered = last >= first
    # No difference overflows within the valid range of times.
    return (ordered & (last - first <= longest) if longest else ordered).fill_null(value=True)


def _undecodable(texts: pl.Series, column: ColumnRule) -> list[str]:
    decoder = msgspec.json.Decoder(column.json)
    return [text for text in texts.drop_nulls().unique() if not _decodes(decoder, text)]


def _decodes(decoder: "msgspec.json.Decoder[Any]", text: str) -> bool:
    try:
        decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _refuse_first(frame: pl.DataFrame, misfit: pl.Expr, name: str, expected: str) -> None:
    rows = frame.select(misfit.arg_true()).to_series()
    if rows.len():
        value = frame[name][rows[0]]
        raise MisfitError(f"column `{name}`, row {rows[0]}: got `{str(value)[:60]}`, expected {expected}")


def _expected(column: ColumnRule) -> str:
    least, most = _range(column)
    if least is None and most is None:
        return "a value"
    return f"a number of at least {least}" if most is None else f"a number from {least} to {most}"
