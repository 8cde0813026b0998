"""The optimizer of a program: PyTorch's AdamW or Adam, updated by one kernel.

The optimizer object stays the owner of hyperparameters and state: learning-rate schedules and checkpoints see it as
before. Its `step()` is not called.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from stepscope.fast.weights import WorkingWeights
from stepscope.kernels.adamw import AdamWUpdates, Hyper, ParameterUpdate
from stepscope.kernels.tensor_lists import LOW_DTYPES

_OFF = ("amsgrad", "maximize", "differentiable")
_AVERAGES = ("exp_avg", "exp_avg_sq")


def why_not_one_launch(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Why this optimizer cannot be updated by our kernel; None if it can."""
    if optimizer is None:
        return "no optimizer was given"
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return f"the optimizer is {type(optimizer).__name__}, not torch.optim.AdamW or Adam"
    for name in _OFF:
        if any(group.get(name) for group in optimizer.param_groups):
            return f"the optimizer uses {name}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter.is_contiguous() for parameter in parameters):
        return "a parameter is not contiguous"
    if any(parameter.is_cuda and parameter.dtype not in LOW_DTYPES for parameter in parameters):
        return "a parameter is not float32, bfloat16 or float16"
    if len({parameter.device for parameter in parameters}) > 1:
        return "its parameters are on several devices"
    if len(_step_counts(optimizer)) > 1:
        return "its parameters have been updated a different number of times"
    return None


def _step_counts(optimizer: torch.optim.Optimizer) -> set[int]:
    return {int(state["step"]) for state in optimizer.state.values() if "step" in state}


class _Progress:
    """What all programs of an optimizer share: the number of updates so far, and the averages that kernels write.

    The optimizer's own counts are written only when someone asks for its state. When a state is loaded, its values are
    copied to where the kernels expect them. The hooks know this object and not the programs, which can be freed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = max(_step_counts(optimizer), default=0)
        self._averages: dict[nn.Parameter, dict[str, Tensor]] = {}
        optimizer.register_state_dict_pre_hook(self.write)
        optimizer.register_load_state_dict_post_hook(self._take_loaded)

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, on_gpu: bool) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_gpu else "cpu")
            state |= {name: torch.zeros_like(parameter) for name in _AVERAGES}
        self._averages[parameter] = {name: state[name] for name in _AVERAGES}
        return state

    def write(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self._averages:
            optimizer.state[parameter]["step"].fill_(self.steps)

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Start from the optimizer's own counts. Averages that it has dropped are forgotten."""
        self._averages = {one: own for one, own in self._averages.items() if optimizer.state.get(one)}
        self.steps = max(_step_counts(optimizer), default=0)

    @torch.no_grad()
    def _take_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, averages in self._averages.items():
            state = optimizer.state[parameter]
            for name, own in averages.items():
                own.copy_(state[name]) if name in state else own.zero_()
                state[name] = own
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        if len(_step_counts(optimizer)) > 1:
            raise ValueError("expected a state in which all parameters have been updated the same number of times")
        self.read(optimizer)


_progress: WeakKeyDictionary[torch.optim.Optimizer, _Progress] = WeakKeyDictionary()


def write_steps(optimizer: torch.optim.Optimizer) -> None:
    """Write the number of updates so far into the optimizer's state."""
    if optimizer in _progress:
        _progress[optimizer].write(optimizer)


def read_steps(optimizer: torch.optim.Optimizer) -> None:
    """Continue from the optimizer's state, after something else than its `load_state_dict` has changed it."""
    if optimizer in _progress:
        _progress[optimizer].read(optimizer)


class OneLaunchUpdate:
    """Updates the parameters that have gradients, together with their working weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: WorkingWeights, *, max_norm: float | None) -> None:
        self._optimizer, self._weights, self._max_norm = optimizer, weights, max_norm
        self._parameters: list[nn.Parameter] = []
        self._known: set[nn.Parameter] = set()
        self._updates: AdamWUpdates | None = None
        self._gradients: list[Tensor] = []
        self._hypers: list[Hyper] = []
        if optimizer not in _progress:
            _progress[optimizer] = _Progress(optimizer)
        self._progress = _progress[optimizer]
        self._steps = 0  # as the kernels count them

    def bind(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the gradients of this step. While a graph is captured, they must be those of the last call. If other
        parameters have gradients than before, those are updated from now on."""
        if self._updates is None or self._known != gradients.keys():
            self._updates, self._known = self._create(gradients), set(gradients)
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

    def follow_optimizer(self) -> None:
        """Take over the hyperparameters of the optimizer, and its count if others have changed it. Before every step;
        a change costs a small copy."""
        hypers = read_hypers(self._optimizer)
        if self._updates is not None and hypers != self._hypers:
            self._updates.set_hypers(hypers)
        if self._updates is not None and self._steps != self._progress.steps:
            self._updates.set_step(self._progress.steps)
        self._hypers, self._steps = hypers, self._progress.steps
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules look at

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm before clipping, if gradients are clipped."""
        return None if self._updates is None or self._max_norm is None else self._updates.grad_norm

    def announce_step(self) -> None:
        """Call the hooks that PyTorch calls around `optimizer.step()`, so that those who watch steps see this one."""
        before: Any = (*_global_optimizer_pre_hooks.values(), *self._optimizer._optimizer_step_pre_hooks.values())
        after: Any = (*_global_optimizer_post_hooks.values(), *self._optimizer._optimizer_step_post_hooks.values())
        for hook in (*before, *after):
            hook(self._optimizer, (), {})

    def count_step(self) -> None:
        """After every step, launched or replayed."""
        self._steps += 1
        self._progress.steps += 1

    def _create(self, gradients: Mapping[nn.Parameter, Tensor]) -> AdamWUpdates:
        updates, self._parameters = [], []
        for group, settings in enumerate(self._optimizer.param_groups):
            for parameter in settings["params"]:
                if parameter not in gradients:
                    continue
                self._parameters.append(parameter)
                on_gpu = bool(settings.get("capturable") or settings.get("fused"))  # as torch.optim has it
                state = self._progress.state_of(self._optimizer, parameter, on_gpu=on_gpu)
                updates.append(
                    ParameterUpdate(
                        master=parameter.detach(),
                        exp_avg=state["exp_avg"],
                        exp_avg_sq=state["exp_avg_sq"],
                        working=self._weights.copy_of(parameter),
                        group=group,
                    )
                )
        self._hypers, self._steps = read_hypers(self._optimizer), self._progress.steps
        return AdamWUpdates(updates, self._hypers, max_norm=self._max_norm, step=self._steps)


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
