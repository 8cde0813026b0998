"""Sensitivities as a table, with a row for each part and its counters, and as figures over each field."""

from collections.abc import Mapping

from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recover.study.design import Design
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
