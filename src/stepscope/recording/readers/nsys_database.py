"""Read the SQLite file that Nsight Systems exports, in bulk and as untrusted input.

Columns are read in blocks of rows into polars: the file has no indexes to join with, and columnar joins are faster. The
file is opened as immutable, so that no lock or journal file appears next to it. A missing table is empty, because
Nsight Systems only writes tables with data; a column that a version lacks is null.
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
from stepscope.units import count_noun

NAME_BYTES = 16 * 1024  # longer texts are cut and end in an ellipsis, which makes them longer than this
_MAGIC = b"SQLite format 3\0"
_BLOCK_ROWS = 1 << 16
_LEAST_ROW_BYTES = 4  # bounds the rows of a damaged file, which can return the same page forever
EXPORT_COMMAND = "nsys export --type sqlite --output FILE.sqlite FILE.nsys-rep"


class Database:
    """One export, open for reading."""

    def __init__(self, connection: sqlite3.Connection, file_bytes: int) -> None:
        self._connection = connection
        self._most_rows = file_bytes // _LEAST_ROW_BYTES
        # Views and generated columns can run arbitrary SQL; an export has neither.
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchmany(10_000)
        self.tables = frozenset(str(name) for (name,) in found)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open an export. Any SQLite error, now or while reading, becomes a StepscopeError."""
        _check(path)
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
                connection.text_factory = lambda content: content.decode("utf-8", "replace")
                connection.execute("PRAGMA trusted_schema = OFF")
                connection.execute("PRAGMA cell_size_check = ON")
                yield cls(connection, path.stat().st_size)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if the message quotes damaged text
            raise StepscopeError(
                f"damaged SQLite file: `{path}`",
                detail=f"{str(error)[:200]}; the copy or export may be incomplete",
                hint=f"export it again: {EXPORT_COMMAND}",
            ) from None

    def fetch(self, table: str, integers: Sequence[str], texts: Sequence[str] = (), *, where: str = "") -> pl.DataFrame:
        """Return the columns for every row. A non-integer in a column of integers becomes null."""
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
                    raise sqlite3.DatabaseError(f"more rows in {table} than fit in the file")
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
    """Return the latest valid time."""
    found = [series.filter(series <= FARTHEST_NS).max() for series in times]
    return max((time for time in found if isinstance(time, int)), default=0)


def drop_invalid(table: str, frame: pl.DataFrame, nouns: tuple[str, str], notes: list[str]) -> pl.DataFrame:
    """Return the rows with valid times, sorted by start; `notes` says how many were left out."""
    kept = frame.filter(fit_in_time(table)).sort("start_ns", maintain_order=True)
    if bad := frame.height - kept.height:
        notes.append(f"{count_noun(bad, *nouns)} without a valid time left out")
    if cut := kept.filter(pl.col("name").str.len_bytes() > NAME_BYTES).height:
        notes.append(f"{count_noun(cut, *nouns)} with a name longer than {NAME_BYTES // 1024} KiB: the name was cut")
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
            detail="expected an Nsight Systems export",
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
    # The ellipsis makes the text longer than the limit, so that a cut text is recognized by its length.
    return content[:NAME_BYTES].decode("utf-8", "replace") + "…"
