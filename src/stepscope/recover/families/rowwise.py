"""Kernels that process one row at a time: norms, softmax, and table lookups.

Layer norm and RMS norm in one kernel, and their gradients, use one block per row, or one column of blocks for the
weights. An RMS norm written as separate operations is read from its mean (`reductions`) instead.
"""

from stepscope.recover.facts import Gather, Rows, Sighting, Window, exactly
from stepscope.recover.families.grids import (
    LARGEST,
    WARP,
    covered,
    factor,
    is_flat,
    is_true,
    take_apart,
    type_bytes,
    whole_number,
)

_A_BLOCK_A_ROW = (
    "vectorized_layer_norm_kernel",
    "RowwiseMomentsCUDAKernel",
    "LayerNormForwardCUDAKernel",
    "layer_norm_grad_input_kernel",
    "layer_norm_grad_input_kernel_vectorized",
)
_WEIGHT_GRADIENT = "GammaBetaBackwardCUDAKernelTemplate"
_COLUMNS = 32
# (warps per block, rows per step): the rows for which PyTorch chooses that shape.
_ROWS_OF_SHAPE = {(1, 8): (1, 63), (8, 64): (64, 127), (16, 128): (128, 255), (32, 256): (256, LARGEST)}
_STATISTIC_BYTES = 4
_VECTOR = 4


def read_norm(sighting: Sighting) -> Rows | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if not is_flat(sighting):
        return None
    if anatomy.base in _A_BLOCK_A_ROW:
        width = _norm_width(sighting, anatomy.base, arguments)
        return Rows(rows=exactly(sighting.grid[0]), width=width)
    if anatomy.base == _WEIGHT_GRADIENT and len(arguments) > 6:
        return _read_weight_gradient(sighting, arguments)
    return None


def _norm_width(sighting: Sighting, base: str, arguments: tuple[str, ...]) -> Window | None:
    """Return the width from the stored bytes without the statistics: a mean and a deviation per row, or only the latter
    for RMS norm."""
    written, size = sighting.counters.get("store_bytes"), type_bytes(arguments[0]) if arguments else None
    if base != "vectorized_layer_norm_kernel" or written is None or size is None:
        return None
    statistics = 1 if any(map(is_true, arguments[2:3])) else 2
    row_bytes, rest = divmod(written, sighting.grid[0])
    width, odd = divmod(row_bytes - statistics * _STATISTIC_BYTES, size)
    # This kernel is only used if threads can read several elements at once.
    fits = width > 0 and width % _VECTOR == 0 and not rest and not odd
    return exactly(width) if fits else None


def _read_weight_gradient(sighting: Sighting, arguments: tuple[str, ...]) -> Rows | None:
    """`<type, sum type, columns, warps, rows, partial, aligned, …>`: aligned if rows and columns fill all blocks."""
    columns, warps, rows_at_once = (whole_number(argument) for argument in arguments[2:5])
    if columns != _COLUMNS or warps is None or rows_at_once is None or (warps, rows_at_once) not in _ROWS_OF_SHAPE:
        return None
    low, high = _ROWS_OF_SHAPE[warps, rows_at_once]
    if is_true(arguments[6]):
        first = -(-low // rows_at_once) * rows_at_once
        rows = Window(first, high - (high - first) % rows_at_once, rows_at_once)
        return Rows(rows=rows, width=exactly(sighting.grid[0] * columns))
    return Rows(rows=Window(low, high), width=covered(sighting.grid[0], columns))


# --- Softmax and log-softmax along the last dimension, forward and backward
#
# Rows of up to 1024 (or 2048) elements take one warp each, short rows half a warp; the name has log2 of the width.
# Wider rows take one block each. If they fit into shared memory, its size shows the width.

_TWO_ROWS_A_WARP = 7  # up to 2**7 elements
_BY_WARP = ("softmax_warp_forward", "softmax_warp_backward")
_BY_BLOCK = "cunn_SoftMax"
_WIDEST = 11  # log2
_MOST_WARPS = 128  # with one thread each, for rows of one element


def read_softmax(sighting: Sighting) -> tuple[Rows, ...]:
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
    """`<elements at once, type, sum type, output type, …>`: one block per row."""
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
    """Shared memory has the row and one sum per warp."""
    if not base.endswith("Smem") or sighting.shared_bytes is None or sum_bytes is None:
        return None
    width, odd = divmod(sighting.shared_bytes - sighting.block[0] // WARP * sum_bytes, size)
    return exactly(width) if width > 0 and not odd else None


def _width_written(sighting: Sighting, size: int) -> Window | None:
    width, odd = divmod(sighting.counters.get("store_bytes", 0), sighting.grid[0] * size)
    return exactly(width) if width and not odd else None


# --- Lookups of whole rows by index, such as embeddings, and the gradient of the table

_LOOKUP_THREADS = 256
_FEW_LOOKUPS = 3072  # for more, PyTorch sorts them first, in other kernels


def read_lookup(sighting: Sighting) -> Gather | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if anatomy.base == "vectorized_gather_kernel" and sighting.grid[2] == 1:
        alignment = whole_number(arguments[0]) if arguments else None
        return Gather(rows=exactly(sighting.grid[0]), width_bytes=_lookup_width(sighting, alignment or 0))
    if anatomy.base == "embedding_backward_feature_kernel" and is_flat(sighting) and sighting.block[0] == _COLUMNS:
        size = type_bytes(arguments[0]) if arguments else None
        columns = covered(sighting.grid[0], _COLUMNS)
        width = Window(columns.low * size, columns.high * size, size) if size else None
        return Gather(rows=Window(1, _FEW_LOOKUPS), width_bytes=width)
    return None


def _lookup_width(sighting: Sighting, alignment: int) -> Window | None:
    """Each lookup has a column of blocks. A thread moves `alignment` bytes, and rows are a multiple of that. A single
    block is rounded up to whole warps."""
    lookups, blocks = sighting.grid[0], sighting.grid[1]
    threads = sighting.block[0]
    if not alignment or threads > _LOOKUP_THREADS or (blocks > 1 and threads < _LOOKUP_THREADS):
        return None
    if blocks == 1:
        width = covered(threads // WARP, WARP * alignment, alignment)
    else:
        width = covered(blocks, _LOOKUP_THREADS * alignment, alignment)
    written, rest = divmod(sighting.counters.get("store_bytes", 0), lookups)
    return exactly(written) if written in width and not rest else width
