"""What a call adds to plain attention, in the Triton kernels: windows, documents, softcap, bias, ALiBi and sinks.

`test_triton_attention.py` runs this file in Triton's interpreter, like `interpreted_triton_attention.py`. The truth is
naive attention in float64, differentiated by autograd.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from stepscope.kernels.attention import triton_launch as launch
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras
from stepscope.kernels.attention.tiles import Tile
from tests.cpu.accuracy import assert_as_accurate, assert_three_way, normal
from tests.cpu.kernels.interpreter import prepare

prepare()

# Different for the two backward kernels, of which one reads what the other writes.
SMALL_TILES = {
    "forward": Tile(32, 16, 4, 2),
    "backward_queries": Tile(16, 32, 4, 2),
    "backward_keys": Tile(32, 16, 4, 2),
}


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tiles, and memory that is NaN until it is written. exp2 of a masked score may overflow, as on a GPU."""
    monkeypatch.setattr(launch, "tile_for", lambda stage, *_, **__: SMALL_TILES[stage])
    torch.use_deterministic_algorithms(mode=True)
    with np.errstate(over="ignore"):
        yield
    torch.use_deterministic_algorithms(mode=False)


class Case(NamedTuple):
    """One call: its shape (B, H, G, L, K, D), and what it adds."""

    shape: tuple[int, int, int, int, int, int] = (1, 2, 1, 50, 50, 16)
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: tuple[int, int, int, int] | None = None
    slopes: tuple[int, ...] | None = None
    sinks: bool = False
    documents: tuple[tuple[int, ...], ...] = ()  # the lengths of the documents of each sequence
    scale: float = 0.25
    v_head_dim: int | None = None  # if it is not D

    def make_hidden(self) -> Tensor:
        """True where a query must not see a key."""
        batch, _, _, num_queries, num_keys, _ = self.shape
        position_L1 = torch.arange(num_queries)[:, None] + num_keys - num_queries
        key_K = torch.arange(num_keys)
        left, right = self.window
        hidden_BLK = torch.zeros(batch, num_queries, num_keys, dtype=torch.bool)
        if self.causal:
            hidden_BLK |= key_K > position_L1
        if left >= 0:
            hidden_BLK |= key_K < position_L1 - left
        if right >= 0:
            hidden_BLK |= key_K > position_L1 + right
        for hidden_LK, lengths in zip(hidden_BLK, self.documents, strict=False):
            number_L = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            hidden_LK |= number_L[:, None] != number_L
        return hidden_BLK

    def make_documents(self) -> Tensor | None:
        if not self.documents:
            return None
        tables = []
        for lengths in self.documents:
            length_N = torch.tensor(lengths)
            end_N = length_N.cumsum(0)
            tables.append(torch.stack([end_N - length_N, end_N]).repeat_interleave(length_N, dim=1))
        return torch.stack(tables, dim=1).int()

    def make_slopes(self) -> Tensor | None:
        """Of both signs."""
        return None if self.slopes is None else normal(*self.slopes, seed=6, std=0.3).float()

    def make_inputs(self, *, std: float = 1.0) -> list[Tensor]:
        """q, k and v, then the bias and the sinks if there are any."""
        batch, num_heads, num_groups, num_queries, num_keys, head_dim = self.shape
        keys = (batch, num_groups, num_keys)
        inputs = [
            normal(batch, num_heads, num_queries, head_dim, std=std),
            normal(*keys, head_dim, seed=2),
            normal(*keys, self.v_head_dim or head_dim, seed=3),
        ]
        if self.bias is not None:
            inputs.append(normal(*self.bias, seed=4))
        if self.sinks:
            inputs.append(normal(num_heads, seed=5))
        return inputs

    def split(self, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        """The bias and the sinks, of which both are optional."""
        return rest[0] if self.bias is not None else None, rest[-1] if self.sinks else None


def naive(case: Case, q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """Attention from its definition, and the log-sum-exp: at least in fp32, except for matmuls."""
    bias, sinks = case.split(rest)
    num_heads, num_queries = q_BHLD.shape[1:3]
    num_keys = k_BGKD.shape[2]
    k_BHKD, v_BHKD = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k_BGKD, v_BGKD))
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    score_BHLK = ((q_BHLD * case.scale) @ k_BHKD.mT).to(wide)
    if case.softcap:
        score_BHLK = case.softcap * (score_BHLK / case.softcap).tanh()
    if bias is not None:
        score_BHLK = score_BHLK + bias
    slopes = case.make_slopes()
    if slopes is not None:
        distance_LK = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
        score_BHLK = score_BHLK + slopes.to(wide)[..., None, None] * distance_LK
    score_BHLK = score_BHLK.masked_fill(case.make_hidden()[:, None], -math.inf)
    if sinks is not None:
        sink_BHL1 = sinks.to(wide)[:, None, None].expand(*score_BHLK.shape[:3], 1)
        score_BHLK = torch.cat([score_BHLK, sink_BHL1], dim=-1)
    highest_BHL1 = score_BHLK.detach().amax(dim=-1, keepdim=True).clamp(min=-1e30)
    weight_BHLK = (score_BHLK - highest_BHL1).exp()
    sum_BHL1 = weight_BHLK.sum(dim=-1, keepdim=True)
    blind_BHL1 = sum_BHL1 == 0
    weight_BHLK = (weight_BHLK / sum_BHL1.masked_fill(blind_BHL1, 1)).to(q_BHLD.dtype)
    lse_BHL1 = (highest_BHL1 + sum_BHL1.log()).masked_fill(blind_BHL1, math.inf)
    return weight_BHLK[..., :num_keys] @ v_BHKD, lse_BHL1.squeeze(-1)


class _Attention(torch.autograd.Function):
    """The launchers, as autograd calls them, with the gradient of the sinks as the caller has to compute it."""

    @staticmethod
    def forward(ctx: Any, case: Case, bias: Tensor | None, sinks: Tensor | None, *qkv: Tensor) -> Tensor:
        extras = make_extras(case, bias, sinks)
        ctx.settings = {"causal": case.causal, "scale": case.scale, "tf32": False, "extras": extras}
        o, lse = launch.forward(*qkv, **ctx.settings)
        ctx.save_for_backward(*qkv, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        extras = ctx.settings["extras"]
        o, lse = ctx.saved_tensors[3:]
        wants_dbias = extras.bias is not None
        dq, dk, dv, dbias = launch.backward(do, *ctx.saved_tensors, **ctx.settings, wants_dbias=wants_dbias)
        dsinks = None
        if extras.sinks is not None:
            delta_BHL = (o.float() * do.float()).sum(dim=-1)
            dsinks = -((extras.sinks[:, None] - lse).exp() * delta_BHL).sum(dim=(0, 2))
        return None, dbias, dsinks, dq, dk, dv


def make_extras(case: Case, bias: Tensor | None, sinks: Tensor | None) -> Extras:
    left, right = case.window
    return Extras(
        left=left,
        right=right,
        softcap=case.softcap,
        bias=bias,
        slopes=case.make_slopes(),
        sinks=sinks,
        documents=case.make_documents(),
    )


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    bias, sinks = case.split(rest)
    sinks = None if sinks is None else sinks.float()
    return cast(Tensor, _Attention.apply(case, bias, sinks, q, k, v))  # type: ignore[no-untyped-call]


def check(case: Case, dtype: torch.dtype, *, std: float = 1.0) -> None:
    """Compare the output, all gradients and the log-sum-exp, three ways."""
    inputs = case.make_inputs(std=std)
    assert_three_way(lambda *x: ours(case, *x), lambda *x: naive(case, *x)[0], inputs, dtype=dtype)
    rounded = [x.to(dtype) for x in inputs]
    bias, sinks = case.split(tuple(rounded[3:]))
    extras = make_extras(case, bias, None if sinks is None else sinks.float())
    q, k, v = rounded[:3]
    lse = launch.forward(q, k, v, causal=case.causal, scale=case.scale, tf32=False, extras=extras)[1]
    plain, truth = naive(case, *rounded)[1], naive(case, *(x.double() for x in rounded))[1]
    assert torch.equal(lse.isposinf(), truth.isposinf())
    finite = truth.isfinite()
    assert_as_accurate(lse[finite], plain[finite], truth[finite], name="log-sum-exp")


# Each alone, then several. Tiles have 16 or 32 rows, so most bounds lie within tiles.
CASES = {
    "causal window": Case(window=(10, -1)),
    "window of one key": Case(window=(0, -1), sinks=True),
    "window as long as the keys but one": Case(window=(48, -1)),
    "window on both sides": Case(causal=False, window=(3, 9)),
    "window to the left": Case(causal=False, window=(20, -1)),
    "window to the right": Case(causal=False, window=(-1, 5)),
    "window without a mask and more keys": Case(shape=(1, 2, 2, 33, 70, 24), causal=False, window=(7, 4)),
    "causal window and more keys": Case(shape=(1, 1, 1, 20, 70, 16), window=(30, -1)),
    "window and blind rows": Case(shape=(1, 2, 1, 70, 33, 16), window=(12, -1)),
    "window on both sides and blind rows": Case(shape=(1, 1, 1, 70, 33, 16), causal=False, window=(12, 5)),
    "softcap": Case(softcap=0.7),
    "softcap without a mask": Case(causal=False, softcap=2.0, shape=(1, 2, 1, 33, 47, 16)),
    "bias": Case(bias=(1, 2, 50, 50)),
    "bias per key": Case(shape=(2, 2, 1, 20, 40, 16), causal=False, bias=(2, 1, 1, 40)),
    "bias per query and head": Case(shape=(2, 2, 1, 33, 20, 16), bias=(1, 2, 33, 1), sinks=True),
    "one bias for all": Case(shape=(2, 2, 1, 20, 20, 16), bias=(1, 1, 20, 20)),
    "ALiBi": Case(slopes=(1, 2)),
    "ALiBi per sequence, and more keys": Case(shape=(2, 2, 1, 20, 40, 16), causal=False, slopes=(2, 2)),
    "sinks": Case(sinks=True),
    "sinks and blind rows": Case(shape=(1, 2, 1, 50, 20, 16), sinks=True),
    "documents": Case(documents=((7, 1, 1, 24, 17),)),
    "documents without a mask": Case(causal=False, documents=((16, 16, 1, 17),)),
    "documents of two sequences": Case(shape=(2, 2, 2, 40, 40, 16), documents=((33, 7), (1, 8, 31))),
    "windows in documents": Case(window=(4, -1), documents=((20, 2, 28),)),
    "windows on both sides in documents": Case(causal=False, window=(4, 3), documents=((20, 2, 28),)),
    "causal window, and a narrow v": Case(shape=(1, 2, 1, 50, 50, 40), v_head_dim=24, window=(10, -1)),
    "bias, and a wide v": Case(v_head_dim=160, bias=(1, 2, 50, 50)),
    "documents and sinks, and two tiles of q": Case(
        shape=(1, 2, 1, 50, 50, 160), v_head_dim=16, sinks=True, documents=((7, 1, 1, 24, 17),)
    ),
    "everything in a window": Case(
        shape=(2, 4, 2, 40, 60, 24), window=(18, -1), softcap=1.5, bias=(2, 1, 40, 60), slopes=(2, 4), sinks=True
    ),
    "everything in documents": Case(
        shape=(2, 4, 2, 40, 40, 24),
        causal=False,
        window=(15, 9),
        softcap=1.5,
        bias=(1, 4, 40, 40),
        slopes=(1, 4),
        sinks=True,
        documents=((3, 37), (17, 1, 22)),
    ),
    "everything, and two widths": Case(
        shape=(1, 2, 1, 40, 40, 192),
        v_head_dim=128,
        window=(15, -1),
        softcap=1.5,
        bias=(1, 2, 40, 40),
        slopes=(1, 2),
        sinks=True,
        documents=((17, 1, 22),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_extras_match_naive_attention_in_fp32(name: str) -> None:
    check(CASES[name], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["softcap", "bias per key", "everything in a window", "everything in documents"])
def test_extras_match_naive_attention_in_half_precision(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("std", [1e-4, 30.0], ids=["tiny scores", "large scores"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_is_accurate_for_tiny_and_for_large_scores(std: float, dtype: torch.dtype) -> None:
    check(Case(shape=(1, 1, 1, 20, 20, 16), softcap=5.0), dtype, std=std)


def test_tiny_scores_keep_their_relative_accuracy_under_a_softcap() -> None:
    """In the log-sum-exp of a single key, which is its score. One minus a number close to one would lose it."""
    case = Case(shape=(1, 1, 1, 20, 1, 16), causal=False, softcap=50.0)
    q, k, v = (x.float() for x in case.make_inputs(std=1e-4))
    settings: dict[str, Any] = {"causal": False, "scale": case.scale, "tf32": False}
    lse = launch.forward(q, k, v, **settings, extras=Extras(softcap=50.0))[1]
    torch.testing.assert_close(lse.double(), naive(case, q.double(), k.double(), v.double())[1], rtol=1e-5, atol=0)


def test_window_that_hides_nothing_gives_the_bits_of_plain_attention() -> None:
    q, k, v = (x.float() for x in Case().make_inputs())
    settings: dict[str, Any] = {"causal": False, "scale": 0.25, "tf32": False}
    plain = launch.forward(q, k, v, **settings)
    for window in ((49, 49), (1 << 40, 1 << 40), (1 << 40, -1), (-1, -1)):
        windowed = launch.forward(q, k, v, **settings, extras=Extras(left=window[0], right=window[1]))
        assert all(torch.equal(a, b) for a, b in zip(plain, windowed, strict=True))


UNSEEN = {
    "window": Case(shape=(1, 1, 1, 96, 96, 16), window=(20, -1)),
    "window on both sides": Case(shape=(1, 1, 1, 96, 96, 16), causal=False, window=(9, 12)),
    "documents": Case(shape=(1, 1, 1, 96, 96, 16), causal=False, documents=((30, 2, 28, 36),)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_tiles_that_no_query_sees_are_never_read(name: str) -> None:
    """A NaN in a tile that was read would spread, because zero times NaN is NaN."""
    case = UNSEEN[name]
    q, k, v = (x.float() for x in case.make_inputs())
    settings: dict[str, Any] = {"causal": case.causal, "scale": 0.25, "tf32": False}
    settings["extras"] = make_extras(case, None, None)
    o, lse = launch.forward(q, k, v, **settings)
    for stage, tile in SMALL_TILES.items():
        rows, columns = tile.block_m, tile.block_n
        unseen = case.make_hidden().view(96 // rows, rows, 96 // columns, columns).all(3).all(1)
        if stage == "backward_keys":
            unseen, rows, columns = unseen.T, columns, rows
        assert unseen[::2].any()
        for block in range(0, len(unseen), 2):
            poison = torch.zeros_like(o)
            poison[:, :, unseen[block].repeat_interleave(columns)] = math.nan
            results: tuple[Tensor | None, ...]
            if stage == "forward":
                results = launch.forward(q, k, v + poison, **settings)[:1]
            elif stage == "backward_queries":
                results = launch.backward(o, q, k, v + poison, o, lse, **settings)[:1]
            else:
                results = launch.backward(o + poison, q, k, v, o, lse, **settings)[1:3]
            for result in results:
                assert result is not None
                assert result[:, :, block * rows : (block + 1) * rows].isfinite().all()


def test_bias_of_minus_infinity_hides_keys_and_rows() -> None:
    case = Case(causal=False)
    q, k, v = (x.float() for x in case.make_inputs())
    bias = torch.zeros(1, 1, 50, 50).masked_fill_(torch.arange(50) > 30, -math.inf)
    bias[:, :, 7] = -math.inf
    settings: dict[str, Any] = {"causal": False, "scale": 0.25, "tf32": False}
    o, lse = launch.forward(q, k, v, **settings, extras=Extras(bias=bias))
    expected = launch.forward(q, k[:, :, :31], v[:, :, :31], **settings)[0]
    assert not o[:, :, 7].any()
    assert lse[:, :, 7].isposinf().all()
    torch.testing.assert_close(o[:, :, 8:], expected[:, :, 8:])
    gradients = launch.backward(o, q, k, v, o, lse, **settings, extras=Extras(bias=bias), wants_dbias=True)
    assert all(x is not None and x.isfinite().all() for x in gradients)
    assert not gradients[3][..., 31:].any()  # type: ignore[index]


@pytest.mark.parametrize("value", [1000.0, -1000.0])
def test_rows_beyond_the_last_never_spread(value: float) -> None:
    """Rows of a ragged tile have no query: a bias or a slope must not turn them into infinite weights."""
    q, k, v = (x.float() for x in Case().make_inputs())
    settings: dict[str, Any] = {"causal": False, "scale": 0.25, "tf32": False}
    for extras in (Extras(bias=torch.full((1, 1, 1, 50), value)), Extras(slopes=torch.full((1, 2), value))):
        with np.errstate(invalid="ignore"):
            o, lse = launch.forward(q, k, v, **settings, extras=extras)
            gradients = launch.backward(o, q, k, v, o, lse, **settings, extras=extras)[:3]
        assert all(x.isfinite().all() for x in (o, lse, *gradients))


def test_sink_of_minus_infinity_is_none() -> None:
    q, k, v = (x.float() for x in Case(shape=(1, 2, 1, 50, 20, 16)).make_inputs())
    settings: dict[str, Any] = {"causal": True, "scale": 0.25, "tf32": False}
    results = launch.forward(q, k, v, **settings, extras=Extras(sinks=torch.full((2,), -math.inf)))
    assert all(torch.equal(a, b) for a, b in zip(results, launch.forward(q, k, v, **settings), strict=True))


def test_dbias_is_only_computed_if_it_is_wanted() -> None:
    case = CASES["bias"]
    q, k, v, bias = (x.float() for x in case.make_inputs())
    settings: dict[str, Any] = {"causal": True, "scale": 0.25, "tf32": False, "extras": Extras(bias=bias)}
    o, lse = launch.forward(q, k, v, **settings)
    assert launch.backward(o, q, k, v, o, lse, **settings)[3] is None


def test_strided_extras_are_read_by_their_strides() -> None:
    case = Case(shape=(2, 2, 1, 20, 24, 16), bias=(2, 2, 20, 24), slopes=(2, 2))
    q, k, v, bias = (x.float() for x in case.make_inputs())
    extras = make_extras(case, bias, None)
    settings: dict[str, Any] = {"causal": True, "scale": 0.25, "tf32": False}
    assert extras.slopes is not None
    strided = extras._replace(
        bias=bias.transpose(0, 3).contiguous().transpose(0, 3), slopes=extras.slopes.T.contiguous().T
    )
    expected = launch.forward(q, k, v, **settings, extras=extras)
    results = launch.forward(q, k, v, **settings, extras=strided)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0)])
def test_empty_inputs_have_the_sink_as_log_sum_exp_and_no_dbias(num_queries: int, num_keys: int) -> None:
    case = Case(shape=(2, 2, 1, num_queries, num_keys, 16), bias=(1, 2, 1, num_keys), sinks=True)
    q, k, v, bias, sinks = (x.float() for x in case.make_inputs())
    settings: dict[str, Any] = {"causal": True, "scale": 1.0, "tf32": False, "extras": Extras(bias=bias, sinks=sinks)}
    o, lse = launch.forward(q, k, v, **settings)
    assert not o.any()
    assert torch.equal(lse, sinks[:, None].expand(2, 2, num_queries))
    dbias = launch.backward(o, q, k, v, o, lse, **settings, wants_dbias=True)[3]
    assert dbias is not None
    assert dbias.shape == bias.shape
    assert not dbias.any()


def test_plain_calls_pass_no_extras_to_kernels() -> None:
    """A plain call runs the plain kernel."""
    q, k, _ = Case().make_inputs()
    assert all(member is None for member in launch.kernel_extras(NO_EXTRAS, q, k))
    assert all(member is None for member in launch.kernel_extras(Extras(left=49, right=60), q, k))


def test_the_gradient_of_a_bias_has_its_strides() -> None:
    """As PyTorch's compiler is told: a table of T5 is permuted."""
    q, k, v = (normal(2, 3, 20, 16, seed=seed).float() for seed in range(3))
    bias = normal(20, 20, 3, 1).float().permute(3, 2, 0, 1)
    settings: Any = {"causal": True, "scale": 0.25, "tf32": False, "extras": Extras(bias=bias)}
    o, lse = launch.forward(q, k, v, **settings)
    dbias = launch.backward(o, q, k, v, o, lse, **settings, wants_dbias=True)[3]
    assert dbias is not None
    assert (dbias.shape, dbias.stride()) == (bias.shape, bias.stride())
