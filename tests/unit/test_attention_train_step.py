"""The table of bench/attention_train_step.py, and what it does with implementations that fail."""

from typing import Any

from attention_train_step import check, table


def started(eager: float, compiled: float) -> dict[str, Any]:
    return {"norms": {"eager": eager, "compiled": compiled}}


def make_row(**changes: Any) -> dict[str, Any]:
    rounds = {"sdpa": [[4.0, 5.0, 6.0], [50.0, 50.0, 50.0]], "flash": [[4.0, 4.0, 9.0], [25.0, 25.0, 25.0]]}
    row = {"size": "small", "context": 512, "mode": "eager", "rounds_ms": rounds, "failures": {}}
    return row | {"step_ms": {"sdpa": 28.0, "flash": 17.0}} | changes


def test_ratios_are_taken_within_rounds() -> None:
    line = table([make_row()]).splitlines()[-1]
    assert line == "| small | 512 | eager | 28.00 |  | 17.00 | 1.62 |  |"  # the median of 5/4 and 50/25


def test_a_failure_is_below_the_table() -> None:
    text = table([make_row(failures={"before": "ended before it was measured"})])
    assert text.endswith("small 512 eager, before: ended before it was measured")


def test_an_implementation_with_other_gradients_is_not_timed() -> None:
    ready = {"sdpa": started(1.0, 2.0), "flash": started(1.01, 2.3), "before": None}
    ended = {"before": "ended before it was measured"}
    assert check(ready, "eager") == ended
    assert check(ready, "compiled") == ended | {"flash": "gradients differ: norm 2.3, SDPA's 2"}
    assert "flash" in check({"sdpa": started(1.0, 2.0), "flash": started(float("nan"), 2.0)}, "eager")
