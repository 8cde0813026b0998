"""How a Triton kernel reads and writes one tile of a strided (B, H, L, D) tensor.

A kernel's source is either a pointer or a host tensor descriptor with block (1, 1, rows, width); the same kernel takes
both. Pointers work on every GPU and with every stride. Descriptors hand the address arithmetic, the bounds and the
padding of D to Hopper's copy engine, which frees registers for the accumulators.

Offsets are 64-bit: a batch of long sequences passes 2**31 elements, and one head may stand far from the next.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `start` on, HEAD_DIM padded to WIDTH. Zero beyond `length`, which WHOLE promises to be far."""
    if isinstance(source, tl.tensor_descriptor):
        tile = source.load([batch, head, start, 0]).reshape([ROWS, WIDTH])
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        pointers = _address(source, strides, batch, head, start, row, column)
        if WHOLE and HEAD_DIM == WIDTH:
            tile = tl.load(pointers)
        elif WHOLE:
            tile = tl.load(pointers, mask=column[None, :] < HEAD_DIM, other=0.0)
        elif HEAD_DIM == WIDTH:
            tile = tl.load(pointers, mask=start + row[:, None] < length, other=0.0)
        else:
            tile = tl.load(pointers, mask=(start + row[:, None] < length) & (column[None, :] < HEAD_DIM), other=0.0)
    return tile


@triton.jit
def load_row(source, stride, index, start, length, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """ROWS numbers from `start` on of row `index` of a table. Zero beyond `length`, which WHOLE promises to be far."""
    if isinstance(source, tl.tensor_descriptor):
        row = source.load([index, start]).reshape([ROWS])
    else:
        place = start + tl.arange(0, ROWS)
        pointers = source + tl.cast(index, tl.int64) * stride + place
        if WHOLE:
            row = tl.load(pointers)
        else:
            row = tl.load(pointers, mask=place < length, other=0.0)
    return row


@triton.jit
def store_tile(
    target, strides, batch, head, start, length, tile,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the rows of `tile` that are within `length`, and their first HEAD_DIM columns, in the target's dtype."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    pointers = _address(target, strides, batch, head, start, row, column)
    inside = start + row[:, None] < length
    if HEAD_DIM < WIDTH:
        inside = inside & (column[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _address(base, strides, batch, head, start, row, column):
    first = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    first += tl.cast(start, tl.int64) * strides[2]
    return base + first + row.to(tl.int64)[:, None] * strides[2] + column.to(tl.int64)[None, :] * strides[3]
