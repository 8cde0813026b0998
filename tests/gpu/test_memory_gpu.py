"""The memory recorder on a GPU, against the allocator's own numbers."""

import gc
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from stepscope import cost
from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.measure.memory.recorder import record_memory
from stepscope.recording.memory import reader as memory
from stepscope.recording.memory.labels import SNAPSHOT_NAME
from stepscope.spec import build_case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def record(folder: Path, **settings: Any) -> MemoryProfile:
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    case = build_case({"size": "nano", "context": 64, "device": "cuda:0", "steps": 4, **settings})
    record_memory(case, torch.device("cuda:0"), folder=folder, on_stage=lambda _: None)
    return make_memory_profile(memory.read(folder / SNAPSHOT_NAME))


CASES: tuple[dict[str, Any], ...] = (
    {"mode": "inference"},
    {"mode": "inference", "precision": "bf16"},
    {"mode": "forward-backward"},
    {"mode": "train"},
    {"mode": "train", "precision": "bf16"},
    {"mode": "train", "precision": "fp16"},
    {"mode": "train", "attention": "sdpa", "optimizer": "adamw-fused"},
    {"mode": "train", "checkpoint": "block"},
    {"mode": "train", "checkpoint": "nested:2"},
    {"mode": "train", "compile": True},
)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_peak_matches_the_allocator_to_the_byte(settings: dict[str, Any], tmp_path: Path) -> None:
    profile = record(tmp_path, **settings)
    facts = profile.recording.manifest.memory
    assert facts is not None
    assert profile.peak_bytes == facts.allocator_peak_bytes
    assert profile.reserved is not None
    assert int(profile.reserved.max()) == facts.allocator_peak_reserved_bytes
    assert facts.estimated_bytes == 0
    assert profile.recording.manifest.notes == ()
    assert facts.unmatched_steps == ()
    assert sum(size for _, size in profile.categories_at(profile.peak_event)) == profile.peak_bytes


def test_phases_hold_the_expected_memory(tmp_path: Path) -> None:
    profile = record(tmp_path)
    for step in profile.steps[1:]:
        span = profile.span(step, "backward")
        assert span is not None
        after = profile.alive_at(span[1] - 1)
        gradients = after.filter(pl.col("category") == "gradients")["requested_bytes"].sum()
        shape = build_case({"size": "nano"}).workload.model
        assert gradients == 4 * cost.parameters(shape).total  # type: ignore[arg-type]


def test_backward_allocations_have_their_module(tmp_path: Path) -> None:
    profile = record(tmp_path)
    taken = profile.allocations.filter((pl.col("phase") == "backward") & pl.col("step").is_in([1, 3]))
    for step in (1, 3):
        mine = taken.filter(pl.col("step") == step)
        assert mine["op"].null_count() < mine.height / 20
        assert {"blocks.0.ffn.up", "lm_head"} <= set(mine["module"].drop_nulls())
