"""Events of a loop, as PyTorch shows them, and nothing left behind."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from stepscope.loop.watch import LoopWatch
from tests.cpu.loop.loops import make_loader, make_model, train_step, unchanged

HOLDERS: tuple[Any, ...] = (torch.autograd, dataloader._BaseDataLoaderIter, Optimizer, torch.amp.GradScaler)


class Listening:
    """Keeps the names of all events, except those between operators."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gaps = 0
        self.times_ns: list[int] = []
        self.on_step: Callable[[], object] = lambda: None

    def optimizer_stepped(self, optimizer: Optimizer, took_ns: int) -> None:
        self._add(type(optimizer).__name__, took_ns)
        self.on_step()

    def scaler_used(self) -> None:
        self._add("scaler")

    def step_skipped(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        self._add("skipped")

    def gradients_cleared(self) -> None:
        self._add("cleared")

    def backward_ran(self, took_ns: int) -> None:
        self._add("backward", took_ns)

    def batch_requested(self, iterator: Any) -> None:  # noqa: ARG002
        self._add("requested")

    def between_operators(self) -> None:
        self.gaps += 1

    def batch_received(self, took_ns: int) -> None:
        self._add("received", took_ns)

    def _add(self, name: str, took_ns: int = 1) -> None:
        self.events.append(name)
        self.times_ns.append(took_ns)


@contextmanager
def watching() -> Iterator[tuple[Listening, LoopWatch]]:
    listening = Listening()
    watch = LoopWatch(listening)
    watch.install()
    try:
        yield listening, watch
    finally:
        watch.uninstall()


def global_hooks() -> list[dict[int, Any]]:
    return [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]


def test_a_step_is_seen_in_order() -> None:
    model, optimizer = make_model()
    with watching() as (listening, _):
        for (batch,) in make_loader(batches=1):
            train_step(model, optimizer, batch)
    step = ["requested", "received", "backward", "SGD", "cleared"]
    assert listening.events == [*step, "requested", "received"]  # the end of the loader is a request, too
    assert all(took_ns > 0 for took_ns in listening.times_ns)
    assert listening.gaps == 4  # before both requests, backward and zero_grad


def test_nothing_is_left_behind() -> None:
    model, optimizer = make_model()
    hooks = [list(one.values()) for one in global_hooks()]
    with unchanged(*HOLDERS, type(optimizer), *model.modules()):
        with watching() as (listening, _):
            assert torch.autograd.backward.__module__ == "torch.autograd"  # it also looks like the original
            assert [list(one.values()) for one in global_hooks()] != hooks
            train_step(model, optimizer)
        assert [list(one.values()) for one in global_hooks()] == hooks
    seen = len(listening.events)
    train_step(model, optimizer)
    assert len(listening.events) == seen


def test_hooks_are_not_removed_while_pytorch_iterates_over_them() -> None:
    """The recording ends inside a hook. Another hook after ours would make the removal an error, so ours stay until the
    next backward pass."""
    model, optimizer = make_model()
    hooks = [list(one.values()) for one in global_hooks()]
    called = []
    with unchanged(*HOLDERS), watching() as (listening, watch):
        listening.on_step = watch.uninstall
        other = register_optimizer_step_post_hook(lambda *_: called.append(1))
        try:
            train_step(model, optimizer)
            train_step(model, optimizer)
        finally:
            other.remove()
        assert called == [1, 1]
        assert listening.events == ["backward", "SGD"]
        assert [list(one.values()) for one in global_hooks()] == hooks
        assert "_watch" not in torch.autograd.backward.__qualname__


def test_a_forked_child_reports_nothing() -> None:
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    model, optimizer = make_model()
    with watching() as (listening, _):
        train_step(model, optimizer)
        seen = list(listening.events)
        child = os.fork()
        if child == 0:
            train_step(model, optimizer)
            os._exit(0 if listening.events == seen else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_only_the_thread_whose_optimizer_steps_first_counts() -> None:
    model, optimizer = make_model()
    with watching() as (listening, _):
        train_step(model, optimizer)
        seen = list(listening.events)
        other = threading.Thread(target=lambda: train_step(*make_model()))
        other.start()
        other.join()
        assert listening.events == seen
        train_step(model, optimizer)
        assert listening.events == seen * 2


def test_a_skipped_step_of_a_scaler_is_reported() -> None:
    model, optimizer = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watching() as (listening, _):
        for factor in (1.0, float("inf")):
            scaler.scale(model(torch.randn(2, 4)).mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert listening.events == ["backward", "scaler", "SGD", "cleared", "backward", "scaler", "skipped", "cleared"]


def test_gradients_that_the_model_clears_are_reported() -> None:
    """As in a loop whose optimizer does not derive from PyTorch's."""
    model, _ = make_model()
    with watching() as (listening, _):
        for _ in range(2):
            model(torch.randn(2, 4)).mean().backward()
            model.zero_grad()
    assert listening.events == ["backward", "cleared"] * 2


def test_inside_an_optimizer_step_there_is_no_gap() -> None:
    """LBFGS runs forward and backward passes inside its step: no profiler may start or stop there."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with watching() as (listening, _):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        assert listening.gaps == 0
        assert listening.events[-1] == "LBFGS"
        assert listening.events.count("backward") >= 2
        closure()
        assert listening.gaps == 2


def test_errors_of_the_loop_pass_through() -> None:
    model, optimizer = make_model()
    with watching() as (listening, _):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).backward()  # type: ignore[no-untyped-call]
        assert listening.events == []
        train_step(model, optimizer)  # still watched, and still between operators
        assert listening.gaps == 3


def test_a_compiled_optimizer_step_works() -> None:
    """Its hooks are compiled, too: they must do nothing there, and graph breaks in them must not fail."""
    model, optimizer = make_model()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    step: Callable[[], Any] = torch.compile(optimizer.step, backend="eager")
    try:
        with watching() as (listening, _):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                step()
                optimizer.zero_grad()
    finally:
        torch._dynamo.reset()
    assert listening.events == ["backward", "cleared"] * 3
    assert all(not torch.equal(*pair) for pair in zip(expected, model.parameters(), strict=True))
