"""Watches a training loop through PyTorch itself, so that it works with any library on top.

These are the only changes to PyTorch while steps are not recorded, and each costs about a microsecond per call: global
hooks of `torch.optim`, `torch.autograd.backward`, the iterators of DataLoaders, `zero_grad`, and `GradScaler.step`,
which skips the optimizer if gradients overflowed. `uninstall` removes all of them.

Only the process and the thread that trains count: a forked worker inherits the hooks, and must not report anything.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from stepscope.annotate import Close, open_range
from stepscope.patches import replace_attribute


class Listener(Protocol):
    """Receives the events of a loop, with the nanoseconds that each took."""

    def optimizer_stepped(self, optimizer: Optimizer, took_ns: int) -> None: ...

    def scaler_used(self) -> None: ...

    def step_skipped(self, optimizer: Optimizer) -> None:
        """A GradScaler found gradients that are not finite."""

    def gradients_cleared(self) -> None: ...

    def backward_ran(self, took_ns: int) -> None: ...

    def batch_requested(self, iterator: Any) -> None: ...

    def between_operators(self) -> None:
        """Nothing of PyTorch is running in this thread: a profiler may start or stop here."""

    def batch_received(self, took_ns: int) -> None: ...


class LoopWatch:
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._process = os.getpid()
        self._thread: int | None = None
        self._undo = ExitStack()
        self._began_ns = 0
        self._scaled_steps: list[int] = []  # per open GradScaler.step: how often the optimizer stepped inside
        self._is_in_hook = self._is_expired = False
        self._close_step: Close = lambda: None
        self._depth = 0  # of backward passes and optimizer steps that are running

    def install(self) -> None:
        undo = self._undo
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        replace_attribute(torch.autograd, "backward", self._watch_backward(torch.autograd.backward), undo)
        iterators = dataloader._BaseDataLoaderIter
        replace_attribute(iterators, "__next__", self._watch_next(iterators.__next__), undo)
        for holder in (Optimizer, nn.Module):
            replace_attribute(holder, "zero_grad", self._watch_clearing(holder.zero_grad), undo)
        scaler: Any = torch.amp.GradScaler
        replace_attribute(scaler, "step", self._watch_scaler(scaler.step), undo)

    def uninstall(self) -> None:
        """Remove all hooks. PyTorch is iterating over them while one runs: then they stay, and do nothing, until the
        next backward pass removes them."""
        self._is_expired = True
        if not self._is_in_hook:
            self._undo.close()

    def _is_here(self) -> bool:
        """Whether this is the thread that trains: the one whose optimizer steps first, once it has."""
        if torch.compiler.is_dynamo_compiling() or self._is_expired or os.getpid() != self._process:
            return False
        return self._thread is None or threading.get_ident() == self._thread

    def _come_between(self) -> None:
        if not self._depth:
            self._listener.between_operators()

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_here():
            self._depth += 1
            self._close_step = open_range("phase:optimizer")
            self._began_ns = time.perf_counter_ns()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_here():
            self._thread = threading.get_ident()
            self._depth = max(0, self._depth - 1)
            self._close_step()
            if self._scaled_steps:
                self._scaled_steps[-1] += 1
            self._is_in_hook = True
            try:
                self._listener.optimizer_stepped(optimizer, time.perf_counter_ns() - self._began_ns)
            finally:
                self._is_in_hook = False

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._is_expired:
                self._undo.close()
            if not self._is_here():
                return original(*args, **kwargs)
            self._come_between()
            began_ns = time.perf_counter_ns()
            close = open_range("phase:backward")
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth = max(0, self._depth - 1)
                close()
            self._listener.backward_ran(time.perf_counter_ns() - began_ns)
            return result

        return backward

    def _watch_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def __next__(iterator: Any) -> Any:  # noqa: N807  # its name in traces
            if not self._is_here():
                return original(iterator)
            self._come_between()
            self._listener.batch_requested(iterator)
            began_ns = time.perf_counter_ns()
            close = open_range("phase:input")
            try:
                return original(iterator)
            finally:
                close()
                self._listener.batch_received(time.perf_counter_ns() - began_ns)

        return __next__

    def _watch_clearing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if self._is_here():
                self._come_between()
            result = original(*args, **kwargs)
            if self._is_here():
                self._listener.gradients_cleared()
            return result

        return zero_grad

    def _watch_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._is_here():
                return original(scaler, optimizer, *args, **kwargs)
            self._listener.scaler_used()
            self._scaled_steps.append(0)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                stepped = self._scaled_steps.pop()
            if not stepped:
                self._listener.step_skipped(optimizer)
            return result

        return step
