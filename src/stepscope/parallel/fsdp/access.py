"""What a module gets when it reads its parameters, and what happens around its calls.

A module's own parameter table always lists what this rank trains: shards and vectors. `named_parameters` and optimizers
use that table. Reading a parameter by its name, as a forward pass does, returns the gathered one while the model is
computing. The read counts, not the module call, so a head that reads the embedding's weight works, and so does a module
that passes its weights to a function.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stepscope.parallel.fsdp.plan import Member
from stepscope.parallel.fsdp.runner import Runner, in_backward
from stepscope.parallel.fsdp.schedule import Use
from stepscope.parallel.fsdp.unit import ShardedUnit

Read = Callable[[], Tensor]


class ServedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters, some of which are created when they are read."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.reads: dict[str, Read] = {}

    def __getitem__(self, name: str) -> Any:
        read = self.reads.get(name)
        return super().__getitem__(name) if read is None else read()


def serve_unit(number: int, unit: ShardedUnit, runner: Runner) -> None:
    """Register shards in place of parameters."""
    for place in (place for flat in unit.flats for place in flat.places):
        read = partial(runner.serve, number, place)
        for site in place.sites:
            parameters = _served(site.module)
            parameters[site.attribute] = place.piece
            parameters.reads[site.attribute] = read


def serve_vectors(members: Sequence[Member], dtype: torch.dtype, runner: Runner) -> None:
    """Vectors stay in fp32 and are read in the compute dtype, differentiably."""
    for member in members:
        if not member.parameter.is_floating_point():
            continue
        for site in member.sites:
            _served(site.module).reads[site.attribute] = partial(_read_cast, member.parameter, dtype, runner)


def _read_cast(parameter: nn.Parameter, dtype: torch.dtype, runner: Runner) -> Tensor:
    return parameter.to(dtype) if runner.is_active else parameter


def _served(module: nn.Module) -> ServedParameters:
    if not isinstance(module._parameters, ServedParameters):
        module._parameters = ServedParameters(module._parameters)
    return module._parameters


def wrap_doors(units: Sequence[ShardedUnit], root: nn.Module, runner: Runner) -> None:
    """Every call of a door gathers its units. `forward` is replaced rather than hooked: code that wraps it later, to
    recompute it in backward, then also wraps the gathering.
    """
    order: list[Use] = []
    for part in root.modules():
        uses = [Use(number, unit.doors.index(part)) for number, unit in enumerate(units) if part in unit.doors]
        if uses:
            part.forward = _opened(part.forward, uses, runner)
            order += uses
    runner.assume_order(order)


def _opened(forward: Callable[..., Any], uses: Sequence[Use], runner: Runner) -> Callable[..., Any]:
    def run_opened(*args: Any, **kwargs: Any) -> Any:
        surrounding = runner.open_uses
        try:
            runner.open(uses)
            output = forward(*args, **kwargs)
        finally:
            runner.close(uses)
        runner.watch(output, uses, surrounding)
        return output

    return run_opened


def wrap_root(root: nn.Module, dtype: torch.dtype | None, runner: Runner) -> None:
    """A call of the whole model is a pass through the schedule."""
    forward = root.forward

    def run_pass(*args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        if in_backward():
            return forward(*args, **kwargs)
        try:
            runner.begin_forward()
            output = forward(*args, **kwargs)
            runner.end_forward(output)
        except BaseException:
            runner.abort()
            raise
        return output

    root.forward = run_pass


def _cast(value: object, dtype: torch.dtype) -> object:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
