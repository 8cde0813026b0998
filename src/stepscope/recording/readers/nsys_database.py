"""The SQLite file that Nsight Systems exports, read in bulk and never trusted.

Columns are pulled in blocks of rows straight into polars: SQLite has no indexes to join with here, and joins of columns
are faster. The file is opened immutable, so that neither a lock nor a journal appears beside it. A table that is absent
is an empty one, for Nsight Systems writes a table only where it has data; a column that a version lacks is null.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

import polars as pl

from stepscope.errors import StepscopeError
from stepscope.recording.tables import FARTHEST_NS
from stepscope.recording.validation import fit_in_time

NAME_BYTES = 16 * 1024  # of a text are kept; what was longer ends in an ellipsis and is longer than this
_MAGIC = b"SQLite format 3\0"
_BLOCK_ROWS = 1 << 16
_LEAST_ROW_BYTES = 4  # a damaged tree can hand out the same page for ever; no file holds more rows than this allows
EXPORT_COMMAND = "nsys export --type sqlite --output FILE.sqlite FILE.nsys-rep"


class Database:
    """One export, open for reading."""

    def __init__(self, connection: sqlite3.Connection, file_bytes: int) -> None:
        self._connection = connection
        self._most_rows = file_bytes // _LEAST_ROW_BYTES
        # Views and generated columns run whatever their author wrote; an export has neither.
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchmany(10_000)
        self.tables = frozenset(str(name) for (name,) in found)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Whatever SQLite finds wrong with the file, now or while it is read, is an error for the user."""
        _check(path)
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
                connection.text_factory = lambda content: content.decode("utf-8", "replace")
                connection.execute("PRAGMA trusted_schema = OFF")
                connection.execute("PRAGMA cell_size_check = ON")
                yield cls(connection, path.stat().st_size)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where its message quotes what is damaged
            raise StepscopeError(
                f"damaged SQLite file: `{path}`",
                detail=f"{str(error)[:200]}; a copy or an export that was cut short looks like this",
                hint=f"export it again: {EXPORT_COMMAND}",
            ) from None

    def fetch(self, table: str, integers: Sequence[str], texts: Sequence[str] = (), *, where: str = "") -> pl.DataFrame:
        """The columns asked for, of every row. What is no integer in a column of integers is null."""
        present = self._columns(table)
        chosen = [
            *(f'"{name}"' if name in present else "NULL" for name in integers),
            *(f'substr(CAST("{name}" AS BLOB), 1, {NAME_BYTES + 1})' if name in present else "NULL" for name in texts),
        ]
        schema = pl.Schema([(name, pl.Int64) for name in integers] + [(name, pl.String) for name in texts])
        blocks: list[pl.DataFrame] = [pl.DataFrame(schema=schema)]
        if present:
            rows = self._connection.execute(f'SELECT {", ".join(chosen)} FROM "{table}" {where}')
            count = 0
            while block := rows.fetchmany(_BLOCK_ROWS):
                count += len(block)
                if count > self._most_rows:
                    raise sqlite3.DatabaseError(f"more rows in {table} than the file has room for")
                columns = list(zip(*block, strict=True))
                series = [_integers(name, columns[at]) for at, name in enumerate(integers)]
                series += [_texts(name, columns[at]) for at, name in enumerate(texts, start=len(integers))]
                blocks.append(pl.DataFrame(series))
        return pl.concat(blocks)

    def _columns(self, table: str) -> frozenset[str]:
        if table not in self.tables:
            return frozenset()
        return frozenset(str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")'))


def latest(*times: pl.Series) -> int:
    """The last of all times that can be."""
    found = [series.filter(series <= FARTHEST_NS).max() for series in times]
    return max((time for time in found if isinstance(time, int)), default=0)


def set_aside(table: str, frame: pl.DataFrame, what: str, notes: list[str]) -> pl.DataFrame:
    """The rows whose times can be, in the order of their starts; `notes` says what is not among them."""
    kept = frame.filter(fit_in_time(table)).sort("start_ns", maintain_order=True)
    if bad := frame.height - kept.height:
        notes.append(f"{bad:,} {what} without a time, or that end before they begin, were set aside")
    if cut := kept.filter(pl.col("name").str.len_bytes() > NAME_BYTES).height:
        notes.append(f"the names of {cut:,} {what} were longer than {NAME_BYTES // 1024} KiB and were cut")
    return kept


def _check(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`", detail=error.strerror or "") from None
    if magic != _MAGIC:
        raise StepscopeError(
            f"not a SQLite file: `{path}`",
            detail="expected what Nsight Systems exports",
            hint=EXPORT_COMMAND,
        )


def _integers(name: str, values: Sequence[object]) -> pl.Series:
    try:
        return pl.Series(name, values, dtype=pl.Int64, strict=True)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        return pl.Series(name, [value if type(value) is int else None for value in values], dtype=pl.Int64)


def _texts(name: str, values: Sequence[bytes | None]) -> pl.Series:
    return pl.Series(name, [None if value is None else _decode(value) for value in values], dtype=pl.String)


def _decode(content: bytes) -> str:
    if len(content) <= NAME_BYTES:
        return content.decode("utf-8", "replace")
    # The ellipsis stands beyond what is kept, so that a text which was cut can be told by its length.
    return content[:NAME_BYTES].decode("utf-8", "replace") + "…"
