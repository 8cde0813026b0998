"""Lookups of whole rows by index, which is what an embedding is, and the gradient of its table."""

from stepscope.recover.facts import Gather, Sighting, Window, exactly
from stepscope.recover.families.grids import covered, is_flat, take_apart, type_bytes, whole_number

_WARP = 32
_MOST_THREADS = 256
_FEW_LOOKUPS = 3072  # beyond, PyTorch sorts them first, in other kernels
_COLUMNS = 32


def read(sighting: Sighting) -> Gather | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if anatomy.base == "vectorized_gather_kernel" and sighting.grid[2] == 1:
        alignment = whole_number(arguments[0]) if arguments else None
        return Gather(rows=exactly(sighting.grid[0]), width_bytes=_find_width(sighting, alignment or 0))
    if anatomy.base == "embedding_backward_feature_kernel" and is_flat(sighting) and sighting.block[0] == _COLUMNS:
        size = type_bytes(arguments[0]) if arguments else None
        columns = covered(sighting.grid[0], _COLUMNS)
        width = Window(columns.low * size, columns.high * size, size) if size else None
        return Gather(rows=Window(1, _FEW_LOOKUPS), width_bytes=width)
    return None


def _find_width(sighting: Sighting, alignment: int) -> Window | None:
    """A column of blocks a lookup; a thread moves `alignment` bytes, which rows are a multiple of. One block if that
    suffices, its threads rounded up to whole warps."""
    lookups, blocks = sighting.grid[0], sighting.grid[1]
    threads = sighting.block[0]
    if not alignment or threads > _MOST_THREADS or (blocks > 1 and threads < _MOST_THREADS):
        return None
    if blocks == 1:
        width = covered(threads // _WARP, _WARP * alignment, alignment)
    else:
        width = covered(blocks, _MOST_THREADS * alignment, alignment)
    written, rest = divmod(sighting.counters.get("store_bytes", 0), lookups)
    return exactly(written) if written in width and not rest else width
