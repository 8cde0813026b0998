"""A v whose head dim differs from that of q and k, as in DeepSeek's latent attention."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim of q and k, E head dim of v.

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from stepscope.cost.operators import attention_flops, operator_cost
from stepscope.kernels import FlashAttentionTiled, flash_attention
from stepscope.kernels.attention import operators
from stepscope.kernels.attention.problem import Extras, empty_output
from stepscope.nn import functional
from tests.cpu.accuracy import assert_three_way, error, normal, run_with_gradients

ON_CPU = ("auto", "tiled", "naive", "compiled", "sdpa", "sdpa-math")
TILED = partial(flash_attention, backend="tiled")
EXTRAS = {"window": 3, "softcap": 2.0}
either = pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])


def qkv(*shape: int, v_head_dim: int = 5, groups: int | None = None) -> list[Tensor]:
    kv = shape if groups is None else (*shape[:-3], groups, *shape[-2:])
    return [normal(*shape), normal(*kv, seed=2), normal(*kv[:-1], v_head_dim, seed=3)]


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    heads = (x.reshape(-1, *((1,) if x.dim() < 4 else (x.shape[-3],)), *x.shape[-2:]) for x in (q, k, v))
    return functional.attention(*heads, causal=causal).reshape(*q.shape[:-1], v.shape[-1])


# --- Results ---


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("v_head_dim", [5, 20])
def test_every_backend_matches_the_reference(backend: str, v_head_dim: int) -> None:
    torch._dynamo.reset()
    inputs = qkv(2, 4, 9, 8, v_head_dim=v_head_dim, groups=2)
    ours = partial(flash_attention, causal=True, backend=backend)
    assert_three_way(ours, partial(reference, causal=True), inputs, dtype=torch.float32)


def test_reference_agrees_with_pytorch() -> None:
    q, k, v = qkv(2, 4, 9, 8)
    assert error(reference(q, k, v, causal=True), scaled_dot_product_attention(q, k, v, is_causal=True)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads_of_deepseek_in_tiles(dtype: torch.dtype) -> None:
    inputs = qkv(1, 2, 300, 192, v_head_dim=128)
    ours = partial(TILED, causal=True)
    assert_three_way(ours, partial(reference, causal=True), inputs, dtype=dtype)


@either
@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("backend", ["tiled", "naive"])
def test_any_leading_dimensions(backend: str, leading: tuple[int, ...], extras: dict[str, Any]) -> None:
    inputs = qkv(*leading, 9, 8)
    ours = run_with_gradients(partial(flash_attention, causal=True, backend=backend, **extras), inputs, torch.ones(1))
    assert [x.shape for x in ours] == [(*leading, 9, 5), *(x.shape for x in inputs)]
    if not extras:
        truth = run_with_gradients(partial(reference, causal=True), inputs, torch.ones(1))
        assert all(error(a, b) < 1e-12 for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_without_keys_the_output_is_zero(backend: str) -> None:
    q, k, v = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 0, 8), torch.ones(2, 3, 0, 4)
    output = flash_attention(q, k, v, backend=backend)
    assert output.shape == (2, 3, 5, 4)
    assert not output.any()


def test_scale_follows_the_head_dim_of_q() -> None:
    q, k, v = qkv(1, 2, 9, 8)
    assert error(TILED(q, k, v), TILED(q, k, v, scale=8**-0.5)) < 1e-12


# --- Memory layout and what is saved ---


def test_output_has_the_layout_of_q_and_gradients_those_of_their_inputs() -> None:
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(2, 4, 9, 8)]
    output = TILED(*leaves)
    assert output.transpose(1, 2).is_contiguous()
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert [x.stride() for x in gradients] == [x.stride() for x in leaves]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_output_keeps_the_order_of_dimensions(order: tuple[int, ...]) -> None:
    q = torch.empty_permuted((2, 3, 4, 8), order)
    output = empty_output(q, torch.empty(2, 3, 4, 6))
    assert output.shape == (2, 3, 4, 6)
    assert output.permute(order).is_contiguous()
    assert output.dtype == q.dtype


def test_function_saves_q_k_v_o_and_the_log_sum_exp() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(3, 9, 8))
    output: Tensor = FlashAttentionTiled.apply(q, k, v)  # type: ignore[no-untyped-call]
    shapes = [x.shape for x in output.grad_fn.saved_tensors]  # type: ignore[union-attr]
    assert shapes == [(3, 9, 8), (3, 9, 8), (3, 9, 5), (3, 9, 5), (3, 9)]


# --- Compilers and counters ---


@either
@pytest.mark.parametrize("backend", ["tiled", "naive", "auto"])
def test_compiles_without_a_graph_break_to_the_same_result(backend: str, extras: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q * 2, k, v, causal=True, backend=backend, **extras).sin()

    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).float() for x in qkv(2, 3, 20, 8)]
    plain = run_with_gradients(block, inputs, torch.ones(1))
    ours = run_with_gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), inputs, torch.ones(1))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert ours[0].stride() == plain[0].stride()


@pytest.mark.parametrize("backend", ["auto", "tiled", "sdpa", "naive"])
def test_meta_tensors_give_shapes(backend: str) -> None:
    q, k, v = (x.to("meta") for x in qkv(2, 3, 9, 8))
    assert flash_attention(q, k, v, causal=True, backend=backend).shape == (2, 3, 9, 5)


def test_fake_tensors_of_a_gpu_have_the_shapes_and_strides_of_the_kernels() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 9, 3, 192, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        v = torch.empty(2, 3, 9, 128, device="cuda", dtype=torch.bfloat16)
        o, lse = operators.forward_operator(q, q, v, True, 0.1, "triton", False, False)  # noqa: FBT003
        gradients = operators.backward_operator(o, q, q, v, o, lse, True, 0.1, "triton", False, False)  # noqa: FBT003
    assert (o.shape, o.stride(), lse.shape) == ((2, 3, 9, 128), (9 * 3 * 128, 128, 3 * 128, 1), (2, 3, 9))
    assert [x.shape for x in gradients] == [q.shape, q.shape, v.shape]


def test_operators_pass_opcheck() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 4, 7, 8, groups=2))
    settings = (True, 0.3, "tiled", False, False)
    o, lse = operators.forward_operator(q, k, v, *settings)
    opcheck(operators.backward_operator, (o, q, k, v, o, lse, *settings))
    learned = [x.requires_grad_() for x in (q, k, v)]
    opcheck(operators.forward_operator, (*learned, *settings))
    opcheck(operators.forward_with_extras, (*learned, *settings, *Extras(left=3)))


def test_flops_count_each_product_with_its_own_columns() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 4, 16, 8))
    counter = FlopCounterMode(display=False)
    with counter:
        TILED(q, k, v).sum().backward()  # type: ignore[no-untyped-call]
    pairs = 2 * 4 * 16 * 16
    assert counter.get_flop_counts()["Global"] == {
        torch.ops.stepscope.flash_attention_forward: 2 * pairs * (8 + 5),
        torch.ops.stepscope.flash_attention_backward: 2 * pairs * (3 * 8 + 2 * 5),
    }
    sizes = {"batch": 2, "heads": 4, "queries": 16, "keys": 16, "head_dim": 8, "causal": False}
    assert attention_flops(**sizes, value_dim=5) == 2 * pairs * (8 + 5)  # type: ignore[arg-type]
    assert attention_flops(**sizes) == 2 * pairs * (8 + 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", [operators.forward_operator, operators.backward_operator], ids=str)
def test_trace_of_the_operators_gives_their_cost(operator: Any) -> None:
    names = [argument.name for argument in operator._schema.arguments]
    out = (2, 4, 16, 5)
    shapes = {"grad": out, "q": (2, 4, 16, 8), "k": (2, 2, 24, 8), "v": (2, 2, 24, 5), "o": out, "lse": (2, 4, 16)}
    found = operator_cost(
        operator.name(),
        json.dumps([shapes.get(name, ()) for name in names]),
        json.dumps(["c10::BFloat16" if name in shapes else "Scalar" for name in names]),
        json.dumps(["False" if name == "causal" else "" for name in names]),
    )
    assert found is not None
    columns = 3 * 8 + 2 * 5 if "grad" in names else 8 + 5
    assert found.flops == 2 * 2 * 4 * 16 * 24 * columns


# --- Errors ---


@pytest.mark.parametrize("backend", ["auto", "tiled", "naive"])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (2, 4), (2, 3)), "`k` to have head dim 3 like `q`, but got 4"),
        (((2, 3), (5, 3), (4, 7)), r"`v` to have the shape of `k` \(5, 3\) except for the head dim, but got \(4, 7\)"),
        (((2, 3), (2, 3), (2, 257)), "`v` to have a head dim from 1 to 256, but got 257"),
        (((2, 3), (2, 3), (2, 0)), "`v` to have a head dim from 1 to 256, but got 0"),
    ],
    ids=["k", "fewer values", "too wide", "empty"],
)
def test_bad_shape_is_named(shapes: tuple[tuple[int, ...], ...], message: str, backend: str) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, backend=backend)


def test_flash_kernel_of_pytorch_refuses_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"`sdpa-flash` cannot run this: .* head dim of `q` \(8\), but got 5"):
        flash_attention(*qkv(1, 2, 9, 8), backend="sdpa-flash")
