"""Steps that are traced, rewritten and captured as a whole: they train as plain steps do, and say what they could not
do."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import Tensor

from stepscope.jobs.recorders.recording_job import read_traces
from stepscope.measure import timing
from stepscope.measure.bench import measure
from stepscope.measure.memory.recorder import record_memory
from stepscope.measure.profiler import record
from stepscope.recording.memory import reader
from stepscope.recording.memory.labels import SNAPSHOT_NAME
from stepscope.recording.readers import kineto
from stepscope.recording.rows.bench import RAW_TRACE_NAME
from stepscope.spec import Case, Scalar, build_case
from stepscope.step import Step, build
from stepscope.step.annotation import annotated

CPU = torch.device("cpu")
TINY: dict[str, Scalar] = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab": 50}
RUN: dict[str, Scalar] = {"batch": 8, "context": 16, "device": "cpu", "warmup": 1, "steps": 2}
BF16: dict[str, Scalar] = {"precision": "bf16", "attention": "sdpa", "optimizer": "adamw-torch"}
FAST: dict[str, Scalar] = {
    **BF16,
    "optimizer": "adamw-onelaunch",
    "fuse": True,
    "merge": True,
    "working_weights": True,
    "graph": True,
}
FACTORY = """
import torch
from torch import nn

def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50))

def build(batch, context):
    ids = torch.randint(50, (batch, context))
    return model_of(), ids, lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

def with_sgd(batch, context):
    module, ids, loss = build(batch, context)
    return module, ids, loss, torch.optim.SGD(module.parameters(), lr=0.1)

def with_adamw(batch, context):
    module, ids, loss = build(batch, context)
    return module, ids, loss, torch.optim.AdamW(module.parameters(), lr=0.1)
"""


def case_of(**settings: Scalar) -> Case:
    return build_case({**TINY, **RUN, **settings})


def make(**settings: Scalar) -> Step:
    return build(case_of(**settings).workload, CPU)


def losses(step: Step, steps: int = 6) -> Tensor:
    found = []
    for _ in range(steps):
        step.run()
        assert step.loss is not None
        found.append(step.loss.detach().clone())
    return torch.stack(found)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture(autouse=True)
def fast_learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("stepscope.step.builder.LEARNING_RATE", 1e-2)
    yield
    torch.compiler.reset()  # compiled code keeps its models, which tests of memory in the same process would count


@pytest.mark.parametrize(
    "settings",
    [
        {"graph": True},
        {"fuse": True},
        {"working_weights": True},
        {"working_weights": True, "merge": True},
        {"optimizer": "adamw-onelaunch"},
        FAST,
        {**FAST, "checkpoint": "block"},
        {**FAST, "tie_embeddings": True},
        {"fuse": True, "graph": True, "precision": "fp32"},
    ],
)
def test_losses_are_those_of_the_plain_step(settings: dict[str, Scalar]) -> None:
    """As close to fp32 as bf16 is, over several updates."""
    shared = {name: settings[name] for name in ("tie_embeddings",) if name in settings}
    truth = losses(make(**{**BF16, **shared, "precision": "fp32"}))
    plain = losses(make(**{**BF16, **shared}))
    fast = losses(make(**{**BF16, **settings}))
    limit = 3 * (plain - truth).abs().max() + 1e-3
    assert (fast - truth).abs().max() <= limit
    assert truth[0] - truth[-1] > 10 * limit  # the losses of weights that stay would be noticed


def test_gradients_of_micro_batches_are_those_of_one_batch() -> None:
    weights = []
    for number in (1, 4):
        step = make(**FAST, grad_accumulation=number)
        step.run()
        weights.append(torch.cat([one.detach().flatten() for one in step.module.parameters()]))
    start = torch.cat([one.detach().flatten() for one in make(**BF16).module.parameters()])
    # The first step of Adam moves each weight by the sign of its gradient; bf16 decides a few signs differently.
    moved = [(one - start).sign() for one in weights]
    assert (moved[0] == moved[1]).float().mean() > 0.98


def test_phases_of_a_program() -> None:
    step = make(**FAST)
    assert [name for name, _ in step.phases] == ["forward", "backward", "optimizer"]
    names = [name for name, _ in make(**FAST, grad_accumulation=2).phases]
    assert list(dict.fromkeys(names)) == ["forward", "backward", "optimizer"]
    assert (names.count("forward"), names.count("optimizer")) == (2, 1)


def test_step_has_loss_state_and_copies() -> None:
    step = make(**FAST)
    assert (step.loss, step.loss_is_finite()) == (None, True)
    assert losses(step, 1).isfinite().all()
    assert step.loss_is_finite()
    assert {name for name, _ in step.optimizer_state()} >= {"lm_head.weight.exp_avg", "lm_head.weight.exp_avg_sq"}
    copies = dict(step.working_weights())
    assert copies["lm_head.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(copies["lm_head.weight"], step.module.get_parameter("lm_head.weight").bfloat16())
    assert step.optimizer_name == "adamw-onelaunch"
    output = step.forward_without_graph()
    assert isinstance(output, Tensor)
    assert output.shape == (8, 16, 50)


def test_cpu_has_no_graphs_and_says_so() -> None:
    (remark,) = make(**FAST).remarks
    assert (remark.code, remark.text) == ("uncaptured", "not captured: CUDA graphs need a GPU")
    assert make(**{**FAST, "graph": False}).remarks == []


@pytest.mark.parametrize("name", ["build", "with_adamw"])
def test_own_model_trains_as_a_program(own_module: str, name: str) -> None:
    found = []
    for settings in ({}, {"fuse": True, "merge": True, "working_weights": True}):
        case = build_case({**RUN, "model": f"{own_module}:{name}", "precision": "bf16", **settings})
        found.append(losses(build(case.workload, CPU)))
    assert (found[0] - found[1]).abs().max() < 0.02
    assert found[0][0] - found[0][-1] > 0.1


def test_optimizer_that_is_not_adamw_leaves_no_working_weights(own_module: str) -> None:
    settings: dict[str, Scalar] = {"precision": "bf16", "fuse": True, "merge": True, "working_weights": True}
    step = build(build_case({**RUN, "model": f"{own_module}:with_sgd", **settings}).workload, CPU)
    (remark,) = step.remarks
    assert remark.code == "own-optimizer"
    assert "SGD" in remark.text
    assert losses(step)[0] > losses(step)[-1]
    assert list(step.working_weights()) == []


def test_transformers_model_is_one_graph() -> None:
    tiny: dict[str, Scalar] = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 50, "n_positions": 16}
    shared: dict[str, object] = {**RUN, "hf": "gpt2", "set": tiny, "precision": "bf16"}
    plain, fast = (
        build(build_case({**shared, **more}).workload, CPU)  # type: ignore[dict-item]
        for more in ({}, {"fuse": True, "working_weights": True, "merge": True})
    )
    for step in (plain, fast):
        for module in step.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    assert (losses(plain) - losses(fast)).abs().max() < 0.05
    assert fast.program is not None
    assert fast.program.backend.graphs == 1


def test_only_steps_and_phases_have_ranges() -> None:
    step = make(**FAST)
    seen: list[str] = []

    def see(name: str) -> object:
        seen.append(name)
        return lambda: None

    with annotated(step, backend=see):  # type: ignore[arg-type]
        step.run()
    assert seen == ["step:0", "phase:forward", "phase:backward", "phase:optimizer"]


def test_bench_reports_the_remark() -> None:
    measurement, doubts = measure(case_of(**FAST), CPU, on_stage=lambda _: None)
    assert set(measurement.phases_ns) == {"forward", "backward", "optimizer"}
    assert "uncaptured" in {doubt.code for doubt in doubts}
    assert measurement.optimizer == "adamw-onelaunch"


def test_profile_has_phases_and_notes(tmp_path: Path) -> None:
    run = record(case_of(**FAST), CPU, folder_raw=tmp_path, record_steps=2, on_stage=lambda _: None)
    assert any("only the step and its phases" in note for note in run.notes)
    assert any("not captured" in note for note in run.notes)
    ranges = kineto.read(tmp_path / RAW_TRACE_NAME).ranges["name"].to_list()
    assert {"phase:forward", "phase:backward", "phase:optimizer"} <= set(ranges)


def record_captured(case: Case, folder: Path) -> tuple[str, ...]:
    """Record a captured step, and return the notes about it. A CPU has no CUDA graphs: the phases stay what they are,
    and recorders see a captured step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "capture", lambda step: setattr(step, "is_captured", True))
        patch.setattr(timing, "TURNS_S", 0.0)
        return record(case, CPU, folder_raw=folder, record_steps=2, on_stage=lambda _: None).notes


@pytest.mark.parametrize("settings", [{"graph": True}, {"graph": True, "compile": True}], ids=["graph", "compiled"])
def test_a_captured_step_is_recorded_without_its_graphs_too(tmp_path: Path, settings: dict[str, Scalar]) -> None:
    case = case_of(**BF16, **settings)
    # In a process of its own, as a recorder has: what is compiled depends on what was compiled before.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        notes = alone.submit(record_captured, case, tmp_path).result()
    assert any("those of the same step without them" in note for note in notes)
    assert not any("only the step and its phases" in note for note in notes)
    recording = read_traces(tmp_path)
    assert recording.manifest.modules_recorded
    captured = recording.captured
    products = captured.filter(pl.col("op").str.contains("mm") & pl.col("module").str.starts_with("blocks.1."))
    assert {"forward", "backward"} <= set(products["phase"])
    known = captured.filter(pl.col("module").is_not_null())
    assert {"(loss)", "(optimizer)"} <= set(known["module"])
    assert known.height > 0.9 * captured.height
    if not case.workload.compile:
        assert not [name for name in recording.ranges["name"] if name.startswith("module:")]


def test_what_is_not_captured_has_no_other_order(tmp_path: Path) -> None:
    record(case_of(**BF16, graph=True), CPU, folder_raw=tmp_path, record_steps=1, on_stage=lambda _: None)
    recording = read_traces(tmp_path)
    assert recording.captured.is_empty()
    assert any(name.startswith("module:blocks.1.") for name in recording.ranges["name"])


def test_memory_is_recorded_without_graphs(tmp_path: Path) -> None:
    run = record_memory(case_of(**FAST), CPU, folder=tmp_path, on_stage=lambda _: None)
    assert [note for note in run.notes if "CUDA graphs" in note] == [
        "recorded without CUDA graphs, whose replays allocate nothing: a graph holds the memory of this step"
    ]
    facts = reader.read(tmp_path / SNAPSHOT_NAME)
    assert facts is not None
