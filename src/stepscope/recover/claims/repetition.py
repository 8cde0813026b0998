"""Copied kernels: measured noise that repeats.

Durations, gaps and memory traffic differ between launches of the same work, and agree only by chance. How often that
happens depends on the kernel and on the clock, so it is estimated from the file itself. Two tests use it:

- Runs: consecutive kernels with exactly the values of the same kernels elsewhere. The chance is the product of the
  chances of its kernels. Every distance between the two is tried, so it does not matter where a copy was inserted, how
  long it is, or in which order layers were copied. One metric is enough, so it does not help to change the others. A
  run continues after kernels that differ at this distance: compilers fuse other operations in some layers.
- Twins: launches that agree in every metric with another launch of the same kernel, wherever it is. They also show
  copies that were put together from kernels of different layers.

Copies must not make themselves look likely: kernels that continue a run do not count towards the chance of the first
test, and twins not towards that of the second. Serial dependence was the reason to leave out metrics and clocks with
few distinct values: in genuine recordings with times rounded to 1 µs, runs of 297 equal gaps occur.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepscope.recover.evidence.layout import Complaint
from stepscope.recover.facts import Sighting
from stepscope.recover.shape import Flags, Ints

Floats = npt.NDArray[np.float64]
DURATION, _GAP = "durations", "gaps between kernels"
_WORDS = {"dram": "memory traffic", "lts": "L2 cache traffic"}
_CHANCE = 1e-6  # probability of a coincidence, below which kernels count as copies
_COARSEST_NS = 100  # clock resolution above which times repeat by chance; that of a GPU is 32 ns
_ROUNDING_NS = 4  # how much equal times differ after ticks were converted to nanoseconds
_SHORTEST_GAP_NS = 5_000  # shorter ones belong to kernels that waited in the queue and repeat by chance
_SHORTEST_RUN = 4
_CONTINUED = 2  # kernels that agree before one that continues a run
# The chance that launches agree, before any were compared, and how many pairs of launches that is worth.
_USUAL_CHANCE, _USUAL_PAIRS = 0.3, 5
_PAIRS_OF_ALL = 4  # how many pairs of a kernel's own launches the average of all kernels is worth
_FEWEST_METRICS = 3  # for twins
_MOST_TWINS = 3  # times as many as independent metrics would give; the most measured was 16 with 0.1 expected
_UNEXPECTED_TWINS = 0.5
# The work is quadratic. Every pass must have the claimed layers, so it is enough to examine some stretches.
_STRETCH_KERNELS, _MOST_STRETCHES = 4096, 4
_MOST_SHOWN = 8


def find_copies(sightings: Sequence[Sighting]) -> Iterator[Complaint]:
    for first in _choose_stretches(len(sightings)):
        stretch = sightings[first : first + _STRETCH_KERNELS]
        keys = _label((one.name.name, one.grid, one.block) for one in stretch)
        metrics = _measure(stretch)
        found = list(_find_runs(stretch, keys, metrics))
        yield from found or _find_twins(stretch, keys, metrics)


def find_step_ns(sightings: Sequence[Sighting]) -> int:
    """Return the clock's resolution: the smallest difference between two durations, or between two such differences if
    there are few durations; 0 if all are equal."""
    steps = _differ(one.duration_ns for one in sightings)
    usable = [step for step in (*steps, *_differ(steps)) if step > _ROUNDING_NS]
    return min(usable, default=min(steps, default=0))


def _differ(values: Iterable[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(sorted(set(values)))]


def has_noise(sightings: Sequence[Sighting]) -> bool:
    """Whether copies can be detected: there are counters, or times from a fine clock."""
    return find_step_ns(sightings) < _COARSEST_NS or all(one.noise for one in sightings)


def _choose_stretches(kernels: int) -> list[int]:
    """Return where the stretches start, evenly distributed."""
    number = min(_MOST_STRETCHES, math.ceil(kernels / _STRETCH_KERNELS))
    last = max(0, kernels - _STRETCH_KERNELS)
    return [round(last * one / max(1, number - 1)) for one in range(number)]


def _label(values: Iterable[Hashable]) -> Ints:
    """Return a number for each value that is the same for equal values."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    """One number per kernel, equal if the values are. `is_informative`: equal values are improbable."""

    name: str
    values: Ints
    is_informative: Flags


def _measure(sightings: Sequence[Sighting]) -> list[_Metric]:
    everywhere = np.ones(len(sightings), np.bool_)
    metrics = []
    step = find_step_ns(sightings)
    if step < _COARSEST_NS:
        durations = [one.duration_ns for one in sightings]
        metrics.append(_Metric(name=DURATION, values=_round(durations, step), is_informative=everywhere))
        if gaps := _find_gaps(sightings):
            is_long = np.array(gaps) > _SHORTEST_GAP_NS
            metrics.append(_Metric(name=_GAP, values=_round(gaps, step), is_informative=is_long))
    names = set.intersection(*(set(one.noise) for one in sightings))
    for name in sorted(names):
        # A kernel whose data are in the cache causes no traffic at all, every time.
        values = np.array([one.noise[name] for one in sightings])
        metrics.append(_Metric(name=name, values=_label(values.tolist()), is_informative=values > 0))
    return metrics


def _find_gaps(sightings: Sequence[Sighting]) -> list[int]:
    starts = [one.start_ns for one in sightings if one.start_ns is not None]
    if len(starts) < len(sightings):
        return []
    pairs = itertools.pairwise(zip(starts, sightings, strict=True))
    return [0, *(after - before - one.duration_ns for (before, one), (after, _) in pairs)]


def _round(times: Sequence[int], step: int) -> Ints:
    """Return a number for each time that is the same for equal times. Ticks that are far apart are recognized in spite
    of rounding."""
    if step <= 2 * _ROUNDING_NS:
        return np.array(times, np.int64)
    order = np.argsort(np.array(times), kind="stable")
    is_new = np.diff(np.array(times)[order], prepend=times[order[0]]) > _ROUNDING_NS
    numbers = np.empty(len(times), np.int64)
    numbers[order] = np.cumsum(is_new)
    return numbers


def _compare(keys: Ints) -> Iterator[tuple[int, Flags]]:
    """Yield every distance between launches of the same kernel, and which kernels have one at this distance."""
    for distance in range(1, len(keys)):
        same = keys[distance:] == keys[:-distance]
        if same.any():
            yield distance, same


# --- Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _RepeatedStretch:
    """Kernels that agree with those at a distance before them, not counting kernels that are not the same there."""

    metric: str
    start: int
    length: int
    distance: int
    surprise: float  # the negative logarithm of the chance


def _find_runs(sightings: Sequence[Sighting], keys: Ints, metrics: Sequence[_Metric]) -> Iterator[Complaint]:
    """Yield the runs of the metric that shows them best."""
    pairs = sum(int(same.sum()) for _, same in _compare(keys))
    limit = math.log(max(1, pairs * len(metrics)) / _CHANCE)
    found = [run for metric in metrics for run in _scan(keys, metric) if run.surprise > limit]
    best = max(found, key=lambda run: run.surprise, default=None)
    shown = sorted((run for run in found if best and run.metric == best.metric), key=lambda run: run.start)
    for run in shown[:_MOST_SHOWN]:
        first = sightings[run.start]
        yield Complaint(
            sighting=first,
            expected=f"{_describe([run.metric])} that vary between launches, as on every GPU",
            seen=f"{run.length} kernels in a row with exactly the values of those starting at "
            f"#{first.index - run.distance}",
        )


def _scan(keys: Ints, metric: _Metric) -> list[_RepeatedStretch]:
    kernels = int(keys.max()) + 1
    agreed, compared = np.zeros(kernels), np.zeros(kernels)
    runs: list[tuple[int, Ints]] = []
    for distance, same in _compare(keys):
        indices = np.flatnonzero(same) + distance
        those = keys[indices]
        equal = metric.values[indices] == metric.values[indices - distance]
        here = np.arange(len(equal))
        lengths = here - np.maximum.accumulate(np.where(equal, -1, here))
        continues = np.concatenate(([0], lengths[:-1])) >= _CONTINUED
        counted = ~continues & metric.is_informative[indices]
        compared += np.bincount(those[counted], minlength=kernels)
        agreed += np.bincount(those[counted & equal], minlength=kernels)
        is_last = np.append(lengths[1:] == 0, values=True)
        ends = np.flatnonzero(is_last & (lengths >= _SHORTEST_RUN))
        runs += [(distance, indices[end - lengths[end] + 1 : end + 1].copy()) for end in ends]
    surprise = -np.log(_estimate(agreed, compared))[keys] * metric.is_informative
    return [
        _RepeatedStretch(
            metric=metric.name,
            start=int(indices[0]),
            length=len(indices),
            distance=distance,
            surprise=float(surprise[indices].sum()),
        )
        for distance, indices in runs
    ]


def _estimate(agreed: Floats, compared: Floats) -> Floats:
    """Return the chance that two launches agree, for each kernel. Few launches say little: they count in addition to
    the average of all kernels."""
    usual = (agreed.sum(axis=0) + _USUAL_CHANCE * _USUAL_PAIRS) / (compared.sum(axis=0) + _USUAL_PAIRS)
    return np.asarray((agreed + _PAIRS_OF_ALL * usual) / (compared + _PAIRS_OF_ALL))


# --- Twins


def _find_twins(sightings: Sequence[Sighting], keys: Ints, metrics: Sequence[_Metric]) -> Iterator[Complaint]:
    """Compare all metrics, then all but the durations, which are the first that a forger changes. Gaps belong to the
    order, not to the kernel."""
    usable = [one for one in metrics if one.name != _GAP]
    for chosen in (usable, [one for one in usable if one.name != DURATION]):
        if len(chosen) < _FEWEST_METRICS:
            return
        indices, expected = _count_twins(keys, chosen)
        limit = _MOST_TWINS * expected + _UNEXPECTED_TWINS
        if _exceeds_by_chance(len(indices), limit) < _CHANCE:
            yield Complaint(
                sighting=sightings[indices[0]],
                expected=f"{_describe([one.name for one in chosen])} that vary between launches, as on every GPU",
                seen=f"{len(indices)} launches with exactly the values of an earlier launch of the same kernel",
            )
            return


def _count_twins(keys: Ints, metrics: Sequence[_Metric]) -> tuple[list[int], float]:
    """Return the launches that agree with an earlier one in every metric, and how many are expected by chance."""
    values = np.stack([one.values for one in metrics], axis=1)
    kernels = int(keys.max()) + 1
    agreed, compared = np.zeros((kernels, len(metrics))), np.zeros((kernels, 1))
    pairs, twins = np.zeros(kernels), set[int]()
    for distance, same in _compare(keys):
        equal = (values[distance:] == values[:-distance])[same]
        those = keys[distance:][same]
        is_twin = equal.all(axis=1)
        twins.update((np.flatnonzero(same)[is_twin] + distance).tolist())
        pairs += np.bincount(those, minlength=kernels)
        compared[:, 0] += np.bincount(those[~is_twin], minlength=kernels)
        for number in range(len(metrics)):
            agreed[:, number] += np.bincount(those[~is_twin & equal[:, number]], minlength=kernels)
    chance = _estimate(agreed, compared).prod(axis=1)
    return sorted(twins), float((pairs * chance).sum())


def _exceeds_by_chance(number: int, expected: float) -> float:
    """Return the probability of at least this many events of a Poisson distribution."""
    fewer = (math.exp(one * math.log(expected) - expected - math.lgamma(one + 1)) for one in range(number))
    return 1.0 - sum(fewer)


def _describe(metrics: Sequence[str]) -> str:
    """Return the metrics in words."""
    words = dict.fromkeys(_WORDS.get(name.partition("__")[0], name) for name in metrics)
    return " and ".join(words)
