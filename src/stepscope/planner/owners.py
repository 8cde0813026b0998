"""Whose memory an allocation is: a parameter's, a gradient's, the optimizer's, or an activation's.

Parameters, gradients and optimizer state are looked up by the storages of the tensors that the model and its optimizers
hold, at the moments when they hold them. Everything else follows from when it was made and how long it lived.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stepscope.planner.places import BUILD, FORWARD, ProgramPlaces
from stepscope.planner.tracking import CPU, WORKSPACE, SimulatedAllocation, Tracker


class Owner(NamedTuple):
    """The category of an allocation, and the parameter that it belongs to; empty if it belongs to none."""

    category: str
    parameter: str = ""

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]


class MemoryOwners:
    """The owners of allocations by their number. `note` looks at what is held now."""

    def __init__(self, tracker: Tracker, places: ProgramPlaces) -> None:
        self.known: dict[int, Owner] = {}
        self._tracker, self._places = tracker, places
        self._names: dict[int, str] = {}
        self._roots: set[int] = set()

    def note(self) -> None:
        for root in self._places.models.values():
            if id(root) not in self._roots:
                self._roots.add(id(root))
                self._names.update((id(one), name) for name, one in root.named_parameters(remove_duplicate=True))
        for parameter in self._parameters():
            name = self._names.get(id(parameter), "")
            self._set(parameter, Owner("parameters", name))
            if parameter.grad is not None:
                self._set(parameter.grad, Owner("gradients", name))
        self._note_working_weights()
        for optimizer in self._places.optimizers.values():
            for held, state in optimizer.state.items():
                for value in _tensors(state.values()):
                    self._set(value, Owner("optimizer state", self._names.get(id(held), "")))

    def _note_working_weights(self) -> None:
        if (weights := self._places.weights) is None:
            return
        for parameter, name in weights.names.items():
            for held, category in (
                (weights.copy_of(parameter), "autocast copies"),
                (weights.gradient_of(parameter), "gradients"),
            ):
                if held is not None:
                    self._set(held, Owner(category, name))

    def _parameters(self) -> Iterator[nn.Parameter]:
        for root in self._places.models.values():
            yield from root.parameters()
        for optimizer in self._places.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _set(self, tensor: Tensor, owner: Owner) -> None:
        number = self._tracker.number_of(tensor)
        if number != CPU:
            self.known.setdefault(number, owner)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def find_owner(
    number: int, allocation: SimulatedAllocation, known: dict[int, Owner], *, outlives_forward: bool
) -> Owner:
    """The owner of an allocation. One that a forward pass made and that is still there afterwards is an activation,
    also if the forward pass is the repeated one of a checkpoint."""
    if number in known:
        return known[number]
    if allocation.operator == WORKSPACE or allocation.is_temporary:
        return Owner("workspaces")
    if allocation.phase == BUILD:
        return Owner("other")
    source = known.get(allocation.source)
    if source is not None and source.category == "parameters":
        return Owner("autocast copies", source.parameter)
    is_forward = allocation.phase == FORWARD or allocation.is_recomputed
    return Owner("activations" if is_forward and outlives_forward else "temporaries")
