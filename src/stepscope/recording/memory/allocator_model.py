"""A model of PyTorch's caching allocator: which block it would choose for each request, and what it asks CUDA for.

Default settings. The requests are exact, and so are rounding, best fit, splitting and merging. Every stream has memory
of its own (`MAIN` is that of the default one), and so have CUDA graphs. Of two free blocks of the same size the
allocator takes the one at the lower address, so the addresses that CUDA returns matter. On an H200 they fall in pieces
of 32 MiB, whose rests serve later segments, the lowest first. That is the first of `PLACEMENTS`; the others give a
range for drivers that do otherwise.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from stepscope.recording.memory.free_blocks import LEAST, SMALL, FreeBlocks

Placement = Literal["pieces", "falling", "rising", "scattered"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
SMALL_SEGMENT = 2 << 20  # what CUDA is asked for on behalf of the small pool
MAIN, GRAPH = "", "graph"  # whose memory: the default stream's, and that of CUDA graphs, which is never released
RELEASE = -1  # the number of an event that releases cached memory, as `torch.cuda.empty_cache` does
LARGE_SEGMENT = 20 << 20  # and for blocks between 1 and 10 MiB
OWN_SEGMENT = 10 << 20  # a larger block gets a segment of its own
SEGMENT_STEP = 2 << 20  # which is a multiple of this
_PIECE = 32 << 20  # of addresses, for placement `pieces`
_SPACE = 1 << 50  # addresses of segments are below it


class MemoryEvent(NamedTuple):
    """A request (`bytes` above 0) or the free of an earlier request of the same number (`bytes` 0); or `RELEASE`."""

    number: int
    bytes: int


class OutOfSpaceError(Exception):
    """The capacity does not suffice, even without cached segments."""


class _Pool:
    """The free blocks of one pool, also in the order in which the allocator looks for them: by size, then address."""

    __slots__ = ("order", "space")

    def __init__(self) -> None:
        self.space = FreeBlocks()
        self.order: list[tuple[int, int]] = []

    def find(self, rounded: int) -> tuple[int, int] | None:
        """Remove and return the smallest free block that is large enough."""
        at = bisect_left(self.order, (rounded, 0))
        return self.order.pop(at) if at < len(self.order) else None

    def take(self, address: int, size: int, rounded: int) -> int:
        taken = self.space.take(address, rounded)
        if taken < size:
            insort(self.order, (size - taken, address + taken))
        return taken

    def add_segment(self, address: int, size: int) -> None:
        """Add the block of a new segment, for `take`."""
        self.space.walls.update((address, address + size))
        self.space.sizes[address] = size
        self.space.begins[address + size] = address

    def drop(self, address: int, size: int) -> None:
        """Remove a segment that is one free block."""
        del self.order[bisect_left(self.order, (size, address))]
        del self.space.sizes[address], self.space.begins[address + size]
        del self.space.walls[address], self.space.walls[address + size]

    def give(self, address: int, size: int) -> None:
        space, order = self.space, self.order
        end = address + size
        if end in space.sizes and end not in space.walls:
            del order[bisect_left(order, (space.sizes[end], end))]
        if address in space.begins and address not in space.walls:
            begin = space.begins[address]
            del order[bisect_left(order, (space.sizes[begin], begin))]
        begin, end = space.add(address, size)
        insort(order, (end - begin, begin))


class AllocatorModel:
    """The state of the allocator. With a `capacity`, it releases cached segments when it runs out, as PyTorch does,
    and raises `OutOfSpaceError` if that is not enough. `pools` says which requests are not from memory of the default
    stream."""

    def __init__(
        self,
        placement: Placement = PLACEMENTS[0],
        *,
        capacity: int | None = None,
        pools: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_reserved_bytes = 0
        self.blocks: dict[int, tuple[int, int, int]] = {}  # number of the request: address, bytes, requested bytes
        self._pools: dict[tuple[str, bool], _Pool] = {}  # by whose memory it is, and whether for small blocks
        self._pool_names = pools
        self._segments: dict[int, int] = {}  # address to bytes
        self._capacity = capacity
        self._placement = placement
        self._random = random.Random(0)
        self._asked = 0  # bytes ever asked from CUDA, which orders the addresses
        self._lowest = _SPACE  # address of a piece
        self._rests: list[tuple[int, int]] = []  # addresses and sizes of what is left of pieces

    def request(self, number: int, requested: int) -> None:
        rounded = max(LEAST, -(-requested // LEAST) * LEAST)
        pool = self._pool_of(number, rounded)
        size, address = pool.find(rounded) or self._reserve(pool, rounded)
        taken = pool.take(address, size, rounded)
        self.blocks[number] = (address, taken, requested)
        self.allocated_bytes += taken
        self.requested_bytes += requested
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)

    def free(self, number: int) -> None:
        """Free a request, or release cached memory."""
        if number == RELEASE:
            self.release_cached()
            return
        address, size, requested = self.blocks.pop(number)
        self.allocated_bytes -= size
        self.requested_bytes -= requested
        self._pool_of(number, size).give(address, size)

    def follow(self, events: Iterable[MemoryEvent]) -> None:
        for number, size in events:
            if size:
                self.request(number, size)
            else:
                self.free(number)

    def _pool_of(self, number: int, size: int) -> _Pool:
        key = (self._pool_names.get(number, MAIN), size <= SMALL)
        if key not in self._pools:
            self._pools[key] = _Pool()
        return self._pools[key]

    def release_cached(self) -> None:
        """Return the segments without a used block to CUDA."""
        for (name, _), pool in self._pools.items():
            if name == GRAPH:
                continue
            for size, address in list(pool.order):
                if self._segments.get(address) == size:
                    pool.drop(address, size)
                    del self._segments[address]
                    insort(self._rests, (address, size))
                    self.reserved_bytes -= size

    def _reserve(self, pool: _Pool, rounded: int) -> tuple[int, int]:
        """Get a segment from CUDA. Returns the size and address of its only block, which is in no list yet."""
        size = _segment_bytes(rounded)
        if self._capacity is not None and self.reserved_bytes + size > self._capacity:
            self.release_cached()
            if self.reserved_bytes + size > self._capacity:
                raise OutOfSpaceError(
                    f"{rounded} bytes do not fit: {self.reserved_bytes} of {self._capacity} are reserved"
                )
        address = self._place(size)
        self._segments[address] = size
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        pool.add_segment(address, size)
        return size, address

    def _place(self, size: int) -> int:
        """An address for a new segment."""
        if self._placement == "pieces":
            return self._place_in_piece(size)
        above = self._asked
        self._asked += size + SEGMENT_STEP
        if self._placement == "falling":
            return _SPACE - above - size
        return above + (self._random.randrange(1 << 20) * _SPACE if self._placement == "scattered" else 0)

    def _place_in_piece(self, size: int) -> int:
        for at, (address, rest) in enumerate(self._rests):
            if rest >= size:
                self._rests[at] = (address + size, rest - size)
                return address
        whole = -(-size // _PIECE) * _PIECE
        self._lowest -= whole
        self._rests.insert(0, (self._lowest + size, whole - size))
        return self._lowest


def _segment_bytes(rounded: int) -> int:
    if rounded <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if rounded < OWN_SEGMENT else -(-rounded // SEGMENT_STEP) * SEGMENT_STEP
