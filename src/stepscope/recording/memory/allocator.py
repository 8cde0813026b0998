"""PyTorch's caching allocator run again from its own trace: which memory was there when, in the bytes that it counts.

`torch.cuda.max_memory_allocated` counts blocks, and an event tells what was asked for. A block is larger by rounding,
and, in the pool of large ones, by a rest of up to 1 MiB that is not worth splitting off. Which rest depends on the free
block that was taken, so the free blocks are kept here as the allocator keeps them: split, freed and merged by the same
rules. Rounding alone, the usual shortcut, is short by the sum of all those rests.

A trace is a ring, and its beginning is usually lost. The state that it began with can be had from the end: the segments
there, with what came and went undone, are those at the start; every block of then is either still there or freed within
the trace, which tells its address. What stays open is the rest of a large block that free memory followed: no more than
1 MiB each, and the next block taken behind it settles it. What is never settled is counted in `estimated_bytes`.
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
    LEAST,
    MAP,
    NEVER,
    OTHER,
    REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SMALL,
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
from stepscope.recording.memory.snapshot import AllocatorSettings, Segment, Trace

_CHUNK = 1 << 18  # events taken out of their columns at a time: as Python's integers they weigh ten times as much
_UNCOUNTED = -2  # instead of the event that ends it: a block whose free was asked for before the start
_NOTES = {
    "unknown_free": "frees of memory that was not there",
    "lost_free": "blocks taken where one was still there; the free between them is not in the trace",
    "misplaced": "blocks taken where no free memory was known",
    "lost_segment": "segments that came where one was still there, or went and were not there",
    "resized": "blocks whose size at the end is not the one replayed; the one at the end was taken",
    "vanished": "blocks that are gone at the end without an event; they are ended with the last one",
    "appeared": "blocks that are there at the end without an event; they are taken as there from the start",
    "not_understood": "events of a kind that is not known",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Intervals of memory, and totals after each event. An event is its position in the trace's `events`.

    A null `start_event` was there before the trace, a null `end_event` is there still. `exact` says that every size is
    the allocator's own; otherwise `estimated_bytes` are the bytes of the allocations whose block may be larger.
    """

    allocations: pl.DataFrame
    segments: pl.DataFrame
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    exact: bool
    estimated_bytes: int
    notes: tuple[str, ...]


def replay(trace: Trace, segments_at_start: tuple[Segment, ...] | None = None) -> Replayed:
    """`segments_at_start` are the segments as they were before the first event, where somebody kept them."""
    columns = TraceColumns.of(trace)
    start = find_start(trace, columns) if segments_at_start is None else known_start(segments_at_start)
    # A recording may have been told to leave completions out; then no block can still wait for one at the end.
    waiting = any(block.pending for block in held_in(trace.segments_at_end))
    run = _Replay(trace.settings, start, completes=waiting or bool((columns.codes == COMPLETED).any()))
    for first in range(0, len(columns.codes), _CHUNK):
        run.follow(columns, first)
    run.confirm(columns)
    appeared = run.reconcile(trace.segments_at_end, last=len(columns.codes) - 1)
    return _tabulate(run, trace, [*start.held, *appeared])


class _Space:
    """The free blocks, by where they begin (`sizes`) and by where they end (`begins`)."""

    __slots__ = ("begins", "fine", "largest", "sizes", "walls")

    def __init__(self, settings: AllocatorSettings) -> None:
        self.sizes: dict[int, int] = {}
        self.begins: dict[int, int] = {}
        self.walls: Counter[int] = Counter()  # where a segment begins or ends that nothing merges across
        self.fine = settings.expandable_segments
        self.largest = settings.max_split_bytes or 1 << 62

    def take(self, address: int, rounded: int) -> int:
        """The bytes of the block that is taken at `address`, 0 where there is none to take."""
        size = self.sizes.get(address, 0)
        if size < rounded:
            return 0
        del self.sizes[address]
        rest = size - rounded
        if rest >= LEAST if self.fine or rounded <= SMALL else rest > SMALL and rounded < self.largest:
            self.sizes[address + rounded] = rest
            self.begins[address + size] = address + rounded
            return rounded
        self.begins.pop(address + size, None)
        return size

    def add(self, address: int, size: int) -> None:
        """A block that is free from now on, together with the free ones on both sides."""
        sizes, walls = self.sizes, self.walls
        end = address + size
        if end in sizes and end not in walls:
            end += sizes.pop(end)
        if address in self.begins and address not in walls:
            address = self.begins.pop(address)
        sizes[address] = end - address
        self.begins[end] = address

    def remove(self, address: int, size: int) -> bool:
        """Takes memory away from a free block, from its middle too. Whether it was all free."""
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
        """Raises the walls of a fixed piece, or takes them down. Two segments side by side share one."""
        if piece.fixed:
            for place in (piece.address, piece.address + piece.bytes):
                self.walls[place] += count
                if self.walls[place] <= 0:
                    del self.walls[place]


@dataclass(slots=True, kw_only=True)
class _Rows:
    """Allocations, one entry each; those from before the trace come first."""

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
    """The allocator's state while the events pass."""

    def __init__(self, settings: AllocatorSettings, start: Start, *, completes: bool) -> None:
        self.rows = _Rows()
        self.pieces = Pieces(start.pieces)
        self.anomalies: Counter[str] = Counter()
        self.guessed: set[int] = set()  # rows whose block may be larger
        self._completes = completes  # whether frees are told of twice: asked for, and done
        self._space = _Space(settings)
        self._live: dict[int, int] = {}  # address to row
        self._pending: dict[int, int] = {}
        self._open_rows: dict[int, int] = {}  # where a guessed block of the start ends at the earliest, and its row
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
        """Takes the next events, beginning with `first`."""
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
        """A block taken right behind a guessed one, while that was there, shows that the guess was right."""
        if not self._open_rows:
            return
        allocs = np.flatnonzero(columns.codes == ALLOC)
        behind = allocs[np.isin(columns.addresses[allocs], np.array(list(self._open_rows)))]
        for event, address in zip(behind.tolist(), columns.addresses[behind].tolist(), strict=True):
            row = self._open_rows[address]
            if self.rows.ends[row] == NEVER or event < self.rows.ends[row]:
                self.guessed.discard(row)

    def reconcile(self, segments: tuple[Segment, ...], *, last: int) -> list[Held]:
        """The state at the end is known: what the replay made of it gives way. Returns the blocks that it lacked."""
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
        """A block where no free one begins: a guessed block before it was larger, or events were lost."""
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
        """Not merged with its neighbours: the block that is taken now begins where this one did."""
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
    """The rows as tables. What is known of an allocation is in its event, or `described` where it has none."""
    events, rows = trace.events, run.rows
    starts, ends, addresses, sizes = (
        np.frombuffer(column, np.int64) for column in (rows.starts, rows.ends, rows.addresses, rows.bytes)
    )
    counted, within = ends != _UNCOUNTED, starts >= 0
    told = events[starts[within]].select("stream", pl.col("bytes").alias("requested_bytes"), "stack", "metadata")
    known = pl.DataFrame(
        [(block.stream, block.requested, block.stack, None) for block in described], schema=told.schema, orient="row"
    )
    # Rows that were there before are described in the order of the rows.
    place = np.where(within, len(described) + np.cumsum(within) - 1, np.cumsum(~within) - 1)
    allocations = _intervals(trace, starts, ends, addresses, sizes).hstack(pl.concat([known, told])[place])
    pieces = [*run.pieces.gone, *((piece, NEVER) for piece in run.pieces.ordered())]
    bounds = [(piece.start, end, piece.address, piece.bytes, piece.stream) for piece, end in pieces]
    columns = np.array(bounds, np.int64).reshape(-1, 5).T
    segments = _intervals(trace, *columns[:4]).with_columns(stream=pl.Series(columns[4])).sort("start_event", "address")
    names = ("device", "stream", "address", "bytes")
    times = ("start_event", "end_event", "start_ns", "end_ns")
    return Replayed(
        allocations=allocations.filter(counted).select(*times, *names, "requested_bytes", "stack", "metadata"),
        segments=segments.select(*times, *names),
        allocated_bytes=_totals(events.height, starts[counted], ends[counted], sizes[counted]),
        reserved_bytes=_totals(events.height, columns[0], columns[1], columns[3]),
        exact=not run.guessed and not run.anomalies.total(),
        estimated_bytes=sum(rows.bytes[row] for row in run.guessed if rows.ends[row] != _UNCOUNTED),
        notes=tuple(f"{count:,} {_NOTES[name]}" for name, count in run.anomalies.items() if count),
    )


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
    """How much there is after each event."""
    changes = np.zeros(count, np.int64)
    came, went = starts >= 0, ends >= 0
    np.add.at(changes, starts[came], sizes[came])
    np.subtract.at(changes, ends[went], sizes[went])
    totals: NDArray[np.int64] = np.cumsum(changes) + sizes[~came].sum()
    return totals
