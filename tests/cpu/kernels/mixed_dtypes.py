"""The three-way comparison for operations with several results, on tensors of different dtypes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.cpu.accuracy import assert_as_accurate, normal

Operation = Callable[..., Sequence[Tensor]]


def run_with_gradients(operation: Operation, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Return the results, then the gradient of each input. A result without an upstream is not used."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = operation(*leaves)
    used = results[len(results) - len(upstream) :]
    given = [gradient.to(result) for gradient, result in zip(upstream, used, strict=True)]
    return [*results, *torch.autograd.grad(list(used), leaves, given)]


def assert_results_as_accurate(
    ours: Operation, plain: Operation, inputs: Sequence[Tensor], *, num_used: int | None = None
) -> None:
    """Compare all results and all gradients. The truth is `plain` in float64, on the same values.

    num_used is how many results, the last ones, have a gradient.
    """
    exact = [x.double() for x in inputs]
    shapes = [result.shape for result in plain(*exact)]
    dtypes = [result.dtype for result in plain(*inputs)]
    upstream = [
        normal(*shape, seed=100 + place).to(dtype)
        for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    if num_used is not None:
        upstream = upstream[len(upstream) - num_used :]
    results = [
        run_with_gradients(operation, tensors, upstream)
        for operation, tensors in ((ours, inputs), (plain, inputs), (plain, exact))
    ]
    for place, (a, b, c) in enumerate(zip(*results, strict=True)):
        number = place - len(shapes)
        assert_as_accurate(a, b, c, name=f"gradient {number}" if number >= 0 else f"result {place}")
