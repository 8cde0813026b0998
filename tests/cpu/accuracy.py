"""Three-way accuracy: float64 truth, plain PyTorch in the same dtype, ours.

A fixed tolerance is either too tight on another machine or so wide that zeros pass. Here the limit is measured: our
error may be twice that of PyTorch's own operation in the same dtype, plus one unit in the last place of the largest
value. Zeros must exceed the limit: a check that cannot fail is itself a failure.

A few fp32 units are added, which do not matter for bf16 and fp16. In fp32 itself both errors depend on the order of
summation, and over 30 other seeds one check in 140 missed the bare limit, the worst by six units.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Op = Callable[..., Tensor]

FP32_UNITS = 8


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    """Normal values in float64 that depend only on shape and seed, not on the tests that ran before."""
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(shape, dtype=torch.float64, generator=generator)


def error(actual: Tensor, truth: Tensor) -> float:
    """The largest absolute difference; infinite if actual is not a number."""
    difference = (actual.detach().double() - truth.detach().double()).abs().max().item()
    return math.inf if math.isnan(difference) else difference


def typical_error(actual: Tensor, truth: Tensor) -> float:
    """The root mean square difference: for a whole model, where the largest difference is luck."""
    difference = (actual.detach().double() - truth.detach().double()).square().mean().sqrt().item()
    return math.inf if math.isnan(difference) else difference


def one_ulp(truth: Tensor, dtype: torch.dtype) -> float:
    """The step from truth's largest value to the next one that dtype can hold."""
    return torch.finfo(dtype).eps * truth.detach().abs().max().item()


def assert_as_accurate(
    ours: Tensor,
    plain: Tensor,
    truth: Tensor,
    *,
    name: str = "output",
    computed_in: torch.dtype | None = None,
    measure: Callable[[Tensor, Tensor], float] = error,
) -> None:
    """Assert that ours has plain's shape and dtype, and is at most twice as far from the truth.

    computed_in is the dtype that sets the last place, if results are kept in a wider one: under autocast.
    """
    assert truth.dtype == torch.float64, f"{name}: the truth is {truth.dtype}"
    assert ours.shape == plain.shape == truth.shape, f"{name}: {ours.shape}, {plain.shape}, {truth.shape}"
    assert ours.dtype == plain.dtype, f"{name}: {ours.dtype} instead of {plain.dtype}"
    limit = 2 * measure(plain, truth) + one_ulp(truth, computed_in or plain.dtype)
    limit += FP32_UNITS * one_ulp(truth, torch.float32)
    ours_off, zeros_off = measure(ours, truth), measure(torch.zeros_like(truth), truth)
    assert ours_off <= limit, f"{name}: off by {ours_off:.3g}, limit {limit:.3g}"
    assert zeros_off > limit, f"{name}: the limit {limit:.3g} would pass zeros"


def run_with_gradients(op: Op, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return op's output, then the gradient of each floating-point input for the given gradient of the output."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    output = op(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [output, *torch.autograd.grad(output, wanted, upstream.to(output.dtype).expand(output.shape))]


def assert_three_way(
    ours: Op, plain: Op, inputs: Sequence[Tensor], *, dtype: torch.dtype, truth: Op | None = None
) -> None:
    """Compare the output and every gradient. Floating-point inputs are float64, and rounded to dtype first.

    truth runs in float64 on the rounded inputs, and defaults to `plain`.
    """
    rounded = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    exact = [x.double() if x.is_floating_point() else x for x in rounded]
    truth = plain if truth is None else truth
    upstream = normal(*truth(*exact).shape, seed=1).to(dtype)
    true_values = run_with_gradients(truth, exact, upstream)
    plain_values = run_with_gradients(plain, rounded, upstream)
    our_values = run_with_gradients(ours, rounded, upstream)
    for index, (a, b, c) in enumerate(zip(our_values, plain_values, true_values, strict=True)):
        assert_as_accurate(a, b, c, name="output" if index == 0 else f"gradient {index - 1}")
