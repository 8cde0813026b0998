"""FlashAttention-2 in Triton, backward: the launcher of two kernels, which `triton_backward_kernels` explains.

The same input gives the same bits: each gradient is written by the one program that computes it.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import torch
from torch import Tensor

from stepscope.kernels.attention import triton_launch as launch
from stepscope.kernels.attention.tiles import Tile, padded_width
from stepscope.kernels.attention.triton_backward_kernels import attention_backward_keys, attention_backward_queries

ROW_ALIGNMENT = 16  # numbers: what Triton looks for in a stride


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
    """dq, dk and dv, each laid out in memory as its input is."""
    dq_BHLD, dk_BGKD, dv_BGKD = torch.empty_like(q_BHLD), torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)
    if q_BHLD.numel() == 0 or k_BGKD.numel() == 0:
        return dq_BHLD.zero_(), dk_BGKD.zero_(), dv_BGKD.zero_()
    problem = launch.arithmetic(q_BHLD.dtype, tf32=tf32), q_BHLD.shape[-1], q_BHLD.device
    queries_tile = launch.tile_for("backward_queries", *problem, causal=causal)
    keys_tile = launch.tile_for("backward_keys", *problem, causal=causal)
    settings = launch.Settings(causal=causal, scale=scale, tf32=tf32)
    rows = row_values(lse_BHL)
    launch_queries(do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, dq_BHLD, rows, queries_tile, settings)
    launch_keys(do_BHLD, q_BHLD, k_BGKD, v_BGKD, dk_BGKD, dv_BGKD, rows, keys_tile, settings)
    return dq_BHLD, dk_BGKD, dv_BGKD


def row_values(lse_BHL: Tensor) -> Tensor:
    """Room for what the first kernel leaves for the second: (B·H, 2, queries padded so that each row is aligned)."""
    batch, num_heads, num_queries = lse_BHL.shape
    padded = -(-num_queries // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(batch * num_heads, 2, padded, dtype=torch.float32, device=lse_BHL.device)


def launch_queries(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    dq_BHLD: Tensor,
    rows: Tensor,
    tile: Tile,
    settings: launch.Settings,
) -> None:
    """Fill dq and rows with a given tile."""
    batch, num_heads, num_queries, head_dim = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    width = padded_width(head_dim)
    attention_backward_queries[(batch * num_heads * -(-num_queries // tile.block_m),)](
        q_BHLD,
        launch.source(k_BGKD, tile.block_n, width),
        launch.source(v_BGKD, tile.block_n, width),
        o_BHLD,
        do_BHLD,
        dq_BHLD,
        lse_BHL,
        rows,
        q_BHLD.stride(),
        k_BGKD.stride(),
        v_BGKD.stride(),
        o_BHLD.stride(),
        do_BHLD.stride(),
        dq_BHLD.stride(),
        settings.scale,
        num_heads,
        num_heads // num_groups,
        num_queries,
        num_keys,
        rows.shape[-1],
        WHOLE_KEYS=num_keys % tile.block_n == 0,
        **launch.constants(q_BHLD, tile, settings),
    )


def launch_keys(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    dk_BGKD: Tensor,
    dv_BGKD: Tensor,
    rows: Tensor,
    tile: Tile,
    settings: launch.Settings,
) -> None:
    """Fill dk and dv with a given tile, from the rows that `launch_queries` left."""
    batch, num_heads, num_queries, head_dim = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    width = padded_width(head_dim)
    attention_backward_keys[(batch * num_groups * -(-num_keys // tile.block_n),)](
        launch.source(q_BHLD, tile.block_m, width),
        k_BGKD,
        v_BGKD,
        launch.source(do_BHLD, tile.block_m, width),
        dk_BGKD,
        dv_BGKD,
        launch.row_source(rows, num_queries, tile.block_m),
        q_BHLD.stride(),
        k_BGKD.stride(),
        v_BGKD.stride(),
        do_BHLD.stride(),
        dk_BGKD.stride(),
        dv_BGKD.stride(),
        settings.scale,
        num_groups,
        num_heads // num_groups,
        num_queries,
        num_keys,
        rows.shape[-1],
        WHOLE_QUERIES=num_queries % tile.block_m == 0,
        **launch.constants(q_BHLD, tile, settings),
    )
