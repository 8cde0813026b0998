"""Attention on random tensors, forward and backward: the problem that is checked, measured and timed.

The result is checked once before a case is timed, at a cost that does not grow with the square of its length.

The output of the last queries depends only on those queries, and so do all gradients when only those queries receive
one. So backward runs with a gradient that is zero except for the last queries of the last sequence, and the reference
runs on that slice: in float64, which is the truth, and in the case's own dtype, which sets the error limit. An offset
that overflows shows in the last sequence.
"""

# B batch, H heads, L length, R checked rows, D head dim.

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stepscope.kernels import flash_attention
from stepscope.measure.environment import DTYPES
from stepscope.nn import functional
from stepscope.recording.rows.attention_case import Accuracy, AttentionCase

ROWS = 64
RESULTS = ("output", "dq", "dk", "dv")
# Kernel tests allow twice the reference error. Here a row of a long sweep is at stake, over one slice of one seed, and
# a wrong result is wrong by orders of magnitude: leave room for the order of summation, and none for zeros.
ROOM = 4
MOST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomAttention:
    """All are (B, H, L, D); `upstream` is the gradient of the output. The three inputs require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    causal: bool
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def forward(self) -> Tensor:
        return self.attend(*self.inputs)

    def backward(self, out_BHLD: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients. The graph is freed on the way, as in training."""
        return torch.autograd.grad(out_BHLD, self.inputs, self.upstream)


def make_problem(case: AttentionCase, device: torch.device) -> RandomAttention:
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    generator = torch.Generator(device).manual_seed(case.seed)
    shape = (case.batch, case.heads, case.length, case.head_dim)

    def draw() -> Tensor:
        return torch.randn(shape, device=device, dtype=DTYPES[case.precision], generator=generator)

    q_BHLD, k_BHLD, v_BHLD = (draw().requires_grad_() for _ in range(3))
    return RandomAttention(
        q=q_BHLD,
        k=k_BHLD,
        v=v_BHLD,
        upstream=draw(),
        causal=case.causal,
        attend=partial(flash_attention, causal=case.causal, backend=case.implementation),
    )


# --- Is the result right? ---


def check(problem: RandomAttention) -> tuple[Accuracy, ...]:
    """Return the accuracy of the output and of the three gradients."""
    rows = min(ROWS, problem.q.shape[2])
    ours = _run(problem, rows)
    truth = _run_reference(problem, rows, torch.float64)
    plain = _run_reference(problem, rows, problem.q.dtype)
    return tuple(_compare(*one) for one in zip(RESULTS, ours, plain, truth, strict=True))


def say_wrong(accuracies: tuple[Accuracy, ...]) -> str:
    """Return a line about the results beyond their limit; empty if there are none."""
    return ", ".join(
        f"{one.result} has a relative error of {one.error:.3g}; the limit is {one.limit:.3g}"
        for one in accuracies
        if not one.error <= one.limit
    )


def _run(problem: RandomAttention, rows: int) -> list[Tensor]:
    upstream_BHLD = torch.zeros_like(problem.upstream)
    upstream_BHLD[-1:, :, -rows:] = problem.upstream[-1:, :, -rows:]
    out_BHLD = problem.forward()
    dq_BHLD, dk_BHLD, dv_BHLD = torch.autograd.grad(out_BHLD, problem.inputs, upstream_BHLD)
    return [out_BHLD[-1:, :, -rows:].detach(), dq_BHLD[-1:, :, -rows:], dk_BHLD[-1:], dv_BHLD[-1:]]


def _run_reference(problem: RandomAttention, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """A causal mask is aligned at the end, so the last queries against all keys see the same keys as in the full
    problem.
    """
    last_queries = problem.q[-1:, :, -rows:]
    leaves = [x.detach().to(dtype).requires_grad_() for x in (last_queries, problem.k[-1:], problem.v[-1:])]
    out_BHRD = functional.attention(*leaves, causal=problem.causal)
    upstream_BHRD = problem.upstream[-1:, :, -rows:].to(dtype)
    return [out_BHRD.detach(), *torch.autograd.grad(out_BHRD, leaves, upstream_BHRD)]


def _compare(result: str, ours: Tensor, plain: Tensor, truth: Tensor) -> Accuracy:
    largest = truth.abs().max().item() or 1.0  # with a single key, the scores have no gradient at all
    plain_error = _distance(plain, truth) / largest
    limit = min(ROOM * (plain_error + torch.finfo(plain.dtype).eps), MOST)
    return Accuracy(result=result, error=_distance(ours, truth) / largest, plain_error=plain_error, limit=limit)


def _distance(x: Tensor, truth: Tensor) -> float:
    difference = (x.double() - truth).abs().max().item()
    return math.inf if math.isnan(difference) else difference
