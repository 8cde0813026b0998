"""The gate: what fails, what is noise, and what cannot be decided."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.explain.gate.gate_tables import gate_tables, metrics_table
from stepscope.explain.gate.noise import RunSample, measure_noise
from stepscope.explain.gate.verdict import GateResult, MetricVerdict, judge_runs
from stepscope.recording.baseline import BaselineRun, Metric, RunConditions
from tests.unit.explain.gate_runs import H200, baseline_of, make_run

MS = 1_000_000
STEADY = [make_run(*[level * MS // 100] * 5) for level in (1000, 1002, 998, 1001, 999)]


def check(
    base: list[BaselineRun], new: list[BaselineRun], *metrics: Metric, limit: float | None = 0.03, **more: Any
) -> GateResult:
    conditions = more.pop("conditions", H200)
    return judge_runs(
        baseline_of(*base), new, conditions, name="main", limit=limit, metrics=metrics or ("step",), **more
    )


def only(result: GateResult) -> MetricVerdict:
    (verdict,) = result.metrics
    return verdict


def test_a_regression_beyond_limit_and_noise_fails() -> None:
    result = check(STEADY, [make_run(*[11 * MS] * 5)])
    assert result.outcome == "fail"
    assert only(result).noise.kind == "between runs"
    assert result.sentences == ("FAIL: step time +10.00% (10 ms → 11 ms), limit +3%, noise ±0.649%",)


def test_the_margin_is_that_of_students_test() -> None:
    """By hand: the standard deviation of 1000, 1002, 998, 1001, 999 is 1.5811, with 4 degrees of freedom."""
    assert only(check(STEADY, [make_run(*[10 * MS] * 5)])).noise.margin == pytest.approx(
        3.747 * 1.5811e-3 * (1 / 5 + 1) ** 0.5, rel=1e-4
    )


def test_a_change_below_the_limit_passes() -> None:
    assert check(STEADY, [make_run(*[1025 * MS // 100] * 5)]).outcome == "pass"


def test_a_faster_run_passes_and_is_named() -> None:
    result = check(STEADY, [make_run(*[9 * MS] * 5)])
    assert (result.outcome, only(result).verdict) == ("pass", "lower")


def test_a_change_within_noise_passes_and_says_how_blunt_the_gate_is() -> None:
    noisy = [make_run(*[level * MS] * 5) for level in (10, 11, 9)]
    result = check(noisy, [make_run(*[11 * MS] * 5)])
    assert (result.outcome, only(result).verdict) == ("pass", "noise")
    assert result.sentences[0].endswith("; within noise")
    assert any("larger than the limit of 3%" in note and "--add" in note for note in result.notes)


def test_single_runs_say_that_the_noise_between_runs_is_unknown() -> None:
    wide = make_run(*(level * MS for level in (9, 10, 11, 10, 9, 11)))
    result = check([wide], [make_run(*(level * MS for level in (10, 11, 12, 11, 10, 12)))])
    assert (result.outcome, only(result).noise.kind) == ("pass", "within runs")
    assert any("the noise between runs is unknown" in note for note in result.notes)
    assert check([wide], [make_run(*[50 * MS] * 6)]).outcome == "fail"


def test_one_baseline_run_and_several_new_ones_know_the_noise() -> None:
    assert only(check(STEADY[:1], STEADY[1:])).noise.kind == "between runs"


def test_too_few_steps_cannot_be_decided_unless_below_the_limit() -> None:
    one = make_run(10 * MS)
    slow, fine = check([one], [make_run(11 * MS)]), check([one], [make_run(10 * MS + 1)])
    assert slow.outcome == "cannot tell"
    assert "its noise is unknown, with one run on each side and 1 and 1 steps" in slow.sentences[0]
    assert fine.outcome == "pass"


def test_counts_are_exact_within_the_range_of_the_baseline() -> None:
    base = [make_run(MS, kernels=count) for count in (100, 104)]
    for count, outcome in ((104, "pass"), (105, "fail"), (90, "pass")):
        assert check(base, [make_run(MS, kernels=count)], "kernels", limit=0.0).outcome == outcome
    note = check(base, [make_run(MS, kernels=104)], "kernels", limit=0.0).notes[-1]
    assert note == "kernels per step: from 100 to 104 in the baseline; a value in this range is noise"


def test_peak_memory_is_exact_only_if_an_allocator_counted_it() -> None:
    new = [make_run(MS, peak_bytes=2**30 + 2**26)]
    counted = check([make_run(MS, peak_bytes=2**30)], new, "peak-memory")
    assert counted.outcome == "fail"
    assert counted.sentences == ("FAIL: peak memory +6.25% (1 GiB → 1.06 GiB), limit +3%",)
    resident = [make_run(MS, peak_bytes=2**30, peak_is_exact=False)]
    assert check(resident, new, "peak-memory").outcome == "cannot tell"


def test_idle_time_is_compared_with_the_step() -> None:
    """From 10 to 20 µs is twice as much, and nothing next to a step of 10 ms."""
    base = [msgspec.structs.replace(run, idle_ns=10_000.0) for run in STEADY]
    assert check(base, [make_run(*[10 * MS] * 5, idle_ns=20_000.0)], "idle").outcome == "pass"
    slow = check(base, [make_run(*[10 * MS] * 5, idle_ns=1_010_000.0)], "idle")
    assert slow.outcome == "fail"
    assert "idle time +10.00% of the step (10 µs → 1.01 ms)" in slow.sentences[0]


def test_a_missing_metric_cannot_be_decided_and_says_how_to_record_it() -> None:
    result = check(STEADY, [make_run(*[10 * MS] * 5)], "step", "kernels")
    assert result.outcome == "cannot tell"
    assert "kernels per step" in result.sentences[1]
    assert "stepscope profile" in result.sentences[1]


def test_a_failure_outweighs_what_cannot_be_decided() -> None:
    assert check(STEADY, [make_run(*[20 * MS] * 5)], "step", "kernels").outcome == "fail"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "NVIDIA A100"}, "device NVIDIA H200 → NVIDIA A100"),
        ({"torch": "2.14.0"}, "torch 2.13.0 → 2.14.0"),
        ({"world_size": 8}, "ranks 1 → 8"),
        ({"settings": {"model": "small", "batch": "8"}}, "batch 4 → 8"),
    ],
)
def test_other_conditions_are_refused_unless_allowed(changes: dict[str, Any], said: str) -> None:
    other = msgspec.structs.replace(H200, **changes)
    refused = check(STEADY, STEADY[:1], conditions=other)
    assert (refused.outcome, refused.refusals, refused.metrics) == ("cannot tell", (said,), ())
    assert said in refused.sentences[0]
    allowed = check(STEADY, STEADY[:1], conditions=other, allow_different=True)
    assert allowed.outcome == "pass"
    assert f"the conditions differ: {said}" in allowed.notes


def test_unknown_conditions_are_named_and_do_not_refuse() -> None:
    result = check(STEADY, STEADY[:1], conditions=RunConditions())
    assert result.outcome == "pass"
    assert "not checked: the device is unknown in the new run" in result.notes


def test_profiled_and_unprofiled_steps_are_not_compared() -> None:
    profiled = [make_run(*[10 * MS] * 5, clock="profiled", kernels=1.0)]
    assert check(STEADY, profiled).refusals == ("step times unprofiled → profiled",)
    base = [msgspec.structs.replace(run, kernels=1.0) for run in STEADY]
    assert check(base, profiled, "kernels").outcome == "pass"


def test_a_run_of_the_baseline_is_recognized() -> None:
    assert any("is itself a run of the baseline" in note for note in check(STEADY, STEADY[:1]).notes)


def test_without_a_limit_nothing_fails() -> None:
    result = check(STEADY, [make_run(*[20 * MS] * 5)], limit=None)
    assert (result.outcome, only(result).verdict) == ("pass", "higher")
    assert result.sentences[0].startswith("step time +100.00%")


def test_parts_come_with_the_largest_change_first() -> None:
    base = [make_run(MS, classes={"GEMM": 5e6 + one, "copy": 1e6 + one}) for one in (0.0, 1e3, 2e3)]
    result = check(base, [make_run(MS, classes={"GEMM": 5.001e6, "copy": 3e6})])
    assert [(one.name, one.verdict) for one in result.parts] == [("copy", "higher"), ("GEMM", "same")]
    metrics, parts = gate_tables(result)
    assert [row[0] for row in parts.rows] == ["copy", "GEMM"]
    assert metrics == metrics_table(result)


LEVELS = st.lists(st.integers(MS, 100 * MS), min_size=1, max_size=6)


@given(LEVELS, LEVELS, st.floats(0, 1))
def test_a_change_within_noise_or_limit_never_fails(base: list[int], new: list[int], limit: float) -> None:
    sides = [[make_run(*[level] * 3) for level in levels] for levels in (base, new)]
    one = only(check(sides[0], sides[1], limit=limit))
    assert one.change is not None
    if one.outcome == "fail":
        assert one.change > max(limit, one.noise.margin)
    elif one.change > max(limit, one.noise.margin * (1 + 1e-9)):
        assert one.outcome == "cannot tell"


@given(LEVELS, LEVELS, st.integers(2, 1000))
def test_units_do_not_matter(base: list[int], new: list[int], factor: int) -> None:
    def margin(scale: int) -> float:
        sides = [[RunSample(value=level * scale, num_steps=3) for level in levels] for levels in (base, new)]
        return measure_noise(sides[0], sides[1]).margin / scale

    assert margin(factor) == pytest.approx(margin(1))


def test_two_runs_that_agree_by_chance_keep_the_noise_of_their_steps() -> None:
    equal = RunSample(value=100.0, step_sd=5.0, num_steps=25)
    noise = measure_noise([equal, equal], [replace(equal, value=101.0)])
    assert noise.run_sd == pytest.approx(1.2533)
