"""Launches the backward pass for Hopper (`hopper_backward_kernel.py` holds the kernels and says how they work)."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim, N = B * H.

import torch
from torch import Tensor

from stepscope.kernels.attention.hopper_backward_kernel import (
    attention_hopper_backward,
    attention_hopper_finish,
    attention_hopper_prepare,
)
from stepscope.kernels.attention.hopper_descriptors import describe, describe_rows
from stepscope.kernels.attention.hopper_tiles import BACKWARD_KEYS, BACKWARD_ROWS, backward_settings, padded_head

PREPARED_ROWS = 128  # a multiple of every tile's rows
FINISHED_ROWS = 64


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. The sums of dq are made in no fixed order: its last bits differ from run to run."""
    del tf32
    batch, num_heads, num_queries, head_dim = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    dq_BHLD, dk_BGKD, dv_BGKD = (torch.empty_like(x) for x in (q_BHLD, k_BGKD, v_BGKD))
    if q_BHLD.numel() == 0 or k_BGKD.numel() == 0:
        return dq_BHLD.zero_(), dk_BGKD.zero_(), dv_BGKD.zero_()
    width = padded_head(head_dim)
    rows = BACKWARD_ROWS[width]
    heads = batch * num_heads
    padded = -(-num_queries // PREPARED_ROWS) * PREPARED_ROWS
    statistics_2NL = torch.empty(2, heads, padded, dtype=torch.float32, device=q_BHLD.device)
    sums_BHLD = torch.empty(q_BHLD.shape, dtype=torch.float32, device=q_BHLD.device)
    attention_hopper_prepare[(padded // PREPARED_ROWS * heads,)](
        o_BHLD, do_BHLD, lse_BHL, statistics_2NL[0], statistics_2NL[1], sums_BHLD, num_heads, num_queries, padded,
        head_dim, *o_BHLD.stride()[:3], *do_BHLD.stride(), ROWS=PREPARED_ROWS, BLOCK_D=width, num_warps=8,
    )  # fmt: skip
    attention_hopper_backward[(-(-num_keys // BACKWARD_KEYS) * batch * num_groups,)](
        describe(q_BHLD, rows, width),
        describe(k_BGKD, BACKWARD_KEYS, width),
        describe(v_BGKD, BACKWARD_KEYS // 2, width),
        describe(do_BHLD, rows, width),
        describe_rows(statistics_2NL[0], rows),
        describe_rows(statistics_2NL[1], rows),
        describe(sums_BHLD, 64, 64),
        describe(dk_BGKD, BACKWARD_KEYS // 2, width),
        describe(dv_BGKD, BACKWARD_KEYS // 2, width),
        scale,
        num_heads,
        num_groups,
        num_queries,
        num_keys,
        **backward_settings(width, causal=causal, whole_keys=num_keys % BACKWARD_KEYS == 0),
    )
    attention_hopper_finish[(-(-num_queries // FINISHED_ROWS) * heads,)](
        sums_BHLD, dq_BHLD, scale, num_heads, num_queries, head_dim, *dq_BHLD.stride()[:3],
        ROWS=FINISHED_ROWS, BLOCK_D=width, num_warps=4,
    )  # fmt: skip
    return dq_BHLD, dk_BGKD, dv_BGKD
