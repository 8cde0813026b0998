"""Which fields the settings of a study can separate, before any counter is examined.

Fields with a constant ratio in all runs form one unit: their effects cannot be separated. Fields that changed together
in any other way have no exponent at all. Linear algebra finds these: over the logarithms of the settings, a unit is
separable if it is not a linear combination of the other units and of one factor per categorical setting (precision,
attention, ...).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.recover.study.runs import NUMBERS, StudiedRun

Matrix = NDArray[np.float64]
Method = Literal["pairs", "regression"]
_EXACT = 1e-9
FEWEST_SPARE = 2  # degrees of freedom: a regression through every point shows nothing
_DERIVED = "d_head"  # not an independent setting if it is d_model / num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUnit:
    """One field, or several that cannot be separated. `method` is None if the runs do not determine an exponent."""

    fields: tuple[str, ...]
    method: Method | None = None

    @property
    def label(self) -> str:
        return " and ".join(self.fields)

    @property
    def key(self) -> str:
        return "_and_".join(field.replace(" ", "_") for field in self.fields)

    def value(self, run: StudiedRun) -> int:
        return run.numbers[self.fields[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    runs: tuple[StudiedRun, ...]
    units: tuple[FieldUnit, ...]
    constant: tuple[str, ...]  # fields that never varied
    notes: tuple[str, ...] = ()

    @property
    def seen(self) -> tuple[FieldUnit, ...]:
        """The units with an exponent."""
        return tuple(unit for unit in self.units if unit.method)

    def groups(self, unit: FieldUnit) -> list[tuple[StudiedRun, ...]]:
        """Return groups of runs that differ only in this unit, sorted by its value. Each has at least two values."""
        others = [other for other in self.units if other != unit]
        return _groups(self.runs, unit, others)


def make_design(runs: Sequence[StudiedRun]) -> Design:
    known = [name for name in _names(runs) if all(name in run.numbers for run in runs)]
    varied = [name for name in known if len({run.numbers[name] for run in runs}) > 1]
    derived = _DERIVED in varied and all(_is_derived(run) for run in runs)
    units = _join([name for name in varied if not (derived and name == _DERIVED)], runs)
    matrix = design_matrix(units, runs)
    chosen = [
        FieldUnit(fields=unit.fields, method=_choose_method(runs, unit, units, matrix) if apart else None)
        for unit, apart in zip(units, find_told_apart(matrix, len(units)), strict=True)
    ]
    constant = tuple(name for name in known if name not in varied)
    notes = [*_describe_fields(runs, known, constant, derived=derived), *_describe_units(chosen, runs)]
    return Design(runs=tuple(runs), units=tuple(chosen), constant=constant, notes=(*notes, *_describe_runs(runs)))


def _names(runs: Sequence[StudiedRun]) -> list[str]:
    """Return the fields of all runs, the known ones first."""
    met = dict.fromkeys(name for run in runs for name in run.numbers)
    return [*(name for name in NUMBERS if name in met), *(name for name in met if name not in NUMBERS)]


def _is_derived(run: StudiedRun) -> bool:
    numbers = run.numbers
    return numbers[_DERIVED] * numbers.get("num_heads", 0) == numbers.get("d_model")


def _join(names: list[str], runs: Sequence[StudiedRun]) -> list[FieldUnit]:
    """Join fields that have the same ratio in every run."""
    ratios: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for name in names:
        first = runs[0].numbers[name]
        ratios[tuple(run.numbers[name] / first for run in runs)].append(name)
    return [FieldUnit(fields=tuple(fields)) for fields in ratios.values()]


def design_matrix(units: Sequence[FieldUnit], runs: Sequence[StudiedRun]) -> Matrix:
    """Return one row per run: the logarithm of each unit, 1, and a 0/1 column for each categorical value that the first
    run does not have."""
    first = set(runs[0].words.items())
    words = dict.fromkeys(word for run in runs for word in run.words.items() if word not in first)
    rows = [
        [
            *(math.log(unit.value(run)) for unit in units),
            1.0,
            *(float(run.words.get(name) == word) for name, word in words),
        ]
        for run in runs
    ]
    return np.array(rows, dtype=np.float64)


def find_told_apart(matrix: Matrix, count: int) -> list[bool]:
    """Return, for each of the first `count` columns, whether it is linearly independent of the other columns."""
    null = _null_space(matrix)
    return [bool(np.all(np.abs(null[:, i]) < _EXACT**0.5)) for i in range(count)]


def _null_space(matrix: Matrix) -> Matrix:
    scale = np.linalg.norm(matrix, axis=0)
    _, values, vectors = np.linalg.svd(matrix / np.where(scale > 0, scale, 1.0))
    rank = int(np.sum(values > _EXACT * values[0]))
    return vectors[rank:]


def _words(run: StudiedRun) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(run.words.items()))


def _groups(runs: Sequence[StudiedRun], unit: FieldUnit, others: Sequence[FieldUnit]) -> list[tuple[StudiedRun, ...]]:
    alike: dict[object, list[StudiedRun]] = defaultdict(list)
    for run in runs:
        alike[(tuple(other.value(run) for other in others if other.fields != unit.fields), _words(run))].append(run)
    ordered = [tuple(sorted(group, key=unit.value)) for group in alike.values()]
    return [group for group in ordered if unit.value(group[0]) != unit.value(group[-1])]


def _choose_method(
    runs: Sequence[StudiedRun], unit: FieldUnit, units: Sequence[FieldUnit], matrix: Matrix
) -> Method | None:
    if _groups(runs, unit, units):
        return "pairs"
    return "regression" if count_spare(matrix) >= FEWEST_SPARE else None


def count_spare(matrix: Matrix) -> int:
    """Return the degrees of freedom: how many more runs there are than unknowns."""
    unknowns = int(matrix.shape[1])
    return len(matrix) - (unknowns - len(_null_space(matrix)))


# --- Notes


def _describe_fields(
    runs: Sequence[StudiedRun], known: list[str], constant: tuple[str, ...], *, derived: bool
) -> list[str]:
    notes = []
    if constant:
        notes.append("the same in all runs: " + ", ".join(f"{name} {runs[0].numbers[name]}" for name in constant))
    if derived:
        notes.append("d_head is d_model / num_heads in every run, so it is not a separate field")
    if partly := [name for name in _names(runs) if name not in known]:
        notes.append(f"ignored because not every run has them: {', '.join(partly)}")
    return notes


def _describe_units(units: Sequence[FieldUnit], runs: Sequence[StudiedRun]) -> list[str]:
    notes = [
        f"{unit.label} have a constant ratio in all runs: they share one exponent"
        for unit in units
        if len(unit.fields) > 1
    ]
    matrix = design_matrix(units, runs)
    for group in _find_entangled(matrix, len(units)):
        names = [units[i].label for i in group]
        if len(names) > 1:
            notes.append(f"{', '.join(names)} changed together and cannot be separated: no exponents")
        else:
            changed = [name for name in runs[0].words if len({run.words.get(name) for run in runs}) > 1]
            notes.append(f"{names[0]} changed only together with {', '.join(changed)}: no exponent")
    apart = find_told_apart(matrix, len(units))
    if few := [unit.label for unit, one in zip(units, apart, strict=True) if one and not unit.method]:
        notes.append(f"{', '.join(few)}: too few runs for the number of unknowns: no exponents")
    for method, words in (
        ("pairs", "from runs that differ only in this field"),
        ("regression", "from a regression over all runs"),
    ):
        if labels := [unit.label for unit in units if unit.method == method]:
            notes.append(f"{', '.join(labels)}: {words}")
    if any(unit.method == "regression" for unit in units):
        notes.append(
            "the regression models each counter as a product of powers of the fields, times a factor per categorical "
            "setting"
        )
    return notes


def _find_entangled(matrix: Matrix, count: int) -> list[list[int]]:
    """Return groups of units that cannot be separated from each other."""
    null = _null_space(matrix)[:, :count]
    shared = np.abs(null.T @ null) > _EXACT
    left = [i for i, apart in enumerate(find_told_apart(matrix, count)) if not apart]
    groups = []
    while left:
        group, frontier = [], [left[0]]
        while frontier:
            i = frontier.pop()
            if i in group:
                continue
            group.append(i)
            frontier += [j for j in left if shared[i, j] and j not in group]
        left = [i for i in left if i not in group]
        groups.append(sorted(group))
    return groups


def _describe_runs(runs: Sequence[StudiedRun]) -> list[str]:
    """Return the notes of all runs, each once with the runs it applies to."""
    names: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        for note in run.notes:
            names[note].append(run.name)
    return [f"{', '.join(ones)}: {note}" for note, ones in names.items()]
