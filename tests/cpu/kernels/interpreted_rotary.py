"""The kernel of the rotary embeddings in Triton's interpreter, called through the operators, with their autograd.

`test_triton_attention.py` runs this file in its own process. A fixture replaces the reference, which runs on CPUs, with
the launcher, so everything but the choice between the two is as on a GPU.
"""

# B batch, H query heads, G key/value heads, L length, D head dim, P = D/2 rotated pairs.

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from stepscope.kernels import rope, rope_packed, rotary, rotary_kernels
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.interpreter import prepare
from tests.cpu.kernels.mixed_dtypes import assert_results_as_accurate

prepare()

either_convention = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
# B, H, G, L, D: whole tiles; grouped heads and a ragged end; a head dim that is not a power of two; of one pair.
SHAPES = [(1, 2, 2, 64, 64), (2, 6, 2, 7, 16), (1, 3, 1, 5, 80), (2, 1, 1, 3, 2)]


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "_plain_rotate", rotary._launch_rotate)
    # So few that there are several programs.
    monkeypatch.setattr(rotary_kernels, "ELEMENTS", 512)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill memory with NaN, so that reads of unwritten memory are noticed."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    reference = functional.rope if interleaved else functional.rope_half
    return reference(q, cos.to(q.dtype), sin.to(q.dtype)), reference(k, cos.to(k.dtype), sin.to(k.dtype))


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    batch, heads, groups, length, head_dim = shape
    tensors = [normal(batch, count, length, head_dim, seed=count).to(dtype) for count in (heads, groups)]
    return tensors, functional.rope_tables(head_dim, length, theta=100.0)


def both(
    tables: tuple[Tensor, Tensor], *, interleaved: bool
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
    """Ours, and the reference in fp32 or float64 with one rounding at the end."""

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, *tables, interleaved=interleaved)

    def expected(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k)]
        q_out, k_out = plain(wide[0], wide[1], *tables, interleaved=interleaved)
        return q_out.to(q.dtype), k_out.to(k.dtype)

    return ours, expected


@either_convention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_matches_the_reference(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    inputs, tables = make_inputs(shape, dtype)
    assert_results_as_accurate(*both(tables, interleaved=interleaved), inputs)


@either_convention
def test_tables_may_differ_within_the_batch_and_contain_angles_twice(interleaved: bool) -> None:
    inputs, (cos, sin) = make_inputs((2, 2, 1, 5, 12), torch.float32)
    cos, sin = torch.stack((cos, cos.flip(0))), torch.stack((sin, sin.flip(0)))
    wanted = plain(inputs[0], inputs[1], cos[:, None], sin[:, None], interleaved=interleaved)
    twice = [x.repeat_interleave(2, dim=-1) if interleaved else torch.cat((x, x), dim=-1) for x in (cos, sin)]
    for tables in ((cos, sin), twice, (cos, sin.clone().transpose(1, 2).contiguous().transpose(1, 2))):
        found = rope(inputs[0], inputs[1], *tables, interleaved=interleaved)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    one = rope(inputs[0], inputs[1], twice[0][:1], twice[1][:1], interleaved=interleaved)
    expected = plain(inputs[0], inputs[1], cos[0], sin[0], interleaved=interleaved)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, expected, strict=True))


@either_convention
def test_strided_heads_are_read_in_place(interleaved: bool) -> None:
    _, tables = make_inputs((2, 1, 1, 5, 12), torch.float32)
    packed = normal(2, 5, 8, 12, seed=1).float()
    q, k = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:6].transpose(1, 2)
    found = rope(q, k, *tables, interleaved=interleaved)
    expected = rope(q.contiguous(), k.contiguous(), *tables, interleaved=interleaved)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(x.transpose(1, 2).is_contiguous() for x in found)
    columns_first = [x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in (q, k)]
    found = rope(columns_first[0], columns_first[1], *tables, interleaved=interleaved)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@either_convention
def test_packed_tensor_gives_the_same_bits_and_one_gradient(interleaved: bool) -> None:
    _, tables = make_inputs((2, 1, 1, 5, 12), torch.float32)
    qkv = normal(2, 5, 8 * 12, seed=1).bfloat16().requires_grad_()
    found = rope_packed(qkv, *tables, num_heads=4, num_groups=2, interleaved=interleaved)
    q, k, v = qkv.view(2, 5, 8, 12).transpose(1, 2).split_with_sizes((4, 2, 2), dim=1)
    expected = (*rope(q, k, *tables, interleaved=interleaved), v)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(x.transpose(1, 2).is_contiguous() for x in found)
    upstream = [normal(*x.shape, seed=3).bfloat16() for x in found]
    (gradient,) = torch.autograd.grad(found, qkv, upstream)
    assert torch.equal(gradient, torch.autograd.grad(expected, qkv, upstream)[0])
    assert gradient.is_contiguous()


def test_rotation_can_be_differentiated_twice() -> None:
    inputs, tables = make_inputs((1, 1, 1, 2, 4), torch.float32)
    q, k = (x.requires_grad_() for x in inputs)
    rotated, _ = rope(q, k, *tables, interleaved=True)
    (gradient,) = torch.autograd.grad(rotated.square().sum(), q, create_graph=True)
    # A rotation keeps the sum of squares: the gradient is 2q, and its own is 2.
    assert torch.allclose(gradient, 2 * q)
    assert torch.allclose(torch.autograd.grad(gradient.sum(), q)[0], torch.full_like(q, 2.0))


def test_empty_tensors_launch_nothing() -> None:
    cos = torch.empty(0, 2)
    q, k = rope(torch.empty(2, 3, 0, 4), torch.empty(2, 1, 0, 4), cos, cos, interleaved=True)
    assert (q.shape, k.shape) == ((2, 3, 0, 4), (2, 1, 0, 4))
