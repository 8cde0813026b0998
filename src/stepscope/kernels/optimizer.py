"""AdamW in one launch as a `torch.optim` optimizer, for anyone's model: `OneLaunchAdamW`.

It has the recipe, the arguments, the state names and the state dict of `torch.optim.AdamW`, so one can continue where
the other stopped. `adamw.py` does the work. What is here decides which parameters take part: those with a gradient.

Parameters of a group may have taken different numbers of steps, if some had no gradient at times. Those with the same
number share one tensor that counts their steps, which lets the GPU count. The state dict has a copy per parameter, as
torch's optimizers would count a shared tensor once per parameter.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from stepscope.kernels.adamw import AdamWUpdates, Hyper, ParameterUpdate


class OneLaunchAdamW(Optimizer):
    """AdamW over all parameters in one launch. With `max_norm`, gradients are clipped to this global norm as they are
    read, and `grad_norm` has the norm before clipping.

    `step` can be captured in a CUDA graph if the gradients stay where they are (`zero_grad(set_to_none=False)`) and one
    step was taken before. On a CPU the same steps run in plain PyTorch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_norm: float | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, but got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), but got {betas}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, but got {max_norm}")
        self._max_norm = max_norm
        self._updates: AdamWUpdates | None = None
        self._members: tuple[int, ...] = ()
        self._group_of_class: list[int] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients before clipping, on the device; None without `max_norm`."""
        return None if self._max_norm is None or self._updates is None else self._updates.grad_norm

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """ParameterUpdate every parameter that has a gradient. `closure`, if given, recomputes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [
            (index, param)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        if not pairs:
            return loss
        members = tuple(param.data_ptr() for _, param in pairs)
        if self._updates is None or members != self._members:
            self._updates, self._members = self._build(pairs), members
        updates = self._updates
        updates.set_hypers([_hyper(self.param_groups[index]) for index in self._group_of_class])
        updates.bind([_dense(param.grad) for _, param in pairs])
        updates.launch()
        updates.release()
        return loss

    def _build(self, pairs: list[tuple[int, Tensor]]) -> AdamWUpdates:
        """Find the classes, parameters of one group with the same number of steps, and make the list of updates."""
        states = [self._state_of(param) for _, param in pairs]
        steps = _read_steps([state["step"] for state in states])
        keys = [(index, step) for (index, _), step in zip(pairs, steps, strict=True)]
        classes = list(dict.fromkeys(keys))
        updates = [
            ParameterUpdate(
                master=param, exp_avg=state["exp_avg"], exp_avg_sq=state["exp_avg_sq"], group=classes.index(key)
            )
            for (_, param), state, key in zip(pairs, states, keys, strict=True)
        ]
        self._group_of_class = [index for index, _ in classes]
        hypers = [_hyper(self.param_groups[index]) for index in self._group_of_class]
        built = AdamWUpdates(updates, hypers, max_norm=self._max_norm, step=[step for _, step in classes])
        for state, update in zip(states, updates, strict=True):
            state["step"] = built.steps[update.group]
        return built

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        return state

    def state_dict(self) -> StateDict:
        """As torch's, with a step count per parameter."""
        values = super().state_dict()
        values["state"] = {
            key: state | {"step": state["step"].clone()} if "step" in state else state
            for key, state in values["state"].items()
        }
        return values

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from the state of this optimizer or of `torch.optim.AdamW`."""
        for group in state_dict["param_groups"]:
            refused = [name for name in ("amsgrad", "maximize") if group.get(name)]
            if refused:
                raise ValueError(f"`{refused[0]}` is not supported")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_max_norm": self._max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by `load_state_dict`. The list of updates is built again, from the new state."""
        super().__setstate__(state)
        self._updates = None


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"])


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise ValueError("sparse gradients are not supported; use torch.optim.SparseAdam for these parameters")
    if gradient.is_complex():
        raise ValueError("complex gradients are not supported; use torch.optim.AdamW for these parameters")
    return gradient.contiguous()


def _read_steps(steps: Iterable[Tensor | float]) -> list[int]:
    """Read the step counts in one transfer per device. Waits for the GPU, but only when the list is built."""
    values = [torch.as_tensor(step, dtype=torch.float32) for step in steps]
    stacked = torch.stack([value.reshape(()).to(values[0].device, non_blocking=True) for value in values])
    return [int(value) for value in stacked.tolist()]
