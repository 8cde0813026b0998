"""An operation as the simulation saw it: the input of the time model."""

from typing import Any

import msgspec
import torch
from torch import Tensor

Argument = bool | int | float | str | tuple[int, ...] | None


class TensorFacts(msgspec.Struct, frozen=True):
    """A tensor of an operation. Views of the same memory have the same `storage`; -1 is memory of the CPU."""

    shape: tuple[int, ...]
    dtype: str
    contiguous: bool
    storage: int


class Operation(msgspec.Struct, frozen=True):
    """One operator below autograd and autocast. `inputs` and `outputs` are flat, and include the members of lists, as
    `foreach` operators take them. `module` is the innermost module, also in backward; empty outside modules."""

    name: str
    phase: str
    module: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    arguments: dict[str, Argument]


def find_tensors(value: object) -> list[Tensor]:
    """All tensors of an argument or a result, in order, also those in lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in find_tensors(one)]
    return find_tensors(list(value.values())) if isinstance(value, dict) else []


def facts_of(tensor: Tensor, storage: int) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.is_contiguous(), storage)


def scalars_of(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Argument]:
    """The arguments other than tensors, by their names in the operator's schema."""
    found: dict[str, Argument] = {}
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        _add(found, argument.name, value)
    for name, value in kwargs.items():
        _add(found, name, value)
    return found


def _add(found: dict[str, Argument], name: str, value: object) -> None:
    if isinstance(value, bool | int | float | str) or value is None:
        found[name] = value
    elif isinstance(value, torch.dtype):
        found[name] = str(value).removeprefix("torch.")
    elif isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
        found[name] = tuple(int(one) for one in value)
