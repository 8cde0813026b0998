"""Launches the forward pass for Hopper (`hopper_forward_kernel.py` holds the kernel and says how it works)."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import math

import torch
from torch import Tensor

from stepscope.kernels.attention.hopper_descriptors import count_multiprocessors, describe
from stepscope.kernels.attention.hopper_forward_kernel import attention_hopper_forward
from stepscope.kernels.attention.hopper_tiles import FORWARD_KEYS, FORWARD_ROWS, forward_settings, padded_head


def forward(
    q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *, causal: bool, scale: float, tf32: bool
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row (natural logarithm, fp32). For fp16 and bf16, so tf32 says nothing."""
    del tf32
    batch, num_heads, num_queries, head_dim = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    o_BHLD = torch.empty_like(q_BHLD)
    lse_BHL = torch.empty(batch, num_heads, num_queries, dtype=torch.float32, device=q_BHLD.device)
    if o_BHLD.numel() == 0:
        return o_BHLD, lse_BHL
    if num_keys == 0:
        return o_BHLD.zero_(), lse_BHL.fill_(math.inf)
    width = padded_head(head_dim)
    settings = forward_settings(width, causal=causal, whole_keys=num_keys % FORWARD_KEYS == 0)
    num_tiles = -(-num_queries // (settings["CONSUMERS"] * FORWARD_ROWS))
    # Under a causal mask a long tile and a short one make an item.
    num_items = batch * num_heads * ((num_tiles + 1) // 2 if causal else num_tiles)
    attention_hopper_forward[(min(num_items, count_multiprocessors(q_BHLD.device)),)](
        describe(q_BHLD, FORWARD_ROWS, width),
        describe(k_BGKD, FORWARD_KEYS, width),
        describe(v_BGKD, FORWARD_KEYS, width),
        describe(o_BHLD, FORWARD_ROWS, width),
        lse_BHL,
        scale,
        num_heads,
        num_groups,
        num_queries,
        num_keys,
        num_tiles,
        num_items,
        **settings,
    )
    return o_BHLD, lse_BHL
