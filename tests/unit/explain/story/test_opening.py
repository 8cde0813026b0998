"""The first screen: the headline names the model, its step time and what matters, and claims nothing unknown."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.story import Materials, tell
from stepscope.explain.story.opening import subtitle_of, title_of
from stepscope.explain.trace.profile import make_profile
from stepscope.findings import Fact, Report
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
from stepscope.units import say_percent
from tests.unit.attention_rows import attend
from tests.unit.explain.story.story_materials import (
    addition,
    all_there,
    communicate,
    counted,
    memory,
    precisions,
    product,
    record,
    record_ours,
    small_row,
    traced,
)
from tests.unit.recordings import GEMM_BF16, INDUCTOR, TO_DEVICE_PINNED, Timeline
from tests.unit.rows import ENVIRONMENT


def fact(report: Report, key: str) -> Fact:
    return next(one for one in report.facts if one.key == key)


def keys(report: Report) -> list[str]:
    return [one.key for one in report.facts]


# --- The headline -----------------------------------------------------------------------------------------------------


def test_cpu_bound_step() -> None:
    profile = record_ours(*[product] * 6, host_us=2000)
    report = tell(Materials(name="a", profile=profile))
    idle = f"{100 * profile.idle_share:.0f}%"
    assert report.sentence.startswith("Small Transformer, 12 layers, d_model 768, 129M parameters: ")
    assert " per training step; " in report.sentence
    assert f"the GPU waits for the CPU {idle} of the time" in report.sentence
    assert fact(report, "bound").value == "CPU"
    assert fact(report, "busy").value == pytest.approx(1 - profile.idle_share)


def test_compute_bound_step() -> None:
    report = tell(Materials(name="a", profile=record(product, product, product, addition)))
    assert "compute-bound operators take" in report.sentence
    assert fact(report, "bound").value == "compute"


def test_memory_bound_step() -> None:
    report = tell(Materials(name="a", profile=record(product, addition, addition, addition)))
    assert "memory-bound operators take" in report.sentence
    assert fact(report, "bound").value == "memory bandwidth"


def test_communication_bound_step() -> None:
    report = tell(Materials(name="a", profile=record(product, communicate)))
    assert "exposed communication takes" in report.sentence
    assert fact(report, "bound").value == "communication"


def test_hidden_communication_is_not_the_bound() -> None:
    def hidden(timeline: Timeline) -> None:
        timeline.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 900, op="c10d::allreduce_", stream=20)
        for _ in range(4):
            timeline.launch(INDUCTOR, 240, op=None)

    report = tell(Materials(name="a", profile=record(hidden)))
    assert "communication" not in report.sentence
    assert fact(report, "bound").label == "most time in"
    # The picture counts what runs next to communication, too.
    assert report.picture is not None
    (bar,) = report.picture.bars
    assert bar is not None
    shares = {name: time for phase in bar.phases for name, time in zip(phase.classes, phase.times_ns, strict=True)}
    said = f"{say_percent(shares['elementwise'] / bar.step_ns)} of the step"
    assert fact(report, "bound").note == said
    assert bar.busy_ns == pytest.approx(sum(shares.values()))


def test_without_known_limits_the_largest_class_is_named() -> None:
    def compiled(timeline: Timeline) -> None:
        timeline.launch(INDUCTOR, 900, op=None)

    report = tell(Materials(name="a", profile=record(compiled)))
    assert "elementwise operations take" in report.sentence
    assert "bound" not in report.sentence
    assert "peak" not in report.sentence, "no operator has a known cost, so MFU is unknown"


def test_idle_time_that_is_not_the_bound_has_a_tile() -> None:
    profile = record(*[product] * 6, host_us=350)
    assert 0.2 < profile.idle_share < 0.5
    report = tell(Materials(name="a", profile=profile))
    assert "compute-bound" in report.sentence
    assert fact(report, "busy").value == pytest.approx(1 - profile.idle_share)


def test_headline_names_an_inference_pass() -> None:
    case = build_case({"size": "small", "mode": "inference", "compile": True, "attention": "flash"})
    report = tell(Materials(name="a", profile=record_ours(product, case=case)))
    assert "per inference pass" in report.sentence
    assert report.title == "Small Transformer: inference pass, fp32, flash attention, compiled"


def test_cpu_run_has_no_gpu_figures() -> None:
    recording = record_ours(product, host_us=2000).recording
    kernels = recording.kernels.with_columns(kind=pl.lit("cpu"), name=pl.lit("aten::mm"))
    profile = make_profile(replace(recording, kernels=kernels))
    report = tell(Materials(name="a", profile=profile))
    assert "GEMMs take 100% of the operator time" in report.sentence
    assert "GPU" not in report.sentence
    assert "busy" not in keys(report)
    assert fact(report, "bound").note == "100% of the operator time"


def loading(*, us: float, copy_us: float = 0, on_cpu: bool = False) -> Report:
    timeline = Timeline()
    for _ in range(3):
        with timeline.step():
            with timeline.range("enumerate(DataLoader)"):
                timeline.host(us)
            if copy_us:
                timeline.launch(TO_DEVICE_PINNED, copy_us, op="aten::copy_")
            for _ in range(20):
                if on_cpu:
                    timeline.compute("aten::mm", 100)
                else:
                    timeline.launch(GEMM_BF16, 100)
            if not on_cpu:
                timeline.wait()
    return tell(Materials(name="a", profile=timeline.profile()))


@pytest.mark.parametrize(
    ("on_cpu", "says"), [(True, "loading input takes 7"), (False, "the GPU waits for input 7")], ids=["cpu", "gpu"]
)
def test_headline_agrees_with_a_first_card_about_input(on_cpu: bool, says: str) -> None:
    report = loading(us=6000, on_cpu=on_cpu)
    assert report.advice is not None
    first = report.advice[0].finding
    assert first.code == "SS012"
    assert says in report.sentence
    bound = fact(report, "bound")
    assert bound.value == "input"
    assert bound.note == f"{say_percent(first.about or 0.0)} of the step"
    assert say_percent(first.about or 0.0) in report.sentence


def test_input_that_takes_less_than_half_of_the_step_is_not_the_bound() -> None:
    assert "input" not in loading(us=500).sentence


def test_headline_agrees_with_a_first_card_about_copies() -> None:
    report = loading(us=1, copy_us=6000)
    assert "copies between CPU and GPU take 75% of it" in report.sentence
    assert fact(report, "bound").value == "copies"


def test_trace_without_steps_has_no_step_time() -> None:
    report = tell(Materials(name="trace.json.gz", profile=traced()))
    assert report.sentence.startswith("trace.json.gz: 88 kernels in 5.52 ms, no steps marked; the GPU is idle 90% ")
    assert fact(report, "step").label == "trace length"
    assert "90% of the trace" in fact(report, "bound").note
    assert "mfu" not in keys(report)


def test_counters_have_no_idle_time_and_no_step() -> None:
    report = tell(Materials(name="a.csv", profile=counted()))
    assert "one at a time by Nsight Compute; GEMMs take" in report.sentence
    assert "idle" not in report.sentence
    assert "busy" not in keys(report)


def test_memory_only_headline_has_no_time() -> None:
    report = tell(Materials(name="a.pickle", memory=memory()))
    assert report.sentence == (
        "a.pickle: peak memory 66.1 MiB, first reached in backward of step 2, 97% of it workspaces."
    )
    assert keys(report) == ["memory"]


def test_precision_or_attention_only_headline_has_no_step() -> None:
    assert "no step was timed" in tell(Materials(name="a", precision=precisions())).sentence
    report = tell(Materials(name="a", attention=(attend(),)))
    assert report.sentence == "a: 1 attention case on Test GPU; no step was timed."


def test_empty_run_says_that_nothing_was_measured() -> None:
    report = tell(Materials(name="small bf16", is_partial=True))
    assert report.sentence == "small bf16: nothing was measured."
    assert report.is_partial
    assert report.facts == ()


def test_failed_run_names_the_failure() -> None:
    sentence = tell(Materials(name="a", bench=(small_row(status="oom"),))).sentence
    assert sentence.startswith("Small Transformer, ")
    assert "out of memory on Test GPU" in sentence
    crashed = tell(Materials(name="a", bench=(small_row(status="crash"),))).sentence
    assert "failed on Test GPU (crash)" in crashed


# --- Figures ----------------------------------------------------------------------------------------------------------


def test_bench_gives_the_step_time_if_there_is_no_recording() -> None:
    report = tell(Materials(name="a", bench=(small_row(),)))
    assert "100 ms per training step at 6% MFU" in report.sentence
    assert fact(report, "step").value == 100
    assert fact(report, "step").note == "median of 10 steps; p20 to p80: 100 ms to 100 ms"
    assert fact(report, "tokens").value == 10_240
    # Three times the forward pass's 10¹² operations in 0.1 s, of 500 · 10¹².
    assert fact(report, "mfu").value == pytest.approx(0.06)
    assert fact(report, "mfu").note == "of the bf16 peak"


def test_step_tile_names_the_clock() -> None:
    plain = record_ours(product, host_us=2000, overhead=Overhead(plain_ns=1_500_000, recorded_ns=4_000_000))
    report = tell(Materials(name="a", profile=plain))
    assert fact(report, "step").value == 1.5
    assert fact(report, "step").note == "median of unprofiled steps"
    recorded = tell(Materials(name="a", profile=record(product)))
    assert fact(recorded, "step").note == "mean of 2 profiled steps"


def test_memory_of_another_run_is_not_in_the_tiles() -> None:
    other = build_case({"size": "medium", "device": "cuda:0"})
    stranger = replace(memory(), recording=memory().recording.with_manifest(case=other))
    report = tell(Materials(name="a", bench=(small_row(),), memory=stranger))
    assert fact(report, "memory").value == 2**30
    assert any("the memory belongs to another run: medium" in line for line in report.soundness.details)


def test_only_known_models_have_tokens_per_second() -> None:
    own = build_case({"model": "my_model:build", "device": "cuda:0"})
    assert "tokens" in keys(tell(Materials(name="a", profile=record_ours(product))))
    assert "tokens" not in keys(tell(Materials(name="a", profile=record_ours(product, case=own))))


# --- Title and subtitle -----------------------------------------------------------------------------------------------


def test_title_has_the_model_or_the_file() -> None:
    assert title_of(all_there()) == "Small Transformer: training step, bf16"
    assert title_of(Materials(name="trace.json.gz", profile=traced())) == "trace.json.gz"


def test_subtitle_has_device_version_and_time() -> None:
    subtitle = subtitle_of(Materials(name="a", bench=(small_row(),)))
    assert subtitle == "Test GPU · PyTorch 2.13.0 · 2026-01-01 00:00 UTC"
    assert subtitle_of(Materials(name="a", profile=traced())) == "NVIDIA H200"
    ours = record_ours(product, device=ENVIRONMENT.driver_name)
    assert subtitle_of(Materials(name="a", profile=ours)) == "Test GPU · PyTorch 2.13.0 · now"
