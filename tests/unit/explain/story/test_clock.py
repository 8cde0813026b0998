"""One clock per page: every share refers to the step in the headline."""

import re
from typing import Any

import msgspec
import pytest

from stepscope.explain.story import Materials, tell
from stepscope.explain.story.run import list_advice
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Breakdown, Fact, Question, Questions, Report, Soundness, Table
from stepscope.hardware import Hardware
from stepscope.recording.rows.bench import Environment
from stepscope.spec import build_case
from stepscope.units import clip, count_noun, say_flops, say_parameters, say_percent, say_share, say_size, say_time
from tests.unit.explain.story.story_materials import addition, product, record_ours, section, small_row
from tests.unit.recordings import GEMM_BF16, Timeline, add_unprofiled_steps
from tests.unit.rows import ENVIRONMENT

MS = 1_000_000


def fact(report: Report, key: str) -> Fact:
    return next(one for one in report.facts if one.key == key)


def breakdown_of(report: Report) -> Breakdown:
    part = section(report, "time").exhibits[0].part
    assert isinstance(part, Breakdown)
    return part


def questions_of(report: Report) -> tuple[Question, ...]:
    parts = [one.part for one in section(report, "questions").exhibits]
    return tuple(one for part in parts if isinstance(part, Questions) for one in part.questions)


def cpu_bound(**settings: Any) -> Profile:
    """500 µs of kernels in a step of 2 ms, or 6 ms under the profiler."""
    return add_unprofiled_steps(record_ours(product, addition, host_us=3000, **settings), 1_900_000, 2 * MS, 2_200_000)


def test_all_figures_are_those_of_the_recordings_clock() -> None:
    """The step takes 2 ms unprofiled, 6 ms profiled, and 100 ms in bench."""
    profile = cpu_bound()
    materials = Materials(name="a", bench=(small_row(),), profile=profile)
    report = tell(materials)
    assert materials.step_ns == profile.step_ns == 2 * MS
    assert fact(report, "step").value == 2
    assert fact(report, "step").note == "median of 3 unprofiled steps; p20 to p80: 1.94 ms to 2.12 ms"
    assert fact(report, "busy").value == pytest.approx(0.25)
    assert fact(report, "tokens").value == round(4 * 256 / 2e-3)
    assert "2 ms per training step; the GPU waits for the CPU 75% of the time" in report.sentence
    lead = section(report, "timeline").lead
    assert lead.startswith("2 kernels in 2 ms per step (6 ms in the profiled step shown here)")
    told = breakdown_of(report)
    assert told.walls_ns == (2.0 * MS,)
    assert told.idles_ns == (1.5 * MS,)
    idle = next(one for one in questions_of(report) if "idle" in one.question)
    assert idle.answer.startswith("1.5 ms idle per step, 75.0%.")
    assert idle.figure == "75.0% of the step"
    for one in list_advice(materials) or ():
        if one.finding.saving_ns is not None:
            assert one.finding.share == pytest.approx(one.finding.saving_ns / (2 * MS))
    assert fact(report, "mfu").value == fact(tell(Materials(name="a", profile=profile)), "mfu").value


def test_second_clock_is_part_of_the_measurement_quality_and_nothing_else() -> None:
    """Bench's 100 ms are nowhere else on the page."""
    report = tell(Materials(name="a", bench=(small_row(),), profile=cpu_bound()))
    assert "Bench timed 100 ms per step in a separate run, the recording 2 ms" in (report.soundness.sentence)
    assert "a step takes 2 ms unprofiled and 6 ms profiled; step and idle time are those of unprofiled steps" in (
        report.soundness.details
    )
    page = msgspec.json.encode(msgspec.structs.replace(report, soundness=Soundness(verdict="sound", sentence="")))
    assert b"100 ms" not in page
    assert "time-bench" not in {one.key for one in section(report, "time").exhibits}


def test_variants_are_labelled_as_a_separate_timing() -> None:
    rows = small_row(), small_row(precision="fp32")
    (table,) = (
        one.part
        for one in section(tell(Materials(name="a", bench=rows, profile=cpu_bound())), "time").exhibits
        if one.key == "time-bench"
    )
    assert table.title == "Variants, timed separately by bench"


def test_bench_gives_the_step_without_a_recording() -> None:
    report = tell(Materials(name="a", bench=(small_row(),)))
    assert fact(report, "step").value == 100
    assert "10 steps timed with CUDA events" in " ".join(report.soundness.details)


def test_unprofiled_steps_that_are_slower_give_no_idle_time() -> None:
    """729 ms unprofiled and 136 ms profiled do not make the GPU idle 83% of the time."""
    profile = add_unprofiled_steps(record_ours(*[product] * 8), 700 * MS, 729 * MS, 750 * MS)
    report = tell(Materials(name="a", profile=profile))
    assert fact(report, "step").value == pytest.approx(profile.clock.profiled_ns / MS)
    busy = fact(report, "busy").value
    assert isinstance(busy, float)
    assert busy > 0.9
    assert any("all times are those of profiled steps: unprofiled ones" in line for line in report.soundness.details)


def test_kernels_that_do_not_fit_into_an_unprofiled_step_are_doubted() -> None:
    profile = add_unprofiled_steps(record_ours(*[product] * 8), MS, MS, MS)
    report = tell(Materials(name="a", profile=profile))
    assert fact(report, "step").value == pytest.approx(profile.step_ns / MS)
    assert report.soundness.verdict == "doubtful"
    assert "Unprofiled steps take 1 ms, but the kernels of a profiled step take 2 ms" in report.soundness.sentence


def test_lead_of_the_timeline_has_the_time_of_the_step_it_shows() -> None:
    """The mean of the steps is 2 ms, and the step closest to the median takes 1 ms."""
    timeline = Timeline(host_us=5)
    for us in (1000, 1000, 4000):
        with timeline.step():
            timeline.launch(GEMM_BF16, us)
            timeline.wait()
    report = tell(Materials(name="a", profile=timeline.profile()))
    lead = section(report, "timeline").lead
    assert lead.startswith("1 kernel in 2.01 ms per step (1.01 ms in the profiled step shown here)")


def test_a_page_without_marked_steps_speaks_of_the_trace() -> None:
    timeline = Timeline(host_us=40)
    for _ in range(5):
        product(timeline)
        addition(timeline, 5)
    profile = timeline.profile(device="NVIDIA H200")
    report = tell(Materials(name="a", profile=profile))
    page = msgspec.json.encode(report).decode()
    assert not re.findall(r".{60}(?:per step|of the step).{20}", page)
    assert breakdown_of(report).unit == "trace"
    assert next(one.part for one in section(report, "timeline").exhibits).unit == "trace"  # type: ignore[union-attr]


def on_cpu(tflops: float) -> Environment:
    hardware = Hardware(name="Some CPU", peak_flops={"fp32": tflops * 1e12}, source="measured")
    return msgspec.structs.replace(ENVIRONMENT, hardware=hardware)


def test_a_measured_peak_is_the_best_of_all_stages() -> None:
    """Every stage measures it, and other processes lower it: the page has one peak, and one MFU."""
    case = build_case({"size": "small", "context": 256, "precision": "fp32", "device": "cpu"})
    bench = msgspec.structs.replace(small_row(precision="fp32", device="cpu"), environment=on_cpu(2.0))
    found = {}
    for name, tflops in (("quiet", 2.0), ("loaded", 0.5)):
        profile = record_ours(product, case=case, environment=on_cpu(tflops))
        report = tell(Materials(name="a", bench=(bench,), profile=profile))
        table = section(report, "environment").exhibits[0].part
        assert isinstance(table, Table)
        assert [row[1] for row in table.rows if "peak in TFLOP/s" in str(row[0])] == ["fp32 2"]
        found[name] = fact(report, "mfu").value
    assert found["loaded"] == found["quiet"]


def test_profile_of_another_run_keeps_its_own_step() -> None:
    profile = record_ours(product, case=build_case({"size": "medium", "device": "cuda:0"}))
    materials = Materials(name="a", bench=(small_row(),), profile=profile)
    report = tell(materials)
    assert fact(report, "step").value == 100
    assert not {"bound", "busy"} & {one.key for one in report.facts}
    assert breakdown_of(report).walls_ns == (profile.step_ns,)


def test_units_are_chosen_after_rounding() -> None:
    assert [say_time(ns) for ns in (999.4e6, 999.6e6, 999_999, 1.5e12)] == ["999 ms", "1 s", "1 ms", "1,500 s"]
    assert [say_size(mib * 2**20) for mib in (999.4, 999.6, 1001, 1023.9)] == [
        "999 MiB",
        "1,000 MiB",
        "1,001 MiB",
        "1 GiB",
    ]
    assert say_flops(999.9e9) == "1 TFLOP"
    assert say_percent(1e-9) == say_share(1e-9) == "under 0.01%"
    assert say_percent(0) == say_share(0) == "0%"


def test_nouns_agree_with_their_count() -> None:
    assert [count_noun(count, "kernel") for count in (0, 1, 1.0, 2.5, 1265)] == [
        "0 kernels",
        "1 kernel",
        "1 kernel",
        "2.5 kernels",
        "1,265 kernels",
    ]
    assert count_noun(2, "matrix", "matrices") == "2 matrices"


def test_parameter_counts_read_like_model_names() -> None:
    assert [say_parameters(count) for count in (12, 950_000, 128_625_408, 999_999_999, 1_235_814_400)] == [
        "12",
        "950K",
        "129M",
        "1B",
        "1.24B",
    ]


def test_clipped_text_keeps_both_ends() -> None:
    assert clip("short", 5) == "short"
    long = clip("a-long-name-of-a-run-before", 14)
    assert len(long) <= 14
    assert long.startswith("a-long")
    assert long.endswith("before")
