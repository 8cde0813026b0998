"""Plain attention on a GPU, for calls like an earlier one: one lookup instead of checks, a choice and the dispatcher.

An earlier call with the same shapes, strides, dtypes, device and settings passed every check and was run by `hopper`;
`remember` keeps its plan. What the lookup cannot know is checked each time: the alignment of the addresses, and whether
something sees or changes operators (a profiler, autocast, a dispatch mode such as a FLOP counter, `torch.func`). Such
calls take the usual way through the operators, and so does a backward pass that is itself to be differentiated.
"""

# All tensors are (B, H, L, D).

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from stepscope.kernels.attention import backends
from stepscope.kernels.attention.problem import NO_EXTRAS, TMA_ALIGNMENT, Problem

if TYPE_CHECKING:
    from stepscope.kernels.attention.hopper_launch import ForwardPlan

_MOST_PLANS = 4096
_TYPES = (Tensor, Parameter)
_BACKENDS = ("auto", "hopper")
_DTYPES = (torch.bfloat16, torch.float16)
_plans: "dict[tuple[Any, ...], ForwardPlan]" = {}


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> Tensor | None:
    """Return the output, or None if no call like this one was planned. Never for a deterministic backward pass."""
    if type(q) not in _TYPES or type(k) not in _TYPES or type(v) not in _TYPES or q.dim() != 4 or is_watched():
        return None
    plan = find(q, k, v, causal, scale, backend)
    if plan is None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return cast(Tensor, _apply(q, k, v, plan, backend))  # type: ignore[no-untyped-call]
    return plan(q, k, v)[0]


def find(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> "ForwardPlan | None":
    """Return the plan for such a call on the current device. If `auto` finds one, that counts as its choice."""
    plan = _plans.get(_key(q, k, v, causal, scale, backend))
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
        return None
    if q.get_device() != torch._C._cuda_getDevice():  # Triton launches on the current device
        return None
    if backend == "auto":
        backends.count("hopper")
    return plan


def remember(problem: Problem, given_scale: float | None, scale: float, backend: str) -> None:
    """Plan calls like this one, which has been checked, if `hopper` runs them."""
    if backend not in _BACKENDS or problem.q_BHLD.dtype not in _DTYPES or problem.extras is not NO_EXTRAS:
        return
    if backends.refusal("hopper", problem) is not None:
        return
    from stepscope.kernels.attention.hopper_launch import plan_forward

    q, k, v, causal = problem[:4]
    if len(_plans) >= _MOST_PLANS:  # every call has a new length: plans are cheap to make again
        _plans.clear()
    _plans[_key(q, k, v, causal, given_scale, backend)] = plan_forward(q, k, v, causal, scale, NO_EXTRAS)


def is_watched() -> bool:
    """Whether something in the process wants to see operators, or changes what they do."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or torch.is_autocast_enabled("cuda")
    )


def _key(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> tuple[Any, ...]:
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), causal, scale, backend,
    )  # fmt: skip


class _PlannedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: "ForwardPlan", backend: str) -> Tensor:
        o, lse = plan(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan, ctx.backend = plan, backend
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        plan, backend = ctx.plan, ctx.backend
        if torch.is_grad_enabled() or is_watched():
            settings = (plan.causal, plan.scale, backend, False, False)
            return *torch.ops.stepscope.flash_attention_backward(do, *ctx.saved_tensors, *settings), None, None
        if backend == "auto":
            backends.count("hopper")
        return *plan.backward(do, *ctx.saved_tensors), None, None


# `Function.apply` first looks for `torch.func`, which `is_watched` has done.
_apply = super(torch.autograd.Function, _PlannedAttention).apply
