"""Each reference operation against PyTorch's own, outputs and gradients, in every dtype that trains."""

# B batch, H query heads, G key/value heads, L length, D head dim.

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepscope.nn import functional
from tests.cpu.accuracy import assert_three_way, error, normal, run_with_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW_DTYPES = (torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_low_dtype = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
# Deterministic, so that a CI failure can be reproduced locally.
properties = settings(deadline=None, derandomize=True, max_examples=40)


@every_dtype
@pytest.mark.parametrize("leading", [(7,), (2, 5), (1, 3, 2)], ids=str)
def test_linear_matches_torch(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    inputs = [normal(*leading, 33), normal(17, 33, seed=2)]
    assert_three_way(functional.linear, F.linear, inputs, dtype=dtype)


@every_dtype
def test_embedding_matches_torch_with_repeated_ids(dtype: torch.dtype) -> None:
    ids = torch.tensor([[3, 0, 3], [10, 3, 1]])
    assert_three_way(functional.embedding, F.embedding, [ids, normal(11, 5)], dtype=dtype)


@pytest.mark.parametrize("bad_id", [-1, 11])
def test_embedding_rejects_an_id_outside_the_vocabulary(bad_id: int) -> None:
    with pytest.raises(IndexError):
        functional.embedding(torch.tensor([[0, bad_id]]), normal(11, 5))


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight, 1e-5)


@every_dtype
@pytest.mark.parametrize("shape", [(3, 5, 33), (1, 768), (4, 1)], ids=str)
@pytest.mark.parametrize("std", [1.0, 1e-3], ids=["unit", "eps-matters"])
def test_rms_norm_matches_torch(dtype: torch.dtype, shape: tuple[int, ...], std: float) -> None:
    inputs = [normal(*shape, std=std), normal(shape[-1], seed=2)]
    assert_three_way(_rms_norm, _torch_rms_norm, inputs, dtype=dtype)


def test_rms_norm_squares_in_fp32_where_fp16_would_overflow() -> None:
    x = torch.full((2, 8), 1000.0, dtype=torch.float16)
    out = functional.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5)
    assert out.dtype == torch.float16
    assert error(out, torch.ones(2, 8, dtype=torch.float64)) < 1e-3


def _rotate_as_complex(x: Tensor, context: int = 9, theta: float = 100.0) -> Tensor:
    """RoPE computed differently: each pair is a complex number, multiplied by exp(i * angle)."""
    head_dim = x.shape[-1]
    frequency = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:-1], -1, 2)
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.view_as_complex(wide) * turn.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _rope(x: Tensor) -> Tensor:
    return functional.rope(x, *functional.rope_tables(x.shape[-1], 9, 100.0))


@every_dtype
@pytest.mark.parametrize("shape", [(3, 5, 33), (1, 768)], ids=str)
@pytest.mark.parametrize("std", [1.0, 1e-3], ids=["unit", "eps-matters"])
def test_layer_norm_matches_torch(dtype: torch.dtype, shape: tuple[int, ...], std: float) -> None:
    inputs = [normal(*shape, std=std), normal(shape[-1], seed=2), normal(shape[-1], seed=3)]
    assert_three_way(
        lambda x, weight, bias: functional.layer_norm(x, weight, bias, 1e-5),
        lambda x, weight, bias: F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5),
        inputs,
        dtype=dtype,
    )
    assert_three_way(
        lambda x, weight: functional.layer_norm(x, weight, None, 1e-5),
        lambda x, weight: F.layer_norm(x, (x.shape[-1],), weight, None, 1e-5),
        inputs[:2],
        dtype=dtype,
    )


@every_dtype
@pytest.mark.parametrize("head_dim", [2, 6, 80])
def test_rope_rotates_interleaved_pairs(dtype: torch.dtype, head_dim: int) -> None:
    assert_three_way(_rope, _rotate_as_complex, [normal(2, 3, 9, head_dim)], dtype=dtype)


@every_dtype
def test_rope_half_rotates_pairs_half_a_head_apart(dtype: torch.dtype) -> None:
    cos, sin = functional.rope_tables(6, 9, 10000.0)

    def reorder(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 3)).transpose(-2, -1).flatten(-2)  # type: ignore[no-untyped-call, no-any-return]

    def half(x: Tensor) -> Tensor:
        return reorder(functional.rope_half(x, cos, sin))

    assert_three_way(half, lambda x: functional.rope(reorder(x), cos, sin), [normal(2, 9, 6)], dtype=dtype)


def test_rope_scores_depend_only_on_distance() -> None:
    cos, sin = functional.rope_tables(8, 64, 10000.0, dtype=torch.float64)
    q, k = normal(1, 8), normal(1, 8, seed=2)
    near = functional.rope(q, cos[5:6], sin[5:6]) @ functional.rope(k, cos[2:3], sin[2:3]).T
    far = functional.rope(q, cos[60:61], sin[60:61]) @ functional.rope(k, cos[57:58], sin[57:58]).T
    elsewhere = functional.rope(q, cos[60:61], sin[60:61]) @ functional.rope(k, cos[50:51], sin[50:51]).T
    assert error(near, far) < 1e-12 < error(near, elsewhere)


def test_rope_tables_are_exact_to_the_last_fp32_digit_at_long_contexts() -> None:
    cos, sin = functional.rope_tables(4, 100_001, 10000.0)
    angle = 100_000 * 10000.0**-0.5
    assert cos.dtype == torch.float32
    assert cos[-1, 1].item() == pytest.approx(math.cos(angle), rel=1e-6)
    assert sin[-1, 1].item() == pytest.approx(math.sin(angle), rel=1e-6)
    assert sin[-1, 0].item() == pytest.approx(math.sin(100_000), rel=1e-6)


def test_rope_tables_reject_an_odd_head_dim() -> None:
    with pytest.raises(ValueError, match=r"even .*but got 7"):
        functional.rope_tables(7, 4, 10000.0)


@every_dtype
def test_silu_matches_torch(dtype: torch.dtype) -> None:
    assert_three_way(functional.silu, F.silu, [normal(5, 33, std=3.0)], dtype=dtype)


@every_dtype
def test_swiglu_gates_with_its_first_argument(dtype: torch.dtype) -> None:
    inputs = [normal(3, 5, 33, std=2.0), normal(3, 5, 33, seed=2)]
    assert_three_way(functional.swiglu, lambda gate, up: F.silu(gate) * up, inputs, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_geglu_matches_torch(dtype: torch.dtype, approximate: str) -> None:
    inputs = [normal(3, 5, 33, std=2.0), normal(3, 5, 33, seed=2)]
    assert_three_way(
        lambda gate, up: functional.geglu(gate, up, approximate),
        lambda gate, up: F.gelu(gate, approximate=approximate) * up,
        inputs,
        dtype=dtype,
    )


@every_dtype
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_matches_torch_along_any_dimension(dtype: torch.dtype, dim: int) -> None:
    inputs = [normal(7, 3, 33, std=3.0)]
    assert_three_way(lambda x: functional.softmax(x, dim), lambda x: torch.softmax(x, dim), inputs, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("offset", [-1e3, 1e3])
def test_softmax_survives_scores_whose_exponential_overflows(dtype: torch.dtype, offset: float) -> None:
    inputs = [offset + normal(5, 33, std=3.0)]
    assert_three_way(lambda x: functional.softmax(x, -1), lambda x: torch.softmax(x, -1), inputs, dtype=dtype)


def test_softmax_gives_masked_scores_no_weight_and_a_finite_gradient() -> None:
    x = torch.tensor([[0.0, -math.inf, 0.0]])
    out, gradient = run_with_gradients(lambda x: functional.softmax(x, -1), [x], torch.tensor([1.0, 2.0, 3.0]))
    assert out.tolist() == [[0.5, 0.0, 0.5]]
    assert gradient.tolist() == [[-0.5, 0.0, 0.5]]


@every_dtype
def test_softmax_saves_one_tensor_of_the_scores_size_for_backward(dtype: torch.dtype) -> None:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    x = normal(4, 33).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.softmax(x, -1)
    assert sorted(kept.values()) == [4, 4 * 33]  # the sums and the exponentials


@properties
@given(
    rows=st.lists(st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3), min_size=1, max_size=4),
    shift=st.floats(-1e4, 1e4),
)
def test_softmax_is_a_distribution_that_a_shift_does_not_change(rows: list[list[float]], shift: float) -> None:
    x = torch.tensor(rows, dtype=torch.float64)
    out = functional.softmax(x, -1)
    assert bool((out >= 0).all())
    assert error(out.sum(-1), torch.ones(len(rows), dtype=torch.float64)) < 1e-12
    assert error(functional.softmax(x + shift, -1), out) < 1e-10


def _bottom_right(num_queries: int, num_keys: int) -> Tensor:
    """True if query i may see key j, one pair at a time."""
    rows = [[j <= i + num_keys - num_queries for j in range(num_keys)] for i in range(num_queries)]
    return torch.tensor(rows)


def _sdpa(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    mask = _bottom_right(q_BHLD.shape[2], k_BGLD.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, mask, scale=scale, enable_gqa=True)


def _plain_attention(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, causal: bool, scale: float) -> Tensor:
    """PyTorch's own matmul and softmax, composed. SDPA keeps its scores in fp32, which is a different operation."""
    repeats = q_BHLD.shape[1] // k_BGLD.shape[1]
    k_BHLD, v_BHLD = k_BGLD.repeat_interleave(repeats, 1), v_BGLD.repeat_interleave(repeats, 1)
    scores = (q_BHLD @ k_BHLD.mT) * scale
    if causal:
        scores = scores.masked_fill(~_bottom_right(q_BHLD.shape[2], k_BGLD.shape[2]), -math.inf)
    return torch.softmax(scores, -1) @ v_BHLD


@every_dtype
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("num_heads", "num_groups"), [(3, 3), (4, 2), (6, 1)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(7, 7), (3, 11), (1, 5), (33, 33)])
def test_attention_matches_torch(
    dtype: torch.dtype, causal: bool, num_heads: int, num_groups: int, num_queries: int, num_keys: int
) -> None:
    inputs = [
        normal(2, num_heads, num_queries, 10),
        normal(2, num_groups, num_keys, 10, seed=2),
        normal(2, num_groups, num_keys, 10, seed=3),
    ]
    assert_three_way(
        lambda q, k, v: functional.attention(q, k, v, causal=causal),
        lambda q, k, v: _plain_attention(q, k, v, causal=causal, scale=10**-0.5),
        inputs,
        dtype=dtype,
        truth=lambda q, k, v: _sdpa(q, k, v, causal=causal),
    )


@every_dtype
def test_attention_takes_a_scale_and_values_of_another_width(dtype: torch.dtype) -> None:
    inputs = [normal(1, 2, 5, 6), normal(1, 1, 5, 6, seed=2), normal(1, 1, 5, 3, seed=3)]
    assert_three_way(
        lambda q, k, v: functional.attention(q, k, v, causal=True, scale=0.3),
        lambda q, k, v: _plain_attention(q, k, v, causal=True, scale=0.3),
        inputs,
        dtype=dtype,
        truth=lambda q, k, v: _sdpa(q, k, v, causal=True, scale=0.3),
    )


def test_queries_that_see_no_key_return_zero() -> None:
    inputs = [normal(1, 2, 5, 4), normal(1, 1, 3, 4, seed=2), normal(1, 1, 3, 4, seed=3)]
    upstream = normal(1, 2, 5, 4, seed=4)
    ours = run_with_gradients(lambda q, k, v: functional.attention(q, k, v, causal=True), inputs, upstream)
    late = [inputs[0][:, :, 2:], *inputs[1:]]
    truth = run_with_gradients(lambda q, k, v: _sdpa(q, k, v, causal=True), late, upstream[:, :, 2:])
    assert not ours[0][:, :, :2].any()
    assert not ours[1][:, :, :2].any()
    for mine, exact in zip((ours[0][:, :, 2:], ours[1][:, :, 2:], *ours[2:]), truth, strict=True):
        assert error(mine, exact) < 1e-12


@properties
@given(
    num_queries=st.integers(1, 9),
    num_keys=st.integers(1, 9),
    num_groups=st.integers(1, 3),
    ratio=st.integers(1, 3),
)
def test_attention_handles_any_lengths_and_groups(num_queries: int, num_keys: int, num_groups: int, ratio: int) -> None:
    q = normal(2, num_groups * ratio, num_queries, 4)
    k, v = normal(2, num_groups, num_keys, 4, seed=2), normal(2, num_groups, num_keys, 4, seed=3)
    ours = functional.attention(q, k, v, causal=True)
    blind = max(0, num_queries - num_keys)
    assert not ours[:, :, :blind].any()
    assert error(ours[:, :, blind:], _sdpa(q[:, :, blind:], k, v, causal=True)) < 1e-12


def test_attention_rejects_groups_that_do_not_divide_the_heads() -> None:
    with pytest.raises(ValueError, match=r"query heads .3. must be divisible by .*.2."):
        functional.attention(normal(1, 3, 4, 2), normal(1, 2, 4, 2), normal(1, 2, 4, 2), causal=True)


def _torch_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten())


@every_dtype
@pytest.mark.parametrize("std", [1.0, 30.0, 1e4], ids=str)
def test_cross_entropy_matches_torch_in_fp32(dtype: torch.dtype, std: float) -> None:
    # Clamped to what fp16 can hold: the input may be extreme, but not infinite.
    logits = normal(3, 5, 33, std=std).clamp(-6e4, 6e4)
    targets = torch.arange(15).reshape(3, 5) * 2
    assert_three_way(functional.cross_entropy, _torch_cross_entropy, [logits, targets], dtype=dtype)


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_the_vocabulary() -> None:
    loss = functional.cross_entropy(torch.full((4, 10), 50_000.0), torch.arange(4))
    assert loss.item() == pytest.approx(math.log(10), rel=1e-6)


def test_cross_entropy_of_a_certain_and_correct_model_is_zero() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], dtype=torch.bfloat16)
    loss, gradient = run_with_gradients(functional.cross_entropy, [logits, torch.tensor([0])], torch.ones(()))
    assert loss.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("bad_target", [-1, 3])
def test_cross_entropy_rejects_a_target_outside_the_vocabulary(bad_target: int) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        functional.cross_entropy(normal(1, 3), torch.tensor([bad_target]))


def test_cross_entropy_rejects_a_mismatched_number_of_targets() -> None:
    with pytest.raises(ValueError, match="one target per row"):
        functional.cross_entropy(normal(4, 3), torch.tensor([1]))


@every_low_dtype
def test_autocast_computes_matmuls_in_low_precision_and_sums_in_fp32(dtype: torch.dtype) -> None:
    x, weight = normal(2, 4, 8).float(), normal(8, 8, seed=2).float()
    with torch.autocast("cpu", dtype=dtype):
        projected = functional.linear(x, weight)
        heads = projected.reshape(2, 4, 2, 4).transpose(1, 2)
        assert projected.dtype == dtype
        assert functional.attention(heads, heads, heads, causal=True).dtype == dtype
        assert functional.rope(heads, *functional.rope_tables(4, 4, 100.0)).dtype == dtype
        assert functional.rms_norm(x, weight[0], 1e-5).dtype == torch.float32
        assert functional.cross_entropy(projected, torch.zeros(2, 4, dtype=torch.long)).dtype == torch.float32


@every_low_dtype
def test_attention_under_autocast_is_as_accurate_as_torch(dtype: torch.dtype) -> None:
    def lowered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return functional.attention(q, k, v, causal=True)

    def torch_lowered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return _plain_attention(q, k, v, causal=True, scale=0.25)

    inputs = [normal(2, 4, 9, 16), normal(2, 2, 9, 16, seed=2), normal(2, 2, 9, 16, seed=3)]
    assert_three_way(
        lowered,
        torch_lowered,
        inputs,
        dtype=torch.float32,
        truth=lambda q, k, v: _sdpa(q, k, v, causal=True),
    )
