"""NVTX ranges from PyTorch become operators, and backward operators find their forward thread."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from stepscope.recording.readers import nsys
from stepscope.recording.store import Recording
from tests.unit.nsys_files import AUTOGRAD, MAIN, Export, training_step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.sqlite"


def read(export: Export, path: Path) -> Recording:
    return nsys.read(export.write(path))


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def notes(recording: Recording) -> str:
    return "\n".join(recording.manifest.notes)


def test_operators_and_ranges_are_separated(path: Path) -> None:
    recording = read(training_step(), path)
    assert rows(recording.ranges, "name", "thread", "source") == [
        ("step:0", MAIN, "nvtx"),
        ("phase:forward", MAIN, "nvtx"),
        ("module:head", MAIN, "nvtx"),
        ("phase:backward", MAIN, "nvtx"),
    ]
    assert recording.ops["name"].to_list()[:3] == [
        "aten::linear",
        "aten::mm",
        "autograd::engine::evaluate_function: MmBackward0",
    ]
    assert recording.manifest.modules_recorded
    assert recording.manifest.shapes_recorded
    assert recording.ops["shapes"].to_list()[:2] == ["[[2, 3], [3, 4], []]"] * 2
    assert msgspec.json.decode(recording.ops["shapes"][0]) == [[2, 3], [3, 4], []]


def test_backward_operators_know_the_thread_that_created_their_node(path: Path) -> None:
    ops = read(training_step(), path).ops
    assert rows(ops, "name", "sequence", "forward_thread") == [
        ("aten::linear", 12, None),
        ("aten::mm", 12, None),
        ("autograd::engine::evaluate_function: MmBackward0", 12, MAIN),
        ("MmBackward0", 12, MAIN),
        ("aten::mm", 12, MAIN),  # inside the node
        ("aten::add_", 12, MAIN),  # after the node, inside its evaluation
        ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", None, None),
        ("torch::autograd::AccumulateGrad", None, None),
        ("aten::detach", None, None),
    ]


def test_evaluation_may_have_its_own_number(path: Path) -> None:
    export = Export()
    export.kernel("k", 0, 1)
    export.range("aten::mm, seq = 3, op_id = 1", 0, 10)
    export.range("autograd::engine::evaluate_function: MmBackward0, seq = 3", 20, 40, thread=AUTOGRAD)
    export.range("autograd::engine::evaluate_function: MmBackward0, op_id = 5", 50, 60, thread=AUTOGRAD)
    export.range("MmBackward0, seq = 3", 70, 80, thread=AUTOGRAD)  # inside neither
    ops = read(export, path).ops
    assert rows(ops, "sequence", "forward_thread") == [(3, None), (3, MAIN), (None, None), (3, MAIN)]


def test_a_backward_pass_on_the_thread_of_the_forward_pass_is_found_there(path: Path) -> None:
    export = Export()
    export.kernel("k", 0, 1)
    export.range("aten::mm, seq = 3, op_id = 1", 0, 10)
    export.range("MmBackward0, seq = 3, op_id = 2", 20, 30)
    assert read(export, path).ops["forward_thread"].to_list() == [None, MAIN]


def test_node_of_several_threads_has_no_forward_thread(path: Path) -> None:
    export = training_step()
    export.range("aten::mul, seq = 12, op_id = 90", 0, 5, thread=333)
    export.range("MulBackward0, seq = 70, op_id = 91", 910, 920, thread=AUTOGRAD)  # created before the recording
    recording = read(export, path)
    backward = recording.ops.filter(pl.col("thread") == AUTOGRAD)
    assert backward["forward_thread"].to_list() == [None] * 8
    assert backward["sequence"].to_list() == [None] * 8
    assert "5 backward operators have no unique forward operator" in notes(recording)


def test_node_number_of_another_process_is_ignored(path: Path) -> None:
    export = training_step()
    export.range("aten::mul, seq = 12, op_id = 90", 0, 5, thread=333, process=500)
    ops = read(export, path).ops
    assert ops.filter(pl.col("thread") == AUTOGRAD)["forward_thread"].to_list()[:4] == [MAIN] * 4


def test_recomputed_forward_pass_inside_backward_is_forward(path: Path) -> None:
    export = training_step()
    export.range("aten::gelu, seq = 4, op_id = 50", 504, 510, thread=AUTOGRAD)
    export.range("aten::to, seq = 4, op_id = 51", 505, 506, thread=AUTOGRAD)
    export.range("aten::copy_, op_id = 52", 507, 508, thread=AUTOGRAD)
    export.range("aten::mm, seq = 12, op_id = 51", 511, 515, thread=AUTOGRAD)  # coincidentally the same number
    ops = read(export, path).ops
    again = ops.filter(pl.col("start_ns").is_between(504, 511))
    assert rows(again, "name", "sequence", "forward_thread") == [
        ("aten::gelu", 4, None),
        ("aten::to", 4, None),
        ("aten::copy_", None, None),
        ("aten::mm", 12, None),
    ]
    assert ops.filter(name="MmBackward0")["forward_thread"].to_list() == [MAIN]


def test_nested_backward_pass_uses_nodes_of_its_own_thread(path: Path) -> None:
    export = training_step()
    evaluate = "autograd::engine::evaluate_function: "
    export.range("aten::block, seq = 13, op_id = 70", 260, 270)
    export.range("aten::gelu, seq = 4, op_id = 71", 280, 290)
    export.range(f"{evaluate}CheckpointFunctionBackward, seq = 13, op_id = 72", 700, 900, thread=AUTOGRAD)
    export.range("aten::gelu, seq = 4, op_id = 73", 710, 720, thread=AUTOGRAD)
    export.range(f"{evaluate}GeluBackward0, seq = 4, op_id = 74", 730, 780, thread=AUTOGRAD)
    export.range("aten::gelu_backward, op_id = 75", 740, 750, thread=AUTOGRAD)
    export.range("aten::clone, op_id = 76", 800, 810, thread=AUTOGRAD)
    ops = read(export, path).ops.filter(pl.col("start_ns") >= 700)
    assert rows(ops, "sequence", "forward_thread") == [(13, MAIN), (4, None), (4, AUTOGRAD), (4, AUTOGRAD), (13, MAIN)]


def test_user_ranges_stay_ranges_with_emit_nvtx(path: Path) -> None:
    export = training_step()
    names = ["nccl:all_reduce", "Optimizer.step#AdamW.step", "## forward, all of it ##"]
    for at, name in enumerate(names):
        export.range(f"{name}, op_id = {at + 60}", at, at + 1)
    export.range("detach_, op_id = 70", 3, 4)
    export.range("MyFunction, seq = 40, op_id = 71", 4, 5)
    recording = read(export, path)
    assert set(names) < set(recording.ranges["name"])
    assert {"detach_", "MyFunction"} < set(recording.ops["name"])


def test_registered_strings_and_other_kinds_of_ranges_are_read(path: Path) -> None:
    export = Export()
    export.kernel("k", 0, 100)
    export.range(None, 0, 10, textId=export.string("registered"))
    export.range("start-end", 1, 10, eventType=60)
    export.range("imported", 2, 10, eventType=71)
    export.range("a mark", 3, None, eventType=34)
    export.range(None, 4, 10)
    assert read(export, path).ranges["name"].to_list() == ["registered", "start-end", "imported", "(unnamed)"]


def test_open_range_ends_with_the_recording(path: Path) -> None:
    export = Export()
    export.kernel("k", 0, 100)
    export.range("open", 5, None)
    recording = read(export, path)
    assert rows(recording.ranges, "name", "end_ns") == [("open", 100)]
    assert "1 NVTX range was still open" in notes(recording)
