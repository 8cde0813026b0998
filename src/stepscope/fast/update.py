"""The optimizer of a program: PyTorch's AdamW or Adam, updated by one kernel.

The optimizer object stays the owner of hyperparameters and state: learning-rate schedules and checkpoints see it as
before. Its `step()` is not called.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.fast.weights import WorkingWeights
from stepscope.kernels.adamw import AdamWUpdates, Hyper, ParameterUpdate

_OFF = ("amsgrad", "maximize", "differentiable")


def why_not_one_launch(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Why this optimizer cannot be updated by our kernel; None if it can."""
    if optimizer is None:
        return "there is no optimizer"
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return f"the optimizer is {type(optimizer).__name__}, not torch.optim.AdamW or Adam"
    for name in _OFF:
        if any(group.get(name) for group in optimizer.param_groups):
            return f"the optimizer uses {name}"
    counts = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    if len(counts) > 1:
        return "its parameters have been updated a different number of times"
    return None


class OneLaunchUpdate:
    """Updates the parameters that have gradients, together with their working weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: WorkingWeights, *, max_norm: float | None) -> None:
        self._optimizer, self._weights, self._max_norm = optimizer, weights, max_norm
        self._parameters: list[nn.Parameter] = []
        self._updates: AdamWUpdates | None = None
        self._gradients: list[Tensor] = []
        self._hypers: list[Hyper] = []
        self.steps = 0
        optimizer.register_state_dict_pre_hook(lambda _: self._write_steps())

    def bind(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the gradients of this step. While a graph is captured, they must be those of the last call."""
        if self._updates is None:
            self._updates = self._create(gradients)
        self._gradients = [gradients[parameter] for parameter in self._parameters]
        self._updates.bind(self._gradients)

    def launch(self) -> None:
        assert self._updates is not None, "gradients are bound first"
        self._updates.launch()
        self._updates.release()
        self._gradients = []

    def warm_up(self) -> None:
        """Load the kernels, by updating small tensors of the same dtypes."""
        kinds = {}
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            working = self._weights.copy_of(parameter)
            kinds[parameter.dtype, None if working is None else working.dtype, gradient.dtype] = parameter.device
        for (dtype, working_dtype, gradient_dtype), device in kinds.items():
            small = torch.zeros(4, 64, dtype=dtype, device=device)
            copy = None if working_dtype is None else torch.zeros_like(small[0], dtype=working_dtype)
            update = ParameterUpdate(master=small[0], exp_avg=small[1], exp_avg_sq=small[2], working=copy)
            one = AdamWUpdates([update], self._hypers, max_norm=self._max_norm)
            one.bind([torch.zeros_like(small[3], dtype=gradient_dtype)])
            one.launch()

    def follow_schedule(self) -> None:
        """Take over the hyperparameters of the optimizer. Before every step; a change costs a small copy."""
        hypers = read_hypers(self._optimizer)
        if self._updates is not None and hypers != self._hypers:
            self._updates.set_hypers(hypers)
        self._hypers = hypers
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules look at

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm before clipping, if gradients are clipped."""
        return None if self._updates is None or self._max_norm is None else self._updates.grad_norm

    def restart(self, steps: int) -> None:
        """Set the number of updates so far, after the state of the optimizer was loaded or reset."""
        self.steps = steps
        if self._updates is not None:
            self._updates.set_step(steps)

    def _create(self, gradients: Mapping[nn.Parameter, Tensor]) -> AdamWUpdates:
        updates = []
        for group, settings in enumerate(self._optimizer.param_groups):
            for parameter in settings["params"]:
                if parameter not in gradients:
                    continue
                self._parameters.append(parameter)
                state = self._state_of(parameter)
                updates.append(
                    ParameterUpdate(
                        master=parameter.detach(),
                        exp_avg=state["exp_avg"],
                        exp_avg_sq=state["exp_avg_sq"],
                        working=self._weights.copy_of(parameter),
                        group=group,
                    )
                )
        self._hypers = read_hypers(self._optimizer)
        return AdamWUpdates(updates, self._hypers, max_norm=self._max_norm, step=self.steps)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        self.steps = int(state["step"])
        return state

    def _write_steps(self) -> None:
        for parameter in self._parameters:
            self._optimizer.state[parameter]["step"].fill_(self.steps)


def read_hypers(optimizer: torch.optim.Optimizer) -> list[Hyper]:
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    return [
        Hyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group.get("decoupled_weight_decay", decoupled),
        )
        for group in optimizer.param_groups
    ]
