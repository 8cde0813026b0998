"""Running out of CUDA memory for real, in a small part of the device."""

import gc
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.explain.memory import make_memory_profile
from stepscope.explain.memory.out_of_memory import MemoryFailure, find_out_of_memory
from stepscope.explain.rules.out_of_memory import find_fixes
from stepscope.jobs.oom import explain_snapshot
from stepscope.loop.oom import OomWatch
from stepscope.recording.memory import reader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MIB, GIB = 1 << 20, 1 << 30
LIMIT = 2 * GIB


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OomWatch]:
    monkeypatch.setattr(OomWatch, "_explain", lambda *_: None)
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT / total)
    try:
        with stepscope.explain_oom(tmp_path) as installed:
            yield installed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


def take(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def explain(watch: OomWatch) -> MemoryFailure:
    assert watch.failures == []
    found = find_out_of_memory(make_memory_profile(reader.read(watch.snapshots[-1])))
    assert found is not None
    return found


def model(width: int = 1024, num_layers: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers))).cuda()


def test_everything_held_is_explained_to_the_byte(watch: OomWatch) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(4096, 1024, device="cuda")
    net(x).sum().backward()
    optimizer.step()
    loss = net(x).sum()
    held = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        take(4 * GIB)
    found = explain(watch)
    assert found.held_bytes == held
    assert (found.reserved_bytes or 0) <= reserved  # cached segments were returned first
    assert sum(found.categories.values()) == held
    parameters = sum(one.numel() * one.element_size() for one in net.parameters())
    assert found.categories["parameters"] == parameters
    assert found.categories["gradients"] == parameters
    assert found.categories["optimizer state"] >= 2 * parameters
    assert found.categories["activations"] >= 4 * 4096 * 1024 * 4
    assert found.facts.limit_bytes == pytest.approx(LIMIT, rel=0.01)
    assert found.facts.asked_bytes == 4 * GIB
    assert found.facts.line.startswith("tests/gpu/test_oom_gpu.py:")
    assert loss.grad_fn is not None


def test_live_memory_has_the_lines_that_allocated_it(watch: OomWatch) -> None:
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        take(4 * GIB)
    found = explain(watch)
    stacks = [found.profile.stack_text(stack) for stack in found.alive["stack"]]
    assert any(f"test_oom_gpu.py:{line} " in stack for stack in stacks)
    assert kept.numel()


def test_a_failure_on_the_thread_of_autograd_names_the_call_of_backward(watch: OomWatch) -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, *grads: Tensor) -> Any:
            return grads[0] + torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")[0]

    x = torch.ones(8, device="cuda", requires_grad=True)
    loss = Greedy.apply(x).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    found = explain(watch)
    assert found.phase == "backward"
    assert found.facts.line.startswith("tests/gpu/test_oom_gpu.py:")


def test_a_request_that_succeeds_after_freeing_the_cache_is_not_a_failure(watch: OomWatch) -> None:
    cached = take(3 * GIB // 2)
    del cached
    kept = take(7 * GIB // 4)  # fits only once the cached segment is returned
    assert kept.numel()
    assert watch.snapshots == []


def test_fragmentation_is_measured(watch: OomWatch) -> None:
    cached = [take(256 * MIB) for _ in range(6)]
    del cached
    parts = sorted((take(128 * MIB) for _ in range(12)), key=Tensor.data_ptr)
    del parts[::2]
    with pytest.raises(torch.OutOfMemoryError):
        take(900 * MIB)
    found = explain(watch)
    assert found.facts.largest_free_bytes == 128 * MIB
    assert "SS102" in [one.code for one in find_fixes(found)]
    assert len(parts) == 6


def test_stacks_stop_after_three_steps_and_everything_is_removed(watch: OomWatch) -> None:
    net = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    states = []
    for _ in range(4):
        states.append(torch._C._cuda_isHistoryEnabled())
        optimizer.step()
    assert states == [True, True, True, False]
    watch.uninstall()
    assert not torch._C._cuda_isHistoryEnabled()
    with pytest.raises(torch.OutOfMemoryError):
        take(4 * GIB)
    assert watch.snapshots == []


def test_the_page_is_written(watch: OomWatch) -> None:
    net = model()
    with pytest.raises(torch.OutOfMemoryError):
        net(torch.randn(200_000, 1024, device="cuda"))
    page = explain_snapshot(watch.snapshots[0])
    text = page.read_text()
    assert "CUDA ran out of memory" in text
    assert "micro-batches" in text
