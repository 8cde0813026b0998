"""What only a GPU can show about a recorded loop: CUDA events, kernels by module and phase, synchronizations."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

import stepscope
from stepscope.explain.trace.profile import make_profile
from stepscope.recording.store import Recording, load
from tests.cpu.loop.loops import ENOUGH, SHORT

CUDA = torch.device("cuda", 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


class Loop:
    """A model and its optimizer on the GPU."""

    def __init__(self, *, compiled: bool = False) -> None:
        self.module = nn.Sequential(Block(), Block()).to(CUDA)
        self.model: Any = torch.compile(self.module) if compiled else self.module
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(64, 256, device=CUDA)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def record_loop(folder: Path, loop: Loop, after: Any = lambda _: None) -> Recording:
    with stepscope.record(folder / "run", **SHORT) as recorder:
        for _ in range(ENOUGH):
            after(loop.step())
    assert recorder.page.is_file()
    return load(folder / "run/rank-0")


def attribute(recording: Recording) -> pl.DataFrame:
    """Kernels with what they belong to."""
    return make_profile(recording).kernels.filter(pl.col("kind") == "kernel")


def wait(loss: torch.Tensor) -> None:
    loss.item()
    torch.cuda.synchronize()


def line_in_wait(number: int) -> str:
    return f"test_loop.py:{wait.__code__.co_firstlineno + number}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record_loop(tmp_path_factory.mktemp("loop"), Loop(), wait)


def test_steps_are_timed_with_cuda_events(recorded: Recording) -> None:
    assert set(recorded.steps["clock"]) == {"cuda events"}
    assert set(recorded.steps["phase"]) == {"input", "backward", "optimizer", "other"}
    assert recorded.steps["duration_ns"].min() >= 0  # type: ignore[operator]
    sums = recorded.steps.group_by("step").agg(pl.col("duration_ns").sum())
    assert (sums["duration_ns"] > 0).all()
    assert recorded.manifest.loop is not None
    assert recorded.manifest.loop.clock_mhz is not None


def test_kernels_belong_to_modules_and_phases(recorded: Recording) -> None:
    kernels = attribute(recorded)
    steps = kernels.filter(pl.col("step").is_not_null())
    assert set(steps["phase"].drop_nulls()) >= {"forward", "backward", "optimizer"}
    for module in ("0.up", "0.down", "1.up", "1.down"):
        of_module = steps.filter(pl.col("module") == module)
        assert {"forward", "backward"} <= set(of_module["phase"]), module
    assert steps.filter(pl.col("phase") == "optimizer").height > 0


def test_a_synchronization_has_its_line(recorded: Recording) -> None:
    syncs = recorded.ranges.filter(pl.col("name").str.starts_with("sync:"))
    assert set(syncs["name"]) == {"sync:torch.cuda.synchronize"}
    assert all(line.endswith(line_in_wait(2)) for line in syncs["source_line"])


def test_item_has_its_line(recorded: Recording) -> None:
    marked = recorded.ranges.filter(pl.col("name") == "step:0").row(0, named=True)
    items = recorded.ops.filter(
        (pl.col("name") == "aten::item") & pl.col("start_ns").is_between(marked["start_ns"], marked["end_ns"])
    )
    lines = [source for source in items["source"].drop_nulls() if source.endswith(line_in_wait(1))]
    assert len(lines) == 1  # the others are the optimizer's


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_model_is_not_compiled_again(tmp_path: Path) -> None:
    """Its modules have no ranges: the functions that compiled code calls must be the ones that were compiled."""
    loop = Loop(compiled=True)
    for _ in range(3):
        loop.step()
    before = dict(torch._dynamo.utils.counters["stats"])
    frames = torch._dynamo.utils.counters["frames"]["total"]
    recording = record_loop(tmp_path, loop)
    assert dict(torch._dynamo.utils.counters["stats"]) == before
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    names = set(recording.ranges["name"])
    assert "module:(Sequential)" in names
    assert not [name for name in names if name.startswith("module:") and ".up" in name]
    assert recording.manifest.compiled
    assert attribute(recording).height > 0


def test_a_loop_on_two_streams_is_recorded(tmp_path: Path) -> None:
    """Copies of the next batch run on a stream of their own. Training gives the same result as without a recording."""

    def train(*, recording: bool) -> tuple[list[float], Recording | None]:
        torch.manual_seed(0)
        loop = Loop()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        host = torch.ones(1 << 20).pin_memory()
        losses = []

        def copy(loss: torch.Tensor) -> None:
            with torch.cuda.stream(side):
                host.to(CUDA, non_blocking=True).mul_(2)
            torch.cuda.current_stream().wait_stream(side)
            losses.append(loss.detach())

        if recording:
            found = record_loop(tmp_path, loop, copy)
        else:
            found = None
            for _ in range(ENOUGH):
                copy(loop.step())
        return [loss.item() for loss in losses], found

    expected, _ = train(recording=False)
    losses, recorded = train(recording=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert recorded is not None
    assert recorded.kernels["stream"].n_unique() >= 2
