"""Small training loops, and what the recorder hands over about them instead of writing a page."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope.loop import recorder, trace_handler
from stepscope.loop.place import RunPlace
from stepscope.recording.readers import kineto
from stepscope.recording.rows.loop_run import HANDOVER_NAME, TRACE_NAME, LoopRun
from stepscope.recording.store import Recording

ENOUGH = 40  # steps, for any recording in these tests


class Plan(TypedDict):
    skip: int
    steps: int


SHORT: Plan = {"skip": 3, "steps": 2}


class NoFinisher:
    """Takes the place of the process that writes the page."""

    is_running = False

    def __init__(self, place: RunPlace, rank: int) -> None:
        self.folder = place.raw_folder(rank)

    def start(self) -> None:
        assert (self.folder / HANDOVER_NAME).is_file()

    def wait(self) -> int:
        return 0


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "Finisher", NoFinisher)
    monkeypatch.setattr(trace_handler, "Finisher", NoFinisher)


def read_handover(folder: Path) -> LoopRun:
    return msgspec.json.decode((folder / "rank-0.raw" / HANDOVER_NAME).read_bytes(), type=LoopRun)


def read_trace(folder: Path) -> Recording:
    return kineto.read(folder / "rank-0.raw" / TRACE_NAME)


def make_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def make_loader(batches: int = ENOUGH) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(torch.randn(batches * 2, 4)), batch_size=2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor | None = None) -> None:
    loss = model(torch.randn(2, 4) if batch is None else batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(steps: int = ENOUGH, after: Callable[[int], object] = lambda _: None) -> nn.Module:
    model, optimizer = make_model()
    for step in range(steps):
        train_step(model, optimizer)
        after(step)
    return model


@contextmanager
def unchanged(*holders: Any) -> Iterator[None]:
    """Everything that these objects have is the same after this context."""
    before = [dict(vars(holder)) for holder in holders]
    yield
    for holder, attributes in zip(holders, before, strict=True):
        now = dict(vars(holder))
        assert now.keys() == attributes.keys(), holder
        assert [name for name, value in attributes.items() if now[name] is not value] == [], holder
