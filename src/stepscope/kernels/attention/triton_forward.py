"""FlashAttention-2 forward in Triton: the launcher. `triton_forward_kernels` holds the kernel and says how it works."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import math

import torch
from torch import Tensor

from stepscope.kernels.attention import triton_launch as launch
from stepscope.kernels.attention.tiles import Tile, padded_width
from stepscope.kernels.attention.triton_forward_kernels import attention_forward


def forward(
    q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *, causal: bool, scale: float, tf32: bool
) -> tuple[Tensor, Tensor]:
    """o, laid out in memory as q is, and the log-sum-exp of the scores (natural logarithm, fp32)."""
    o_BHLD = torch.empty_like(q_BHLD)
    lse_BHL = torch.empty(q_BHLD.shape[:-1], dtype=torch.float32, device=q_BHLD.device)
    if k_BGKD.shape[2] == 0:
        return o_BHLD.zero_(), lse_BHL.fill_(math.inf)
    if q_BHLD.numel() == 0:
        return o_BHLD, lse_BHL
    kind = launch.arithmetic(q_BHLD.dtype, tf32=tf32)
    tile = launch.tile_for("forward", kind, q_BHLD.shape[-1], q_BHLD.device, causal=causal)
    settings = launch.Settings(causal=causal, scale=scale, tf32=tf32)
    launch_forward(q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, tile, settings)
    return o_BHLD, lse_BHL


def launch_forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    tile: Tile,
    settings: launch.Settings,
) -> None:
    """Fill o and lse with a given tile."""
    batch, num_heads, num_queries, head_dim = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    kind = launch.arithmetic(q_BHLD.dtype, tf32=settings.tf32)
    width = padded_width(head_dim)
    attention_forward[(batch * num_heads * -(-num_queries // tile.block_m),)](
        # In fp32 q is split into two parts, which stay in shared memory only if it came by pointer.
        launch.source(q_BHLD, tile.block_m, width) if kind == "half" else q_BHLD,
        launch.source(k_BGKD, tile.block_n, width),
        launch.source(v_BGKD, tile.block_n, width),
        o_BHLD,
        lse_BHL,
        q_BHLD.stride(),
        k_BGKD.stride(),
        v_BGKD.stride(),
        o_BHLD.stride(),
        settings.scale,
        num_heads,
        num_heads // num_groups,
        num_queries,
        num_keys,
        WHOLE_KEYS=num_keys % tile.block_n == 0,
        **launch.constants(q_BHLD, tile, settings),
    )
