"""The tables and figures of a study: sensitivity by part and counter, what reveals each field, principal components."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recover.study.design import Design, FieldUnit, Matrix
from stepscope.recover.study.elasticity import NOTHING, Elasticities, Elasticity, make_points, ordered_rows
from stepscope.recover.study.runs import COUNTER_LABELS, LOOSE, PartCounter

_WIDE = 0.05  # narrower ranges are shown as one number
_FEWEST_POINTS = 3
_MOST_SERIES = 8


def sensitivity_table(design: Design, sensitivity: Mapping[PartCounter, Elasticities]) -> Table:
    """Return one row for all counters of a part with the same exponents. Counters that depend on no field are counted
    in a note."""
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
        title="Sensitivity: the exponent with which a counter depends on each field",
        columns=(
            Column(key="part", label="kernels"),
            Column(key="counters", label="counters"),
            *(Column(key=f"{unit.key}_shown", label=unit.label) for unit in units),
            Column(key="shape", label="not smooth"),
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
        "2.00: doubling the field makes the counter 4× larger; a range: between neighboring values of the field",
        "counters are per layer and pass; durations and DRAM bytes also depend on caches and clocks",
    ]
    return notes + ([f"counters that depend on none of these fields: {still}"] if still else [])


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
        said += [f"{unit.label} {start} to {end}: constant" for start, end in one.flats]
        if one.switches:
            said.append(f"{unit.label} {', '.join(map(str, one.switches))}: different kernel")
    return "; ".join(said)


# --- Figures


def make_figures(design: Design) -> list[Figure]:
    """Return a figure of each part's leading counter for each field with three or more values in runs that differ only
    in that field."""
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
                subtitle="relative to the first value, per layer",
                x=Axis(label=unit.label, log=True),
                y=Axis(label="relative to the first value", log=True),
                points=tuple(points),
                series_label="kernels",
            )
        )
    return figures


def _leading_rows(design: Design) -> list[PartCounter]:
    """Return the first exact counter of each part."""
    first: dict[str, PartCounter] = {}
    for row in ordered_rows(design.runs):
        if row.counter not in LOOSE:
            first.setdefault(row.part, row)
    return list(first.values())[:_MOST_SERIES]


# --- Counters that reveal each field
#
# For each field, the counter that depends on this field only, or a ratio of two counters that does.
#
# Most counters are products of several fields, such as tokens · d_model. Divided by another counter with the same
# unwanted powers, one field remains: the operations of the LM head divided by the bytes of a norm leave vocab_size.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """A counter, or the ratio of two, with its exponents."""

    row: PartCounter
    over: PartCounter | None = None
    found: Elasticities

    def others(self, unit: FieldUnit) -> list[FieldUnit]:
        return [other for other, one in self.found.items() if other != unit and one.most >= NOTHING]

    def power(self, unit: FieldUnit) -> float:
        return round(abs(self.found[unit].value), 2)

    def purity(self, unit: FieldUnit) -> float:
        """Return the share of this field in the sum of all exponents."""
        return round(abs(self.found[unit].value) / sum(abs(one.value) for one in self.found.values()), 2)


def reveals_table(design: Design, sensitivity: Mapping[PartCounter, Elasticities]) -> Table:
    """Return for each field the counter that depends on it only, with the largest exponent. If there is none, a ratio
    of two counters that does; otherwise the counter that depends least on other fields."""
    counters = [_Sign(row=row, found=found) for row, found in sensitivity.items() if row.counter not in LOOSE]
    ratios = _make_ratios([sign for sign in counters if len(sign.found) == len(design.seen)])
    return Table(
        title="Counters that reveal each field",
        columns=(
            Column(key="field", label="field"),
            Column(key="part", label="kernels"),
            Column(key="counter", label="counter"),
            Column(key="over", label="divided by"),
            Column(key="power", label="exponent"),
            Column(key="others", label="also depends on"),
            Column(key="alone", label="counters that depend only on it", kind="count"),
        ),
        rows=tuple(_reveal(unit, design, counters, ratios) for unit in design.units),
        notes=("only fields that varied; without durations and DRAM bytes",),
    )


def _make_ratios(signs: list[_Sign]) -> list[_Sign]:
    """Return the ratios of all pairs of counters with different exponents, using one counter for each set of them."""
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
        return unit.label, None, None, None, None, "these runs do not show it", None
    followers = [sign for sign in counters if unit in sign.found and sign.power(unit) >= NOTHING]
    if not followers:
        return unit.label, None, None, None, None, "no counter depends on it", 0
    alone = [sign for sign in followers if len(sign.found) == len(design.seen) and not sign.others(unit)]
    divided = [sign for sign in ratios if sign.found[unit].value >= NOTHING and not sign.others(unit)]
    if alone or divided:
        best = max(alone or divided, key=lambda sign: sign.power(unit))
    else:
        best = max(followers, key=lambda sign: (len(sign.found), sign.purity(unit), sign.power(unit)))
    others = [f"{other.label} {best.found[other].value:z.2f}" for other in best.others(unit)]
    others += [f"{other.label} unknown" for other in design.seen if other not in best.found]
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
# In how many directions do the counters vary, and with which fields? Counters are standardized logarithms, so that one
# in the billions has the same weight as one in the thousands. Only counters that every run has and that changed are
# used. Correlation is not causation: fields that vary together in the runs share their components.

_MOST_COMPONENTS = 4
_ENOUGH = 0.999  # of the variance: components beyond that are noise
_STILL = 1e-3  # standard deviation of the logarithm below which a counter counts as constant
_TOP = 4


def components_tables(design: Design) -> list[Table]:
    """Return two tables, or none if fewer than two counters exist in all runs and vary."""
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
    """Return scores, singular values and loadings. Signs are arbitrary: the largest loading of each is positive."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    # Rounded, so that among nearly equal loadings the first one decides on every machine.
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
            Column(key="share", label="variance", kind="share"),
            Column(key="cumulative", label="cumulative", kind="share"),
            *(Column(key=f"{unit.key}_shown", label=f"corr. with {unit.label}") for unit in units),
            Column(key="leading", label="largest loadings"),
            *(Column(key=unit.key, label=f"corr. with {unit.label}", kind="number", detail=True) for unit in units),
        ),
        rows=tuple(cells),
        notes=(
            f"standardized logarithms of {len(rows)} counters that all {len(design.runs)} runs have, "
            "without durations and DRAM bytes",
            "corr.: the correlation of the component with the logarithm of the field, from -1 to 1",
        ),
    )


def _correlate(scores: Matrix, values: list[int]) -> float:
    return round(float(np.corrcoef(scores, np.log(values))[0, 1]), 6) + 0.0


def _list_loadings(rows: list[PartCounter], loadings: Matrix) -> Table:
    """Return one row for all counters of a part with the same loadings to two decimals."""
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
        notes=("the weight of a counter in a component; counters with the same sign rise together",),
    )


def _plain(values: Matrix) -> list[float]:
    """Round to digits that are the same on every machine."""
    return [round(float(value), 6) + 0.0 for value in values]
