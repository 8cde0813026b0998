"""The reference optimizer, gradient clipping and learning-rate schedule.

`AdamW` is the textbook loop: one parameter after the other, one kernel per line of the algorithm. Unlike the fused
`torch.optim.AdamW`, it is deliberately slow: fused optimizers are measured and tested against it. Its state uses
torch's names, so tools that recognize optimizer state recognize this one.

Nothing here waits for the GPU. The learning rate, the step count and the bias corrections are Python numbers on the
CPU; the gradient norm is a tensor and stays one.
"""

import math
from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, but got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), but got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. `closure`, if given, recomputes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"], group["betas"], group["eps"], group["weight_decay"])
        return loss

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        step, exp_avg, exp_avg_sq = state["step"], state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = betas

        param.mul_(1 - lr * weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        # Both averages start at zero, so at first they are too small by exactly these factors.
        correction1 = 1 - beta1**step
        correction2 = 1 - beta2**step
        # The only temporary: correcting the averages themselves would need two more of the parameter's size.
        denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(eps)
        param.addcdiv_(exp_avg, denominator, value=-lr / correction1)


@torch.no_grad()
def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their total L2 norm is at most max_norm; return the norm before scaling.

    The norm is fp32 or wider and stays on the device: always multiplying by min(1, max_norm / norm) costs less than
    asking the GPU whether it is needed.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, but got {max_norm}")
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.zeros(())
    device = grads[0].device
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)).to(device)
        for grad in grads
    ]
    total_norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    # torch adds the same small term, so runs clipped by either agree.
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return total_norm


def cosine_schedule(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of a step: linear from 0 to max_lr, half a cosine down to min_lr, then min_lr.

    With warm-up steps, step 0 has rate 0; `warmup_steps` has max_lr and `total_steps` is the first with min_lr.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, but got {step}")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps must be between 0 and total_steps ({total_steps}), but got {warmup_steps}")
    if not 0 <= min_lr <= max_lr:
        raise ValueError(f"min_lr must be between 0 and max_lr ({max_lr}), but got {min_lr}")
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2
