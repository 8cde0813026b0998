"""Matrix products of tiles, with fp32 as accurate as fp32 on tensor cores that know only tf32.

A tf32 number has ten bits after the first. So each fp32 operand is split into a high and a low part, and three products
instead of one give what fp32 would, but for the product of the two low parts. The tensor cores also add towards zero: a
long sum drifts, and on an H200 outputs were up to five times as far off as PyTorch's. So the three products of a tile
have a sum of their own, short, the small ones first, which is then added to the rest as fp32 is, to the nearest.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32. PRECISION is looked at for fp32 operands alone: "tf32" or "tf32x3"."""
    if PRECISION == "tf32x3":
        a_high, a_low = _split(a)
        b_high, b_low = _split(b)
        part = tl.dot(a_low, b_high, input_precision="tf32")
        part = tl.dot(a_high, b_low, part, input_precision="tf32")
        acc += tl.dot(a_high, b_high, part, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="tf32")
    return acc


@triton.jit
def _split(x):
    """A high and a low part of x. The high one is x to the nearest tf32, so that the low one has twelve bits, of which
    the tensor cores cut off the last. Were the high part cut off as well, the low one would lose two, always upwards.
    A NaN is one in the low part, whatever rounding makes of it in the high one."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, x - high
