"""The GPU time of an operation at any size, from the sizes that a calibration measured.

Time over size is a smooth curve on logarithmic axes, once what is not smooth is divided out: a GEMM takes
whole waves of tiles. So a simple formula gives the trend, and a Gaussian process the deviation from it. It passes close
to the measured points, returns to the formula far from them, and says how far from them it is.
"""

import math
from collections.abc import Callable, Sequence
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
_NEIGHBORS = 150  # measurements that decide a time; those further away say nothing that these do not
_USUAL_FIT = (4.0, 0.03)  # scale and noise where there are more measurements than that
_LAYOUT_DISTANCE, _BIAS_DISTANCE = 0.5, 0.1  # between products that differ only in this
_LEAST_ROWS = 4  # for a curve of its own
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
_GOOD_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time, and its standard deviation as a share of it."""

    ns: float
    error: float


class Curve:
    """One operation's time. `base_ns` is the formula. Measurements of several kinds, such as the layouts of a product,
    each have their own level, and say something about each other."""

    def __init__(
        self,
        sizes: Sequence[Sizes],
        times_ns: Sequence[float],
        base_ns: Callable[[Sizes], float],
        kinds: Sequence[str] = (),
    ) -> None:
        self._base_ns = base_ns
        self._places = _to_place(sizes)
        listed = list(kinds) or [""] * len(sizes)
        self._kinds = sorted(set(listed))
        self._apart = np.array([[_between(one, other) for other in self._kinds] for one in self._kinds])
        self._kind_of = np.array([self._kinds.index(kind) for kind in listed], dtype=np.intp)
        ratios = np.log([took / base_ns(size) for size, took in zip(sizes, times_ns, strict=True)])
        self._levels = [float(np.median(ratios[self._kind_of == number])) for number in range(len(self._kinds))]
        self._ratios = ratios - np.array(self._levels)[self._kind_of]
        self._spread = max(_LEAST_SPREAD, float(np.sqrt(np.mean(self._ratios**2))))
        self._known: dict[tuple[Sizes, str], Estimate] = {}

    def at(self, sizes: Sizes, kind: str = "") -> Estimate:
        """The time at a size. A kind that was not measured is taken as the one that is closest to it."""
        if (sizes, kind) not in self._known:
            number = min(range(len(self._kinds)), key=lambda one: _between(kind, self._kinds[one]))
            self._known[sizes, kind] = self._interpolate(sizes, number)
        return self._known[sizes, kind]

    def _interpolate(self, sizes: Sizes, kind: int) -> Estimate:
        scale, noise = self._fit
        everything = np.arange(len(self._places), dtype=np.intp)
        distances = self._distances(_to_place([sizes]), np.array([kind]), everything, scale)[0]
        near = np.argsort(distances, kind="stable")[:_NEIGHBORS]
        alike = self._spread**2 * np.exp(-distances[near])
        between = self._distances(self._places[near], self._kind_of[near], near, scale)
        between = self._spread**2 * np.exp(-between)
        weights = np.linalg.solve(between + noise**2 * np.eye(len(near)), alike)
        variance = max(0.0, self._spread**2 - float(alike @ weights))
        ns = self._base_ns(sizes) * math.exp(self._levels[kind] + float(weights @ self._ratios[near]))
        return Estimate(ns, math.sqrt(variance + noise**2))

    @cached_property
    def _fit(self) -> tuple[float, float]:
        """How far apart sizes tell something about each other, and how much the measurements vary: the choice that
        predicts each measurement best from the others."""
        if len(self._places) > _NEIGHBORS:
            return _USUAL_FIT
        return max(((scale, noise) for scale in _SCALES for noise in _NOISES), key=self._likelihood)

    def _likelihood(self, choice: tuple[float, float]) -> float:
        scale, noise = choice
        everything = np.arange(len(self._places), dtype=np.intp)
        apart = self._distances(self._places, self._kind_of, everything, scale)
        alike = self._spread**2 * np.exp(-apart)
        inverse = np.linalg.inv(alike + noise**2 * np.eye(len(self._places)))
        variances = 1 / np.diag(inverse)
        errors = (inverse @ self._ratios) * variances  # of each measurement, predicted from the others
        return -float(np.sum(np.log(variances) + errors**2 / variances))

    def _distances(
        self, places: NDArray[np.float64], kinds: NDArray[np.intp], measured: NDArray[np.intp], scale: float
    ) -> NDArray[np.float64]:
        """From `places` of these kinds to the measurements with these numbers."""
        sizes = np.abs(places[:, None, :] - self._places[None, measured, :]).sum(-1) / scale
        return np.asarray(sizes + self._apart[kinds[:, None], self._kind_of[None, measured]], dtype=np.float64)


def _between(kind: str, other: str) -> float:
    """How far apart two kinds are: layouts such as `nt`, with `+` if a bias is added."""
    layout, _, bias = kind.partition("+")
    other_layout, _, other_bias = other.partition("+")
    return _LAYOUT_DISTANCE * (layout != other_layout) + _BIAS_DISTANCE * (bias != other_bias)


def _to_place(sizes: Sequence[Sizes]) -> NDArray[np.float64]:
    return np.asarray(np.log2(np.maximum(1.0, np.array(sizes, dtype=float))), dtype=np.float64)


class MeasuredTimes:
    """All curves of a calibration, made when they are asked for."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._series: dict[tuple[str, str, str], list[Series]] = {}
        for one in calibration.series:
            self._series.setdefault((one.operation, one.dtype, one.variant), []).append(one)
        self._curves: dict[tuple[str, str, str], Curve | None] = {}
        self._product_curves: dict[tuple[str, str, str], Curve | None] = {}
        self._peaks: dict[str, float] = {}
        self.bandwidth = self._find_bandwidth()

    def has(self, operation: str, dtype: str, variant: str = "") -> bool:
        return (operation, dtype, variant) in self._series

    def product(self, operation: str, dtype: str, layout: str, sizes: Sizes) -> Estimate:
        """The time of `mm`, `addmm` (m, n, k) or `bmm` (batch, m, n, k)."""
        alignment = product_alignment(dtype, layout, sizes)
        key = ("bmm" if len(sizes) == 4 else "mm", _pool(dtype), alignment)
        for near in (alignment, *_ALIGNMENTS):
            curve = self._product_curve(key[0], key[1], near)
            if curve is not None:
                return curve.at(sizes, f"{layout}{'+bias' * (operation == 'addmm')}")
        raise _missing("products", dtype)

    def rows(self, operation: str, dtype: str, variant: str, sizes: Sizes, base_bytes: int) -> Estimate:
        """The time of an operation whose bytes are `base_bytes` per product of its sizes."""
        key = (operation, dtype, variant)
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
        key = (operation, dtype, "")
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
        key = (operation, dtype, variant)
        if key not in self._curves:
            series = self._series.get(key)
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

    def _product_curve(self, operation: str, pool: str, alignment: int) -> Curve | None:
        """All products of a dtype whose rows are aligned alike: libraries have other kernels for each alignment."""
        key = (operation, pool, str(alignment))
        if key not in self._product_curves:
            chosen = [
                (one, row)
                for (measured, dtype, layout), listed in self._series.items()
                if _pool(dtype) == pool and measured in (("bmm",) if operation == "bmm" else ("mm", "addmm"))
                for one in listed
                for row in one.rows
                if product_alignment(dtype, layout, row[:-1]) == alignment
            ]
            kinds = [f"{one.variant}{'+bias' * (one.operation == 'addmm')}" for one, _ in chosen]
            base = _ProductBase(_KERNELS[pool], self._peak(pool), self.bandwidth, self.calibration.multiprocessors)
            sizes, times = [row[:-1] for _, row in chosen], [row[-1] for _, row in chosen]
            is_enough = len(chosen) >= _LEAST_ROWS
            self._product_curves[key] = Curve(sizes, times, base, kinds) if is_enough else None
        return self._product_curves[key]

    def _curve(self, key: tuple[str, str, str], base: Callable[[Sizes], float]) -> Curve | None:
        rows = [row for one in self._series.get(key, []) for row in one.rows]
        return Curve([row[:-1] for row in rows], [row[-1] for row in rows], base) if rows else None

    def _peak(self, pool: str) -> float:
        """The most FLOP/s that any measured product reached."""
        if pool not in self._peaks:
            reached = [
                2 * math.prod(row[:-1]) / row[-1] * 1e9
                for (operation, dtype, _), series in self._series.items()
                if operation in ("mm", "addmm") and _pool(dtype) == pool
                for one in series
                for row in one.rows
            ]
            self._peaks[pool] = max(reached, default=1e14)
        return self._peaks[pool]

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


def product_alignment(dtype: str, layout: str, sizes: Sizes) -> int:
    """The bytes that all rows start at multiples of, as they lie in memory; 16 are enough for any kernel."""
    m, n, k = sizes[-3:]
    itemsize = 4 if "32" in dtype else 2
    stored = (m if layout[0] == "t" else k, k if layout[1] == "t" else n, n)
    return min(_GOOD_ALIGNMENT, *(columns * itemsize & -(columns * itemsize) for columns in stored))


def _pool(dtype: str) -> str:
    """Both kinds of half precision run at the same speed."""
    return "half" if dtype in ("bf16", "fp16") else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """The kernels of a library for one precision: rows and columns of their tiles, with the share of the peak that each
    reaches. `fill` is how much longer the inner dimension seems because a tile has to start and end."""

    tiles: tuple[tuple[int, int, float], ...]
    fill: int
    fixed_ns: float
    split_traffic: float  # of partial results, if tiles share the inner dimension
    itemsize: int


# Fitted to the products of an H200 with cuBLAS 13.1. The tiles are those in the names of its kernels.
_KERNELS = {
    "half": _Kernels(
        tiles=(
            *((128, 256, 1.0), (192, 128, 1.0), (128, 192, 1.0), (128, 160, 1.0), (128, 128, 0.94), (64, 256, 1.0)),
            *((64, 128, 0.88), (64, 64, 0.66)),
        ),
        fill=183,
        fixed_ns=3600.0,
        split_traffic=0.0,
        itemsize=2,
    ),
    "tf32": _Kernels(
        tiles=(
            *((128, 256, 1.0), (256, 128, 1.0), (192, 128, 1.0), (128, 192, 1.0), (128, 128, 0.91)),
            *((64, 128, 0.58), (64, 64, 0.51)),
        ),
        fill=210,
        fixed_ns=3900.0,
        split_traffic=1.5,
        itemsize=4,
    ),
    "fp32": _Kernels(
        tiles=(
            *((128, 256, 0.95), (256, 128, 0.97), (128, 128, 0.91), (64, 128, 0.85), (128, 64, 0.87)),
            *((64, 64, 0.79), (32, 128, 0.62)),
        ),
        fill=37,
        fixed_ns=3500.0,
        split_traffic=2.7,
        itemsize=4,
    ),
}
_ALIGNMENTS = (16, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class _ProductBase:
    """The time of a product in whole waves of the best tile, or of moving its bytes."""

    kernels: _Kernels
    peak: float
    bandwidth: float
    multiprocessors: int

    def __call__(self, sizes: Sizes) -> float:
        batch = sizes[0] if len(sizes) == 4 else 1
        m, n, k = sizes[-3:]
        per_tile = self.peak / self.multiprocessors
        moved_ns = batch * (m * k + k * n + m * n) * self.kernels.itemsize / self.bandwidth * 1e9
        best_ns = math.inf
        for rows, columns, share in self.kernels.tiles:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            for split in _SPLITS:
                if split > 1 and (tiles * split > 2 * self.multiprocessors or k < 128 * split):
                    break
                waves = math.ceil(tiles * split / self.multiprocessors)
                took_ns = waves * 2 * rows * columns * (k / split + self.kernels.fill) / (per_tile * share) * 1e9
                if split > 1:
                    partial_bytes = 4 * split * m * n * batch
                    took_ns += self.kernels.split_traffic * partial_bytes / self.bandwidth * 1e9 + self.kernels.fixed_ns
                best_ns = min(best_ns, took_ns)
        return max(best_ns, moved_ns) + self.kernels.fixed_ns


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
