"""Values of fake tensors that follow from the program alone: masks, positions and the like.

A program may ask whether a mask hides anything, and take another path if it does. So small tensors that were made from
constants, or from random tokens, keep their values in a real tensor on the CPU, and every operator on known values is
computed there as well. A tensor that gets a value from weights or activations is unknown from then on.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map, tree_map_only

from stepscope.planner.operation import find_tensors

aten = torch.ops.aten
MOST_INTEGERS, MOST_FLOATS = 1 << 22, 1 << 16  # elements of a tensor whose values are kept
_NAME = "_stepscope_value"
# Operators without tensors as inputs whose results have a value. Others are uninitialized.
_FACTORIES = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.scalar_tensor.default,
        aten.linspace.default,
        aten.randint.default,
        aten.randint.low,
        aten.eye.default,
        aten.tril_indices.default,
        aten.triu_indices.default,
    }
)
_UNINITIALIZED = frozenset({aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default})


class KnownValues:
    """The values of live fake tensors. They are attributes of the tensors; `_spoiled` are storages that were written
    with unknown values since."""

    def __init__(self) -> None:
        self._spoiled: set[int] = set()

    def of(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor on the CPU, None if it is unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: Tensor | None = vars(tensor).get(_NAME)
        if value is None or tensor.untyped_storage()._cdata in self._spoiled:
            return tensor.constant
        return value

    def forget(self, storage: int) -> None:
        """A storage is gone, and its address may be used again."""
        self._spoiled.discard(storage)

    def compute(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[bool, Any]:
        """Whether the inputs of an operator are known, and its result on the CPU."""
        if func in _UNINITIALIZED or any(self.of(one) is None for one in inputs):
            return False, None
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with unset_fake_temporarily():
            try:
                return True, func(*args, **kwargs)
            except RuntimeError:  # an operator that the CPU does not have
                return False, None

    def follow(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Compute the values of an operator's results, if those of its inputs are known."""
        if not inputs and func not in _FACTORIES:
            return
        is_known = all(self.of(one) is not None for one in inputs)
        if not is_known or not all(map(_is_small, outputs)) or not all(map(_is_small, inputs)):
            self._spoil(func, args, kwargs)
            return
        computed, result = self.compute(func, args, kwargs, inputs)
        values = find_tensors(result)
        if computed and len(values) == len(outputs):
            for tensor, value in zip(outputs, values, strict=True):
                self.set(tensor, value)
        else:
            self._spoil(func, args, kwargs)

    def set(self, tensor: Tensor, value: Tensor) -> None:
        if isinstance(tensor, FakeTensor) and tensor.shape == value.shape:
            setattr(tensor, _NAME, value)

    def answer(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[bool, Any]:
        """The result of an operator whose shape or value depends on data, as fake tensors, if the data are known."""
        computed, result = self.compute(func, args, kwargs, inputs)
        if not computed:
            return False, None
        device = next(one.fake_device for one in inputs if isinstance(one, FakeTensor))

        def imitate(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            self.set(fake, value)
            return fake

        return True, tree_map(imitate, result)

    def _spoil(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in _written(func, args, kwargs):
            if isinstance(tensor, FakeTensor) and _NAME in vars(tensor):
                self._spoiled.add(tensor.untyped_storage()._cdata)


def _is_small(tensor: Tensor) -> bool:
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MOST_FLOATS if is_float else MOST_INTEGERS)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that an operator writes to."""
    if not func._schema.is_mutable:
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from find_tensors(value)
