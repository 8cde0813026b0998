"""Principal components of the counters: in how many directions do they move at all, and along which fields?

Counters are standardised logarithms, so that a counter in the billions weighs as much as one in the thousands. Those
take part that every run has and that changed. A component that goes along with a field is not for that reason caused by
it: fields that vary together in the runs share their components.
"""

import numpy as np

from stepscope.findings import Cell, Column, Table
from stepscope.recover.study.design import Design, Matrix
from stepscope.recover.study.elasticity import ordered_rows
from stepscope.recover.study.runs import COUNTER_LABELS, LOOSE, PartCounter

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
