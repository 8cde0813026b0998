"""Calls of attention that were planned before, under everything that surrounds a call: new addresses, other strides,
CUDA graphs, compilers, and whatever watches operators.
"""

# B batch, H heads, L length, D head dim.

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import chosen_backends, plans
from tests.gpu.test_attention_gpu import CUDA, needs_hopper

pytestmark = needs_hopper
SHAPE = (2, 4, 384, 64)


def make_leaves(*, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return [torch.randn(shape, device=CUDA, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def attend(*tensors: Tensor, **settings: Any) -> Tensor:
    return flash_attention(*tensors, causal=True, **settings)


def gradients(call: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out) * 0.1)]


def through_operators(leaves: list[Tensor]) -> list[Tensor]:
    """The same without plans, because a profiler is active."""
    with torch.autograd.profiler.profile():
        return gradients(attend, leaves)


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """dq is summed in no fixed order."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


def test_a_planned_call_does_what_the_first_did_with_other_tensors() -> None:
    gradients(attend, make_leaves())
    for seed in range(5):
        leaves = make_leaves(seed=seed)
        found, expected = gradients(attend, leaves), through_operators(leaves)
        assert plans.find(leaves[0], leaves[1], leaves[2], causal=True, scale=None, backend="auto") is not None
        assert torch.equal(found[0], expected[0])
        assert_alike(found, expected)


def test_planned_calls_count_as_choices() -> None:
    leaves = make_leaves()
    gradients(attend, leaves)
    before = sum(chosen_backends().values())
    gradients(attend, leaves)
    assert sum(chosen_backends().values()) == before + 2


def test_unaligned_addresses_and_other_strides_are_not_mistaken_for_the_plan() -> None:
    gradients(attend, make_leaves())
    count = torch.Size(SHAPE).numel()
    shifted = [x.detach().flatten() for x in make_leaves(seed=1)]
    unaligned = [torch.cat([x[:1], x])[1 : count + 1].view(SHAPE).requires_grad_() for x in shifted]
    turned = [x.view(SHAPE).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in shifted]
    plain = [x.view(SHAPE).requires_grad_() for x in shifted]
    expected = gradients(attend, plain)
    for leaves in (unaligned, turned, turned):
        assert_alike(gradients(attend, leaves), expected)


def test_gradients_of_every_layout_are_accepted() -> None:
    leaves = make_leaves()
    expected = torch.autograd.grad(attend(*leaves), leaves, torch.ones(SHAPE, device=CUDA, dtype=torch.bfloat16))
    broadcast = torch.autograd.grad(attend(*leaves).sum(), leaves)
    assert_alike(list(broadcast), list(expected))
    turned = torch.ones(2, 384, 4, 64, device=CUDA, dtype=torch.bfloat16).transpose(1, 2)
    assert_alike(list(torch.autograd.grad(attend(*leaves), leaves, turned)), list(expected))


def test_gradients_that_start_at_an_odd_address_are_copied() -> None:
    leaves = make_leaves()
    front = torch.ones(3, device=CUDA, dtype=torch.bfloat16)
    expected = torch.autograd.grad((attend(*leaves).float() ** 2).sum(), leaves)
    for _ in range(2):
        joined = torch.cat([front, attend(*leaves).flatten()])
        assert_alike(list(torch.autograd.grad((joined.float() ** 2).sum(), leaves)), list(expected))


def test_saved_tensors_may_come_back_in_other_memory() -> None:
    fused = torch.randn(2, 384, 3 * 256, device=CUDA).bfloat16().requires_grad_()

    def gradient() -> Tensor:
        q, k, v = (x.view(2, 384, 4, 64).transpose(1, 2) for x in torch.split(fused, 256, dim=2))
        (found,) = torch.autograd.grad(attend(q, k, v).float().square().sum(), fused)
        return found

    expected = [gradient() for _ in range(2)]
    with torch.autograd.graph.save_on_cpu():
        assert_alike([gradient(), gradient()], expected)
    assert_alike([gradient()], expected[:1])


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_watchers_see_the_operators() -> None:
    leaves = make_leaves()
    gradients(attend, leaves)
    with FlopCounterMode(display=False) as counter:
        gradients(attend, leaves)
    forward = 2 * 2 * SHAPE[0] * SHAPE[1] * SHAPE[2] ** 2 * SHAPE[3] // 2
    assert counter.get_total_flops() == pytest.approx(3.5 * forward, rel=0.01)
    with torch.profiler.profile() as profiler:
        gradients(attend, leaves)
    names = {event.name for event in profiler.events()}
    assert {"stepscope::flash_attention_forward", "stepscope::flash_attention_backward"} <= names


def test_autocast_and_double_backward_go_through_the_operators() -> None:
    leaves = make_leaves()
    gradients(attend, leaves)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with torch.autocast("cuda", torch.bfloat16):
        assert attend(*wide).dtype == torch.bfloat16
    (dq,) = torch.autograd.grad(attend(*leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(dq.sum(), leaves)


def test_a_deterministic_backward_pass_repeats_after_a_planned_one() -> None:
    leaves = make_leaves(shape=(1, 2, 1000, 64))
    gradients(attend, leaves)
    found = [gradients(lambda *x: attend(*x, deterministic=True), leaves) for _ in range(3)]
    assert all(torch.equal(one, other) for run in found[1:] for one, other in zip(run, found[0], strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cuda_graph_replays_forward_and_backward_with_new_data(head_dim: int) -> None:
    shape = (*SHAPE[:3], head_dim)
    leaves = make_leaves(shape=shape)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(attend, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(attend, leaves)
    for seed in (3, 4):
        new = make_leaves(seed=seed, shape=shape)
        with torch.no_grad():
            for leaf, value in zip(leaves, new, strict=True):
                leaf.copy_(value)
        graph.replay()
        assert_alike([x.clone() for x in captured], gradients(attend, new))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first of PyTorch's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_function_has_one_graph_and_follows_the_data(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v) * 3, fullgraph=True, mode=mode)
    for seed in range(4):
        leaves = make_leaves(seed=seed)
        expected = gradients(lambda q, k, v: attend(q * 2, k, v) * 3, leaves)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        assert_alike([x.clone() for x in gradients(compiled, leaves)], expected)
