"""A training step as a program: forward with the loss, backward and update, traced, rewritten, compiled and captured as
its settings say.

The module and the optimizer stay what they are: parameters and state are updated in place, so that saving, evaluating
and schedules of the learning rate work as before.
"""

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.fast.capture import CannotCapture, Part, Phase, capture
from stepscope.fast.rewrites import Rewrites
from stepscope.fast.tracing import RewritingBackend, compile_code
from stepscope.fast.update import OneLaunchUpdate
from stepscope.fast.weights import WorkingWeights
from stepscope.kernels.accumulation import Accumulator

LossOf = Callable[[Any], Tensor]  # the loss of a batch
_numbers = itertools.count()
_LOGGING = (logging.Logger.debug, logging.Logger.info, logging.Logger.warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a program changes about a step. `compiler` is a backend of `torch.compile`."""

    compiler: str | None = None
    rewrites: Rewrites = field(default_factory=Rewrites)
    one_launch: bool = False
    graph: bool = False


class Program:
    """The phases of a step over fixed batches, one per pass, whose tensors are filled anew for every step."""

    def __init__(
        self,
        *,
        module: nn.Module,
        loss_of: LossOf,
        batches: Sequence[Any],
        optimizer: torch.optim.Optimizer | None,
        autocast: torch.dtype | None,
        device: torch.device,
        changes: Changes,
        max_norm: float | None = None,
        weights: WorkingWeights | None = None,
    ) -> None:
        assert changes.one_launch or not changes.rewrites.working_weights, "only our optimizer updates working weights"
        self.module, self.optimizer, self.device, self.changes = module, optimizer, device, changes
        self._batches, self._dtype, self._max_norm = batches, autocast, max_norm
        self.weights = weights or WorkingWeights(name_parameters(module, optimizer))
        self.backend = RewritingBackend(changes.rewrites, self.weights, dtype=autocast, compiler=changes.compiler)
        is_traced = changes.compiler is not None or changes.rewrites != Rewrites()
        self._loss_of = loss_of
        if is_traced:
            self._loss_of = without_logging(compile_code(_with_own_code(loss_of), self.backend))
        self.losses: list[Tensor] = []
        self._captured_gradients: dict[nn.Parameter, Tensor] | None = None
        self._update: OneLaunchUpdate | None = None
        if optimizer is not None and changes.one_launch:
            self._update = OneLaunchUpdate(optimizer, self.weights, max_norm=max_norm)
        self._sums = GradientSums() if self._update is not None and len(batches) > 1 else None
        self.phases: tuple[Phase, ...] = self._between([(part.name, part.run) for part in self._parts()])

    @property
    def passes(self) -> int:
        return len(self._batches)

    def capture(self) -> None:
        """Replace the phases by CUDA graphs of them. An optimizer other than ours stays outside."""
        parts = self._parts()
        inside = parts if self._update is not None else [part for part in parts if part.name != "optimizer"]
        try:
            with _saved_state(self.module, self.device):
                phases = list(capture(inside, self.device))
        except CannotCapture:
            self.losses = []  # with them goes what autograd recorded on another stream
            raise
        self._captured_gradients = self._captured_gradients or self._leaf_gradients()
        if len(inside) < len(parts):
            phases.append(("optimizer", self._step_optimizer))
        self.phases = self._between(phases)

    def release(self) -> None:
        """Replace the graphs by what was captured, and free their memory."""
        self.phases = self._between([(part.name, part.run) for part in self._parts()])
        self._captured_gradients = None
        self.losses = []
        self.weights.forget_gradients()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm of the last gradients before they were clipped, if our optimizer clips them."""
        return None if self._update is None else self._update.gradient_norm

    def differentiate(self) -> dict[nn.Parameter, Tensor]:
        """Run forward and backward without an update, and return the gradients."""
        for name, phase in self._bare_phases:
            if name != "optimizer":
                phase()
        return self.gradients()

    def run(self) -> None:
        for _, phase in self.phases:
            phase()

    def announce_step(self) -> None:
        """Tell those who watch the optimizer that it has stepped, if our kernel did it instead."""
        if self._update is not None:
            self._update.announce_step()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradients that backward left, of all passes together, by parameter."""
        if self._sums is not None:
            return self._sums.sums
        return self._leaf_gradients() if self._captured_gradients is None else self._captured_gradients

    def _leaf_gradients(self) -> dict[nn.Parameter, Tensor]:
        found = ((parameter, self.weights.gradient_of(parameter)) for parameter in self.weights.names)
        return {parameter: gradient for parameter, gradient in found if gradient is not None}

    def _begin(self, phase: Callable[[], None]) -> None:
        """Before a step, the CPU looks for what others have changed: hyperparameters and weights. Graphs write
        gradients to memory of their own, where an optimizer outside must find them."""
        if self._update is not None:
            self._update.follow_optimizer()
        elif self._captured_gradients is not None:
            for parameter, gradient in self._captured_gradients.items():
                parameter.grad = gradient
        self.weights.refresh_if_changed()
        phase()

    def _end(self, phase: Callable[[], None]) -> None:
        phase()
        if self._update is not None:
            self._update.count_step()

    def _between(self, phases: Sequence[Phase]) -> tuple[Phase, ...]:
        self._bare_phases = tuple(phases)
        (first_name, first), *others, (last_name, last) = phases
        return (first_name, partial(self._begin, first)), *others, (last_name, partial(self._end, last))

    def _parts(self) -> list[Part]:
        parts = []
        for number in range(self.passes):
            parts.append(Part("forward", partial(self._forward, number)))
            parts.append(Part("backward", partial(self._backward, number)))
            if self._sums is not None:
                parts.append(
                    Part("backward", partial(self._add_gradients, number), partial(self._prepare_sums, number))
                )
        if self.optimizer is not None:
            if self._update is None:
                parts.append(Part("optimizer", self._finish))
            else:
                parts.append(Part("optimizer", self._finish, self._prepare_update, self._update.warm_up))
        return parts

    def _forward(self, number: int) -> None:
        if number == 0:
            self.losses = []
            self.weights.forget_gradients()  # while a graph is captured, backward must not add to earlier ones
        with self._autocast():
            self.losses.append(self._loss_of(self._batches[number]))

    def _backward(self, number: int) -> None:
        loss = self.losses[number]
        (loss / self.passes if self.passes > 1 else loss).backward()  # type: ignore[no-untyped-call]
        self.losses[number] = loss.detach()
        self.weights.join_gradients()

    def _prepare_sums(self, number: int) -> None:
        assert self._sums is not None
        self._sums.bind(number, self._leaf_gradients())

    def _add_gradients(self, number: int) -> None:
        self._prepare_sums(number)
        assert self._sums is not None
        self._sums.add(number, self._leaf_gradients())
        self.weights.forget_gradients()

    def _prepare_update(self) -> None:
        assert self._update is not None
        self._update.bind(self._leaf_gradients() if self._sums is None else self._sums.sums)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._captured_gradients = self._leaf_gradients()  # they keep their memory in the pool

    def _finish(self) -> None:
        if self._update is not None:
            self._prepare_update()
            self._update.launch()
        else:
            self._step_optimizer()
        self.weights.forget_gradients()

    def _step_optimizer(self) -> None:
        assert self.optimizer is not None
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm)
        self.optimizer.step()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, dtype=self._dtype)


def name_parameters(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, nn.Parameter]:
    """All parameters of a step: the module's, and what else the optimizer updates, such as those of the loss."""
    named = dict(module.named_parameters())
    known = set(named.values())
    groups = [] if optimizer is None else optimizer.param_groups
    others = [one for group in groups for one in group["params"] if one not in known]
    return named | {f"optimizer.{number}": one for number, one in enumerate(others)}


def _with_own_code(function: LossOf) -> LossOf:
    """The function with a code object of its own. `torch.compile` counts compilations per code object, and after a few
    it silently runs the function as it is; a process may build many programs."""

    def compute_loss(batch: Any) -> Tensor:
        return function(batch)

    code = compute_loss.__code__.replace(co_name=f"compute_loss_{next(_numbers)}")
    return FunctionType(code, globals(), code.co_name, None, compute_loss.__closure__)


def without_logging(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function. While it is traced, calls of loggers are left out: each would split the graph, and models
    of `transformers` warn about their config in forward. PyTorch 2.11 cannot sort that set of functions for its own
    statistics, and would print the error."""
    statistics = logging.getLogger("torch._dynamo.metrics_context")

    def run(*args: Any, **kwargs: Any) -> Any:
        statistics.addFilter(_is_not_about_statistics)
        try:
            with torch._dynamo.config.patch(ignore_logger_methods={*_LOGGING, *_transformers_logging()}):
                return function(*args, **kwargs)
        finally:
            statistics.removeFilter(_is_not_about_statistics)

    return run


def _is_not_about_statistics(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], TypeError) and "metrics" in record.getMessage())


def _transformers_logging() -> Iterator[Any]:
    """The methods that `transformers` adds to loggers, if it is loaded."""
    return (getattr(logging.Logger, name) for name in ("warning_once", "info_once") if hasattr(logging.Logger, name))


@contextmanager
def _saved_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore what runs before a capture change: random numbers and buffers."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng([device]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class GradientSums:
    """The sums of gradients over the passes of a step, in fp32, as those of autocast are. Gradients of each pass have
    their own addresses."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._accumulators: list[Accumulator] = []

    def bind(self, number: int, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        self._parameters = self._parameters or list(gradients)
        shapes, device = [one.shape for one in self._parameters], self._parameters[0].device
        while len(self._accumulators) <= number:
            first = self._accumulators[0] if self._accumulators else None
            self._accumulators.append(Accumulator(shapes, device=device, shares=first))
        self._accumulators[number].bind([gradients[one] for one in self._parameters])

    def add(self, number: int, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        found = [gradients[one] for one in self._parameters]
        self._accumulators[number].add(found, overwrite=number == 0)

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        return dict(zip(self._parameters, self._accumulators[0].sums, strict=True))
