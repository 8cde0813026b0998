"""What only a GPU can show in a recording: kernels and their launches inside our ranges, and ranges as NVTX."""

from pathlib import Path

import polars as pl
import pytest
import torch

from stepscope.measure.profiler import record
from stepscope.recording.readers import kineto
from stepscope.recording.rows.bench import RAW_TRACE_NAME, RecordedRun
from stepscope.recording.store import Recording, load
from stepscope.spec import Scalar, build_case
from stepscope.step import build
from stepscope.step.annotation import annotated
from tests.cli.command import stepscope

CUDA = torch.device("cuda", 0)
TINY: dict[str, Scalar] = {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab": 500}
TINY |= {"device": "cuda:0", "steps": 5}


def run(folder: Path, **settings: Scalar) -> tuple[RecordedRun, Recording]:
    found = record(build_case(TINY | settings), CUDA, folder_raw=folder, record_steps=2, on_stage=lambda _: None)
    return found, kineto.read(folder / RAW_TRACE_NAME)


def kernels_by_range(recording: Recording) -> dict[str, int]:
    """How many kernels were launched inside ranges of each name, on any thread of the same process."""
    launched = recording.launches.join(
        recording.kernels.select("process", "correlation"), on=["process", "correlation"], how="semi"
    ).select("process", "thread", at="start_ns")
    inside = recording.ranges.join(launched, on=["process", "thread"]).filter(
        pl.col("at").is_between(pl.col("start_ns"), pl.col("end_ns"))
    )
    return dict(inside.group_by("name").len().rows())


def test_kernels_are_launched_inside_phases_modules_and_parts(tmp_path: Path) -> None:
    found, recording = run(tmp_path)
    assert found.clock == "cuda events"
    assert set(recording.kernels["kind"]) >= {"kernel"}
    counts = kernels_by_range(recording)
    assert counts["step:0"] == counts["step:1"] > 100
    assert counts["module:blocks.0.attention.q_proj"] == 2  # one GEMM per step
    for name in ("phase:forward", "phase:loss", "phase:optimizer", "part:scores", "part:softmax", "part:values"):
        assert counts[name] > 0, name
    assert counts["part:values"] >= 2 * 2


def test_every_kernel_of_a_step_is_recorded(tmp_path: Path) -> None:
    """The profiler waits for the last kernel, and both steps do the same."""
    _, recording = run(tmp_path, mode="forward")
    counts = kernels_by_range(recording)
    kernels = recording.kernels.filter(pl.col("kind") == "kernel").height
    assert counts["step:0"] == counts["step:1"]
    assert kernels >= counts["step:0"] + counts["step:1"] - 20  # some launches are copies and fills


def test_recomputation_is_seen_on_the_backward_thread(tmp_path: Path) -> None:
    _, recording = run(tmp_path, checkpoint="block")
    backward = recording.ranges.filter(pl.col("name") == "phase:backward").row(0, named=True)
    again = recording.ranges.filter(
        (pl.col("name") == "module:blocks.0.attention.q_proj")
        & pl.col("start_ns").is_between(backward["start_ns"], backward["end_ns"])
    )
    assert again.height == 1
    assert again["thread"][0] != backward["thread"]


def test_compiled_step_keeps_its_outer_ranges_and_is_not_recompiled(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Not in fp32: Inductor warns that tf32 would be faster, and here a warning is an error.
    _, recording = run(tmp_path, compile=True, precision="bf16")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    names = {name for name in recording.ranges["name"] if name.startswith("module:")}
    assert names == {"module:(TransformerLM)"}
    assert kernels_by_range(recording)["module:(TransformerLM)"] > 0


def test_ranges_are_nvtx_ranges_for_a_profiler_that_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    popped: list[object] = []
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def spy(name: str) -> object:
        pushed.append(name)
        return push(name)  # type: ignore[no-untyped-call]

    def spy_pop() -> None:
        popped.append(pop())  # type: ignore[no-untyped-call]

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", spy)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", spy_pop)
    step = build(build_case(TINY).workload, CUDA)
    with annotated(step, backend="nvtx"):
        step.run()
    torch.cuda.synchronize()
    assert pushed[:4] == ["step:0", "phase:forward", "module:(TransformerLM)", "module:embedding"]
    assert len(popped) == len(pushed)


def test_command_records_from_a_forked_process(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "profile", "--size", "nano", "--device", "cuda", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    recording = load(tmp_path / "runs/profile")
    assert recording.manifest.device.startswith("NVIDIA")
    assert set(recording.steps["clock"]) == {"cuda events"}
    assert recording.kernels.filter(pl.col("kind") == "kernel").height > 100
