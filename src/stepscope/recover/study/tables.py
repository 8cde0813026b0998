"""Sensitivities as a table, with a row for each part and its counters, and as figures over each field; what reveals
which field; and principal components."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recover.study.design import Design, FieldUnit, Matrix
from stepscope.recover.study.elasticity import NOTHING, Elasticities, Elasticity, make_points, ordered_rows
from stepscope.recover.study.runs import COUNTER_LABELS, LOOSE, PartCounter

_WIDE = 0.05  # and ranges up to this are one number
_FEWEST_POINTS = 3
_MOST_SERIES = 8


def sensitivity_table(design: Design, sensitivity: Mapping[PartCounter, Elasticities]) -> Table:
    """Counters of a part that follow the fields alike are one row. Those that follow none are in the notes."""
    units = design.seen
    merged: dict[tuple[str | None, ...], list[PartCounter]] = {}
    still = 0
    for row, found in sensitivity.items():
        if not found:
            continue
        if all(one.most < NOTHING for one in found.values()):
            still += 1
            continue
        shown = (row.part, *(_show(found.get(unit)) for unit in units), _describe_shape(found))
        merged.setdefault(shown, []).append(row)
    rows: list[tuple[Cell, ...]] = []
    for (part, *texts), ones in merged.items():
        first = sensitivity[ones[0]]
        numbers = [number for unit in units for number in _numbers(first.get(unit))]
        rows.append((part, ", ".join(COUNTER_LABELS[row.counter] for row in ones), *texts, *numbers))
    return Table(
        title="Sensitivity: the power of each field that a counter goes with",
        columns=(
            Column(key="part", label="kernels"),
            Column(key="counters", label="counters"),
            *(Column(key=f"{unit.key}_shown", label=unit.label) for unit in units),
            Column(key="shape", label="where it does not go smoothly"),
            *(
                Column(key=f"{unit.key}{ending}", label=f"{unit.label}{label}", kind="number", detail=True)
                for unit in units
                for ending, label in (("", ""), ("_low", ", lowest"), ("_high", ", highest"))
            ),
        ),
        rows=tuple(rows),
        notes=(*_notes(still), *design.notes),
    )


def _notes(still: int) -> list[str]:
    notes = [
        "2.00: doubling the field makes it four times as much; a range: from each value of the field to the next",
        "figures of parts are of one layer, in one pass; times and DRAM bytes depend on caches and clocks as well",
    ]
    return notes + ([f"{still} more counters follow none of these fields"] if still else [])


def _show(elasticity: Elasticity | None) -> str | None:
    if elasticity is None:
        return None
    if elasticity.high - elasticity.low <= _WIDE:
        return f"{elasticity.value:z.2f}"
    if elasticity.is_fitted:
        return f"{elasticity.value:z.2f} ± {elasticity.high - elasticity.value:.2f}"
    return f"{elasticity.low:z.2f} to {elasticity.high:z.2f}"


def _numbers(elasticity: Elasticity | None) -> tuple[float | None, float | None, float | None]:
    if elasticity is None:
        return None, None, None
    return elasticity.value, elasticity.low, elasticity.high


def _describe_shape(found: Elasticities) -> str:
    said = []
    for unit, one in found.items():
        said += [f"{unit.label} {start} to {end}: the same" for start, end in one.flats]
        if one.switches:
            said.append(f"{unit.label} {', '.join(map(str, one.switches))}: another kernel")
    return "; ".join(said)


# --- Figures


def make_figures(design: Design) -> list[Figure]:
    """For each field with three values or more in runs that differ in it alone: each part's leading counter over it."""
    figures = []
    for unit in design.seen:
        groups = design.groups(unit) if unit.method == "pairs" else []
        longest = max(groups, key=lambda group: len({unit.value(run) for run in group}), default=())
        if len({unit.value(run) for run in longest}) < _FEWEST_POINTS:
            continue
        points: list[Point] = []
        for row in _leading_rows(design):
            ones = make_points(longest, unit, row)
            if len(ones) < _FEWEST_POINTS:
                continue
            series = f"{row.part}: {COUNTER_LABELS[row.counter]}"
            points += [Point(panel="", series=series, x=one.at, y=one.counter / ones[0].counter) for one in ones]
        figures.append(
            Figure(
                title=f"Counters over {unit.label}",
                subtitle="each beside its first value, of one layer",
                x=Axis(label=unit.label, log=True),
                y=Axis(label="times the first", log=True),
                points=tuple(points),
                series_label="kernels",
            )
        )
    return figures


def _leading_rows(design: Design) -> list[PartCounter]:
    """Of each part its first counter that is exact."""
    first: dict[str, PartCounter] = {}
    for row in ordered_rows(design.runs):
        if row.counter not in LOOSE:
            first.setdefault(row.part, row)
    return list(first.values())[:_MOST_SERIES]


# --- What reveals what
#
# For each field the counter that follows it and nothing else, or the ratio of two that does.
#
# Most counters are products of several fields, as tokens times width. Divided by another counter with the same unwanted
# powers, one field is left over: the head's operations divided by a norm's bytes leave the vocabulary.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """A counter, or one over another, with what it follows."""

    row: PartCounter
    over: PartCounter | None = None
    found: Elasticities

    def others(self, unit: FieldUnit) -> list[FieldUnit]:
        return [other for other, one in self.found.items() if other != unit and one.most >= NOTHING]

    def power(self, unit: FieldUnit) -> float:
        return round(abs(self.found[unit].value), 2)

    def purity(self, unit: FieldUnit) -> float:
        """How much of what it follows is this field."""
        return round(abs(self.found[unit].value) / sum(abs(one.value) for one in self.found.values()), 2)


def reveals_table(design: Design, sensitivity: Mapping[PartCounter, Elasticities]) -> Table:
    """Among counters that follow a field alone the one that follows it most; else such a ratio of two; else the counter
    that follows other fields least."""
    counters = [_Sign(row=row, found=found) for row, found in sensitivity.items() if row.counter not in LOOSE]
    ratios = _make_ratios([sign for sign in counters if len(sign.found) == len(design.seen)])
    return Table(
        title="What reveals what",
        columns=(
            Column(key="field", label="field"),
            Column(key="part", label="kernels"),
            Column(key="counter", label="counter"),
            Column(key="over", label="divided by"),
            Column(key="power", label="power"),
            Column(key="others", label="goes with, besides"),
            Column(key="alone", label="counters of it alone", kind="count"),
        ),
        rows=tuple(_reveal(unit, design, counters, ratios) for unit in design.units),
        notes=("among the fields that varied; times and DRAM bytes are left out",),
    )


def _make_ratios(signs: list[_Sign]) -> list[_Sign]:
    """Of counters that differ in what they follow, one of each kind."""
    kinds: dict[tuple[float, ...], _Sign] = {}
    for sign in signs:
        kinds.setdefault(tuple(round(one.value, 2) for one in sign.found.values()), sign)
    return [
        _Sign(
            row=above.row,
            over=below.row,
            found={unit: _divide(one, below.found[unit]) for unit, one in above.found.items()},
        )
        for above, below in itertools.permutations(kinds.values(), 2)
    ]


def _divide(above: Elasticity, below: Elasticity) -> Elasticity:
    return Elasticity(
        value=above.value - below.value,
        low=above.low - below.high,
        high=above.high - below.low,
        is_fitted=above.is_fitted,
    )


def _reveal(unit: FieldUnit, design: Design, counters: list[_Sign], ratios: list[_Sign]) -> tuple[Cell, ...]:
    if unit.method is None:
        return unit.label, None, None, None, None, "cannot be told in these runs", None
    followers = [sign for sign in counters if unit in sign.found and sign.power(unit) >= NOTHING]
    if not followers:
        return unit.label, None, None, None, None, "no counter follows it", 0
    alone = [sign for sign in followers if len(sign.found) == len(design.seen) and not sign.others(unit)]
    divided = [sign for sign in ratios if sign.found[unit].value >= NOTHING and not sign.others(unit)]
    if alone or divided:
        best = max(alone or divided, key=lambda sign: sign.power(unit))
    else:
        best = max(followers, key=lambda sign: (len(sign.found), sign.purity(unit), sign.power(unit)))
    others = [f"{other.label} {best.found[other].value:z.2f}" for other in best.others(unit)]
    others += [f"{other.label}, unknown" for other in design.seen if other not in best.found]
    return (
        unit.label,
        best.row.part,
        COUNTER_LABELS[best.row.counter],
        f"{best.over.part}: {COUNTER_LABELS[best.over.counter]}" if best.over else None,
        f"{best.found[unit].value:z.2f}",
        "; ".join(others) or "nothing",
        len(alone),
    )


# --- Principal components
#
# In how many directions do the counters move at all, and along which fields? Counters are standardised logarithms, so
# that a counter in the billions weighs as much as one in the thousands. Those take part that every run has and that
# changed. A component that goes along with a field is not for that reason caused by it: fields that vary together in
# the runs share their components.

_MOST_COMPONENTS = 4
_ENOUGH = 0.999  # of the variance: components beyond that are noise
_STILL = 1e-3  # standard deviation of a logarithm below which a counter did not move
_TOP = 4


def components_tables(design: Design) -> list[Table]:
    """Two tables, or none where no two counters are there and changed in all runs."""
    rows, matrix = _standardise(design)
    if len(rows) < 2:
        return []
    scores, values, loadings = _decompose(matrix)
    shares = values**2 / np.sum(values**2)
    count = min(_MOST_COMPONENTS, int(np.searchsorted(np.cumsum(shares), _ENOUGH)) + 1, len(shares))
    return [
        _summarise(design, scores[:, :count], shares[:count], rows, loadings[:count]),
        _list_loadings(rows, loadings[:count]),
    ]


def _standardise(design: Design) -> tuple[list[PartCounter], Matrix]:
    rows = [
        row
        for row in ordered_rows(design.runs)
        if row.counter not in LOOSE and all(row in run.measured for run in design.runs)
    ]
    logs = np.array([[np.log(run.measured[row].value) for row in rows] for run in design.runs], dtype=np.float64)
    logs -= logs.mean(axis=0)
    spread = logs.std(axis=0)
    moved = np.flatnonzero(spread > _STILL)
    return [rows[i] for i in moved], logs[:, moved] / spread[moved]


def _decompose(matrix: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Scores, singular values and loadings. Signs are free: the largest loading of each is made positive."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    # Of loadings that are equal but for rounding the first decides, on every machine.
    leading = np.argmax(np.round(np.abs(right), 6), axis=1)
    signs = np.sign(right[np.arange(len(right)), leading])
    return left * values * signs, values, right * signs[:, None]


def _summarise(design: Design, scores: Matrix, shares: Matrix, rows: list[PartCounter], loadings: Matrix) -> Table:
    units = design.seen
    cells: list[tuple[Cell, ...]] = []
    for i, share in enumerate(shares):
        correlations = [_correlate(scores[:, i], [unit.value(run) for run in design.runs]) for unit in units]
        texts = [f"{one:z.2f}" for one in correlations]
        leading = sorted(range(len(rows)), key=lambda j: (-round(abs(loadings[i, j]), 6), j))[:_TOP]
        shown = "; ".join(f"{rows[j].part}: {COUNTER_LABELS[rows[j].counter]}" for j in leading)
        cells.append((i + 1, *_plain(np.array([share, np.sum(shares[: i + 1])])), *texts, shown, *correlations))
    return Table(
        title="Principal components of the counters",
        columns=(
            Column(key="component", label="component", kind="count"),
            Column(key="share", label="of the variance", kind="share"),
            Column(key="cumulative", label="with those before", kind="share"),
            *(Column(key=f"{unit.key}_shown", label=f"with {unit.label}") for unit in units),
            Column(key="leading", label="largest loadings"),
            *(Column(key=unit.key, label=f"with {unit.label}", kind="number", detail=True) for unit in units),
        ),
        rows=tuple(cells),
        notes=(
            f"standardised logarithms of {len(rows)} counters that all {len(design.runs)} runs have; "
            f"times and DRAM bytes are not among them",
            "under a field: the correlation of the component with its logarithm, from -1 to 1",
        ),
    )


def _correlate(scores: Matrix, values: list[int]) -> float:
    return round(float(np.corrcoef(scores, np.log(values))[0, 1]), 6) + 0.0


def _list_loadings(rows: list[PartCounter], loadings: Matrix) -> Table:
    """Counters of a part that have the same loadings, in two decimals, are one row."""
    merged: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        merged.setdefault((row.part, *(f"{one:z.2f}" for one in loadings[:, i])), []).append(i)
    numbers = range(1, len(loadings) + 1)
    return Table(
        title="Loadings of the components",
        columns=(
            Column(key="part", label="kernels"),
            Column(key="counters", label="counters"),
            *(Column(key=f"component_{i}_shown", label=f"component {i}") for i in numbers),
            *(Column(key=f"component_{i}", label=f"component {i}", kind="number", detail=True) for i in numbers),
        ),
        rows=tuple(
            (part, ", ".join(COUNTER_LABELS[rows[i].counter] for i in ones), *shown, *_plain(loadings[:, ones[0]]))
            for (part, *shown), ones in merged.items()
        ),
        notes=("how much a counter weighs in a component; of equal sign they rise together",),
    )


def _plain(values: Matrix) -> list[float]:
    """Digits that are the same on every machine."""
    return [round(float(value), 6) + 0.0 for value in values]
