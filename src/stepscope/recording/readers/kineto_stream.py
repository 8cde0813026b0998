"""Stream the tables of a PyTorch profiler trace in file order, without holding the whole trace."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from stepscope.recording.readers.json_blocks import Blocks
from stepscope.recording.readers.kineto_events import NONE, Columns, Decoded, EventDecoder
from stepscope.recording.readers.kineto_workers import decode_block, decode_in_processes
from stepscope.units import count_noun

# Starting processes takes as long as decoding this many blocks.
_INLINE_BLOCKS = 3
_MOST_PROCESSES = 4
# Processes remember every text. If memory is bounded, they are restarted after this many blocks.
_BLOCKS_A_PROCESS_GROUP = 32
_ARGUMENTS = ("shapes", "dtypes", "strides", "arguments")  # most distinct texts of a trace are in these
_TEXTS = ("name", *_ARGUMENTS)
_NEVER_NULL = ("name", "start_ns", "end_ns", "ns")
_OWN = NONE  # this process, among the decoding processes
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
    """Iterate over the tables of each block (`ops`, `launches`, `kernels`, `ranges`, `flows`), with their `kind`;
    afterwards, `notes` and the counters say what was left out. `is_bounded` drops the arguments of operators and
    forgets texts, so that memory does not grow with the file."""

    def __init__(self, path: Path, *, is_bounded: bool) -> None:
        self.blocks = Blocks(path)
        self.lost_events = 0
        self.lost_bytes = 0
        self.ignored = 0
        self._is_bounded = is_bounded
        self._decoder = EventDecoder()
        # The texts of each decoding process, by its own numbers.
        self._texts: dict[int, pl.Series] = defaultdict(lambda: pl.Series([], dtype=pl.String))

    def __iter__(self) -> Iterator[dict[str, pl.DataFrame]]:
        carried = b""
        for process, decoded in self._decoded_in_order():
            # An event that was cut has its halves at the edges of two blocks.
            fragment = b",".join(piece for piece in (carried, decoded.head) if piece)
            carried = decoded.tail
            if fragment:
                joined = self._decoder.salvage(fragment)
                for rest in (joined.head, joined.tail):
                    joined.lost_events += bool(rest)
                    joined.lost_bytes += len(rest)
                self._learn(_OWN, joined)
                yield self._tables(_OWN, joined)
            yield self._tables(process, decoded)
        if carried:
            self.lost_events += 1
            self.lost_bytes += len(carried)

    def notes(self) -> list[str]:
        notes = list(self.blocks.notes)
        if self.lost_events:
            lost = count_noun(self.lost_events, "unreadable event")
            notes.append(f"{lost} left out ({self.lost_bytes:,} bytes)")
        if self.ignored:
            notes.append(f"{count_noun(self.ignored, 'event of an unknown kind', 'events of unknown kinds')} left out")
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
        self.ignored += decoded.ignored
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
