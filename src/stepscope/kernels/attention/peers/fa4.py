"""FlashAttention-4 (`pip install flash-attn-4`), through the two functions behind its autograd function.

It takes (B, L, H, D) with any strides that the copy engine can read, so transposed views go in and out without a copy,
and results have the memory layout that those of our kernels have. It is imported on the first call, which takes
seconds, and compiles for each head dim, dtype, mask and group size.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim; v and the output have their own.

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.attention.problem import NO_EXTRAS, SMALLEST_SCALE, Extras, empty_output, make_readable


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
    del tf32
    o_BHLD = empty_output(q_BHLD, v_BGKD)
    lse_BHL = torch.empty(q_BHLD.shape[:3], dtype=torch.float32, device=q_BHLD.device)
    _interface()._flash_attn_fwd(
        q_BHLD.transpose(1, 2),
        k_BGKD.transpose(1, 2),
        v_BGKD.transpose(1, 2),
        **_settings(causal, scale, extras),
        out=o_BHLD.transpose(1, 2),
        lse=lse_BHL,
    )
    return o_BHLD, lse_BHL


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
    """Return the gradients of q, k and v. dq is summed in no fixed order: its last bits differ between runs."""
    del tf32, wants_dbias, deterministic  # not supported
    do_BHLD, q_BHLD, k_BGKD, v_BGKD = (make_readable(x) for x in (do_BHLD, q_BHLD, k_BGKD, v_BGKD))
    dq_BHLD, dk_BGKD, dv_BGKD = (torch.empty_like(x) for x in (q_BHLD, k_BGKD, v_BGKD))
    _interface()._flash_attn_bwd(
        q_BHLD.transpose(1, 2),
        k_BGKD.transpose(1, 2),
        v_BGKD.transpose(1, 2),
        o_BHLD.transpose(1, 2),
        do_BHLD.transpose(1, 2),
        lse_BHL,
        **_settings(causal, scale, extras),
        dq=dq_BHLD.transpose(1, 2),
        dk=dk_BGKD.transpose(1, 2),
        dv=dv_BGKD.transpose(1, 2),
    )
    return dq_BHLD, dk_BGKD, dv_BGKD, None


@cache
def _interface() -> Any:
    return import_module("flash_attn.cute.interface")


def _settings(causal: bool, scale: float, extras: Extras) -> dict[str, Any]:
    """The arguments of both functions. None means that a side has no window."""
    left, right = (None if limit < 0 else limit for limit in (extras.left, extras.right))
    # With a scale of zero, a masked score would be -inf · 0.
    scale = max(scale, SMALLEST_SCALE)
    return {"softmax_scale": scale, "causal": causal, "window_size_left": left, "window_size_right": right}
