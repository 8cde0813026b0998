"""The backward kernels in Triton: FlashAttention-2 in two deterministic kernels.

`attention_backward_queries` makes dQ, one program for a tile of queries; `attention_backward_keys` makes dK and dV,
one program for a tile of keys of one key/value head, which goes through all query heads of its group. Nothing is added
up between programs, so the same input gives the same bits. The price is seven matrix products where a single kernel
with atomic additions to dQ makes five: 14·L·K·D FLOPs a head instead of 10 (half of it when causal).

The first kernel also leaves what the second needs of each row: delta = rowsum(o · do), from the stored o, and the
log-sum-exp in base 2. One launch less than a kernel of its own for delta, and do is read once less. Both are in `rows`,
(B·H, 2, padded queries), padded so that every head's numbers are aligned. A row beyond the last reads as zero, here as
in q and do, and then adds nothing whatever its weight.

One loop with a branch around the mask, for the reason given in `triton_forward_kernels`.
"""

# M queries in a tile, N keys in a tile, D head dim padded to a power of two.

import triton
import triton.language as tl

from stepscope.kernels.attention.triton_forward_kernels import LOG2_E, locate
from stepscope.kernels.attention.triton_product import multiply
from stepscope.kernels.attention.triton_tile_io import load_row, load_tile, store_tile
from stepscope.kernels.attention.triton_visibility import keys_of_queries, queries_of_keys, sees


@triton.jit(do_not_specialize=["num_heads", "heads_per_group", "num_queries", "num_keys"])
def attention_backward_queries(
    q, k, v, o, do, dq, lse, rows, q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides,
    scale, num_heads, heads_per_group, num_queries, num_keys, padded_queries,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, delta and the base-2 log-sum-exp of BLOCK_M queries. WHOLE_KEYS: BLOCK_N divides the number of keys."""
    block, head, batch = locate(tl.cdiv(num_queries, BLOCK_M), num_heads, CAUSAL)
    group = head // heads_per_group
    first_query = block * BLOCK_M
    query_M = first_query + tl.arange(0, BLOCK_M)
    sequence = tl.cast(batch, tl.int64) * num_heads + head
    do_MD = load_tile(do, do_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WIDTH, False)
    o_MD = load_tile(o, o_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WIDTH, False)
    delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    lse_M = tl.load(lse + sequence * num_queries + query_M, mask=query_M < num_queries, other=0.0)
    lse2_M = lse_M * LOG2_E
    tl.store(rows + (2 * sequence) * padded_queries + query_M, lse2_M, mask=query_M < num_queries)
    tl.store(rows + (2 * sequence + 1) * padded_queries + query_M, delta_M, mask=query_M < num_queries)
    q_MD = load_tile(q, q_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WIDTH, False)
    dq_MD = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    scale2 = scale * LOG2_E
    all_see, end = keys_of_queries(first_query, num_queries, num_keys, BLOCK_M, CAUSAL)
    for first_key in tl.range(0, end, BLOCK_N):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        k_ND = load_tile(k, k_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WIDTH, WHOLE_KEYS)
        v_ND = load_tile(v, v_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WIDTH, WHOLE_KEYS)
        scores_MN = multiply(q_MD, k_ND.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
        weights_MN = tl.math.exp2(scores_MN * scale2 - lse2_M[:, None])
        if CAUSAL or not WHOLE_KEYS:
            if first_key + BLOCK_N > all_see:
                key_N = first_key + tl.arange(0, BLOCK_N)
                visible_MN = sees(query_M[:, None], key_N[None, :], num_queries, num_keys, CAUSAL)
                weights_MN = tl.where(visible_MN, weights_MN, 0.0)
        dweights_MN = multiply(do_MD, v_ND.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
        dscores_MN = (weights_MN * (dweights_MN - delta_M[:, None])).to(k_ND.dtype)
        dq_MD = multiply(dscores_MN, k_ND, dq_MD, PRECISION)
    store_tile(dq, dq_strides, batch, head, first_query, num_queries, dq_MD * scale, HEAD_DIM, BLOCK_M, WIDTH)


@triton.jit(do_not_specialize=["num_groups", "heads_per_group", "num_queries", "num_keys"])
def attention_backward_keys(
    q, k, v, do, dk, dv, rows, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    scale, num_groups, heads_per_group, num_queries, num_keys, padded_queries,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys. WHOLE_QUERIES promises that BLOCK_M divides the number of queries."""
    block, group, batch = locate(tl.cdiv(num_keys, BLOCK_N), num_groups, False)
    first_key = block * BLOCK_N
    k_ND = load_tile(k, k_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WIDTH, False)
    v_ND = load_tile(v, v_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WIDTH, False)
    dk_ND = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    scale2 = scale * LOG2_E
    first, all_see = queries_of_keys(first_key, num_queries, num_keys, BLOCK_N, CAUSAL)
    for member in tl.range(0, heads_per_group):
        head = group * heads_per_group + member
        sequence = (batch * num_groups + group) * heads_per_group + member
        for first_query in tl.range(first // BLOCK_M * BLOCK_M, num_queries, BLOCK_M):
            first_query = tl.multiple_of(first_query, BLOCK_M)
            q_MD = load_tile(
                q, q_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WIDTH, WHOLE_QUERIES
            )
            do_MD = load_tile(
                do, do_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WIDTH, WHOLE_QUERIES
            )
            lse2_M = load_row(rows, padded_queries, 2 * sequence, first_query, num_queries, BLOCK_M, WHOLE_QUERIES)
            delta_M = load_row(rows, padded_queries, 2 * sequence + 1, first_query, num_queries, BLOCK_M, WHOLE_QUERIES)
            # Scores and weights are transposed, keys by queries: they are the left operand of the last two products.
            scores_NM = multiply(k_ND, q_MD.T, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
            weights_NM = tl.math.exp2(scores_NM * scale2 - lse2_M[None, :])
            # Keys beyond the last need no mask: what is computed for them is not stored.
            if CAUSAL:
                if first_query < all_see:
                    query_M = first_query + tl.arange(0, BLOCK_M)
                    key_N = first_key + tl.arange(0, BLOCK_N)
                    visible_NM = sees(query_M[None, :], key_N[:, None], num_queries, num_keys, CAUSAL)
                    weights_NM = tl.where(visible_NM, weights_NM, 0.0)
            dweights_NM = multiply(v_ND, do_MD.T, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
            dv_ND = multiply(weights_NM.to(do_MD.dtype), do_MD, dv_ND, PRECISION)
            dscores_NM = (weights_NM * (dweights_NM - delta_M[None, :])).to(q_MD.dtype)
            dk_ND = multiply(dscores_NM, q_MD, dk_ND, PRECISION)
    store_tile(dk, dk_strides, batch, group, first_key, num_keys, dk_ND * scale, HEAD_DIM, BLOCK_N, WIDTH)
    store_tile(dv, dv_strides, batch, group, first_key, num_keys, dv_ND, HEAD_DIM, BLOCK_N, WIDTH)
