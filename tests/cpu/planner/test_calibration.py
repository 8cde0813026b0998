"""Measuring a calibration: cases that fail or come too late are left out and named. Times are those of a CPU here."""

import time
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.measure.calibration.attention import attention_cases
from stepscope.measure.calibration.clock import Call, CallClock, TimedCall, measure_cases
from stepscope.measure.calibration.host_costs import measure_trial, trial_workloads
from stepscope.measure.calibration.memory_bound import index_cases, list_cases, memory_cases
from stepscope.measure.calibration.products import product_cases
from stepscope.planner.step_time.kernels_of import list_operands
from stepscope.planner.step_time.operator_kinds import BYTES_PER_ELEMENT, ELEMENTWISE, INDEXING, LISTS, REDUCTIONS, ROWS
from stepscope.recording.rows.calibration import Series, read_calibration, write_calibration
from tests.cpu.planner.calibrations import make_calibration

CPU = torch.device("cpu")


def case(size: int, call: Call, **more: object) -> TimedCall:
    return TimedCall(operation="work", dtype="fp32", columns=("size",), sizes=(size,), make=lambda: call, **more)  # type: ignore[arg-type]


def fail() -> None:
    raise RuntimeError("no kernel takes this\nand more")


def test_a_case_that_fails_is_named_and_the_others_are_measured() -> None:
    cases = [case(1, lambda: None), case(2, fail), case(3, lambda: None)]
    series, skipped = measure_cases(CallClock(CPU), cases, deadline=time.monotonic() + 60, on_case=lambda _: None)
    assert [row[0] for row in series[0].rows] == [1, 3]
    assert skipped == ["work fp32 (2,): no kernel takes this"]


def test_nothing_starts_after_the_deadline() -> None:
    series, skipped = measure_cases(CallClock(CPU), [case(1, fail)], deadline=time.monotonic(), on_case=lambda _: None)
    assert not series
    assert "out of time" in skipped[0]


def test_cold_cases_use_more_memory_than_the_cache_has() -> None:
    made = []

    def make() -> Call:
        made.append(1)
        return lambda: None

    clock = CallClock(CPU)
    cold = TimedCall(
        operation="x", dtype="fp32", columns=("n",), sizes=(1,), make=make, fresh_bytes=clock.l2_bytes // 4
    )
    clock.time_case(cold)
    assert len(made) * cold.fresh_bytes > 2 * clock.l2_bytes


def test_every_operation_that_predictions_look_up_is_measured() -> None:
    cases = [*memory_cases(CPU), *index_cases(CPU), *list_cases(CPU)]
    measured = {one.operation for one in cases}
    wanted = {name for pair in ELEMENTWISE.values() for name in pair} | set(BYTES_PER_ELEMENT) | set(LISTS.values())
    wanted |= {name for name, _ in ROWS.values()} | set(INDEXING.values())
    wanted |= {f"{kind}_columns" for kind in REDUCTIONS.values()} | {"sum_rows", "sum_all"}
    assert wanted - measured == set()


def test_products_are_drawn_alike_every_time_and_have_odd_widths() -> None:
    first, second = ([one.sizes for one in product_cases(CPU)] for _ in range(2))
    assert first == second
    assert any(50257 in sizes for sizes in first)
    variants = {(one.operation, one.variant) for one in product_cases(CPU)}
    assert {("mm", "nt"), ("mm", "nn"), ("mm", "tn"), ("addmm", "nt"), ("bmm", "tn")} <= variants


def test_attention_is_measured_in_both_passes() -> None:
    variants = {(one.operation, one.variant) for one in attention_cases(CPU)}
    assert {("sdpa-cudnn", "causal forward"), ("sdpa-cudnn", "causal backward")} <= variants


def test_a_trial_counts_calls_by_phase() -> None:
    workload = next(trial_workloads(CPU))
    trials = {one.phase: one for one in measure_trial(workload, CPU)}
    assert list(trials) == ["forward", "backward", "optimizer"]
    layers = 6
    assert trials["forward"].operations["mm"] == 7 * layers + 1
    assert trials["backward"].operations["mm"] == 2 * (7 * layers + 1)
    assert trials["forward"].modules > 7 * layers
    assert trials["backward"].modules == 0


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    written = make_calibration()
    write_calibration(written, path)
    assert read_calibration(path) == written


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode({"schema": "stepscope.bench/1"}))
    with pytest.raises(StepscopeError, match="cannot read the calibration"):
        read_calibration(path)
    with pytest.raises(StepscopeError, match="cannot read the calibration"):
        read_calibration(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "damage",
    [
        {"constants": {"launch_to_start_ns": -1.0}},
        {"l2_bytes": 0},
        {"trials": [{**msgspec.to_builtins(make_calibration().trials[0]), "ns": 0}]},
        {"series": [{"operation": "mm", "dtype": "bf16", "columns": ["m", "n", "k"], "rows": [[0, 2, 3, 4]]}]},
    ],
    ids=["constant", "cache", "trial", "size"],
)
def test_a_number_that_cannot_be_measured_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(make_calibration()) | damage))
    with pytest.raises(StepscopeError, match="cannot read the calibration"):
        read_calibration(path)


def test_a_row_without_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid rows of `mm`"):
        Series(operation="mm", dtype="bf16", columns=("m", "n", "k"), rows=((1, 2, 3),))


@pytest.mark.parametrize(
    ("name", "lists"),
    [("aten._foreach_add_.List", 2), ("aten._foreach_mul_.Scalar", 1), ("aten._fused_adamw_.default", 5)],
)
def test_lists_of_an_optimizer_are_counted(name: str, lists: int) -> None:
    assert list_operands(name) == lists
