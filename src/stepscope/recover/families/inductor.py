"""Kernels that torch.compile wrote. Their blocks are powers of two that no trace records.

A grid of g blocks stands for more than (g - 1)·X elements and at most g·X, for one X of the possible ones. Which, the
rest of the run must tell; the choices are all listed. Each element, or each result of a reduction, is written with the
same number of bytes, so under Nsight Compute the size divides what was written, and a few numbers of each window are
left.
Two-dimensional tiles leave too much open to say anything.
"""

import re
from collections.abc import Iterable

from stepscope.recover.facts import Elements, Rows, Sighting, Window, exactly
from stepscope.recover.families.grids import MemoryFact, covered, is_flat, join_choices, take_apart

_KIND = re.compile(r"triton_(?P<kind>poi|red|per)_fused_")
_BLOCKS = tuple(2**power for power in range(13))  # Inductor's own limit for its first dimension is 4096
# What it takes for pointwise kernels of so many threads, as long as nobody tunes them.
_USUAL_BLOCKS = {128: (1024, 512, 256, 128), 256: (512,)}
# Reductions that several blocks share put the number of those first; it is at most this.
_MOST_SHARED = 64
_MOST_DIVISORS = 8


def read(sighting: Sighting) -> MemoryFact | None:
    return join_choices(choices(sighting))


def choices(sighting: Sighting) -> tuple[Elements, ...] | tuple[Rows, ...]:
    """One of them holds: elements of a pointwise kernel, results of a reduction. The usual ones come first."""
    match = _KIND.match(take_apart(sighting.name.name)[0].base)
    if not match or not is_flat(sighting):
        return ()
    written = sighting.counters.get("store_bytes", 0)
    if match["kind"] == "poi":
        usual = _USUAL_BLOCKS.get(sighting.block[0], ())
        return tuple(Elements(count=window) for window in _find_windows(sighting, usual, written))
    if sighting.grid[0] <= _MOST_SHARED:
        return ()
    if any(name == "sum" or "backward" in name for name in sighting.name.fused):
        written = 0  # a norm's gradient may sum up its weights' besides, and write those in parts
    return tuple(Rows(rows=window) for window in _find_windows(sighting, (), written))


def _find_windows(sighting: Sighting, usual: tuple[int, ...], written: int) -> Iterable[Window]:
    plain = [covered(sighting.grid[0], per_block) for per_block in dict.fromkeys((*usual, *_BLOCKS))]
    if sighting.grid[0] == 1:  # they hold each other
        plain = [covered(1, _BLOCKS[-1])]
    divisors = [[number for number in window if written % number == 0] for window in plain] if written else []
    if not any(divisors):
        # What was not written by stores (but added in memory, say) tells nothing.
        return plain
    return [
        window
        for whole, numbers in zip(plain, divisors, strict=True)
        for window in ([whole] if len(numbers) > _MOST_DIVISORS else map(exactly, numbers))
    ]
