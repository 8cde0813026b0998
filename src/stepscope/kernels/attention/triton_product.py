"""Matrix products of tiles, with fp32 as accurate as fp32 on tensor cores that know only tf32.

A tf32 number has ten bits after the first. So each fp32 operand is split into a high and a low part that are exact in
tf32 or nearly so, and three products instead of one give what fp32 would, but for the product of the two low parts.
Triton's own `tf32x3` does the same with a second accumulator and a test for NaN of every element of it; at D 128 that
is where the registers go (backward spilled a kilobyte). Here all three add to the accumulator that is given.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32. PRECISION is looked at for fp32 operands alone: "tf32" or "tf32x3"."""
    if PRECISION == "tf32x3":
        a_high = _high_part(a)
        b_high = _high_part(b)
        acc = tl.dot(a - a_high, b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b - b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b_high, acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="tf32")
    return acc


@triton.jit
def _high_part(x):
    """x with the 13 bits cleared that tf32 does not have."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
