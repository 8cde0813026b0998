"""Read Nsight Compute CSV files into recordings: hardware counters per kernel.

`ncu --csv --page raw` prints one row per kernel and one column per metric, below a header and a row of units, between
its own messages (`==PROF==`) and the output of the program. Other pages print one row per kernel and metric. Nsight
Compute runs kernels one at a time and several times, so the file has no timeline: kernels are placed end to end from 0.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import polars as pl

from stepscope.errors import StepscopeError
from stepscope.recording import tables
from stepscope.recording.store import Manifest, Recording
from stepscope.recording.validation import Repairs, repair
from stepscope.units import count_noun

_GZIP = b"\x1f\x8b"
_LINE_BYTES = 4 * 2**20
_PREAMBLE_BYTES = 64 * 2**20  # stop looking for a header after this
_MOST_OTHER_LINES = 5_000_000  # about 5 s
_MOST_CELLS = 8_000_000  # about 1 GB in memory
_MOST_TEXT = 256 * 2**20  # characters of all rows, each of which is copied a few times
_NAME_BYTES = 16 * 1024
_BLOCK_ROWS = 2048
_BLOCK_TEXT = 16 * 2**20
_RECORD = "ncu --csv --page raw --log-file kernels.csv python train.py"
# The columns that identify a kernel. The names of the host and the process are not kept.
_KERNEL_COLUMNS = ("ID", "Process ID", "Kernel Name", "Stream", "Block Size", "Grid Size", "Device")
_SKIPPED = ("Process Name", "Host Name", "Kernel Time", "Context", "CC", "Section Name")
CUT_SHORT = "the file ends in the middle of a row, which is left out"
_LOST_ROWS = "missing: the launch IDs are not consecutive"
_PAST_LIMIT = "beyond the size limit left out"
_BAD_ROWS = "too few or too many fields left out"
_ATTRIBUTES = ("device__attribute_", "nvlink__", "numa__", "c2clink__")
_OF_DEVICE = ("device__attribute_display_name", "device__attribute_multiprocessor_count")
_LONG_COLUMNS = ("Metric Name", "Metric Unit", "Metric Value")
_PRIVATE = r"(?i)uuid|serial"
_DURATIONS = ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration.max", "Duration")
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_BYTES = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6}
# Some locales group digits by spaces or apostrophes, or swap comma and point. Two decimals, or two groups, show which.
_SPACE = r"['\u2019\u00a0\u202f\u2009 ]"
_SPACED = rf"^[+-]?\d{{1,3}}({_SPACE}\d{{3}})+([.,]\d*)?$"
_NUMBER = r"^[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?([eE][+-]?\d{1,3})?$"
_WITH_COMMA = r"^[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d{1,2}|,\d{4,})$|^[+-]?\d{1,3}(\.\d{3}){2,}$"
_WITH_POINT = r"^[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d{1,2}|\.\d{4,})$|^[+-]?\d{1,3}(,\d{3}){2,}$"
# If no number shows it, a single group is likelier than three decimals, which Nsight Compute does not print.
_GROUPED_BY_POINT, _GROUPED_BY_COMMA = r"^[+-]?[1-9]\d{0,2}\.\d{3}$", r"^[+-]?[1-9]\d{0,2},\d{3}$"
_TRIPLE = r"^\s*\((?P<x>\d+),\s*(?P<y>\d+),\s*(?P<z>\d+)\)\s*$"
# Names on the raw page, and on other pages.
_REGISTERS = ("launch__registers_per_thread", "Registers Per Thread")
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")


@dataclass(slots=True)
class _Seen:
    """What was found while reading, for the notes, and for the error if no kernel was found."""

    program_lines: int = 0
    bad_rows: int = 0
    rows_past_limit: int = 0
    cut_short: bool = False
    complaint: str = ""  # the first error line of ncu
    header: list[str] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)


def read(path: Path) -> Recording:
    """Return the recording in a CSV file, plain or gzipped."""
    seen = _Seen()
    blocks = list(_read_blocks(path, seen))
    if not seen.header:
        from_report = f"ncu --import {path.name} --csv --page raw > {path.stem}.csv"
        raise StepscopeError(
            f"not an Nsight Compute CSV file: `{path}`",
            detail=seen.complaint or "expected a header with the columns ID and Kernel Name",
            hint=from_report if path.suffix == ".ncu-rep" else _RECORD,
        )
    if not blocks:
        raise StepscopeError(
            f"no kernels in `{path}`",
            detail=seen.complaint or "the file has a header but no rows",
            hint=_RECORD,
        )
    rows = pl.concat(blocks).with_row_index("row")
    is_long = set(_LONG_COLUMNS) <= set(seen.header)
    kernels, counters = _from_long(rows) if is_long else _from_raw(rows, seen.units)
    counters = _parse_values(counters)
    kernels, notes = _lay_out(kernels, counters)
    repairs = Repairs()
    kernels, counters = repair("kernels", kernels, repairs), repair("counters", counters, repairs)
    notes += [*_explain(seen), *_find_lost_rows(rows["ID"]), *repairs.notes()]
    return Recording(
        manifest=_describe(path, counters, notes),
        kernels=tables.conform("kernels", kernels),
        counters=tables.conform("counters", counters),
    )


def _read_blocks(path: Path, seen: _Seen) -> Iterator[pl.DataFrame]:
    """Yield the rows below the header, block by block, unparsed."""
    block: list[list[str]] = []
    text = 0
    for fields in _read_rows(path, seen):
        block.append(fields)
        text += sum(map(len, fields))
        if len(block) == _BLOCK_ROWS or text > _BLOCK_TEXT:
            yield _as_frame(block, seen.header)
            block, text = [], 0
    if block:
        yield _as_frame(block, seen.header)


def _as_frame(block: list[list[str]], header: list[str]) -> pl.DataFrame:
    columns = zip(*block, strict=True)
    named = zip(header, columns, strict=True)
    return pl.DataFrame([pl.Series(name, values, dtype=pl.String) for name, values in named if _is_kept(name)])


def _is_kept(column: str) -> bool:
    """Whether a column is kept: the raw page repeats about 150 device attributes for every kernel."""
    return column in _OF_DEVICE or not (column in _SKIPPED or column.startswith(_ATTRIBUTES))


def _read_rows(path: Path, seen: _Seen) -> Iterator[list[str]]:
    """Yield the rows below the header that have as many fields as the header."""
    was_row = True
    rows = text = 0
    for number, line in enumerate(_read_lines(path, seen)):
        if number - rows > _MOST_OTHER_LINES:
            raise StepscopeError(
                f"too many lines: `{path}`",
                detail=f"expected at most {_MOST_OTHER_LINES:,} lines that are not kernels, or are past the limit",
                hint=_RECORD,
            )
        was_row = True
        fields = _split(line)
        if line.startswith("=="):
            if not seen.complaint and line.startswith("==ERROR=="):
                seen.complaint = line.strip()[:300]
        elif not seen.header and "Kernel Name" in fields and "ID" in fields:
            seen.header = _make_unique(fields)
        elif not seen.header or not line.startswith('"'):
            seen.program_lines += bool(line.strip())
        elif len(fields) != len(seen.header):
            seen.bad_rows += 1
            was_row = False
        elif not fields[seen.header.index("ID")] and not fields[seen.header.index("Kernel Name")]:
            seen.units = seen.units or dict(zip(seen.header, fields, strict=True))
        elif rows * len(fields) > _MOST_CELLS or text > _MOST_TEXT:
            seen.rows_past_limit += 1
        elif fields[0] != seen.header[0]:
            rows += 1
            fields = [field[:_NAME_BYTES] for field in fields]
            text += sum(map(len, fields))
            yield fields
    if not was_row:
        seen.bad_rows -= 1
        seen.cut_short = True


def _split(line: str) -> list[str]:
    """Return the fields of a CSV line; empty if it is something else or ends inside a quoted field."""
    if not line.startswith('"'):
        return []
    try:
        return next(csv.reader([line.rstrip("\r\n")], strict=True), [])
    except csv.Error:
        return []


def _make_unique(header: list[str]) -> list[str]:
    """Rename duplicate columns, and columns with a name that is used below."""
    seen = dict.fromkeys(("row", "kernel", "metric", "unit", "said"), 1)
    unique = []
    for name in header:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return unique


def _read_lines(path: Path, seen: _Seen) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            content: IO[bytes] = gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[assignment]
            total = 0
            while line := content.readline(_LINE_BYTES):
                total += len(line)
                if not seen.header and total > _PREAMBLE_BYTES:
                    return
                yield line.decode("utf-8-sig" if total == len(line) else "utf-8", "replace")
    except EOFError:
        seen.cut_short = True
    except (gzip.BadGzipFile, zlib.error) as error:
        raise StepscopeError(f"damaged gzip file: `{path}`", detail=str(error)[:200]) from None
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`", detail=error.strerror or str(error)[:200]) from None


def _from_raw(rows: pl.DataFrame, units: dict[str, str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    metrics = [name for name in rows.columns if name not in (*_KERNEL_COLUMNS, "row")]
    named = pl.DataFrame({"metric": metrics, "unit": [units.get(name, "") for name in metrics]})
    named = named.with_columns(pl.col("metric", "unit").cast(pl.String))
    long = rows.unpivot(on=metrics, index="row", variable_name="metric", value_name="said")
    long = long.cast({"metric": pl.String, "said": pl.String})
    counters = long.join(named, on="metric", how="left", maintain_order="left").sort("row", maintain_order=True)
    return rows, counters.rename({"row": "kernel"})


def _from_long(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read a page with one row per kernel and metric, grouped by kernel. Rows without a metric are advice."""
    key = [name for name in ("Process ID", "ID") if name in rows.columns]
    changed = pl.any_horizontal(pl.col(name) != pl.col(name).shift(1) for name in key).fill_null(value=True)
    rows = rows.with_columns((changed.cum_sum() - 1).cast(pl.Int64).alias("kernel"))
    names = dict(zip(_LONG_COLUMNS, ("metric", "unit", "said"), strict=True))
    counters = rows.rename(names).filter(pl.col("metric") != "").select("kernel", *names.values())
    # The same metric appears in several sections.
    counters = counters.unique(["kernel", "metric"], keep="first", maintain_order=True)
    return rows.unique("kernel", keep="first", maintain_order=True), counters


def _parse_values(counters: pl.DataFrame) -> pl.DataFrame:
    """Parse numbers, keep other values as text, and drop empty values."""
    said = pl.col("said").str.strip_chars()
    plain = pl.when(said.str.contains(_SPACED)).then(said.str.replace_all(_SPACE, "")).otherwise(said)
    if _has_decimal_comma(counters.select(plain)["said"]):
        plain = plain.str.replace_many({",": ".", ".": ","})
    number = plain.str.replace_all(",", "", literal=True).cast(pl.Float64, strict=False)
    return (
        counters.filter(said != "", ~pl.col("metric").str.contains(_PRIVATE))
        .with_columns(pl.when(plain.str.contains(_NUMBER)).then(number).alias("value"))
        .with_columns(pl.when(pl.col("value").is_null()).then(said.str.head(_NAME_BYTES)).alias("text"))
        .select(pl.col("kernel").cast(pl.Int64), "metric", "unit", "value", "text")
    )


def _has_decimal_comma(said: pl.Series) -> bool:
    with_comma, with_point = said.str.contains(_WITH_COMMA).sum(), said.str.contains(_WITH_POINT).sum()
    if with_comma or with_point:
        return with_comma > with_point
    return said.str.contains(_GROUPED_BY_POINT).sum() > said.str.contains(_GROUPED_BY_COMMA).sum()


def _lay_out(rows: pl.DataFrame, counters: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    count = rows.height
    duration = _first_of(counters, count, _DURATIONS, _NANOSECONDS)
    registers = _first_of(counters, count, _REGISTERS, {})
    static, dynamic = (_first_of(counters, count, (metric,), _BYTES) for metric in _SHARED)
    grid, block = (
        (pl.col(f"{what} Size") if f"{what} Size" in rows.columns else pl.lit(None, pl.String))
        .str.extract_groups(_TRIPLE)
        .struct.rename_fields([f"{what.lower()}_{axis}" for axis in "xyz"])
        .alias(what)
        for what in ("Grid", "Block")
    )
    # Without launches to match, the ID shows which rows are missing, repeated or moved.
    numbers = {"process": "Process ID", "device": "Device", "stream": "Stream", "correlation": "ID"}
    frame = rows.select(
        pl.col("Kernel Name").str.head(_NAME_BYTES).alias("name"),
        *(_whole(name).alias(key) for key, name in numbers.items() if name in rows.columns),
        grid,
        block,
    ).unnest("Grid", "Block")
    sizes = [f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"]
    lasts = _possible(duration)
    ends = lasts.cum_sum()
    frame = frame.with_columns(
        pl.col(sizes).cast(pl.Int64, strict=False),
        pl.lit("kernel").alias("kind"),
        (ends - lasts).alias("start_ns"),
        ends.alias("end_ns"),
        registers.alias("registers"),
        (static + dynamic).alias("shared_bytes"),
    )
    notes = ["Nsight Compute runs kernels one at a time: they are placed end to end, and idle time is unknown"]
    if missing := duration.null_count():
        notes.append(f"{missing:,} of {count:,} kernels have no duration (gpu__time_duration) and count as 0 ns")
    if impossible := duration.filter(duration != lasts).len():
        had = count_noun(
            impossible, "kernel has an invalid duration and counts as", "kernels have invalid durations and count as"
        )
        notes.append(f"{had} 0 ns")
    return frame, notes


def _possible(duration: pl.Series) -> pl.Series:
    """Replace durations by 0 if they, or the end times they lead to, are out of range. `counters` refers to rows of
    `kernels`, so no row may be dropped later because of its times."""
    duration = duration.fill_null(0)
    duration = duration.set(~duration.is_between(0, tables.LONGEST_KERNEL_NS), 0)
    # Each term is small enough that the sum leaves the valid range before it can wrap around.
    too_late = (duration.cum_sum() > tables.FARTHEST_NS).cast(pl.Int8).cum_max() == 1
    return duration.set(too_late, 0)


def _whole(name: str) -> pl.Expr:
    return pl.col(name).str.replace_all(rf"[.,]|{_SPACE}", "").cast(pl.Int64, strict=False)


def _first_of(counters: pl.DataFrame, kernels: int, metrics: tuple[str, ...], scales: dict[str, int]) -> pl.Series:
    """Return one integer per kernel: the first of `metrics` that it has, in the first unit of `scales`."""
    frame = pl.DataFrame({"kernel": pl.int_range(kernels, eager=True)})
    unit = pl.col("unit").str.extract(r"^([A-Za-z]+)").str.replace(r"^([num]?)sec(ond)?$", "${1}s")
    scale = unit.replace_strict(list(scales), list(scales.values()), default=None, return_dtype=pl.Int64)
    amount = pl.col("value") * scale if scales else pl.col("value")
    # An invalid value, or a sum with one, stays out of the range of its column, so that validation reports it.
    amount = amount.round().clip(-(2.0**61), 2.0**60).cast(pl.Int64, strict=False)
    for metric in metrics:
        found = counters.filter(pl.col("metric") == metric).select("kernel", amount.alias(metric))
        frame = frame.join(found.unique("kernel"), on="kernel", how="left", maintain_order="left")
    return frame.select(pl.coalesce(*metrics).alias("first"))["first"]


def _explain(seen: _Seen) -> list[str]:
    notes = []
    if seen.program_lines:
        notes.append(f"{count_noun(seen.program_lines, 'line is', 'lines are')} not CSV, such as program output")
    if seen.bad_rows:
        notes.append(f"{count_noun(seen.bad_rows, 'row')} with {_BAD_ROWS}")
    if seen.rows_past_limit:
        notes.append(f"{count_noun(seen.rows_past_limit, 'row')} {_PAST_LIMIT}")
    if seen.cut_short:
        notes.append(CUT_SHORT)
    return notes


def _find_lost_rows(ids: pl.Series) -> Iterator[str]:
    """Yield a note about rows that are missing. Nsight Compute numbers the launches that it profiles."""
    known = ids.to_frame().select(_whole(ids.name))[ids.name].drop_nulls().unique().sort()
    lost = (known[-1] - known[0] + 1 - len(known)) if len(known) else 0
    if lost:
        yield f"{count_noun(lost, 'row is', 'rows are')} {_LOST_ROWS}"


def has_lost_rows(notes: Sequence[str]) -> bool:
    """Whether a file with these notes lacks kernels that were profiled."""
    return any(note.endswith((_LOST_ROWS, _BAD_ROWS, _PAST_LIMIT)) for note in notes)


def _describe(path: Path, counters: pl.DataFrame, notes: list[str]) -> Manifest:
    names = counters.filter(pl.col("metric") == "device__attribute_display_name")["text"].drop_nulls()
    sms = counters.filter(pl.col("metric") == "device__attribute_multiprocessor_count")["value"].drop_nulls()
    if names.n_unique() > 1:
        notes = [*notes, f"several kinds of devices: {', '.join(names.unique().sort())[:200]}"]
    return Manifest(
        source="nsight compute",
        file=path.name,
        device=str(names[0])[:200] if len(names) else "",
        device_sms=int(sms[0]) if len(sms) and 0 < sms[0] < 2**20 else None,
        notes=tuple(notes),
    )
