"""Tensors saved for backward are read from the graph without changing it, and match the formulas to the byte."""

import shutil
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepscope import cost
from stepscope.explain.memory.saved import compare_saved, held_storages, saved_and_predicted
from stepscope.measure.memory.marks import LOSS, Places
from stepscope.measure.memory.saved_tensors import SavedTensor, audit, held_tensors
from stepscope.nn.model import SwiGLU
from stepscope.recording.tables import SCHEMAS
from stepscope.spec import Case, Factory, Workload, build_case
from stepscope.step import Step, build
from stepscope.step.annotation import annotated
from stepscope.step.own import Parts
from tests.cpu.saved import audit_forward, frame_of, saved_by

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"d_model": 32, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab": 50}
TINY |= {"batch": 2, "context": 16, "device": "cpu"}


def case(**given_settings: Any) -> Case:
    return build_case(TINY | given_settings)


def saved(**given_settings: Any) -> pl.DataFrame:
    return saved_by(case(**given_settings).workload)


def activation_bytes(frame: pl.DataFrame) -> int:
    return int(held_storages(frame)["storage_bytes"].sum())


def audit_module(module: nn.Module, x: Tensor) -> tuple[SavedTensor, ...]:
    def loss(output: object, _batch: object) -> Tensor:
        assert isinstance(output, Tensor)
        return output.sum()

    parts = Parts(module=module, inputs=(x,), call=lambda run, batch: run(batch), loss=loss)
    step = Step(Workload(model=Factory(target="own:model"), mode="forward", device="cpu"), parts, CPU)
    return audit_forward(step)


# --- Against the formulas -------------------------------------------------------------------------------------------


@given(
    batch=st.integers(1, 3),
    context=st.integers(1, 20),
    head_dim=st.sampled_from([2, 6]),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    d_ff=st.integers(1, 40),
    num_layers=st.integers(1, 3),
    tied=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_saves_what_the_formula_says(
    batch: int, context: int, head_dim: int, groups: int, heads_per_group: int, d_ff: int, num_layers: int, tied: bool
) -> None:
    heads = groups * heads_per_group
    chosen = case(
        batch=batch,
        context=context,
        d_model=heads * head_dim,
        num_heads=heads,
        num_kv_heads=groups,
        d_ff=d_ff,
        num_layers=num_layers,
        tie_embeddings=tied,
    )
    found = saved_by(chosen.workload)
    assert activation_bytes(found) == cost.activations_of(chosen.workload).bytes


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_part_saves_what_the_formula_says(attention: str, precision: str, batch: int) -> None:
    chosen = case(attention=attention, precision=precision, batch=batch)
    table = saved_and_predicted(saved_by(chosen.workload), cost.activations_of(chosen.workload))
    assert [row[0] for row in table.rows if row[-1] != 0] == []


@pytest.mark.parametrize("checkpoint_setting", ["block", "2", "3", "nested:2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoint_holds_only_its_inputs(checkpoint_setting: str, precision: str) -> None:
    chosen = case(num_layers=5, checkpoint=checkpoint_setting, precision=precision)
    assert activation_bytes(saved_by(chosen.workload)) == cost.saved_bytes(chosen.workload)


def test_feed_forward_saves_what_is_counted_by_hand() -> None:
    shape: dict[str, Any] = {"batch": 10, "context": 200, "d_model": 512, "d_ff": 1344}
    rows = frame_of(audit_module(SwiGLU(512, 1344), torch.ones(10, 200, 512)))
    # In a model its input is the output of the previous norm.
    rows = rows.with_columns(kind=pl.col("kind").replace("input", "activation"))
    assert activation_bytes(rows) == cost.total_bytes(cost.feed_forward_activations(**shape)) == 57_856_000


# --- Contents of a row ----------------------------------------------------------------------------------------------


def test_rows_name_node_module_and_owner() -> None:
    frame = saved()
    assert frame.schema == pl.Schema(SCHEMAS["saved"])
    assert frame["node"].is_sorted()
    by = {(row["module"], row["op"], row["argument"]): row for row in frame.iter_rows(named=True)}
    weight = by["blocks.1.ffn.down", "MmBackward0", "mat2"]
    assert (weight["kind"], weight["name"], weight["shape"]) == ("parameter", "blocks.1.ffn.down.weight", "[96, 32]")
    hidden = by["blocks.1.ffn.down", "MmBackward0", "self"]
    assert (hidden["kind"], hidden["name"], hidden["bytes"]) == ("activation", None, 2 * 16 * 96 * 4)
    assert by[LOSS, "GatherBackward0", "index"]["kind"] == "input"
    assert by["embedding", "IndexSelectBackward0", "index"]["kind"] == "input"
    assert set(frame.filter(pl.col("kind") == "buffer")["name"]) == {"rope_cos", "rope_sin"}
    assert by["blocks.0.attention", "MaskedFillBackward0", "mask"]["dtype"] == "bool"


def test_tensors_of_one_storage_share_its_number() -> None:
    frame = saved().filter(pl.col("kind") == "activation")
    inputs = frame.filter(pl.col("module").str.contains(r"blocks\.0\.attention\.[qkv]_proj"))
    assert inputs.height == 3
    assert inputs["storage"].n_unique() == 1
    assert inputs["storage_bytes"].unique().to_list() == [2 * 16 * 32 * 4]


def test_reading_changes_nothing() -> None:
    plain, watched = (build(case(checkpoint="2", num_layers=4, mode="train").workload, CPU) for _ in range(2))
    plain.run()
    before = [dict(vars(module)) for module in watched.module.modules()]
    places = Places()
    with annotated(watched, backend=places.open):
        watched.phases[0][1]()
    first, second = audit(watched, places), audit(watched, places)
    assert first == second
    assert [dict(vars(module)) for module in watched.module.modules()] == before
    for _, phase in watched.phases[1:]:
        phase()
    for a, b in zip(plain.module.parameters(), watched.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_a_graph_reading_raises() -> None:
    with pytest.raises(ValueError, match="no graph"):
        audit(build(case().workload, CPU))


class Doubled(torch.autograd.Function):
    """Saves one tensor correctly, and attaches two to its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kept = x * 3
        ctx.more = {"pair": [x * 4, "word"]}
        return x * 2

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Doubled.apply(x * self.weight)  # type: ignore[no-untyped-call]
        return result


def test_context_of_a_python_function_is_searched() -> None:
    found = [(row.argument, row.kind, row.bytes) for row in audit_module(Custom(), torch.ones(2, 4)) if "Dou" in row.op]
    assert found == [
        ("tensors[0]", "activation", 32),
        ("ctx.kept", "activation", 32),
        ("ctx.more.pair[0]", "activation", 32),
    ]


class ByName(nn.Module):
    """Gives a checkpoint one positional and one named argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * 2
        result: Tensor = checkpoint(lambda x, scale: (x * scale).exp(), x * 1.0, scale=scale, use_reentrant=False)
        return result


def test_checkpoint_holds_positional_and_named_arguments() -> None:
    rows = [row for row in audit_module(ByName(), torch.ones(2, 4)) if row.op == "checkpoint"]
    assert [(row.argument, row.bytes, row.kind) for row in rows] == [
        ("input[0]", 32, "activation"),
        ("input.scale", 16, "activation"),
    ]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.shape, t.half()), lambda packed: packed[1].float()):
            return (x * self.weight).exp()


def test_tensor_packed_by_a_user_hook_is_what_is_held() -> None:
    rows = audit_module(Packed(), torch.ones(2, 4))
    assert {(row.op, row.dtype, row.bytes) for row in rows} == {
        ("MulBackward0", "float16", 16),
        ("ExpBackward0", "float16", 16),
    }


# --- Compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_graph_saves_less_and_is_one_node() -> None:
    eager, compiled = saved(num_layers=1), saved(num_layers=1, compile=True)
    inside = compiled.filter(pl.col("op") == "CompiledFunctionBackward")
    assert inside["module"].unique().to_list() == ["(TransformerLM)"]
    assert {"activation", "parameter", "buffer", "input"} == set(inside["kind"])
    assert activation_bytes(compiled) < activation_bytes(eager)
    totals = compare_saved(eager, compiled)[0].rows[-1]
    assert totals[:3] == ("all", activation_bytes(eager), activation_bytes(compiled))


# --- Which module ---------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner((x * self.weight).sin())
        return inner.cos()


def test_node_belongs_to_the_innermost_call_that_created_it() -> None:
    found = {row.op: row.module for row in audit_module(Outer(), torch.ones(4))}
    assert found == {
        "MulBackward0": "(Outer)",
        "SinBackward0": "(Outer)",
        "ExpBackward0": "inner",
        "CosBackward0": "(Outer)",
    }


def test_nodes_outside_all_calls_have_no_module() -> None:
    parts = Parts(
        module=Outer(),
        inputs=(torch.ones(4),),
        call=lambda run, batch: run(batch),
        loss=lambda out, _: out.sum(),  # type: ignore[attr-defined]
    )
    step = Step(Workload(model=Factory(target="own:model"), mode="forward", device="cpu"), parts, CPU)
    before = (torch.ones(2, requires_grad=True) * 2).grad_fn
    places = Places()
    with annotated(step, backend=places.open):
        step.run()
    after = (torch.ones(2, requires_grad=True) * 2).grad_fn
    assert before is not None
    assert after is not None
    assert places.find(before._sequence_nr()) is None
    assert places.find(after._sequence_nr()) is None
    assert step.loss is not None
    assert step.loss.grad_fn is not None
    assert places.find(step.loss.grad_fn._sequence_nr()) == LOSS


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0] + 0 * ctx.saved_tensors[0]


def test_a_custom_function_holds_nothing_after_its_backward() -> None:
    """PyTorch raises an error if one asks, and a loop may still hold the loss of the last step."""
    y = _Double.apply(torch.ones(3, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    assert [argument for _, argument, _ in held_tensors(y.grad_fn)]
    y.backward()
    assert not [argument for _, argument, _ in held_tensors(y.grad_fn)]
