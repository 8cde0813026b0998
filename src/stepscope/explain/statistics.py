"""The summary of a handful of timings.

Comparisons use the median, because one step that the operating system interrupted should not change a result. Mean and
standard deviation are kept because people quote them, and because their distance from the median shows outliers.
"""

import math
import statistics
from collections.abc import Sequence

import msgspec


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """All in the unit of the samples. `sd` is the sample standard deviation, None for a single sample."""

    mean: float
    sd: float | None
    median: float
    p20: float
    p80: float
    min: float
    max: float

    @property
    def spread(self) -> float:
        """Width of the middle 60%, relative to the median."""
        return (self.p80 - self.p20) / self.median if self.median else 0.0


def summarise(samples: Sequence[float]) -> Statistics:
    if not samples:
        raise ValueError("expected at least one sample")
    ordered = sorted(samples)
    return Statistics(
        mean=statistics.fmean(ordered),
        sd=statistics.stdev(ordered) if len(ordered) > 1 else None,
        median=quantile(ordered, 0.5),
        p20=quantile(ordered, 0.2),
        p80=quantile(ordered, 0.8),
        min=ordered[0],
        max=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of an ascending sequence, interpolated linearly (NumPy's default)."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
