"""cuDNN's attention, through PyTorch's two operators for it rather than SDPA, so that either pass can be used alone.

The operators take fewer key/value heads as they are. cuDNN compiles a plan for each new shape, and PyTorch finds it
again by the shapes and strides of q, k and v only: the plan relies on an output and a gradient in the memory layout of
q, on a log-sum-exp of shape (B, H, L, 1), and on addresses that are multiples of 16 bytes.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim; v and the output have their own.

from functools import lru_cache

import torch
from torch import Tensor

from stepscope.kernels.attention.problem import (
    NO_EXTRAS,
    SMALLEST_SCALE,
    TMA_ALIGNMENT,
    Extras,
    empty_output,
    make_readable,
)

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    causal: bool,
    scale: float,
    tf32: bool,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row (natural logarithm, fp32). Only fp16 and bf16, so tf32 does not
    apply.
    """
    del tf32, extras  # none are supported
    o_BHLD, lse, *_ = _forward(
        q_BHLD,
        k_BGKD,
        v_BGKD,
        attn_bias=None,
        compute_log_sumexp=True,
        is_causal=_hides_keys(causal, q_BHLD),
        scale=max(scale, SMALLEST_SCALE),
    )
    return o_BHLD, lse.view(q_BHLD.shape[:3])


def backward(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    *,
    causal: bool,
    scale: float,
    tf32: bool,
    extras: Extras = NO_EXTRAS,
    wants_dbias: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the gradients of q, k and v. PyTorch does not ask cuDNN for reproducible ones."""
    del tf32, extras, wants_dbias, deterministic  # none are supported
    q_BHLD, k_BGKD, v_BGKD = (make_readable(x) for x in (q_BHLD, k_BGKD, v_BGKD))
    strides = _output_strides(q_BHLD.shape, q_BHLD.stride(), v_BGKD.shape[3])
    do_BHLD, o_BHLD = (
        x
        if x.stride() == strides and not x.data_ptr() % TMA_ALIGNMENT
        else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
        for x in (do_BHLD, o_BHLD)
    )
    unused = torch.empty((), dtype=torch.int64, device=q_BHLD.device)
    dq_BHLD, dk_BGKD, dv_BGKD = _backward(
        do_BHLD,
        q_BHLD,
        k_BGKD,
        v_BGKD,
        o_BHLD,
        lse_BHL.unsqueeze(-1),
        unused,  # seed and offset of dropout
        unused,
        None,  # bias
        None,  # start of each sequence, if packed
        None,
        q_BHLD.shape[2],
        k_BGKD.shape[2],
        0.0,  # share of dropout
        _hides_keys(causal, q_BHLD),
        scale=max(scale, SMALLEST_SCALE),
    )
    return dq_BHLD, dk_BGKD, dv_BGKD, None


def _hides_keys(causal: bool, q_BHLD: Tensor) -> bool:
    """A single query sees every key. cuDNN would align it with the first."""
    return causal and q_BHLD.shape[2] > 1


@lru_cache(maxsize=256)
def _output_strides(shape: torch.Size, strides: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """The strides of an output for such a q."""
    q_BHLD = torch.empty_strided(shape, strides, device="meta")
    return empty_output(q_BHLD, q_BHLD.new_empty(1, 1, 1, head_dim)).stride()
