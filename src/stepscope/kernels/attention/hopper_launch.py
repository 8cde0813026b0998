"""Launches the Hopper kernels. `problem.is_tma_able` says which tensors the bulk copy engine (TMA) can read."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim, N = B * H.

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stepscope.kernels.attention.hopper_backward_kernel import (
    KEYS_OF_PROGRAM,
    ROWS_OF_TILE,
    attention_hopper_backward,
    attention_hopper_finish,
    attention_hopper_prepare,
    backward_settings,
)
from stepscope.kernels.attention.hopper_forward_kernel import (
    KEYS_OF_TILE,
    ROWS_OF_CONSUMER,
    attention_hopper_forward,
    forward_settings,
    padded_head,
)
from stepscope.kernels.attention.problem import is_tma_able, tma_strides

PREPARED_ROWS = 128  # a multiple of the rows of every tile
FINISHED_ROWS = 64
_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def forward(
    q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *, causal: bool, scale: float, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row (natural logarithm, fp32). Only fp16 and bf16, so tf32 does not
    apply.
    """
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
    settings = forward_settings(width, causal=causal, whole_keys=num_keys % KEYS_OF_TILE == 0)
    num_tiles = -(-num_queries // (settings["CONSUMERS"] * ROWS_OF_CONSUMER))
    # Under a causal mask, a long tile and a short one make an item.
    num_items = batch * num_heads * ((num_tiles + 1) // 2 if causal else num_tiles)
    attention_hopper_forward[(min(num_items, _count_multiprocessors(q_BHLD.device)),)](
        _describe(q_BHLD, ROWS_OF_CONSUMER, width),
        _describe(k_BGKD, KEYS_OF_TILE, width),
        _describe(v_BGKD, KEYS_OF_TILE, width),
        _describe(o_BHLD, ROWS_OF_CONSUMER, width),
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
    """Return the gradients of q, k and v. dq is summed in no fixed order: its last bits differ between runs."""
    del tf32
    if not is_tma_able(do_BHLD):
        do_BHLD = do_BHLD.contiguous()  # the gradient of a sum, for example, is one number broadcast
    batch, num_heads, num_queries, head_dim = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    dq_BHLD, dk_BGKD, dv_BGKD = (torch.empty_like(x) for x in (q_BHLD, k_BGKD, v_BGKD))
    if q_BHLD.numel() == 0 or k_BGKD.numel() == 0:
        return dq_BHLD.zero_(), dk_BGKD.zero_(), dv_BGKD.zero_()
    width = padded_head(head_dim)
    rows = ROWS_OF_TILE[width]
    heads = batch * num_heads
    padded = -(-num_queries // PREPARED_ROWS) * PREPARED_ROWS
    statistics_2NL = torch.empty(2, heads, padded, dtype=torch.float32, device=q_BHLD.device)
    sums_BHLD = torch.empty(q_BHLD.shape, dtype=torch.float32, device=q_BHLD.device)
    attention_hopper_prepare[(padded // PREPARED_ROWS * heads,)](
        o_BHLD, do_BHLD, lse_BHL, statistics_2NL[0], statistics_2NL[1], sums_BHLD, num_heads, num_queries, padded,
        head_dim, *o_BHLD.stride()[:3], *do_BHLD.stride(), ROWS=PREPARED_ROWS, BLOCK_D=width, num_warps=8,
    )  # fmt: skip
    attention_hopper_backward[(-(-num_keys // KEYS_OF_PROGRAM) * batch * num_groups,)](
        _describe(q_BHLD, rows, width),
        _describe(k_BGKD, KEYS_OF_PROGRAM, width),
        _describe(v_BGKD, KEYS_OF_PROGRAM // 2, width),
        _describe(do_BHLD, rows, width),
        _describe_rows(statistics_2NL[0], rows),
        _describe_rows(statistics_2NL[1], rows),
        _describe(sums_BHLD, 64, 64),
        _describe(dk_BGKD, KEYS_OF_PROGRAM // 2, width),
        _describe(dv_BGKD, KEYS_OF_PROGRAM // 2, width),
        scale,
        num_heads,
        num_groups,
        num_queries,
        num_keys,
        **backward_settings(width, causal=causal, whole_keys=num_keys % KEYS_OF_PROGRAM == 0),
    )
    attention_hopper_finish[(-(-num_queries // FINISHED_ROWS) * heads,)](
        sums_BHLD, dq_BHLD, scale, num_heads, num_queries, head_dim, *dq_BHLD.stride()[:3],
        ROWS=FINISHED_ROWS, BLOCK_D=width, num_warps=4,
    )  # fmt: skip
    return dq_BHLD, dk_BGKD, dv_BGKD


# --- Tensor descriptors for the copy engine ---


def _describe(x_BHLD: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x in tiles of rows × columns of one head. Elements outside read as zero and are not written."""
    layout = _tile_layout(rows, columns, x_BHLD.dtype)
    return _make_descriptor(x_BHLD, list(x_BHLD.shape), tma_strides(x_BHLD), [1, 1, rows, columns], layout)


def _describe_rows(x_NL: Tensor, length: int) -> TensorDescriptor:
    """A matrix with one number per row of a head, in blocks of a tile's length."""
    return _make_descriptor(x_NL, list(x_NL.shape), list(x_NL.stride()), [1, length], _ROWS_LAYOUT)


def _make_descriptor(
    x: Tensor, sizes: list[int], strides: list[int], block: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Build a descriptor without its constructor, whose checks were made already (`is_tma_able`) and take six times as
    long as the rest. A backward pass has nine descriptors, and short sequences are CPU-bound.
    """
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, sizes, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _GLUON_TYPES[dtype])


@cache
def _count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
