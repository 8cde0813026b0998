"""Softmax and log-softmax along the last dimension, forward and backward.

Rows of up to 1024 (or 2048) elements are done by a warp each, or two rows a warp where they are short; the name holds
the logarithm of the width. Wider rows take a block each, and where they fit into shared memory its size tells the
width.
"""

from stepscope.recover.facts import Rows, Sighting, Window, exactly
from stepscope.recover.families.grids import (
    covered,
    factor,
    is_flat,
    join_choices,
    take_apart,
    type_bytes,
    whole_number,
)

_WARP = 32
_TWO_ROWS_A_WARP = 7  # up to 2**7 elements
_BY_WARP = ("softmax_warp_forward", "softmax_warp_backward")
_BY_BLOCK = "cunn_SoftMax"
_WIDEST = 11  # the logarithm
_MOST_WARPS = 128  # of a thread each, for rows of one element


def read(sighting: Sighting) -> Rows | None:
    joined = join_choices(choices(sighting))
    assert joined is None or isinstance(joined, Rows)
    return joined


def choices(sighting: Sighting) -> tuple[Rows, ...]:
    anatomy, arguments = take_apart(sighting.name.name)
    if not is_flat(sighting):
        return ()
    if anatomy.base in _BY_WARP and len(arguments) > 3:
        return _read_by_warp(sighting, arguments)
    if anatomy.base.startswith(_BY_BLOCK):
        return _read_by_block(sighting, anatomy.base, arguments)
    return ()


def _read_by_warp(sighting: Sighting, arguments: tuple[str, ...]) -> tuple[Rows, ...]:
    """`<input, output, sum type, logarithm, …>`"""
    logarithm, size = whole_number(arguments[3]), type_bytes(arguments[1])
    if logarithm is None or logarithm > _WIDEST or sighting.block[1] > _MOST_WARPS:
        return ()
    per_block = sighting.block[1] * (2 if logarithm <= _TWO_ROWS_A_WARP else 1)
    rows = covered(sighting.grid[0], per_block)
    width = Window(2 ** (logarithm - 1) + 1 if logarithm else 1, 2**logarithm)
    elements, odd = divmod(sighting.counters.get("store_bytes", 0), size or 1)
    if size and elements and not odd:
        return factor(elements, rows, width) or (Rows(rows=rows, width=width),)
    return (Rows(rows=rows, width=width),)


def _read_by_block(sighting: Sighting, base: str, arguments: tuple[str, ...]) -> tuple[Rows, ...]:
    """`<elements at once, type, sum type, output type, …>`: a block a row."""
    rows = exactly(sighting.grid[0])
    kinds = [type_bytes(argument) for argument in arguments[1:4]]
    size = kinds[0] if len(kinds) == 3 and kinds[0] == kinds[2] else None
    width = None
    if size:
        width = _width_in_shared_memory(sighting, base, size, kinds[1]) or _width_written(sighting, size)
    if width is None and base.endswith("Reg"):
        registers = next((number for number in map(whole_number, reversed(arguments)) if number), None)
        width = covered(registers, sighting.block[0]) if registers else None
    return (Rows(rows=rows, width=width),)


def _width_in_shared_memory(sighting: Sighting, base: str, size: int, sum_bytes: int | None) -> Window | None:
    """The row itself, and one sum a warp."""
    if not base.endswith("Smem") or sighting.shared_bytes is None or sum_bytes is None:
        return None
    width, odd = divmod(sighting.shared_bytes - sighting.block[0] // _WARP * sum_bytes, size)
    return exactly(width) if width > 0 and not odd else None


def _width_written(sighting: Sighting, size: int) -> Window | None:
    width, odd = divmod(sighting.counters.get("store_bytes", 0), sighting.grid[0] * size)
    return exactly(width) if width and not odd else None
