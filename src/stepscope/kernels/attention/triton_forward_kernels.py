"""The forward kernel in Triton: FlashAttention-2, one program for a tile of queries of one head.

Work: 4·L·K·D FLOPs a head (half of it when causal), and L·D + 2·K·D elements read, L·D + L written, once each if a
head's keys and values stay in L2: programs of one head are neighbours in the grid for that reason, longest rows first
when causal.

The softmax runs in base 2 with the scale folded into one multiplication; the log-sum-exp leaves as a natural
logarithm. A hidden score is -inf, so that its weight is zero whatever the maximum is; a large finite number would turn
a row that sees nothing silently into the mean of V. The running maximum, on the other hand, starts at the lowest
finite number: -inf minus -inf never happens, and costs no comparison. A row that sees nothing then ends with sum 0. It
gives zero, and +inf as its log-sum-exp, so that backward finds no weight in it.

One loop with a branch around the mask, not a loop for whole tiles and one for the rest: the two together take more
registers than there are (at D 128 on Hopper 92 bytes spilled, and 300 in the kernel for dK and dV; the one loop spills
none).
"""

# M queries in a tile, N keys in a tile, D head dim padded to a power of two.

import triton
import triton.language as tl

from stepscope.kernels.attention.triton_product import multiply
from stepscope.kernels.attention.triton_tile_io import load_tile, store_tile
from stepscope.kernels.attention.triton_visibility import keys_of_queries, sees

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Instead of zero, which would make NaN of a hidden score: scores are the same to the last bit of the softmax.
SMALLEST_SCALE = tl.constexpr(1e-37)


@triton.jit
def locate(num_blocks, num_heads, GROWING: tl.constexpr):
    """(block, head, batch) of this program; blocks of one head are neighbours, the longest first. GROWING: a later
    block has more to do."""
    program = tl.program_id(0)
    block = program % num_blocks
    if GROWING:
        block = num_blocks - 1 - block
    sequence = program // num_blocks
    return block, sequence % num_heads, sequence // num_heads


@triton.jit(do_not_specialize=["num_heads", "heads_per_group", "num_queries", "num_keys"])
def attention_forward(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides,
    scale, num_heads, heads_per_group, num_queries, num_keys,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of BLOCK_M queries. WHOLE_KEYS promises that BLOCK_N divides the number of keys."""
    block, head, batch = locate(tl.cdiv(num_queries, BLOCK_M), num_heads, CAUSAL)
    group = head // heads_per_group
    first_query = block * BLOCK_M
    query_M = first_query + tl.arange(0, BLOCK_M)
    q_MD = load_tile(q, q_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WIDTH, False)
    max_M = tl.full([BLOCK_M], LOWEST, tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    scale2 = tl.maximum(scale * LOG2_E, SMALLEST_SCALE)
    all_see, end = keys_of_queries(first_query, num_queries, num_keys, BLOCK_M, CAUSAL)
    for first_key in tl.range(0, end, BLOCK_N):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        k_ND = load_tile(k, k_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WIDTH, WHOLE_KEYS)
        scores_MN = multiply(q_MD, k_ND.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
        if CAUSAL or not WHOLE_KEYS:
            if first_key + BLOCK_N > all_see:
                key_N = first_key + tl.arange(0, BLOCK_N)
                visible_MN = sees(query_M[:, None], key_N[None, :], num_queries, num_keys, CAUSAL)
                scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * scale2)
        weights_MN = tl.math.exp2(scores_MN * scale2 - new_max_M[:, None])
        shrink_M = tl.math.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
        acc_MD = acc_MD * shrink_M[:, None]
        v_ND = load_tile(v, v_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WIDTH, WHOLE_KEYS)
        acc_MD = multiply(weights_MN.to(v_ND.dtype), v_ND, acc_MD, PRECISION)
        max_M = new_max_M
    blind_M = sum_M == 0.0
    sum_M = tl.where(blind_M, 1.0, sum_M)
    store_tile(o, o_strides, batch, head, first_query, num_queries, acc_MD / sum_M[:, None], HEAD_DIM, BLOCK_M, WIDTH)
    lse_M = tl.where(blind_M, float("inf"), (max_M + tl.math.log2(sum_M)) * LN_2)
    row = (tl.cast(batch, tl.int64) * num_heads + head) * num_queries
    tl.store(lse + row + query_M, lse_M, mask=query_M < num_queries)
