"""Where low precision hurts, in the smallest experiments that show it: one sum, and one normalization layer.

The sum adds the same number a thousand times. The error has two sources, which the variants separate: the term is
rounded once, when it is stored, and the sum is rounded at every addition.

The norm is split into parts. Each part runs in the low dtype while all others run in float64, so the error of the
output comes from that part only. The input is rounded first, for the truth as well: rounding it is not part of the
norm. `torch.mean` of a bf16 tensor accumulates in fp32 and rounds the result once, so requesting a sum in bf16 does not
give one; the sum that is rounded at each addition is written out here, and both are measured.

All of this runs on the CPU: IEEE arithmetic gives the same result on any device.
"""

# R rows, W width.

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepscope.measure.environment import DTYPES
from stepscope.recording.rows.precision_report import LowDtype, NormKind, NormPart, Sum

TERM, COUNT = 0.01, 1000
# In table order: the dtype of the sum, that of the term, and whether the term is widened explicitly first.
VARIANTS = (
    ("fp32", "fp32", False),
    ("fp16", "fp16", False),
    ("fp32", "fp16", False),
    ("fp32", "fp16", True),
    ("bf16", "bf16", False),
    ("fp32", "bf16", False),
)

ROWS, EPS, LEAST_WIDTH = 64, 1e-5, 768
INPUT_SCALES = (1e-3, 1.0, 300.0)
_LOW: tuple[LowDtype, ...] = ("bf16", "fp16")

MEAN = "subtract the mean"
RUNNING = "sum of squares, rounded at each addition"
ONCE = "sum of squares, rounded once"
INVERSE = "add eps, rsqrt"
SCALE = "multiply by the inverse"
AFFINE = "multiply by the weight"
ALL = "all of it, with the sum in fp32"
PARTS: dict[NormKind, tuple[str, ...]] = {
    "RMSNorm": (RUNNING, ONCE, INVERSE, SCALE, AFFINE, ALL),
    "LayerNorm": (MEAN, RUNNING, ONCE, INVERSE, SCALE, AFFINE, ALL),
}


def add_up() -> tuple[Sum, ...]:
    return tuple(_add_up(accumulator, term, upcast=upcast) for accumulator, term, upcast in VARIANTS)


def _add_up(accumulator: str, term_dtype: str, *, upcast: bool) -> Sum:
    total = torch.tensor(0, dtype=DTYPES[accumulator])
    term = torch.tensor(TERM, dtype=DTYPES[term_dtype])
    added = term.to(total.dtype) if upcast else term
    changed = 0
    for number in range(1, COUNT + 1):
        before = total.item()
        total += added
        changed = number if total.item() != before else changed
    return Sum(
        accumulator=accumulator,
        term_dtype=term_dtype,
        upcast=upcast,
        count=COUNT,
        term=TERM,
        stored_term=term.item(),
        result=total.item(),
        stopped_at=changed if changed < COUNT else None,
    )


def find_norm_width(module: nn.Module) -> int:
    """Return the width of the model's first normalization layer, or a typical one: little can go wrong in a narrow
    sum.
    """
    for inner in module.modules():
        weight = getattr(inner, "weight", None)
        if type(inner).__name__.endswith("Norm") and isinstance(weight, Tensor) and weight.ndim == 1:
            return max(weight.numel(), LEAST_WIDTH)
    return LEAST_WIDTH


def measure_norm_parts(width: int) -> tuple[NormPart, ...]:
    generator = torch.Generator().manual_seed(0)
    noise_RW = torch.randn(ROWS, width, generator=generator, dtype=torch.float64)
    gains_W = 1 + 0.1 * torch.randn(width, generator=generator, dtype=torch.float64)
    return tuple(
        NormPart(
            norm=norm,
            part=part,
            dtype=dtype,
            input_scale=scale,
            width=width,
            error=_error_of_part(norm, part, noise_RW * scale, gains_W, DTYPES[dtype]),
        )
        for norm, parts in PARTS.items()
        for part in parts
        for dtype in _LOW
        for scale in INPUT_SCALES
    )


def _error_of_part(norm: NormKind, part: str, x_RW: Tensor, gains_W: Tensor, dtype: torch.dtype) -> float | None:
    x_RW, gains_W = x_RW.to(dtype).double(), gains_W.to(dtype).double()
    truth_RW = _Norm(norm=norm, low=frozenset(), dtype=dtype).run(x_RW, gains_W)
    low = frozenset(PARTS[norm]) - {RUNNING, ALL} if part == ALL else frozenset({part})
    found_RW = _Norm(norm=norm, low=low, dtype=dtype).run(x_RW, gains_W)
    error = ((found_RW - truth_RW).norm() / truth_RW.norm()).item()
    return error if math.isfinite(error) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A normalization whose parts in `low` run in `dtype`: inputs rounded to it, and the result in it."""

    norm: NormKind
    low: frozenset[str]
    dtype: torch.dtype

    def run(self, x_RW: Tensor, gains_W: Tensor) -> Tensor:
        if self.norm == "LayerNorm":
            x_RW = self._do(MEAN, torch.sub, x_RW, x_RW.mean(-1, keepdim=True))
        mean_R1 = self._mean_square(x_RW)
        inverse_R1 = self._do(INVERSE, lambda mean: torch.rsqrt(mean + EPS), mean_R1)
        scaled_RW = self._do(SCALE, torch.mul, x_RW, inverse_R1)
        return self._do(AFFINE, torch.mul, scaled_RW, gains_W)

    def _mean_square(self, x_RW: Tensor) -> Tensor:
        if RUNNING in self.low:
            squares_RW = x_RW.to(self.dtype).square()
            total_R = torch.zeros(x_RW.shape[0], dtype=self.dtype)
            for squares_R in squares_RW.unbind(-1):
                total_R = total_R + squares_R
            return (total_R / x_RW.shape[-1]).double()[:, None]
        return self._do(ONCE, lambda x: x.square().mean(-1, keepdim=True), x_RW)

    def _do(self, part: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if part not in self.low:
            return function(*inputs)
        return function(*(each.to(self.dtype) for each in inputs)).double()
