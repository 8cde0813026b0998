"""The Triton kernels in Triton's interpreter: their results, for every kind of input, without a GPU.

`test_triton_attention.py` runs this file in its own process, with TRITON_INTERPRET in the environment: the variable is
read when a kernel is decorated, and a process has either interpreted kernels or compiled ones. The interpreter takes
milliseconds for every step of every tile, so shapes are small and tiles are smaller than on a GPU, so that several of
them are used.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim of q and k, E head dim of v.

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.kernels.attention import triton_launch as launch
from stepscope.kernels.attention.tiles import Tile
from stepscope.nn import functional
from tests.cpu.accuracy import assert_as_accurate, assert_three_way, normal
from tests.cpu.kernels.interpreter import prepare

prepare()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

# B, H, G, L, K, D: full tiles; odd lengths; more keys than queries; more queries than keys (blind rows when causal).
SHAPES = [(1, 1, 1, 64, 64, 128), (2, 1, 1, 37, 37, 16), (1, 2, 1, 33, 70, 40), (1, 2, 1, 50, 33, 80)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
# D, E: heads of one tile and of two, whole or padded, of q and k, of v, or of both.
HEAD_DIMS = [(192, 128), (40, 24), (96, 96), (256, 256), (192, 192), (16, 160), (130, 129)]


class _Attention(torch.autograd.Function):
    """The launchers, as autograd calls them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        o, lse = launch.forward(q, k, v, causal=causal, scale=scale, tf32=False)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = {"causal": causal, "scale": scale, "tf32": False}
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *launch.backward(do, *ctx.saved_tensors, **ctx.settings)[:3], None, None


@pytest.fixture(autouse=True)
def quiet_overflow() -> Iterator[None]:
    """exp2 of a masked score may overflow, silently on a GPU."""
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill memory with NaN, so that reads of unwritten memory are noticed."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(params=["pointers", "descriptors"])
def sources(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tiles are read: on a GPU it depends on the GPU."""
    monkeypatch.setattr(launch, "has_copy_engine", lambda _: request.param == "descriptors")


# Different for the two backward kernels, of which one reads what the other writes.
SMALL_TILES = {
    "forward": Tile(32, 32, 4, 2),
    "backward_queries": Tile(32, 64, 4, 2),
    "backward_keys": Tile(64, 16, 4, 2),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "tile_for", lambda stage, *_, **__: SMALL_TILES[stage])


def make_inputs(shape: tuple[int, ...], v_head_dim: int | None = None) -> list[Tensor]:
    batch, num_heads, num_groups, num_queries, num_keys, head_dim = shape
    keys = (batch, num_groups, num_keys)
    k, v = normal(*keys, head_dim, seed=2), normal(*keys, v_head_dim or head_dim, seed=3)
    return [normal(batch, num_heads, num_queries, head_dim), k, v]


def check(inputs: list[Tensor], *, dtype: torch.dtype, causal: bool, scale: float | None = None) -> None:
    """Compare the output and all gradients, three ways."""
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cast(Tensor, _Attention.apply(q, k, v, causal, scale))  # type: ignore[no-untyped-call]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.attention(q, k, v, causal=causal, scale=scale)

    assert_three_way(ours, plain, inputs, dtype=dtype)


def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool) -> list[Tensor]:
    """o, the log-sum-exp, and the gradients."""
    o, lse = launch.forward(q, k, v, causal=causal, scale=0.25, tf32=False)
    return [o, lse, *launch.backward(do, q, k, v, o, lse, causal=causal, scale=0.25, tf32=False)[:3]]


@every_dtype
@either_mask
@every_shape
@pytest.mark.usefixtures("small_tiles")
def test_outputs_and_gradients_match_the_reference(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    check(make_inputs(shape), dtype=dtype, causal=causal)


@pytest.mark.parametrize(("shape", "causal"), list(zip(SHAPES, [False, True, False, True], strict=True)), ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_descriptors_and_pointers_give_the_same_bits(
    shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.to(torch.bfloat16) for x in make_inputs(shape))
    do = normal(*q.shape, seed=4).to(torch.bfloat16)
    expected = run(q, k, v, do, causal=causal)
    monkeypatch.setattr(launch, "has_copy_engine", lambda _: True)
    assert isinstance(launch.sources(q, 32)[0], TensorDescriptor)
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, do, causal=causal), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_head_dim_of_v_may_differ(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(make_inputs((1, 2, 1, 40, 50, head_dims[0]), head_dims[1]), dtype=dtype, causal=True)


@pytest.mark.parametrize("head_dims", [(192, 128), (160, 192), (40, 24)], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_both_tiles_of_a_head_may_be_read_by_descriptor(
    head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.to(torch.bfloat16) for x in make_inputs((1, 2, 1, 37, 40, head_dims[0]), head_dims[1]))
    do = normal(1, 2, 37, head_dims[1], seed=4).to(torch.bfloat16)
    expected = run(q, k, v, do, causal=True)
    monkeypatch.setattr(launch, "has_copy_engine", lambda _: True)
    described = [source for x in (q, v) for source in launch.sources(x, 32) if source is not None]
    assert all(isinstance(source, TensorDescriptor) for source in described)
    assert len(described) == 2 + (head_dims[0] != 40) + (head_dims[1] == 192)
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, do, causal=True), expected, strict=True))


@pytest.mark.usefixtures("small_tiles", "sources")
def test_columns_next_to_a_head_are_neither_read_nor_written() -> None:
    """As DeepSeek's values, which are a part of a wider tensor."""
    wide = torch.full((1, 2, 40, 320), torch.nan)
    q, k, v = make_inputs((1, 2, 2, 40, 40, 80), 160)
    parts = [wide.clone()[..., 16 : 16 + x.shape[-1]].copy_(x) for x in (q, k, v)]
    do = normal(1, 2, 40, 160, seed=4).float()
    results = run(parts[0], parts[1], parts[2], do, causal=True)
    expected = run(q.float(), k.float(), v.float(), do, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_shipped_tiles_match_the_reference() -> None:
    check(make_inputs((1, 2, 1, 150, 200, 64)), dtype=torch.bfloat16, causal=True)


# At least two keys: with one, the gradients of q and k are zero, and no limit could fail. Nothing is shrunk: a failure
# is small already, and the interpreter takes minutes to shrink it.
@settings(
    deadline=None,
    derandomize=True,
    max_examples=8,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    num_queries=st.integers(1, 70),
    num_keys=st.integers(2, 70),
    head_dim=st.integers(1, 40),
    causal=st.booleans(),
)
@pytest.mark.usefixtures("small_tiles")
def test_any_small_shape_matches_the_reference(
    heads: tuple[int, int], num_queries: int, num_keys: int, head_dim: int, causal: bool
) -> None:
    check(make_inputs((1, *heads, num_queries, num_keys, head_dim)), dtype=torch.float32, causal=causal)


@either_mask
@pytest.mark.usefixtures("small_tiles")
def test_log_sum_exp_is_natural_and_as_accurate_as_torch(causal: bool) -> None:
    q, k, v = (x.float() for x in make_inputs((1, 2, 1, 40, 60, 40)))
    _, ours = launch.forward(q, k, v, causal=causal, scale=0.2, tf32=False)

    def log_sum_exp(q: Tensor, k: Tensor) -> Tensor:
        scores = q * 0.2 @ k.transpose(-2, -1)
        if causal:
            scores = scores.masked_fill(functional.causal_mask(40, 60, scores.device), -math.inf)
        return scores.logsumexp(-1)

    assert_as_accurate(ours, log_sum_exp(q, k), log_sum_exp(q.double(), k.double()), name="log-sum-exp")


@pytest.mark.usefixtures("small_tiles")
def test_rows_that_see_no_key_return_zero_and_zero_gradients() -> None:
    q, k, v = (x.float() for x in make_inputs((1, 1, 1, 40, 3, 16)))
    o, lse = launch.forward(q, k, v, causal=True, scale=1.0, tf32=False)
    assert not o[:, :, :37].any()
    assert torch.isposinf(lse[:, :, :37]).all()
    assert torch.isfinite(lse[:, :, 37:]).all()
    do = torch.full_like(o, 1e30)
    dq, dk, dv, _ = launch.backward(do, q, k, v, o, lse, causal=True, scale=1.0, tf32=False)
    assert not dq[:, :, :37].any()
    assert torch.isfinite(torch.stack([dk, dv])).all()


@pytest.mark.usefixtures("small_tiles", "sources")
def test_strided_inputs_are_read_in_place_and_results_keep_their_layout() -> None:
    fused = normal(2, 37, 4, 2, 16).float()
    strided = [x.transpose(1, 2) for x in fused.unbind(2)]
    results = run(*strided, causal=True)
    expected = run(*(x.contiguous() for x in strided), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(x.transpose(1, 2).is_contiguous() for x in results if x.dim() == 4)


@pytest.mark.usefixtures("small_tiles")
def test_last_stride_may_differ_from_one_and_gradient_may_be_expanded() -> None:
    q, k, v = (x.float().transpose(-2, -1).contiguous().transpose(-2, -1) for x in make_inputs((1, 2, 2, 40, 35, 24)))
    results = run(q, k, v, torch.ones(()).expand(q.shape), causal=False)
    expected = run(q.contiguous(), k.contiguous(), v.contiguous(), torch.ones(q.shape), causal=False)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000], ids=["of the hardware", "of PyTorch"])
@pytest.mark.parametrize("where", range(4), ids=["q", "k", "v", "do"])
@pytest.mark.usefixtures("small_tiles")
def test_nan_is_never_lost(where: int, bits: int) -> None:
    """A step that went wrong must be visible. The two NaNs have different bits, and fp32 is split by its bits."""
    tensors = [x.float() for x in (*make_inputs((1, 1, 1, 20, 20, 16)), normal(1, 1, 20, 16, seed=4))]
    tensors[where][0, 0, 7, 3] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    results = run(tensors[0], tensors[1], tensors[2], tensors[3], causal=False)
    assert any(result.isnan().any() for result in (results if where == 3 else results[:1]))


@either_mask
@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.usefixtures("small_tiles")
def test_extreme_scales_match_the_reference(scale: float, causal: bool) -> None:
    q, k, v = make_inputs((1, 1, 1, 40, 50, 16))
    values = [x.float() for x in (q, k, v)]
    o, lse = launch.forward(*values, causal=causal, scale=scale, tf32=False)
    plain = functional.attention(*values, causal=causal, scale=scale)
    truth = functional.attention(*(x.double() for x in values), causal=causal, scale=scale)
    assert_as_accurate(o, plain, truth)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs_launch_nothing(num_queries: int, num_keys: int) -> None:
    q, k, v = (x.float() for x in make_inputs((2, 2, 1, num_queries, num_keys, 16)))
    o, lse = launch.forward(q, k, v, causal=True, scale=1.0, tf32=False)
    assert o.shape == q.shape
    assert not o.any()
    assert torch.isposinf(lse).all()
    *gradients, _ = launch.backward(o, q, k, v, o, lse, causal=True, scale=1.0, tf32=False)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in gradients)
