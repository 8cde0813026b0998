"""How a counter depends on a field: its elasticity, the exponent d log(counter) / d log(field).

Two runs that differ in one field give it directly. More runs give one from each value to the next, and their range
shows what a single number would hide: with tiles a counter stays constant and then jumps, and with a causal mask it
approaches its exponent slowly. Without such runs, a regression over all runs is used.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.recover.study.design import FEWEST_SPARE, Design, FieldUnit, count_spare, design_matrix, find_told_apart
from stepscope.recover.study.runs import COUNTERS, PARTS, MeasuredCounter, PartCounter, StudiedRun

_SAME = 0.002  # relative change below which a counter counts as constant: effects of the data are smaller
NOTHING = 0.05  # exponents below this count as 0
_MOST_ERROR = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """`low` and `high`: the range between neighboring values of the field, or one standard error of a regression."""

    value: float
    low: float
    high: float
    flats: tuple[tuple[int, int], ...] = ()  # ranges of the field in which the counter is constant, if it is not always
    switches: tuple[int, ...] = ()  # values of the field at which the kernel changes
    is_fitted: bool = False  # from a regression

    @property
    def most(self) -> float:
        """The largest absolute exponent in the range."""
        return max(abs(self.low), abs(self.high))


Elasticities = dict[FieldUnit, Elasticity]


def make_sensitivity(design: Design) -> dict[PartCounter, Elasticities]:
    """Return the elasticities by row, in the order of the parts. Units without an exponent are left out."""
    return {row: _measure_row(design, row) for row in ordered_rows(design.runs)}


def ordered_rows(runs: Sequence[StudiedRun]) -> list[PartCounter]:
    """Return GEMMs and attention in the order of a layer, then other parts as they appear; counters in their order."""
    parts = [*PARTS, *dict.fromkeys(row.part for run in runs for row in run.measured if row.part not in PARTS)]
    place = {part: i for i, part in enumerate(parts)}
    rows = {row for run in runs for row in run.measured}
    return sorted(rows, key=lambda row: (place[row.part], COUNTERS.index(row.counter)))


def _measure_row(design: Design, row: PartCounter) -> Elasticities:
    found: Elasticities = {}
    for unit in design.seen:
        if unit.method == "pairs":
            elasticity = compare_groups([make_points(group, unit, row) for group in design.groups(unit)])
        else:
            elasticity = _regress(design, unit, row)
        if elasticity is not None:
            found[unit] = elasticity
    return found


# --- Runs that differ in one field


@dataclass(frozen=True, slots=True)
class CounterPoint:
    """A counter at one value of a field: the geometric mean of runs with the same settings."""

    at: int
    counter: float
    kernels: tuple[str, ...] = ()


def make_points(group: Sequence[StudiedRun], unit: FieldUnit, row: PartCounter) -> list[CounterPoint]:
    there = [(unit.value(run), run.measured[row]) for run in group if row in run.measured]
    points = []
    for at, ones in itertools.groupby(there, key=lambda pair: pair[0]):
        points.append(_middle(at, [measured for _, measured in ones]))
    return points


def _middle(at: int, measured: Sequence[MeasuredCounter]) -> CounterPoint:
    mean = math.prod(one.value ** (1 / len(measured)) for one in measured)
    return CounterPoint(at, mean, measured[0].kernels)


def compare_groups(groups: Sequence[Sequence[CounterPoint]]) -> Elasticity | None:
    """Return the least-squares slope over all groups, each with its own offset. Points of a group must be sorted."""
    steps = [step for points in groups for step in itertools.pairwise(points)]
    if not steps:
        return None
    slopes = [_slope(first, second) for first, second in steps]
    above = below = 0.0
    for points in groups:
        x = np.log([point.at for point in points] or [1])
        y = np.log([point.counter for point in points] or [1])
        above += float(np.sum((x - x.mean()) * (y - y.mean())))
        below += float(np.sum((x - x.mean()) ** 2))
    is_flat = all(_stood_still(*step) for step in steps)
    return Elasticity(
        value=above / below,
        low=min(slopes),
        high=max(slopes),
        flats=() if is_flat else _stretches([step for step in steps if _stood_still(*step)]),
        switches=tuple(sorted({second.at for first, second in steps if first.kernels != second.kernels})),
    )


def _slope(first: CounterPoint, second: CounterPoint) -> float:
    return math.log(second.counter / first.counter) / math.log(second.at / first.at)


def _stood_still(first: CounterPoint, second: CounterPoint) -> bool:
    return abs(second.counter / first.counter - 1) <= _SAME


def _stretches(steps: Sequence[tuple[CounterPoint, CounterPoint]]) -> tuple[tuple[int, int], ...]:
    """Join neighboring steps into ranges."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted({(first.at, second.at) for first, second in steps}):
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


# --- All runs at once


def _regress(design: Design, unit: FieldUnit, row: PartCounter) -> Elasticity | None:
    """Fit the runs that have this counter. Return None if they do not determine the exponent."""
    runs = [run for run in design.runs if row in run.measured]
    units = [one for one in design.units if len({one.value(run) for run in runs}) > 1]
    if unit not in units:
        return None
    matrix = design_matrix(units, runs)
    place, spare = units.index(unit), count_spare(matrix)
    if spare < FEWEST_SPARE or not find_told_apart(matrix, len(units))[place]:
        return None
    y = np.log([run.measured[row].value for run in runs])
    inverse = np.linalg.pinv(matrix)
    fitted = inverse @ y
    variance = float(np.sum((y - matrix @ fitted) ** 2)) / spare
    value, error = float(fitted[place]), math.sqrt(variance * float(np.sum(inverse[place] ** 2)))
    if error > _MOST_ERROR:
        return None
    return Elasticity(value=value, low=value - error, high=value + error, is_fitted=True)
