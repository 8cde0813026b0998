"""The clock of a profile, which findings and tables share, and the columns of decoded names."""

import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.rules import evidence as rules_evidence
from stepscope.explain.rules import find
from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.story.sections.breakdown import break_down
from stepscope.explain.trace.attribution.names import NAME_COLUMNS
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.explain.trace.profile_tables import classes_table, findings_table, headline, steps_table
from stepscope.explain.trace.summary import summarise
from stepscope.recording.readers.formats import open_recording
from stepscope.spec import build_case
from tests.unit.recordings import ADD, ALL_REDUCE, GEMM_BF16, Timeline, add_unprofiled_steps

FIXTURES = Path(__file__).parents[2] / "fixtures"
US = 1_000


def two_steps(*unprofiled_us: int) -> Profile:
    """300 µs of kernels per step, 100 µs of which overlap with others: about 215 µs per profiled step."""
    timeline = Timeline(host_us=5)
    for _ in range(2):
        with timeline.step(), timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 200, op="aten::mm")
            timeline.launch(ADD, 100, stream=9)
            timeline.wait()
    profile = timeline.profile()
    return add_unprofiled_steps(profile, *(us * US for us in unprofiled_us)) if unprofiled_us else profile


def slow_host(*unprofiled_us: int, host_us: tuple[float, ...] = (900, 1000, 1100)) -> Profile:
    """200 µs of kernels per step, in steps of about twice `host_us`."""
    timeline = Timeline()
    for us in host_us:
        timeline.host_us = us
        with timeline.step(), timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.wait()
    profile = timeline.profile()
    return add_unprofiled_steps(profile, *(us * US for us in unprofiled_us)) if unprofiled_us else profile


def launched_before() -> Profile:
    """Four steps of equal work, of which the first was launched before the recording began."""
    timeline = Timeline(host_us=20)
    timeline.launch(GEMM_BF16, 300)
    timeline.launch(ALL_REDUCE, 600)
    timeline.wait()
    timeline.forget_launches()
    for _ in range(3):
        with timeline.step(), timeline.phase("backward"):
            timeline.launch(GEMM_BF16, 300, op="aten::mm")
            timeline.launch(ALL_REDUCE, 600, op="c10d::allreduce_")
            timeline.wait()
    return timeline.profile()


def test_a_profiled_step_is_the_window_over_its_steps() -> None:
    profile = two_steps()
    clock = profile.clock
    assert clock.num_steps == 2
    assert clock.kind == "profiled"
    assert clock.step_ns == clock.profiled_ns == profile.wall_ns / 2
    assert clock.busy_ns < 300 * US
    assert clock.busy_ns + clock.idle_ns == pytest.approx(clock.step_ns, rel=1e-15)
    assert clock.idle_share == clock.idle_ns / clock.step_ns


def test_unprofiled_steps_are_the_clock_if_they_are_clearly_faster() -> None:
    clock = slow_host(480, 500, 520).clock
    assert clock.kind == "unprofiled"
    assert clock.step_ns == 500 * US
    assert clock.busy_ns + clock.idle_ns == pytest.approx(clock.step_ns, rel=1e-15)
    assert [int(one) for one in clock.step_samples] == [480 * US, 500 * US, 520 * US]


@pytest.mark.parametrize(
    "unprofiled_us",
    [
        (9_000, 10_000, 11_000),  # slower than profiled steps
        (1_000, 1_900, 2_900),  # faster by less than they differ from each other
        (150, 160, 170),  # shorter than the kernels
    ],
)
def test_other_unprofiled_steps_are_not_the_clock(unprofiled_us: tuple[int, ...]) -> None:
    recorded = slow_host().clock
    clock = slow_host(*unprofiled_us).clock
    assert clock.kind == "profiled"
    assert (clock.step_ns, clock.busy_ns, clock.idle_ns) == (recorded.step_ns, recorded.busy_ns, recorded.idle_ns)
    assert clock.step_samples == clock.profiled_steps


def test_overhead_is_unknown_without_unprofiled_steps() -> None:
    assert slow_host().clock.has_overhead
    assert slow_host(9_000).clock.has_overhead
    assert not slow_host(500).clock.has_overhead
    assert not slow_host(1_000, 1_900, 2_900).clock.has_overhead


def test_without_marked_steps_the_words_are_about_the_trace() -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100)
    assert timeline.profile().clock.say_per_step == "in the trace"
    assert timeline.profile().clock.say_of_step == "of the trace"
    assert (two_steps().clock.say_per_step, two_steps().clock.say_of_step) == ("per step", "of the step")


def test_serialized_kernels_have_no_idle_time() -> None:
    """Nsight Compute runs kernels one at a time: idle time is unknown, neither 0% nor all of it."""
    profile = make_profile(open_recording(FIXTURES / "h200_gpt2_counters.csv.gz"))
    assert "idle time unknown" in headline(profile)
    assert not re.search(r"busy|100\.0%, idle|idle 0", headline(profile))
    rows = {row[0]: row[1:] for row in classes_table(profile).rows}
    assert rows["idle"] == rows["wall"] == (None,) * 5
    summary = summarise(profile, ())
    assert summary.idle_ns is summary.clock.idle_ns is summary.clock.idle_share is None
    assert not any("idle" in note for note in break_down([profile], [""]).notes)


def test_launches_that_were_not_recorded_are_not_called_early() -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100)
    timeline.forget_launches()
    said = headline(timeline.profile())
    assert "kernel launches are not recorded" in said
    assert "before the recording began" not in said
    assert "25% of the recorded kernel time is outside these steps" in headline(launched_before())


def test_the_document_has_the_clock_of_the_tables() -> None:
    for profile in (two_steps(), slow_host(500), launched_before()):
        clock, told = profile.clock, summarise(profile, ()).clock
        assert (told.step_ns, told.busy_ns, told.idle_ns) == (clock.step_ns, clock.busy_ns, clock.idle_ns)
        assert (told.kind, told.steps) == (clock.kind, clock.num_steps)
        rows = {row[0]: row[4] for row in classes_table(profile).rows}
        assert rows["wall"] == clock.step_ns / 1e6
        assert rows["idle"] == clock.idle_ns / 1e6


# --- The rules --------------------------------------------------------------------------------------------------------


def test_rules_use_the_clock_of_the_tables() -> None:
    for profile in (two_steps(), two_steps(100), slow_host(500), launched_before()):
        evidence = StepEvidence(profile=profile)
        assert evidence.clock is profile.clock
        assert evidence.step_ns == profile.step_ns
        assert evidence.num_steps == profile.num_steps


def test_findings_divide_by_the_steps_of_the_tables() -> None:
    """Three steps are marked, and four steps of work ran: exposed communication is that of one step."""
    profile = launched_before()
    assert profile.clock.num_steps == 3
    exposed = next(one for one in find(profile) if one.code == "SS011")
    assert exposed.title.startswith("Exposed communication: 0.6 ms per step")
    table = {row[0]: row[4] for row in classes_table(profile).rows}
    assert table["communication"] == pytest.approx(0.6)


def test_figures_of_some_steps_agree_with_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules replay the first steps of a long recording. These do more work than the others."""
    timeline = Timeline(host_us=5)
    for count in (6, 5, 4, 3, 2):
        with timeline.step(), timeline.phase("forward"):
            for _ in range(count):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.wait()
    profile = timeline.profile()
    monkeypatch.setattr(rules_evidence, "MOST_REPLAYED", 8)
    evidence = StepEvidence(profile=profile)
    assert evidence.steps.height == 2
    assert evidence.kernels.height == 11
    assert evidence.per_step(evidence.kernels) == pytest.approx(profile.gpu_time_ns / 5)


def test_findings_of_a_trace_without_steps_are_not_per_step() -> None:
    timeline = Timeline(host_us=40)
    for _ in range(30):
        timeline.launch(GEMM_BF16, 10, op="aten::mm")
        timeline.launch(ADD, 5)
        timeline.launch(ADD, 5)
    findings = find(timeline.profile())
    assert findings
    for one in findings:
        assert one.unit == "trace"
        assert not re.search(r"per step|of the step", f"{one.title} {one.evidence}")
    labels = {column.key: column.label for column in findings_table(findings).columns}
    assert (labels["saving_ms"], labels["share"]) == ("saves ms", "of the trace")


def test_names_are_decoded_into_columns() -> None:
    kernels = two_steps().kernels
    assert set(NAME_COLUMNS) <= set(kernels.columns)
    product = kernels.row(0, named=True)
    assert (product["class"], product["dtype"], product["tensor_cores"]) == ("GEMM", "bf16", True)
    assert product["tile_m"]
    assert product["tile_n"]
    assert not kernels["is_fused"].any()


# --- The steps that count ---------------------------------------------------------------------------------------------


def steps_of(*num_kernels: int, after: int = 0) -> Timeline:
    """Steps with that many kernels of 100 µs each, and `after` kernels after the last one."""
    timeline = Timeline(host_us=5)
    for count in num_kernels:
        with timeline.step():
            for _ in range(count):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.host(20)
            if count:
                timeline.wait()
    for _ in range(after):
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
    return timeline


def test_steps_without_kernels_at_the_ends_do_not_count() -> None:
    whole, empty = steps_of(3, 3).profile(), steps_of(0, 3, 3, 0, 0).profile()
    assert empty.clock.step_ns == pytest.approx(whole.clock.step_ns, rel=0.02)
    assert empty.steps["step"].to_list() == [1, 2]
    assert "not counted: 3 marked steps without kernels" in headline(empty)


def test_work_after_the_last_step_does_not_count() -> None:
    whole, more = steps_of(3, 3).profile(), steps_of(3, 3, after=30).profile()
    assert more.clock.step_ns == whole.clock.step_ns
    assert more.gpu_time_ns == whole.gpu_time_ns
    assert "83% of the recorded kernel time is outside these steps" in headline(more)


def test_steps_whose_kernels_were_lost_do_not_count() -> None:
    recording = steps_of(3, 3, 3, 3, 3).record()
    whole = make_profile(recording)
    lost = make_profile(replace(recording, kernels=recording.kernels.head(10)))
    assert lost.clock.step_ns == pytest.approx(whole.clock.step_ns, rel=0.02)
    assert lost.idle_share == pytest.approx(whole.idle_share, rel=0.02)
    assert lost.steps["step"].to_list() == [0, 1, 2]
    assert "not counted: 2 marked steps whose kernels are missing" in headline(lost)


def cpu_steps(*add_us: float, product_us: tuple[float, ...] = (), **manifest: object) -> Profile:
    """Steps on a CPU, each with an addition of that time. With `product_us`, the products differ in shape."""
    timeline = Timeline(host_us=2)
    for place, us in enumerate(add_us):
        length = 1024 if place < len(product_us) and product_us[place] != 100 else 64
        with timeline.step():
            with timeline.phase("forward"):
                product = product_us[place] if product_us else 100
                timeline.compute("aten::mm", product, shapes=[[length, 64], [64, 64]], dtypes=["float"] * 2)
            with timeline.phase("backward"):
                timeline.compute("aten::add", us, shapes=[[64, 64]] * 2, dtypes=["float"] * 2)
    return timeline.profile(**manifest)


@pytest.mark.parametrize(
    ("add_us", "counted", "said"),
    [
        ((50, 50, 2000), [0, 1], "1 of 3 marked steps, over 2× as long as others with the same work"),
        ((2000, 50, 50), [1, 2], "1 of 3 marked steps"),
        ((50, 2000, 50), [0], "1 of 3 marked steps, over 2× as long as others with the same work, and 1 more"),
    ],
)
def test_interrupted_step_on_a_cpu_does_not_count(add_us: tuple[float, ...], counted: list[int], said: str) -> None:
    profile = cpu_steps(*add_us)
    assert profile.steps["step"].to_list() == counted
    assert profile.gpu_time_ns == len(counted) * 150 * US
    assert f"not counted: {said}" in headline(profile)
    phases = dict(profile.time_by("phase").select("phase", "share").iter_rows())
    assert phases["forward"] == pytest.approx(2 / 3)


def test_steps_with_more_work_count() -> None:
    """Longer sequences take longer; two steps are too few to compare."""
    assert cpu_steps(50, 50, 50, product_us=(100, 100, 4000)).num_steps == 3
    assert cpu_steps(50, 2000).num_steps == 2
    assert cpu_steps(50, 50, 2000, shapes_recorded=False).num_steps == 3
    assert cpu_steps(50, 50, 2000, rank=0, world_size=2).num_steps == 3
    assert slow_host(host_us=(900, 900, 9000)).num_steps == 3


def test_own_steps_are_compared_by_their_length_as_well() -> None:
    def record(**manifest: object) -> Profile:
        timeline = Timeline(host_us=2)
        for pause_us in (0, 0, 3000):
            with timeline.step(), timeline.phase("forward"):
                timeline.compute("aten::mm", 100, shapes=[[64, 64]] * 2, dtypes=["float"] * 2)
                timeline.host(pause_us)
        return timeline.profile(**manifest)

    assert record(case=build_case({"size": "nano", "device": "cpu"})).num_steps == 2
    assert record().num_steps == 3  # a script may load data or save a checkpoint there


def test_the_mean_of_the_steps_is_the_step() -> None:
    for profile in (two_steps(), slow_host(), launched_before(), steps_of(2, 5, 3).profile()):
        rows = steps_table(profile).rows
        assert sum(float(row[1] or 0) for row in rows) / len(rows) == pytest.approx(profile.clock.profiled_ns / 1e6)
        assert sum(float(row[2] or 0) for row in rows) == pytest.approx(profile.gpu_time_ns / 1e6)


def test_steps_are_equal_if_no_launch_says_which_kernels_are_theirs() -> None:
    recording = steps_of(3, 3).record()
    early = recording.ranges.with_columns(pl.col("start_ns", "end_ns") // 1000)  # the CPU is far ahead
    profile = make_profile(replace(recording, ranges=early, launches=recording.launches.clear()))
    assert profile.num_steps == 2
    assert profile.kernels.height == 6
    first, second = profile.clock.profiled_steps
    assert abs(first - second) <= 1
    assert "equally long" in headline(profile)
