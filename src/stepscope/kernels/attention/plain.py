"""Attention from PyTorch's own parts, differentiated by autograd: what the kernels are compared with.

`spec.backends` describes each of them.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stepscope.kernels.attention.problem import Problem
from stepscope.nn import functional
from stepscope.nn.functional import AttentionOp

SDPA = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
SMALLEST_SCALE = 1e-37


def run(backend: str, problem: Problem, scale: float) -> Tensor:
    """Return the output, for a backend that supports the problem."""
    q_BHLD, k_BGKD, v_BGKD, causal = problem[:4]
    if backend == "naive" or (backend == "compiled" and torch.compiler.is_compiling()):
        return functional.attention(q_BHLD, k_BGKD, v_BGKD, causal=causal, scale=scale)
    if backend == "compiled":
        return _compiled()(q_BHLD, k_BGKD, v_BGKD, causal=causal, scale=scale)
    if backend == "sdpa":
        return _sdpa(problem, scale)
    with sdpa_kernel(SDPA[backend]):
        return _sdpa(problem, scale)


def _sdpa(problem: Problem, scale: float) -> Tensor:
    causal, grouped = problem.hides_keys, problem.is_grouped
    # With a scale of zero, PyTorch returns NaN for masked scores on a CPU. This scale gives the same weights to the
    # last bit.
    scale = max(scale, SMALLEST_SCALE)
    return scaled_dot_product_attention(*problem[:3], is_causal=causal, scale=scale, enable_gqa=grouped)


@cache
def _compiled() -> AttentionOp:
    """Compiled for each shape separately, which is fastest. `fullgraph` turns a silent fallback into an error: more
    shapes in one process than the compiler caches.
    """
    return torch.compile(functional.attention, fullgraph=True, dynamic=False)
