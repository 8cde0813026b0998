"""A trace of PyTorch's profiler as a stream of tables in the file's order, without ever holding the whole."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from stepscope.recording.readers.json_blocks import Blocks
from stepscope.recording.readers.kineto_events import NONE, Columns, Decoded, EventDecoder
from stepscope.recording.readers.kineto_workers import decode_block, decode_in_processes

# Starting processes costs as much as decoding this many blocks.
_INLINE_BLOCKS = 3
_MOST_PROCESSES = 4
# Processes remember every text they met. Where memory is bounded they are replaced after so many blocks.
_BLOCKS_A_PROCESS_GROUP = 32
_ARGUMENTS = ("shapes", "dtypes", "strides", "arguments")  # most of the distinct texts of a trace
_TEXTS = ("name", *_ARGUMENTS)
_NEVER_NULL = ("name", "start_ns", "end_ns", "ns")
_OWN = NONE  # stands for this process among those that decode
_TABLES = {
    "op": "ops",
    "launch": "launches",
    "kernel": "kernels",
    "memcpy": "kernels",
    "memset": "kernels",
    "user": "ranges",
    "python": "ranges",
    "flow s": "flows",
    "flow f": "flows",
}


class TraceStream:
    """Iterate for the tables of one block after another (`ops`, `launches`, `kernels`, `ranges`, `flows`), with their
    `kind`; afterwards the rest says what was in the file beside them. `is_bounded` leaves arguments of operators out
    and forgets texts, so that memory does not grow with the file."""

    def __init__(self, path: Path, *, is_bounded: bool) -> None:
        self.blocks = Blocks(path)
        self.lost_events = 0
        self.lost_bytes = 0
        self.set_aside = 0
        self._is_bounded = is_bounded
        self._decoder = EventDecoder()
        # For each decoding process the texts by its own numbers.
        self._texts: dict[int, pl.Series] = defaultdict(lambda: pl.Series([], dtype=pl.String))

    def __iter__(self) -> Iterator[dict[str, pl.DataFrame]]:
        carried = b""
        for process, decoded in self._decoded_in_order():
            # Where a cut went through an event, its halves lie at the edges of two blocks.
            fragment = b",".join(piece for piece in (carried, decoded.head) if piece)
            carried = decoded.tail
            if fragment:
                mended = self._decoder.salvage(fragment)
                for rest in (mended.head, mended.tail):
                    mended.lost_events += bool(rest)
                    mended.lost_bytes += len(rest)
                self._learn(_OWN, mended)
                yield self._tables(_OWN, mended)
            yield self._tables(process, decoded)
        if carried:
            self.lost_events += 1
            self.lost_bytes += len(carried)

    def notes(self) -> list[str]:
        notes = list(self.blocks.notes)
        if self.lost_events:
            notes.append(f"{self.lost_events} events ({self.lost_bytes} bytes) could not be read and are left out")
        if self.set_aside:
            notes.append(f"{self.set_aside} events of kinds that are not known are left out")
        return notes

    def _decoded_in_order(self) -> Iterator[tuple[int, Decoded]]:
        numbered = enumerate(self.blocks)
        for _, block in itertools.islice(numbered, _INLINE_BLOCKS):
            decoded = decode_block(self._decoder, block)
            self._learn(_OWN, decoded)
            yield _OWN, decoded
        processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))
        more_in_group = _BLOCKS_A_PROCESS_GROUP - 1 if self._is_bounded else None
        while (first := next(numbered, None)) is not None:
            for process in range(processes):
                self._texts.pop(process, None)
            expected = first[0]
            early: dict[int, tuple[int, Decoded]] = {}
            group = itertools.chain([first], itertools.islice(numbered, more_in_group))
            for index, process, decoded in decode_in_processes(group, processes):
                self._learn(process, decoded)
                early[index] = process, decoded
                while expected in early:
                    yield early.pop(expected)
                    expected += 1

    def _learn(self, process: int, decoded: Decoded) -> None:
        new = pl.Series(decoded.new_texts, dtype=pl.String)
        self._texts[process] = pl.concat([self._texts[process], new], rechunk=True)

    def _tables(self, process: int, decoded: Decoded) -> dict[str, pl.DataFrame]:
        self.lost_events += decoded.lost_events
        self.lost_bytes += decoded.lost_bytes
        self.set_aside += decoded.set_aside
        frames = defaultdict(list)
        for kind, table in _TABLES.items():
            if kind in decoded.tables:
                frame = self._frame(decoded.tables[kind], self._texts[process])
                frames[table].append(frame.with_columns(kind=pl.lit(kind)))
        return {table: pl.concat(some, how="diagonal") for table, some in frames.items()}

    def _frame(self, columns: Columns, texts: pl.Series) -> pl.DataFrame:
        made = {}
        for name, values in columns.items():
            if name not in _TEXTS:
                made[name] = pl.Series(values, dtype=pl.Int64)
            elif name == "name" or not self._is_bounded:
                made[name] = texts.gather(pl.Series(values, dtype=pl.UInt32))
        nulls = [
            pl.when(pl.col(name) != ("" if name in _TEXTS else NONE)).then(pl.col(name)).alias(name)
            for name in made
            if name not in _NEVER_NULL
        ]
        return pl.DataFrame(made).with_columns(nulls)
