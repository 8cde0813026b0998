"""A training step as a program: forward with the loss, backward, update; traced, rewritten, compiled and captured as its
settings say.

The module and the optimizer stay what they are: parameters and state are updated in place, so that saving, evaluating
and schedules of the learning rate work as before.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.fast.capture import Part, Phase, capture
from stepscope.fast.rewrites import Rewrites
from stepscope.fast.tracing import RewritingBackend
from stepscope.fast.update import OneLaunchUpdate
from stepscope.fast.weights import WorkingWeights
from stepscope.kernels.accumulation import Accumulator

LossOf = Callable[[Any], Tensor]  # the loss of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a program changes about a step. `compiler` is a backend of `torch.compile`."""

    compiler: str | None = None
    rewrites: Rewrites = Rewrites()
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
    ) -> None:
        assert changes.one_launch or not changes.rewrites.working_weights, "only our optimizer updates working weights"
        self.module, self.optimizer, self.device, self.changes = module, optimizer, device, changes
        self._batches, self._dtype, self._max_norm = batches, autocast, max_norm
        self.weights = WorkingWeights(dict(module.named_parameters()))
        self.backend = RewritingBackend(changes.rewrites, self.weights, dtype=autocast, compiler=changes.compiler)
        is_traced = changes.compiler is not None or changes.rewrites != Rewrites()
        self._loss_of = torch.compile(loss_of, backend=self.backend, dynamic=False) if is_traced else loss_of
        self.losses: list[Tensor] = []
        self._update: OneLaunchUpdate | None = None
        if optimizer is not None and changes.one_launch:
            self._update = OneLaunchUpdate(optimizer, self.weights, max_norm=max_norm)
        self._sums = GradientSums() if self._update is not None and len(batches) > 1 else None
        self.phases: tuple[Phase, ...] = self._after_begin([(part.name, part.run) for part in self._parts()])

    @property
    def passes(self) -> int:
        return len(self._batches)

    def capture(self) -> None:
        """Replace the phases by CUDA graphs of them. The weights change, because a few steps run first. An optimizer
        other than ours stays outside."""
        parts = self._parts()
        inside = parts if self._update is not None else [part for part in parts if part.name != "optimizer"]
        phases = list(capture(inside, self.device))
        if len(inside) < len(parts):
            phases.append(("optimizer", self._step_optimizer))
        self.phases = self._after_begin(phases)

    def run(self) -> None:
        for _, phase in self.phases:
            phase()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradients that backward left, of all passes together, by parameter."""
        return self._leaf_gradients() if self._sums is None else self._sums.sums

    def _leaf_gradients(self) -> dict[nn.Parameter, Tensor]:
        found = ((parameter, self.weights.gradient_of(parameter)) for parameter in self.weights.names)
        return {parameter: gradient for parameter, gradient in found if gradient is not None}

    def _begin(self, phase: Callable[[], None]) -> None:
        """Before a step, the CPU looks for what others have changed: hyperparameters and weights."""
        if self._update is not None:
            self._update.follow_schedule()
            self._update.steps += 1
        self.weights.refresh_if_changed()
        phase()

    def _after_begin(self, phases: Sequence[Phase]) -> tuple[Phase, ...]:
        (name, first), *others = phases
        return (name, partial(self._begin, first)), *others

    def _parts(self) -> list[Part]:
        parts = []
        for number in range(self.passes):
            parts.append(Part("forward", partial(self._forward, number)))
            if self.optimizer is None:
                continue
            parts.append(Part("backward", partial(self._backward, number)))
            if self._sums is not None:
                parts.append(Part("backward", partial(self._add_gradients, number), self._prepare_sums))
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

    def _prepare_sums(self) -> None:
        assert self._sums is not None
        self._sums.bind(self._leaf_gradients())

    def _add_gradients(self, number: int) -> None:
        self._prepare_sums()
        assert self._sums is not None
        self._sums.add(self._leaf_gradients(), is_first=number == 0)
        self.weights.forget_gradients()

    def _prepare_update(self) -> None:
        assert self._update is not None
        self._update.bind(self.gradients())

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


class GradientSums:
    """The sums of gradients over the passes of a step, in fp32, as those of autocast are."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._accumulator: Accumulator | None = None

    def bind(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        if self._accumulator is None:
            self._parameters = list(gradients)
            device = self._parameters[0].device
            self._accumulator = Accumulator([one.shape for one in self._parameters], device=device)
        self._accumulator.bind([gradients[one] for one in self._parameters])

    def add(self, gradients: Mapping[nn.Parameter, Tensor], *, is_first: bool) -> None:
        assert self._accumulator is not None, "gradients are bound first"
        self._accumulator.add([gradients[one] for one in self._parameters], overwrite=is_first)

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        assert self._accumulator is not None, "gradients are added first"
        return dict(zip(self._parameters, self._accumulator.sums, strict=True))
