"""What reveals what: for each field the counter that follows it and nothing else, or the ratio of two that does.

Most counters are products of several fields, as tokens times width. Divided by another counter with the same unwanted
powers, one field is left over: the head's operations divided by a norm's bytes leave the vocabulary.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from stepscope.findings import Cell, Column, Table
from stepscope.recover.study.design import Design, FieldUnit
from stepscope.recover.study.elasticity import NOTHING, Elasticities, Elasticity
from stepscope.recover.study.runs import COUNTER_LABELS, LOOSE, PartCounter


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
