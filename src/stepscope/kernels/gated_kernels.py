"""The Triton kernels of gated activations, act(gate) · up, for every GPU since Ampere. They do not import torch, so
that they can be compiled without it; `gated.py` launches them.

Forward reads two tensors and writes one; backward reads three and writes two, and computes the activation again from
what forward read. A program takes BLOCK columns of one row, so that gate and up may be parts of the same tensor, as
they are when one product computes both.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class GatedTile(NamedTuple):
    block: int
    num_warps: int

    def count_programs(self, num_rows: int, width: int) -> int:
        count: int = num_rows * triton.cdiv(width, self.block)
        return count


TILE = GatedTile(block=1024, num_warps=4)  # 8 elements per thread: of bf16, one load of 16 bytes from each tensor

SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """The activation and its derivative; what is not used costs nothing."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        slope = share * (1 + x * (1 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
        slope = share + x * tl.exp(-0.5 * x * x) * INVERSE_SQRT_2_PI
    else:  # 0.5 · (1 + tanh(z)) is sigmoid(2 · z)
        tl.static_assert(ACTIVATION == "gelu_tanh")
        share = tl.sigmoid(x * (TWICE_SQRT_2_OVER_PI + (TWICE_SQRT_2_OVER_PI * CUBIC) * x * x))
        inner = TWICE_SQRT_2_OVER_PI + (3 * TWICE_SQRT_2_OVER_PI * CUBIC) * x * x
        slope = share + x * share * (1 - share) * inner
    return x * share, slope


@triton.jit
def gated_forward(
    gate,
    up,
    y,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row, column, inside = _locate(WIDTH, BLOCK, VECTOR)
    gates = tl.load(gate + row * gate_stride + column, inside, 0).to(tl.float32)
    ups = tl.load(up + row * up_stride + column, inside, 0).to(tl.float32)
    activation, _ = _activate(gates, ACTIVATION)
    tl.store(y + row * WIDTH + column, (activation * ups).to(y.dtype.element_ty), inside)


@triton.jit
def gated_backward(
    dy,
    gate,
    up,
    dgate,
    dup,
    y,
    dy_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row, column, inside = _locate(WIDTH, BLOCK, VECTOR)
    dout = tl.load(dy + row * dy_stride + column, inside, 0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + column, inside, 0).to(tl.float32)
    ups = tl.load(up + row * up_stride + column, inside, 0).to(tl.float32)
    activation, slope = _activate(gates, ACTIVATION)
    tl.store(dgate + row * dgate_stride + column, (dout * ups * slope).to(dgate.dtype.element_ty), inside)
    tl.store(dup + row * dup_stride + column, (dout * activation).to(dup.dtype.element_ty), inside)
    if y is not None:  # forward's result again, for a layer that did not keep it
        tl.store(y + row * WIDTH + column, (activation * ups).to(y.dtype.element_ty), inside)


@triton.jit
def _locate(WIDTH: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """This program's row and columns, and which of these exist."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, tl.max_contiguous(column, VECTOR), column < WIDTH
