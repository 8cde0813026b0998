"""Reconstruct the state of the allocator at the start of a trace from the state at its end.

The beginning of a trace is usually missing: the trace is a ring buffer, and recording starts in the middle of a
program. But the file has the state at the end. Undoing segment events from the last to the first gives the segments at
the start. A block of that time is either still alive or freed in the trace, which gives its address and requested size.
Its real size follows from the space around it, except for a large block followed by free memory.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stepscope.recording.memory.free_blocks import LEAST, SMALL
from stepscope.recording.memory.snapshot import ACTIONS, AllocatorSettings, Segment, Trace

NEVER = -1  # an event that is not in the trace
ALLOC, REQUESTED, COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP = range(7)  # positions in ACTIONS
OTHER = ACTIONS.index("other")


@dataclass(slots=True, kw_only=True)
class Held:
    """A block that is not free at the start. If `bytes` is 0, its size is unknown but at least `rounded`."""

    address: int
    bytes: int = 0
    rounded: int = 0
    requested: int | None
    stream: int
    stack: int | None = None
    pending: bool = False
    sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPiece:
    """Memory from CUDA. Blocks in a fixed piece never merge with neighbouring pieces."""

    address: int
    bytes: int
    stream: int
    fixed: bool
    start: int = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """The columns of the events. `rounded` is `sizes` after the allocator's rounding, before it looks for a block."""

    codes: NDArray[np.uint8]
    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    rounded: NDArray[np.int64]
    streams: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace) -> Self:
        sizes = trace.events["bytes"].to_numpy()
        return cls(
            codes=trace.events["action"].to_physical().to_numpy(),
            addresses=trace.events["address"].fill_null(NEVER).to_numpy(),
            sizes=sizes,
            rounded=round_sizes(sizes, trace.settings),
            streams=trace.events["stream"].to_numpy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The state before the first event. `ranges` are the pieces, joined where blocks may span several."""

    pieces: list[ReservedPiece]
    ranges: list[ReservedPiece]
    held: list[Held]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the free blocks: the gaps between held blocks."""
        at = 0
        for piece in self.ranges:
            low, end = piece.address, piece.address + piece.bytes
            while at < len(self.held) and self.held[at].address < end:
                if low < self.held[at].address:
                    yield low, self.held[at].address
                low = max(low, self.held[at].address + self.held[at].bytes)
                at += 1
            if low < end:
                yield low, end


def known_start(segments: tuple[Segment, ...]) -> Start:
    """Return a start state that was recorded."""
    pieces = Pieces(map(piece_of, segments)).ordered()
    return Start(pieces=pieces, ranges=_join(pieces), held=held_in(segments))


def find_start(trace: Trace, columns: TraceColumns) -> Start:
    """Reconstruct the start state from the trace and its end."""
    pieces = _pieces_before(trace.segments_at_end, columns)
    ranges, held = _join(pieces), _held_before(trace.segments_at_end, columns)
    _fit(held, ranges, trace.settings)
    return Start(pieces=pieces, ranges=ranges, held=held)


def round_sizes(sizes: NDArray[np.int64], settings: AllocatorSettings) -> NDArray[np.int64]:
    """Round requested sizes like the allocator, before it looks for a block."""
    plain: NDArray[np.int64] = np.maximum((sizes + (LEAST - 1)) & -LEAST, LEAST)
    if not settings.roundup_divisions:
        return plain
    exponents = np.frexp(np.maximum(sizes, 1).astype(np.float64))[1].astype(np.int64) - 1
    intervals = np.clip(exponents - (SMALL.bit_length() - 1), 0, len(settings.roundup_divisions) - 1)
    divisions = np.array(settings.roundup_divisions, np.int64)[intervals]
    shifts = np.array([max(one, 1).bit_length() - 1 for one in settings.roundup_divisions], np.int64)[intervals]
    steps = np.maximum((np.int64(1) << exponents) >> shifts, 1)
    divided = (sizes + steps - 1) & -steps
    rounded: NDArray[np.int64] = np.where((divisions > 1) & (sizes > LEAST * divisions), divided, plain)
    return rounded


class Pieces:
    """Memory from CUDA that is present now, without overlaps, and what was released."""

    def __init__(self, pieces: Iterable[ReservedPiece]) -> None:
        self.there = {piece.address: piece for piece in pieces}
        self.gone: list[tuple[ReservedPiece, int]] = []
        self._order = sorted(self.there)

    def add(self, piece: ReservedPiece, event: int) -> bool:
        """Add a piece, removing whatever overlaps it. Return whether the place was empty."""
        covered = self.remove(piece.address, piece.bytes, event)
        if piece.bytes:
            self._insert(piece)
        return not covered

    def remove(self, address: int, size: int, event: int) -> int:
        """Remove a range, whole pieces or parts of them. Return how many bytes of it were present."""
        end, covered = address + size, 0
        at = max(bisect_right(self._order, address) - 1, 0)
        while at < len(self._order) and self._order[at] < end:
            piece = self.there[self._order[at]]
            stop = piece.address + piece.bytes
            low, high = max(piece.address, address), min(stop, end)
            if low >= high:
                at += 1
                continue
            del self.there[self._order.pop(at)]
            self.gone.append((cut(piece, low, high), event))
            covered += high - low
            for rest in (cut(piece, piece.address, low), cut(piece, high, stop)):
                if rest.bytes:
                    self._insert(rest)
                    at += 1
        return covered

    def ordered(self) -> list[ReservedPiece]:
        return [self.there[address] for address in self._order]

    def _insert(self, piece: ReservedPiece) -> None:
        self.there[piece.address] = piece
        insort(self._order, piece.address)


def cut(piece: ReservedPiece, low: int, high: int) -> ReservedPiece:
    return ReservedPiece(address=low, bytes=high - low, stream=piece.stream, fixed=piece.fixed, start=piece.start)


def piece_of(segment: Segment) -> ReservedPiece:
    return ReservedPiece(
        address=segment.address, bytes=segment.bytes, stream=segment.stream, fixed=not segment.expandable
    )


def held_in(segments: Iterable[Segment]) -> list[Held]:
    """Return the blocks that are not free, sorted by address."""
    found = [
        Held(
            address=block.address,
            bytes=block.bytes,
            requested=block.requested_bytes,
            stream=segment.stream,
            stack=block.stack,
            pending=block.state == "pending",
        )
        for segment in segments
        for block in segment.blocks
        if block.state != "free"
    ]
    return sorted(found, key=lambda block: block.address)


def _join(pieces: list[ReservedPiece]) -> list[ReservedPiece]:
    ranges: list[ReservedPiece] = []
    for piece in pieces:
        last = ranges[-1] if ranges else None
        if last and not (last.fixed or piece.fixed) and last.address + last.bytes == piece.address:
            ranges[-1] = cut(last, last.address, piece.address + piece.bytes)
        else:
            ranges.append(piece)
    return ranges


def _pieces_before(ended: tuple[Segment, ...], columns: TraceColumns) -> list[ReservedPiece]:
    """Undo all segment events, from the last to the first, starting with the segments at the end."""
    pieces = Pieces(map(piece_of, ended))
    for event in np.flatnonzero((columns.codes >= SEGMENT_ALLOC) & (columns.codes <= UNMAP))[::-1].tolist():
        code, address, size = int(columns.codes[event]), int(columns.addresses[event]), int(columns.sizes[event])
        if code in (SEGMENT_ALLOC, MAP):
            pieces.remove(address, size, event)
        else:
            stream = int(columns.streams[event])
            pieces.add(ReservedPiece(address=address, bytes=size, stream=stream, fixed=code == SEGMENT_FREE), event)
    return pieces.ordered()


def _held_before(ended: tuple[Segment, ...], columns: TraceColumns) -> list[Held]:
    """Return the blocks at the start: those whose first event is a free, and those without any event."""
    events = np.flatnonzero(columns.codes <= COMPLETED)
    heard, first = np.unique(columns.addresses[events], return_index=True)
    known = set(heard.tolist())
    held = [block for block in held_in(ended) if block.address not in known]
    taken = columns.codes[events[first]] == ALLOC
    freed = events[first][~taken]
    # A recording can be configured without `free_requested`: then an allocated block has only `free_completed`.
    completed = columns.addresses[columns.codes == COMPLETED]
    requests = bool((columns.codes == REQUESTED).any()) or not np.isin(completed, heard[taken]).any()
    chosen = (columns.codes, columns.addresses, columns.sizes, columns.rounded, columns.streams)
    for code, address, size, rounded, stream in zip(*(column[freed].tolist() for column in chosen), strict=True):
        pending = code == COMPLETED and requests
        held.append(Held(address=address, rounded=rounded, requested=size, stream=stream, pending=pending))
    return sorted(held, key=lambda block: block.address)


def _fit(held: list[Held], ranges: list[ReservedPiece], settings: AllocatorSettings) -> None:
    """Find the sizes of blocks with only a rounded size, from the space around them."""
    begins = [piece.address for piece in ranges]
    largest = settings.max_split_bytes or 1 << 62
    for at, block in enumerate(held):
        if block.bytes:
            continue
        place = bisect_right(begins, block.address) - 1
        end = ranges[place].address + ranges[place].bytes if place >= 0 else 0
        following = held[at + 1].address if at + 1 < len(held) else end
        room = min(end, following) - block.address
        block.bytes = block.rounded
        if block.rounded <= SMALL or settings.expandable_segments or room < block.rounded:
            block.sure = block.rounded <= room
        elif room - block.rounded <= SMALL or block.rounded >= largest:
            # The remainder is too small for a large block, so it was never split off.
            block.bytes = room
        else:
            block.sure = False
