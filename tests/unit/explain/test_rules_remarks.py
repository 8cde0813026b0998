"""Remarks about a run: recordings in which each is made, and similar ones in which it is not."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.rules import find
from stepscope.explain.story.run import advise
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording.rows.bench import Doubt
from tests.unit.explain.test_rules_host import found
from tests.unit.recordings import ADD, ALL_REDUCE, GEMM_BF16, Timeline


def one_gemm() -> Timeline:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100)
    return timeline


@pytest.mark.parametrize(
    ("doubt", "code"),
    [("not-finite", "SS021"), ("skipped", "SS021"), ("denormal", "SS024"), ("throttled", "SS016")],
)
def test_each_quality_warning_has_one_remark(doubt: str, code: str) -> None:
    profile = one_gemm().profile(doubts=(Doubt(code=doubt, text="what was seen"),))
    (finding,) = (one for one in find(profile) if one.is_remark)
    assert finding.code == code
    assert finding.evidence == "what was seen"
    assert advise(finding, profile).fixes  # how to learn more


def test_cpu_bound_step_is_not_an_unreliable_measurement() -> None:
    assert find(one_gemm().profile(doubts=(Doubt(code="host-bound", text="the GPU waited"),))) == ()


def passes(backward_us: float, *, unknown_us: float = 0, reduced_us: float = 0) -> Profile:
    timeline = Timeline()
    with timeline.step():
        with timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
        with timeline.phase("backward"):
            timeline.launch(GEMM_BF16, 150, op="aten::mm")
            timeline.launch(ADD, backward_us, op="aten::embedding_dense_backward")
            if reduced_us:
                timeline.launch(ALL_REDUCE, reduced_us, op="c10d::allreduce_")
        if unknown_us:
            timeline.launch(GEMM_BF16, unknown_us, op=None)
    return timeline.profile()


def test_long_backward_names_its_operators() -> None:
    finding = found(passes(1250), "SS022")
    assert finding is not None
    assert finding.is_remark
    assert finding.title == "Backward takes 14× the time of forward"
    assert "aten::embedding_dense_backward (89%)" in finding.evidence


def test_usual_backward_is_not_remarkable() -> None:
    assert found(passes(100), "SS022") is None
    assert found(passes(100, reduced_us=2000), "SS022") is None  # waiting for other ranks is not computing
    # Kernels without a phase may be those of forward.
    assert found(passes(1250, unknown_us=500), "SS022") is None


def steps(factors: list[float]) -> Timeline:
    timeline = Timeline()
    for factor in factors:
        with timeline.step(), timeline.phase("forward"):
            for _ in range(10):
                timeline.launch(GEMM_BF16, 100 * factor, op="aten::mm", grid_x=132)
        timeline.wait()
    return timeline


@pytest.mark.parametrize(
    ("factors", "fires"),
    [
        ([1.0, 1.1, 1.2], True),
        ([1.0, 1.02, 1.05], False),  # little
        ([1.0, 1.3, 1.2], False),  # up and down
        ([1.0, 1.2], False),  # too few
        ([1.2, 1.1, 1.0], False),  # faster
    ],
)
def test_slower_in_every_step(factors: list[float], fires: bool) -> None:
    finding = found(steps(factors).profile(), "SS023")
    assert (finding is not None) == fires
    if finding is not None:
        assert finding.title == "The same kernels take 20% longer at the end of the recording"
        assert finding.is_remark


def test_more_kernels_per_step_are_not_slower_kernels() -> None:
    timeline = Timeline()
    for count in (10, 12, 14):
        with timeline.step(), timeline.phase("forward"):
            for _ in range(count):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
        timeline.wait()
    assert found(timeline.profile(), "SS023") is None


def test_remarks_are_made_about_a_cpu_too() -> None:
    recording = steps([1.0, 1.1, 1.2]).record()
    on_cpu = replace(recording, kernels=recording.kernels.with_columns(kind=pl.lit("cpu"), name=pl.lit("aten::mm")))
    finding = found(make_profile(on_cpu), "SS023")
    assert finding is not None
    assert "operators" in finding.title


@pytest.mark.parametrize("captured", [True, False])
def test_capturing_a_graph_is_not_a_stall(captured: bool) -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 20, op="aten::mm")
    timeline.launch(ADD, 1, op=None, call="hipStreamBeginCapture" if captured else "hipLaunchKernel")
    timeline.host(5000)
    timeline.launch(ADD, 1, op=None, call="hipStreamEndCapture" if captured else "hipLaunchKernel")
    timeline.launch(GEMM_BF16, 20, op="aten::mm")
    profile = timeline.profile()
    assert (found(profile, "SS025") is not None) == captured
    assert (found(profile, "SS019") is None) == captured
    assert (find(profile)[0].code == "SS025") == captured


@pytest.mark.parametrize("waits", [True, False])
def test_queued_kernels_that_do_not_start(waits: bool) -> None:
    """Everything is launched at once. In one of the two, the second half starts 5 ms late."""
    timeline = Timeline()
    for _ in range(20):
        timeline.launch(GEMM_BF16, 1000, op="aten::mm")
    recording = timeline.record()
    late = pl.when(pl.int_range(pl.len()) >= 10).then(5_000_000 if waits else 0).otherwise(0)
    later = recording.kernels.with_columns(pl.col("start_ns", "end_ns") + late)
    finding = found(make_profile(replace(recording, kernels=later)), "SS026")
    assert (finding is not None) == waits
    if finding is not None:
        assert "20%" in finding.title
        assert "5 ms" in finding.evidence
        assert "enable_cuda_sync_events=True" in finding.fix
