"""The bytes of fused kernels: the formula, from what PyTorch's profiler recorded, against the tensors of the call."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from stepscope.cost import OperatorCost, operator_cost
from stepscope.kernels import (
    add_layer_norm,
    add_rms_norm,
    geglu,
    layer_norm,
    rms_norm,
    rope,
    rope_packed,
    swiglu_packed,
)

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OperatorCost]:
    """The cost of each operator in a trace of one call of each, forward and backward."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with profile(record_shapes=True) as recorder:
        for result in _call_all():
            result.sum().backward()  # type: ignore[no-untyped-call]
    recorder.export_chrome_trace(str(path))
    return _read_costs(path)


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def _call_all() -> list[Tensor]:
    x, branch, weight = _leaf(2, 5, 16), _leaf(2, 5, 16, dtype=BF16), _leaf(16)
    total, y = add_rms_norm(x, branch, weight)
    layered = add_layer_norm(x, x, weight, weight)[1]
    tables = torch.ones(5, 4), torch.ones(5, 4)
    q, k = rope(_leaf(2, 4, 5, 8), _leaf(2, 2, 5, 8), *tables, interleaved=True)
    packed = rope_packed(_leaf(2, 5, 64, dtype=BF16), *tables, num_heads=4, num_groups=2, interleaved=False)
    return [
        total.sum() + y.float().sum(),
        layered,
        rms_norm(x, weight, out_dtype=torch.float16),
        layer_norm(branch, weight),
        swiglu_packed(_leaf(3, 24, dtype=BF16)),
        geglu(_leaf(3, 12), _leaf(3, 12, dtype=BF16)),
        q.sum() + k.sum(),
        torch.cat([part.flatten() for part in packed]),
    ]


def _read_costs(path: Path) -> dict[str, OperatorCost]:
    """The first call of each operator."""
    found: dict[str, OperatorCost] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("name", "").startswith("stepscope::"):
            fields = ("Input Dims", "Input type", "Concrete Inputs")
            cost = operator_cost(event["name"], *(json.dumps(event["args"][field]) for field in fields))
            assert cost is not None, event
            found.setdefault(event["name"].removeprefix("stepscope::"), cost)
    return found


N, M = 10, 16  # rows and width of the norms


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("add_rms_norm", N * M * (4 + 2) + 4 * M, N * M * (4 + 2) + 4 * N),
        ("rms_norm", N * M * 4 + 4 * M, N * M * 2 + 4 * N),
        ("layer_norm", N * M * 2 + 4 * M, N * M * 2 + 8 * N),
        ("add_layer_norm", N * M * (4 + 4) + 8 * M, N * M * (4 + 4) + 8 * N),
        ("gated_activation_packed", 3 * 24 * 2, 3 * 12 * 2),
        ("gated_activation_packed_backward", 3 * (12 + 24) * 2, 3 * 24 * 2),
        ("gated_activation", 3 * 12 * (4 + 2), 3 * 12 * 4),
        ("gated_activation_backward", 3 * 12 * (4 + 4 + 2), 3 * 12 * (4 + 2)),
        ("rope", 2 * 6 * 5 * 8 * 4 + 2 * 5 * 4 * 4, 2 * 6 * 5 * 8 * 4),
        ("rope_packed", 2 * 5 * 64 * 2 + 2 * 5 * 4 * 4, 2 * 5 * 64 * 2),
        ("rope_packed_backward", 2 * 5 * 64 * 2 + 2 * 5 * 4 * 4, 2 * 5 * 64 * 2),
    ],
)
def test_forward_moves_each_tensor_once(costs: dict[str, OperatorCost], name: str, read: int, written: int) -> None:
    assert (costs[name].read_bytes, costs[name].written_bytes, costs[name].flops) == (read, written, 0)


def test_backward_of_norms_writes_a_gradient_per_dtype(costs: dict[str, OperatorCost]) -> None:
    """dy, the gradient of the sum, the sum, the weight, 1 / rms; then dx, the branch's and the weight's."""
    cost = costs["rms_norm_backward"]
    assert cost.read_bytes == N * M * (2 + 4 + 4) + 4 * M + 4 * N
    assert cost.written_bytes == N * M * (4 + 2) + 4 * M
    layer = costs["layer_norm_backward"]
    assert layer.read_bytes == N * M * (4 + 4) + 4 * M + 8 * N
    assert layer.written_bytes == N * M * 4 + 2 * 4 * M


def test_operator_of_pytorch_with_the_same_name_writes_the_dtype_of_x() -> None:
    arguments = json.dumps(["", "[16]", "", "1e-05"])
    shapes, kinds = (
        json.dumps([[10, 16], [], [16], []]),
        json.dumps(["c10::BFloat16", "ScalarList", "c10::BFloat16", ""]),
    )
    found = operator_cost("aten::rms_norm", shapes, kinds, arguments)
    assert found is not None
    assert (found.read_bytes, found.written_bytes) == (2 * (160 + 16), 2 * 160)
