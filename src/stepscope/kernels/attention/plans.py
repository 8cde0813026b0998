"""The plans of earlier calls of plain attention, by everything that a call like them has in common.

Such a call passed every check and was run by `hopper`, so one lookup replaces the checks and the choice. What the
lookup cannot know is checked each time: the alignment of the addresses, and the current device.
"""

# All tensors are (B, H, L, D).

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.kernels.attention import backends
from stepscope.kernels.attention.problem import NO_EXTRAS, TMA_ALIGNMENT, Problem

if TYPE_CHECKING:
    from stepscope.kernels.attention.hopper.launch import ForwardPlan

_MOST_PLANS = 256
_BACKENDS = ("auto", "hopper")
_DTYPES = (torch.bfloat16, torch.float16)
_plans: "dict[tuple[Any, ...], ForwardPlan]" = {}


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
    q, k, v, causal, extras = problem
    if backend not in _BACKENDS or not q.is_cuda or q.dtype not in _DTYPES or extras is not NO_EXTRAS:
        return
    key = _key(q, k, v, causal, given_scale, backend)
    if key in _plans or backends.refusal("hopper", problem) is not None:
        return
    from stepscope.kernels.attention.hopper.launch import plan_forward

    if len(_plans) >= _MOST_PLANS:  # every call has a new length: plans are cheap to make again
        _plans.clear()
    _plans[key] = plan_forward(q, k, v, causal, scale, NO_EXTRAS)


def _key(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> tuple[Any, ...]:
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), causal, scale, backend,
    )  # fmt: skip
