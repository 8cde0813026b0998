"""How many tokens each expert of a mixture gets, noted in a step that nobody times.

A module of experts is called with the number of the experts of every token, in a tensor of integers. The calls only
keep these tensors; they are counted after the step, so the step launches nothing more than before.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stepscope.patches import is_compiled

_SIZES = ("num_experts", "num_local_experts", "n_routed_experts")
_MOST_CALLS = 64  # of one module in a step: micro-batches


@dataclass(slots=True)
class ExpertTokens:
    """The chosen experts of each call, by the path of the module that computes them."""

    _calls: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _experts: dict[str, int] = field(default_factory=dict)

    def see(self, path: str, module: nn.Module, arguments: Iterable[object]) -> None:
        chosen = next((one for one in arguments if _is_choice(one)), None)
        calls = self._calls.setdefault(path, [])
        if isinstance(chosen, torch.Tensor) and len(calls) < _MOST_CALLS:
            calls.append(chosen.detach())
            self._experts[path] = next((size for name in _SIZES if type(size := getattr(module, name, 0)) is int), 0)

    def count(self) -> dict[str, tuple[int, ...]]:
        """Tokens of each expert, by module. Waits for the device."""
        counted = {}
        for path, calls in self._calls.items():
            if calls:
                # Under expert parallelism, a number beyond the last one stands for an expert of another rank.
                known = self._experts[path] or None
                chosen = torch.cat([one.flatten() for one in calls]).long().cpu()
                counted[path] = tuple(torch.bincount(chosen, minlength=known or 0).tolist()[:known])
        return counted


def _is_choice(argument: object) -> bool:
    """Whether an argument has some experts for every token."""
    is_whole = isinstance(argument, torch.Tensor) and argument.dtype in (torch.int32, torch.int64)
    return is_whole and argument.dim() >= 2  # type: ignore[attr-defined]


def find_experts(named: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """The paths of modules that compute experts, by the id of the module. Empty for a model with compiled parts, which
    would be compiled again because of a hook."""
    modules = list(named)
    if any(is_compiled(module) for _, module in modules):
        return {}
    return {id(module): path for path, module in modules if "Experts" in type(module).__name__}


@contextmanager
def counting_tokens(experts: Mapping[int, str]) -> Iterator[ExpertTokens]:
    """Note the calls of these modules. The hook is global: a model that is saved meanwhile has no trace of it."""
    tokens = ExpertTokens()
    if not experts:  # PyTorch warns about a global hook when a compiled model is called
        yield tokens
        return

    def see(module: nn.Module, arguments: tuple[object, ...]) -> None:
        if path := experts.get(id(module)):
            tokens.see(path, module, arguments)

    handle = register_module_forward_pre_hook(see)
    try:
        yield tokens
    finally:
        handle.remove()
