"""`flash_attention` and its autograd functions: shapes, arguments, and their use with other PyTorch features.

The results of the kernels are tested with each of them; here `tiled` represents all, because it runs on a CPU.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stepscope.cost.operators import operator_cost
from stepscope.kernels import FlashAttention, FlashAttentionTiled, flash_attention
from stepscope.kernels.attention import BACKENDS, operators, tiled
from stepscope.nn import functional
from tests.cpu.accuracy import assert_three_way, error, normal, run_with_gradients

ON_CPU = ("auto", "tiled", "naive", "sdpa", "sdpa-flash", "sdpa-math")
TILED = partial(flash_attention, backend="tiled")


def qkv(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> list[Tensor]:
    return [normal(*shape, seed=seed).to(dtype).requires_grad_(requires_grad) for seed in range(3)]


def go_back(output: Tensor) -> None:
    output.sum().backward()  # type: ignore[no-untyped-call]


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The reference takes four dimensions only."""
    heads = (x.reshape(-1, *((1,) if x.dim() < 4 else (x.shape[-3],)), *x.shape[-2:]) for x in (q, k, v))
    return functional.attention(*heads, causal=causal).reshape(q.shape)


# --- Shapes ---


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_any_leading_dimensions(leading: tuple[int, ...], backend: str) -> None:
    inputs = [normal(*leading, 9, 8, seed=seed) for seed in range(3)]
    ours = partial(flash_attention, causal=True, backend=backend)
    assert_three_way(ours, partial(reference, causal=True), inputs, dtype=torch.float32)


@pytest.mark.parametrize("backend", ON_CPU)
def test_grouped_heads_behind_two_batch_dimensions(backend: str) -> None:
    inputs = [normal(2, 3, 4, 9, 8), normal(2, 3, 2, 9, 8, seed=2), normal(2, 3, 2, 9, 8, seed=3)]
    ours = partial(flash_attention, causal=True, backend=backend)
    assert_three_way(ours, partial(reference, causal=True), inputs, dtype=torch.float32)


def spy_on_tiles(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    seen: list[Tensor] = []
    original = tiled.forward

    def forward(*tensors: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        seen.extend(tensors)
        return original(*tensors, **settings)

    monkeypatch.setattr(tiled, "forward", forward)
    return seen


ARRANGEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads before length": lambda x: x.transpose(1, 2),  # of (B, L, H, D), as projections give it
    "every other head": lambda x: x[:, ::2],
    "columns first": lambda x: x.mT,
    "one head for all": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "three dimensions": lambda x: x[0],
    "two dimensions": lambda x: x[0, 0],
    "five dimensions": lambda x: x.view(2, 2, 4, 6, 6),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_strided_inputs_are_not_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [ARRANGEMENTS[name](normal(4, 4, 6, 6, seed=seed)) for seed in range(3)]
    seen = spy_on_tiles(monkeypatch)
    output = TILED(*tensors)
    assert output.shape == tensors[0].shape
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in tensors]
    assert error(output, TILED(*(x.contiguous() for x in tensors))) < 1e-12


def test_batch_dimensions_that_no_view_can_flatten_are_copied() -> None:
    tensors = [normal(3, 2, 4, 6, 6, seed=seed).transpose(0, 1) for seed in range(3)]
    assert error(TILED(*tensors), reference(*tensors, causal=False)) < 1e-12


# --- The autograd functions ---


@pytest.mark.parametrize("shape", [(2, 9, 8), (2, 3, 9, 8), (9, 8)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_function_saves_q_k_v_o_and_the_log_sum_exp(shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(*shape)
    output: Tensor = FlashAttentionTiled.apply(q, k, v, causal)  # type: ignore[no-untyped-call]
    *kept, lse = output.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v, output), strict=True))
    assert (lse.shape, lse.dtype) == (shape[:-1], torch.float32)
    scores = (q @ k.mT).detach() / shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(functional.causal_mask(9, 9, q.device), -torch.inf)
    assert error(lse, scores.logsumexp(-1)) < 1e-5


def test_function_is_not_causal_by_default() -> None:
    q, k, v = qkv(2, 9, 8)
    assert torch.equal(FlashAttentionTiled.apply(q, k, v), TILED(q, k, v))  # type: ignore[no-untyped-call]
    assert torch.equal(
        FlashAttentionTiled.apply(q, k, v, is_causal=True),  # type: ignore[no-untyped-call]
        TILED(q, k, v, causal=True),
    )


@pytest.mark.parametrize("shape", [(2, 9, 8), (2, 3, 9, 8), (2, 2, 3, 9, 8)], ids=str)
def test_saved_bytes_match_the_formula(shape: tuple[int, ...]) -> None:
    q, k, v = qkv(*shape, dtype=torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        TILED(q, k, v)
    assert sum(kept.values()) == 4 * q.numel() * 2 + q.numel() // 8 * 4
    assert {x.untyped_storage().data_ptr() for x in (q, k, v)} <= kept.keys()


def test_only_required_gradients_are_computed() -> None:
    q, k, v = qkv(1, 1, 9, 8, requires_grad=False)
    go_back(TILED(q, k.requires_grad_(), v))
    assert q.grad is None
    assert v.grad is None
    assert k.grad is not None


def test_output_without_a_graph_may_be_changed_in_place() -> None:
    q, k, v = qkv(2, 9, 8, requires_grad=False)
    output = TILED(q, k, v)
    output += torch.ones(8, requires_grad=True)
    assert output.requires_grad


def test_output_changed_in_place_is_detected() -> None:
    output = TILED(*qkv(2, 9, 8))
    output += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        go_back(output)


@pytest.mark.parametrize("backend", ["naive", "sdpa-math"])
def test_second_derivative_raises_and_names_backends_with_one(backend: str) -> None:
    q, k, v = qkv(1, 1, 5, 4, dtype=torch.float64)

    def second(backend: str) -> Tensor:
        output = flash_attention(q, k, v, backend=backend)
        (dq,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), k)[0]

    with pytest.raises(RuntimeError, match=f"does not support double backward.*{backend}"):
        second("tiled")
    assert second(backend).isfinite().all()


def test_first_derivative_is_right_with_create_graph() -> None:
    q, k, v = qkv(1, 1, 5, 4)
    output = TILED(q, k, v)
    plain = torch.autograd.grad(output.sum(), (q, k, v), retain_graph=True)
    graphed = torch.autograd.grad(output.sum(), (q, k, v), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graphed, strict=True))


# --- With other PyTorch features ---


@pytest.mark.parametrize("backend", ON_CPU)
def test_autocast_casts_as_it_does_for_sdpa(backend: str) -> None:
    q, k, v = qkv(2, 3, 40, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = flash_attention(q, k.detach().half(), v, causal=True, backend=backend)
        theirs = scaled_dot_product_attention(q, k.detach().half(), v, is_causal=True)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    go_back(ours)
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert error(ours, theirs.double()) < 0.02


def test_sums_stay_in_fp32_under_autocast() -> None:
    rounded = [x.detach().bfloat16() for x in qkv(1, 1, 300, 8)]
    outside = run_with_gradients(TILED, rounded, torch.ones(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run_with_gradients(TILED, [x.float() for x in rounded], torch.ones(1))
        direct: Tensor = FlashAttentionTiled.apply(*(x.float() for x in rounded))  # type: ignore[no-untyped-call]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(inside, outside, strict=True))
    assert torch.equal(direct, outside[0])


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert TILED(*qkv(1, 1, 5, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return TILED(q * 2, k, v, causal=True).sin()

    plain, checkpointed = qkv(1, 2, 20, 8), qkv(1, 2, 20, 8)
    go_back(block(*plain))
    go_back(checkpoint(block, *checkpointed, use_reentrant=use_reentrant))
    for a, b in zip(plain, checkpointed, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_nothing_is_saved_without_gradients() -> None:
    kept: list[Tensor] = []
    with torch.no_grad(), saved_tensors_hooks(kept.append, lambda x: x):
        output = TILED(*qkv(1, 1, 9, 8))
    assert not output.requires_grad
    assert kept == []


@pytest.fixture
def fresh_compiler() -> None:
    """Dynamo keeps a limited number of versions of one function, and `flash_attention` is one function."""
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_a_graph_break_to_the_same_result() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return TILED(q * 2, k, v, causal=True).sin()

    inputs = [x.detach().transpose(1, 2) for x in qkv(2, 20, 3, 8)]
    plain = run_with_gradients(block, inputs, torch.ones(1))
    ours = run_with_gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), inputs, torch.ones(1))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert ours[0].stride() == plain[0].stride()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_a_graph_break_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler of torch 2.11 cannot trace whether autocast is active.
    untraceable = torch._dynamo.disable(torch.amp.is_autocast_available)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    q, k, v = (x.detach() for x in qkv(1, 2, 20, 8))
    compiled = torch.compile(lambda: TILED(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(), TILED(q, k, v, causal=True))
        assert compiled().dtype == torch.bfloat16


@pytest.mark.usefixtures("fresh_compiler")
def test_scale_may_change_between_calls_of_compiled_code() -> None:
    q, k, v = (x.detach() for x in qkv(1, 2, 5, 8))
    compiled = torch.compile(lambda scale: TILED(q, k, v, scale=scale), fullgraph=True, backend="eager")
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(scale), TILED(q, k, v, scale=scale))


def set_by_the_older_name(tf32: bool) -> None:
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def set_by_the_newer_name(tf32: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("allow", [set_by_the_older_name, set_by_the_newer_name])
def test_fp32_follows_the_switch_of_pytorch_compiled_or_not(
    allow: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    original = tiled.forward

    def forward(*tensors: Tensor, tf32: bool, **settings: Any) -> tuple[Tensor, Tensor]:
        asked.append(tf32)
        return original(*tensors, tf32=tf32, **settings)

    monkeypatch.setattr(tiled, "forward", forward)
    compiled = torch.compile(TILED, fullgraph=True, backend="eager")
    before = torch.get_float32_matmul_precision()
    try:
        for tf32 in (False, True, False):
            allow(tf32)
            compiled(*qkv(1, 1, 3, 4))
            TILED(*qkv(1, 1, 3, 4))
    finally:
        torch.set_float32_matmul_precision(before)
    assert asked == [False, False, True, True, False, False]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_lengths_may_change_without_recompiling(backend: str) -> None:
    count = CompileCounter()
    run = partial(flash_attention, causal=True, backend=backend)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for length in (5, 8, 13):
        inputs = [normal(2, 4, length, 8), normal(2, 2, length, 8), normal(2, 2, length, 8)]
        assert error(compiled(*inputs), reference(*inputs, causal=True)) < 1e-12
    assert count.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["auto", "naive", "compiled", "sdpa", "sdpa-math"])
def test_other_backends_compile_too(backend: str) -> None:
    inputs = qkv(1, 2, 6, 4)
    run = partial(flash_attention, causal=True, backend=backend)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert error(compiled(*inputs), reference(*inputs, causal=True).double()) < 1e-5


def test_operators_pass_opcheck() -> None:
    q, k, v = (normal(2, 7, heads, 8, seed=heads).transpose(1, 2) for heads in (4, 2, 2))
    settings = (True, 0.3, "tiled", False, False)
    o, lse = operators.forward_operator(q, k, v, *settings)
    opcheck(operators.backward_operator, (o, q, k, v, o, lse, *settings))
    opcheck(operators.forward_operator, (*(x.requires_grad_() for x in (q, k, v)), *settings))


def test_operator_is_differentiable() -> None:
    inputs = qkv(2, 2, 7, 8)
    output, lse = operators.differentiable_operator(*inputs, True, 8**-0.5, "tiled", False, False)  # noqa: FBT003
    assert output.requires_grad
    assert not lse.requires_grad
    ours = torch.autograd.grad(output.sum(), inputs)
    theirs = torch.autograd.grad(TILED(*inputs, causal=True).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 2)])
def test_flops_count_a_causal_mask_as_half(causal: bool, share: int) -> None:
    q, k, v = qkv(2, 4, 16, 8)
    counter = FlopCounterMode(display=False)
    with counter:
        go_back(TILED(q, k, v, causal=causal))
    product = 2 * 2 * 4 * 16 * 16 * 8 // share
    counts = counter.get_flop_counts()["Global"]
    assert counts == {
        torch.ops.stepscope.flash_attention_forward: 2 * product,
        torch.ops.stepscope.flash_attention_backward: 5 * product,
    }


@pytest.mark.parametrize(
    ("window", "pairs"), [({}, 16 * 24 / 2), ({"left": "2"}, 16 * 3), ({"left": "-1", "right": "-1"}, 16 * 24 / 2)]
)
@pytest.mark.parametrize(
    "operator",
    [
        operators.forward_operator,
        operators.forward_with_extras,
        operators.backward_operator,
        operators.backward_with_extras,
    ],
    ids=str,
)
def test_trace_of_the_operators_gives_their_cost(operator: Any, window: dict[str, str], pairs: float) -> None:
    """From the position of each argument, as a profiler writes them."""
    shapes = {"grad": (2, 4, 16, 8), "q": (2, 4, 16, 8), "k": (2, 2, 24, 8), "v": (2, 2, 24, 8), "lse": (2, 4, 16)}
    names = [argument.name for argument in operator._schema.arguments]
    found = operator_cost(
        operator.name(),
        json.dumps([shapes.get(name, shapes["q"] if name == "o" else ()) for name in names]),
        json.dumps(["c10::BFloat16" if name in (*shapes, "o") else "Scalar" for name in names]),
        json.dumps(["True" if name == "causal" else window.get(name, "") for name in names]),
    )
    assert found is not None
    products = 5 if "grad" in names else 2
    assert found.flops == products * 2 * 2 * 4 * (pairs if "left" in names else 16 * 24 / 2) * 8


# --- Invalid arguments ---


def tensor(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


BAD: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], tensor(2, 3), tensor(2, 3)), {}, TypeError, "`q` must be a tensor, but got list"),
    "integers": (
        (tensor(2, 3), tensor(2, 3).long(), tensor(2, 3)),
        {},
        TypeError,
        "`k` to be float16.*but got torch.int64",
    ),
    "two dtypes": (
        (tensor(2, 3), tensor(2, 3), tensor(2, 3).half()),
        {},
        TypeError,
        "same dtype.*`v` is torch.float16",
    ),
    "two devices": (
        (tensor(2, 3), tensor(2, 3, device="meta"), tensor(2, 3)),
        {},
        ValueError,
        "same device.*`k` is on meta",
    ),
    "one dimension": ((tensor(3), tensor(3), tensor(3)), {}, ValueError, "`q` to have shape .*but got .3,."),
    "other dimensions": (
        (tensor(2, 3), tensor(1, 2, 3), tensor(2, 3)),
        {},
        ValueError,
        "`k` to have 2 dimensions .*but got 3",
    ),
    "other batch": (
        (tensor(2, 5, 3), tensor(1, 5, 3), tensor(2, 5, 3)),
        {},
        ValueError,
        "`k` to have the batch.*.1, 5, 3.",
    ),
    "other batches": (
        (tensor(2, 2, 5, 3), tensor(2, 2, 5, 3), tensor(1, 2, 5, 3)),
        {},
        ValueError,
        "`v` to have the batch dimensions.*.1, 2, 5, 3.",
    ),
    "other head dim": ((tensor(2, 3), tensor(2, 4), tensor(2, 3)), {}, ValueError, "`k` to have head dim 3 .*got 4"),
    "fewer values": (
        (tensor(2, 3), tensor(5, 3), tensor(4, 3)),
        {},
        ValueError,
        "`v` to have the shape of `k`.*.4, 3.",
    ),
    "head dim": ((tensor(2, 257),) * 3, {}, ValueError, "head dim from 1 to 256, but got 257"),
    "no head dim": ((tensor(2, 0),) * 3, {}, ValueError, "head dim from 1 to 256, but got 0"),
    "heads": (
        (tensor(1, 4, 2, 3), *(tensor(1, 3, 2, 3),) * 2),
        {},
        ValueError,
        "heads of `q` .4. must be divisible by that of `k` .3.",
    ),
    "no query heads": ((tensor(1, 0, 2, 3),) * 3, {}, ValueError, "`q` to have at least one head.*.1, 0, 2, 3."),
    "no heads": ((tensor(1, 4, 2, 3), *(tensor(1, 0, 2, 3),) * 2), {}, ValueError, "divisible by that of `k` .0."),
    "negative scale": ((tensor(2, 3),) * 3, {"scale": -1.0}, ValueError, "row maximum is taken.*got -1.0"),
    "a scale beyond floats": ((tensor(2, 3),) * 3, {"scale": 10**400}, ValueError, "`scale` must be finite.*got 1000"),
    "no number for a scale": (
        (tensor(2, 3),) * 3,
        {"scale": float("nan")},
        ValueError,
        "`scale` must be finite.*got nan",
    ),
    "endless scale": ((tensor(2, 3),) * 3, {"scale": float("inf")}, ValueError, "`scale` must be finite.*got inf"),
    "no scale": ((tensor(2, 3),) * 3, {"scale": "1"}, TypeError, "`scale` must be a number, but got str"),
    "a mask": ((tensor(2, 3),) * 3, {"causal": tensor(2, 2)}, TypeError, "`causal` must be True or False"),
    "backend": ((tensor(2, 3),) * 3, {"backend": "tritn"}, ValueError, "`tritn`: did you mean `triton`"),
}


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(case: str, backend: str) -> None:
    tensors, options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        flash_attention(*tensors, **{"backend": backend, **options})


def test_gpu_function_requires_a_gpu() -> None:
    with pytest.raises(ValueError, match="triton: it requires a CUDA GPU, but the tensors are on cpu"):
        FlashAttention.apply(*qkv(1, 1, 3, 4))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("backend", ["sdpa", "trito"])
def test_gpu_function_only_takes_flash_backends(backend: str) -> None:
    with pytest.raises(ValueError, match=f"unknown `backend` `{backend}`"):
        FlashAttention.apply(*qkv(1, 1, 3, 4), False, None, backend)  # type: ignore[no-untyped-call]  # noqa: FBT003


@pytest.mark.parametrize("backend", ["auto", "tiled", "sdpa", "naive"])
def test_zero_scale_averages_the_visible_values(backend: str) -> None:
    q, k, v = qkv(1, 2, 5, 8)
    out = flash_attention(q, k, v, causal=True, scale=0, backend=backend)
    expected = v.cumsum(-2) / torch.arange(1, 6)[:, None]
    torch.testing.assert_close(out, expected)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("backend", ["auto", "tiled", "sdpa", "naive"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty_queries_and_keys_are_allowed(num_queries: int, num_keys: int, backend: str) -> None:
    q, k = torch.ones(2, 2, num_queries, 8), torch.ones(2, 2, num_keys, 8)
    if num_keys == 0 and backend in ("sdpa", "naive"):
        with pytest.raises(ValueError, match="without keys"):
            flash_attention(q, k, k, backend=backend)
    else:
        out = flash_attention(q, k, k, backend=backend)
        assert out.shape == q.shape
        assert not out.any()


@pytest.mark.parametrize("backend", ["auto", "tiled", "sdpa", "naive"])
def test_meta_tensors_give_shapes(backend: str) -> None:
    q, k, v = (x.detach().to("meta") for x in qkv(2, 3, 5, 8))
    assert flash_attention(q, k, v, causal=True, backend=backend).shape == q.shape


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {*ON_CPU, "compiled"}))
def test_named_backend_never_runs_as_another(backend: str) -> None:
    with pytest.raises(ValueError, match=f"`backend` `{backend}` cannot run this: "):
        flash_attention(*qkv(1, 1, 3, 4), backend=backend)
