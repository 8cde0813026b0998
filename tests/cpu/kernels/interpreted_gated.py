"""The kernels of the gated activations in Triton's interpreter, called through the operators, with their autograd.

`test_triton_attention.py` runs this file in its own process. A fixture replaces the formulas for CPUs with the
launchers, so everything but the choice between the two is as on a GPU.
"""

# F the width of gate and up.

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from stepscope.kernels import gated, geglu, geglu_packed, swiglu, swiglu_packed
from stepscope.nn import functional
from tests.cpu.accuracy import normal
from tests.cpu.kernels.interpreter import prepare
from tests.cpu.kernels.mixed_dtypes import assert_results_as_accurate, run_with_gradients

prepare()

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Operation = Callable[..., Tensor]
PAIRS: dict[str, tuple[Operation, Operation, Operation]] = {
    "swiglu": (swiglu, swiglu_packed, functional.swiglu),
    "geglu": (geglu, geglu_packed, functional.geglu),
    "geglu tanh": (
        lambda gate, up: geglu(gate, up, "tanh"),
        lambda gate_up: geglu_packed(gate_up, "tanh"),
        lambda gate, up: functional.geglu(gate, up, "tanh"),
    ),
}
every_activation = pytest.mark.parametrize(("ours", "packed", "plain"), PAIRS.values(), ids=list(PAIRS))


@pytest.fixture(autouse=True)
def launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "_plain_forward", gated._launch_forward)
    monkeypatch.setattr(gated, "_plain_backward", gated._launch_backward)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill memory with NaN, so that reads of unwritten memory are noticed."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@every_activation
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (3, 1300), (7,)], ids=str)
def test_activations_match_the_reference(
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    ours: Operation,
    packed: Operation,
    plain: Operation,
) -> None:
    del packed
    inputs = [normal(*shape, seed=1, std=2).to(dtypes[0]), normal(*shape, seed=2).to(dtypes[1])]
    assert_results_as_accurate(lambda *x: (ours(*x),), lambda *x: (plain(*x),), inputs)


@every_activation
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_packed_halves_give_the_same_bits(
    dtype: torch.dtype, ours: Operation, packed: Operation, plain: Operation
) -> None:
    del plain
    gate_up = normal(2, 5, 2600, seed=1).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    upstream = [normal(2, 5, 1300, seed=2).to(dtype)]
    y, gradient = run_with_gradients(lambda x: (packed(x),), [gate_up], upstream)
    expected, dgate, dup = run_with_gradients(lambda *x: (ours(*x),), [gate, up], upstream)
    assert torch.equal(y, expected)
    assert torch.equal(gradient, torch.cat((dgate, dup), dim=-1))
    assert gradient.is_contiguous()


@every_activation
def test_extreme_values_stay_finite(ours: Operation, packed: Operation, plain: Operation) -> None:
    del packed, plain
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
    with np.errstate(over="ignore"):  # silent on a GPU
        y, dgate, dup = run_with_gradients(lambda *x: (ours(*x),), [gate, torch.ones(7)], [torch.ones(7)])
    assert torch.equal(y[[0, 1, 3, 5, 6]], torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))
    assert torch.equal(y, dup)
    assert torch.equal(dgate[[0, 1, 3, 5, 6]], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


def test_strides_do_not_change_the_results() -> None:
    gate, up = normal(40, 6, seed=1).float().T, torch.full((6, 90), torch.nan)[:, 7:47].copy_(normal(6, 40, seed=2))
    upstream = normal(6, 1, seed=3).float().expand(6, 40)
    leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    copies = [x.detach().contiguous().requires_grad_() for x in (gate, up)]
    found = torch.autograd.grad(swiglu(*leaves), leaves, upstream)
    expected = torch.autograd.grad(swiglu(*copies), copies, upstream.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_backward_writes_the_result_of_forward_again(activation: str) -> None:
    gate, up, dy = (normal(5, 40, seed=seed).bfloat16() for seed in range(3))
    dgate, dup, y = (torch.full_like(gate, torch.nan) for _ in range(3))
    gated._launch_backward(dy, gate, up, activation, dgate, dup, y)
    assert torch.equal(y, gated._launch_forward(gate, up, activation))
    alone = [torch.empty_like(gate), torch.empty_like(up)]
    gated._launch_backward(dy, gate, up, activation, *alone)
    assert torch.equal(dgate, alone[0])
    assert torch.equal(dup, alone[1])


def test_empty_tensors_launch_nothing() -> None:
    gate_up = torch.empty(0, 80, requires_grad=True)
    y = swiglu_packed(gate_up)
    assert y.shape == (0, 40)
    (gradient,) = torch.autograd.grad(y.sum(), gate_up)
    assert gradient.shape == (0, 80)
