"""Optimized steps on a GPU: captured, checked, and named where they cannot be captured."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.measure.optimisation import optimise_case
from stepscope.recording.rows.optimisation import MeasuredChange
from stepscope.spec import build_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

SMALL = {"d_model": 256, "d_ff": 1024, "num_layers": 2, "num_heads": 4, "vocab": 1000, "batch": 4, "context": 128}


class Model(nn.Module):
    def __init__(self, *, waits: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(512, 256), nn.LayerNorm(256), nn.Linear(256, 512)
        self.waits = waits

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(ids)))
        if self.waits and logits.isnan().any().item():
            raise ValueError("not a number")
        return logits


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(seed)).cuda()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_every_change_of_a_workload_passes_its_check() -> None:
    found: list[MeasuredChange] = []
    case = build_case({**SMALL, "precision": "bf16", "device": "cuda:0"})
    optimise_case(case, torch.device("cuda", 0), on_stage=lambda _: None, on_change=found.append)
    changes = {one.name: one for one in found}
    assert list(changes)[:4] == ["start", "operations", "compile", "graph"]
    assert all(one.status != "failed" for one in found), found
    assert changes["graph"].status == "kept"
    assert all(one.peak_bytes and one.check and one.check.passes for one in found if one.step_ns)
    (start, *_), kept = found, [one for one in found if one.status == "kept"]
    assert start.step_ns is not None
    assert kept[-1].step_ns is not None
    assert kept[-1].step_ns < start.step_ns / 2


def test_a_captured_step_trains_like_the_plain_loop() -> None:
    torch.manual_seed(0)
    plain = Model().cuda()
    model = copy.deepcopy(plain)
    step = stepscope.optimise(model, adamw(model), example=batch(0), loss=loss_of, measure=False)
    optimizer = adamw(plain)
    for seed in range(1, 6):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(plain, batch(seed))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert float(step(batch(seed))) == pytest.approx(float(loss.detach()), rel=0.01)
    assert step.changes.graph


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which `torch.compile` reads after a graph break
def test_the_line_that_waits_is_named_and_the_others_are_tried() -> None:
    model = Model(waits=True).cuda()
    step = stepscope.optimise(model, adamw(model), example=batch(0), loss=loss_of)
    graph = next(rung for rung in step.rungs if rung.name == "graph")
    assert graph.status == "failed"
    assert "test_optimise_gpu.py" in graph.notes[-1]
    assert ".item()" in graph.notes[-1]
    assert not step.changes.graph
    assert any(rung.name == "optimizer" and rung.step_ms for rung in step.rungs)
    assert torch.isfinite(step(batch(1)))
