"""The Triton kernels of the norms, for every GPU since Ampere. They do not import torch, so that they can be compiled
without it; `norms_launch.py` launches them.

RMSNorm and LayerNorm, each alone or with the addition of a branch to the residual stream in front of it, are one
kernel per direction. What a call does not have is None, and Triton compiles a kernel without it.

Forward reads x (and the branch) once and writes y (and their sum) once, together with one or two fp32 numbers per row.
A row stays in registers between the sum of squares and the scaling. A thread holds 32 elements of it, so that rows of
up to 1024 elements belong to one warp, which needs no barrier for its sums.

Backward, with xhat = (x - mean) / rms, g = dy · weight and the means over a row:

    dx = (g - xhat · mean(g · xhat) - mean(g)) / rms + d_total        the second mean is LayerNorm's only

One pass reads dy, x and d_total, which is what later layers add to the gradient of the residual stream, and writes dx.
Its programs stay on the GPU and take one group of rows after another, so that each can sum its part of the gradients
of weight and bias in registers. There are only a few hundred of these partial sums, and `norm_sum_partials` adds them
in a fixed order: the same input gives the same bits.

VECTOR is how many neighboring elements a thread takes. Triton would choose it for each tensor, and move values between
threads, through shared memory, where an fp32 tensor is written next to a bf16 one. With the same number for all, which
is 4 if one of those written is fp32, backward at M 4096 has 3 barriers instead of 18.
"""

# N rows, M the width of a row; a tile has ROWS rows and BLOCK columns.

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl

WIDEST = 65536  # a whole row is in registers
SUM_COLUMNS, SUM_PARTS, SUM_WARPS = 16, 128, 4


class NormTile(NamedTuple):
    """How a kernel divides its work. The last two are for backward."""

    block: int
    rows: int
    num_warps: int
    stages: int = 1
    programs_per_multiprocessor: int = 1

    @property
    def registers(self) -> int:
        """Per thread, at most, so that these programs are on a multiprocessor at once."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_multiprocessor))


@cache
def forward_tile(width: int) -> NormTile:
    """32 elements per thread: enough loads at once to use the bandwidth, and one warp for rows of up to 1024."""
    block = triton.next_power_of_2(width)
    return NormTile(block=block, rows=max(1, 1024 // block), num_warps=min(32, max(1, block // 1024)))


@cache
def backward_tile(width: int) -> NormTile:
    """16 elements per thread, while the next 16 are on their way to shared memory. Fewer, larger programs than in
    forward: each writes its own part of the gradient of the weight.
    """
    block = triton.next_power_of_2(width)
    num_warps = 8 if block <= 4096 else 16 if block <= 16384 else 32
    return NormTile(
        block=block,
        rows=max(1, 4096 // block),
        num_warps=num_warps,
        stages=2 if block <= 8192 else 1,  # wider tiles do not fit into shared memory
        programs_per_multiprocessor=max(1, 16 // num_warps),  # 128 registers per thread
    )


@triton.jit
def norm_forward(
    x,
    branch,  # None without an addition, as `total`
    weight,
    bias,  # None if there is none
    total,
    y,
    statistics,  # 1 / rms of each row; LayerNorm: preceded by the mean of each row
    num_rows,
    x_stride,
    branch_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """y = (x + branch) / rms · weight; CENTERED: LayerNorm. One program per tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.max_contiguous(tl.arange(0, BLOCK)[None, :], [1, VECTOR])
    is_row, is_column = row < num_rows, column < WIDTH
    inside = is_row[:, None] & is_column
    place = row.to(tl.int64)[:, None]
    values = tl.load(x + place * x_stride + column, inside, 0).to(tl.float32)
    if branch is not None:
        values += tl.load(branch + place * branch_stride + column, inside, 0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place * WIDTH + column, rounded, inside)
        # Backward reads the sum as it was stored, so this pass does too.
        values = rounded.to(tl.float32)
    # Asked for before the sums, so that it arrives meanwhile.
    scale = tl.load(weight + column, is_column, 0, eviction_policy="evict_last").to(tl.float32)
    if CENTERED:
        mean = tl.sum(values, 1) / WIDTH
        tl.store(statistics + row, mean, is_row)
        statistics += num_rows
        values = tl.where(is_column, values - mean[:, None], 0)
    inverse_rms = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    tl.store(statistics + row, inverse_rms, is_row)
    values = values * inverse_rms[:, None] * scale
    if bias is not None:
        values += tl.load(bias + column, is_column, 0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y + place * WIDTH + column, values.to(y.dtype.element_ty), inside)


@triton.jit
def norm_backward(
    dy,
    d_total,  # None if nothing else depends on the sum
    x,
    weight,
    statistics,
    dx,
    d_branch,  # dx once more in the branch's dtype, None if it is the same one
    dweight_parts,  # (programs, M), None if not wanted, as the next
    dbias_parts,
    num_rows,
    dy_stride,
    d_total_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTERED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every program takes each num_programs-th tile, so that neighbors read neighboring memory at the same time."""
    column = tl.max_contiguous(tl.arange(0, BLOCK)[None, :], [1, VECTOR])
    is_column = column < WIDTH
    scale = tl.load(weight + column, is_column, 0).to(tl.float32)
    # A sum for each row of the tile, because a sum over rows moves values between threads: once, at the end.
    dweight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        inside = is_row[:, None] & is_column
        place = row.to(tl.int64)[:, None]
        xhat = tl.load(x + place * x_stride + column, inside, 0).to(tl.float32)
        dout = tl.load(dy + place * dy_stride + column, inside, 0).to(tl.float32)
        if d_total is not None:
            residual = tl.load(d_total + place * d_total_stride + column, inside, 0).to(tl.float32)
        if CENTERED:
            xhat -= tl.load(statistics + row, is_row, 0)[:, None]
            inverse_rms = tl.load(statistics + num_rows + row, is_row, 0)[:, None]
        else:
            inverse_rms = tl.load(statistics + row, is_row, 0)[:, None]
        xhat *= inverse_rms
        if dweight_parts is not None:
            dweight_sum += dout * xhat
        if dbias_parts is not None:
            dbias_sum += dout
        # Zero beyond the width, because dy is.
        dout *= scale
        value = dout - xhat * (tl.sum(dout * xhat, 1) / WIDTH)[:, None]
        if CENTERED:
            value -= (tl.sum(dout, 1) / WIDTH)[:, None]
        value *= inverse_rms
        if d_total is not None:
            value += residual
        tl.store(dx + place * WIDTH + column, value.to(dx.dtype.element_ty), inside)
        if d_branch is not None:
            tl.store(d_branch + place * WIDTH + column, value.to(d_branch.dtype.element_ty), inside)
    place = tl.program_id(0) * WIDTH + tl.arange(0, BLOCK)
    is_column = tl.arange(0, BLOCK) < WIDTH
    if dweight_parts is not None:
        tl.store(dweight_parts + place, tl.sum(dweight_sum, 0), is_column)
    if dbias_parts is not None:
        tl.store(dbias_parts + place, tl.sum(dbias_sum, 0), is_column)


@triton.jit
def norm_sum_partials(
    dweight_parts,
    dbias_parts,
    dweight,
    dbias,
    num_parts,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The sums of the parts (num_parts, M), of those that are not None. A program takes a few columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if dweight is not None:
        _sum_columns(dweight_parts, dweight, column, num_parts, WIDTH, COLUMNS, PARTS)
    if dbias is not None:
        _sum_columns(dbias_parts, dbias, column, num_parts, WIDTH, COLUMNS, PARTS)


@triton.jit
def _sum_columns(parts, sums, column, num_parts, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    is_column = column < WIDTH
    acc = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        acc += tl.load(parts + part * WIDTH + column[None, :], (part < num_parts) & is_column[None, :], 0)
    tl.store(sums + column, tl.sum(acc, 0).to(sums.dtype.element_ty), is_column)
