"""The first screen: the sentence is true and reads well in every situation, and says nothing that is not known."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.story import Materials, tell
from stepscope.explain.story.opening import subtitle_of, title_of
from stepscope.explain.trace.profile import make_profile
from stepscope.findings import Fact, Report
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
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
from tests.unit.recordings import INDUCTOR, Timeline
from tests.unit.rows import ENVIRONMENT


def fact(report: Report, key: str) -> Fact:
    return next(one for one in report.facts if one.key == key)


def keys(report: Report) -> list[str]:
    return [one.key for one in report.facts]


# --- The sentence -----------------------------------------------------------------------------------------------------


def test_a_step_that_waits_for_its_host() -> None:
    profile = record_ours(*[product] * 6, host_us=2000)
    report = tell(Materials(name="a", profile=profile))
    idle = f"{100 * profile.idle_share:.0f}%"
    assert report.sentence.startswith("A training step of small (batch 4, context 256, bf16) takes ")
    assert f"; the GPU waits for the host {idle} of it, and arithmetic reaches" in report.sentence
    assert fact(report, "bound").value == "the host"
    assert fact(report, "busy").value == pytest.approx(1 - profile.idle_share)


def test_a_step_bound_by_arithmetic() -> None:
    report = tell(Materials(name="a", profile=record(product, product, product, addition)))
    assert "of it goes to operators bound by arithmetic" in report.sentence
    assert fact(report, "bound").value == "arithmetic"


def test_a_step_bound_by_memory_traffic() -> None:
    report = tell(Materials(name="a", profile=record(product, addition, addition, addition)))
    assert "of it goes to operators bound by memory traffic" in report.sentence
    assert fact(report, "bound").value == "memory traffic"


def test_a_step_bound_by_communication() -> None:
    report = tell(Materials(name="a", profile=record(product, communicate)))
    assert "communication that nothing hides takes" in report.sentence
    assert fact(report, "bound").value == "communication"


def test_communication_that_others_hide_bounds_nothing() -> None:
    def hidden(timeline: Timeline) -> None:
        timeline.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 900, op="c10d::allreduce_", stream=20)
        for _ in range(4):
            timeline.launch(INDUCTOR, 240, op=None)

    report = tell(Materials(name="a", profile=record(hidden)))
    assert "communication" not in report.sentence
    assert fact(report, "bound").label == "most time"


def test_where_limits_are_not_known_the_largest_class_is_named() -> None:
    def compiled(timeline: Timeline) -> None:
        timeline.launch(INDUCTOR, 900, op=None)

    report = tell(Materials(name="a", profile=record(compiled)))
    assert "elementwise operations take" in report.sentence
    assert "bound" not in report.sentence
    assert "peak" not in report.sentence, "no operator's cost is known, so neither is the utilisation"


def test_much_idle_time_is_said_beside_another_bound() -> None:
    profile = record(*[product] * 6, host_us=350)
    assert 0.2 < profile.idle_share < 0.5
    sentence = tell(Materials(name="a", profile=profile)).sentence
    assert "bound by arithmetic, the GPU waits for the host" in sentence


def test_an_inference_pass_is_called_so() -> None:
    case = build_case({"size": "small", "mode": "inference", "compile": True, "attention": "flash"})
    sentence = tell(Materials(name="a", profile=record_ours(product, case=case))).sentence
    assert sentence.startswith("An inference pass of small (batch 4, context 128, fp32, flash attention, compiled) ")


def test_operators_of_a_cpu_wait_for_nobody() -> None:
    recording = record_ours(product, host_us=2000).recording
    kernels = recording.kernels.with_columns(kind=pl.lit("cpu"), name=pl.lit("aten::mm"))
    profile = make_profile(replace(recording, kernels=kernels))
    report = tell(Materials(name="a", profile=profile))
    assert "GEMMs take 100% of the operators' time" in report.sentence
    assert "GPU" not in report.sentence
    assert "busy" not in keys(report)
    assert fact(report, "bound").note == "100% of the operators' time"


def test_a_trace_without_steps_claims_none() -> None:
    report = tell(Materials(name="trace.json.gz", profile=traced()))
    assert report.sentence.startswith("trace.json.gz marks no steps: 88 kernels in 5.52 ms; the GPU is idle 90% of it")
    assert fact(report, "step").label == "recorded"
    assert "90% of the recording" in fact(report, "bound").note
    assert "mfu" not in keys(report)


def test_counters_have_no_gaps_and_no_step() -> None:
    report = tell(Materials(name="a.csv", profile=counted()))
    assert "one after another under Nsight Compute; GEMMs take" in report.sentence
    assert "idle" not in report.sentence
    assert "busy" not in keys(report)


def test_memory_alone_says_nothing_of_time() -> None:
    report = tell(Materials(name="a.pickle", memory=memory()))
    assert report.sentence == (
        "a.pickle holds 66.1 MiB at its peak, first in backward of step 2, 97% of it workspaces; how long a "
        "step takes is not recorded."
    )
    assert keys(report) == ["memory"]


def test_precision_or_attention_alone_say_that_no_step_was_timed() -> None:
    assert "no step was timed" in tell(Materials(name="a", precision=precisions())).sentence
    report = tell(Materials(name="a", attention=(attend(),)))
    assert report.sentence == "1 case of attention alone on Test GPU; no step was timed."


def test_nothing_at_all_says_so() -> None:
    report = tell(Materials(name="small bf16", is_partial=True))
    assert report.sentence == "Nothing was recorded of small bf16."
    assert report.is_partial
    assert report.facts == ()


def test_a_run_that_does_not_fit_is_told_as_such() -> None:
    sentence = tell(Materials(name="a", bench=(small_row(status="oom"),))).sentence
    assert sentence == "A training step of small (batch 4, context 256, bf16) does not fit into memory on Test GPU."
    crashed = tell(Materials(name="a", bench=(small_row(status="crash"),))).sentence
    assert "did not come to an end (crash)" in crashed


# --- Figures ----------------------------------------------------------------------------------------------------------


def test_the_timing_gives_the_headline_and_the_profile_the_bound() -> None:
    report = tell(all_there())
    assert "takes 100 ms and" in report.sentence
    assert fact(report, "step").value == 100
    assert fact(report, "step").note == "median of 10 steps; middle 60%: 100 ms to 100 ms"
    assert fact(report, "tokens").value == 10_240
    # Three times the forward pass's 10¹² operations in 0.1 s, of 500 · 10¹².
    assert fact(report, "mfu").value == pytest.approx(0.06)
    assert "arithmetic reaches 6% of the bf16 peak" in report.sentence


def test_a_recording_without_its_own_timing_names_its_clock() -> None:
    plain = record_ours(product, host_us=2000, overhead=Overhead(plain_ns=1_500_000, recorded_ns=4_000_000))
    report = tell(Materials(name="a", profile=plain))
    assert fact(report, "step").value == 1.5
    assert fact(report, "step").note == "median without the recorder"
    recorded = tell(Materials(name="a", profile=record(product)))
    assert fact(recorded, "step").note == "mean of 2 steps, while recorded"


def test_memory_of_another_run_is_not_the_headline_s() -> None:
    other = build_case({"size": "medium", "device": "cuda:0"})
    stranger = replace(memory(), recording=memory().recording.with_manifest(case=other))
    report = tell(Materials(name="a", bench=(small_row(),), memory=stranger))
    assert fact(report, "memory").value == 2**30
    assert any("the memory is of another run: medium" in line for line in report.soundness.details)


def test_tokens_are_claimed_of_known_models_only() -> None:
    own = build_case({"model": "my_model:build", "device": "cuda:0"})
    assert "tokens" in keys(tell(Materials(name="a", profile=record_ours(product))))
    assert "tokens" not in keys(tell(Materials(name="a", profile=record_ours(product, case=own))))


# --- Title and subtitle -----------------------------------------------------------------------------------------------


def test_a_run_of_ours_is_named_by_its_case_and_a_file_by_its_name() -> None:
    assert title_of(all_there()) == "small: training step, bf16"
    assert title_of(Materials(name="trace.json.gz", profile=traced())) == "trace.json.gz"


def test_the_subtitle_has_device_version_and_time() -> None:
    subtitle = subtitle_of(Materials(name="a", bench=(small_row(),)))
    assert subtitle == "Test GPU · PyTorch 2.13.0 · 2026-01-01 00:00 UTC"
    assert subtitle_of(Materials(name="a", profile=traced())) == "NVIDIA H200"
    ours = record_ours(product, device=ENVIRONMENT.driver_name)
    assert subtitle_of(Materials(name="a", profile=ours)) == "Test GPU · PyTorch 2.13.0 · now"
