"""A stand-in for CUDA: tensors on the CPU are the memory of its device, and a request fails when a test says so."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.loop import oom
from stepscope.measure.memory.saved_tensors import held_tensors

GIB = 1 << 30
Observer = Callable[[int, int, int, int], None]


@dataclass(kw_only=True)
class FakeCuda:
    """`history` has the arguments of each call that switched the allocator's history; `free_blocks` are free memory in
    segments."""

    total: int = 8 * GIB
    free: int = GIB
    observers: list[Observer] = field(default_factory=list)
    history: list[dict[str, Any] | None] = field(default_factory=list)
    free_blocks: list[int] = field(default_factory=list)
    is_recording: bool = False

    def run_out(self, asked: int, limit: int | None = None) -> None:
        """What PyTorch does when a request has failed."""
        for observer in self.observers:
            observer(0, asked, self.total if limit is None else limit, self.free)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")

    def snapshot(self) -> dict[str, Any]:
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in gc.get_objects()
            if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided
        }
        # Tensors that only autograd holds have no object in Python until someone asks for them.
        storages |= _held_by_graphs()
        used = [_segment(address, size, "active_allocated") for address, size in storages.items() if size]
        free = [_segment((1 << 60) + (place << 40), size, "inactive") for place, size in enumerate(self.free_blocks)]
        return {"segments": used + free, "device_traces": [[]], "allocator_settings": {"expandable_segments": False}}

    def allocated(self) -> int:
        reserved: int = sum(one["total_size"] for one in self.snapshot()["segments"])
        return reserved - sum(self.free_blocks)

    def _set_history(self, enabled: str | None, **settings: Any) -> None:
        self.is_recording = enabled is not None
        self.history.append(settings if enabled else None)


def _held_by_graphs() -> dict[int, int]:
    roots = [one.grad_fn for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None]
    storages = [tensor.untyped_storage() for _, _, tensor in held_tensors(*roots)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _segment(address: int, size: int, state: str) -> dict[str, Any]:
    frames = [{"filename": "/lab/train.py", "line": 7, "name": "main"}] if state != "inactive" else []
    block = {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
    kind = "large" if size > 1 << 20 else "small"
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": kind,
        "blocks": [block],
        "frames": [],
    }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def _hide_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of earlier tests in the process, which something may still hold, are not part of the stand-in's memory.
    They are frozen, and nothing says so to what is tested, which would bring them back."""
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    _hide_the_past(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (fake.free, fake.total))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Fake GPU")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake._set_history)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: fake.is_recording, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", fake.observers.append, raising=False)
    monkeypatch.setattr(oom, "_device", lambda _number: torch.device("cpu"))
    monkeypatch.setattr(oom, "_is_attached", False)
    monkeypatch.setattr(oom, "_active", None)
    return fake
