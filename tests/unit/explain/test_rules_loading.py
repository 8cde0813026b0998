"""Rules about input: who is blamed, for which part, and what is proposed."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Finding
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Overhead
from tests.unit.explain.test_rules_host import found, saving_us
from tests.unit.kineto_files import event, kernel, launch, op, write_trace
from tests.unit.recordings import GEMM_BF16, MAIN, TO_DEVICE, Timeline

LOADER = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"
SINGLE, WORKERS = LOADER.format("SingleProcess"), LOADER.format("MultiProcessing")


def loading(name: str, *, inner: str = "", inner_us: float = 0) -> Timeline:
    """Three steps that load for 500 µs each and then compute for a millisecond."""
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            with timeline.range(name):
                timeline.host(500 - inner_us)
                with timeline.range(inner or "other"):
                    timeline.host(inner_us)
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait()
    return timeline


def on_cpu(timeline: Timeline) -> Profile:
    """The same on a CPU, where the stream of an operator is its thread."""
    recording = timeline.record(device="")
    kernels = recording.kernels.with_columns(kind=pl.lit("cpu"), name=pl.lit("aten::mm"), stream=pl.lit(MAIN))
    return make_profile(replace(recording, kernels=kernels, launches=recording.launches.head(0)))


def input_finding(profile: Profile) -> Finding:
    finding = found(profile, "SS012")
    assert finding is not None
    return finding


def test_loader_without_workers_gets_workers() -> None:
    finding = input_finding(loading(SINGLE).profile())
    assert "the loader has no workers" in finding.evidence
    assert "num_workers=8" in finding.fix
    assert "pin_memory=True" in finding.fix


@pytest.mark.parametrize(
    "name", ["data loading", "[pl][profile][_TrainingEpochLoop].train_dataloader_next", "get_batch", "next_batch"]
)
def test_ranges_that_people_name_count(name: str) -> None:
    assert "num_workers=8" in input_finding(loading(name).profile()).fix


def test_loader_with_workers_gets_more() -> None:
    finding = input_finding(loading(WORKERS).profile())
    assert "workers: they are not fast enough" in finding.evidence
    assert "num_workers=2 * num_workers, prefetch_factor=4" in finding.fix


@pytest.mark.parametrize(
    "inner", ["torch/utils/data/_utils/collate.py(398): default_collate", "train.py(12): collate_fn", "aten::stack"]
)
def test_time_of_collating_is_said(inner: str) -> None:
    finding = input_finding(loading(SINGLE, inner=inner, inner_us=200).profile())
    assert "0.2 ms in collating samples" in finding.evidence


def test_stacking_outside_a_loader_is_not_collating() -> None:
    timeline = loading(SINGLE)
    with timeline.step(), timeline.range("aten::stack"):
        timeline.host(2000)
        timeline.launch(GEMM_BF16, 20, op="aten::mm")
    assert "collating" not in input_finding(timeline.profile()).evidence


def test_preprocessing_of_a_pipeline() -> None:
    """A pipeline makes its own loader: the user cannot replace it."""
    frame = "transformers/pipelines/video_classification.py(129): preprocess"
    for timeline in (loading(frame), loading(SINGLE, inner=frame, inner_us=450)):
        finding = input_finding(timeline.profile())
        assert "transformers pipeline" in finding.evidence
        assert finding.fix.startswith("outputs = pipe(")


def test_time_of_copies_inside_a_loader_is_said() -> None:
    """A copy from pageable memory blocks the call that makes it."""
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            with timeline.range("data loading"):
                for _ in range(100):
                    timeline.launch(TO_DEVICE, 1, op="aten::copy_", call="cudaMemcpyAsync")
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait()
    assert "in copying to the GPU" in input_finding(timeline.profile()).evidence


def test_another_thread_that_loads_ahead_holds_nobody_up() -> None:
    recording = loading(SINGLE).record()
    elsewhere = pl.when(pl.col("name") == SINGLE).then(99).otherwise(pl.col("thread"))
    moved = replace(recording, ranges=recording.ranges.with_columns(thread=elsewhere.cast(pl.Int64)))
    assert found(make_profile(moved), "SS012") is None


def test_input_is_found_on_a_cpu() -> None:
    finding = input_finding(on_cpu(loading(SINGLE)))
    assert finding.title == "Loading input takes 0.5 ms per step"
    assert finding.saving_ns == pytest.approx(500_000, rel=0.01)
    assert "GPU" not in finding.evidence
    assert "cuda" not in finding.fix
    assert "num_workers=" in finding.fix
    assert found(on_cpu(loading("other")), "SS012") is None


def test_input_time_is_part_of_the_idle_time_of_the_clock() -> None:
    """Unprofiled steps are faster: what the profiler added to loading is not idle time."""
    profile = loading(SINGLE).profile(overhead=Overhead(plain_ns=1_200_000))
    assert profile.clock.kind == "unprofiled"
    assert "GPU waits for input: 0.1" in input_finding(profile).title
    assert (input_finding(profile).about or 0) * profile.clock.step_ns <= profile.clock.idle_ns


def test_trace_without_steps_speaks_of_the_trace() -> None:
    recording = loading(SINGLE).record()
    unmarked = recording.ranges.filter(~pl.col("name").str.starts_with("step:"))
    finding = input_finding(make_profile(replace(recording, ranges=unmarked)))
    assert finding.title == "GPU waits for input: 1 ms in the trace"  # the first batch was loaded before it begins


@pytest.mark.parametrize("has_loader", [True, False])
def test_pinned_memory_comes_from_the_loader_if_there_is_one(has_loader: bool) -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        with timeline.range(SINGLE if has_loader else "other"):
            timeline.host(5)
        for _ in range(10):
            timeline.launch(TO_DEVICE, 100, op="aten::copy_", call="cudaMemcpyAsync")
            timeline.launch(GEMM_BF16, 200, op="aten::mm")
    finding = found(timeline.profile(), "SS017")
    assert finding is not None
    assert ("DataLoader" in finding.fix) == has_loader
    assert saving_us(timeline.profile(), "SS017") > 0


@pytest.mark.parametrize(("moved", "pinned_us"), [(2_500_000, 100), (None, 500), (50_000_000, 1000)])
def test_pinned_copies_take_time_on_the_bus(moved: int | None, pinned_us: float) -> None:
    """At 25 GB/s, and half of the time if the bytes are unknown. The CPU no longer waits."""
    timeline = Timeline(host_us=5)
    with timeline.step():
        for _ in range(10):
            timeline.launch(TO_DEVICE, 1000, op="aten::copy_", call="cudaMemcpyAsync", bytes=moved)
            timeline.launch(GEMM_BF16, 200, op="aten::mm")
    if pinned_us < 1000:
        assert saving_us(timeline.profile(), "SS017") == pytest.approx(10 * (1000 - pinned_us), rel=0.05)
    else:
        assert found(timeline.profile(), "SS017") is None


def test_frames_of_a_loader_are_read(tmp_path: Path) -> None:
    frames = {
        "torch/utils/data/dataloader.py(703): __next__": ("1000.000", "900.000"),
        "torch/utils/data/_utils/collate.py(398): default_collate": ("1100.000", "300.000"),
        "numpy/core/fromnumeric.py(2100): clip": ("1500.000", "100.000"),
    }
    events = [event("python_function", name, *times) for name, times in frames.items()]
    for number, start in enumerate(("990.000", "1910.000")):
        end = f"{float(start) + 5:.3f}"
        events += [op("aten::mm", start, "6.000"), launch(start, "2.000", number), kernel("k", end, "20.000", number)]
    recording = open_recording(write_trace(tmp_path / "trace.json", events))
    assert sorted(recording.ranges["name"]) == sorted(frames)[1:]
    finding = input_finding(make_profile(recording))
    assert "0.3 ms in collating samples" in finding.evidence
