"""Tables larger than memory: rows go to disk as they come and are read back in order, a window at a time.

This is an external sort. Rows are gathered until there are enough for a run; a run is sorted by the table's key and
written in compressed chunks, of which only the first keys stay in memory. Reading merges the runs: for each window of
the key it takes what every run has there. Rows with the same key come back in the order in which they were added.

Memory is one run being gathered, and while reading one chunk for each run that is in the middle of one. Cutting the
time into slices while reading would need less code, and the length of a trace in advance, which its file does not say.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from stepscope.files import scratch_folder, writing

RUN_ROWS = 1 << 17
CHUNK_ROWS = 1 << 13


@contextmanager
def spill_folder(beside: Path) -> Iterator[Path]:
    """A folder for spilled tables inside `beside`, gone when the block is left in whatever way."""
    with _writing(beside):
        beside.mkdir(parents=True, exist_ok=True)
    with scratch_folder(beside, "spill") as folder:
        yield folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    offset: int
    size: int
    rows: int
    first_key: int


class Spill:
    """A table on disk: `add` rows in any order, then iterate over `windows` of its key as often as wanted."""

    def __init__(self, folder: Path, name: str, key: str, schema: pl.Schema) -> None:
        assert schema[key] == pl.Int64
        self.schema = schema
        self.num_rows = 0
        self._path = folder / name
        self._key = key
        self._gathered: list[pl.DataFrame] = []
        self._num_gathered = 0
        self._runs: list[list[_Chunk]] = []

    def add(self, frame: pl.DataFrame) -> None:
        """Rows without nulls in the key; columns that the table does not have are left out."""
        if not frame.height:
            return
        self._gathered.append(frame.select(pl.col(name).cast(kind) for name, kind in self.schema.items()))
        self._num_gathered += frame.height
        self.num_rows += frame.height
        if self._num_gathered >= RUN_ROWS:
            self._write_run()

    def finish(self) -> None:
        """All rows are on disk, and none in memory."""
        if self._gathered:
            self._write_run()

    def delete(self) -> None:
        """Gives the disk its room back; the table is empty."""
        self._runs, self._gathered, self._num_gathered, self.num_rows = [], [], 0, 0
        self._path.unlink(missing_ok=True)

    @property
    def marks(self) -> list[tuple[int, int]]:
        """(first key, rows) of all chunks."""
        self.finish()
        return [(chunk.first_key, chunk.rows) for run in self._runs for chunk in run]

    def windows(self, borders: Sequence[int]) -> Iterator[pl.DataFrame]:
        """The rows before the first border, from each border to the next, and from the last one on; sorted in none of
        them, but equal keys in the order in which they were added."""
        self.finish()
        cursors = [_Cursor(self, run) for run in self._runs]
        for border in (*borders, None):
            taken = [piece for cursor in cursors for piece in cursor.take(border)]
            yield pl.concat(taken, rechunk=True) if taken else self.schema.to_frame()

    def load(self, chunk: _Chunk) -> pl.DataFrame:
        with self._path.open("rb") as file:
            file.seek(chunk.offset)
            return pl.read_ipc(io.BytesIO(file.read(chunk.size)))

    def count_before(self, frame: pl.DataFrame, border: int) -> int:
        return int(frame[self._key].search_sorted(border, side="left"))

    def _write_run(self) -> None:
        run = pl.concat(self._gathered).sort(self._key, maintain_order=True)
        self._gathered, self._num_gathered = [], 0
        chunks = []
        with _writing(self._path.parent), self._path.open("ab") as file:
            for part in run.iter_slices(CHUNK_ROWS):
                content = io.BytesIO()
                part.write_ipc(content, compression="zstd")
                chunks.append(
                    _Chunk(offset=file.tell(), size=content.tell(), rows=part.height, first_key=part[self._key][0])
                )
                file.write(content.getbuffer())
        self._runs.append(chunks)


class _Cursor:
    """How far one run has been read."""

    def __init__(self, spill: Spill, run: list[_Chunk]) -> None:
        self._spill = spill
        self._chunks = iter(run)
        self._next = next(self._chunks, None)
        self._rest: pl.DataFrame | None = None

    def take(self, border: int | None) -> Iterator[pl.DataFrame]:
        """What lies before the border, all that is left without one."""
        while True:
            if self._rest is None:
                if self._next is None or (border is not None and self._next.first_key >= border):
                    return
                self._rest = self._spill.load(self._next)
                self._next = next(self._chunks, None)
            count = self._rest.height if border is None else self._spill.count_before(self._rest, border)
            if count:
                yield self._rest.head(count)
            if count < self._rest.height:
                self._rest = self._rest.slice(count)
                return
            self._rest = None


def choose_borders(spills: Sequence[Spill], rows: int) -> list[int]:
    """Keys that cut the tables together into windows of about so many rows each, chunks being the measure."""
    borders: list[int] = []
    collected = 0
    for key, count in sorted(mark for spill in spills for mark in spill.marks):
        if collected and collected + count > rows and (not borders or key > borders[-1]):
            borders.append(key)
            collected = 0
        collected += count
    return borders


def _writing(folder: Path) -> AbstractContextManager[None]:
    room = "a trace read in bounded memory needs room on disk, about a tenth of its plain size"
    return writing(folder, if_full=room, hint="STEPSCOPE_CACHE=FOLDER stepscope explain FILE --bounded")
