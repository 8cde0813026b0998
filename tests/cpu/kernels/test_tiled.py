"""Tiled attention against the reference, three ways: outputs, gradients and the log-sum-exp."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import tiled
from stepscope.nn import functional
from tests.cpu.accuracy import assert_three_way, error, normal, run_with_gradients

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TILED = partial(flash_attention, backend="tiled")


def inputs(batch: int, heads: int, groups: int, queries: int, keys: int, head_dim: int) -> list[Tensor]:
    kv = (batch, groups, keys, head_dim)
    return [normal(batch, heads, queries, head_dim), normal(*kv, seed=2), normal(*kv, seed=3)]


def compare(tensors: list[Tensor], *, causal: bool, dtype: torch.dtype, scale: float | None = None) -> None:
    ours = partial(TILED, causal=causal, scale=scale)
    assert_three_way(ours, partial(functional.attention, causal=causal, scale=scale), tensors, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 2, 37, 37, 16), (1, 6, 2, 33, 33, 24), (2, 4, 1, 5, 41, 8), (1, 2, 2, 41, 5, 8), (1, 1, 1, 2, 2, 1)],
    ids=["odd", "grouped", "decoding", "blind", "tiny"],
)
def test_tiled_matches_the_reference(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    compare(inputs(*shape), causal=causal, dtype=dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(300, 300), (257, 600), (600, 257), (512, 256)], ids=str)
def test_several_tiles_match_the_reference(lengths: tuple[int, int], causal: bool) -> None:
    compare(inputs(1, 2, 1, *lengths, 8), causal=causal, dtype=torch.float32)


def test_a_real_shape_in_bf16() -> None:
    compare(inputs(1, 2, 1, 1024, 1024, 64), causal=True, dtype=torch.bfloat16)


@settings(max_examples=25, derandomize=True)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    head_dim=st.integers(1, 20),
    tile=st.sampled_from([(1, 1), (7, 5), (16, 8), (8, 16)]),
    causal=st.booleans(),
)
@example(heads=(4, 2), queries=17, keys=16, head_dim=3, tile=(16, 8), causal=True)
def test_any_shape_in_any_tiles(
    heads: tuple[int, int], queries: int, keys: int, head_dim: int, tile: tuple[int, int], causal: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "QUERY_TILE", tile[0])
        patch.setattr(tiled, "KEY_TILE", tile[1])
        tensors = inputs(1, *heads, queries, keys, head_dim)
        upstream = normal(1, heads[0], queries, head_dim, seed=4)
        ours = run_with_gradients(partial(TILED, causal=causal), tensors, upstream)
        truth = run_with_gradients(partial(functional.attention, causal=causal), tensors, upstream)
    assert all(error(a, b) < 1e-12 for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("scale", [0.0, 0.3, 40.0])
def test_custom_scale(scale: float) -> None:
    tensors = inputs(1, 2, 2, 20, 20, 8)
    ours = run_with_gradients(partial(TILED, scale=scale), tensors, tensors[0])
    truth = run_with_gradients(partial(functional.attention, causal=False, scale=scale), tensors, tensors[0])
    assert all(error(a, b) < 1e-12 for a, b in zip(ours, truth, strict=True))
    assert error(ours[0], TILED(*tensors)) > 1e-3


def test_log_sum_exp_is_natural_and_infinite_without_visible_keys() -> None:
    q_BHLD, k_BGKD, v_BGKD = inputs(1, 2, 1, 7, 4, 8)
    _, lse_BHL = tiled.forward(q_BHLD, k_BGKD, v_BGKD, causal=True, scale=0.25, tf32=False)
    scores_BHLK = 0.25 * q_BHLD @ k_BGKD.mT
    scores_BHLK.masked_fill_(functional.causal_mask(7, 4, q_BHLD.device), -math.inf)
    assert error(lse_BHL[:, :, 3:], scores_BHLK.logsumexp(-1)[:, :, 3:]) < 1e-14
    assert torch.equal(lse_BHL[:, :, :3], torch.full((1, 2, 3), math.inf, dtype=torch.float64))


def test_queries_that_see_no_key_return_zero_and_zero_gradients() -> None:
    tensors = inputs(1, 1, 1, 6, 2, 4)
    output, dq, dk, dv = run_with_gradients(partial(TILED, causal=True), tensors, torch.ones(1, dtype=torch.float64))
    assert not output[:, :, :4].any()
    assert not dq[:, :, :4].any()
    assert dk.isfinite().all()
    assert dv.abs().min() > 0
    assert output[:, :, 4:].abs().min() > 0


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_empty_lengths(queries: int, keys: int) -> None:
    output, dq, dk, dv = run_with_gradients(TILED, inputs(2, 1, 1, queries, keys, 4), torch.ones(1))
    assert output.shape == dq.shape == (2, 1, queries, 4)
    assert dk.shape == dv.shape == (2, 1, keys, 4)
    assert not any(x.any() for x in (output, dq, dk, dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    """4096 equal weights of values that a running 16-bit sum would lose."""
    q = torch.zeros(1, 1, 1, 8, dtype=dtype)
    v = torch.full((1, 1, 4096, 8), 1.0, dtype=dtype)
    output = TILED(q, torch.zeros_like(v), v)
    assert torch.equal(output, torch.ones_like(output))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (x.float() for x in inputs(1, 1, 1, 5, 300, 8))
    output = TILED(1e4 * q, k, v)
    assert output.isfinite().all()


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation creates."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)), 0)
        return made


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nothing_grows_with_the_square_of_the_length(causal: bool) -> None:
    q, k, v = (x.float() for x in inputs(1, 1, 1, 2048, 2048, 8))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        o, lse = tiled.forward(q, k, v, causal=causal, scale=1.0, tf32=False)
        tiled.backward(o, q, k, v, o, lse, causal=causal, scale=1.0, tf32=False)
    assert largest.elements == max(tiled.QUERY_TILE * tiled.KEY_TILE, 2048 * 8)


def memory_order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=x.stride, reverse=True)


@pytest.mark.parametrize(
    "arrange",
    [lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT],
    ids=["BHLD", "BLHD", "BHDL"],
)
def test_results_have_the_memory_layout_of_the_inputs(arrange: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (arrange(x) for x in inputs(2, 4, 2, 5, 6, 8))
    o, lse = tiled.forward(q, k, v, causal=False, scale=1.0, tf32=False)
    *gradients, dbias = tiled.backward(torch.ones_like(o), q, k, v, o, lse, causal=False, scale=1.0, tf32=False)
    assert dbias is None
    assert lse.is_contiguous()
    for ours, given_ in zip((o, *gradients), (q, q, k, v), strict=True):
        assert memory_order(ours) == memory_order(given_)
        assert ours.dtype == given_.dtype
