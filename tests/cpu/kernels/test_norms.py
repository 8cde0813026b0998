"""The norms as operators: on a CPU, in eager mode and under a compiler. `interpreted_norms.py` tests the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.mixed_dtypes import assert_results_as_accurate, run_with_gradients

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
OPERATORS = torch.ops.stepscope


def ours_rms(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return *add_rms_norm(x, branch, weight, EPS), rms_norm(x, weight, EPS)


def plain_rms(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = x + branch
    return total, functional.rms_norm(total, weight, EPS).to(branch.dtype), functional.rms_norm(x, weight, EPS)


def ours_layer(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return *add_layer_norm(x, branch, weight, bias, EPS), layer_norm(x, weight, bias, EPS)


def plain_layer(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    total = x + branch
    y = functional.layer_norm(total, weight, bias, EPS).to(branch.dtype)
    return total, y, functional.layer_norm(x, weight, bias, EPS)


both_kinds = pytest.mark.parametrize(
    ("ours", "plain"), [(ours_rms, plain_rms), (ours_layer, plain_layer)], ids=["rms", "layer"]
)


def make_inputs(x_dtype: torch.dtype = FP32, branch_dtype: torch.dtype = BF16) -> list[Tensor]:
    x, branch = normal(2, 5, 48, seed=1).to(x_dtype), normal(2, 5, 48, seed=2).to(branch_dtype)
    return [x, branch, (1 + normal(48, seed=3, std=0.5)).to(x_dtype), normal(48, seed=4).to(x_dtype)]


@both_kinds
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, BF16), (torch.float64, torch.float64), (BF16, FP32)], ids=str)
def test_operators_on_a_cpu_match_the_reference(
    ours: Callable[..., Any], plain: Callable[..., Any], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    inputs = make_inputs(*dtypes)
    assert_results_as_accurate(ours, plain, inputs[:3] if ours is ours_rms else inputs)


@pytest.mark.parametrize("ours", [ours_rms, ours_layer], ids=["rms", "layer"])
def test_compiled_graph_gives_the_same_bits(ours: Callable[..., Any]) -> None:
    inputs = make_inputs()[: 3 if ours is ours_rms else 4]
    upstream = [normal(2, 5, 48, seed=place) for place in range(3)]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    expected = run_with_gradients(ours, inputs, upstream)
    found = run_with_gradients(compiled, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (FP32, FP32)], ids=str)
def test_operators_follow_the_rules_of_the_dispatcher(kind: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, branch, weight, bias = (tensor.requires_grad_() for tensor in make_inputs(*dtypes))
    settings = (weight, bias if kind == "layer_norm" else None, EPS, BF16)
    torch.library.opcheck(getattr(OPERATORS, kind).default, (x, *settings))
    torch.library.opcheck(getattr(OPERATORS, f"add_{kind}").default, (x, branch, *settings))
    statistics = torch.ones(1 + (kind == "layer_norm"), 2, 5)
    backward = getattr(OPERATORS, f"{kind}_backward").default
    tensors = [x.detach() for x in (branch, x, x, weight)]
    for d_total in (None, tensors[1]):
        arguments = (tensors[0], d_total, *tensors[2:], statistics, *dtypes, True, kind == "layer_norm")
        torch.library.opcheck(backward, arguments)


def test_only_the_sum_may_be_used() -> None:
    x, branch, weight, _ = (tensor.requires_grad_() for tensor in make_inputs())
    total, _ = add_rms_norm(x, branch, weight)
    upstream = normal(2, 5, 48, seed=7).float()
    dx, d_branch, dweight = torch.autograd.grad(total, (x, branch, weight), upstream, allow_unused=True)
    assert torch.equal(dx, upstream)
    assert torch.equal(d_branch, upstream.bfloat16())
    assert dweight is None


def test_gradients_of_equal_dtypes_are_not_shared_by_leaves() -> None:
    """Both are one tensor in the backward pass. What is accumulated later must not reach the other."""
    x, branch = normal(3, 8, seed=1).float().requires_grad_(), normal(3, 8, seed=2).float().requires_grad_()
    add_rms_norm(x, branch, torch.ones(8))[1].square().sum().backward()
    assert x.grad is not None
    assert branch.grad is not None
    before = branch.grad.clone()
    x.grad.add_(1)
    assert torch.equal(branch.grad, before)


def test_dtype_of_the_result_can_be_chosen() -> None:
    x, branch, weight, bias = make_inputs()
    assert rms_norm(x, weight, out_dtype=BF16).dtype == BF16
    assert layer_norm(branch, weight, bias, out_dtype=FP32).dtype == FP32
    assert [y.dtype for y in add_rms_norm(x, branch, weight)] == [FP32, BF16]
    assert [y.dtype for y in add_layer_norm(x, branch, weight, out_dtype=torch.float16)] == [FP32, torch.float16]


def test_double_backward_is_refused() -> None:
    x = normal(3, 8).float().requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x, torch.ones(8)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="do not support double backward"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(4)), r"`weight` must be x's last, but got \(4,\)"),
        (lambda: layer_norm(torch.ones(8), torch.ones(8), torch.ones(4)), "`bias` must have the shape of `weight`"),
        (lambda: add_rms_norm(torch.ones(2, 8), torch.ones(8), torch.ones(8)), "`branch` must have the shape of x"),
        (lambda: rms_norm(torch.ones(2, 8).int(), torch.ones(8)), "floating-point numbers, but got torch.int32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
