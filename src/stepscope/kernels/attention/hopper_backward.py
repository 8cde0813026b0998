"""Launches the backward pass for Hopper (`hopper_backward_kernel.py` holds the kernels and says how they work)."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim, N = B * H.

import torch
from torch import Tensor

from stepscope.kernels.attention.hopper_backward_kernel import (
    attention_hopper_backward,
    attention_hopper_finish,
    attention_hopper_prepare,
)
from stepscope.kernels.attention.hopper_descriptors import describe, describe_rows, padded_head

KEYS = 128  # of a program, half of them for each consumer warpgroup
QUERIES = {64: 128, 128: 64}  # in a tile, by the width of a head: what the registers hold
STAGES = 2
MAX_REGISTERS = 168
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
    width, tile = padded_head(head_dim), QUERIES[padded_head(head_dim)]
    heads = batch * num_heads
    padded = -(-num_queries // PREPARED_ROWS) * PREPARED_ROWS
    statistics_2NL = torch.empty(2, heads, padded, dtype=torch.float32, device=q_BHLD.device)
    sums_BHLD = torch.empty(q_BHLD.shape, dtype=torch.float32, device=q_BHLD.device)
    attention_hopper_prepare[(padded // PREPARED_ROWS, heads)](
        o_BHLD, do_BHLD, lse_BHL, statistics_2NL[0], statistics_2NL[1], sums_BHLD, num_heads, num_queries, padded,
        head_dim, *o_BHLD.stride()[:3], *do_BHLD.stride(), ROWS=PREPARED_ROWS, BLOCK_D=width, num_warps=8,
    )  # fmt: skip
    attention_hopper_backward[(-(-num_keys // KEYS), batch * num_groups)](
        describe(q_BHLD, tile, width),
        describe(k_BGKD, KEYS, width),
        describe(v_BGKD, KEYS // 2, width),
        describe(do_BHLD, tile, width),
        describe_rows(statistics_2NL[0], tile),
        describe_rows(statistics_2NL[1], tile),
        describe(sums_BHLD, 64, 64),
        describe(dk_BGKD, KEYS // 2, width),
        describe(dv_BGKD, KEYS // 2, width),
        scale,
        num_heads,
        num_groups,
        num_queries,
        num_keys,
        ROWS=tile,
        D=width,
        STAGES=STAGES,
        CAUSAL=causal,
        MASK=causal or num_keys % KEYS != 0,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    attention_hopper_finish[(-(-num_queries // FINISHED_ROWS), heads)](
        sums_BHLD, dq_BHLD, scale, num_heads, num_queries, head_dim, *dq_BHLD.stride()[:3],
        ROWS=FINISHED_ROWS, BLOCK_D=width, num_warps=4,
    )  # fmt: skip
    return dq_BHLD, dk_BGKD, dv_BGKD
