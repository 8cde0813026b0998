"""Gated activations as operators: on a CPU, in eager mode and under a compiler. `interpreted_gated.py` tests the
kernels.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stepscope.kernels import geglu, geglu_packed, swiglu, swiglu_linear, swiglu_packed
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.mixed_dtypes import assert_results_as_accurate, run_with_gradients

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
OPERATORS = torch.ops.stepscope


def ours(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return swiglu(gate, up), geglu(gate, up), geglu(gate, up, "tanh")


def plain(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return functional.swiglu(gate, up), functional.geglu(gate, up), functional.geglu(gate, up, "tanh")


def ours_packed(gate_up: Tensor) -> tuple[Tensor, ...]:
    return swiglu_packed(gate_up), geglu_packed(gate_up), geglu_packed(gate_up, "tanh")


def plain_packed(gate_up: Tensor) -> tuple[Tensor, ...]:
    return plain(*gate_up.chunk(2, dim=-1))


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (FP64, FP64), (FP32, BF16)], ids=str)
def test_operators_on_a_cpu_match_the_reference(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert_results_as_accurate(
        ours, plain, [normal(2, 3, 20, seed=1).to(dtypes[0]), normal(2, 3, 20, seed=2).to(dtypes[1])]
    )
    assert_results_as_accurate(ours_packed, plain_packed, [normal(2, 3, 40, seed=1).to(dtypes[0])])


def ours_linear(gate_up: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (swiglu_linear(gate_up, weight),)


def plain_linear(gate_up: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.nn.functional.linear(plain_packed(gate_up)[0], weight),)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
def test_product_behind_the_activation_matches_the_reference(dtype: torch.dtype) -> None:
    inputs = [normal(2, 3, 40, seed=1).to(dtype), normal(12, 20, seed=2).to(dtype)]
    assert_results_as_accurate(ours_linear, plain_linear, inputs)


def test_product_behind_the_activation_keeps_only_its_inputs() -> None:
    gate_up, weight = (normal(6, 40, seed=1).float(), normal(12, 20, seed=2).float())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        swiglu_linear(gate_up.requires_grad_(), weight.requires_grad_())
    assert {one.data_ptr() for one in kept} == {gate_up.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("operation", [ours, ours_packed])
def test_compiled_graph_gives_the_same_bits(operation: Callable[..., tuple[Tensor, ...]]) -> None:
    inputs = [normal(2, 3, 20, seed=seed).bfloat16() for seed in range(2)]
    if operation is ours_packed:
        inputs = [torch.cat(inputs, dim=-1)]
    upstream = [normal(2, 3, 20, seed=9)] * 3
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
    expected = run_with_gradients(operation, inputs, upstream)
    found = run_with_gradients(compiled, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_operators_follow_the_rules_of_the_dispatcher(activation: str) -> None:
    gate_up = normal(2, 3, 40, seed=1).float().requires_grad_()
    gate, up = (x.detach().requires_grad_() for x in gate_up.chunk(2, dim=-1))
    dy = normal(2, 3, 20, seed=2).float()
    torch.library.opcheck(OPERATORS.gated_activation.default, (gate, up, activation))
    torch.library.opcheck(OPERATORS.gated_activation_packed.default, (gate_up, activation))
    torch.library.opcheck(OPERATORS.gated_activation_backward.default, (dy, gate.detach(), up.detach(), activation))
    torch.library.opcheck(OPERATORS.gated_activation_packed_backward.default, (dy, gate_up.detach(), activation))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own tracing
def test_compiled_product_gives_the_same_bits() -> None:
    inputs, upstream = [normal(6, 40, seed=1).bfloat16(), normal(12, 20, seed=2).bfloat16()], [normal(6, 12, seed=9)]
    compiled = torch.compile(ours_linear, backend="aot_eager", fullgraph=True)
    expected = run_with_gradients(ours_linear, inputs, upstream)
    found = run_with_gradients(compiled, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_approximation_is_close_to_gelu() -> None:
    x = torch.linspace(-6, 6, 1001, dtype=FP64)
    assert torch.allclose(functional.gelu(x), torch.nn.functional.gelu(x))
    assert torch.allclose(functional.gelu_tanh(x), torch.nn.functional.gelu(x, approximate="tanh"))
    assert (functional.gelu_tanh(x) - functional.gelu(x)).abs().max() < 5e-4


def test_double_backward_is_refused() -> None:
    gate_up = normal(3, 8).float().requires_grad_()
    (gradient,) = torch.autograd.grad(swiglu_packed(gate_up).sum(), gate_up, create_graph=True)
    with pytest.raises(RuntimeError, match="do not support double backward"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu(torch.ones(2, 8), torch.ones(8)), r"the same shape, but got \(2, 8\) and \(8,\)"),
        (lambda: swiglu_packed(torch.ones(2, 7)), "an even last dimension"),
        (lambda: geglu(torch.ones(8), torch.ones(8), cast("Any", "erf")), '"none" or "tanh", but got \'erf\''),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
