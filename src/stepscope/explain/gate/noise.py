"""How far two groups of runs may differ by chance.

Steps of one run hardly vary, but two runs of the same code do: clocks, memory layout, other processes and the machine
that CI happens to choose change every step of a run at once. An interval over the steps of one run ignores this, and
fails a build in four of ten cases when nothing changed (measured in `tests/unit/explain/test_gate_rates.py`). So a run
counts as a single sample, its median, and the noise is the variation between runs:

- With three runs or more on both sides together, the variance between the medians of each side is pooled, and the
  margin is that of Student's one-sided test at 99%. Few runs have few degrees of freedom, and the margin is wide.
- With one run on each side, the noise between runs is unknown. The margin then assumes that a run's median varies as
  much as single steps do, which is a guess, and is reported as one.
- Counts and the peak of PyTorch's allocator repeat exactly. A value outside the range of the baseline's runs changed.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.explain.statistics import student_t, summarise

FALSE_ALARMS = 0.01  # the rate at which unchanged code exceeds the margin
LEAST_STEPS = 3  # to say anything about the spread of steps
_CONFIDENCE: Literal["one-sided 99%"] = "one-sided 99%"
_MIDDLE_60 = 1.683  # the width of the middle 60% of a normal distribution, in standard deviations
_MEDIAN_ERROR = 1.2533  # the standard error of a median, relative to that of a mean

NoiseKind = Literal["between runs", "within runs", "exact", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """One value of a run, and the standard deviation of its single steps in the same unit."""

    value: float
    step_sd: float = 0.0
    num_steps: int = 0

    @classmethod
    def of_steps(cls, step_ns: Sequence[int]) -> "RunSample":
        """The median, and a standard deviation that ignores outliers."""
        steps = summarise([float(one) for one in step_ns])
        return cls(value=steps.median, step_sd=(steps.p80 - steps.p20) / _MIDDLE_60, num_steps=len(step_ns))

    @property
    def median_error(self) -> float:
        return _MEDIAN_ERROR * self.step_sd / math.sqrt(self.num_steps) if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """By how much the means of two groups may differ by chance, and the standard deviation between runs if it is
    known."""

    kind: NoiseKind
    margin: float = 0.0
    run_sd: float | None = None


UNKNOWN_NOISE = Noise(kind="unknown")


def measure_noise(base: Sequence[RunSample], new: Sequence[RunSample]) -> Noise:
    """Return the noise of the difference between the mean of `new` and that of `base`."""
    freedom = len(base) + len(new) - 2
    if freedom > 0:
        variance = (_squares(base) + _squares(new)) / freedom
        # Two runs can agree by chance, but their medians are not known better than their steps allow.
        floor = statistics.fmean(one.median_error**2 for one in (*base, *new))
        run_sd = math.sqrt(max(variance, floor))
        error = run_sd * math.sqrt(1 / len(base) + 1 / len(new))
        return Noise(kind="between runs", margin=student_t(freedom, _CONFIDENCE) * error, run_sd=run_sd)
    (one,), (other,) = base, new
    if min(one.num_steps, other.num_steps) < LEAST_STEPS:
        return UNKNOWN_NOISE
    spread = math.hypot(one.step_sd, other.step_sd)
    freedom = one.num_steps + other.num_steps - 2
    return Noise(kind="within runs", margin=student_t(freedom, _CONFIDENCE) * spread)


def is_outside(base: Sequence[RunSample], new: Sequence[RunSample]) -> bool:
    """Whether an exact value is not among those of the baseline's runs."""
    known = [one.value for one in base]
    return not min(known) <= statistics.fmean(one.value for one in new) <= max(known)


def _squares(samples: Sequence[RunSample]) -> float:
    mean = statistics.fmean(one.value for one in samples)
    return sum((one.value - mean) ** 2 for one in samples)
