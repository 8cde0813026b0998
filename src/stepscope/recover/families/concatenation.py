"""`torch.cat`: one row of blocks a tensor, sized for the largest of them.

The plain kernels start two blocks a multiprocessor whatever the sizes, so only the bytes written tell anything. Those
that copy sixteen bytes a thread start as many blocks as the largest tensor needs, up to 32 a multiprocessor.
"""

from stepscope.recover.facts import Elements, Sighting, Window
from stepscope.recover.families.grids import LARGEST, covered, join_windows, keep_stored, take_apart, whole_number

_ALIGNED = (
    "CatArrayBatchedCopy_aligned16_contig",
    "CatArrayBatchedCopy_alignedK_contig",
    "CatArrayBatchedCopy_vectorized",
)
_MOST_BLOCKS_OF_AN_SM = 32


def read(sighting: Sighting) -> Elements | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if not anatomy.base.startswith("CatArrayBatchedCopy") or not arguments:
        return None
    _, _, opaque = arguments[0].partition("OpaqueType<")
    size = whole_number(opaque.removesuffix(">"))
    if not size:
        return None
    window = Window(1, LARGEST)
    if anatomy.base in _ALIGNED:
        # Newer names say how many bytes a thread moves, behind the other numbers; before it was either.
        said = whole_number(arguments[5]) if len(arguments) > 5 else None
        window = join_windows([_sum_up(sighting, max(1, moved // size)) for moved in ((said,) if said else (8, 16))])
    stored = keep_stored([window], sighting.counters.get("store_bytes"), (size,))
    return Elements(count=stored[0]) if stored[0].high < LARGEST else None


def _sum_up(sighting: Sighting, per_thread: int) -> Window:
    """Of all tensors together: the largest is within a block of its grid, others may be nearly empty."""
    blocks, tensors = sighting.grid[0], sighting.grid[1]
    largest = covered(blocks, sighting.block[0] * per_thread)
    capped = blocks % _MOST_BLOCKS_OF_AN_SM == 0
    return Window(largest.low, LARGEST if capped else tensors * largest.high)
