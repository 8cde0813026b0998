"""The trace of a recorded loop becomes the recording of its rank."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.jobs.loop_reduction import add_sources, describe_loop, reduce_rank
from stepscope.recording import tables
from stepscope.recording.rows.loop_run import (
    HANDOVER_NAME,
    TRACE_NAME,
    UNKNOWN_LINE,
    LoopFacts,
    LoopRun,
    SourceLines,
)
from stepscope.recording.store import Manifest, Recording, load
from tests.unit.kineto_files import AUTOGRAD, MAIN, PROCESS, event, op, replayed_code, write_trace
from tests.unit.rows import ENVIRONMENT

NODE = "autograd::engine::evaluate_function: "
Called = tuple[str, int, int]  # name, start and end


def operators(
    called: list[Called], *, thread: int = MAIN, sequence: dict[str, int] | None = None, forward: int | None = None
) -> pl.DataFrame:
    rows = [
        {
            "name": name,
            "start_ns": start,
            "end_ns": end,
            "process": PROCESS,
            "thread": thread,
            "sequence": (sequence or {}).get(name),
            "forward_thread": forward,
        }
        for name, start, end in called
    ]
    return tables.conform("ops", pl.DataFrame(rows, schema_overrides=_schema("ops", rows)))


def marks(called: list[Called]) -> pl.DataFrame:
    rows = [
        {"name": name, "start_ns": start, "end_ns": end, "process": PROCESS, "thread": MAIN, "source": "user"}
        for name, start, end in called
    ]
    return tables.conform("ranges", pl.DataFrame(rows, schema_overrides=_schema("ranges", rows)))


def _schema(table: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: tables.SCHEMAS[table][name] for name in rows[0]}


def recorded(ops: pl.DataFrame, ranges: pl.DataFrame) -> Recording:
    manifest = Manifest(source="pytorch profiler", file="trace.json", notes=("read",))
    return Recording(manifest=manifest, ops=ops, ranges=ranges)


def loop(**more: Any) -> LoopRun:
    facts = LoopFacts(script="train.py", found_by="optimizer steps", notes=("seen",))
    return LoopRun(facts=facts, environment=ENVIRONMENT, started="2026-01-01T00:00:00", **more)


def lines(ops: pl.DataFrame) -> list[str | None]:
    return ops["source"].to_list()


STEP = [("aten::linear", 10, 30), ("aten::addmm", 12, 28), ("aten::relu", 40, 50), ("aten::linear", 60, 80)]
SOURCES = SourceLines(
    names=("aten::linear", "aten::addmm", "aten::relu", "aten::linear"),
    places=(0, 0, 1, 2),
    lines=("a:1", "a:2", "b:3"),
)


def test_the_same_operators_are_matched_one_by_one() -> None:
    later = [(name, start + 100, end + 100) for name, start, end in STEP]
    ops = add_sources(operators(STEP + later), marks([("step:0", 0, 100), ("step:1", 100, 200)]), SOURCES)
    assert lines(ops) == ["a:1", "a:1", "a:2", "b:3"] * 2
    assert ops.columns == list(tables.SCHEMAS["ops"])


def test_operators_outside_the_steps_have_no_line() -> None:
    ops = add_sources(operators([("aten::relu", 1, 2), *STEP]), marks([("step:0", 5, 100)]), SOURCES)
    assert lines(ops) == [None, "a:1", "a:1", "a:2", "b:3"]


def test_operators_of_other_threads_have_no_line() -> None:
    other = operators([("aten::relu", 11, 12)], thread=MAIN + 1)
    ops = add_sources(pl.concat([operators(STEP), other]), marks([("step:0", 0, 100)]), SOURCES)
    assert lines(ops) == ["a:1", "a:1", "a:2", "b:3", None]


def test_an_unknown_line_is_null() -> None:
    sources = msgspec.structs.replace(SOURCES, places=(0, UNKNOWN_LINE, 1, 2))
    assert lines(add_sources(operators(STEP), marks([("step:0", 0, 100)]), sources)) == ["a:1", None, "a:2", "b:3"]


def test_an_inner_operator_that_starts_at_the_same_time_comes_second() -> None:
    """The clock of the profiler is too coarse for some."""
    step = [("aten::to", 10, 20), ("aten::to", 10, 30)]
    sources = SourceLines(names=("aten::to", "aten::to"), places=(0, 1), lines=("outer:1", "inner:2"))
    assert lines(add_sources(operators(step), marks([("step:0", 0, 100)]), sources)) == ["inner:2", "outer:1"]


def test_if_the_steps_differ_operators_with_as_many_calls_are_matched() -> None:
    """One more call of `item`, which logs every few steps, and one that the other step has only once in one place."""
    step = [*STEP, ("aten::item", 90, 91), ("aten::relu", 92, 93), ("aten::copy_", 94, 95), ("aten::copy_", 95, 96)]
    sources = SourceLines(
        names=(*SOURCES.names, "aten::copy_", "aten::copy_", "aten::copy_"),
        places=(*SOURCES.places, 0, 1, 1),
        lines=SOURCES.lines,
    )
    found = lines(add_sources(operators(step), marks([("step:0", 0, 100)]), sources))
    assert found[:2] == ["a:1", "a:1"]
    assert found[3] == "b:3"  # the second of two calls, in both
    assert found[2] == found[5] == "a:2"  # called more often, but always by one line
    assert found[4] is None  # not called in the other step
    assert found[6:] == [None, None]  # called by several lines: which, is not known


def test_without_sources_operators_stay_as_they_are() -> None:
    ops = operators(STEP)
    assert add_sources(ops, marks([("step:0", 0, 100)]), SourceLines()).equals(ops)
    assert add_sources(ops, tables.empty("ranges"), SOURCES).equals(ops)


def test_backward_operators_have_the_line_of_the_forward_operator() -> None:
    forward = operators(STEP, sequence={"aten::addmm": 7, "aten::relu": 8})
    backward = operators(
        [
            (f"{NODE}ReluBackward0", 100, 120),
            ("aten::threshold_backward", 105, 110),
            (f"{NODE}AddmmBackward0", 130, 160),
            ("aten::mm", 140, 150),
            (f"{NODE}AccumulateGrad", 170, 180),
            ("aten::detach", 172, 173),
        ],
        thread=AUTOGRAD,
        sequence={f"{NODE}ReluBackward0": 8, f"{NODE}AddmmBackward0": 7},
        forward=1,
    )
    ops = add_sources(pl.concat([forward, backward]), marks([("step:0", 0, 200)]), SOURCES)
    assert lines(ops)[4:] == ["a:2", "a:2", "a:1", "a:1", None, None]


def test_a_backward_pass_on_the_thread_of_the_loop_does_not_disturb_the_order() -> None:
    """As on a CPU, where the same thread runs it."""
    forward = operators(STEP[:3], sequence={"aten::addmm": 7})
    backward = operators(
        [(f"{NODE}AddmmBackward0", 52, 58), ("aten::linear", 53, 55)], sequence={f"{NODE}AddmmBackward0": 7}, forward=1
    )
    ops = pl.concat([forward, backward, operators(STEP[3:])])
    assert lines(add_sources(ops, marks([("step:0", 0, 100)]), SOURCES)) == ["a:1", "a:1", "a:2", "a:1", "a:1", "b:3"]


def test_the_mark_of_an_incomplete_step_is_dropped() -> None:
    ranges = marks([("step:0", 0, 100), ("step:1", 100, 200), ("step:2", 200, 210), ("phase:backward", 201, 205)])
    found = describe_loop(recorded(operators(STEP), ranges), loop(recorded_steps=2), command="run")
    assert found.ranges["name"].to_list() == ["step:0", "step:1", "phase:backward"]


def test_a_synchronization_has_its_line_next_to_its_name() -> None:
    ranges = marks(
        [
            ("step:0", 0, 100),
            ("sync:torch.cuda.synchronize@train.py:42", 10, 20),
            ("sync:Event.synchronize@", 30, 40),
            ("module:mail@home", 50, 60),
        ]
    )
    found = describe_loop(recorded(operators(STEP), ranges), loop(recorded_steps=1), command="run").ranges
    expected = [
        ("step:0", None),
        ("sync:torch.cuda.synchronize", "train.py:42"),
        ("sync:Event.synchronize", None),
        ("module:mail@home", None),
    ]
    assert found.select("name", "source_line").rows() == expected


def test_unprofiled_steps_are_a_row_per_phase_and_add_up() -> None:
    phases = {"input": (10, 20, 30), "backward": (100, 100, 100), "optimizer": (5, 5, 5), "other": (85, 75, 65)}
    run = loop(recorded_steps=1, phases_ns=phases, recorded_step_ns=(500, 400, 900), clock="cuda events")
    found = describe_loop(recorded(operators(STEP), marks([("step:0", 0, 100)])), run, command="run")
    sums = found.steps.group_by("step").agg(pl.col("duration_ns").sum()).sort("step")
    assert sums["duration_ns"].to_list() == [200, 200, 200]
    assert found.steps.height == 12
    assert found.steps["step"].is_sorted()
    assert set(found.steps["clock"]) == {"cuda events"}
    overhead = found.manifest.overhead
    assert overhead is not None
    assert (overhead.plain_ns, overhead.annotated_ns) == (200, 500)


def test_without_unprofiled_steps_there_is_no_overhead() -> None:
    found = describe_loop(recorded(operators(STEP), marks([("step:0", 0, 100)])), loop(recorded_steps=1), command="run")
    assert found.manifest.overhead is None
    assert not found.steps.height


def test_the_manifest_describes_the_loop() -> None:
    run = loop(recorded_steps=1, rank=3, world_size=4, parameters=12, optimizer="AdamW (fused)", compiled=True)
    found = describe_loop(recorded(operators(STEP), marks([("step:0", 0, 100)])), run, command="stepscope run").manifest
    assert found.loop == run.facts
    assert (found.rank, found.world_size, found.command) == (3, 4, "stepscope run")
    assert (found.parameters, found.optimizer, found.compiled) == (12, "AdamW (fused)", True)
    assert found.notes == ("read", "seen")
    assert found.file == ""
    assert found.device == ENVIRONMENT.driver_name
    assert found.versions["torch"] == ENVIRONMENT.torch
    alone = describe_loop(recorded(operators(STEP), marks([("step:0", 0, 100)])), loop(), command="run").manifest
    assert alone.rank is alone.world_size is None


def test_the_trace_of_another_profiler_is_one_window() -> None:
    """It has no marks of ours, and its stacks are its own: every operator of the loop's thread is in `sources`."""
    pinning = operators([("aten::pin_memory", 5, 6)], thread=MAIN + 1)
    ops, ranges = pl.concat([pinning, operators(STEP)]), marks([("ProfilerStep#3", 0, 100), ("step:7", 0, 100)])
    found = describe_loop(recorded(ops, ranges), loop(sources=SOURCES, is_whole_trace=True), command="run")
    assert lines(found.ops) == [None, "a:1", "a:1", "a:2", "b:3"]
    assert found.ranges.equals(ranges)


def test_raw_files_become_a_recording_and_are_deleted(tmp_path: Path) -> None:
    raw, folder = tmp_path / "rank-0.raw", tmp_path / "rank-0"
    raw.mkdir()
    events = [op(name, f"{start}.000", f"{end - start}.000") for name, start, end in STEP]
    write_trace(raw / TRACE_NAME, [event("user_annotation", "step:0", "5.000", "90.000"), *events])
    (raw / HANDOVER_NAME).write_bytes(msgspec.json.encode(loop(recorded_steps=1, sources=SOURCES)))
    reduce_rank(raw, folder, command="stepscope run train.py")
    saved = load(folder)
    assert lines(saved.ops) == ["a:1", "a:1", "a:2", "b:3"]
    assert saved.manifest.loop == loop().facts
    assert not raw.exists()


def test_calls_of_compiled_code_are_kept_for_replays(tmp_path: Path) -> None:
    raw, folder = tmp_path / "rank-0.raw", tmp_path / "rank-0"
    raw.mkdir()
    write_trace(raw / TRACE_NAME, replayed_code(raw))
    (raw / HANDOVER_NAME).write_bytes(msgspec.json.encode(loop(is_whole_trace=True)))
    reduce_rank(raw, folder, command="stepscope run train.py")
    kernels = attribute_kernels(load(folder)).sort("start_ns")
    assert kernels["module"].to_list() == ["embedding", "head"]


@pytest.mark.parametrize("content", [None, b"{", b'{"schema": "stepscope.loop/1"}'])
def test_raw_files_without_their_description_are_an_error(tmp_path: Path, content: bytes | None) -> None:
    write_trace(tmp_path / TRACE_NAME, [op("aten::relu", "1.000", "1.000")])
    if content is not None:
        (tmp_path / HANDOVER_NAME).write_bytes(content)
    with pytest.raises(StepscopeError, match="cannot read"):
        reduce_rank(tmp_path, tmp_path / "rank-0", command="run")
    assert (tmp_path / TRACE_NAME).exists()
