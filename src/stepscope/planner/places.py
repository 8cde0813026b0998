"""Where the simulated program is: step, phase and module.

Modules are found by global hooks, so nothing is set on the model. In backward, an operator belongs to the module that
created its autograd node: a node has the number it got in the forward pass. What a checkpoint runs again is in its
module, as in the forward pass.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from stepscope.fast.weights import WorkingWeights

BUILD, FORWARD, BACKWARD, OPTIMIZER = "build", "forward", "backward", "optimizer"
LOSS = "(loss)"


class _Stack(local):
    """The open modules of a thread, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


class ProgramPlaces:
    """`step` is -1 before the first step. `phase` is the name of the running phase if the caller knows it; otherwise
    it follows from what autograd and the optimizer do. `models` and `optimizers` are those that ran, and `weights` the
    working weights of a program of `stepscope.fast`. `on_phase_start` is called with the name of a phase that the
    caller begins, `on_phase_end` when gradients are complete, and `on_recomputed` after a checkpoint has run a module
    again."""

    def __init__(self) -> None:
        self.step = -1
        self.phase: str | None = None
        self.models: dict[int, nn.Module] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.weights: WorkingWeights | None = None
        self.on_phase_start: Callable[[str], None] = lambda _: None
        self.on_phase_end: Callable[[], None] = lambda: None
        self.on_recomputed: Callable[[], None] = lambda: None
        self._updating = 0
        self._names: dict[int, str] = {}
        self._stack = _Stack()
        self._firsts: list[int] = []
        self._paths: list[str] = []

    def current_phase(self) -> str:
        if self.phase is not None:
            return self.phase
        if self.step < 0:
            return BUILD
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return OPTIMIZER if self._updating else FORWARD

    def current_module(self) -> str:
        if self._stack.names:
            return self._stack.names[-1]
        if torch._C._current_graph_task_id() == -1:
            return ""
        node = torch._C._current_autograd_node()
        at = bisect_right(self._firsts, node._sequence_nr()) - 1 if node is not None else -1
        return self._paths[at] if at >= 0 else ""

    @property
    def updates(self) -> bool:
        """Whether an optimizer's step runs."""
        return self._updating > 0

    @property
    def recomputes(self) -> bool:
        """Whether a checkpoint runs a module again."""
        return bool(self._stack.names) and torch._C._current_graph_task_id() != -1

    @contextmanager
    def watching(self, *, modules: bool = True) -> Iterator[None]:
        """Follow modules and optimizers within this context. The compiler would compile hooks of modules, too."""
        handles: list[Any] = []
        if modules:
            handles += [
                module_hooks.register_module_forward_pre_hook(self._enter),
                module_hooks.register_module_forward_hook(self._leave, always_call=True),
            ]
        handles += [
            optimizer_hooks.register_optimizer_step_pre_hook(self._begin_update),
            optimizer_hooks.register_optimizer_step_post_hook(self._end_update),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_step(self, number: int) -> None:
        self.step = number
        self._firsts.clear()
        self._paths.clear()

    def begin_phase(self, name: str) -> None:
        self.phase = name
        self.on_phase_start(name)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Attribute what runs within this context to `name`."""
        self._push(name)
        try:
            yield
        finally:
            self._pop()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if id(module) not in self._names:
            self.add_model(module)
        self._push(self._names[id(module)])

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack.names:
            self._pop()

    def add_model(self, root: nn.Module) -> None:
        """Name the modules of a model. One that was not added is named when it is called."""
        self.models[id(root)] = root
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name or f"({type(module).__name__})")

    def _push(self, name: str) -> None:
        self._stack.names.append(name)
        self._change()

    def _pop(self) -> None:
        recomputes = self.recomputes
        self._stack.names.pop()
        self._change()
        if recomputes and not self._stack.names:
            self.on_recomputed()

    def _change(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._firsts.append(torch._C._autograd._get_sequence_nr())
            self._paths.append(self._stack.names[-1] if self._stack.names else "")

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        self.on_phase_end()
        self._updating += 1

    def _end_update(self, *_: Any) -> None:
        self._updating -= 1
