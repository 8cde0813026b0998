"""The Triton kernels, for every GPU since Ampere: FlashAttention-2, forward and backward. They do not import
torch, so that they can be compiled without it; `triton_launch.py` launches them.

Forward has one program per query tile and head. Its work: 2·L·K·(D + E) FLOPs per head (half of it when causal), and
L·D + K·(D + E) elements read, L·E + L written, once each if a head's keys and values stay in L2: for that reason
programs of one head are neighbors in the grid, longest rows first when causal.

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
where a single kernel with atomic additions to dQ needs five: 2·L·K·(4·D + 3·E) FLOPs per head instead of 2·L·K·(3·D +
2·E), half of it when causal.

The first kernel also writes what the second needs of each row: delta = rowsum(o · do), from the stored o, and the
log-sum-exp in base 2. This saves a launch compared with a separate kernel for delta, and one read of do. Both are in
`rows`, (B·H, 2, padded queries), padded so that every head's numbers are aligned. A row beyond the last reads as zero,
here as in q and do, and then adds nothing whatever its weight, as long as that is finite.

What a call adds to plain attention comes in one tuple, `KernelExtras`. Triton compiles a kernel for each combination of
members that are None, so that a kernel only contains what its call asks for, and plain attention has none of it.
"""

# M queries in a tile, N keys in a tile, D head dim of q and k, E that of v. D or E columns are a tuple of tiles.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stepscope.kernels.attention import tiles

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Instead of zero, which would turn a masked score into NaN: scores are the same to the last bit of the softmax.
SMALLEST_SCALE = tl.constexpr(1e-37)


class KernelExtras(NamedTuple):
    """`Extras` as kernels take them. A member is None if the call does not ask for it.

    Strides are members, and not in tuples of their own: triton 3.6.0 loses constants in tuples within tuples. They are
    zero in a dimension that is broadcast.
    """

    left: Any = None
    right: Any = None  # None under a causal mask, which is a right of 0
    softcap: Any = None
    bias: Any = None  # (B, H, L, K)
    bias_batch_stride: Any = None
    bias_head_stride: Any = None
    bias_query_stride: Any = None  # None, and not zero, if all queries have the same bias
    bias_key_stride: Any = None
    bias_keys: Any = None  # K: unlike `num_keys`, Triton knows if 16 divides it, and then loads several numbers at once
    slopes: Any = None  # (B, H)
    slopes_batch_stride: Any = None
    slopes_head_stride: Any = None
    sinks: Any = None  # (H,)
    document_starts: Any = None  # (B, L), as the next
    document_ends: Any = None


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
def multiply_rows(a, b, PRECISION: tl.constexpr):
    """a @ bᵀ, for tuples of tiles."""
    products = multiply(a[0], b[0].T, tl.zeros([a[0].shape[0], b[0].shape[0]], tl.float32), PRECISION)
    if len(a) > 1:
        products = multiply(a[1], b[1].T, products, PRECISION)
    return products


@triton.jit
def multiply_columns(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, where b and acc are tuples of tiles."""
    a = a.to(b[0].dtype)
    main = multiply(a, b[0], acc[0], PRECISION)
    return (main, multiply(a, b[1], acc[1], PRECISION)) if len(b) > 1 else (main,)


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
# The one place that a new kind of mask has to change. Every mask is aligned at the end: query i of L is at position
# i + K - L, and a causal mask shows it the keys up to there. The keys that a query sees are always a range, and so are
# the queries that see a key. Later queries see later ranges, so the first and the last query of a tile bound the range
# of a tile. Tiles that no query sees are skipped. Tiles in which every query sees every key need no mask, and kernels
# branch around it: it costs a comparison and a select for every score.
#
# A document is the same range of positions for its queries as for its keys.


@triton.jit
def load_document(position, batch, length, extras):
    """The first position of a position's document, and the one after its last. Beyond the last position, those of the
    last. Without documents, everything is one.
    """
    start = 0
    end = length
    if extras.document_starts is not None:
        place = tl.cast(batch, tl.int64) * length + tl.minimum(position, length - 1)
        start = tl.load(extras.document_starts + place)
        end = tl.load(extras.document_ends + place)
    return start, end


@triton.jit
def sees(query, key, num_queries, num_keys, extras, CAUSAL: tl.constexpr):
    """Whether each query sees each key, if they are in the same document; the two broadcast. Undefined for queries
    beyond the last.
    """
    if CAUSAL:
        visible = key <= query + (num_keys - num_queries)
    else:
        visible = key < num_keys
    if extras.right is not None:
        visible = visible & (key <= query + (num_keys - num_queries) + extras.right)
    if extras.left is not None:
        visible = visible & (key >= query + (num_keys - num_queries) - extras.left)
    return visible


@triton.jit
def contains(document, position):
    """Whether each document contains each position; the two broadcast."""
    start, end = document
    return (position >= start) & (position < end)


@triton.jit
def keys_of_query(query, batch, num_queries, num_keys, extras, CAUSAL: tl.constexpr):
    """The query sees the keys from `first` on and before `end`."""
    first, end = load_document(query, batch, num_keys, extras)
    behind = query + 1 + num_keys - num_queries
    if extras.left is not None:
        first = tl.maximum(first, behind - 1 - extras.left)
    if CAUSAL:
        end = tl.minimum(num_keys, tl.maximum(0, behind))
    elif extras.right is not None:
        end = tl.minimum(end, tl.maximum(0, behind + extras.right))
    return first, end


@triton.jit
def queries_of_key(key, batch, num_queries, num_keys, extras, CAUSAL: tl.constexpr):
    """The queries from `first` on and before `end` see the key."""
    first, end = load_document(key, batch, num_queries, extras)
    query = key + num_queries - num_keys
    if extras.left is not None:
        end = tl.minimum(end, query + 1 + extras.left)
    if CAUSAL:
        first = tl.maximum(0, query)
    elif extras.right is not None:
        first = tl.maximum(first, query - extras.right)
    return first, end


@triton.jit
def keys_of_queries(first_query, batch, num_queries, num_keys, extras, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """For BLOCK_M queries: none sees a key before `first` or from `end` on, and every one of them sees the keys from
    `all_from` on and before `all_to`.
    """
    first, all_to = keys_of_query(first_query, batch, num_queries, num_keys, extras, CAUSAL)
    all_from, end = keys_of_query(first_query + BLOCK_M - 1, batch, num_queries, num_keys, extras, CAUSAL)
    return first, end, all_from, all_to


@triton.jit
def queries_of_keys(first_key, batch, num_queries, num_keys, extras, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """For BLOCK_N keys: no query before `first` or from `end` on sees any of them, and every query from `all_from` on
    and before `all_to` sees them all.
    """
    first, all_to = queries_of_key(first_key, batch, num_queries, num_keys, extras, CAUSAL)
    all_from, end = queries_of_key(first_key + BLOCK_N - 1, batch, num_queries, num_keys, extras, CAUSAL)
    return first, end, all_from, all_to


# --- Scores ---
#
# In base 2: everything that a score is made of is multiplied by the logarithm of e.


@triton.jit
def change_scores(
    products, query, key, batch, head, slope, scale, num_queries, num_keys, extras, PRECISION: tl.constexpr
):
    """The scores in base 2 from the products q·k, and the derivative of the softcap."""
    steepness = 1.0
    if extras.softcap is not None:
        tanh, steepness = scaled_tanh(products, scale / extras.softcap, PRECISION)
        scores = tanh * (extras.softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    if extras.bias is not None:
        scores += load_bias(batch, head, query, key, num_queries, extras).to(tl.float32) * LOG2_E
    if extras.slopes is not None:
        # The difference of two small integers is exact; that of their products with the slope would not be.
        position = query + (num_keys - num_queries)
        scores += (key.to(tl.float32) - position.to(tl.float32)) * (slope * LOG2_E)
    return scores, steepness


@triton.jit
def scaled_tanh(x, factor, PRECISION: tl.constexpr):
    """tanh(factor · x), and 1 - tanh², its derivative by factor · x.

    The distance to 1 is exact to the last bits where it is small, but near zero the tanh is a difference of two numbers
    close to 1, and at -1 its derivative is. That only matters in full fp32, where the tanh of small numbers is a
    polynomial, with the coefficients of the Cephes library, and that of negative numbers is mirrored.
    """
    if PRECISION == "tf32x3":
        x = x * factor
        below_one = 2.0 / (1.0 + tl.math.exp2(tl.abs(x) * (2 * LOG2_E)))
        tanh = tl.where(x < 0, below_one - 1.0, 1.0 - below_one)
        square = x * x
        series = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
        series = ((series + 1.33314422036e-1) * square - 3.33332819422e-1) * square
        tanh = tl.where(square < 0.625 * 0.625, x + x * series, tanh)
    else:
        below_one = 2.0 / (1.0 + tl.math.exp2(x * (factor * (2 * LOG2_E))))
        tanh = 1.0 - below_one
    return tanh, below_one * (2.0 - below_one)


@triton.jit
def load_slope(batch, head, extras):
    """The ALiBi slope of a head, or zero if there is none."""
    slope = 0.0
    if extras.slopes is not None:
        place = tl.cast(batch, tl.int64) * extras.slopes_batch_stride + head * extras.slopes_head_stride
        slope = tl.load(extras.slopes + place)
    return slope


@triton.jit
def load_bias(batch, head, query, key, num_queries, extras):
    """The bias of each query and key; the two broadcast. One without queries is loaded once for all of them."""
    first = tl.cast(batch, tl.int64) * extras.bias_batch_stride + tl.cast(head, tl.int64) * extras.bias_head_stride
    pointers = extras.bias + first + key.to(tl.int64) * extras.bias_key_stride
    inside = key < extras.bias_keys
    if extras.bias_query_stride is not None:
        pointers += query.to(tl.int64) * extras.bias_query_stride
        inside = inside & (query < num_queries)
    return tl.load(pointers, mask=inside, other=0.0)


# --- One tile of a strided (B, H, L, D) tensor in memory ---
#
# A kernel's source is either a pointer or a host tensor descriptor with block (1, 1, rows, width); the same kernel
# takes both. Pointers work on every GPU and with every stride. Descriptors leave the address arithmetic, the bounds and
# the padding of D to Hopper's copy engine, which frees registers for the accumulators.
#
# The sizes of a tile are powers of two, so a head is one tile or two (`tiles.padded_width`). A descriptor has one tile
# size, so the second tile, the tail, is loaded through a descriptor of its own.
#
# Offsets are 64-bit: a batch of long sequences exceeds 2**31 elements, and heads may be far apart.

padded_width = triton.constexpr_function(tiles.padded_width)
main_width = triton.constexpr_function(tiles.main_width)


@triton.jit
def load_tiles(
    source, tail_source, strides, batch, head, start, length,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `start`, as a tuple of tiles."""
    MAIN: tl.constexpr = main_width(padded_width(HEAD_DIM))
    TAIL: tl.constexpr = padded_width(HEAD_DIM) - MAIN
    tile = load_tile(source, strides, batch, head, start, length, HEAD_DIM, ROWS, 0, MAIN, WHOLE)
    if TAIL > 0:
        return tile, load_tile(tail_source, strides, batch, head, start, length, HEAD_DIM, ROWS, MAIN, TAIL, WHOLE)
    else:
        return (tile,)


@triton.jit
def load_tile(
    source, strides, batch, head, start, length,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WIDTH columns from FIRST. Zero beyond HEAD_DIM, and beyond `length` unless WHOLE promises that all rows exist."""
    if isinstance(source, tl.tensor_descriptor):
        tile = source.load([batch, head, start, FIRST]).reshape([ROWS, WIDTH])
    else:
        row = tl.arange(0, ROWS)
        column = FIRST + tl.arange(0, WIDTH)
        pointers = _address(source, strides, batch, head, start, row, column)
        if WHOLE and FIRST + WIDTH <= HEAD_DIM:
            tile = tl.load(pointers)
        elif WHOLE:
            tile = tl.load(pointers, mask=column[None, :] < HEAD_DIM, other=0.0)
        elif FIRST + WIDTH <= HEAD_DIM:
            tile = tl.load(pointers, mask=start + row[:, None] < length, other=0.0)
        else:
            tile = tl.load(pointers, mask=(start + row[:, None] < length) & (column[None, :] < HEAD_DIM), other=0.0)
    return tile


@triton.jit
def load_row(source, stride, index, start, length, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Load ROWS numbers from `start` of row `index`. Zero beyond `length`, unless WHOLE promises that all exist."""
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
def store_tiles(target, strides, batch, head, start, length, tiles, HEAD_DIM: tl.constexpr):
    """Store the rows that are within `length`, and their first HEAD_DIM columns, in the target's dtype."""
    _store_tile(target, strides, batch, head, start, length, tiles[0], HEAD_DIM, 0)
    if len(tiles) > 1:
        _store_tile(target, strides, batch, head, start, length, tiles[1], HEAD_DIM, tiles[0].shape[1])


@triton.jit
def _store_tile(target, strides, batch, head, start, length, tile, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr):
    row = tl.arange(0, tile.shape[0])
    column = FIRST + tl.arange(0, tile.shape[1])
    pointers = _address(target, strides, batch, head, start, row, column)
    inside = start + row[:, None] < length
    if FIRST + tile.shape[1] > HEAD_DIM:
        inside = inside & (column[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def make_zeros(HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    """A tuple of tiles to sum up in."""
    MAIN: tl.constexpr = main_width(padded_width(HEAD_DIM))
    TAIL: tl.constexpr = padded_width(HEAD_DIM) - MAIN
    main = tl.zeros([ROWS, MAIN], tl.float32)
    return (main, tl.zeros([ROWS, TAIL], tl.float32)) if TAIL > 0 else (main,)


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
    q, q_tail, k, k_tail, v, v_tail, o, lse, q_strides, k_strides, v_strides, o_strides,
    scale, num_heads, heads_per_group, num_queries, num_keys, extras,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of BLOCK_M queries. WHOLE_KEYS promises that BLOCK_N divides the number of keys."""
    HIDDEN: tl.constexpr = extras.left is not None or extras.right is not None or extras.document_starts is not None
    CHANGED: tl.constexpr = extras.softcap is not None or extras.bias is not None or extras.slopes is not None
    block, head, batch = locate(tl.cdiv(num_queries, BLOCK_M), num_heads, CAUSAL)
    group = head // heads_per_group
    first_query = block * BLOCK_M
    query_M = first_query + tl.arange(0, BLOCK_M)
    q_MD = load_tiles(q, q_tail, q_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, False)
    max_M = tl.full([BLOCK_M], LOWEST, tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if extras.sinks is not None:  # one more score that every row has seen; -inf is the same as none
        sink2 = tl.load(extras.sinks + head) * LOG2_E
        max_M = tl.maximum(max_M, sink2)
        sum_M = tl.math.exp2(sink2 - max_M)
    acc_ME = make_zeros(V_HEAD_DIM, BLOCK_M)
    scale2 = 1.0 if CHANGED else tl.maximum(scale * LOG2_E, SMALLEST_SCALE)
    slope = load_slope(batch, head, extras)
    document_M1 = load_document(query_M[:, None], batch, num_keys, extras)
    first, end, all_from, all_to = keys_of_queries(first_query, batch, num_queries, num_keys, extras, BLOCK_M, CAUSAL)
    for first_key in tl.range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        k_ND = load_tiles(k, k_tail, k_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WHOLE_KEYS)
        scores_MN = multiply_rows(q_MD, k_ND, PRECISION)
        if CHANGED:
            key_N = first_key + tl.arange(0, BLOCK_N)
            scores_MN, _ = change_scores(
                scores_MN, query_M[:, None], key_N[None, :], batch, head, slope, scale, num_queries, num_keys, extras,
                PRECISION,
            )  # fmt: skip
        if CAUSAL or not WHOLE_KEYS or HIDDEN:
            if first_key + BLOCK_N > all_to or (HIDDEN and first_key < all_from):
                key_N = first_key + tl.arange(0, BLOCK_N)
                visible_MN = sees(query_M[:, None], key_N[None, :], num_queries, num_keys, extras, CAUSAL)
                if extras.document_starts is not None:
                    visible_MN = visible_MN & contains(document_M1, key_N[None, :])
                scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * scale2)
        weights_MN = tl.math.exp2(scores_MN * scale2 - new_max_M[:, None])
        shrink_M = tl.math.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
        acc_ME = [acc * shrink_M[:, None] for acc in acc_ME]
        v_NE = load_tiles(v, v_tail, v_strides, batch, group, first_key, num_keys, V_HEAD_DIM, BLOCK_N, WHOLE_KEYS)
        acc_ME = multiply_columns(weights_MN, v_NE, acc_ME, PRECISION)
        max_M = new_max_M
    blind_M = sum_M == 0.0
    sum_M = tl.where(blind_M, 1.0, sum_M)
    o_ME = [acc / sum_M[:, None] for acc in acc_ME]
    store_tiles(o, o_strides, batch, head, first_query, num_queries, o_ME, V_HEAD_DIM)
    lse_M = tl.where(blind_M, float("inf"), (max_M + tl.math.log2(sum_M)) * LN_2)
    row = (tl.cast(batch, tl.int64) * num_heads + head) * num_queries
    tl.store(lse + row + query_M, lse_M, mask=query_M < num_queries)


# --- Backward ---


@triton.jit(do_not_specialize=["num_heads", "heads_per_group", "num_queries", "num_keys"])
def attention_backward_queries(
    q, k, k_tail, v, v_tail, o, do, dq, dbias, lse, rows,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides,
    scale, num_heads, heads_per_group, num_queries, num_keys, padded_queries, extras,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, delta and the base-2 log-sum-exp of BLOCK_M queries, and dbias, (B, H, L, K), unless it is None. WHOLE_KEYS:
    BLOCK_N divides the number of keys.
    """
    HIDDEN: tl.constexpr = extras.left is not None or extras.right is not None or extras.document_starts is not None
    CHANGED: tl.constexpr = extras.softcap is not None or extras.bias is not None or extras.slopes is not None
    block, head, batch = locate(tl.cdiv(num_queries, BLOCK_M), num_heads, CAUSAL)
    group = head // heads_per_group
    first_query = block * BLOCK_M
    query_M = first_query + tl.arange(0, BLOCK_M)
    sequence = tl.cast(batch, tl.int64) * num_heads + head
    do_ME = load_tiles(do, do, do_strides, batch, head, first_query, num_queries, V_HEAD_DIM, BLOCK_M, False)
    o_ME = load_tiles(o, o, o_strides, batch, head, first_query, num_queries, V_HEAD_DIM, BLOCK_M, False)
    delta_M = tl.sum(o_ME[0].to(tl.float32) * do_ME[0].to(tl.float32), 1)
    if len(o_ME) > 1:
        delta_M += tl.sum(o_ME[1].to(tl.float32) * do_ME[1].to(tl.float32), 1)
    lse_M = tl.load(lse + sequence * num_queries + query_M, mask=query_M < num_queries, other=0.0)
    lse2_M = lse_M * LOG2_E
    tl.store(rows + (2 * sequence) * padded_queries + query_M, lse2_M, mask=query_M < num_queries)
    tl.store(rows + (2 * sequence + 1) * padded_queries + query_M, delta_M, mask=query_M < num_queries)
    q_MD = load_tiles(q, q, q_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, False)
    dq_MD = make_zeros(HEAD_DIM, BLOCK_M)
    scale2 = 1.0 if CHANGED else scale * LOG2_E
    slope = load_slope(batch, head, extras)
    document_M1 = load_document(query_M[:, None], batch, num_keys, extras)
    first, end, all_from, all_to = keys_of_queries(first_query, batch, num_queries, num_keys, extras, BLOCK_M, CAUSAL)
    for first_key in tl.range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
        first_key = tl.multiple_of(first_key, BLOCK_N)
        k_ND = load_tiles(k, k_tail, k_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, WHOLE_KEYS)
        v_NE = load_tiles(v, v_tail, v_strides, batch, group, first_key, num_keys, V_HEAD_DIM, BLOCK_N, WHOLE_KEYS)
        scores_MN = multiply_rows(q_MD, k_ND, PRECISION)
        if CHANGED:
            key_N = first_key + tl.arange(0, BLOCK_N)
            scores_MN, steepness_MN = change_scores(
                scores_MN, query_M[:, None], key_N[None, :], batch, head, slope, scale, num_queries, num_keys, extras,
                PRECISION,
            )  # fmt: skip
        weights_MN = tl.math.exp2(scores_MN * scale2 - lse2_M[:, None])
        if CAUSAL or not WHOLE_KEYS or HIDDEN:
            if first_key + BLOCK_N > all_to or (HIDDEN and first_key < all_from):
                key_N = first_key + tl.arange(0, BLOCK_N)
                visible_MN = sees(query_M[:, None], key_N[None, :], num_queries, num_keys, extras, CAUSAL)
                if extras.document_starts is not None:
                    visible_MN = visible_MN & contains(document_M1, key_N[None, :])
                weights_MN = tl.where(visible_MN, weights_MN, 0.0)
        dweights_MN = multiply_rows(do_ME, v_NE, PRECISION)
        dscores_MN = weights_MN * (dweights_MN - delta_M[:, None])
        if dbias is not None:
            key_N = first_key + tl.arange(0, BLOCK_N)
            place_MN = (sequence * num_queries + query_M[:, None]) * extras.bias_keys + key_N[None, :]
            inside_MN = (query_M[:, None] < num_queries) & (key_N[None, :] < extras.bias_keys)
            tl.store(dbias + place_MN, dscores_MN, mask=inside_MN)
        if extras.softcap is not None:
            dscores_MN = dscores_MN * steepness_MN
        dq_MD = multiply_columns(dscores_MN, k_ND, dq_MD, PRECISION)
    store_tiles(dq, dq_strides, batch, head, first_query, num_queries, [x * scale for x in dq_MD], HEAD_DIM)


@triton.jit(do_not_specialize=["num_groups", "heads_per_group", "num_queries", "num_keys"])
def attention_backward_keys(
    q, q_tail, k, v, do, do_tail, dk, dv, rows,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    scale, num_groups, heads_per_group, num_queries, num_keys, padded_queries, extras,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys. WHOLE_QUERIES promises that BLOCK_M divides the number of queries."""
    HIDDEN: tl.constexpr = extras.left is not None or extras.right is not None or extras.document_starts is not None
    CHANGED: tl.constexpr = extras.softcap is not None or extras.bias is not None or extras.slopes is not None
    block, group, batch = locate(tl.cdiv(num_keys, BLOCK_N), num_groups, False)
    first_key = block * BLOCK_N
    k_ND = load_tiles(k, k, k_strides, batch, group, first_key, num_keys, HEAD_DIM, BLOCK_N, False)
    v_NE = load_tiles(v, v, v_strides, batch, group, first_key, num_keys, V_HEAD_DIM, BLOCK_N, False)
    dk_ND = make_zeros(HEAD_DIM, BLOCK_N)
    dv_NE = make_zeros(V_HEAD_DIM, BLOCK_N)
    scale2 = 1.0 if CHANGED else scale * LOG2_E
    document_N1 = load_document((first_key + tl.arange(0, BLOCK_N))[:, None], batch, num_queries, extras)
    first, end, all_from, all_to = queries_of_keys(first_key, batch, num_queries, num_keys, extras, BLOCK_N, CAUSAL)
    # A bias or a slope may give rows beyond the last an infinite weight, which is NaN times zero.
    TO_END: tl.constexpr = (
        extras.left is not None or extras.document_starts is not None or (CHANGED and not WHOLE_QUERIES)
    )
    for member in tl.range(0, heads_per_group):
        head = group * heads_per_group + member
        sequence = (batch * num_groups + group) * heads_per_group + member
        slope = load_slope(batch, head, extras)
        for first_query in tl.range(first // BLOCK_M * BLOCK_M, end, BLOCK_M):
            first_query = tl.multiple_of(first_query, BLOCK_M)
            q_MD = load_tiles(
                q, q_tail, q_strides, batch, head, first_query, num_queries, HEAD_DIM, BLOCK_M, WHOLE_QUERIES
            )
            do_ME = load_tiles(
                do, do_tail, do_strides, batch, head, first_query, num_queries, V_HEAD_DIM, BLOCK_M, WHOLE_QUERIES
            )
            lse2_M = load_row(rows, padded_queries, 2 * sequence, first_query, num_queries, BLOCK_M, WHOLE_QUERIES)
            delta_M = load_row(rows, padded_queries, 2 * sequence + 1, first_query, num_queries, BLOCK_M, WHOLE_QUERIES)
            # Scores and weights are transposed, keys by queries: they are the left operand of the last two matmuls.
            scores_NM = multiply_rows(k_ND, q_MD, PRECISION)
            if CHANGED:
                query_M = first_query + tl.arange(0, BLOCK_M)
                key_N = first_key + tl.arange(0, BLOCK_N)
                scores_NM, steepness_NM = change_scores(
                    scores_NM, query_M[None, :], key_N[:, None], batch, head, slope, scale, num_queries, num_keys,
                    extras, PRECISION,
                )  # fmt: skip
            weights_NM = tl.math.exp2(scores_NM * scale2 - lse2_M[None, :])
            # Keys beyond the last need no mask: their results are not stored.
            if CAUSAL or HIDDEN or TO_END:
                if first_query < all_from or (TO_END and first_query + BLOCK_M > all_to):
                    query_M = first_query + tl.arange(0, BLOCK_M)
                    key_N = first_key + tl.arange(0, BLOCK_N)
                    visible_NM = sees(query_M[None, :], key_N[:, None], num_queries, num_keys, extras, CAUSAL)
                    if TO_END:
                        visible_NM = visible_NM & contains(document_N1, query_M[None, :])
                    weights_NM = tl.where(visible_NM, weights_NM, 0.0)
            dweights_NM = multiply_rows(v_NE, do_ME, PRECISION)
            dv_NE = multiply_columns(weights_NM, do_ME, dv_NE, PRECISION)
            dscores_NM = weights_NM * (dweights_NM - delta_M[None, :])
            if extras.softcap is not None:
                dscores_NM = dscores_NM * steepness_NM
            dk_ND = multiply_columns(dscores_NM, q_MD, dk_ND, PRECISION)
    store_tiles(dk, dk_strides, batch, group, first_key, num_keys, [x * scale for x in dk_ND], HEAD_DIM)
    store_tiles(dv, dv_strides, batch, group, first_key, num_keys, dv_NE, V_HEAD_DIM)
