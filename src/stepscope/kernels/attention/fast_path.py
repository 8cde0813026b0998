"""Plain attention on a GPU, for calls like an earlier one: its plan (`plans.py`) runs without PyTorch's dispatcher.

Anything that observes or changes operators (a profiler, a dispatch mode such as a FLOP counter, `torch.func`) would
miss such calls. While one of these is active, calls go through the operators as usual, and so does a backward pass that
will itself be differentiated.
"""

# All tensors are (B, H, L, D).

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from stepscope.kernels.attention import plans
from stepscope.kernels.attention.operators import differentiate_once

_TYPES = (Tensor, Parameter)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> Tensor | None:
    """Return the output, or None if no call like this one was planned. Never for a deterministic backward pass."""
    if type(causal) is not bool or not (scale is None or type(scale) is float) or is_watched():
        return None
    if type(q) not in _TYPES or type(k) not in _TYPES or type(v) not in _TYPES or q.dim() != 4:
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    # A plan's tensors have one dtype. If it is that of autocast, nothing is cast.
    if torch.is_autocast_enabled("cuda") and q.dtype != torch.get_autocast_dtype("cuda"):
        return None
    plan = plans.find(q, k, v, causal, scale, backend)
    if plan is None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return cast(Tensor, _apply(q, k, v, plan, backend))  # type: ignore[no-untyped-call]
    return plan(q, k, v)[0]


def is_watched() -> bool:
    """Whether something observes operators, or changes what they do."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or torch.autograd.forward_ad._current_level >= 0
    )


class _PlannedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: plans.CallPlan, backend: str) -> Tensor:
        o, lse = plan(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan, ctx.backend = plan, backend
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        plan, backend, tensors = ctx.plan, ctx.backend, ctx.saved_tensors
        # Saved tensors may return with other strides, for example after an offload to the CPU.
        if torch.is_grad_enabled() or is_watched() or not plan.fits(*tensors[:3]):
            settings = (plan.causal, plan.scale, backend, False, False)
            return *differentiate_once(do, *tensors, *settings), None, None
        return *plan.backward(do, *tensors), None, None


# `Function.apply` first looks for `torch.func`, which `is_watched` has done.
_apply = super(torch.autograd.Function, _PlannedAttention).apply
