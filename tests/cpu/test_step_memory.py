"""The memory history of one step of a loop, with a stand-in for CUDA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepscope
from stepscope.explain.memory import make_memory_profile
from stepscope.loop.memory_history import StepMemory
from stepscope.recording.memory import reader
from tests.cpu.fake_cuda import FakeCuda, cuda

__all__ = ["cuda"]


class Allocator:
    """The history of the stand-in: whatever is new or gone since the last look is an event."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cuda, self._metadata = cuda, ""
        self._known: dict[int, int] = {}
        self.entries: list[dict[str, Any]] = []
        self._segments = cuda.snapshot
        monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", self._mark)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self._snapshot)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)

    def _mark(self, text: str) -> None:
        self._look()
        self._metadata = text

    def _look(self) -> None:
        now = {one["address"]: one["total_size"] for one in self._segments()["segments"]}
        if self._known and self._cuda.is_recording:
            for address in self._known.keys() - now.keys():
                self._add("segment_free", address, self._known[address], before="free_completed")
            for address in now.keys() - self._known.keys():
                self._add("segment_alloc", address, now[address], after="alloc")
        self._known = now

    def _add(self, action: str, address: int, size: int, *, before: str = "", after: str = "") -> None:
        for one in (before, action, after):
            if one:
                entry = {"action": one, "addr": address, "size": size, "stream": 0, "time_us": len(self.entries)}
                self.entries.append({**entry, "user_metadata": self._metadata})

    def _snapshot(self) -> dict[str, Any]:
        self._look()
        return {**self._segments(), "device_traces": [list(self.entries)]}


def test_a_step_has_phases_and_categories(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Allocator(cuda, monkeypatch)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(128, 64)
    memory = StepMemory(torch.device("cuda", 0), folder=tmp_path)
    monkeypatch.setattr(memory, "_device", torch.device("cpu"))
    memory.start()
    close_step = memory.open("step:5")
    loss = model(x).square().mean()
    close = memory.open("phase:backward")
    loss.backward()
    close()
    close = memory.open("phase:optimizer")
    optimizer.step()
    close()
    close_step()
    profile = make_memory_profile(reader.read(memory.stop()))
    assert profile.steps == (5,)
    assert profile.phases == ("backward", "optimizer")
    at_backward = profile.span(5, "backward")
    assert at_backward is not None
    held = dict(profile.categories_at(at_backward[0] - 1))
    parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    assert held["parameters"] == parameters
    assert held["activations"] >= 2 * 128 * 512 * 4
    after = dict(profile.categories_at(profile.num_events - 1))
    assert after["gradients"] == parameters
    assert after["optimizer state"] >= 2 * parameters
    assert profile.recording.saved.height
    assert not cuda.is_recording


def test_the_watch_for_failures_gives_way_and_returns(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Allocator(cuda, monkeypatch)
    with stepscope.explain_oom(tmp_path):
        memory = StepMemory(torch.device("cuda", 0), folder=tmp_path)
        monkeypatch.setattr(memory, "_device", torch.device("cpu"))
        memory.start()
        for _ in range(5):
            torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
        assert cuda.history[-1] is not None
        assert cuda.history[-1]["context"] == "alloc"
        memory.stop()
        assert cuda.history[-1] is not None
        assert cuda.history[-1]["context"] == "state"


def test_a_cpu_has_no_history(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only CUDA has a memory history"):
        StepMemory(torch.device("cpu"), folder=tmp_path)
