"""Tables of `stepscope optimise`: gains refer to the changes kept before, and every reason is said once."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.optimise_tables import (
    changes_table,
    check_table,
    list_notes,
    optimise_page,
    say_change,
    say_result,
    write_fast_command,
)
from stepscope.findings import Table
from stepscope.recording.rows.optimisation import read_optimisation, write_optimisation
from stepscope.render.terminal import render_page
from stepscope.spec import grid_from_flags
from tests.unit.optimisations import ATTENTION, CHANGES, change, optimisation


def cells(table: Table, key: str) -> list[Any]:
    at = [column.key for column in table.columns].index(key)
    return [row[at] for row in table.rows]


def test_a_gain_refers_to_the_changes_kept_before() -> None:
    table = changes_table(optimisation())
    assert cells(table, "before_ms") == [None, 60.0, None, 40.0, 30.0, 30.0]
    assert cells(table, "gain_ms") == [None, 20.0, None, 10.0, -3.0, 10.0]
    assert cells(table, "gain")[1] == pytest.approx(1 / 3)
    assert cells(table, "prepare_s")[1] == 12.3


def test_the_result_ends_with_the_last_kept_change() -> None:
    report = optimisation()
    assert (report.start_ns, report.final_ns) == (60_000_000, 30_000_000)
    assert say_result(report) == "60 ms per step before, 30 ms after: 2× faster, 2 of 5 changes kept."


def test_nothing_kept_is_said() -> None:
    report = optimisation((CHANGES[0], change("compile", "no gain", 61.0)))
    assert say_result(report) == "No change made the step faster: 60 ms per step, 1 change tried."
    slower = optimisation((CHANGES[0], change("operations", "no gain", 70.0), change("compile", "kept", 65.0)))
    assert say_result(slower).startswith("No change made the step faster")
    assert "could not be measured" in say_result(optimisation((change("start", "failed", None, "out of memory"),)))


def test_each_sentence_is_said_once_and_reasons_name_their_change() -> None:
    assert list_notes(optimisation()) == [
        "graph: not applied, CUDA graphs need a GPU",
        ATTENTION,
        "norms: 25 fused (not kept)",
        "norms: failed, gradient of norm: error 0.2",
    ]


def test_a_result_that_stopped_early_says_so() -> None:
    assert "Not all changes were tried: interrupted." in changes_table(optimisation(stopped="interrupted")).notes
    assert not any("Not all" in note for note in changes_table(optimisation()).notes)


def test_checks_have_a_row_per_measured_change() -> None:
    table = check_table(optimisation())
    assert cells(table, "change") == ["start", "compile", "attention", "optimizer", "norms"]
    assert cells(table, "verdict") == ["passes"] * 4 + ["fails"]
    assert cells(table, "loss_error")[0] == pytest.approx(0.01 / 4.24)
    with pytest.raises(StepscopeError, match="no checks"):
        check_table(optimisation((CHANGES[2],)))


def test_an_error_that_is_not_finite_fails() -> None:
    table = check_table(optimisation((change("norms", "failed", 20.0, share=None),)))
    assert cells(table, "verdict") == ["fails"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "start: 60 ms per step"),
        (1, "compile: kept, 60 ms → 40 ms (−33%)"),
        (2, "graph: not applied: CUDA graphs need a GPU"),
        (4, "optimizer: no gain, 30 ms → 33 ms (+10%)"),
    ],
)
def test_a_change_is_said_in_a_line(number: int, said: str) -> None:
    report = optimisation()
    assert say_change(report, report.changes[number]) == said


def test_the_page_has_result_changes_and_checks() -> None:
    text = render_page(optimise_page(optimisation()), width=100)
    assert text.index("2× faster") < text.index("CUDA graphs need a GPU") < text.index("Check:")
    assert "the title of compile" in text


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_fast_command_is_valid_and_keeps_the_precision(precision: str) -> None:
    workload = optimisation(precision=precision, attention="naive", compile=True, batch=8).case.workload
    _, _, *words = shlex.split(write_fast_command(workload))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    made = grid_from_flags({name.lstrip("-").replace("-", "_"): value for name, value in flags.items()}).cases()
    assert made[0].workload.precision == precision
    assert made[0].workload.graph
    assert made[0].workload.batch == 8


def test_a_saved_result_is_read_again(tmp_path: Path) -> None:
    report = optimisation()
    write_optimisation(report, tmp_path / "new" / "a.json")
    assert read_optimisation(tmp_path / "new" / "a.json") == report
    (tmp_path / "b.json").write_text('{"schema": "stepscope.precision/1"}')
    with pytest.raises(StepscopeError, match="not a `stepscope optimise` result"):
        read_optimisation(tmp_path / "b.json")
    with pytest.raises(StepscopeError, match="cannot read"):
        read_optimisation(tmp_path / "c.json")
