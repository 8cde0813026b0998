"""Rotary embeddings as operators: on a CPU, in eager mode and under a compiler. `interpreted_rotary.py` tests the
kernel.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from stepscope.kernels import rope, rope_packed
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.mixed_dtypes import assert_results_as_accurate, run_with_gradients

OPERATORS = torch.ops.stepscope
COS, SIN = functional.rope_tables(12, 5, theta=100.0)
either_convention = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])


def make_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q and k as views of (B, L, H, D) memory."""
    return [normal(2, 5, heads, 12, seed=heads).to(dtype).transpose(1, 2) for heads in (4, 2)]


@either_convention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_operators_on_a_cpu_match_the_reference(dtype: torch.dtype, interleaved: bool) -> None:
    reference = functional.rope if interleaved else functional.rope_half
    assert_results_as_accurate(
        lambda q, k: rope(q, k, COS, SIN, interleaved=interleaved),
        lambda q, k: (reference(q, COS, SIN), reference(k, COS, SIN)),
        make_inputs(dtype),
    )


def test_half_convention_is_that_of_transformers() -> None:
    q, k = make_inputs()
    cos, sin = (torch.cat((x, x), dim=-1)[None] for x in (COS, SIN))
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    found = rope(q, k, cos, sin, interleaved=False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_conventions_differ_only_in_the_order_of_features() -> None:
    q, _ = make_inputs()
    reordered = torch.cat((q[..., 0::2], q[..., 1::2]), dim=-1)
    rotated = functional.rope(q, COS, SIN)
    expected = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    torch.testing.assert_close(functional.rope_half(reordered, COS, SIN), expected)


@either_convention
def test_compiled_graph_gives_the_same_bits(interleaved: bool) -> None:
    def rotate(q: Tensor, k: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        packed = rope_packed(qkv, COS, SIN, num_heads=4, num_groups=2, interleaved=interleaved)
        return *rope(q, k, COS, SIN, interleaved=interleaved), *packed

    inputs = [*make_inputs(torch.bfloat16), normal(2, 5, 96, seed=9).bfloat16()]
    upstream = [normal(*x.shape, seed=3) for x in rotate(*inputs)]
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    expected = run_with_gradients(rotate, inputs, upstream)
    found = run_with_gradients(compiled, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [x.stride() for x in found[:5]] == [x.stride() for x in expected[:5]]


@either_convention
def test_operators_follow_the_rules_of_the_dispatcher(interleaved: bool) -> None:
    q, k = (x.requires_grad_() for x in make_inputs())
    tables = (COS[None], SIN[None])
    torch.library.opcheck(OPERATORS.rope.default, (q, k, *tables, interleaved, False))
    qkv = normal(2, 5, 96).float().requires_grad_()
    torch.library.opcheck(OPERATORS.rope_packed.default, (qkv, *tables, 4, 2, interleaved))
    torch.library.opcheck(OPERATORS.rope_packed_backward.default, (q, k, k.detach(), *tables, interleaved))


def test_backward_rotates_back() -> None:
    q, k = (x.requires_grad_() for x in make_inputs())
    rotated = rope(q, k, COS, SIN, interleaved=True)
    found = torch.autograd.grad(rotated, (q, k), [x.detach() for x in rotated])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, (q, k), strict=True))
    assert all(x.transpose(1, 2).is_contiguous() for x in found)


Q, K = torch.ones(1, 2, 5, 12), torch.ones(1, 1, 5, 12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rope(Q[0], K, COS, SIN, interleaved=True), r"shape \(B, H, L, D\)"),
        (lambda: rope(Q, K[:, :, :4], COS, SIN, interleaved=True), "may only differ in their heads"),
        (lambda: rope(Q, K, COS[:4], SIN[:4], interleaved=True), "tables of 5 positions"),
        (lambda: rope(Q, K, COS[:, :5], SIN, interleaved=True), "6 or 12 columns"),
        (lambda: rope(Q[..., :3], K[..., :3], COS, SIN, interleaved=True), "head dim must be even"),
        (
            lambda: rope_packed(torch.ones(1, 5, 50), COS, SIN, num_heads=2, num_groups=1, interleaved=True),
            "4 heads of an even size",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
