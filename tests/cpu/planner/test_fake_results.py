"""Remembered results of operators are those that PyTorch's fake tensors give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from stepscope.planner.fake_results import FakeResults
from stepscope.planner.operation import find_tensors

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
CALLS: dict[str, Callable[[Tensor, Tensor], Call]] = {
    "new": lambda x, y: (aten.mul.Tensor, (x, y), {}),
    "broadcast": lambda x, y: (aten.add.Tensor, (x, y[0]), {"alpha": 2}),
    "strided": lambda x, y: (aten.mm.default, (x.t(), y), {}),
    "another dtype": lambda x, _: (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    "view": lambda x, _: (aten.transpose.int, (x, 0, 1), {}),
    "view of a part": lambda x, _: (aten.slice.Tensor, (x.t(), 1, 2, 6, 2), {}),
    "view that is not called one": lambda x, _: (aten._unsafe_view.default, (x, [2, 32]), {}),
    "view as another dtype": lambda x, _: (aten.view.dtype, (x, torch.int32), {}),
    "several views": lambda x, _: (aten.split.Tensor, (x, 3), {}),
    "in place": lambda x, y: (aten.mul_.Tensor, (x, y), {}),
    "several": lambda x, y: (aten.native_layer_norm.default, (x, [8], y[0], None, 1e-5), {}),
    "one that is missing": lambda x, y: (aten.native_layer_norm_backward.default, (
        x, y, [8], x[:, :1], x[:, :1], y[0], y[0], [True, False, True]), {}),
    "list": lambda x, y: (aten.cat.default, ([x, y], 1), {}),
    "list in place": lambda x, y: (aten._foreach_mul_.Scalar, ([x, y], 2.0), {}),
}  # fmt: skip


def describe(made: object, inputs: list[Tensor]) -> list[object]:
    facts: list[object] = [type(made)]
    for one in find_tensors(made):
        shared = [place for place, other in enumerate(inputs) if _storage(other) == _storage(one)]
        same = [place for place, other in enumerate(inputs) if other is one]
        facts += [one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, shared, same, type(one)]
    return facts


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def make_inputs() -> tuple[FakeTensorMode, Tensor, Tensor]:
    mode = FakeTensorMode()
    with mode:
        return mode, torch.empty(8, 8), torch.empty(8, 8)


def run_twice(call: Callable[[Tensor, Tensor], Call]) -> tuple[list[list[object]], list[object]]:
    """What both calls gave, and what the mode alone gives."""
    mode, x, y = make_inputs()
    results = FakeResults(mode)
    with mode:
        func, args, kwargs = call(x, y)
        inputs = find_tensors(args)
        plain = describe(func(*args, **kwargs), inputs)
        return [describe(results.run(func, args, kwargs), inputs) for _ in range(2)], plain


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_mode(name: str) -> None:
    made, plain = run_twice(CALLS[name])
    assert made == [plain, plain]


def test_second_call_does_not_ask_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, x, y = make_inputs()
    results = FakeResults(mode)
    with mode:
        results.run(aten.mul.Tensor, (x, y), {})
        monkeypatch.setattr(FakeTensorMode, "dispatch", None)
        made = results.run(aten.mul.Tensor, (y, x), {})
        monkeypatch.undo()
    assert isinstance(made, FakeTensor)


def test_numbers_that_are_equal_are_not_the_same() -> None:
    mode, _, _ = make_inputs()
    results = FakeResults(mode)
    with mode:
        whole = torch.empty(4, dtype=torch.int64)
        made = [results.run(aten.mul.Scalar, (whole, one), {}).dtype for one in (2, 2.0, 2)]
    assert made == [torch.int64, torch.float32, torch.int64]


def test_views_are_those_of_their_own_input() -> None:
    mode, x, y = make_inputs()
    results = FakeResults(mode)
    with mode:
        views = [results.run(aten.t.default, (one,), {}) for one in (x[:4], y[:4], x[4:])]
    assert [_storage(one) for one in views] == [_storage(one) for one in (x, y, x)]
    assert [one.storage_offset() for one in views] == [0, 0, 32]


def test_values_are_never_remembered() -> None:
    mode, x, _ = make_inputs()
    results = FakeResults(mode)
    with mode:
        for _ in range(2):
            with pytest.raises(DataDependentOutputException):
                results.run(aten._local_scalar_dense.default, (x[0, 0],), {})
