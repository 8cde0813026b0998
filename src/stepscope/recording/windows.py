"""Tables that are processed in windows of a key, in memory or on disk, by the same code.

`EventTable` keeps a table in memory, as a single window. `Spill` keeps a table that is larger than memory and is an
external sort: rows are collected into a run, and each run is sorted by the table's key and written in compressed
chunks, of which only the first and last keys stay in memory. Reading merges the runs window by window. Rows with the
same key keep the order in which they were added.

Memory is bounded by one run or one window. A chunk that crosses a border is read twice. Slicing by time while reading
would need less code, but also the length of the trace in advance, which the file does not contain.

A border may be at any time. Intervals that are still open there are carried into the next window, together with
everything that was open since the oldest of them began, so that `recording.nesting` finds the same depths as over
the whole recording.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from stepscope.files import scratch_folder, writing

WINDOW_ROWS = 200_000
RUN_ROWS = 1 << 17
CHUNK_ROWS = 1 << 13
_MOST_CARRIED = 100_000  # rows that have ended; only intervals that overlap without nesting could need more

Change = Callable[[pl.DataFrame], pl.DataFrame]


class EventTable:
    """A table in memory. Call `add` at least once, with frames that have the same columns."""

    def __init__(self, key: pl.Expr, open_by: Sequence[str] = ()) -> None:
        self.num_rows = 0
        self.open_by = open_by  # columns that group intervals to carry
        self.change: Change | None = None  # applied to every window when it is read
        self._key = key
        self._frames: list[pl.DataFrame] = []

    def add(self, frame: pl.DataFrame) -> None:
        self._frames.append(frame)
        self.num_rows += frame.height

    def windows(self, borders: Sequence[int]) -> Iterator[pl.DataFrame]:
        """Yield the rows before the first border, between borders, and after the last one. Rows are not sorted, but
        equal keys keep the order in which they were added."""
        for window in self._windows(borders):
            yield self.change(window) if self.change else window

    @property
    def marks(self) -> list[tuple[int, int]]:
        """(first key, rows) of each chunk; empty if the table is in memory."""
        return []

    def delete(self) -> None:
        """Free the memory or disk space; the table is empty afterwards."""
        self._frames = []
        self.num_rows = 0

    def _windows(self, borders: Sequence[int]) -> Iterator[pl.DataFrame]:
        assert not borders, "a table in memory cannot be split into windows"
        yield pl.concat(self._frames, rechunk=False) if len(self._frames) > 1 else self._frames[0]


class Texts:
    """Distinct texts and their numbers: a table on disk stores numbers instead of texts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._series = pl.Series([], dtype=pl.String)

    def number(self, texts: pl.Series) -> pl.Series:
        """Replace texts by numbers. Null stays null."""
        distinct = texts.drop_nulls().unique().to_list()
        known = {text: self._numbers.setdefault(text, len(self._numbers)) for text in distinct}
        if self._series.len() < len(self._numbers):
            self._series = pl.Series(list(self._numbers), dtype=pl.String)
        return texts.replace_strict(known, default=None, return_dtype=pl.UInt32)

    def spell(self, numbers: pl.Series) -> pl.Series:
        if not self._numbers:
            return pl.Series(numbers.name, [None] * numbers.len(), dtype=pl.String)
        return self._series.gather(numbers).alias(numbers.name)


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory for tables on disk, and the texts in them."""

    folder: Path
    texts: Texts = field(default_factory=Texts)


@contextmanager
def spilling(parent: Path) -> Iterator[Disk]:
    """Create a directory inside `parent` and delete it when the block exits."""
    with _writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(parent, "spill") as folder:
        yield Disk(folder)


def make_table(
    disk: Disk | None, name: str, key: pl.Expr, columns: Sequence[str], open_by: Sequence[str] = ()
) -> EventTable:
    """Create a table in memory, or on disk if `disk` is given. Only a table on disk is reduced to `columns`."""
    return EventTable(key, open_by) if disk is None else Spill(disk, name, key, columns, open_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    offset: int
    size: int
    rows: int
    first_key: int
    last_key: int

    def reaches(self, begin: int | None, end: int | None) -> bool:
        """Whether it may have rows from `begin` (inclusive) to `end` (exclusive)."""
        return (begin is None or self.last_key >= begin) and (end is None or self.first_key < end)


class Spill(EventTable):
    """A table on disk."""

    def __init__(
        self, disk: Disk, name: str, key: pl.Expr, columns: Sequence[str], open_by: Sequence[str] = ()
    ) -> None:
        super().__init__(key, open_by)
        self._texts = disk.texts
        self._path = disk.folder / name
        self._columns = columns
        self._schema: pl.Schema | None = None
        self._num_gathered = 0
        self._chunks: list[_Chunk] = []

    def add(self, frame: pl.DataFrame) -> None:
        frame = frame.select(self._columns)
        self._schema = self._schema or frame.schema
        if not frame.height:
            return
        texts = [self._texts.number(frame[name]) for name in self._text_columns()]
        super().add(frame.with_columns(texts))
        self._num_gathered += frame.height
        if self._num_gathered >= RUN_ROWS:
            self._write_run()

    def delete(self) -> None:
        super().delete()
        self._chunks = []
        self._num_gathered = 0
        self._path.unlink(missing_ok=True)

    @property
    def marks(self) -> list[tuple[int, int]]:
        self._write_run()
        return [(chunk.first_key, chunk.rows) for chunk in self._chunks]

    def _text_columns(self) -> list[str]:
        assert self._schema is not None
        return [name for name, kind in self._schema.items() if kind == pl.String]

    def _windows(self, borders: Sequence[int]) -> Iterator[pl.DataFrame]:
        self._write_run()
        assert self._schema is not None, "`add` must be called before reading"
        for begin, end in zip((None, *borders), (*borders, None), strict=True):
            taken = [self._take(chunk, begin, end) for chunk in self._chunks if chunk.reaches(begin, end)]
            if not taken:
                yield self._schema.to_frame()
                continue
            window = pl.concat(taken, rechunk=True)
            yield window.with_columns(self._texts.spell(window[name]) for name in self._text_columns())

    def _take(self, chunk: _Chunk, begin: int | None, end: int | None) -> pl.DataFrame:
        with self._path.open("rb") as file:
            file.seek(chunk.offset)
            rows = pl.read_ipc(io.BytesIO(file.read(chunk.size)))
        keys = rows.select(self._key).to_series()
        first, last = (keys.search_sorted(border) if border is not None else None for border in (begin, end))
        return rows[first:last]

    def _write_run(self) -> None:
        if not self._frames:
            return
        run = pl.concat(self._frames).sort(self._key, maintain_order=True)
        self._frames = []
        self._num_gathered = 0
        with _writing(self._path.parent), self._path.open("ab") as file:
            for part in run.iter_slices(CHUNK_ROWS):
                content = io.BytesIO()
                part.write_ipc(content, compression="zstd")
                first, last = part.select(first=self._key.first(), last=self._key.last()).row(0)
                self._chunks.append(
                    _Chunk(offset=file.tell(), size=content.tell(), rows=part.height, first_key=first, last_key=last)
                )
                file.write(content.getbuffer())


def in_windows(*tables: EventTable) -> Iterator[tuple[pl.DataFrame, ...]]:
    """Yield the same window of several tables at a time. Tables of intervals include those of earlier windows that may
    still matter."""
    for _, frames in bordered_windows(*tables):
        yield frames


def bordered_windows(*tables: EventTable) -> Iterator[tuple[int | None, tuple[pl.DataFrame, ...]]]:
    """Like `in_windows`, with the border at which each window begins: None for the first."""
    borders = choose_borders(tables, WINDOW_ROWS)
    carried = [_Carried(table.open_by) for table in tables]
    windows = zip(*(table.windows(borders) for table in tables), strict=True)
    for begin, end, frames in zip((None, *borders), (*borders, None), windows, strict=True):
        yield begin, tuple(before.extend(frame, end) for before, frame in zip(carried, frames, strict=True))


def choose_borders(tables: Sequence[EventTable], rows: int) -> list[int]:
    """Return keys that split the tables into windows of about `rows` rows each, in whole chunks."""
    borders: list[int] = []
    collected = 0
    for key, count in sorted(mark for table in tables for mark in table.marks):
        if collected and collected + count > rows and (not borders or key > borders[-1]):
            borders.append(key)
            collected = 0
        collected += count
    return borders


class _Carried:
    """The intervals of earlier windows that the next window needs."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(keys)
        self._kept: pl.DataFrame | None = None

    def extend(self, new: pl.DataFrame, border: int | None) -> pl.DataFrame:
        """Return the intervals of the window that ends at `border`, including carried ones."""
        together = new if self._kept is None else pl.concat([self._kept, new])
        self._kept = None if border is None or not self._keys else self._keep(together, border)
        return together

    def _keep(self, intervals: pl.DataFrame, border: int) -> pl.DataFrame:
        still_open = pl.col("end_ns") > border
        since = intervals.filter(still_open).group_by(self._keys).agg(since=pl.col("start_ns").min())
        kept = intervals.join(since, on=self._keys, how="inner", nulls_equal=True, maintain_order="left")
        kept = kept.filter(pl.col("end_ns") > pl.col("since")).drop("since")
        if kept.height > _MOST_CARRIED:
            kept = kept.filter(still_open | (pl.int_range(pl.len()) >= kept.height - _MOST_CARRIED))
        return kept


def _writing(folder: Path) -> AbstractContextManager[None]:
    room = "`--bounded` needs disk space for about a tenth of the uncompressed trace"
    return writing(folder, if_full=room, hint="STEPSCOPE_CACHE=DIR stepscope explain FILE --bounded")
