"""The summary of a handful of timings.

Comparisons use the median, because one step that the operating system interrupted should not change a result. Mean and
standard deviation are kept because people quote them, and because their distance from the median shows outliers.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

# Student's t by degrees of freedom. Between two entries, the smaller one (wider interval) is used.
_TWO_SIDED_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
_TWO_SIDED_95 |= {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98, 1000: 1.962}
_ONE_SIDED_99 = {1: 31.821, 2: 6.965, 3: 4.541, 4: 3.747, 5: 3.365, 6: 3.143, 7: 2.998, 8: 2.896, 9: 2.821, 10: 2.764}
_ONE_SIDED_99 |= {12: 2.681, 15: 2.602, 20: 2.528, 30: 2.457, 60: 2.39, 120: 2.358, 1000: 2.33}
_STUDENT = {"two-sided 95%": _TWO_SIDED_95, "one-sided 99%": _ONE_SIDED_99}
_INTERRUPTED = 1.5  # mean relative to the median
Confidence = Literal["two-sided 95%", "one-sided 99%"]


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

    @property
    def is_interrupted(self) -> bool:
        """Whether a few samples took so long that the median says little about the rest: their excess is over a third
        of all the time."""
        return self.mean > _INTERRUPTED * self.median


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


def student_t(freedom: float, confidence: Confidence = "two-sided 95%") -> float:
    """Return how many standard errors a difference must have to be more than chance."""
    values = _STUDENT[confidence]
    return values[max(1, *(known for known in values if known <= freedom + 1e-9))]
