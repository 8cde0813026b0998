"""Counters that reveal each field: a counter that depends on it only, or a ratio of two."""

from typing import Any

from stepscope.recover.study.design import Design, FieldUnit
from stepscope.recover.study.elasticity import Elasticity
from stepscope.recover.study.runs import PartCounter
from stepscope.recover.study.tables import reveals_table
from tests.unit.recover.counted_runs import FFMA, GRID, HEAD, LAWS, find, follow, run_all, shape_of


def test_a_counter_of_one_field_is_preferred() -> None:
    laws = {**LAWS, "norm": lambda workload: {FFMA: 10 * shape_of(workload).d_model}}
    rows = {row["field"]: row for row in find(run_all(GRID, laws), "Counters that reveal")}
    assert (rows["d_model"]["part"], rows["d_model"]["counter"]) == ("norm before the layers", "ffma")
    assert (rows["d_model"]["power"], rows["d_model"]["others"], rows["d_model"]["alone"]) == ("1.00", "nothing", 4)
    assert rows["d_model"]["over"] is None


def test_otherwise_a_ratio_of_two_counters_is_used() -> None:
    rows = {row["field"]: row for row in find(run_all(GRID), "Counters that reveal")}
    assert (rows["vocab_size"]["part"], rows["vocab_size"]["over"]) == (HEAD, "norm before the layers: store bytes")
    assert (rows["vocab_size"]["power"], rows["vocab_size"]["others"]) == ("1.00", "nothing")
    assert (rows["context"]["part"], rows["context"]["over"]) == ("attention", "norm before the layers: store bytes")
    over = follow(run_all(GRID), "attention", "tensor ops")["context"] - 1
    assert (rows["context"]["power"], rows["context"]["alone"]) == (f"{over:.2f}", 0)
    # No counter depends on the batch without the context.
    assert (rows["batch"]["over"], rows["batch"]["others"]) == (None, "context 1.00")


CONTEXT, BATCH, WIDTH = (FieldUnit(fields=(name,), method="pairs") for name in ("context", "batch", "d_model"))


def exactly(power: float) -> Elasticity:
    return Elasticity(value=power, low=power, high=power)


def reveal(sensitivity: dict[PartCounter, dict[FieldUnit, Elasticity]], unit: FieldUnit) -> dict[str, Any]:
    design = Design(runs=(), units=(CONTEXT, BATCH, WIDTH), constant=())
    (row,) = (row for row in find([reveals_table(design, sensitivity)], "Counters") if row["field"] == unit.label)
    return row


def test_a_ratio_whose_other_exponents_may_not_cancel_is_ignored() -> None:
    square = {CONTEXT: exactly(2), BATCH: exactly(0), WIDTH: exactly(1)}
    stepped = {CONTEXT: exactly(0), BATCH: Elasticity(value=0.02, low=0, high=0.3), WIDTH: exactly(1)}
    row = reveal({PartCounter("a", "ffma"): square, PartCounter("b", "ffma"): stepped}, CONTEXT)
    assert (row["part"], row["over"], row["others"]) == ("a", None, "d_model 1.00")
    steady = {**stepped, BATCH: exactly(0)}
    row = reveal({PartCounter("b", "ffma"): steady, PartCounter("a", "ffma"): square}, CONTEXT)
    assert (row["part"], row["over"], row["power"], row["others"]) == ("a", "b: ffma", "2.00", "nothing")


def test_durations_and_partly_known_counters_reveal_nothing() -> None:
    alone = {CONTEXT: exactly(3), BATCH: exactly(0), WIDTH: exactly(0)}
    assert reveal({PartCounter("a", "duration_ns"): alone}, CONTEXT)["others"] == "no counter depends on it"
    row = reveal({PartCounter("a", "ffma"): {CONTEXT: exactly(3), WIDTH: exactly(0)}}, CONTEXT)
    assert (row["others"], row["alone"]) == ("batch unknown", 0)
