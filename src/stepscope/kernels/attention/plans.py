"""The plans of earlier calls of plain attention, by everything that a call like them has in common.

Such a call passed every check, and its backends are known, so one lookup replaces the checks and the choice. What the
lookup cannot know is checked each time: the alignment of the addresses, and the current device.
"""

# All tensors are (B, H, L, D).

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.attention import backends
from stepscope.kernels.attention.problem import NO_EXTRAS, TMA_ALIGNMENT, Problem

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Any, ...]]
Choice = tuple[str, str]  # as `backends.decide` returns it

_MOST_PLANS = 256
_PLANNED = ("hopper", "fa4", "sdpa-cudnn")


class CallPlan:
    """Both passes for tensors of fixed shapes and strides, each of its own backend. Called with q, k and v, it returns
    the output and the log-sum-exp. `choices` are what `auto` chose for the two passes, and count whenever one runs.
    """

    def __init__(
        self, problem: Problem, scale: float, forward: Forward, backward: Backward, choices: Sequence[Choice] = ()
    ) -> None:
        q, k, v, self.causal, _ = problem
        self.scale = scale
        self._strides = (q.stride(), k.stride(), v.stride())
        self._forward, self._backward, self._choices = forward, backward, choices

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._choices:
            backends.count(self._choices[0])
        return self._forward(q, k, v)

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v."""
        if self._choices:
            backends.count(self._choices[1])
        return self._backward(do, q, k, v, o, lse)[:3]

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether tensors of the plan's shapes also have its strides and alignment."""
        return _is_aligned(q, k, v) and (q.stride(), k.stride(), v.stride()) == self._strides


_plans: dict[tuple[Any, ...], CallPlan | None] = {}  # None: a backend without plans runs it


def find(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> CallPlan | None:
    """Return the plan for such a call on the current device."""
    plan = _plans.get(_key(q, k, v, causal, scale, backend))
    if plan is None or not _is_aligned(q, k, v):
        return None
    if q.get_device() != torch._C._cuda_getDevice():  # kernels are launched on the current device
        return None
    return plan


def remember(problem: Problem, given_scale: float | None, scale: float, backend: str) -> None:
    """Plan calls like this one, which has been checked, if backends with plans run them."""
    q, k, v, causal, extras = problem
    if torch.are_deterministic_algorithms_enabled():  # in which PyTorch refuses cuDNN
        return
    if backend not in ("auto", *_PLANNED) or not q.is_cuda or q.dtype not in backends.HALF or extras is not NO_EXTRAS:
        return
    key = _key(q, k, v, causal, given_scale, backend)
    if key in _plans or not _is_aligned(q, k, v):
        return
    plan = _make(problem, scale, backend)
    if len(_plans) >= _MOST_PLANS:  # every call has a new length: plans are cheap to make again
        _plans.clear()
    _plans[key] = plan


def _make(problem: Problem, scale: float, backend: str) -> CallPlan | None:
    if backend != "auto":
        if backends.refusal(backend, problem) is not None:
            return None
        return CallPlan(problem, scale, *_passes(backend, problem, scale))
    choices = [backends.decide(problem, direction, among=backends.KERNELS) for direction in ("forward", "backward")]
    if any(backend not in _PLANNED for backend, _ in choices):
        return None
    (forward, _), (_, backward) = (_passes(backend, problem, scale) for backend, _ in choices)
    return CallPlan(problem, scale, forward, backward, choices)


def _passes(backend: str, problem: Problem, scale: float) -> tuple[Forward, Backward]:
    q, k, v, causal, _ = problem
    module = backends.load(backend)
    if backend == "hopper":
        plan = module.plan_forward(q, k, v, causal, scale, NO_EXTRAS)
        return plan, plan.backward
    settings = {"causal": causal, "scale": scale, "tf32": False}
    return partial(module.forward, **settings), partial(module.backward, **settings)


def _is_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT


def _key(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str) -> tuple[Any, ...]:
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), causal, scale, backend,
    )  # fmt: skip
