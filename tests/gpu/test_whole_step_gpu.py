"""Steps as CUDA graphs: they train as plain steps do, are recorded by phase, and say where they cannot be captured."""

from pathlib import Path

import polars as pl
import pytest
import torch
from torch import Tensor

from stepscope.explain.memory import make_memory_profile
from stepscope.explain.trace.profile import coverage_in_graphs, make_profile
from stepscope.jobs.recorders.recording_job import read_traces
from stepscope.measure.bench import measure
from stepscope.measure.memory.recorder import record_memory
from stepscope.measure.profiler import record
from stepscope.recording.memory import reader
from stepscope.recording.memory.labels import SNAPSHOT_NAME
from stepscope.recording.readers import kineto
from stepscope.recording.rows.bench import RAW_TRACE_NAME
from stepscope.spec import Case, Scalar, build_case
from stepscope.step import Step, build
from tests.cli.command import rows, stepscope

CUDA = torch.device("cuda", 0)
TINY: dict[str, Scalar] = {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab": 500, "batch": 8}
TINY |= {"device": "cuda:0", "steps": 5, "warmup": 2, "precision": "bf16", "attention": "flash"}
FAST: dict[str, Scalar] = {"optimizer": "adamw-onelaunch", "fuse": True, "merge": True, "working_weights": True}
FAST |= {"graph": True}
FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, waits, dropout):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.waits, self.dropout = waits, nn.Dropout(dropout)

    def forward(self, ids):
        x = self.dropout(self.embedding(ids))
        if self.waits:
            x = x * x.sum().item()
        return self.head(x)

def build(batch, context, waits=False, dropout=0.0):
    ids = torch.randint(50, (batch, context))
    return Model(waits, dropout), ids, lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
"""


def case_of(**settings: Scalar) -> Case:
    return build_case(TINY | settings)


@pytest.fixture(autouse=True)
def fast_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.step.builder.LEARNING_RATE", 1e-2)


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Scalar]:
    (tmp_path / "waiting_model.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return {
        "model": f"{tmp_path}/waiting_model.py:build",
        "batch": 4,
        "context": 16,
        "device": "cuda:0",
        "precision": "bf16",
        "graph": True,
        "working_weights": True,
    }


def losses(step: Step, steps: int = 8) -> Tensor:
    found = []
    for _ in range(steps):
        step.run()
        assert step.loss is not None
        found.append(step.loss.detach().clone())
    return torch.stack(found)


@pytest.mark.parametrize(
    "settings",
    [
        {"graph": True},
        {"graph": True, "optimizer": "sgd"},
        {"graph": True, "optimizer": "adamw-onelaunch", "working_weights": True},
        FAST,
        {**FAST, "compile": True},
        {**FAST, "grad_accumulation": 4},
        {**FAST, "compile": True, "grad_accumulation": 2},
    ],
)
def test_captured_step_trains_as_a_plain_one(settings: dict[str, Scalar]) -> None:
    optimizer = "sgd" if settings.get("optimizer") == "sgd" else "adamw-torch"
    shared = {"optimizer": optimizer, "grad_accumulation": settings.get("grad_accumulation", 1)}
    plain = losses(build(case_of(**shared).workload, CUDA))
    step = build(case_of(**settings).workload, CUDA)
    assert step.remarks == []
    captured = losses(step)
    assert (plain - captured).abs().max() < 0.05
    if optimizer != "sgd":
        assert plain[0] - plain[-1] > 0.3


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which `torch.compile` reads after a graph break
def test_line_that_waits_is_named_and_the_step_runs_without_graphs(own_model: dict[str, Scalar]) -> None:
    step = build(build_case({**own_model, "set": {"waits": True}}).workload, CUDA)
    (remark,) = step.remarks
    assert remark.code == "uncaptured"
    assert "waiting_model.py:14" in remark.text
    assert ".item()" in remark.text
    assert losses(step).isfinite().all()


@pytest.mark.parametrize(("dropout", "different"), [(0.5, 6), (0.0, 1)])
def test_replays_draw_new_random_numbers(
    own_model: dict[str, Scalar], dropout: float, different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights stay, so only dropout changes the loss."""
    monkeypatch.setattr("stepscope.step.builder.LEARNING_RATE", 0.0)
    step = build(build_case({**own_model, "set": {"dropout": dropout}}).workload, CUDA)
    assert step.remarks == []
    assert len(set(losses(step, 6).tolist())) == different


def test_bench_times_every_phase() -> None:
    measurement, doubts = measure(case_of(**FAST), CUDA, on_stage=lambda _: None)
    assert set(measurement.phases_ns) == {"forward", "backward", "optimizer"}
    assert all(min(samples) > 0 for samples in measurement.phases_ns.values())
    assert "uncaptured" not in {doubt.code for doubt in doubts}


@pytest.mark.parametrize("passes", [1, 2])
def test_kernels_of_graphs_belong_to_phases(tmp_path: Path, passes: int) -> None:
    case = case_of(**FAST, grad_accumulation=passes)
    run = record(case, CUDA, folder_raw=tmp_path, record_steps=2, on_stage=lambda _: None)
    assert any("only the step and its phases" in note for note in run.notes)
    recording = kineto.read(tmp_path / RAW_TRACE_NAME).with_manifest(case=case)
    kernels = make_profile(recording).kernels
    assert kernels.filter(pl.col("launched") == "graph").height > 0.9 * kernels.height
    assert {"forward", "backward", "optimizer"} <= set(kernels["phase"].drop_nulls())
    unknown = kernels.filter(pl.col("phase").is_null())["time_ns"]
    assert float(unknown.sum()) < 0.02 * float(kernels["time_ns"].sum())


@pytest.mark.parametrize("settings", [{"graph": True}, {**FAST, "compile": True}], ids=["graph", "fast"])
def test_kernels_of_graphs_have_the_modules_of_the_step_without_them(
    tmp_path: Path, settings: dict[str, Scalar]
) -> None:
    case = case_of(**settings)
    record(case, CUDA, folder_raw=tmp_path, record_steps=2, on_stage=lambda _: None)
    profile = make_profile(read_traces(tmp_path).with_manifest(case=case))
    graphs = profile.kernels.filter(pl.col("launched") == "graph")
    assert set(graphs["matched"].drop_nulls()) == {"capture"}
    known = coverage_in_graphs(profile)
    assert min(known["phase"], known["module"], known["operator"]) > 0.9, known
    assert {0, 1} <= set(graphs["layer"])


def test_memory_of_a_captured_step_is_that_of_its_phases(tmp_path: Path) -> None:
    run = record_memory(case_of(**FAST), CUDA, folder=tmp_path, on_stage=lambda _: None)
    assert any("without CUDA graphs" in note for note in run.notes)
    profile = make_memory_profile(reader.read(tmp_path / SNAPSHOT_NAME))
    held = dict(profile.categories_at(profile.peak_event))
    assert held["activations"] > 0
    assert held["optimizer state"] > 0


def test_preset_from_end_to_end(tmp_path: Path) -> None:
    size = ["--d-model", "128", "--d-ff", "256", "--num-layers", "2", "--num-heads", "4", "--vocab", "500"]
    ended = stepscope(tmp_path, "bench", *size, "--context", "64", "--preset", "none,fast", "--steps", "5")
    assert ended.returncode == 0, ended.stderr
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "ok"]
    assert "uncaptured" not in ended.stdout
    for verb in ("profile", "memory"):
        shown = stepscope(tmp_path, verb, *size, "--context", "64", "--preset", "fast", "--steps", "3")
        assert shown.returncode == 0, shown.stderr
