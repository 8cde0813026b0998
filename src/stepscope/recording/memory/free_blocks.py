"""The free blocks of PyTorch's caching allocator: how it rounds, splits and merges them.

A replay of a trace (`allocator`) knows where each block was placed; a simulation (`allocator_model`) chooses the place.
Both use the same rules.
"""

from collections import Counter

LEAST = 512  # every block is a multiple of it
SMALL = 1 << 20  # largest block of the small pool, and largest remainder that is not split off a large block


class FreeBlocks:
    """The free blocks, by start address (`sizes`) and by end address (`begins`). With `fine`, as for expandable
    segments, remainders of any size are split off; blocks of `largest` bytes or more are never split."""

    __slots__ = ("begins", "fine", "largest", "sizes", "walls")

    def __init__(self, *, fine: bool = False, largest: int = 1 << 62) -> None:
        self.sizes: dict[int, int] = {}
        self.begins: dict[int, int] = {}
        self.walls: Counter[int] = Counter()  # segment boundaries that blocks do not merge across
        self.fine = fine
        self.largest = largest

    def take(self, address: int, rounded: int) -> int:
        """Allocate a block at `address` and return its bytes, or 0 if no free block starts there."""
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

    def add(self, address: int, size: int) -> tuple[int, int]:
        """Free a block and merge it with the free blocks on both sides. Return where the merged block starts and
        ends."""
        sizes, walls = self.sizes, self.walls
        end = address + size
        if end in sizes and end not in walls:
            end += sizes.pop(end)
        if address in self.begins and address not in walls:
            address = self.begins.pop(address)
        sizes[address] = end - address
        self.begins[end] = address
        return address, end
