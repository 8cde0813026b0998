"""cuDNN and FlashAttention-4 behind our functions on a GPU: against float64, each pass with the other pass of another
backend, and what `auto` does with the measured table.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import backends, chosen_backends, plans, rankings
from tests.cpu.accuracy import normal
from tests.gpu.test_attention_calls_gpu import assert_alike, gradients, make_leaves
from tests.gpu.test_attention_gpu import CUDA, LOW_DTYPES, check, either_mask, make_inputs, needs_hopper

# The compiler of FlashAttention-4 warns about itself, which is not an error of ours.
pytestmark = [needs_hopper, pytest.mark.filterwarnings("default")]


def has_fa4() -> bool:
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    return True


needs_fa4 = pytest.mark.skipif(not has_fa4(), reason="needs FlashAttention-4: `pip install flash-attn-4`")
either_peer = pytest.mark.parametrize("backend", ["sdpa-cudnn", pytest.param("fa4", marks=needs_fa4)])
# FlashAttention-4 compiles for seconds per head dim and mask, so there are few.
SHAPES = [(2, 2, 2, 512, 512, 128), (2, 2, 2, 517, 517, 64), (1, 8, 2, 384, 384, 128)]


@either_peer
@either_mask
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_peers_match_the_reference(backend: str, dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> None:
    check(backend, make_inputs(shape), dtype=dtype, causal=causal)


@either_peer
@pytest.mark.parametrize("head_dim", [96, 256])
def test_peers_support_other_head_sizes(backend: str, head_dim: int) -> None:
    check(backend, make_inputs((1, 4, 4, 384, 384, head_dim)), dtype=torch.bfloat16, causal=True)


@needs_fa4
def test_fa4_aligns_masks_and_windows_at_the_end() -> None:
    check("fa4", make_inputs((1, 4, 2, 300, 711, 128)), dtype=torch.bfloat16, causal=True)
    q, k, v = (x.to(CUDA, torch.bfloat16) for x in make_inputs((1, 4, 2, 300, 711, 128)))
    found, expected = (
        flash_attention(q, k, v, causal=True, window=100, backend=name).float() for name in ("fa4", "hopper")
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@either_peer
@pytest.mark.parametrize("fused", [False, True], ids=["BLHD", "fused"])
def test_peers_keep_the_memory_layout(backend: str, fused: bool) -> None:
    """As from a model's projections: each result has the layout that a compiler is told."""
    x = normal(2, 384, 3, 4, 64).to(CUDA, torch.bfloat16)
    q, k, v = (one.transpose(1, 2) if fused else one.contiguous().transpose(1, 2) for one in x.unbind(2))
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]
    dense = [one.detach().contiguous().requires_grad_() for one in leaves]
    found = gradients(lambda *y: flash_attention(*y, causal=True, backend=backend), leaves)
    expected = gradients(lambda *y: flash_attention(*y, causal=True, backend="hopper"), dense)
    assert_alike(found, expected)
    assert all(one.stride() == torch.empty_like(leaf).stride() for one, leaf in zip(found, [q, *leaves], strict=True))


PAIRS = [pair for pair in permutations(("hopper", "triton", "sdpa-cudnn", "fa4"), 2) if "fa4" not in pair or has_fa4()]


@either_mask
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
@pytest.mark.parametrize("groups", [4, 2])
def test_passes_of_different_backends_fit_together(first: str, second: str, groups: int, causal: bool) -> None:
    """They save the same: above all, the log-sum-exp is the same natural logarithm."""
    q, k, v = (x.to(CUDA, torch.bfloat16) for x in make_inputs((2, 4, groups, 384, 384, 64)))
    do = normal(2, 4, 384, 64, seed=4).to(CUDA, torch.bfloat16)
    settings: dict[str, Any] = {"causal": causal, "scale": 0.125, "tf32": False}
    outputs = [backends.load(name).forward(q, k, v, **settings) for name in (first, second)]
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-3, atol=1e-3)
    found, expected = (list(backends.load(second).backward(do, q, k, v, *output, **settings)[:3]) for output in outputs)
    assert_alike(found, expected)


@either_peer
def test_a_gradient_of_any_layout_gives_the_same(backend: str) -> None:
    """cuDNN's plans are found by the layout of q, k and v only, and must not be used for another layout of this one."""
    leaves = make_leaves()

    def attend(*x: Tensor) -> Tensor:
        return flash_attention(*x, causal=True, backend=backend)

    do = torch.randn(leaves[0].shape, device=CUDA).bfloat16()
    turned = do.transpose(1, 2).contiguous().transpose(1, 2)
    expected = list(torch.autograd.grad(attend(*leaves), leaves, do))
    for given in (turned, do, turned):
        assert_alike(list(torch.autograd.grad(attend(*leaves), leaves, given)), expected)
    ones = list(torch.autograd.grad(attend(*leaves), leaves, torch.ones_like(do)))
    assert_alike(list(torch.autograd.grad(attend(*leaves).sum(), leaves)), ones)


@either_peer
def test_a_deterministic_backward_pass_of_a_peer_repeats(backend: str) -> None:
    leaves = make_leaves(shape=(2, 4, 1024, 64))

    def attend(*x: Tensor) -> Tensor:
        return flash_attention(*x, causal=True, backend=backend, deterministic=True)

    first = gradients(attend, leaves)
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(gradients(attend, leaves), first, strict=True))


# --- What `auto` does ---


def new_choices(call: Callable[[], object]) -> dict[str, int]:
    before = dict(chosen_backends())
    call()
    found: dict[str, int] = {}
    for (backend, reasons), count in chosen_backends().items():
        if count != before.get((backend, reasons), 0):
            found[backend] = found.get(backend, 0) + count - before.get((backend, reasons), 0)
    return found


MIXED = [pair for pair in permutations(("hopper", "sdpa-cudnn", "fa4"), 2) if "fa4" not in pair or has_fa4()]


@pytest.fixture(params=MIXED, ids=str)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What `auto` prefers forward and backward, whatever was measured."""
    forward, backward = request.param
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(rankings, "rank", lambda _, shape: (forward if shape.direction == "forward" else backward,))
    return forward, backward


def test_auto_mixes_backends_with_and_without_plans(order: tuple[str, str]) -> None:
    torch._dynamo.reset()
    leaves = make_leaves()

    def attend(*x: Tensor) -> Tensor:
        return flash_attention(*x, causal=True)

    expected = gradients(lambda *x: flash_attention(*x, causal=True, backend="triton"), leaves)
    for _ in range(3):  # the first call makes the plan
        assert new_choices(lambda: assert_alike(gradients(attend, leaves), expected)) == dict.fromkeys(order, 1)
    assert plans.find(leaves[0], leaves[1], leaves[2], causal=True, scale=None, backend="auto") is not None
    compiled = torch.compile(attend, fullgraph=True)
    assert new_choices(lambda: assert_alike(gradients(compiled, leaves), expected)) == dict.fromkeys(order, 1)


@pytest.mark.usefixtures("order")
def test_a_cuda_graph_of_auto_follows_the_data() -> None:
    leaves = make_leaves()

    def attend(*x: Tensor) -> Tensor:
        return flash_attention(*x, causal=True)

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
        new = make_leaves(seed=seed)
        with torch.no_grad():
            for leaf, value in zip(leaves, new, strict=True):
                leaf.copy_(value)
        graph.replay()
        expected = gradients(lambda *x: flash_attention(*x, causal=True, backend="triton"), new)
        assert_alike([x.clone() for x in captured], expected)


def test_auto_follows_the_measured_table() -> None:
    """For one call whose best backend forward, of those that are installed, is not `hopper`."""
    for ranking in rankings.read()["sm_90"]:
        shape = ranking.shape
        best = next(name for name in ranking.backends if name != "fa4" or has_fa4())
        if shape.direction == "forward" and best != "hopper" and shape.group == 1 and shape.head_dim == shape.value_dim:
            break
    else:
        pytest.skip("`hopper` is the fastest everywhere")
    q = torch.randn(1, shape.programs, shape.length, shape.head_dim, device=CUDA).bfloat16()
    assert new_choices(lambda: flash_attention(q, q, q, causal=shape.causal)) == {best: 1}
