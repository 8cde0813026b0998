"""Flash attention on a GPU: each of our backends against float64, three ways, and bitwise equal a hundred times."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim of q and k, E head dim of v.

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import triton_launch, tune
from stepscope.nn import functional
from tests.cpu.accuracy import Op, assert_three_way, normal

CUDA = torch.device("cuda", 0)
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA)[0] == 9
LOW_DTYPES = (torch.bfloat16, torch.float16)
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")

# B, H, G, L, K, D: full tiles; odd lengths; grouped; more keys than queries; more queries than keys (blind rows).
SHAPES = [
    (1, 2, 2, 512, 512, 128),
    (2, 2, 1, 517, 517, 64),
    (1, 4, 2, 300, 711, 128),
    (1, 4, 1, 711, 300, 64),
    (2, 1, 1, 1, 400, 64),
    (3, 2, 2, 130, 129, 128),
]
# Head sizes without a tile of their own, and the smallest and largest.
OTHER_HEADS = [(1, 2, 1, 333, 400, head_dim) for head_dim in (8, 40, 80, 96, 160, 192, 256)]
# D, E: heads of one tile and of two, whole or padded. The first are DeepSeek's.
HEAD_DIMS = [(192, 128), (40, 24), (64, 128), (80, 160), (256, 128)]


def make_inputs(shape: tuple[int, ...], v_head_dim: int | None = None) -> list[Tensor]:
    batch, num_heads, num_groups, num_queries, num_keys, head_dim = shape
    keys = (batch, num_groups, num_keys)
    k, v = normal(*keys, head_dim, seed=2), normal(*keys, v_head_dim or head_dim, seed=3)
    return [normal(batch, num_heads, num_queries, head_dim), k, v]


def on_gpu(backend: str | None, *, causal: bool, deterministic: bool = False) -> Op:
    """Attention on the GPU for tensors on the CPU; the reference if no backend is named."""

    def run(*inputs: Tensor) -> Tensor:
        q, k, v = (x.to(CUDA) for x in inputs)
        if backend is None:
            return functional.attention(q, k, v, causal=causal).cpu()
        return flash_attention(q, k, v, causal=causal, backend=backend, deterministic=deterministic).cpu()

    return run


def check(backend: str, inputs: list[Tensor], *, dtype: torch.dtype, causal: bool) -> None:
    assert_three_way(on_gpu(backend, causal=causal), on_gpu(None, causal=causal), inputs, dtype=dtype)


@either_mask
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_outputs_and_gradients_match_the_reference(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], causal: bool
) -> None:
    check(backend, make_inputs(shape), dtype=dtype, causal=causal)


@needs_hopper
@either_mask
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_hopper_matches_the_reference(dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> None:
    check("hopper", make_inputs(shape), dtype=dtype, causal=causal)


@pytest.mark.parametrize("shape", OTHER_HEADS, ids=lambda shape: str(shape[-1]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_supports_every_head_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check("triton", make_inputs(shape), dtype=dtype, causal=True)


@either_mask
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_head_dim_of_v_may_differ(backend: str, dtype: torch.dtype, head_dims: tuple[int, int], causal: bool) -> None:
    check(backend, make_inputs((1, 2, 2, 333, 333, head_dims[0]), head_dims[1]), dtype=dtype, causal=causal)


@either_mask
def test_pytorch_supports_the_heads_of_deepseek(causal: bool) -> None:
    check("sdpa", make_inputs((1, 2, 2, 333, 333, 192), 128), dtype=torch.bfloat16, causal=causal)


@either_mask
@pytest.mark.parametrize("head_dims", [(192, 128), (256, 256), (96, 96)], ids=str)
def test_real_shapes_of_wide_heads_match_the_reference(head_dims: tuple[int, int], causal: bool) -> None:
    inputs = make_inputs((1, 4, 2, 2048, 2048, head_dims[0]), head_dims[1])
    check("triton", inputs, dtype=torch.bfloat16, causal=causal)


def test_values_that_are_part_of_a_wider_tensor_give_the_same_bits() -> None:
    """As DeepSeek's, which are projected together with a part of the keys."""
    q, k, v = (x.to(CUDA, torch.bfloat16) for x in make_inputs((1, 4, 4, 300, 300, 192), 128))
    part = torch.cat((k[..., :128], v), dim=-1).transpose(1, 2).contiguous().transpose(1, 2)[..., 128:]
    do = torch.randn_like(v)
    found = []
    for values in (v, part):
        leaves = [x.detach().requires_grad_() for x in (q, k, values)]
        output = flash_attention(*leaves, causal=True)
        found.append((output, *torch.autograd.grad(output, leaves, do)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_hopper
@pytest.mark.parametrize("head_dim", [40, 56, 72, 80, 96, 120])
def test_hopper_pads_other_head_sizes(head_dim: int) -> None:
    check("hopper", make_inputs((1, 4, 2, 333, 400, head_dim)), dtype=torch.bfloat16, causal=True)


@either_mask
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_hopper)])
def test_a_real_shape_matches_the_reference(backend: str, causal: bool) -> None:
    check(backend, make_inputs((1, 4, 2, 4096, 4096, 128)), dtype=torch.bfloat16, causal=causal)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", torch.bfloat16),
        ("triton", torch.float32),
        pytest.param("hopper", torch.bfloat16, marks=needs_hopper),
    ],
    ids=str,
)
def test_strided_inputs_give_the_same_bits_as_dense_ones(backend: str, dtype: torch.dtype) -> None:
    fused = normal(2, 300, 3, 4, 64).to(CUDA, dtype)
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    strided = flash_attention(q, k, v, causal=True, backend=backend)
    dense = flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, backend=backend)
    assert torch.equal(strided, dense)
    assert strided.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_hopper)])
def test_strided_inputs_have_the_gradients_of_dense_ones(backend: str) -> None:
    """As from a model's projections. Hopper sums dq in no fixed order, so it is compared with a tolerance."""
    dense = [x.to(CUDA, torch.bfloat16) for x in make_inputs((2, 4, 4, 300, 300, 64))]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense]
    do = normal(2, 4, 300, 64, seed=4).to(CUDA, torch.bfloat16)
    found = []
    for tensors in (dense, strided):
        leaves = [x.requires_grad_() for x in tensors]
        found.append(torch.autograd.grad(flash_attention(*leaves, causal=True, backend=backend), leaves, do))
    (dq, dk, dv), (dq_strided, dk_strided, dv_strided) = found
    assert torch.equal(dk, dk_strided)
    assert torch.equal(dv, dv_strided)
    assert (dq - dq_strided).norm() <= 1e-2 * dq.norm()
    assert all(x.transpose(1, 2).is_contiguous() for x in (dq_strided, dk_strided, dv_strided))


def test_triton_reads_rows_whose_last_stride_is_not_one() -> None:
    q, k, v = (x.to(CUDA, torch.bfloat16) for x in make_inputs((1, 2, 2, 200, 200, 64)))
    turned = [x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in (q, k, v)]
    assert torch.equal(
        flash_attention(*turned, causal=True, backend="triton"), flash_attention(q, k, v, causal=True, backend="triton")
    )


def test_tf32_is_less_accurate_than_fp32_and_close() -> None:
    q, k, v = (x.float() for x in make_inputs((1, 2, 2, 512, 512, 64)))
    truth = functional.attention(q.double(), k.double(), v.double(), causal=True)
    moved = [x.to(CUDA) for x in (q, k, v)]
    off = {}
    for tf32 in (False, True):
        o, _ = triton_launch.forward(*moved, causal=True, scale=0.125, tf32=tf32)
        off[tf32] = (o.cpu().double() - truth).abs().max().item()
    assert off[False] < 1e-5
    assert 1e-5 < off[True] < 1e-2


@either_mask
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_gives_the_same_bits_a_hundred_times(dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    shape = (2, 4, 2, 1000, 1000, head_dim)
    q, k, v = (x.to(CUDA, dtype) for x in make_inputs(shape))
    do = normal(*q.shape, seed=4).to(CUDA, dtype)
    settings = {"causal": causal, "scale": head_dim**-0.5, "tf32": False}

    def run() -> list[Tensor]:
        o, lse = triton_launch.forward(q, k, v, **settings)
        return [o, lse, *triton_launch.backward(do, q, k, v, o, lse, **settings)[:3]]

    first = run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@needs_hopper
@either_mask
def test_hopper_forward_and_deterministic_gradients_repeat_a_hundred_times(causal: bool) -> None:
    leaves = [x.to(CUDA, torch.bfloat16).requires_grad_() for x in make_inputs((2, 4, 2, 1000, 1000, 128))]
    do = normal(2, 4, 1000, 128, seed=4).to(CUDA, torch.bfloat16)
    expected_o = flash_attention(*leaves, causal=causal, backend="hopper")

    def gradients() -> tuple[Tensor, ...]:
        o = flash_attention(*leaves, causal=causal, deterministic=True)
        return torch.autograd.grad(o, leaves, do)

    expected = gradients()
    for _ in range(100):
        assert torch.equal(flash_attention(*leaves, causal=causal, backend="hopper"), expected_o)
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


@needs_hopper
@either_mask
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_deterministic_hopper_gradients_match_float64(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    ours = on_gpu("hopper", causal=causal, deterministic=True)
    assert_three_way(ours, on_gpu(None, causal=causal), make_inputs(shape), dtype=dtype)


@needs_hopper
@pytest.mark.parametrize(("which", "factor"), [(1, 100.0), (2, 100.0)], ids=["key", "value"])
def test_deterministic_gradients_withstand_an_outlier(which: int, factor: float) -> None:
    inputs = make_inputs((1, 4, 2, 1000, 1000, 64))
    inputs[which][:, :, 17] *= factor
    ours = on_gpu("hopper", causal=True, deterministic=True)
    assert_three_way(ours, on_gpu(None, causal=True), inputs, dtype=torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("value", [1e4, float("nan")], ids=str)
@pytest.mark.parametrize("settings", [{"causal": True}, {"window": (0, 0)}], ids=["causal", "window"])
def test_keys_that_no_row_of_a_tile_sees_do_not_change_deterministic_gradients(
    settings: dict[str, Any], value: float
) -> None:
    clean = [x.to(CUDA, torch.bfloat16) for x in make_inputs((1, 2, 2, 1000, 1000, 64))]
    changed = [clean[0], *(x.clone() for x in clean[1:])]
    for x in changed[1:]:
        x[:, :, -1] = value
    rows = []
    for tensors in (clean, changed):
        leaves = [x.requires_grad_() for x in tensors]
        o = flash_attention(*leaves, **settings, backend="hopper", deterministic=True)
        rows.append(torch.autograd.grad(o[:, :, :128].sum(), leaves)[0][:, :, :128])
    assert torch.equal(*rows)


@needs_hopper
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_deterministic_gradients_do_not_hide_nan(which: int) -> None:
    inputs = [*make_inputs((1, 2, 2, 300, 300, 128)), normal(1, 2, 300, 128, seed=4)]
    inputs[which][0, 0, 200, 5] = float("nan")
    *leaves, do = (x.to(CUDA, torch.bfloat16) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o = flash_attention(*leaves, causal=True, backend="hopper", deterministic=True)
    dq, *_ = torch.autograd.grad(o, leaves, do)
    assert dq[0, 0, 200].isnan().any()
    assert not dq[0, 1].isnan().any()


def test_compiles_without_a_graph_break_under_autocast() -> None:
    torch._dynamo.reset()
    leaves = [x.to(CUDA, torch.float32).requires_grad_() for x in make_inputs((2, 4, 2, 300, 300, 64))]
    compiled = torch.compile(lambda q, k, v: flash_attention(q * 2, k, v, causal=True), fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        ours, plain = compiled(*leaves), flash_attention(leaves[0] * 2, leaves[1], leaves[2], causal=True)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, plain)
    gradients = [torch.autograd.grad(o.float().square().sum(), leaves) for o in (ours, plain)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["by descriptor", "by pointer"])
def test_offsets_beyond_two_billion_elements_work(dtype: torch.dtype) -> None:
    num_heads, length, head_dim = 36, 1 << 20, 64  # 2.4e9 elements: the last head starts beyond 2**31
    q = torch.zeros(1, num_heads, length, head_dim, dtype=dtype, device=CUDA)[:, :, :256]
    k = torch.randn(1, num_heads, 256, head_dim, device=CUDA).to(dtype)
    q[:, -1] = 1.0
    o = flash_attention(q, k, k, backend="triton")
    expected = flash_attention(q[:, -1:].contiguous(), k[:, -1:], k[:, -1:], backend="triton")
    assert torch.equal(o[:, -1:], expected)


def test_tuned_tiles_are_saved_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))
    triton_launch.tuned_tiles.cache_clear()
    problem = tune.TuneProblem(head_dim=64, dtype=torch.bfloat16, causal=True, length=1024)
    trials = tune.tune(problem, device=CUDA)
    assert all(trial.milliseconds is not None for trial in trials), [trial.problem for trial in trials]
    kept = triton_launch.tuned_tiles(torch.cuda.get_device_name(CUDA))
    assert {key.stage for key in kept} == {"forward", "backward_queries", "backward_keys"}
    check("triton", make_inputs((1, 2, 2, 200, 200, 64)), dtype=torch.bfloat16, causal=True)
    triton_launch.tuned_tiles.cache_clear()
    triton_launch.tile_for.cache_clear()
