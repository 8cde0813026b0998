"""The time of a training loop: parts that add up to the step, and waits by line of code."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.trace.loop.loop_tables import loop_table, syncs_table
from stepscope.explain.trace.loop.loop_time import COPIES, OTHER, PROCESS, SYNCHRONISATION, WORKERS, measure_loop
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.explain.trace.profile_tables import kernels_table
from stepscope.recording.tables import OPS
from tests.unit.loop_recordings import LoopPlan, profile_loop, record_loop
from tests.unit.recordings import GEMM_BF16, TO_HOST, Timeline


def parts_of(profile: Profile) -> dict[str, float]:
    loop = measure_loop(profile)
    assert loop is not None
    assert sum(part.cpu_ns for part in loop.parts) == pytest.approx(profile.clock.step_ns)
    return {part.key: part.cpu_ns / 1000 for part in loop.parts}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_profiled_parts_are_those_of_the_thread(on_cpu: bool) -> None:
    parts = parts_of(profile_loop(LoopPlan(on_cpu=on_cpu, unprofiled=None, checkpoint_us=60)))
    assert parts[PROCESS] == pytest.approx(800, rel=0.01)
    assert parts["logging"] == pytest.approx(30 if on_cpu else 35, rel=0.01)
    assert parts["checkpoint"] == pytest.approx(60, rel=0.01)
    assert parts["backward"] == pytest.approx(40 * 22.5 if on_cpu else 40 * 5, rel=0.01)
    assert parts["forward"] == pytest.approx(20 * 22.5 if on_cpu else 20 * 5, rel=0.02)
    assert {"loss", "clipping", "optimizer", "scheduler", OTHER} <= set(parts)
    assert (SYNCHRONISATION in parts, COPIES in parts) == (not on_cpu, not on_cpu)


def test_unprofiled_phases_win_and_the_rest_is_scaled() -> None:
    profiled, unprofiled = (parts_of(profile_loop(LoopPlan(unprofiled=factor))) for factor in (None, 0.8))
    assert unprofiled[PROCESS] == pytest.approx(profiled[PROCESS], rel=0.01)  # the profiler does not slow it down
    for part in ("backward", "optimizer", "forward", "logging", SYNCHRONISATION):
        assert unprofiled[part] == pytest.approx(0.8 * profiled[part], rel=0.01)


def test_parts_are_those_of_the_clock() -> None:
    """Slower unprofiled steps are not the clock: the page is about profiled ones."""
    profiled, slower = (parts_of(profile_loop(LoopPlan(unprofiled=factor))) for factor in (None, 1.4))
    assert slower == pytest.approx(profiled)


def test_unprofiled_input_counts_even_if_no_profiled_step_loads() -> None:
    """A batch that was loaded before the recording began."""
    recording = record_loop(LoopPlan())
    ranges = recording.ranges.filter(~pl.col("name").str.contains("phase:input|DataLoader"))
    assert parts_of(make_profile(replace(recording, ranges=ranges)))["input"] == pytest.approx(800, rel=0.01)


def test_workers_and_collating_are_separate_parts() -> None:
    assert WORKERS in parts_of(profile_loop(LoopPlan(num_workers=2)))
    parts = parts_of(profile_loop(LoopPlan(collating_us=100, unprofiled=None)))
    assert parts["collate"] == pytest.approx(200, rel=0.01)
    assert parts[PROCESS] == pytest.approx(800, rel=0.01)


def test_configuration_of_the_loader_says_what_its_range_does_not() -> None:
    recording = record_loop(LoopPlan(num_workers=2))
    bare = recording.ranges.filter(~pl.col("name").str.contains("DataLoader"))
    assert WORKERS in parts_of(make_profile(replace(recording, ranges=bare)))


def test_micro_batches_are_counted() -> None:
    table = loop_table(profile_loop(LoopPlan(micro_batches=4)))
    calls = {row[0]: row[3] for row in table.rows}
    assert (calls["backward"], calls["forward"], calls["optimizer"]) == (4, 4, 1)


def test_trace_of_another_tool_without_ranges_around_forward_and_backward() -> None:
    """PyTorch itself marks steps, the loader and the optimizer. Nodes of autograd run on another thread."""
    timeline = Timeline(host_us=5)
    for number in range(2):
        with timeline.range(f"ProfilerStep#{number}"):
            with timeline.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                timeline.host(100)
            for _ in range(10):
                timeline.launch(GEMM_BF16, 5, op="aten::mm")
                timeline.host(3)
            for _ in range(10):
                with timeline.node():
                    timeline.launch(GEMM_BF16, 5, op="aten::mm")
                timeline.host(3)
            with timeline.range("Optimizer.step#AdamW.step"):
                timeline.launch(GEMM_BF16, 5, op="aten::_foreach_add_")
    recording = timeline.record()
    numbered = pl.when(pl.col("name") == "aten::mm").then(pl.lit(7, pl.Int64))
    parts = parts_of(make_profile(replace(recording, ops=recording.ops.with_columns(sequence=numbered))))
    assert parts[PROCESS] == pytest.approx(100, rel=0.1)
    assert parts["forward"] == pytest.approx(10 * 8, rel=0.1)
    assert parts["backward"] == pytest.approx(10 * 8, rel=0.1)
    assert parts["optimizer"] == pytest.approx(5, rel=0.1)


def test_recording_without_steps_has_no_loop() -> None:
    recording = record_loop(LoopPlan())
    unmarked = recording.ranges.filter(~pl.col("name").str.starts_with("step:"))
    table = loop_table(make_profile(replace(recording, ranges=unmarked)))
    assert not table.rows
    assert table.notes == ("this recording has no marked steps",)


# --- Synchronizations -------------------------------------------------------------------------------------------------


def waits_of(profile: Profile) -> dict[tuple[object, ...], float]:
    return {row[:3]: row[3] for row in syncs_table(profile).rows}  # type: ignore[misc]


def test_waits_are_named_by_line_and_by_what_waits() -> None:
    timeline = Timeline(host_us=5)
    for _ in range(2):
        with timeline.step():
            for line, op in (("train.py:10", "aten::nonzero"), ("train.py:11", "aten::_local_scalar_dense")):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
                with timeline.line(line):
                    timeline.wait(op=op)
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            with timeline.synchronisation("torch.cuda.synchronize", "train.py:12"):
                timeline.wait(call="cudaDeviceSynchronize")
            with timeline.phase("logging"), timeline.line("train.py:13"):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
                timeline.launch(TO_HOST, 30, op="aten::copy_", call="cudaMemcpy")
            timeline.wait(call="cudaEventSynchronize")
    assert waits_of(timeline.profile()) == {
        ("train.py:10", "nonzero", "forward"): 1,
        ("train.py:11", ".item()", "forward"): 1,
        ("train.py:12", "torch.cuda.synchronize", None): 1,
        (None, "Event.synchronize", None): 1,
    }


def test_a_copy_and_the_wait_for_it_are_one_call() -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        timeline.launch(GEMM_BF16, 100, op="aten::mm")
        with timeline.range("copy"):
            timeline.host(1)
            timeline.launch(TO_HOST, 100, op=None, call="cudaMemcpyAsync")
            timeline.wait()
    recording = timeline.record()
    calls = recording.launches.with_columns(  # the copy blocks, too
        end_ns=pl.when(pl.col("name") == "cudaMemcpyAsync").then(pl.col("start_ns") + 50_000).otherwise("end_ns")
    )
    copy = recording.ranges.filter(pl.col("name") == "copy").with_columns(name=pl.lit("aten::copy_"))
    ops = pl.concat([recording.ops, copy.select(set(copy.columns) & set(OPS) - {"source"})], how="diagonal")
    profile = make_profile(replace(recording, launches=calls, ops=ops.select(list(OPS))))
    assert waits_of(profile) == {(None, "copy to the CPU", "forward"): 1}


def test_waits_on_a_cpu_do_not_exist() -> None:
    table = syncs_table(profile_loop(LoopPlan(on_cpu=True)))
    assert not table.rows
    assert "does not wait for a GPU" in table.notes[0]


# --- Lines of code ----------------------------------------------------------------------------------------------------


def test_kernels_name_the_line_that_launches_most_of_their_time() -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        for line, us in (("model.py:3", 10), ("model.py:7", 50)):
            with timeline.line(line):
                timeline.launch(GEMM_BF16, us, op="aten::mm")
    table = kernels_table(timeline.profile())
    place = [column.key for column in table.columns].index("source")
    assert table.rows[0][place] == "model.py:7"


def test_kernels_table_has_no_lines_if_none_are_recorded() -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        timeline.launch(GEMM_BF16, 10, op="aten::mm")
    assert "source" not in [column.key for column in kernels_table(timeline.profile()).columns]
