"""The Triton kernels, for every GPU since Ampere: FlashAttention-2, forward and backward. They import only Triton, so
that they can be compiled without torch; `triton_launch.py` launches them.

Forward has one program per query tile and head. Its work: 4·L·K·D FLOPs per head (half of it when causal), and L·D +
2·K·D elements read, L·D + L written, once each if a head's keys and values stay in L2: for that reason programs of one
head are neighbors in the grid, longest rows first when causal.

The softmax runs in base 2 with the scale folded into one multiplication; the log-sum-exp is returned as a natural
logarithm. A masked score is -inf, so that its weight is zero whatever the maximum is; a large finite number would
silently turn a row that sees nothing into the mean of V. The running maximum, on the other hand, starts at the lowest
finite number: -inf minus -inf never happens, and costs no comparison. A row that sees nothing then ends with sum 0. It
returns zero, and +inf as its log-sum-exp, so that backward finds no weight in it.

In both directions there is one loop with a branch around the mask, not one loop for full tiles and one for the rest:
together they take more registers than there are (at D 128 on Hopper 92 bytes spilled, and 300 in the kernel for dK and
dV; the single loop spills none).

Backward is two deterministic kernels. `attention_backward_queries` computes dQ, one program per query tile;
`attention_backward_keys` computes dK and dV, one program per key tile of one key/value head, which loops over all query
heads of its group. Nothing is summed across programs, so the same input gives the same bits. The price is seven matmuls
where a single kernel with atomic additions to dQ needs five: 14·L·K·D FLOPs per head instead of 10 (half of it when
causal).

The first kernel also writes what the second needs of each row: delta = rowsum(o · do), from the stored o, and the
log-sum-exp in base 2. This saves a launch compared with a separate kernel for delta, and one read of do. Both are in
`rows`, (B·H, 2, padded queries), padded so that every head's numbers are aligned. A row beyond the last reads as zero,
here as in q and do, and then adds nothing whatever its weight.
"""

# M queries in a tile, N keys in a tile, D head dim padded to a power of two.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Instead of zero, which would turn a masked score into NaN: scores are the same to the last bit of the softmax.
SMALLEST_SCALE = tl.constexpr(1e-37)


# --- Tile matmuls ---
#
# fp32 has full fp32 accuracy, on tensor cores that only support tf32. A tf32 number has ten bits after the first. So
# each fp32 operand is split into a high and a low part, and three matmuls instead of one give the fp32 result, except
# for the product of the two low parts. The tensor cores also round towards zero: a long sum drifts, and on an H200 the
# error was up to five times PyTorch's. So the three products of a tile are summed separately, the small ones first, and
# this short sum is then added to the rest in fp32, which rounds to nearest.


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32. PRECISION only applies to fp32 operands: "tf32" or "tf32x3"."""
    if PRECISION == "tf32x3":
        a_high, a_low = _split(a)
        b_high, b_low = _split(b)
        part = tl.dot(a_low, b_high, input_precision="tf32")
        part = tl.dot(a_high, b_low, part, input_precision="tf32")
        acc += tl.dot(a_high, b_high, part, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="tf32")
    return acc


@triton.jit
def _split(x):
    """Split x into a high and a low part. The high one is x rounded to the nearest tf32, so that the low one has twelve
    bits, of which the tensor cores truncate the last. If the high part were truncated too, the low one would lose two
    bits, always upwards. A NaN stays NaN in the low part, whatever rounding makes of it in the high one.
    """
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


# --- Which keys a query sees, and what follows for tiles ---
#
# The one place that a new kind of mask has to change. A causal mask is aligned at the end: query i of L sees key j of K
# iff j <= i + K - L. Tiles that no query sees are skipped. Tiles in which every query sees every key need no mask, and
# kernels branch around it: it costs a comparison and a select for every score.


@triton.jit
def sees(query, key, num_queries, num_keys, CAUSAL: tl.constexpr):
    """Whether each query sees each key; the two broadcast. Undefined for queries beyond the last."""
    if CAUSAL:
        visible = key <= query + (num_keys - num_queries)
    else:
        visible = key < num_keys
    return visible


@triton.jit
def keys_of_queries(first_query, num_queries, num_keys, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """For BLOCK_M queries: every one of them sees the keys before `all_see`, and none sees a key from `end` on."""
    all_see = num_keys
    end = num_keys
    if CAUSAL:
        seen_by_first = first_query + 1 + num_keys - num_queries
        all_see = tl.minimum(num_keys, tl.maximum(0, seen_by_first))
        end = tl.minimum(num_keys, tl.maximum(0, seen_by_first + BLOCK_M - 1))
    return all_see, end


@triton.jit
def queries_of_keys(first_key, num_queries, num_keys, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """For BLOCK_N keys: no query before `first` sees any of them, and every query from `all_see` on sees them all."""
    first = 0
    all_see = 0
    if CAUSAL:
        first = tl.maximum(0, first_key + num_queries - num_keys)
        all_see = tl.maximum(0, first_key + BLOCK_N - 1 + num_queries - num_keys)
    return first, all_see


# --- One tile of a strided (B, H, L, D) tensor in memory ---
#
# A kernel's source is either a pointer or a host tensor descriptor with block (1, 1, rows, width); the same kernel
# takes both. Pointers work on every GPU and with every stride. Descriptors leave the address arithmetic, the bounds and
# the padding of D to Hopper's copy engine, which frees registers for the accumulators.
#
# Offsets are 64-bit: a batch of long sequences exceeds 2**31 elements, and heads may be far apart.


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows from `start`, with HEAD_DIM padded to WIDTH. Zero beyond `length`, unless WHOLE promises that all
    rows exist.
    """
    if isinstance(source, tl.tensor_descriptor):
        tile = source.load([batch, head, start, 0]).reshape([ROWS, WIDTH])
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        pointers = _address(source, strides, batch, head, start, row, column)
        if WHOLE and HEAD_DIM == WIDTH:
            tile = tl.load(pointers)
        elif WHOLE:
            tile = tl.load(pointers, mask=column[None, :] < HEAD_DIM, other=0.0)
        elif HEAD_DIM == WIDTH:
            tile = tl.load(pointers, mask=start + row[:, None] < length, other=0.0)
        else:
            tile = tl.load(pointers, mask=(start + row[:, None] < length) & (column[None, :] < HEAD_DIM), other=0.0)
    return tile


@triton.jit
def load_row(source, stride, index, start, length, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Load ROWS numbers from `start` of row `index` of a table. Zero beyond `length`, unless WHOLE promises that all
    exist.
    """
    if isinstance(source, tl.tensor_descriptor):
        row = source.load([index, start]).reshape([ROWS])
    else:
        place = start + tl.arange(0, ROWS)
        pointers = source + tl.cast(index, tl.int64) * stride + place
        if WHOLE:
            row = tl.load(pointers)
        else:
            row = tl.load(pointers, mask=place < length, other=0.0)
    return row


@triton.jit
def store_tile(
    target, strides, batch, head, start, length, tile,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the rows of `tile` that are within `length`, and their first HEAD_DIM columns, in the target's dtype."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    pointers = _address(target, strides, batch, head, start, row, column)
    inside = start + row[:, None] < length
    if HEAD_DIM < WIDTH:
        inside = inside & (column[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _address(base, strides, batch, head, start, row, column):
    first = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    first += tl.cast(start, tl.int64) * strides[2]
    return base + first + row.to(tl.int64)[:, None] * strides[2] + column.to(tl.int64)[None, :] * strides[3]


@triton.jit
def locate(num_blocks, num_heads, GROWING: tl.constexpr):
    """(block, head, batch) of this program; blocks of one head are neighbors, the longest first. GROWING: later blocks
    have more work.
    """
    program = tl.program_id(0)
    block = program % num_blocks
    if GROWING:
        block = num_blocks - 1 - block
    sequence = program // num_blocks
    return block, sequence % num_heads, sequence // num_heads


# --- Forward ---


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


# --- Backward ---


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
            # Scores and weights are transposed, keys by queries: they are the left operand of the last two matmuls.
            scores_NM = multiply(k_ND, q_MD.T, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
            weights_NM = tl.math.exp2(scores_NM * scale2 - lse2_M[None, :])
            # Keys beyond the last need no mask: their results are not stored.
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
