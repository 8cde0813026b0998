"""The GPU time of an operation at any size, from the sizes that a calibration measured.

Time over size is a smooth curve on logarithmic axes, once what is not smooth is divided out: a GEMM takes
whole waves of tiles. So a simple formula gives the trend, and a Gaussian process the deviation from it. It passes close
to the measured points, returns to the formula far from them, and says how far from them it is.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import StepscopeError
from stepscope.recording.rows.calibration import Calibration, Series

Sizes = tuple[int, ...]
_SCALES = (2.0, 6.0, 20.0)  # in factors of two: sizes further apart than this say little about each other
_NOISES = (0.015, 0.05)  # relative error of one measurement
_LEAST_SPREAD = 0.02  # deviation from the formula
# Tiles of cuBLAS's kernels, rows and columns, with the share of the peak that each reaches.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 256, 0.8), (64, 128, 0.7), (64, 64, 0.55))
_SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time, and its standard deviation as a share of it."""

    ns: float
    error: float


class Curve:
    """One operation's time. `base_ns` is the formula."""

    def __init__(self, sizes: Sequence[Sizes], times_ns: Sequence[float], base_ns: Callable[[Sizes], float]) -> None:
        self._base_ns = base_ns
        self._places = _to_place(sizes)
        ratios = np.log([took / base_ns(size) for size, took in zip(sizes, times_ns, strict=True)])
        self._mean = float(np.median(ratios))
        self._ratios = ratios - self._mean
        self._spread = max(_LEAST_SPREAD, float(np.sqrt(np.mean(self._ratios**2))))
        self._known: dict[Sizes, Estimate] = {}

    def at(self, sizes: Sizes) -> Estimate:
        if sizes not in self._known:
            fit = self._fit
            alike = self._alike(_to_place([sizes]), fit.scale)[0]
            variance = max(0.0, self._spread**2 - float(alike @ fit.inverse @ alike))
            ns = self._base_ns(sizes) * math.exp(self._mean + float(alike @ fit.weights))
            self._known[sizes] = Estimate(ns, math.sqrt(variance + fit.noise**2))
        return self._known[sizes]

    @property
    def residual(self) -> float:
        """The error at the measured sizes if each is predicted from the others, as a share."""
        return self._fit.residual

    @cached_property
    def _fit(self) -> "_Fit":
        """How far apart sizes tell something about each other, and how much the measurements vary: the choice that
        predicts each measurement best from the others."""
        return max(
            (self._try_fit(scale, noise) for scale in _SCALES for noise in _NOISES), key=lambda fit: fit.likelihood
        )

    def _try_fit(self, scale: float, noise: float) -> "_Fit":
        inverse = np.linalg.inv(self._alike(self._places, scale) + noise**2 * np.eye(len(self._places)))
        weights = inverse @ self._ratios
        variances = 1 / np.diag(inverse)
        errors = weights * variances  # of each measurement, predicted from the others
        likelihood = -float(np.sum(np.log(variances) + errors**2 / variances))
        residual = float(np.sqrt(np.mean(errors**2)))
        return _Fit(scale, noise, np.asarray(inverse, dtype=np.float64), weights, likelihood, residual)

    def _alike(self, places: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
        """How alike the deviations at `places` are to those at the measured sizes."""
        distance = np.abs(places[:, None, :] - self._places[None, :, :]).sum(-1) / scale
        return self._spread**2 * np.asarray(np.exp(-distance), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Fit:
    scale: float
    noise: float
    inverse: NDArray[np.float64]
    weights: NDArray[np.float64]
    likelihood: float
    residual: float


def _to_place(sizes: Sequence[Sizes]) -> NDArray[np.float64]:
    return np.asarray(np.log2(np.maximum(1.0, np.array(sizes, dtype=float))), dtype=np.float64)


class MeasuredTimes:
    """All curves of a calibration, made when they are asked for."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._series: dict[tuple[str, str, str], list[Series]] = {}
        for one in calibration.series:
            self._series.setdefault((one.operation, one.dtype, one.variant), []).append(one)
        self._curves: dict[tuple[str, str, str, bool], Curve | None] = {}
        self._peaks: dict[str, float] = {}
        self.bandwidth = self._find_bandwidth()

    def has(self, operation: str, dtype: str, variant: str = "") -> bool:
        return (operation, dtype, variant) in self._series

    def product(self, operation: str, dtype: str, layout: str, sizes: Sizes) -> Estimate:
        """The time of `mm`, `addmm` (m, n, k) or `bmm` (batch, m, n, k). Rows that do not start at multiples of 16
        bytes take other kernels, and have a curve of their own."""
        is_aligned = is_aligned_product(dtype, layout, sizes)
        for candidate in ((operation, layout), ("mm", layout), (operation, "nn"), ("mm", "nn")):
            curve = self._product_curve(candidate[0], dtype, candidate[1], is_aligned)
            if curve is not None and (candidate[0] == "bmm") == (len(sizes) == 4):
                return curve.at(sizes)
        if dtype == "fp16":
            return self.product(operation, "bf16", layout, sizes)
        raise _missing("products", dtype)

    def rows(self, operation: str, dtype: str, variant: str, sizes: Sizes, base_bytes: int) -> Estimate:
        """The time of an operation whose bytes are `base_bytes` per product of its sizes."""
        key = (operation, dtype, variant, True)
        if key not in self._curves:
            overhead = self.calibration.constants.get("tiny_kernel_in_stream_ns", 2000.0)
            self._curves[key] = self._curve(
                (operation, dtype, variant),
                lambda size: overhead + math.prod(size) * base_bytes / self.bandwidth * 1e9,
            )
        curve = self._curves[key]
        if curve is None:
            raise _missing(f"{operation} {variant}", dtype)
        return curve.at(sizes)

    def indexing(self, operation: str, dtype: str, sizes: Sizes) -> Estimate:
        """The time of an embedding or scatter (tokens, vocabulary, width)."""
        key = (operation, dtype, "", True)
        if key not in self._curves:
            itemsize, fills = 4 if dtype == "fp32" else 2, operation in ("embedding_backward", "index_add", "index_put")

            def base(size: Sizes) -> float:
                tokens, vocab, width = size
                moved = (2 * tokens + fills * vocab) * width * itemsize
                return 5000.0 + moved / self.bandwidth * 1e9

            self._curves[key] = self._curve((operation, dtype, ""), base)
        curve = self._curves[key]
        if curve is None:
            raise _missing(operation, dtype)
        return curve.at(sizes)

    def attention(self, operation: str, dtype: str, variant: str, sizes: Sizes) -> Estimate:
        """The time of attention (batch, heads, kv heads, length, head dim)."""
        key = (operation, dtype, variant, True)
        if key not in self._curves:
            series = self._series.get(key[:3])
            self._curves[key] = None
            if series:
                rows = [row for one in series for row in one.rows]
                self._curves[key] = Curve(
                    [_merge_heads(row[:-1]) for row in rows], [row[-1] for row in rows], _attention_base(dtype)
                )
        curve = self._curves[key]
        if curve is None:
            raise _missing(f"{operation} {variant}", dtype)
        return curve.at(_merge_heads(sizes))

    def _product_curve(self, operation: str, dtype: str, layout: str, is_aligned: bool) -> Curve | None:
        key = (operation, dtype, layout, is_aligned)
        if key not in self._curves:
            peak = self._peak(dtype)
            rows = [
                row
                for one in self._series.get(key[:3], [])
                for row in one.rows
                if is_aligned_product(dtype, layout, row[:-1]) == is_aligned
            ]
            self._curves[key] = None
            if len(rows) >= 4:
                base = _ProductBase(peak, self.bandwidth, self.calibration.multiprocessors, 4 if "32" in dtype else 2)
                self._curves[key] = Curve([row[:-1] for row in rows], [row[-1] for row in rows], base)
        return self._curves[key]

    def _curve(self, key: tuple[str, str, str], base: Callable[[Sizes], float]) -> Curve | None:
        rows = [row for one in self._series.get(key, []) for row in one.rows]
        return Curve([row[:-1] for row in rows], [row[-1] for row in rows], base) if rows else None

    def _peak(self, dtype: str) -> float:
        """The most FLOP/s that any measured product reached."""
        if dtype not in self._peaks:
            reached = [
                2 * math.prod(row[:-1]) / row[-1] * 1e9
                for (operation, found, _), series in self._series.items()
                if operation in ("mm", "addmm") and found == dtype
                for one in series
                for row in one.rows
            ]
            self._peaks[dtype] = max(reached, default=1e14)
        return self._peaks[dtype]

    def _find_bandwidth(self) -> float:
        """The bytes per second of a large addition, read and written."""
        rows = [
            row
            for dtype, variant in (("fp32", "cold"), ("bf16", "cold"))
            for one in self._series.get(("add", dtype, variant), [])
            for row in ((*row[:-1], row[-1], 4 if dtype == "fp32" else 2) for row in one.rows)
        ]
        return max((3 * size * itemsize / took * 1e9 for size, took, itemsize in rows), default=3e12)


class NotCalibratedError(StepscopeError):
    """A calibration has no measurement that a prediction needs."""


def _missing(what: str, dtype: str) -> NotCalibratedError:
    return NotCalibratedError(
        f"the calibration has no times of {what.strip()} in {dtype}",
        detail="the GPU does not support it, or the calibration is incomplete",
        hint="stepscope calibrate",
    )


def is_aligned_product(dtype: str, layout: str, sizes: Sizes) -> bool:
    """Whether all rows, as they lie in memory, start at multiples of 16 bytes."""
    m, n, k = sizes[-3:]
    itemsize = 4 if "32" in dtype else 2
    stored = (m if layout[0] == "t" else k, k if layout[1] == "t" else n, n)
    return all(columns * itemsize % 16 == 0 for columns in stored)


@dataclass(frozen=True, slots=True)
class _ProductBase:
    """The time of a product in whole waves of the best tile, or of moving its bytes."""

    peak: float
    bandwidth: float
    multiprocessors: int
    itemsize: int

    def __call__(self, sizes: Sizes) -> float:
        batch = sizes[0] if len(sizes) == 4 else 1
        m, n, k = sizes[-3:]
        per_tile = self.peak / self.multiprocessors
        moved_ns = batch * (m * k + k * n + m * n) * self.itemsize / self.bandwidth * 1e9
        best_ns = math.inf
        for rows, columns, share in _TILES:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            for split in _SPLITS:
                if split > 1 and (tiles * split > 2 * self.multiprocessors or k < 256 * split):
                    break
                waves = math.ceil(tiles * split / self.multiprocessors)
                took_ns = waves * 2 * rows * columns * (k / split + 64) / (per_tile * share) * 1e9
                took_ns += 4 * split * m * n * batch / self.bandwidth * 1e9 if split > 1 else 0.0
                best_ns = min(best_ns, took_ns)
        return max(best_ns, moved_ns) + 2000.0


def _merge_heads(sizes: Sequence[int]) -> Sizes:
    """Attention runs heads and batches alike, so they are one size."""
    batch, heads, groups, length, head_dim = sizes
    return batch * heads, batch * groups, length, head_dim


def _attention_base(dtype: str) -> Callable[[Sizes], float]:
    rate = 5e14 if dtype in ("bf16", "fp16") else 4e13

    def base(sizes: Sizes) -> float:
        heads, _, length, head_dim = sizes
        return 8000.0 + 4 * heads * length * length * head_dim / rate * 1e9

    return base


def combine(parts: Iterable[Estimate]) -> Estimate:
    """The sum of times. Errors of different curves are taken as independent."""
    listed = list(parts)
    total = sum(part.ns for part in listed)
    variance = sum((part.ns * part.error) ** 2 for part in listed)
    return Estimate(total, math.sqrt(variance) / total if total else 0.0)
