"""Working weights: low-precision copies of the matrices of a model, which the optimizer keeps up to date.

Autocast casts every matrix in every step, and casts its gradient back. A working weight is the same bf16 matrix, kept
between steps: forward reads it, backward leaves a bf16 gradient at it, and the optimizer writes it together with the
fp32 parameter. The arithmetic is that of autocast. The module keeps its fp32 parameters, so its state dict does not
change.

Matrices that multiply the same input are stored one after another, so that one GEMM can read them all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Leaf(NamedTuple):
    """A tensor that forward reads and autograd differentiates: the working weight of one parameter, or of several that
    are stacked along their first dimension."""

    tensor: Tensor
    parameters: tuple[nn.Parameter, ...]

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """The slices of a tensor of this leaf's shape that belong to each parameter."""
        parts: Sequence[Tensor] = torch.split(whole, [parameter.shape[0] for parameter in self.parameters])
        return parts

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        (part,) = (part for one, part in zip(self.parameters, self.parts(whole), strict=True) if one is parameter)
        return part


class WorkingWeights:
    """The leaves of a model. Parameters that have none are their own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.names = {parameter: name for name, parameter in parameters.items()}
        self._leaves: dict[tuple[nn.Parameter, ...], Leaf] = {}
        self._leaf_of: dict[nn.Parameter, Leaf] = {}
        self._versions: list[int] = []

    def can_hold(self, parameters: tuple[nn.Parameter, ...]) -> bool:
        """Whether these parameters have this leaf already, or none at all. Another graph may have merged them
        differently."""
        return parameters in self._leaves or not any(one in self._leaf_of for one in parameters)

    def leaf(self, parameters: tuple[nn.Parameter, ...], dtype: torch.dtype) -> Tensor:
        """The leaf of these parameters, created on first use."""
        if parameters not in self._leaves:
            taken = [self.names[one] for one in parameters if one in self._leaf_of]
            assert not taken, f"{taken} already have another working weight"
            stacked = torch.cat([one.detach() for one in parameters]).to(dtype)
            leaf = Leaf(stacked, parameters)
            self._leaves[parameters] = leaf
            self._leaf_of |= dict.fromkeys(parameters, leaf)
        tensor = self._leaves[parameters].tensor
        return tensor.requires_grad_(parameters[0].requires_grad)  # someone may have frozen them since

    def copy_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The working weight of a parameter, a slice of its leaf; None if forward reads the parameter itself."""
        leaf = self._leaf_of.get(parameter)
        if leaf is None:
            return None
        return leaf.part_of(parameter, leaf.tensor.detach())

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        leaf = self._leaf_of.get(parameter)
        if leaf is None or leaf.tensor.grad is None:
            return parameter.grad
        return leaf.part_of(parameter, leaf.tensor.grad)

    def join_gradients(self) -> None:
        """Add gradients at parameters to those at their leaves. A model that is traced in several graphs may read the
        working weight in one and the parameter in another."""
        for parameter, leaf in self._leaf_of.items():
            if parameter.grad is not None and leaf.tensor.grad is not None:
                leaf.part_of(parameter, leaf.tensor.grad).add_(parameter.grad)
                parameter.grad = None

    def forget_gradients(self) -> None:
        for parameter in self.names:
            parameter.grad = None
        for leaf in self._leaves.values():
            leaf.tensor.grad = None

    def refresh(self) -> None:
        """Copy the parameters into the working weights, after something else than the optimizer has changed them."""
        with torch.no_grad():
            for leaf in self._leaves.values():
                for part, parameter in zip(leaf.parts(leaf.tensor), leaf.parameters, strict=True):
                    part.copy_(parameter)
        self._versions = list(self._current_versions())

    def refresh_if_changed(self) -> None:
        """The optimizer's kernel writes parameters without autograd's version counters, everything else with them."""
        if self._leaves and self._versions != list(self._current_versions()):
            self.refresh()

    def _current_versions(self) -> Iterator[int]:
        return (parameter._version for parameter in self._leaf_of)

    @property
    def merged(self) -> list[tuple[str, ...]]:
        """The names of parameters that share a leaf."""
        shared = (leaf for leaf in self._leaves.values() if len(leaf.parameters) > 1)
        return [tuple(self.names[one] for one in leaf.parameters) for leaf in shared]

    @property
    def count(self) -> int:
        """The number of parameters with a working weight."""
        return len(self._leaf_of)
