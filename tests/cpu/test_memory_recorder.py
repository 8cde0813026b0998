"""The memory recorder on a CPU, against independent counts."""

import gc
import weakref
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope import cost
from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.explain.memory.memory_profile import sum_over_events
from stepscope.measure.memory.operators import Happening
from stepscope.measure.memory.recorder import _OnCuda, record_memory
from stepscope.recording.memory import reader as memory
from stepscope.recording.memory.labels import NOBODY, SNAPSHOT_NAME
from stepscope.spec import Case, Settings, build_case

TINY: Settings = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab": 50, "context": 16, "batch": 2}


NUMBER_BYTES = 8


def tiny(**settings: Any) -> Case:
    return build_case({**TINY, "device": "cpu", "steps": 3, **settings})


def record(case: Case, folder: Path) -> MemoryProfile:
    record_memory(case, torch.device("cpu"), folder=folder, on_stage=lambda _: None)
    return make_memory_profile(memory.read(folder / SNAPSHOT_NAME))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> MemoryProfile:
    """A recording that several tests read: it takes longer than they do."""
    return record(tiny(), tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> MemoryProfile:
    return record(tiny(precision="bf16"), tmp_path_factory.mktemp("mixed"))


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The sum of all live storages after every operator, recomputed from scratch."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.sums: list[int] = []
        for tensor in known:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self._see(one)
        alive = (size for living, size in self._seen.values() if living() is not None and size > NUMBER_BYTES)
        self.sums.append(sum(alive))
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._seen.get(storage._cdata)
        if known is None or known[0]() is not storage:
            self._seen[storage._cdata] = (weakref.ref(storage), storage.nbytes())


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_timeline_is_the_sum_of_live_storages_at_every_operator(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both watch the same steps. An operator's temporary memory is only in the timeline, so the counter's sums must all
    appear in it, in order. Numbers in the code (`x * 0.5`) become tensors that no operator returns, so neither side
    counts anything as small as a number.
    """
    from stepscope.measure.memory import recorder as memory_recorder

    gc.collect()
    gc.freeze()  # hides what earlier tests left behind from both sides
    counters: list[LiveStorages] = []
    run = memory_recorder._Recorder.watch

    def counted(self: Any, number: int) -> int:
        if not counters:
            alive = (one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter))
            counters.append(LiveStorages([one for one in alive if one.device.type == "cpu"]))
        with counters[0]:
            return run(self, number)

    monkeypatch.setattr(memory_recorder._Recorder, "watch", counted)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # which would hide the model from `get_objects`
    profile = record(tiny(mode=mode), tmp_path)
    large = profile.allocations.filter(pl.col("bytes") > NUMBER_BYTES)
    before = large.filter(pl.col("start_event").is_null())["bytes"].sum()
    totals = [before, *sum_over_events(large, profile.num_events).tolist()]
    place = 0
    for value in counters[0].sums:
        assert value in totals[place:], f"{value} bytes were alive, but the timeline never shows that again"
        place = totals.index(value, place)
    assert max(counters[0].sums) == max(totals)
    assert profile.peak_bytes - max(totals) < 64 * NUMBER_BYTES


def test_categories_add_up_after_every_event(mixed: MemoryProfile) -> None:
    for event in range(-1, mixed.num_events):
        assert sum(size for _, size in mixed.categories_at(event)) == mixed.allocated_at(event)
    assert mixed.totals.min() > 0


def test_training_holds_the_expected_memory_after_each_phase(trained: MemoryProfile) -> None:
    case = tiny()
    parameters = trained.recording.allocations.filter(pl.col("category") == "parameters")["bytes"].sum()
    after = {
        phase: dict(trained.categories_at(_last(trained, phase))) for phase in ("forward", "backward", "optimizer")
    }
    assert parameters == 4 * cost.parameters(case.workload.model).total  # type: ignore[arg-type]
    assert after["forward"]["activations"] == cost.saved_bytes(case.workload)
    assert after["forward"]["gradients"] == 0
    assert after["backward"]["gradients"] == parameters
    assert after["backward"]["activations"] == 0
    assert after["optimizer"]["gradients"] == 0
    assert after["optimizer"]["optimizer state"] == 2 * parameters


def _last(profile: MemoryProfile, phase: str) -> int:
    span = profile.span(profile.steps[-1], phase)
    assert span is not None
    return span[1] - 1


def test_backward_allocation_has_its_module(trained: MemoryProfile) -> None:
    taken = trained.allocations.filter((pl.col("phase") == "backward") & (pl.col("step") == 2))
    modules = set(taken["module"].drop_nulls())
    assert {"blocks.0.ffn.up", "blocks.1.attention.q_proj", "lm_head", "blocks.0.attention"} <= modules
    assert taken["layer"].null_count() < taken.height / 4


def test_autocast_copies_are_not_activations(mixed: MemoryProfile) -> None:
    case = tiny(precision="bf16")
    copies = mixed.alive_at(_last(mixed, "forward")).filter(pl.col("category") == "autocast copies")
    assert "blocks.0.attention.q_proj.weight" in copies["name"].to_list()
    weights = cost.parameters(case.workload.model)  # type: ignore[arg-type]
    assert copies["bytes"].sum() == 2 * (weights.attention + weights.feed_forward + weights.head)


def test_checkpointed_step_recomputes_its_activations_in_backward(trained: MemoryProfile, tmp_path: Path) -> None:
    profile = record(tiny(checkpoint="block"), tmp_path)
    assert dict(profile.categories_at(_last(profile, "forward")))["activations"] == cost.saved_bytes(
        tiny(checkpoint="block").workload
    )
    recomputed = profile.allocations.filter((pl.col("name") == "recomputed") & (pl.col("step") == 2))
    kept = trained.allocations.filter((pl.col("category") == "activations") & (pl.col("step") == 2))
    in_blocks = int(kept.filter(pl.col("layer").is_not_null())["bytes"].sum())
    assert recomputed.filter(pl.col("phase") == "backward").height == recomputed.height
    assert 0.8 * in_blocks < int(recomputed["bytes"].sum()) <= in_blocks


def test_stacks_lead_to_the_line_that_allocated(trained: MemoryProfile) -> None:
    taken = trained.allocations.filter(
        (pl.col("step") == 2) & (pl.col("module") == "lm_head") & (pl.col("op") == "aten::mm")
    )
    forward = taken.filter(pl.col("phase") == "forward")
    assert trained.stack_text(forward["stack"][0]).startswith("stepscope/nn/functional.py:")
    assert "/home" not in trained.stack_text(forward["stack"][0])


def test_first_step_creates_the_optimizer_state(trained: MemoryProfile) -> None:
    state = trained.allocations.filter(pl.col("category") == "optimizer state")
    assert state["step"].unique().to_list() == [0]
    assert state["phase"].unique().to_list() == ["optimizer"]
    assert state["end_event"].null_count() == state.height
    first, last = (trained.span(step) for step in (0, 2))
    assert first is not None
    assert last is not None
    assert trained.peak_between(*last)[1] - trained.peak_between(*first)[1] > 0


def test_compiled_step_is_recorded(tmp_path: Path) -> None:
    profile = record(tiny(compile=True), tmp_path)
    after = dict(profile.categories_at(_last(profile, "backward")))
    assert after["gradients"] == dict(profile.categories_at(-1))["parameters"]
    assert profile.recording.saved.height


OWN_MODEL = """
import gc, torch
from torch import nn
from torch.profiler import record_function

class Part(nn.Module):
    def forward(self, x):
        return x + torch.empty(100, 10).fill_(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self.first, self.second = Part(), Part()

    def forward(self, x):
        with record_function("mine"):
            return self.second(self.first(x * self.weight))

def build():
    cycle = [torch.empty(1 << 20)]
    cycle.append(cycle)
    return Model(), torch.ones(100, 10), lambda y: y.sum()
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    (tmp_path / "ranged_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return build_case({"model": "ranged_model:build", "device": "cpu", "steps": 2})


def test_range_is_not_an_operator(own_model: Case, tmp_path: Path) -> None:
    profile = record(own_model, tmp_path)
    taken = profile.allocations.filter(pl.col("bytes") == 4000)
    assert "mine" not in profile.allocations["op"].to_list()
    for module in ("first", "second"):
        operators = taken.filter((pl.col("module") == module) & (pl.col("phase") == "forward"))["op"].unique()
        assert set(operators) == {"aten::empty", "aten::add"}


def test_garbage_of_the_build_is_not_memory_of_the_step(own_model: Case, tmp_path: Path) -> None:
    profile = record(own_model, tmp_path)
    assert profile.before_bytes < 1 << 20
    assert profile.peak_bytes < 1 << 20


def happening(address: int, operator: int, size: int = 512, mark: int = 5) -> Happening:
    return Happening(address=address, size=size, time_ns=0, mark=mark, operator=operator)


def entry(action: str, address: int, note: str) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": 512, "user_metadata": note}


def joined(trace: list[dict[str, Any]], happenings: list[Happening]) -> tuple[list[str], list[str]]:
    """The labels on a history of CUDA's allocator after joining it with what the profiler saw from mark 4 on."""
    recorder = object.__new__(_OnCuda)
    recorder.notes = []
    recorder._join(trace, 4, happenings)
    return [one["user_metadata"] for one in trace], recorder.notes


def test_allocator_history_is_joined_where_the_profiler_watched() -> None:
    """Steps reuse the same addresses, so the same sequence also occurs before the watched step."""
    earlier = [entry("alloc", 1, "2"), entry("free_requested", 1, "2"), entry("alloc", 2, "2")]
    watched = [entry("alloc", 1, "5"), entry("free_requested", 1, "1"), entry("alloc", 2, "1"), entry("alloc", 3, "5")]
    notes, said = joined(
        earlier + watched, [happening(1, 7), happening(1, NOBODY, -512), happening(2, 8), happening(3, NOBODY)]
    )
    assert notes == ["2", "2", "2", "5:7", "1", "5:8", "5"]
    assert said == []


def test_disagreement_of_profiler_and_allocator_is_noted() -> None:
    notes, said = joined([entry("alloc", 1, "5")], [happening(1, 7), happening(9, 8)])
    assert notes == ["5:7"]
    assert len(said) == 1


def test_tensors_without_memory_are_ignored(tmp_path: Path) -> None:
    with FakeTensorMode():
        traced = torch.empty(1 << 20)
    profile = record(tiny(mode="inference"), tmp_path)
    assert traced.shape == (1 << 20,)
    assert profile.before_bytes < 1 << 20
