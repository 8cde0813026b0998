"""What a call adds to plain attention: windows, softcaps, biases, ALiBi slopes, sinks and packed documents.

Four ways: the definition below in float64, `naive`, `tiled`, and the outputs of PyTorch's `flex_attention`.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks
from torch.library import opcheck
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stepscope.kernels import document_bounds, flash_attention
from stepscope.kernels.attention import operators, tiled
from stepscope.kernels.attention.problem import Extras
from tests.cpu.accuracy import assert_as_accurate, error, normal, run_with_gradients

LENGTH = 37
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
CU_SEQLENS = torch.tensor([0, 5, 5, 20, 36, LENGTH])
LEARNED = ("bias", "sinks")


def inputs(
    queries: int = LENGTH, keys: int = LENGTH, *, batch: int = 1, heads: int = 4, groups: int = 2, v_head_dim: int = 8
) -> list[Tensor]:
    kv = (batch, groups, keys)
    return [normal(batch, heads, queries, 8, std=2), normal(*kv, 8, seed=2), normal(*kv, v_head_dim, seed=3)]


def define(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attention as the documentation defines it, one query after another, with nothing of ours."""
    heads_per_group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads_per_group, dim=1) for x in (k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    if cu_seqlens is not None:
        ids = [torch.full((int(n),), i) for i, n in enumerate(cu_seqlens.diff())]
        document = torch.cat(ids).expand(q.shape[0], -1)
    elif documents is not None:
        document = documents[0]
    else:
        document = torch.zeros(q.shape[0], max(num_queries, num_keys))
    rows = []
    key = torch.arange(num_keys)
    for i in range(num_queries):
        position = i + num_keys - num_queries
        scores_BHK = (q[:, :, i, None] * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores_BHK = softcap * (scores_BHK / softcap).tanh()
        if bias is not None:
            scores_BHK = scores_BHK + bias.expand(*bias.shape[:2], num_queries, num_keys)[:, :, i]
        if alibi_slopes is not None:
            scores_BHK = scores_BHK + alibi_slopes[..., None] * (key - position)
        seen_BK = document[:, :num_keys] == document[:, i, None] if num_queries == num_keys else key[None] >= 0
        if causal:
            seen_BK = seen_BK & (key <= position)
        if left is not None:
            seen_BK = seen_BK & (key >= position - left)
        if right is not None:
            seen_BK = seen_BK & (key <= position + right)
        row = []
        for b in range(q.shape[0]):
            seen = seen_BK[b if len(seen_BK) > 1 else 0]
            logits = scores_BHK[b][:, seen]
            if sinks is not None:
                logits = torch.cat((logits, sinks[:, None]), dim=1)
            weights = torch.softmax(logits, dim=1)[:, : int(seen.sum())]
            row.append((weights[..., None] * v[b][:, seen]).sum(1))
        rows.append(torch.stack(row))
    return torch.stack(rows, dim=2)


def uneven_documents(batch: int) -> Tensor:
    ends = [[0, 1, 9, LENGTH], [0, 36, LENGTH], [0, LENGTH]]
    return torch.cat([document_bounds(torch.tensor(ends[i % 3]), LENGTH) for i in range(batch)], dim=1)


CASES: dict[str, dict[str, Any]] = {
    "causal window": {"causal": True, "window": 6},
    "window of one": {"causal": True, "window": 1},
    "window on both sides": {"window": (3, 5)},
    "window ahead": {"window": (0, None)},
    "window behind": {"window": (4, 0)},
    "softcap": {"softcap": 1.5},
    "causal softcap": {"causal": True, "softcap": 0.7, "scale": 0.9},
    "full bias": {"bias": normal(2, 4, LENGTH, LENGTH, seed=5)},
    "bias of heads": {"causal": True, "bias": normal(1, 4, LENGTH, LENGTH, seed=5)},
    "bias of keys": {"bias": normal(2, 1, 1, LENGTH, seed=5)},
    "bias of queries and heads": {"bias": normal(1, 4, LENGTH, 1, seed=5), "softcap": 2.0, "sinks": normal(4, seed=9)},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "alibi on both sides": {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES))},
    "sinks": {"causal": True, "sinks": normal(4, seed=6)},
    "sinks and nothing hidden": {"sinks": normal(4, seed=6)},
    "documents": {"documents": uneven_documents(2)},
    "causal documents": {"causal": True, "documents": uneven_documents(2)},
    "all": {
        "causal": True,
        "window": 9,
        "softcap": 3.0,
        "bias": normal(2, 4, LENGTH, LENGTH, seed=5),
        "alibi_slopes": SLOPES,
        "sinks": normal(4, seed=6),
        "documents": uneven_documents(2),
    },
}


def cast_of(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: x.to(dtype, copy=True) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }


def with_gradients(op: Callable[..., Tensor], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output, then the gradients of q, k, v and of the bias and sinks in use."""
    learned = [name for name in LEARNED if name in options]

    def run(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return op(q, k, v, **{**options, **dict(zip(learned, parameters, strict=True))})

    upstream = normal(*tensors[0].shape[:-1], tensors[2].shape[-1], seed=1).to(tensors[0].dtype)
    return run_with_gradients(run, [*tensors, *(options[name] for name in learned)], upstream)


@pytest.mark.parametrize("v_head_dim", [8, 5])
@pytest.mark.parametrize("backend", ["naive", "tiled"])
@pytest.mark.parametrize("case", CASES)
def test_float64_matches_the_definition(case: str, backend: str, v_head_dim: int) -> None:
    tensors = inputs(batch=2, v_head_dim=v_head_dim)
    ours = with_gradients(partial(flash_attention, backend=backend), tensors, CASES[case])
    truth = with_gradients(define, tensors, CASES[case])
    assert all(error(a, b) < 1e-12 for a, b in zip(ours, truth, strict=True))
    plain = with_gradients(define, tensors, {"causal": CASES[case].get("causal", False)})
    assert error(plain[0], truth[0]) > 1e-2, "the case changes nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_tiled_is_as_accurate_as_the_reference(case: str, dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in inputs(batch=2)]
    options = cast_of(CASES[case], dtype)
    ours = with_gradients(partial(flash_attention, backend="tiled"), tensors, options)
    plain = with_gradients(partial(flash_attention, backend="naive"), tensors, options)
    exact = with_gradients(define, [x.double() for x in tensors], cast_of(options, torch.float64))
    for place, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        # A window of one has no gradients of q and k. That of a bias without keys is a difference of large sums, one of
        # them from the rounded output.
        cancels = place == 4 and "bias" in options and options["bias"].shape[3] == 1 and dtype != torch.float32
        if c.any() and not cancels:
            assert_as_accurate(a, b, c, name=str(place))


def flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same in PyTorch's own words. Its sinks come from the log-sum-exp: they shrink the output."""
    left, right = (
        (options["window"] - 1, 0) if isinstance(options.get("window"), int) else options.get("window") or (None, None)
    )
    causal, softcap, bias = options.get("causal"), options.get("softcap"), options.get("bias")
    slopes, sinks, documents = options.get("alibi_slopes"), options.get("sinks"), options.get("documents")

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])[b, h, i, j]
        if slopes is not None:
            score = score + slopes.expand(q.shape[:2])[b, h] * (j - i)
        return score

    def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= 0
        if causal:
            seen = seen & (j <= i)
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j <= i + right)
        if documents is not None:
            seen = seen & (documents[0, b, i] == documents[0, b, j])
        return seen

    mask = create_block_mask(see, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device="cpu")
    out, lse = flex_attention(q, k, v, change, mask, options.get("scale"), enable_gqa=True, return_lse=True)
    if sinks is None:
        return out
    return out * torch.sigmoid(lse - sinks[:, None])[..., None]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*return_lse is deprecated")
@pytest.mark.parametrize("case", CASES)
def test_tiled_matches_flex_attention(case: str) -> None:
    """Outputs only: PyTorch does not differentiate it on a CPU."""
    tensors = inputs(batch=2)
    ours, theirs = (op(*tensors, **CASES[case]) for op in (partial(flash_attention, backend="tiled"), flex))
    assert error(ours, theirs) < 1e-6


@pytest.mark.parametrize("backend", ["naive", "tiled"])
@pytest.mark.parametrize("lengths", [(5, 23), (23, 5), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": 3},
        {"window": (2, 4)},
        {"causal": True, "alibi_slopes": SLOPES},
        {"causal": True, "sinks": normal(4, seed=6)},
        {"causal": True, "window": 2, "sinks": normal(4, seed=6)},
    ],
    ids=str,
)
def test_positions_are_aligned_at_the_end(lengths: tuple[int, int], options: dict[str, Any], backend: str) -> None:
    tensors = inputs(*lengths)
    ours = with_gradients(partial(flash_attention, backend=backend), tensors, options)
    truth = with_gradients(define, tensors, options)
    assert all(error(a, b) < 1e-12 for a, b in zip(ours, truth, strict=True))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    queries=st.integers(1, 30),
    keys=st.integers(1, 30),
    left=st.none() | st.integers(0, 20),
    right=st.none() | st.integers(0, 20),
    tile=st.sampled_from([(1, 1), (7, 5), (16, 8), (8, 16)]),
)
def test_any_window_in_any_tiles(
    queries: int, keys: int, left: int | None, right: int | None, tile: tuple[int, int]
) -> None:
    """Tiles outside a window are skipped, so every border matters."""
    options = {"window": (left, right), "sinks": normal(4, seed=6)}
    tensors = inputs(queries, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "QUERY_TILE", tile[0])
        patch.setattr(tiled, "KEY_TILE", tile[1])
        ours = with_gradients(partial(flash_attention, backend="tiled"), tensors, options)
    truth = with_gradients(define, tensors, options)
    assert all(error(a, b) < 1e-12 for a, b in zip(ours, truth, strict=True))


def test_tiles_outside_a_window_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[slice, slice]] = []
    original = tiled._scores

    def scores(q: Tensor, k: Tensor, rows: slice, columns: slice, problem: Any) -> Any:
        seen.append((rows, columns))
        return original(q, k, rows, columns, problem)

    monkeypatch.setattr(tiled, "_scores", scores)
    monkeypatch.setattr(tiled, "QUERY_TILE", 8)
    monkeypatch.setattr(tiled, "KEY_TILE", 8)
    q, k, v = (x.requires_grad_() for x in inputs(64, 64))
    output = flash_attention(q, k, v, causal=True, window=8, backend="tiled")
    assert len(seen) == 8 + 7  # the diagonal and the tile before it
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 2 * (8 + 7)


@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_any_leading_dimensions(leading: tuple[int, ...], backend: str) -> None:
    tensors = [normal(*leading, 9, 8, seed=seed) for seed in range(3)]
    heads = leading[-1] if len(leading) > 1 else 1
    bias = normal(*leading, 9, 9, seed=5)
    options = {"bias": bias, "sinks": normal(heads, seed=6), "alibi_slopes": SLOPES[:heads]}
    ours = with_gradients(partial(flash_attention, backend=backend), tensors, options)
    whole = [x.reshape(-1, heads, 9, x.shape[-1]) for x in (*tensors, bias)]
    truth = with_gradients(define, whole[:3], {**options, "bias": whole[3]})
    assert all(error(a, b.view(a.shape)) < 1e-12 for a, b in zip(ours, truth, strict=True))


def test_bias_of_several_batch_dimensions_broadcasts() -> None:
    tensors = [normal(2, 3, 4, 9, 8, seed=seed) for seed in range(3)]
    for shape in ((3, 1, 9, 9), (2, 1, 4, 1, 9), (9, 9), (1, 1, 1, 9, 1)):
        bias = normal(*shape, seed=5)
        ours = with_gradients(partial(flash_attention, backend="tiled"), tensors, {"bias": bias})
        full = with_gradients(partial(flash_attention, backend="tiled"), tensors, {"bias": bias.expand(2, 3, 4, 9, 9)})
        assert error(ours[0], full[0]) == 0
        assert error(ours[4], full[4].sum_to_size(bias.shape)) < 1e-12


# --- Rows without keys, and extreme values ---


@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_bias_of_minus_infinity_hides_keys(backend: str) -> None:
    """All of them for one query, which returns zero with zero gradients."""
    q, k, v = inputs()
    bias = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    bias[:, 7:] = -math.inf
    bias[3] = -math.inf
    ours = with_gradients(partial(flash_attention, backend=backend), [q, k, v], {"bias": bias})
    truth = flash_attention(q, k[:, :, :7], v[:, :, :7], backend="naive")
    truth[:, :, 3] = 0
    assert error(ours[0], truth) < 1e-12
    assert all(x.isfinite().all() for x in ours)
    assert not ours[1][:, :, 3].any()


def test_log_sum_exp_includes_the_sink() -> None:
    """So does that of a query that sees no key, and without sinks it is infinite."""
    tensors = inputs(9, 4)
    sinks = normal(4, seed=6)
    common: dict[str, Any] = {"causal": True, "scale": 0.3, "tf32": False}
    _, plain_BHL = tiled.forward(*tensors, **common)
    _, lse_BHL = tiled.forward(*tensors, **common, extras=Extras(sinks=sinks))
    blind, seeing = slice(0, 5), slice(5, 9)
    assert plain_BHL[:, :, blind].isposinf().all()
    assert torch.equal(lse_BHL[0, :, blind], sinks[:, None].expand(4, 5))
    assert error(lse_BHL[:, :, seeing], torch.logaddexp(plain_BHL[:, :, seeing], sinks[:, None])) < 1e-14


@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_sink_of_minus_infinity_is_none(backend: str) -> None:
    tensors = inputs(9, 4)
    options = {"causal": True, "sinks": torch.full((4,), -math.inf, dtype=torch.float64)}
    ours = with_gradients(partial(flash_attention, backend=backend), tensors, options)
    plain = with_gradients(partial(flash_attention, backend=backend), tensors, {"causal": True})
    assert all(error(a, b) < 1e-12 for a, b in zip(ours[:4], plain, strict=True))
    assert not ours[4].any()


@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_large_sinks_and_scores_do_not_overflow(backend: str) -> None:
    q, k, v = (x.float() for x in inputs())
    options = {"sinks": torch.tensor([1e4, -1e4, 0, 300.0])}
    assert all(
        x.isfinite().all() for x in with_gradients(partial(flash_attention, backend=backend), [1e4 * q, k, v], options)
    )


def test_window_wider_than_the_sequence_is_a_plain_call() -> None:
    x = torch.zeros(1, 1, 5, 4)
    for options in ({"causal": True, "window": 5}, {"window": (4, 4)}, {"window": (None, None)}):
        # SDPA supports no window at all.
        assert flash_attention(x, x, x, backend="sdpa", **options).shape == x.shape
    with pytest.raises(ValueError, match="`sdpa` cannot run this: it does not support `window`"):
        flash_attention(x, x, x, causal=True, window=4, backend="sdpa")


# --- Documents ---


def test_document_bounds() -> None:
    table = document_bounds(torch.tensor([0, 2, 2, 5]), 5)
    assert table.dtype == torch.int32
    assert table.tolist() == [[[0, 0, 2, 2, 2]], [[2, 2, 5, 5, 5]]]
    assert document_bounds(torch.tensor([0, 0], dtype=torch.int32), 0).shape == (2, 1, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_the_same_as_separate_calls(causal: bool) -> None:
    tensors = inputs()
    upstream = normal(*tensors[0].shape, seed=1)
    ours = run_with_gradients(
        partial(flash_attention, causal=causal, cu_seqlens=CU_SEQLENS, backend="tiled"), tensors, upstream
    )
    parts = []
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        if stop > start:
            part = [x[:, :, start:stop] for x in tensors]
            op = partial(flash_attention, causal=causal, backend="naive")
            parts.append(run_with_gradients(op, part, upstream[:, :, start:stop]))
    for place, ours_whole in enumerate(ours):
        assert error(ours_whole, torch.cat([part[place] for part in parts], dim=2)) < 1e-12


def test_cu_seqlens_and_their_table_are_the_same() -> None:
    q, k, v = inputs()
    table = document_bounds(CU_SEQLENS.int(), LENGTH)
    a = flash_attention(q, k, v, causal=True, cu_seqlens=CU_SEQLENS, backend="tiled")
    assert torch.equal(a, flash_attention(q, k, v, causal=True, documents=table, backend="tiled"))


# --- With other PyTorch features ---


def all_of_them(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Any]]:
    return [x.to(dtype) for x in inputs(batch=2)], cast_of(CASES["all"], dtype)


@pytest.fixture
def fresh_compiler() -> None:
    """Dynamo keeps a limited number of versions of one function, and `flash_attention` is one function."""
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["auto", "tiled", "naive", "compiled"])
@pytest.mark.parametrize("case", ["causal window", "bias of heads", "sinks", "all"])
def test_compiles_without_a_graph_break_to_the_same_result(case: str, backend: str) -> None:
    tensors, options = [x.float() for x in inputs(batch=2)], cast_of(CASES[case], torch.float32)
    op = partial(flash_attention, backend=backend)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    plain = with_gradients(op, tensors, options)
    for a, b in zip(with_gradients(compiled, tensors, options), plain, strict=True):
        assert error(a, b) < 1e-5
        assert a.stride() == b.stride() or backend in ("naive", "compiled")


@pytest.mark.usefixtures("fresh_compiler")
def test_cu_seqlens_compile_without_a_graph_break() -> None:
    q, k, v = inputs()

    def run(cu_seqlens: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True, cu_seqlens=cu_seqlens, backend="tiled")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for cu_seqlens in (CU_SEQLENS, torch.tensor([0, 1, 2, 3, 4, LENGTH])):
        assert torch.equal(compiled(cu_seqlens), run(cu_seqlens))
    with pytest.raises(RuntimeError, match="`cu_seqlens` must start at 0"):
        compiled(torch.tensor([1, 2, 3, 4, 5, LENGTH]))


@pytest.mark.usefixtures("fresh_compiler")
def test_lengths_may_change_without_recompiling() -> None:
    def run(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        options: dict[str, Any] = {"window": 3, "sinks": torch.ones(4), "softcap": 2.0, "cu_seqlens": cu_seqlens}
        return flash_attention(x, x, x, causal=True, backend="tiled", **options)

    count = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for length in (9, 11, 17):
        x, cu_seqlens = normal(1, 4, length, 8), torch.tensor([0, 5, length])
        assert torch.equal(compiled(x, cu_seqlens), run(x, cu_seqlens))
    assert count.frame_count == 1


def test_operators_pass_opcheck() -> None:
    tensors, options = all_of_them(torch.float64)
    extras = (8, -1, 3.0, options["bias"], SLOPES[None], options["sinks"], options["documents"])
    settings = (True, 0.3, "tiled", False, False)
    o, lse = operators.forward_with_extras(*tensors, *settings, *extras)
    opcheck(operators.backward_with_extras, (o, *tensors, o, lse, *settings, *extras, True))
    opcheck(operators.backward_with_extras, (o, *tensors, o, lse, *settings, *extras, False))
    permuted = options["bias"].permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    extras = (8, -1, 3.0, permuted, SLOPES[None], options["sinks"], options["documents"])
    opcheck(operators.backward_with_extras, (o, *tensors, o, lse, *settings, *extras, True))
    learned = [x.detach().requires_grad_() for x in (*tensors, options["bias"], options["sinks"])]
    extras = (8, -1, 3.0, learned[3], SLOPES[None], learned[4], options["documents"])
    opcheck(operators.forward_with_extras, (*learned[:3], *settings, *extras))


@pytest.mark.parametrize("name", LEARNED)
def test_operator_is_differentiable(name: str) -> None:
    tensors, options = all_of_them(torch.float64)
    learned = [x.requires_grad_() for x in (*tensors, options[name])]
    extras = Extras(**{name: options[name]})
    output, _ = operators.forward_with_extras(*tensors, True, 8**-0.5, "tiled", False, False, *extras)  # noqa: FBT003
    ours = torch.autograd.grad(output.sum(), learned)
    plain = flash_attention(*tensors, causal=True, backend="tiled", **{name: options[name]})
    theirs = torch.autograd.grad(plain.sum(), learned)
    assert all(error(a, b) < 1e-12 for a, b in zip((output, *ours), (plain, *theirs), strict=True))


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    tensors, options = all_of_them()

    def op(*args: Tensor, **others: Any) -> Tensor:
        return flash_attention(*args, **others, backend="tiled")

    def checkpointed(*args: Tensor, **others: Any) -> Tensor:
        return checkpoint(op, *args, **others, use_reentrant=False)  # type: ignore[no-any-return]

    plain, again = with_gradients(op, tensors, options), with_gradients(checkpointed, tensors, options)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_tensors_are_kept_where_hooks_see_them() -> None:
    """Through `save_for_backward`: a bias may be the largest of them."""
    tensors, options = all_of_them()
    kept: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        kept.add(x.data_ptr())
        return x

    bias = options["bias"].requires_grad_()
    with saved_tensors_hooks(pack, lambda x: x):
        flash_attention(*tensors, **options, backend="tiled")
    assert {bias.data_ptr(), options["documents"].data_ptr()} <= kept


@pytest.mark.parametrize("name", LEARNED)
def test_only_required_gradients_are_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = all_of_them()
    wanted: list[bool] = []
    original = tiled.backward

    def backward(*args: Tensor, wants_dbias: bool, **others: Any) -> Any:
        wanted.append(wants_dbias)
        return original(*args, wants_dbias=wants_dbias, **others)

    monkeypatch.setattr(tiled, "backward", backward)
    options[name].requires_grad_()
    flash_attention(*tensors, **options, backend="tiled").sum().backward()  # type: ignore[no-untyped-call]
    assert options[name].grad is not None
    assert all(options[other].grad is None for other in LEARNED if other != name)
    assert wanted == [name == "bias"]


def test_first_derivative_is_right_with_create_graph() -> None:
    tensors, options = all_of_them(torch.float64)
    learned = [x.detach().requires_grad_() for x in (*tensors, options["bias"], options["sinks"])]
    output = (
        flash_attention(*learned[:3], **{**options, "bias": learned[3], "sinks": learned[4]}, backend="tiled")
        .square()
        .sum()
    )
    plain = torch.autograd.grad(output, learned, retain_graph=True)
    graphed = torch.autograd.grad(output, learned, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graphed, strict=True))
    for first in graphed:
        with pytest.raises(RuntimeError, match="does not support double backward"):
            torch.autograd.grad(first.sum(), learned[1], retain_graph=True)


def test_autocast_leaves_the_extras_in_fp32() -> None:
    tensors, options = all_of_them()
    with torch.autocast("cpu", torch.bfloat16):
        ours = with_gradients(partial(flash_attention, backend="tiled"), tensors, options)
    rounded = [x.bfloat16() for x in tensors]
    outside = with_gradients(partial(flash_attention, backend="tiled"), rounded, options)
    assert ours[0].dtype == torch.bfloat16
    assert torch.equal(ours[0], outside[0])
    assert all(x.dtype == torch.float32 for x in ours[1:])


def test_parameters_in_half_precision_get_gradients_in_it() -> None:
    tensors, options = all_of_them(torch.bfloat16)
    gradients = with_gradients(partial(flash_attention, backend="tiled"), tensors, options)
    assert all(x.dtype == torch.bfloat16 for x in gradients)


def test_flops_count_what_a_window_shows() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(16, 16))
    counter = FlopCounterMode(display=False)
    with counter:
        flash_attention(q, k, v, causal=True, window=4, backend="tiled").sum().backward()  # type: ignore[no-untyped-call]
    product = 2 * 4 * (1 + 2 + 3 + 13 * 4) * 8  # heads, visible pairs, head dim
    assert counter.get_flop_counts()["Global"] == {
        torch.ops.stepscope.flash_attention_forward: 2 * product,
        torch.ops.stepscope.flash_attention_backward: 5 * product,
    }
