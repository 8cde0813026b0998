"""A trace of PyTorch's profiler as a stream of small tables in the file's order, without ever holding the whole.

`recording.kineto` keeps all columns; here they pass by, and what is kept is up to the caller. Names become numbers that
count over the whole file; shapes, types and arguments, most of the distinct texts of a trace, are left out.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.recording.readers.json_blocks import Blocks
from stepscope.recording.readers.kineto_events import NONE, Columns, Decoded, EventDecoder
from stepscope.recording.readers.kineto_workers import decode_block, decode_in_processes

_INLINE_BLOCKS = 3  # fewer are decoded faster than processes start
_MOST_PROCESSES = 4
# Processes remember every text they met, so they are replaced after so many blocks.
_BLOCKS_A_PROCESS_GROUP = 32
_TEXTS = ("shapes", "dtypes", "strides", "arguments")
_NEVER_NULL = ("name", "start_ns", "end_ns", "ns")
_OWN = NONE  # stands for this process among those that decode


class Names:
    """Distinct texts and their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._series = pl.Series([], dtype=pl.String)

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def numbers(self, texts: pl.Series) -> pl.Series:
        """Null stays null."""
        distinct = texts.drop_nulls().unique().to_list()
        known = {text: self.number(text) for text in distinct}
        return texts.replace_strict(known, default=None, return_dtype=pl.UInt32)

    @property
    def texts(self) -> pl.Series:
        """By number."""
        if self._series.len() < len(self._numbers):
            self._series = pl.Series(list(self._numbers), dtype=pl.String)
        return self._series

    def spell(self, numbers: pl.Series) -> pl.Series:
        if not self._numbers:
            return pl.Series(numbers.name, [None] * numbers.len(), dtype=pl.String)
        return self.texts.gather(numbers).alias(numbers.name)


class TraceStream:
    """Iterate for tables by kind (`op`, `launch`, `kernel`, `memcpy`, `memset`, `user`, `python`, `flow s`, `flow f`),
    with names as numbers; afterwards the rest says what was in the file beside them."""

    def __init__(self, path: Path, names: Names) -> None:
        self.blocks = Blocks(path)
        self.lost_events = 0
        self.lost_bytes = 0
        self.set_aside = 0
        self._names = names
        self._decoder = EventDecoder()
        # For each decoding process the texts by its own numbers, and the numbers here of those that were names.
        self._texts: dict[int, list[str]] = {_OWN: []}
        self._known: dict[int, NDArray[np.int64]] = {}

    def __iter__(self) -> Iterator[dict[str, pl.DataFrame]]:
        carried = b""
        for process, decoded in self._decoded_in_order():
            # Where a cut went through an event, its halves lie at the edges of two blocks.
            fragment = b",".join(piece for piece in (carried, decoded.head) if piece)
            carried = decoded.tail
            if fragment:
                mended = self._decoder.salvage(fragment)
                self._texts[_OWN].extend(mended.new_texts)
                for rest in (mended.head, mended.tail):
                    mended.lost_events += bool(rest)
                    mended.lost_bytes += len(rest)
                yield self._tables(_OWN, mended)
            yield self._tables(process, decoded)
        if carried:
            self.lost_events += 1
            self.lost_bytes += len(carried)

    def _decoded_in_order(self) -> Iterator[tuple[int, Decoded]]:
        numbered = enumerate(self.blocks)
        for _, block in itertools.islice(numbered, _INLINE_BLOCKS):
            decoded = decode_block(self._decoder, block)
            self._texts[_OWN].extend(decoded.new_texts)
            yield _OWN, decoded
        processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))
        while (first := next(numbered, None)) is not None:
            for process in range(processes):
                self._texts[process] = []
                self._known.pop(process, None)
            expected = first[0]
            early: dict[int, tuple[int, Decoded]] = {}
            group = itertools.chain([first], itertools.islice(numbered, _BLOCKS_A_PROCESS_GROUP - 1))
            for index, process, decoded in decode_in_processes(group, processes):
                self._texts[process].extend(decoded.new_texts)
                early[index] = process, decoded
                while expected in early:
                    yield early.pop(expected)
                    expected += 1

    def _tables(self, process: int, decoded: Decoded) -> dict[str, pl.DataFrame]:
        self.lost_events += decoded.lost_events
        self.lost_bytes += decoded.lost_bytes
        self.set_aside += decoded.set_aside
        return {kind: self._frame(process, columns) for kind, columns in decoded.tables.items()}

    def _frame(self, process: int, columns: Columns) -> pl.DataFrame:
        kept = {name: values for name, values in columns.items() if name not in _TEXTS}
        if "name" in kept:
            kept["name"] = self._number_names(process, kept["name"])
        nulls = [
            pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name) for name in kept if name not in _NEVER_NULL
        ]
        return pl.DataFrame(kept).with_columns(nulls)

    def _number_names(self, process: int, local: NDArray[np.int64]) -> NDArray[np.int64]:
        texts = self._texts[process]
        known = self._known.get(process, np.empty(0, np.int64))
        if len(known) < len(texts):
            known = np.concatenate((known, np.full(len(texts) - len(known), NONE, np.int64)))
            self._known[process] = known
        distinct = np.unique(local)
        for number in distinct[known[distinct] == NONE]:
            known[number] = self._names.number(texts[number])
        return known[local]
