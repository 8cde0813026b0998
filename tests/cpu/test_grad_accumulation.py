"""A step of several micro-batches: the gradients of one batch, in less memory, distinguished in recordings."""

from pathlib import Path

import polars as pl
import pytest
import torch
from torch import Tensor

from stepscope import cost
from stepscope.errors import StepscopeError
from stepscope.explain.memory import make_memory_profile
from stepscope.explain.questions.forward import forward_time
from stepscope.explain.questions.product_roles import products_by_role
from stepscope.explain.trace.profile import make_profile
from stepscope.measure.flops import count_forward_flops
from stepscope.measure.memory.recorder import record_memory
from stepscope.measure.profiler import record
from stepscope.recording.memory import reader
from stepscope.recording.memory.labels import SNAPSHOT_NAME
from stepscope.recording.readers import kineto
from stepscope.recording.rows.bench import RAW_TRACE_NAME
from stepscope.spec import Case, Scalar, build_case
from stepscope.step import Step, build

CPU = torch.device("cpu")
TINY: dict[str, Scalar] = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab": 50}
RUN: dict[str, Scalar] = {"batch": 8, "context": 16, "device": "cpu", "warmup": 0, "steps": 2}
FACTORY = """
import torch
from torch import nn

def build(batch, context):
    ids = torch.randint(50, (batch, context))
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    return model, ids, lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

def deaf():
    return nn.Linear(1, 1), torch.zeros(1, 1), lambda output: output.sum()
"""


def case_of(**settings: Scalar) -> Case:
    return build_case({**TINY, **RUN, **settings})


def make(**settings: Scalar) -> Step:
    return build(case_of(**settings).workload, CPU)


def gradients(step: Step) -> Tensor:
    """Gradients of a step before its update, unscaled, as one vector."""
    for name, phase in step.phases:
        if name != "optimizer":
            phase()
    return torch.cat([p.grad.flatten() for p in step.module.parameters() if p.grad is not None]) / step.loss_scale


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("number", [2, 8])
def test_gradients_match_one_batch(precision: str, number: int) -> None:
    exact = make()
    exact.module.double()
    truth = gradients(exact)
    whole = gradients(make(precision=precision))
    parts = gradients(make(precision=precision, grad_accumulation=number))
    limit = 2 * (whole - truth).norm() + 4 * torch.finfo(torch.float32).eps * truth.norm()
    assert (parts - truth).norm() <= limit
    assert (number * parts - truth).norm() > limit
    assert (torch.zeros_like(truth) - truth).norm() > limit


@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_step_has_one_update_and_starts_without_gradients(checkpoint: str) -> None:
    step = make(grad_accumulation=2, checkpoint=checkpoint)
    assert [name for name, _ in step.phases] == ["forward", "backward", "forward", "backward", "optimizer"]
    before = [parameter.detach().clone() for parameter in step.module.parameters()]
    first = gradients(step)
    step.phases[-1][1]()
    assert all(parameter.grad is None for parameter in step.module.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))
    with torch.no_grad():
        for parameter, old in zip(step.module.parameters(), before, strict=True):
            parameter.copy_(old)
    assert torch.equal(gradients(step), first)


def test_model_is_compiled_once_for_a_micro_batch() -> None:
    compilations: list[object] = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        compilations.append(graph)
        return graph.forward

    step = make(grad_accumulation=4)
    step.run_module = torch.compile(step.module, backend=count, dynamic=False)
    step.run()
    step.run()
    assert len(compilations) == 1


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return name


def test_factory_builds_one_micro_batch_that_runs_several_times_per_step(own_module: str) -> None:
    own: dict[str, Scalar] = {**RUN, "model": f"{own_module}:build"}
    made = {number: build(build_case({**own, "grad_accumulation": number}).workload, CPU) for number in (1, 4)}
    seen: list[tuple[int, ...]] = []
    run_module = made[4].run_module

    def watched(ids: Tensor) -> object:
        seen.append(tuple(ids.shape))
        return run_module(ids)

    made[4].run_module = watched
    made[4].run()
    assert seen == [(2, 16)] * 4
    assert count_forward_flops(made[4]) == count_forward_flops(made[1]) > 0


def test_factory_without_a_batch_parameter_raises(own_module: str) -> None:
    settings: dict[str, Scalar] = {"model": f"{own_module}:deaf", "device": "cpu", "grad_accumulation": 2}
    with pytest.raises(StepscopeError, match="requires a `batch` parameter"):
        build(build_case(settings).workload, CPU)


def test_transformers_model_takes_micro_batches() -> None:
    tiny: dict[str, Scalar] = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 50, "n_positions": 16}
    made = [
        build(build_case({**RUN, "hf": "gpt2", "set": tiny, "grad_accumulation": number}).workload, CPU)
        for number in (1, 4)
    ]
    made[1].run()
    assert made[1].loss_is_finite()
    assert count_forward_flops(made[0]) == count_forward_flops(made[1])


def test_memory_holds_one_micro_batch_and_all_gradients(tmp_path: Path) -> None:
    case = case_of(grad_accumulation=4)
    record_memory(case, CPU, folder=tmp_path, on_stage=lambda _: None)
    profile = make_memory_profile(reader.read(tmp_path / SNAPSHOT_NAME))
    last = profile.steps[-1]
    spans = {phase: profile.phase_spans(last, phase) for phase in ("forward", "backward", "optimizer")}
    assert {phase: len(found) for phase, found in spans.items()} == {"forward": 4, "backward": 4, "optimizer": 1}
    weights = 4 * cost.parameters(case.workload.model).total  # type: ignore[arg-type]
    kept = cost.saved_bytes(case_of(batch=2).workload)
    for number, (_, end) in enumerate(spans["forward"]):
        held = dict(profile.categories_at(end - 1))
        assert (held["activations"], held["gradients"]) == (kept, weights if number else 0)
    assert [dict(profile.categories_at(end - 1))["gradients"] for _, end in spans["backward"]] == [weights] * 4
    peaks = {one.phase: one.peak_bytes for one in profile.summary.phases if one.step == last}
    assert peaks["backward"] == profile.peak_bytes
    assert peaks["optimizer"] < peaks["forward"] < peaks["backward"]
    # What other tests left alive in this process has no category.
    held = dict(profile.categories_at(profile.peak_event)) | {"other": 0}
    assert cost.step_peak(case.workload).bytes == pytest.approx(sum(held.values()), rel=0.02)


def test_profile_counts_the_passes_of_a_step(tmp_path: Path) -> None:
    case = case_of(grad_accumulation=2)
    record(case, CPU, functions=(), folder_raw=tmp_path, record_steps=2, on_stage=lambda _: None)
    recording = kineto.read(tmp_path / RAW_TRACE_NAME).with_manifest(case=case)
    profile = make_profile(recording)
    ranges = recording.ranges.filter(pl.col("name").str.starts_with("phase:"))["name"].value_counts()
    assert dict(ranges.iter_rows())["phase:forward"] == dict(ranges.iter_rows())["phase:backward"] == 2 * 2
    answer = products_by_role(profile)
    assert answer.evidence is not None
    at = [column.key for column in answer.evidence.columns].index("expected")
    expected = {"forward": 0, "backward": 0}
    for stage, *cells in answer.evidence.rows:
        count = cells[at - 1]
        expected[str(stage)] += count if isinstance(count, int) else 0
    assert expected == {"forward": 2 * (2 * 9 + 1), "backward": 2 * 2 * (2 * 9 + 1)}
    assert "not as expected" not in answer.sentence


def test_forward_span_leaves_out_the_backward_passes_in_between(tmp_path: Path) -> None:
    case = case_of(grad_accumulation=4)
    record(case, CPU, functions=(), folder_raw=tmp_path, record_steps=2, on_stage=lambda _: None)
    profile = make_profile(kineto.read(tmp_path / RAW_TRACE_NAME).with_manifest(case=case))
    answer = forward_time(profile)
    assert answer.evidence is not None
    clocks = {str(row[0]): row[1] for row in answer.evidence.rows}
    ranges = profile.recording.ranges.filter(pl.col("name") == "phase:forward").sort("start_ns")
    apart_ms = (ranges["end_ns"][3] - ranges["start_ns"][0]) / 1e6
    assert isinstance(clocks["span"], float)
    assert isinstance(clocks["range"], float)
    assert clocks["span"] <= clocks["range"] < apart_ms
