"""Comparison of two recordings: differences add up, noise is distinguished from change, and the gate decides."""

import itertools
from fractions import Fraction

import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.trace.accounting import account
from stepscope.explain.trace.compare import (
    IDLE,
    OVERLAP,
    REST,
    WALL,
    By,
    align_module,
    compare,
    comparison_table,
    gate_sentence,
    judge,
    parse_percent,
    regressed,
    welch_margin,
)
from stepscope.explain.trace.profile import Profile
from stepscope.recording.rows.bench import Doubt
from stepscope.render.formats import Format
from stepscope.render.tables import render
from stepscope.spec import build_case
from tests.unit.question_recordings import EXP, GEMM, SOFTMAX, TINY, Tape, model_profile
from tests.unit.recordings import GEMM_BF16, Timeline, add_unprofiled_steps

KEYS: tuple[By, ...] = ("phase", "class", "module", "kernel")


def run_of(*durations: int, gemm: int = 50, **manifest: object) -> Profile:
    """One step per duration: a GEMM, and an exponential of that duration."""
    tape = Tape()
    for step, ns in enumerate(durations):
        with tape.inside(f"step:{step}"):
            with tape.inside("phase:forward"), tape.operator("aten::mm"):
                tape.kernel(GEMM, gemm)
                tape.kernel(EXP, ns)
            tape.synchronise()
    return tape.profile(**manifest)


@pytest.mark.parametrize("by", KEYS)
def test_the_parts_add_up_to_the_nanosecond(by: By) -> None:
    a, b = model_profile(steps=3), model_profile(steps=7, fused=True, gemm_ns=133)
    result = compare(a, b, by=by)
    assert sum(row.a_ns for row in result.parts) == result.wall.a_ns
    assert sum(row.b_ns for row in result.parts) == result.wall.b_ns
    assert sum(row.difference_ns for row in result.parts) == result.wall.difference_ns != 0


def test_halves_of_nanoseconds_are_rounded_so_that_they_add_up() -> None:
    tape = Tape()
    for step in range(2):
        with tape.inside(f"step:{step}"):
            tape.kernel(GEMM, 50 + step)
            tape.kernel(EXP, 100 + step)
            tape.synchronise()
    result = compare(tape.profile(), run_of(100, 100))
    assert result.wall.a_ns == sum(row.a_ns for row in result.parts)
    parts = {row.name: row.a_ns for row in result.parts}
    assert parts["GEMM"] + parts["elementwise"] == 151


def test_small_parts_are_summed_up_as_rest() -> None:
    tapes = Tape(), Tape()
    for number, tape in enumerate(tapes):
        with tape.inside("step:0"):
            for kind in range(30):
                tape.kernel(f"kernel_{kind}", 100 + number * kind)
    result = compare(*(tape.profile() for tape in tapes), by="kernel")
    assert result.parts[-1].name == REST
    assert [row.name for row in result.parts[:2]] == ["kernel_29", "kernel_28"]
    assert sum(row.difference_ns for row in result.parts) == result.wall.difference_ns


def test_recording_compared_with_itself() -> None:
    profile = model_profile(steps=3)
    for by in KEYS:
        result = compare(profile, profile, by=by)
        assert {row.verdict for row in (*result.totals, *result.parts)} == {"same"}
        assert not regressed(result, 0.0)
        assert not result.remarks


def test_largest_change_comes_first() -> None:
    result = compare(run_of(100, 100, 100), run_of(400, 400, 400, gemm=60), by="class")
    assert [(row.name, row.difference_ns) for row in result.parts[:2]] == [("elementwise", 300), ("GEMM", 10)]
    assert result.parts[0].verdict == "slower"
    assert result.parts[0].ratio == 4


def test_noise_is_distinguished_from_change() -> None:
    noisy = compare(run_of(100, 900, 500), run_of(200, 1000, 400))
    assert noisy.wall.verdict == "noise"
    assert not regressed(noisy, 0.0)
    steady = compare(run_of(500, 505, 510), run_of(600, 605, 610))
    assert steady.wall.verdict == "slower"
    assert compare(run_of(600, 605, 610), run_of(500, 505, 510)).wall.verdict == "faster"


def test_too_few_steps_are_still_gated() -> None:
    result = compare(run_of(100), run_of(500))
    assert result.wall.verdict == "cannot tell"
    assert regressed(result, 0.03)
    assert "too few steps" in gate_sentence(result, 0.03)
    assert not regressed(compare(run_of(500), run_of(100)), 0.0)


def test_gate_uses_the_limit() -> None:
    result = compare(run_of(10_000, 10_000, 10_000), run_of(10_400, 10_400, 10_400))
    assert regressed(result, 0.03)
    assert not regressed(result, 0.05)
    assert gate_sentence(result, 0.03).startswith("FAIL: wall +3.9")
    assert gate_sentence(result, 0.05).startswith("pass")


def slow_run(*host_us: float) -> Profile:
    """One step of 100 µs of kernels per entry, on a CPU that needs this long to launch them."""
    timeline = Timeline()
    for us in host_us:
        timeline.host_us = us
        with timeline.step():
            timeline.launch(GEMM_BF16, 100)
            timeline.wait()
    return timeline.profile()


def test_unprofiled_steps_are_compared_if_they_are_the_clock() -> None:
    """The profiler slowed B's CPU ten times as much as A's."""
    a, b = slow_run(1000, 1000, 1000), slow_run(9000, 9000, 9000)
    assert compare(a, b).wall.verdict == "slower"
    a, b = (add_unprofiled_steps(a, 200_000, 201_000, 202_000), add_unprofiled_steps(b, 202_000, 200_000, 201_000))
    result = compare(a, b)
    assert (result.wall.a_ns, result.wall.b_ns) == (a.step_ns, b.step_ns) == (201_000, 201_000)
    assert result.wall.verdict == "same"
    assert not regressed(result, 0.0)


def test_profiler_overhead_alone_does_not_fail_the_gate() -> None:
    a = add_unprofiled_steps(slow_run(1000, 1000, 1000), 200_000, 201_000, 202_000)
    result = compare(a, slow_run(1000, 1000, 1000))
    assert result.wall.verdict == "cannot tell"
    assert result.wall.b_ns > 2 * result.wall.a_ns
    assert not regressed(result, 0.03)
    assert gate_sentence(result, 0.03).startswith("pass")
    assert "not compared with the limit: one step was timed under the profiler" in gate_sentence(result, 0.03)


def test_parts_are_those_of_the_clock() -> None:
    """The step, busy and idle time of a comparison are those that `explain` prints for each run."""
    profiles = add_unprofiled_steps(slow_run(1000, 1100, 900), 300_000, 310_000, 320_000), slow_run(500, 600, 700)
    for by in KEYS:
        result = compare(*profiles, by=by)
        for ns, profile in zip(("a_ns", "b_ns"), profiles, strict=True):
            clock = profile.clock
            rows = {row.name: getattr(row, ns) for row in result.parts}
            assert getattr(result.wall, ns) == sum(rows.values()) == round(clock.step_ns)
            assert rows[IDLE] == round(clock.idle_ns)
        assert next(row for row in result.totals if row.name == "idle").a_ns == round(profiles[0].clock.idle_ns)


def test_profiled_and_unprofiled_steps_are_not_judged() -> None:
    plain = add_unprofiled_steps(slow_run(1000, 1000, 1000), 300_000, 310_000, 320_000)
    result = compare(plain, slow_run(1000, 1000, 1000))
    assert result.wall.verdict == "cannot tell"
    assert "one step was timed under the profiler" in gate_sentence(result, 0.03)
    harmless = add_unprofiled_steps(slow_run(1000, 1010, 1020), 1_000_000, 1_012_000, 1_030_000)
    assert harmless.clock.kind == "profiled"
    assert compare(plain, harmless).wall.verdict == "slower", "its profiler made no difference"


def test_rows_of_one_run_are_new_or_gone() -> None:
    tape = Tape()
    for step in range(3):
        with tape.inside(f"step:{step}"):
            tape.kernel(SOFTMAX, 100)
            tape.kernel(GEMM, 50)
            tape.synchronise()
    table = comparison_table(compare(run_of(100, 100, 100), tape.profile()))
    verdicts = {row[1]: row[7] for row in table.rows}
    assert (verdicts["softmax"], verdicts["elementwise"]) == ("new", "gone")
    for row in table.rows:
        assert (row[7] == "new") == (row[2] == 0)
        assert (row[7] == "gone") == (row[3] == 0)


def test_step_ends_where_the_next_begins() -> None:
    profile = run_of(100, 200, 300)
    windows = profile.step_windows
    assert [start for start, _ in windows] == profile.steps["start_ns"].to_list()
    assert all(one[1] == other[0] for one, other in itertools.pairwise(windows))


def test_steps_follow_the_device_if_the_cpu_runs_ahead() -> None:
    tape = Tape()
    for step in range(4):
        with tape.inside(f"step:{step}"):
            tape.kernel(GEMM, 1000)
    profile = tape.profile()
    first, *others = (end - start for start, end in profile.step_windows)
    assert others == [1000] * 3
    assert first == 1011  # from its start on the CPU
    assert compare(profile, profile).wall.a_ns == round(profile.step_ns)


def test_overlapping_kernels_count_once() -> None:
    tape = Tape()
    with tape.inside("step:0"):
        tape.kernel(GEMM, 1000, stream=7)
        tape.kernel(EXP, 500, stream=8)
        tape.synchronise()
    result = compare(tape.profile(), tape.profile())
    parts = {row.name: row.a_ns for row in result.parts}
    assert parts["GEMM"] == parts[OVERLAP] == 500
    assert "elementwise" not in parts


def test_welch_matches_a_calculation_by_hand() -> None:
    # Variances 1 and 4 over three each: error 5/3; freedom (5/3)² / ((1/3)²/2 + (4/3)²/2) = 2.94, so t of 2.
    assert welch_margin([1, 2, 3], [2, 4, 6]) == pytest.approx(4.303 * (5 / 3) ** 0.5)
    assert welch_margin([1, 1, 1], [2, 2, 2]) == 0
    ones, threes = [Fraction(1)] * 3, [Fraction(3)] * 3
    assert judge(ones, threes, 2) == "slower"
    assert judge(ones, threes, -2) == "faster"
    assert judge(ones[:2], threes, 2) == "cannot tell"


@pytest.mark.parametrize(("text", "value"), [("3%", 0.03), ("3", 0.03), (" 0.5 % ", 0.005), ("0", 0.0), ("150%", 1.5)])
def test_percentages_are_parsed(text: str, value: float) -> None:
    assert parse_percent(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "three", "-1%", "nan", "inf%", "3%%"])
def test_invalid_percentage_is_an_error(text: str) -> None:
    with pytest.raises(StepscopeError, match="invalid percentage"):
        parse_percent(text)


def test_differences_between_runs_are_reported() -> None:
    doubt = Doubt(code="throttled", text="the clocks were held back")
    cases = [
        build_case({**TINY, "device": "cuda:0", "precision": p, "batch": n}) for p, n in (("fp32", 2), ("bf16", 4))
    ]
    a = run_of(100, case=cases[0], versions={"torch": "2.12"})
    b = run_of(100, case=cases[1], versions={"torch": "2.13"}, device="NVIDIA H100", doubts=(doubt,))
    said = "\n".join(compare(a, b).remarks)
    assert "the devices differ: NVIDIA H200 → NVIDIA H100" in said
    assert "batch 2 → 4" in said
    assert "precision fp32 → bf16" in said
    assert "torch 2.12 → 2.13" in said
    assert "bf16 + batch 4: the clocks were held back (throttled)" in said
    assert "context" not in said


def test_a_whole_trace_next_to_a_step_gives_a_warning() -> None:
    tape = Tape()
    with tape.operator("aten::mm"):
        tape.kernel(GEMM, 100)
    whole = tape.profile()
    (said,) = [line for line in compare(run_of(100), whole).remarks if "has no marked steps" in line]
    assert said.startswith("warning: after has no marked steps: its times cover the whole trace")
    for one in (run_of(100), whole):
        assert not any("has no marked steps" in line for line in compare(one, one).remarks)


def test_serialized_kernels_give_a_warning() -> None:
    counted = compare(run_of(100), run_of(100, source="nsight compute"))
    assert "idle" not in {row.name for row in counted.totals}
    said = counted.remarks
    assert [line.split(":")[1] for line in said] == [" after", " the profilers differ, and so does their overhead"]


def test_layers_are_merged_into_one_module() -> None:
    assert align_module("blocks.11.attention.q_proj") == "blocks.*.attention.q_proj"
    assert align_module("Model_0.Block_3.Linear_12") == "Model.Block.Linear"
    assert align_module("model.layers.0") == "model.layers.*"


def test_the_table_renders_in_every_format() -> None:
    result = compare(model_profile(steps=3), model_profile(steps=3, fused=True), by="kernel", names=("a", "b"))
    table = comparison_table(result)
    for form in Format:
        assert render(table, form, width=100)
    assert table.rows[0][:2] == ("step", WALL)


def test_long_kernel_counts_in_every_step_it_runs_in() -> None:
    """Even if shorter kernels started after it and ended before the step."""
    tape = Tape()
    for step in range(4):
        with tape.inside(f"step:{step}"):
            if step == 0:
                tape.kernel(EXP, 2500, stream=8)
            tape.kernel(GEMM, 1000, stream=7)
            tape.now = tape.free[7]
    profile = tape.profile()
    busy = {
        (start, end): account(
            profile.kernels.filter((pl.col("end_ns") > start) & (pl.col("start_ns") < end)).with_columns(
                pl.col("start_ns", "end_ns").clip(start, end)
            ),
            (start, end),
        )
        for start, end in profile.step_windows
    }
    assert sum(one.overlap_ns > 0 for one in busy.values()) == 3
    parts = {row.name: row.a_ns for row in compare(profile, profile).parts}
    assert parts[OVERLAP] == pytest.approx(sum(one.overlap_ns for one in busy.values()) / len(busy), abs=1)
    assert parts["GEMM"] == pytest.approx(sum(one.classes["GEMM"] for one in busy.values()) / len(busy), abs=1)
