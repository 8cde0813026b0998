"""Fake results of operators, remembered by what their inputs look like.

A model calls the same operators with the same shapes in every layer, and PyTorch's fake tensors take long to say what
comes out: their own cache describes every input by twenty facts before it looks anything up, which was two thirds of a
simulation. Here, an operator whose inputs are plain fake tensors and numbers is looked up by the few facts that a
result depends on. Everything else goes the long way, and so does an operator whose results were not reproduced
exactly when they were first made.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.utils import is_builtin
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_UNSTABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_FRESH = -1  # the source of a result with memory of its own


class _TensorRecipe(NamedTuple):
    """How to make one result: an input itself, a view of it, or a new tensor."""

    source: int  # the input whose memory it has
    is_source: bool
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    attributes: dict[str, Any] = {}  # those of a fake tensor  # noqa: RUF012  # never changed


class _Recipe(NamedTuple):
    """How to make all results. `kind` is that of the collection, None if it is a single one."""

    kind: type | None
    parts: tuple[_TensorRecipe | int | None, ...]


class FakeResults:
    """Runs operators of one fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[tuple[object, ...], _Recipe | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator."""
        facts: list[object] = [func, torch.is_inference_mode_enabled(), torch.get_default_dtype(), *kwargs]
        inputs: list[FakeTensor] = []
        is_plain = _is_stable(func) and self._add_facts(facts, inputs, (*args, *kwargs.values()))
        if not is_plain or not inputs:
            return func(*args, **kwargs)
        key = tuple(facts)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = self._learn(result, inputs)
            return result
        recipe = self._known[key]
        return func(*args, **kwargs) if recipe is None else self._make(recipe, inputs)

    def _add_facts(self, facts: list[object], inputs: list[FakeTensor], values: Iterable[Any]) -> bool:
        """Add what a result depends on, and the tensors among the values. False if it depends on more than that."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode or value.dtype.is_complex:
                    return False
                facts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                facts.append(value.requires_grad)
                inputs.append(value)
            elif kind in _NUMBERS:
                facts += (kind, value)  # 1 and 1.0 are equal, and make tensors of different dtypes
            elif kind in (list, tuple):
                facts.append(len(value))
                if not self._add_facts(facts, inputs, value):
                    return False
            else:
                return False
        return True

    def _learn(self, result: Any, inputs: list[FakeTensor]) -> _Recipe | None:
        """How to make these results again; None if that does not give the same."""
        kind = type(result) if isinstance(result, list | tuple) else None
        results = list(result) if kind is not None else [result]
        if kind not in (None, list, tuple) or not all(type(one) in (FakeTensor, int, type(None)) for one in results):
            return None
        storages = {one.untyped_storage()._cdata: place for place, one in reversed(list(enumerate(inputs)))}
        tensors = [one for one in results if isinstance(one, FakeTensor)]
        fresh = [one.untyped_storage()._cdata for one in tensors if one.untyped_storage()._cdata not in storages]
        if len(set(fresh)) < len(fresh) or any(one.constant is not None for one in tensors):
            return None
        parts = tuple(_describe_result(one, inputs, storages) for one in results)
        recipe = _Recipe(kind, parts)
        made = self._make(recipe, inputs)
        again = list(made) if kind is not None else [made]
        return recipe if all(map(_are_alike, results, again)) else None

    def _make(self, recipe: _Recipe, inputs: list[FakeTensor]) -> Any:
        made = [
            _make_tensor(one, inputs, self._mode) if isinstance(one, _TensorRecipe) else one for one in recipe.parts
        ]
        return made[0] if recipe.kind is None else recipe.kind(made)


@cache
def _is_stable(func: Any) -> bool:
    """Whether the results of an operator depend on its arguments alone."""
    return isinstance(func, OpOverload) and is_builtin(func) and not _UNSTABLE & set(func.tags)


def _describe_result(
    result: FakeTensor | int | None, inputs: list[FakeTensor], storages: dict[int, int]
) -> _TensorRecipe | int | None:
    if not isinstance(result, FakeTensor):
        return result
    for place, one in enumerate(inputs):
        if one is result:
            return _TensorRecipe(place, is_source=True)
    return _TensorRecipe(
        storages.get(result.untyped_storage()._cdata, _FRESH),
        is_source=False,
        shape=tuple(result.shape),
        strides=result.stride(),
        offset=int(result.storage_offset()),
        dtype=result.dtype,
        device=result.fake_device,
        attributes=dict(vars(result)),
    )


def _make_tensor(recipe: _TensorRecipe, inputs: list[FakeTensor], mode: FakeTensorMode) -> Tensor:
    """What the constructor of fake tensors does, with attributes that it has set before."""
    if recipe.is_source:
        return inputs[recipe.source]
    with torch._C._DisableTorchDispatch():
        if recipe.source == _FRESH:
            inner = torch.empty_strided(recipe.shape, recipe.strides, dtype=recipe.dtype, device="meta")
        else:
            inner = torch.empty(0, dtype=recipe.dtype, device="meta")
            inner.set_(inputs[recipe.source].untyped_storage(), recipe.offset, recipe.shape, recipe.strides)
    tensor = Tensor._make_subclass(FakeTensor, inner, dispatch_device=True, device_for_backend_keys=recipe.device)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    else:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    vars(tensor).update(recipe.attributes)
    return tensor


def _are_alike(first: object, second: object) -> bool:
    if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
        return first == second
    if first is second:
        return True
    return list(_facts_of(first)) == list(_facts_of(second))


def _facts_of(tensor: FakeTensor) -> Iterator[object]:
    storage = tensor.untyped_storage()
    yield from (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device)
    yield from (tensor.requires_grad, tensor.layout, storage.nbytes(), torch._C._dispatch_key_set(tensor))
