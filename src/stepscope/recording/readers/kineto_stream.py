"""Stream the tables of a PyTorch profiler trace in file order, without holding its text."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from stepscope.recording.readers.json_blocks import BLOCK_BYTES, Blocks
from stepscope.recording.readers.kineto_events import (
    ARGUMENTS,
    COLLECTIVE_TEXTS,
    NONE,
    Columns,
    Decoded,
    EventDecoder,
    Ints,
)
from stepscope.recording.readers.kineto_workers import decode_block, decode_in_processes
from stepscope.units import count_noun

# Starting processes takes as long as decoding this many blocks.
_INLINE_BLOCKS = 3
_LEAST_RATIO = 8  # at which traces are compressed
_MOST_PROCESSES = 4
_BLOCKS_PER_BATCH = 4  # if memory is bounded
_TEXTS = ("name", *COLLECTIVE_TEXTS, *ARGUMENTS)
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
    "frame": "frames",
    "flow s": "flows",
    "flow f": "flows",
}


class TraceStream:
    """Iterate over the tables of the trace (`ops`, `launches`, `kernels`, `ranges`, `frames`, `flows`), with their
    `kind`: all at once or, if memory is bounded, a few blocks at a time and without the arguments and lines of
    operators. Afterwards, `notes` and the counters say what was left out."""

    def __init__(self, path: Path, *, is_bounded: bool) -> None:
        self.blocks = Blocks(path)
        self.lost_events = 0
        self.lost_bytes = 0
        self.ignored = 0
        self._path = path
        self._is_bounded = is_bounded
        self._decoder = EventDecoder(with_arguments=not is_bounded)
        self._texts = _Texts()

    def __iter__(self) -> Iterator[dict[str, pl.DataFrame]]:
        batch = []
        for decoded in self._decoded_in_order():
            self.lost_events += decoded.lost_events
            self.lost_bytes += decoded.lost_bytes
            self.ignored += decoded.ignored
            batch.append(decoded.tables)
            if self._is_bounded and len(batch) == _BLOCKS_PER_BATCH:
                yield self._frames(batch)
                batch = []
        yield self._frames(batch)

    def notes(self) -> list[str]:
        notes = list(self.blocks.notes)
        if self.lost_events:
            lost = count_noun(self.lost_events, "unreadable event")
            notes.append(f"{lost} left out ({self.lost_bytes:,} bytes)")
        if self.ignored:
            notes.append(f"{count_noun(self.ignored, 'event of an unknown kind', 'events of unknown kinds')} left out")
        return notes

    def _decoded_in_order(self) -> Iterator[Decoded]:
        """Yield what blocks contain, and the events that were cut between two blocks."""
        carried = b""
        for decoded in self._blocks_in_order():
            fragment = b",".join(piece for piece in (carried, decoded.head) if piece)
            carried = decoded.tail
            if fragment:
                joined = self._decoder.salvage(fragment)
                for rest in (joined.head, joined.tail):
                    joined.lost_events += bool(rest)
                    joined.lost_bytes += len(rest)
                self._texts.renumber(_OWN, joined)
                yield joined
            yield decoded
        if carried:
            self.lost_events += 1
            self.lost_bytes += len(carried)

    def _blocks_in_order(self) -> Iterator[Decoded]:
        blocks = iter(self.blocks)
        expected = 0 if self._is_large() else _INLINE_BLOCKS
        for block in itertools.islice(blocks, expected):
            decoded = decode_block(self._decoder, block)
            self._texts.renumber(_OWN, decoded)
            yield decoded
        if expected:  # start processes only if more blocks follow
            first = next(blocks, None)
            if first is None:
                return
            blocks = itertools.chain([first], blocks)
        early: dict[int, Decoded] = {}
        processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))
        numbered = enumerate(blocks, expected)
        for index, process, decoded in decode_in_processes(numbered, processes, with_arguments=not self._is_bounded):
            self._texts.renumber(process, decoded)
            early[index] = decoded
            while expected in early:
                yield early.pop(expected)
                expected += 1

    def _is_large(self) -> bool:
        """Whether the file surely has more than `_INLINE_BLOCKS` blocks."""
        with self._path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        return self._path.stat().st_size * (_LEAST_RATIO if compressed else 1) > (_INLINE_BLOCKS + 1) * BLOCK_BYTES

    def _frames(self, batch: Sequence[dict[str, Columns]]) -> dict[str, pl.DataFrame]:
        frames = defaultdict(list)
        for kind, table in _TABLES.items():
            # Taken out of the batch, whose memory is not needed any more.
            if pieces := [tables.pop(kind) for tables in batch if kind in tables]:
                frames[table].append(self._frame(pieces).with_columns(kind=pl.lit(kind)))
        return {table: pl.concat(some, how="diagonal") for table, some in frames.items()}

    def _frame(self, pieces: Sequence[Columns]) -> pl.DataFrame:
        made = {}
        for name in dict.fromkeys(name for piece in pieces for name in piece):
            # A block without arguments or collectives lacks their columns.
            absent = 0 if name in _TEXTS else NONE
            parts = [piece[name] if name in piece else np.full_like(piece["name"], absent) for piece in pieces]
            values = np.concatenate(parts)
            made[name] = self._texts.spell(values) if name in _TEXTS else pl.Series(values)
        nulls = [
            pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name)
            for name in made
            if name not in _TEXTS and name not in _NEVER_NULL
        ]
        unnamed = [pl.col("name").fill_null("")] if "name" in made else []
        return pl.DataFrame(made).with_columns(nulls + unnamed)


class _Texts:
    """The distinct texts of a trace, numbered from 1, and how each process numbers them. 0 stands for none."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._series = pl.Series([None], dtype=pl.String)
        # The numbers here by the numbers there, and last the number of no text, which has the index -1 (`NONE`).
        self._known: dict[int, Ints] = {}

    def renumber(self, process: int, decoded: Decoded) -> None:
        """Replace the numbers of a process in its columns."""
        nothing = np.zeros(1, np.int64)
        known = nothing if decoded.starts_over else self._known.get(process, nothing)
        new = [self._numbers.setdefault(text, len(self._numbers) + 1) for text in decoded.new_texts]
        known = self._known[process] = np.concatenate([known[:-1], np.array(new, np.int64), nothing])
        for columns in decoded.tables.values():
            columns |= {name: known[columns[name]] for name in _TEXTS if name in columns}

    def spell(self, numbers: Ints) -> pl.Series:
        if new := list(itertools.islice(self._numbers, self._series.len() - 1, None)):
            self._series = pl.concat([self._series, pl.Series(new, dtype=pl.String)], rechunk=True)
        return self._series.gather(numbers)
