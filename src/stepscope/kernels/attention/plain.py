"""Attention from PyTorch's own parts, differentiated by autograd: what the kernels are compared with.

`spec.backends` describes each of them.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim (v and o have their own).

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stepscope.kernels.attention.extras import hidden_keys
from stepscope.kernels.attention.problem import SMALLEST_SCALE, Problem, output_shape
from stepscope.nn import functional

SDPA = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


def run(backend: str, problem: Problem, scale: float) -> Tensor:
    """Return the output, for a backend that supports the problem."""
    if backend == "naive" or (backend == "compiled" and torch.compiler.is_compiling()):
        return _naive(problem, scale)
    if backend == "compiled":
        return _compiled()(problem, scale)
    if backend == "sdpa":
        return _sdpa(problem, scale)
    with sdpa_kernel(SDPA[backend]):
        return _sdpa(problem, scale)


def _naive(problem: Problem, scale: float) -> Tensor:
    """The reference, and with extras the same from its parts, with scores of at least fp32."""
    q_BHLD, k_BGKD, v_BGKD, causal, extras = problem
    if not extras.names:
        return functional.attention(q_BHLD, k_BGKD, v_BGKD, causal=causal, scale=scale)
    scores_BGSK = functional.attention_scores(q_BHLD, k_BGKD, causal=False, scale=scale)
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    scores_BHLK = scores_BGSK.to(wide).view(*q_BHLD.shape[:3], problem.num_keys)
    if extras.softcap:
        scores_BHLK = extras.softcap * torch.tanh(scores_BHLK / extras.softcap)
    if extras.bias is not None:
        scores_BHLK = scores_BHLK + extras.bias
    query_L = torch.arange(problem.num_queries, device=q_BHLD.device)
    key_K = torch.arange(problem.num_keys, device=q_BHLD.device)
    if extras.slopes is not None:
        distance_LK = key_K - (query_L[:, None] + problem.num_keys - problem.num_queries)
        scores_BHLK = scores_BHLK + extras.slopes[:, :, None, None] * distance_LK
    hidden_BLK = hidden_keys(query_L, key_K, problem)
    if hidden_BLK is not None:
        scores_BHLK = scores_BHLK.masked_fill(hidden_BLK[:, None], -math.inf)
    weights_BHLK = _softmax(scores_BHLK, extras.sinks).to(q_BHLD.dtype)
    out_BGSD = functional.attention_values(weights_BHLK.view(scores_BGSK.shape), v_BGKD)
    return out_BGSD.view(output_shape(q_BHLD, v_BGKD))


def _softmax(scores_BHLK: Tensor, sinks_H: Tensor | None) -> Tensor:
    """The weights of the keys. The sinks take the rest, and a query without visible keys has no weights."""
    highest_BHL1 = scores_BHLK.detach().amax(dim=-1, keepdim=True)
    if sinks_H is not None:
        highest_BHL1 = torch.maximum(highest_BHL1, sinks_H.detach()[:, None, None])
    highest_BHL1 = highest_BHL1.masked_fill(highest_BHL1 == -math.inf, 0)
    exponential_BHLK = (scores_BHLK - highest_BHL1).exp()
    sum_BHL1 = exponential_BHLK.sum(dim=-1, keepdim=True)
    if sinks_H is not None:
        sum_BHL1 = sum_BHL1 + (sinks_H[:, None, None] - highest_BHL1).exp()
    return exponential_BHLK / sum_BHL1.masked_fill(sum_BHL1 == 0, 1)


def _sdpa(problem: Problem, scale: float) -> Tensor:
    causal, grouped = problem.hides_keys, problem.is_grouped
    # With a scale of zero, PyTorch returns NaN for masked scores on a CPU.
    scale = max(scale, SMALLEST_SCALE)
    return scaled_dot_product_attention(*problem[:3], is_causal=causal, scale=scale, enable_gqa=grouped)


@cache
def _compiled() -> Callable[[Problem, float], Tensor]:
    """Compiled for each shape separately, which is fastest. `fullgraph` turns a silent fallback into an error: more
    shapes in one process than the compiler caches.
    """
    return torch.compile(_naive, fullgraph=True, dynamic=False)
