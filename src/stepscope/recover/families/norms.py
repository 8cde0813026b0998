"""Layer norm and RMS norm in one kernel, and their gradients: one block a row, or one column of blocks for weights.

An RMS norm that is written out in single operations is read from its mean (`reductions`) instead.
"""

from stepscope.recover.facts import Rows, Sighting, Window, exactly
from stepscope.recover.families.grids import LARGEST, covered, is_flat, is_true, take_apart, type_bytes, whole_number

_A_BLOCK_A_ROW = (
    "vectorized_layer_norm_kernel",
    "RowwiseMomentsCUDAKernel",
    "LayerNormForwardCUDAKernel",
    "layer_norm_grad_input_kernel",
    "layer_norm_grad_input_kernel_vectorized",
)
_WEIGHT_GRADIENT = "GammaBetaBackwardCUDAKernelTemplate"
_COLUMNS = 32
# Warps of a block and rows it takes at a time, to the rows for which PyTorch chooses that shape.
_ROWS_OF_SHAPE = {(1, 8): (1, 63), (8, 64): (64, 127), (16, 128): (128, 255), (32, 256): (256, LARGEST)}
_STATISTIC_BYTES = 4
_VECTOR = 4


def read(sighting: Sighting) -> Rows | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if not is_flat(sighting):
        return None
    if anatomy.base in _A_BLOCK_A_ROW:
        width = _find_width(sighting, anatomy.base, arguments)
        return Rows(rows=exactly(sighting.grid[0]), width=width)
    if anatomy.base == _WEIGHT_GRADIENT and len(arguments) > 6:
        return _read_weight_gradient(sighting, arguments)
    return None


def _find_width(sighting: Sighting, base: str, arguments: tuple[str, ...]) -> Window | None:
    """What was written, less the statistics: a mean and a deviation a row, an RMS norm only the second."""
    written, size = sighting.counters.get("store_bytes"), type_bytes(arguments[0]) if arguments else None
    if base != "vectorized_layer_norm_kernel" or written is None or size is None:
        return None
    statistics = 1 if any(map(is_true, arguments[2:3])) else 2
    row_bytes, rest = divmod(written, sighting.grid[0])
    width, odd = divmod(row_bytes - statistics * _STATISTIC_BYTES, size)
    # This kernel is taken only where threads can read several elements at once.
    fits = width > 0 and width % _VECTOR == 0 and not rest and not odd
    return exactly(width) if fits else None


def _read_weight_gradient(sighting: Sighting, arguments: tuple[str, ...]) -> Rows | None:
    """`<type, sum type, columns, warps, rows, partial, aligned, …>`: aligned where rows and columns fill all blocks."""
    columns, warps, rows_at_once = (whole_number(argument) for argument in arguments[2:5])
    if columns != _COLUMNS or warps is None or rows_at_once is None or (warps, rows_at_once) not in _ROWS_OF_SHAPE:
        return None
    low, high = _ROWS_OF_SHAPE[warps, rows_at_once]
    if is_true(arguments[6]):
        first = -(-low // rows_at_once) * rows_at_once
        rows = Window(first, high - (high - first) % rows_at_once, rows_at_once)
        return Rows(rows=rows, width=exactly(sighting.grid[0] * columns))
    return Rows(rows=Window(low, high), width=covered(sighting.grid[0], columns))
