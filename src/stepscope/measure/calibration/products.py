"""Matrix products as training calls them: forward, the gradient of the input and that of the weight, and in batches.

Shapes are drawn at random from the sizes that Transformers have, so that a model fitted to them interpolates instead of
knowing a few shapes by heart. The draw is fixed: two GPUs are measured at the same shapes.
"""

import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from stepscope.measure.calibration.clock import Call, TimedCall
from stepscope.measure.environment import DTYPES

# T tokens, O outputs and I inputs of a linear layer.
_TOKENS = (
    *(64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768),
    *(200, 600, 1152, 1800, 2100, 3000, 5000, 9000),
)
_WIDTHS = (
    *(128, 256, 384, 512, 512, 576, 640, 768, 768, 768, 896, 960, 1024, 1024, 1024, 1152, 1280, 1280, 1408, 1536),
    *(1600, 1792, 2048, 2048, 2304, 2560, 2560, 3072, 3200, 3584, 4096, 4096, 5120, 6144, 8192),
    *(520, 984, 1000, 1080, 1416, 2200),
)
# The wider side of a layer by the narrower one: projections of grouped heads, feed-forward layers, packed projections.
_RATIOS = (1, 1, 1, 1, 1.5, 2, 2, 8 / 3, 2.75, 3, 3, 3.5, 4, 4, 4, 5.4, 6, 8)
_STEPS = (8, 64, 64, 128)  # widths are multiples of one of these
_VOCABULARIES = (10000, 30528, 32000, 32000, 32768, 49152, 50304, 50432, 65024, 100352, 128256, 151936, 256000)
_ODD_VOCABULARIES = (50257, 50257, 30522, 32003, 10007, 50265, 50277, 50280, 28996)
_ODD_WIDTHS = (130, 257, 514, 770, 1023, 1028, 1290, 1601, 2052, 2570, 4100, 4107)
_DRAWS = {"bf16": 430, "fp32": 270, "tf32": 170, "fp16": 30}
_ODD_DRAWS = {"bf16": 130, "fp32": 60, "tf32": 50, "fp16": 10}
_BATCHED_DRAWS = {"bf16": 110, "fp32": 80, "tf32": 45, "fp16": 12}
_VOCABULARY_EVERY = 6  # one draw in so many is a layer that computes logits
_MOST_FLOPS = {"bf16": 3.5e12, "fp16": 3.5e12, "tf32": 1.8e12, "fp32": 4.0e11}
_LARGEST_BYTES = 4 << 30
_HEAD_DIMS = (32, 48, 64, 64, 64, 80, 96, 112, 128, 128, 256, 52, 90, 100)
_LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 300, 500, 700)
_BATCHES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_SIZES = ("m", "n", "k")


def product_cases(device: torch.device, *, every: int = 1, most_flops: float = float("inf")) -> Iterator[TimedCall]:
    """Yield all products, the dtypes that most people train in first. `every` keeps one in so many."""
    for precision, draws in _DRAWS.items():
        limit = _MOST_FLOPS[precision]
        drawn = (*_draw_linear(draws, limit), *_draw_odd(_ODD_DRAWS[precision], limit))
        shapes = [one for one in drawn if 2 * math.prod(one) < most_flops][::every]
        for number, (tokens, outputs, inputs) in enumerate(shapes):
            yield _product(device, precision, "nt", tokens, outputs, inputs)
            yield _product(device, precision, "nn", tokens, inputs, outputs)
            yield _product(device, precision, "tn", outputs, inputs, tokens)
            if number % 2 == 0:
                yield _product(device, precision, "nt", tokens, outputs, inputs, bias=True)
                yield _product(device, precision, "nn", tokens, outputs, inputs, bias=True)
        batched = [one for one in _draw_batched(_BATCHED_DRAWS[precision], limit) if 2 * math.prod(one) < most_flops]
        for batch, length, head_dim in batched[::every]:
            yield _batched(device, precision, "nt", batch, length, length, head_dim)
            yield _batched(device, precision, "nn", batch, length, head_dim, length)
            yield _batched(device, precision, "tn", batch, length, head_dim, length)


def use_precision(precision: str) -> None:
    """Let fp32 products round their inputs to TF32, or not."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def _draw_linear(count: int, limit: float) -> Iterator[tuple[int, int, int]]:
    chance = random.Random(24)
    drawn = 0
    while drawn < count:
        narrow, step = chance.choice(_WIDTHS), chance.choice(_STEPS)
        wide = max(step, round(narrow * chance.choice(_RATIOS) / step) * step)
        outputs, inputs = (wide, narrow) if chance.random() < 0.5 else (narrow, wide)
        if drawn % _VOCABULARY_EVERY == 0:
            outputs, inputs = chance.choice(_VOCABULARIES), narrow
        shape = (chance.choice(_TOKENS), outputs, inputs)
        if _fits(*shape, limit):
            drawn += 1
            yield shape


def _draw_odd(count: int, limit: float) -> Iterator[tuple[int, int, int]]:
    """Sizes whose rows do not start at multiples of 16 bytes: vocabularies, and every third time widths."""
    chance = random.Random(25)
    drawn = 0
    while drawn < count:
        outputs, inputs = chance.choice(_ODD_VOCABULARIES), chance.choice(_WIDTHS)
        if drawn % 3 == 0:
            outputs, inputs = chance.choice(_ODD_WIDTHS), inputs
            outputs, inputs = (inputs, outputs) if chance.random() < 0.5 else (outputs, inputs)
        shape = (chance.choice(_TOKENS), outputs, inputs)
        if _fits(*shape, limit):
            drawn += 1
            yield shape


def _draw_batched(count: int, limit: float) -> Iterator[tuple[int, int, int]]:
    chance = random.Random(26)
    drawn = 0
    while drawn < count:
        batch, length, head_dim = chance.choice(_BATCHES), chance.choice(_LENGTHS), chance.choice(_HEAD_DIMS)
        if 4 * batch * length * length < _LARGEST_BYTES // 2 and 2 * batch * length**2 * head_dim < limit:
            drawn += 1
            yield batch, length, head_dim


def _fits(tokens: int, outputs: int, inputs: int, limit: float) -> bool:
    most_bytes = 4 * max(tokens * outputs, tokens * inputs, inputs * outputs)
    return 2 * tokens * outputs * inputs < limit and most_bytes < _LARGEST_BYTES


def _stored(rows: int, columns: int, *, transposed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A matrix of this shape, stored by columns if `transposed`. Values are random, because zeros need less power."""
    if transposed:
        return torch.randn(columns, rows, device=device, dtype=dtype).t()
    return torch.randn(rows, columns, device=device, dtype=dtype)


def _product(
    device: torch.device, precision: str, layout: str, m: int, n: int, k: int, *, bias: bool = False
) -> TimedCall:
    """The left side was just computed; the right side, a weight or a saved activation, comes from memory."""
    dtype = DTYPES[precision]
    left: list[Tensor] = []

    def make() -> Call:
        use_precision(precision)
        if not left:
            left.append(_stored(m, k, transposed=layout[0] == "t", device=device, dtype=dtype))
        right = _stored(k, n, transposed=layout[1] == "t", device=device, dtype=dtype)
        if bias:
            added = torch.randn(n, device=device, dtype=dtype)
            return lambda: torch.addmm(added, left[0], right)
        return lambda: torch.mm(left[0], right)

    return TimedCall(
        operation="addmm" if bias else "mm",
        dtype=precision,
        variant=layout,
        columns=_SIZES,
        sizes=(m, n, k),
        make=make,
        fresh_bytes=(k * n + m * n) * dtype.itemsize,
    )


def _batched(device: torch.device, precision: str, layout: str, batch: int, m: int, n: int, k: int) -> TimedCall:
    dtype = DTYPES[precision]

    def make() -> Call:
        use_precision(precision)
        rows, columns = (k, m) if layout[0] == "t" else (m, k)
        left = torch.randn(batch, rows, columns, device=device, dtype=dtype)
        left = left.transpose(1, 2) if layout[0] == "t" else left
        rows, columns = (n, k) if layout[1] == "t" else (k, n)
        right = torch.randn(batch, rows, columns, device=device, dtype=dtype)
        right = right.transpose(1, 2) if layout[1] == "t" else right
        return lambda: torch.bmm(left, right)

    return TimedCall(
        operation="bmm",
        dtype=precision,
        variant=layout,
        columns=("batch", *_SIZES),
        sizes=(batch, m, n, k),
        make=make,
        fresh_bytes=batch * (m * n + n * k + m * k) * dtype.itemsize // 2,
    )
