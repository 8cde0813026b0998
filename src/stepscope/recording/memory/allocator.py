"""Replay PyTorch's caching allocator from its trace, to get the same byte counts as the allocator.

`torch.cuda.max_memory_allocated` counts blocks, but events have requested sizes. A block is larger because of rounding,
and, in the pool of large blocks, because a remainder of up to 1 MiB is not split off. The remainder depends on the free
block that was used, so this module tracks free blocks like the allocator: it splits, frees and merges them by the same
rules. Rounding only, the usual shortcut, misses the sum of all remainders.

A trace is a ring buffer, and its beginning is usually missing. The start state is reconstructed from the end
(`allocator_start`). Only the remainder of a large block that is followed by free memory stays unknown, at most 1 MiB
each, until the next allocation behind it shows the size. What remains unknown is counted in `estimated_bytes`.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.recording.memory.allocator_start import (
    ALLOC,
    COMPLETED,
    MAP,
    NEVER,
    OTHER,
    REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    UNMAP,
    Held,
    Pieces,
    ReservedPiece,
    Start,
    TraceColumns,
    find_start,
    held_in,
    known_start,
    piece_of,
)
from stepscope.recording.memory.free_blocks import SMALL, FreeBlocks
from stepscope.recording.memory.snapshot import AllocatorSettings, Segment, Trace
from stepscope.units import count_noun

_CHUNK = 1 << 18  # events converted to Python integers at a time: they take 10× the memory
_UNCOUNTED = -2  # end of a block whose free was requested before the start
# The noun for one, for several, and the rest of the note.
_NOTES = {
    "unknown_free": ("free", "frees", "of memory that was not allocated"),
    "lost_free": ("block", "blocks", "allocated over a live block: the free is missing from the trace"),
    "misplaced": ("block", "blocks", "allocated where no free memory was known"),
    "lost_segment": ("segment", "segments", "allocated over a live segment, or freed without being allocated"),
    "resized": ("block", "blocks", "with another size at the end of the trace; that size is used"),
    "vanished": ("block", "blocks", "missing at the end without a free; counted as freed by the last event"),
    "appeared": ("block", "blocks", "present at the end without an allocation; counted as allocated from the start"),
    "not_understood": ("event", "events", "of unknown kind"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Lifetimes of allocations and segments, and totals after each event. An event is a position in `Trace.events`.

    A null `start_event` is before the trace, a null `end_event` is after it. `exact` means that every size is the
    allocator's; otherwise `estimated_bytes` is the total of allocations whose block may be larger.
    """

    allocations: pl.DataFrame
    segments: pl.DataFrame
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    exact: bool
    estimated_bytes: int
    notes: tuple[str, ...]


def replay(trace: Trace, segments_at_start: tuple[Segment, ...] | None = None) -> Replayed:
    """Replay a trace. `segments_at_start` are the segments before the first event, if they were recorded."""
    columns = TraceColumns.of(trace)
    start = find_start(trace, columns) if segments_at_start is None else known_start(segments_at_start)
    # A recording can be configured without `free_completed`; then no block is pending at the end.
    waiting = any(block.pending for block in held_in(trace.segments_at_end))
    run = _Replay(trace.settings, start, completes=waiting or bool((columns.codes == COMPLETED).any()))
    for first in range(0, len(columns.codes), _CHUNK):
        run.follow(columns, first)
    run.confirm(columns)
    appeared = run.reconcile(trace.segments_at_end, last=len(columns.codes) - 1)
    return _tabulate(run, trace, [*start.held, *appeared])


class _Space(FreeBlocks):
    """The free blocks during a replay, which may lack events."""

    __slots__ = ()

    def __init__(self, settings: AllocatorSettings) -> None:
        super().__init__(fine=settings.expandable_segments, largest=settings.max_split_bytes or 1 << 62)

    def remove(self, address: int, size: int) -> bool:
        """Remove memory from a free block, even from its middle. Return whether all of it was free."""
        begin = address
        if self.sizes.get(address, 0) < size:
            inside = (one for one, length in self.sizes.items() if one < address and one + length >= address + size)
            begin = next(inside, NEVER)
        if begin == NEVER:
            return False
        end = begin + self.sizes.pop(begin)
        self.begins.pop(end, None)
        for low, high in ((begin, address), (address + size, end)):
            if low < high:
                self.sizes[low] = high - low
                self.begins[high] = low
        return True

    def wall(self, piece: ReservedPiece, count: int) -> None:
        """Add or remove the walls of a fixed piece. Adjacent segments share a wall."""
        if piece.fixed:
            for place in (piece.address, piece.address + piece.bytes):
                self.walls[place] += count
                if self.walls[place] <= 0:
                    del self.walls[place]


@dataclass(slots=True, kw_only=True)
class _Rows:
    """One entry per allocation; those from before the trace come first."""

    starts: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    addresses: "array[int]" = field(default_factory=lambda: array("q"))
    bytes: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, start: int, address: int, size: int, end: int = NEVER) -> int:
        self.starts.append(start)
        self.ends.append(end)
        self.addresses.append(address)
        self.bytes.append(size)
        return len(self.starts) - 1


class _Replay:
    """The state of the allocator during the replay."""

    def __init__(self, settings: AllocatorSettings, start: Start, *, completes: bool) -> None:
        self.rows = _Rows()
        self.pieces = Pieces(start.pieces)
        self.anomalies: Counter[str] = Counter()
        self.guessed: set[int] = set()  # rows whose block may be larger
        self._completes = completes  # whether the trace has both `free_requested` and `free_completed`
        self._space = _Space(settings)
        self._live: dict[int, int] = {}  # address to row
        self._pending: dict[int, int] = {}
        self._open_rows: dict[int, int] = {}  # earliest end of a block with an estimated size, and its row
        self._begin(start)
        self._open_ends = sorted(self._open_rows)

    def _begin(self, start: Start) -> None:
        for piece in start.ranges:
            self._space.wall(piece, 1)
        for low, high in start.gaps():
            self._space.add(low, high - low)
        for block in start.held:
            row = self.rows.add(NEVER, block.address, block.bytes, _UNCOUNTED if block.pending else NEVER)
            (self._pending if block.pending else self._live)[block.address] = row
            if not block.sure:
                self.guessed.add(row)
                self._open_rows[block.address + block.bytes] = row

    def follow(self, columns: TraceColumns, first: int) -> None:
        """Process the next chunk of events, starting with `first`."""
        part = slice(first, first + _CHUNK)
        codes, addresses = columns.codes[part].tolist(), columns.addresses[part].tolist()
        sizes = np.where(columns.codes[part] == ALLOC, columns.rounded[part], columns.sizes[part]).tolist()
        rows, live, pending, space = self.rows, self._live, self._pending, self._space
        event = first - 1
        for code, address, size in zip(codes, addresses, sizes, strict=True):
            event += 1
            if code == ALLOC:
                if address in live or address in pending:
                    self._free_unseen(address, event)
                live[address] = rows.add(event, address, space.take(address, size) or self._place(address, size))
            elif code == REQUESTED:
                row = live.pop(address, None)
                if row is None:
                    self.anomalies["unknown_free"] += 1
                    continue
                rows.ends[row] = event
                if self._completes:
                    pending[address] = row
                else:
                    space.add(address, rows.bytes[row])
            elif code == COMPLETED:
                row = pending.pop(address, None)
                if row is None:
                    row = live.pop(address, None)
                    if row is None:
                        self.anomalies["unknown_free"] += 1
                        continue
                    rows.ends[row] = event
                space.add(address, rows.bytes[row])
            elif code in (SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP) and size:
                fixed = code in (SEGMENT_ALLOC, SEGMENT_FREE)
                stream = int(columns.streams[event])
                piece = ReservedPiece(address=address, bytes=size, stream=stream, fixed=fixed, start=event)
                (self._reserve if code in (SEGMENT_ALLOC, MAP) else self._return)(piece, event)
            elif code == OTHER:
                self.anomalies["not_understood"] += 1

    def confirm(self, columns: TraceColumns) -> None:
        """Confirm estimated sizes: an allocation right behind a live block shows where that block ends."""
        if not self._open_rows:
            return
        allocs = np.flatnonzero(columns.codes == ALLOC)
        behind = allocs[np.isin(columns.addresses[allocs], np.array(list(self._open_rows)))]
        for event, address in zip(behind.tolist(), columns.addresses[behind].tolist(), strict=True):
            row = self._open_rows[address]
            if self.rows.ends[row] == NEVER or event < self.rows.ends[row]:
                self.guessed.discard(row)

    def reconcile(self, segments: tuple[Segment, ...], *, last: int) -> list[Held]:
        """Correct the replayed state with the known state at the end. Return the blocks that were missing."""
        ended = {block.address: block for block in held_in(segments) if not block.pending}
        appeared = []
        for address, block in ended.items():
            row = self._live.get(address)
            if row is None:
                self.rows.add(NEVER, address, block.bytes)
                appeared.append(block)
                self.anomalies["appeared"] += 1
                continue
            self.guessed.discard(row)
            if self.rows.bytes[row] != block.bytes:
                self.rows.bytes[row] = block.bytes
                self.anomalies["resized"] += 1
        for address, row in self._live.items():
            if address not in ended:
                self.rows.ends[row] = last
                self.anomalies["vanished"] += 1
        self._reconcile_pieces(segments, last)
        return appeared

    def _reconcile_pieces(self, segments: tuple[Segment, ...], last: int) -> None:
        missing = Pieces(map(piece_of, segments))
        for piece in self.pieces.ordered():
            missing.remove(piece.address, piece.bytes, last)
        surplus = Pieces(self.pieces.ordered())
        for segment in segments:
            surplus.remove(segment.address, segment.bytes, last)
        for piece in surplus.ordered():
            self.pieces.remove(piece.address, piece.bytes, last)
        for piece in missing.ordered():
            self.pieces.add(piece, last)
        self.anomalies["lost_segment"] += len(surplus.there) + len(missing.there)

    def _place(self, address: int, rounded: int) -> int:
        """Allocate where no free block starts: an estimated block before it was larger, or events are missing."""
        at = bisect_left(self._open_ends, address) - 1
        end = self._open_ends[at] if at >= 0 else NEVER
        row, gap = self._open_rows.get(end, NEVER), address - end
        size = self._space.sizes.get(end, 0)
        if row != NEVER and gap <= SMALL and size >= gap + rounded and self._is_held(row):
            self._space.remove(end, gap)
            self.rows.bytes[row] += gap
            self.guessed.discard(row)
            del self._open_rows[end]
            return self._space.take(address, rounded)
        self.anomalies["misplaced"] += 1
        if rounded > SMALL and not self._space.fine:
            self.guessed.add(len(self.rows.starts))
        return rounded

    def _is_held(self, row: int) -> bool:
        address = self.rows.addresses[row]
        return self._live.get(address) == row or self._pending.get(address) == row

    def _free_unseen(self, address: int, event: int) -> None:
        """Free a block without merging it: the block that is allocated now starts at the same address."""
        row = self._live.pop(address, None)
        if row is None:
            row = self._pending.pop(address)
        else:
            self.rows.ends[row] = event
        self._space.sizes[address] = self.rows.bytes[row]
        self._space.begins[address + self.rows.bytes[row]] = address
        self.anomalies["lost_free"] += 1

    def _reserve(self, piece: ReservedPiece, event: int) -> None:
        if not self.pieces.add(piece, event):
            self.anomalies["lost_segment"] += 1
        self._space.wall(piece, 1)
        self._space.add(piece.address, piece.bytes)

    def _return(self, piece: ReservedPiece, event: int) -> None:
        covered = self.pieces.remove(piece.address, piece.bytes, event)
        free = self._space.remove(piece.address, piece.bytes)
        if covered < piece.bytes or not free:
            self.anomalies["lost_segment"] += 1
        if covered:
            self._space.wall(piece, -1)


def _tabulate(run: _Replay, trace: Trace, described: list[Held]) -> Replayed:
    """Convert the rows to tables. Details of an allocation come from its event, or from `described` if it has none."""
    events, rows = trace.events, run.rows
    starts, ends, addresses, sizes = (
        np.frombuffer(column, np.int64) for column in (rows.starts, rows.ends, rows.addresses, rows.bytes)
    )
    is_counted, within = ends != _UNCOUNTED, starts >= 0
    told = events[starts[within]].select("stream", pl.col("bytes").alias("requested_bytes"), "stack", "metadata")
    told = told.with_columns(stack=_find_stacks(trace, told["stack"], addresses[within], ends[within]))
    known = pl.DataFrame(
        [(block.stream, block.requested, block.stack, None) for block in described], schema=told.schema, orient="row"
    )
    # `described` has the rows from before the trace, in order.
    place = np.where(within, len(described) + np.cumsum(within) - 1, np.cumsum(~within) - 1)
    allocations = _intervals(trace, starts, ends, addresses, sizes).hstack(pl.concat([known, told])[place])
    pieces = [*run.pieces.gone, *((piece, NEVER) for piece in run.pieces.ordered())]
    bounds = [(piece.start, end, piece.address, piece.bytes, piece.stream) for piece, end in pieces]
    columns = np.array(bounds, np.int64).reshape(-1, 5).T
    segments = _intervals(trace, *columns[:4]).with_columns(stream=pl.Series(columns[4])).sort("start_event", "address")
    names = ("device", "stream", "address", "bytes")
    times = ("start_event", "end_event", "start_ns", "end_ns")
    return Replayed(
        allocations=allocations.filter(is_counted).select(*times, *names, "requested_bytes", "stack", "metadata"),
        segments=segments.select(*times, *names),
        allocated_bytes=_totals(events.height, starts[is_counted], ends[is_counted], sizes[is_counted]),
        reserved_bytes=_totals(events.height, columns[0], columns[1], columns[3]),
        exact=not run.guessed and not run.anomalies.total(),
        estimated_bytes=sum(rows.bytes[row] for row in run.guessed if rows.ends[row] != _UNCOUNTED),
        notes=tuple(_note(name, count) for name, count in run.anomalies.items() if count),
    )


def _find_stacks(trace: Trace, stacks: pl.Series, addresses: NDArray[np.int64], ends: NDArray[np.int64]) -> pl.Series:
    """Fill in the stacks of allocations that are alive at the end from their blocks: a history can be configured to
    keep stacks of live memory only."""
    kept = {block.address: block.stack for block in held_in(trace.segments_at_end) if block.stack is not None}
    lacking = stacks.is_null().to_numpy() & (ends == NEVER)
    if not kept or not lacking.any():
        return stacks
    found = pl.Series([kept.get(address) for address in addresses[lacking].tolist()], dtype=stacks.dtype)
    return stacks.scatter(np.flatnonzero(lacking), found)


def _note(name: str, count: int) -> str:
    one, many, what = _NOTES[name]
    return f"{count_noun(count, one, many)} {what}"


def _intervals(
    trace: Trace,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> pl.DataFrame:
    times = trace.events["time_ns"]
    bounds = [pl.Series(column).set(pl.Series(column < 0), None) for column in (starts, ends)]
    return pl.DataFrame(
        {
            "start_event": bounds[0],
            "end_event": bounds[1],
            "start_ns": times.gather(bounds[0]),
            "end_ns": times.gather(bounds[1]),
            "device": pl.repeat(trace.device, len(starts), dtype=pl.Int32, eager=True),
            "address": addresses,
            "bytes": sizes,
        }
    )


def _totals(
    count: int, starts: NDArray[np.int64], ends: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the total after each event."""
    changes = np.zeros(count, np.int64)
    came, went = starts >= 0, ends >= 0
    np.add.at(changes, starts[came], sizes[came])
    np.subtract.at(changes, ends[went], sizes[went])
    totals: NDArray[np.int64] = np.cumsum(changes) + sizes[~came].sum()
    return totals
