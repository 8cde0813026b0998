"""Planned calls with a stand-in for the kernels: which calls take the plan, and what surrounds it."""

# All tensors are (B, H, L, D).

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import chosen_backends, plans, tiled
from stepscope.kernels.attention.problem import Problem, UnsupportedError

SHAPE = (2, 3, 32, 16)
SCALE = 0.25  # 1/sqrt(16)
ON_A_CPU = -1  # the number of the device


CHOICES = (("fa4", ""), ("hopper", "sdpa-cudnn: why"))


class Plan(plans.CallPlan):
    """A plan that runs the reference in tiles."""

    def __init__(self, problem: Problem) -> None:
        self.calls: list[str] = []
        super().__init__(problem, SCALE, self.run_forward, self.run_backward, CHOICES)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        return tiled.forward(q, k, v, causal=True, scale=SCALE, tf32=False)

    def run_backward(self, do: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        self.calls.append("backward")
        return tiled.backward(do, *tensors, causal=True, scale=SCALE, tf32=False)


def make_leaves(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(3)]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: ON_A_CPU, raising=False)
    q, k, v = make_leaves()
    made = Plan(Problem(q, k, v, causal=True))
    keys = [plans._key(q, k, v, causal=True, scale=scale, backend="auto") for scale in (None, SCALE)]
    monkeypatch.setattr(plans, "_plans", dict.fromkeys(keys, made))
    return made


def attend(leaves: list[Tensor], **settings: Any) -> Tensor:
    return flash_attention(leaves[0], leaves[1], leaves[2], causal=True, **settings)


def expected(leaves: list[Tensor]) -> Tensor:
    return attend(leaves, backend="naive")


def test_a_known_call_takes_the_plan_both_ways(plan: Plan) -> None:
    leaves = make_leaves(seed=1)
    out = attend(leaves)
    torch.testing.assert_close(out, expected(leaves))
    do = torch.randn(SHAPE)
    found = torch.autograd.grad(out, leaves, do)
    for one, other in zip(found, torch.autograd.grad(expected(leaves), leaves, do), strict=True):
        torch.testing.assert_close(one, other)
    assert plan.calls == ["forward", "backward"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of `_make`, which here finds that no backend with plans runs them."""
    found: list[str] = []
    monkeypatch.setattr(plans, "_make", lambda _problem, _scale, backend: found.append(backend))
    monkeypatch.setattr(plans, "_plans", {})
    return found


def remember(backend: str) -> None:
    on_gpu = SimpleNamespace(
        shape=SHAPE, dtype=torch.bfloat16, is_cuda=True, stride=lambda: (1,), get_device=lambda: 0, data_ptr=lambda: 16
    )
    x = cast(Tensor, on_gpu)
    plans.remember(Problem(x, x, x, causal=True), None, SCALE, backend)


def test_a_call_without_a_plan_is_examined_once(made: list[str]) -> None:
    for backend in ("auto", "auto", "hopper"):
        remember(backend)
    assert made == ["auto", "hopper"]


def test_nothing_is_planned_while_pytorch_is_deterministic(made: list[str]) -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        remember("auto")
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert made == []


def test_no_graph_is_built_without_need(plan: Plan) -> None:
    leaves = make_leaves()
    with torch.no_grad():
        assert attend(leaves).grad_fn is None
    assert attend([x.detach() for x in leaves]).grad_fn is None
    assert plan.calls == ["forward"] * 2


@pytest.mark.usefixtures("plan")
def test_each_pass_counts_as_its_own_choice() -> None:
    def new() -> dict[tuple[str, str], int]:
        return {key: count - before.get(key, 0) for key, count in chosen_backends().items() if before.get(key) != count}

    before = dict(chosen_backends())
    out = attend(make_leaves())
    assert new() == {CHOICES[0]: 1}
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert new() == {CHOICES[0]: 1, CHOICES[1]: 1}


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5},
        {"backend": "sdpa"},
        {"window": 4},
        {"softcap": 2.0},
        {"deterministic": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_call_does_not_take_the_plan(plan: Plan, change: dict[str, Any]) -> None:
    attend(make_leaves(), **change)
    assert plan.calls == []


def test_other_tensors_do_not_take_the_plan(plan: Plan) -> None:
    leaves = make_leaves()
    attend([x.double() for x in leaves])
    attend([x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves])
    attend([x[:1] for x in leaves])
    attend([x[0] for x in leaves])
    memory = torch.randn(torch.Size(SHAPE).numel() + 1)[1:].view(SHAPE)  # 4 bytes after an aligned address
    out = attend([memory, leaves[1], leaves[2]])
    assert plan.calls == []
    torch.testing.assert_close(out, expected([memory, leaves[1], leaves[2]]))


def test_another_current_device_does_not_take_the_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    attend(make_leaves())
    assert plan.calls == []


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_what_watches_operators_sees_them(plan: Plan) -> None:
    leaves = make_leaves()
    with FlopCounterMode(display=False):
        attend(leaves)
    with torch.profiler.profile() as profiler:
        attend(leaves)
    assert plan.calls == []
    assert any("scaled_dot_product" in event.name for event in profiler.events())


@pytest.mark.parametrize(("dtype", "calls"), [(torch.float32, ["forward"]), (torch.bfloat16, [])], ids=str)
def test_autocast_takes_the_plan_if_it_casts_nothing(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, calls: list[str]
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: dtype)
    attend(make_leaves())
    assert plan.calls == calls


def test_functional_transforms_go_through_the_operators(plan: Plan) -> None:
    q, k, v = (x.detach() for x in make_leaves())
    torch.func.grad(lambda x: attend([x, k, v]).sum())(q)
    assert plan.calls == []


def test_a_compiler_does_not_trace_the_plan(plan: Plan) -> None:
    torch._dynamo.reset()
    leaves = make_leaves()
    out = torch.compile(lambda *x: attend(list(x)), fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(out, expected(leaves))
    assert plan.calls == []


@pytest.mark.parametrize("change", [{"causal": [True]}, {"scale": [1.0]}], ids=["causal", "scale"])
def test_arguments_of_a_wrong_type_are_named(plan: Plan, change: dict[str, Any]) -> None:
    q, k, v = make_leaves()
    with pytest.raises(TypeError, match=f"`{next(iter(change))}` must be"):
        flash_attention(q, k, v, **{"causal": True, **change})


@pytest.mark.parametrize("causal", [1, 0])
def test_a_number_is_not_a_mask_even_after_an_equal_call(plan: Plan, causal: int) -> None:
    q, k, v = make_leaves()
    with pytest.raises(TypeError, match="`causal` must be True or False"):
        flash_attention(q, k, v, causal=causal)  # type: ignore[arg-type]


def test_a_negated_view_is_resolved(plan: Plan) -> None:
    q, k, v = (x.detach() for x in make_leaves())
    torch.testing.assert_close(attend([torch._neg_view(q), k, v]), expected([-q, k, v]))
    assert plan.calls == []


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own
def test_forward_mode_is_not_lost(plan: Plan) -> None:
    q, k, v = (x.detach() for x in make_leaves())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        attend([forward_ad.make_dual(q, q), k, v])  # type: ignore[no-untyped-call]
    assert plan.calls == []


def test_saved_tensors_in_other_memory_go_through_the_operators(plan: Plan) -> None:
    leaves = make_leaves()

    def turn(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x

    with torch.autograd.graph.saved_tensors_hooks(turn, lambda x: x):
        out = attend(leaves)
    with pytest.raises(UnsupportedError):  # on a CPU, no kernel of ours takes over
        torch.autograd.grad(out.sum(), leaves)
    assert plan.calls == ["forward"]


def test_a_second_derivative_is_refused(plan: Plan) -> None:
    leaves = make_leaves()
    (dq,) = torch.autograd.grad(attend(leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="does not support double backward"):
        torch.autograd.grad(dq.sum(), leaves)
