"""The kernels of others behind our functions, with stand-ins for them that compute naively: layouts, the log-sum-exp,
grouped heads and gradients; and plans that combine two backends.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import backends, chosen_backends, plain, plans
from stepscope.kernels.attention.extras import hidden_keys
from stepscope.kernels.attention.peers import cudnn, fa4
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras, Problem, empty_output

SCALE = 0.3


def attend_naively(problem: Problem, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, in float64."""
    q, k, v = (x.detach().double() for x in problem[:3])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    hidden = hidden_keys(torch.arange(problem.num_queries), torch.arange(problem.num_keys), problem)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def differentiate_naively(
    do: Tensor, problem: Problem, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from the saved output and log-sum-exp, as kernels compute them."""
    q, k, v = (x.detach().double() for x in problem[:3])
    batch, groups, num_keys, _ = k.shape
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    weights = (q @ wide_k.mT * scale - lse.double()[..., None]).exp()
    hidden = hidden_keys(torch.arange(problem.num_queries), torch.arange(problem.num_keys), problem)
    if hidden is not None:
        weights = weights.masked_fill(hidden[:, None], 0)
    do, delta = do.double(), (do.double() * o.double()).sum(-1, keepdim=True)
    d_scores = weights * (do @ wide_v.mT - delta) * scale
    dk, dv = (x.view(batch, groups, -1, num_keys, x.shape[-1]).sum(2) for x in (d_scores.mT @ q, weights.mT @ do))
    return d_scores @ wide_k, dk, dv


# --- FlashAttention-4 ---


def is_readable(x_BLHD: Tensor) -> bool:
    return x_BLHD.stride(-1) == 1 and all(stride > 0 and stride % 4 == 0 for stride in x_BLHD.stride()[:-1])


class Interface(ModuleType):
    """`flash_attn.cute.interface`, as far as we call it."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[str] = []

    @staticmethod
    def problem_of(tensors: tuple[Tensor, ...], causal: bool, left: int | None, right: int | None) -> Problem:
        assert all(is_readable(x) for x in tensors)
        assert all(limit is None or limit >= 0 for limit in (left, right))
        q, k, v = (x.transpose(1, 2) for x in tensors)
        left, right = (-1 if limit is None else limit for limit in (left, right))
        return Problem(q, k, v, causal, Extras(left, right))

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None,
        window_size_right: int | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        self.calls.append("forward")
        assert softmax_scale > 0  # it multiplies masked scores
        assert is_readable(out)
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        problem = self.problem_of((q, k, v), causal, window_size_left, window_size_right)
        o, exact_lse = attend_naively(problem, softmax_scale)
        out.copy_(o.transpose(1, 2))
        lse.copy_(exact_lse)

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None,
        window_size_right: int | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        self.calls.append("backward")
        assert all(is_readable(x) for x in (out, dout, dq, dk, dv))
        problem = self.problem_of((q, k, v), causal, window_size_left, window_size_right)
        found = differentiate_naively(dout.transpose(1, 2), problem, out.transpose(1, 2), lse, softmax_scale)
        for gradient, exact in zip((dq, dk, dv), found, strict=True):
            gradient.copy_(exact.transpose(1, 2))


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interface]:
    made = Interface()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(backends.FUNCTIONS, "fa4", backends.FUNCTIONS["fa4"]._replace(refuse=lambda _: None))
    fa4._interface.cache_clear()
    yield made
    fa4._interface.cache_clear()


def make_inputs(shape: tuple[int, ...], *, value_dim: int | None = None, transposed: bool = False) -> list[Tensor]:
    batch, heads, groups, num_queries, num_keys, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, head_dim: int) -> Tensor:
        sizes = (batch, length, heads, head_dim) if transposed else (batch, heads, length, head_dim)
        x = torch.randn(sizes, generator=generator)
        return x.transpose(1, 2) if transposed else x

    return [
        draw(heads, num_queries, head_dim),
        draw(groups, num_keys, head_dim),
        draw(groups, num_keys, value_dim or head_dim),
        draw(heads, num_queries, value_dim or head_dim),
    ]


PROBLEMS = {
    "plain": ((2, 3, 3, 5, 5, 8), False, NO_EXTRAS),
    "causal": ((2, 3, 3, 5, 5, 8), True, NO_EXTRAS),
    "grouped": ((2, 6, 2, 5, 7, 8), True, NO_EXTRAS),
    "window": ((1, 2, 2, 6, 9, 8), True, Extras(left=2)),
    "both sides": ((1, 2, 1, 6, 6, 8), False, Extras(left=2, right=1)),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["BHLD", "BLHD"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_fa4_is_called_in_its_layout(interface: Interface, name: str, transposed: bool) -> None:
    shape, causal, extras = PROBLEMS[name]
    q, k, v, do = make_inputs(shape, transposed=transposed)
    problem = Problem(q, k, v, causal, extras)
    o, lse = fa4.forward(q, k, v, causal=causal, scale=SCALE, tf32=False, extras=extras)
    exact_o, exact_lse = attend_naively(problem, SCALE)
    torch.testing.assert_close(o, exact_o.float())
    torch.testing.assert_close(lse, exact_lse.float())
    assert o.stride() == q.stride()
    found = fa4.backward(do, q, k, v, o, lse, causal=causal, scale=SCALE, tf32=False, extras=extras)
    leaves = q, k, v = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(plain._naive(Problem(q, k, v, causal, extras), SCALE), leaves, do.double())
    for gradient, exact, x in zip(found[:3], expected, (q, k, v), strict=True):
        torch.testing.assert_close(gradient, exact.float(), rtol=1e-4, atol=1e-5)
        assert gradient.stride() == x.stride()
    assert interface.calls == ["forward", "backward"]


@pytest.mark.usefixtures("interface")
def test_fa4_returns_an_output_with_the_head_dim_of_values() -> None:
    q, k, v, do = make_inputs((2, 3, 3, 5, 5, 12), value_dim=8, transposed=True)
    o, lse = fa4.forward(q, k, v, causal=True, scale=SCALE, tf32=False)
    torch.testing.assert_close(o, attend_naively(Problem(q, k, v, causal=True), SCALE)[0].float())
    assert o.transpose(1, 2).is_contiguous()
    dq, dk, dv, _ = fa4.backward(do, q, k, v, o, lse, causal=True, scale=SCALE, tf32=False)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.usefixtures("interface", "naive_cudnn")
@pytest.mark.parametrize("peer", [fa4, cudnn])
def test_a_scale_of_zero_gives_equal_weights(peer: ModuleType) -> None:
    q, k, v, _ = make_inputs((1, 1, 1, 4, 4, 8))
    o, _ = peer.forward(q, k, v, causal=True, scale=0.0, tf32=False)
    torch.testing.assert_close(o[:, :, -1], v.mean(2))


def test_fa4_runs_by_name_with_gradients(interface: Interface) -> None:
    """The gradient of a sum is one number broadcast, which has to be copied."""
    leaves = [x.requires_grad_() for x in make_inputs((2, 4, 2, 5, 5, 8))[:3]]
    found = torch.autograd.grad(flash_attention(*leaves, causal=True, backend="fa4").sum(), leaves)
    expected = torch.autograd.grad(flash_attention(*leaves, causal=True, backend="naive").sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert interface.calls == ["forward", "backward"]


# --- cuDNN ---

cudnn_forward, cudnn_backward = cudnn._forward, cudnn._backward


@pytest.fixture
def naive_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's two operators. Its own versions for tensors without data check the arguments."""

    def on_meta(arguments: Any) -> Any:
        return [x.to("meta") if isinstance(x, Tensor) else x for x in arguments]

    def forward(*arguments: Any, is_causal: bool, scale: float, **other: Any) -> tuple[Any, ...]:
        o_meta, lse_meta, *rest = cudnn_forward(*on_meta(arguments), is_causal=is_causal, scale=scale, **other)
        q, k, v = arguments
        assert scale > 0  # it multiplies masked scores
        assert not is_causal or q.shape[2] == k.shape[2]  # it aligns the mask at the start
        o, lse = attend_naively(Problem(q, k, v, is_causal), scale)
        out = torch.empty_strided(o_meta.shape, o_meta.stride()).copy_(o)
        return out, lse.float().view(lse_meta.shape), *rest

    def backward(*arguments: Any, scale: float) -> tuple[Tensor, ...]:
        like = cudnn_backward(*on_meta(arguments), scale=scale)
        do, q, k, v, o, lse, *_, is_causal = arguments
        assert do.stride() == o.stride() == empty_output(q, v).stride()
        assert lse.shape == (*q.shape[:3], 1)
        assert lse.is_contiguous()
        found = differentiate_naively(do, Problem(q, k, v, is_causal), o, lse[..., 0], scale)
        return tuple(torch.empty_strided(x.shape, x.stride()).copy_(y) for x, y in zip(like, found, strict=True))

    monkeypatch.setattr(cudnn, "_forward", forward)
    monkeypatch.setattr(cudnn, "_backward", backward)


@pytest.mark.usefixtures("naive_cudnn")
@pytest.mark.parametrize("transposed", [False, True], ids=["BHLD", "BLHD"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("shape", "value_dim"), [((2, 3, 3, 5, 5, 8), 8), ((2, 6, 2, 5, 5, 8), 8), ((2, 3, 3, 5, 5, 12), 8)], ids=str
)
def test_cudnn_has_a_pass_each_way(shape: tuple[int, ...], value_dim: int, causal: bool, transposed: bool) -> None:
    q, k, v, do = make_inputs(shape, value_dim=value_dim, transposed=transposed)
    o, lse = cudnn.forward(q, k, v, causal=causal, scale=SCALE, tf32=False)
    exact_o, exact_lse = attend_naively(Problem(q, k, v, causal), SCALE)
    torch.testing.assert_close(o, exact_o.float())
    torch.testing.assert_close(lse, exact_lse.float())
    assert o.stride() == empty_output(q, v).stride()
    expected = differentiate_naively(do, Problem(q, k, v, causal), o, lse, SCALE)
    for given in (do, do.transpose(1, 2).contiguous().transpose(1, 2), do.contiguous()):
        found = cudnn.backward(given, q, k, v, o, lse, causal=causal, scale=SCALE, tf32=False)
        for one, other in zip(found[:3], expected, strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("naive_cudnn")
def test_a_single_query_has_no_mask_in_cudnn() -> None:
    q, k, v, _ = make_inputs((1, 2, 2, 1, 5, 8))
    o, _ = cudnn.forward(q, k, v, causal=True, scale=SCALE, tf32=False)
    torch.testing.assert_close(o, attend_naively(Problem(q, k, v, causal=False), SCALE)[0].float())


# --- Plans of two backends ---


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """What `auto` chooses for each pass."""
    made = {"forward": ("fa4", ""), "backward": ("sdpa-cudnn", "hopper: why")}
    monkeypatch.setattr(backends, "decide", lambda _, direction, **__: made[direction])
    return made


@pytest.mark.usefixtures("interface", "naive_cudnn")
def test_a_plan_runs_each_pass_on_its_backend(choices: dict[str, tuple[str, str]], interface: Interface) -> None:
    q, k, v, do = make_inputs((2, 4, 2, 5, 5, 8))
    problem = Problem(q, k, v, causal=True)
    plan = plans._make(problem, SCALE, "auto")
    assert plan is not None
    before = dict(chosen_backends())
    o, lse = plan(q, k, v)
    found = plan.backward(do, q, k, v, o, lse)
    for one, other in zip(found, differentiate_naively(do, problem, o, lse, SCALE), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
    assert interface.calls == ["forward"]
    new = {key: count - before.get(key, 0) for key, count in chosen_backends().items() if before.get(key) != count}
    assert new == dict.fromkeys(choices.values(), 1)


def test_a_plan_by_name_is_not_a_choice(interface: Interface) -> None:
    q, k, v, do = make_inputs((2, 4, 2, 5, 5, 8))
    plan = plans._make(Problem(q, k, v, causal=True), SCALE, "fa4")
    assert plan is not None
    before = dict(chosen_backends())
    plan.backward(do, q, k, v, *plan(q, k, v))
    assert interface.calls == ["forward", "backward"]
    assert dict(chosen_backends()) == before


def test_what_triton_runs_has_no_plan(choices: dict[str, tuple[str, str]]) -> None:
    q, k, v, _ = make_inputs((1, 1, 1, 4, 4, 8))
    choices["backward"] = ("triton", "")
    assert plans._make(Problem(q, k, v, causal=True), SCALE, "auto") is None


def test_what_a_backend_refuses_has_no_plan() -> None:
    q, k, v, _ = make_inputs((1, 1, 1, 4, 4, 8))
    assert plans._make(Problem(q, k, v, causal=True), SCALE, "sdpa-cudnn") is None


@pytest.mark.usefixtures("choices")
def test_a_plan_is_made_once_for_aligned_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    aligned = SimpleNamespace(value=False)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_is_aligned", lambda *_: aligned.value)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    with FakeTensorMode():
        q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda:0")
        problem = Problem(q, q, q, causal=True)
        settings: dict[str, Any] = {"causal": True, "scale": None, "backend": "auto"}
        plans.remember(problem, None, SCALE, "auto")
        assert plans._plans == {}  # its choice may be another with aligned tensors
        aligned.value = True
        plans.remember(problem, None, SCALE, "auto")
        first = plans.find(q, q, q, **settings)
        plans.remember(problem, None, SCALE, "auto")
        assert first is not None
        assert plans.find(q, q, q, **settings) is first
        assert first.fits(q, q, q)
        turned = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="cuda:0").transpose(1, 2)
        assert not first.fits(q, turned, q)
        assert plans.find(q, q, q, **settings | {"backend": "fa4"}) is None
        aligned.value = False
        assert plans.find(q, q, q, **settings) is None
