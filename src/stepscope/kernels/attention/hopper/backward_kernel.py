"""Flash attention backward for Hopper (sm_90a), in Gluon: the kernels and their tiles, without torch, as in
`forward_kernel.py`.

A program owns 128 keys, 64 for each of its two consumer warpgroups, and loops over the query tiles that see them. There
are five matmuls per tile: the scores and their gradient, transposed, so that both end up as register operands of dV and
dK; those two; and dQ, which the copy engine adds to a buffer in memory: in fp32, whose last bits differ between runs,
because the order does, or in integers (EXACT_SUMS). For dQ both warpgroups write their score gradients to shared memory
and each computes one half of it from all 128 keys. That halves the traffic of the additions compared with one dQ per
warpgroup: 432 TFLOP/s became 510 (H200, 8192 keys, head size 128).

The scores of the next tile are issued before waiting for dQ and writing it, so that the tensor cores stay busy: 510
became 545. They are waited for before the next iteration: ptxas serializes matmuls in flight across the loop edge
(C7514). The remaining bound is shared memory: two of the five matmuls read both operands from it at its full bandwidth.

Rows past the end are masked by their statistics (a log-sum-exp of +inf gives zero weights), keys past the end by the
mask. FLOPs: 10 L K D per head, half of it under a causal mask.
"""

# z batch element; H query heads, h one of them; G key/value heads, g one of them; D head dim, padded.
# A tile has ROWS queries.

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stepscope.kernels.attention.hopper.forward_kernel import (
    LOG2_E,
    NUM_STAGES,
    find_first_keys,
    find_last_keys,
    make_barriers,
)

KEYS_OF_PROGRAM = 128
KEYS = gl.constexpr(KEYS_OF_PROGRAM)
OWN_KEYS = gl.constexpr(64)  # rows per consumer warpgroup
# Of the 16 barriers of the hardware, of which Triton uses the first few: two for each consumer, and one for each stage.
DS_BARRIERS = gl.constexpr(12)
EMPTY_BARRIERS = gl.constexpr(10)
KEYS_OF_BOUND = tl.constexpr(KEYS_OF_PROGRAM)
FINITE = tl.constexpr(3.0e38)
SMALLEST_BOUND = tl.constexpr(1e-37)
ROWS_OF_TILE = {64: 128, 128: 64}  # queries, by head width: as many as the registers hold


@cache
def backward_settings(
    width: int,
    *,
    causal: bool,
    whole_keys: bool,
    has_window: bool = False,
    has_documents: bool = False,
    deterministic: bool = False,
) -> dict[str, Any]:
    """The constants and options of the backward kernel, like `forward_settings` for forward."""
    return {
        "ROWS": ROWS_OF_TILE[width],
        "D": width,
        "STAGES": NUM_STAGES,
        "CAUSAL": causal,
        "MASK": causal or has_window or has_documents or not whole_keys,
        "WINDOW": has_window,
        "DOCUMENTS": has_documents,
        "EXACT_SUMS": deterministic,
        "num_warps": 4,
        "maxnreg": 168,
    }


@builtin
def _reduce_add(desc, coord, source, _semantic=None):
    """Add a tile in shared memory to global memory: the copy engine can do this, but Gluon 3.6 does not expose it."""
    handles = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, handles, source.handle)


@gluon.jit
def _signal(barrier, THREADS: gl.constexpr):
    """Arrive at a barrier of the hardware at which a warpgroup arrives and others wait, THREADS in all. With an
    `mbarrier`, one thread arrives for all, which takes two barriers more: one before, and one after it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    operands = [gl.full([128], barrier, gl.int32, layout), gl.full([128], THREADS, gl.int32, layout)]
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, $1;", "=r,r,r,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _sync(barrier, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at such a barrier with WARPS warps, and wait for the others."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    operands = [gl.full([32 * WARPS], barrier, gl.int32, layout), gl.full([32 * WARPS], THREADS, gl.int32, layout)]
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, $1;", "=r,r,r,~{memory}", operands, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _round_to_int(x):
    """NaN becomes zero. Only score gradients that overflow in fp16 lead to it, and dK shows those."""
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _locate(tiles, group, CAUSAL: gl.constexpr):
    """The key/value head and key tile of this program. Programs start in the order of their numbers; under a causal
    mask, the first keys are seen by most queries, so they come first, in all heads of a group.
    """
    program = gl.program_id(0)
    if CAUSAL:
        first = program // (group * tiles) * group
        count = gl.minimum(group, gl.num_programs(0) // tiles - first)
        place = program % (group * tiles)
        return first + place % count, place // count
    else:
        return program // tiles, program % tiles


@gluon.jit
def _range_of_tiles(
    key, z, sizes, near,
    ROWS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """The query tiles that see keys [key, key + KEYS), as four borders: they are [first, end), at least one, and of
    them [low, high) need no mask.
    """
    num_queries, num_keys = sizes
    left, right, starts, ends = near
    shift = num_keys - num_queries
    first_row = 0
    end_row = num_queries
    low_row = 0
    high_row = num_queries
    if CAUSAL:
        first_row = key - shift
        low_row = key + KEYS - 1 - shift
    elif WINDOW:
        first_row = key - right - shift
        low_row = key + KEYS - 1 - right - shift
    if WINDOW:
        end_row = gl.minimum(end_row, key + KEYS + left - shift)
        high_row = gl.minimum(high_row, key + left + 1 - shift)
    if DOCUMENTS:
        last_key = gl.minimum(key + KEYS, num_keys) - 1
        first_row = gl.maximum(first_row, gl.load(starts + z * num_queries + key))
        low_row = gl.maximum(low_row, gl.load(starts + z * num_queries + last_key))
        end_row = gl.minimum(end_row, gl.load(ends + z * num_queries + last_key))
        high_row = gl.minimum(high_row, gl.load(ends + z * num_queries + key))
    tiles = gl.cdiv(num_queries, ROWS)
    first = gl.minimum(gl.maximum(0, first_row) // ROWS, tiles - 1)
    end = gl.maximum(first + 1, gl.cdiv(gl.maximum(0, end_row), ROWS))
    low = gl.where(key + KEYS > num_keys, end, gl.cdiv(gl.maximum(0, low_row), ROWS))
    high = gl.where(high_row == num_queries, tiles, gl.maximum(0, high_row) // ROWS)
    return first, low, high, end


@gluon.jit
def _next_tile(h, tile, first, end):
    """The tiles of a query head, then those of the next head of the group. Without a division, which is slow."""
    tile += 1
    wrapped = tile == end
    return gl.where(wrapped, h + 1, h), gl.where(wrapped, first, tile)


@gluon.jit
def _mask(
    p, key, tile, z, sizes, near,
    ROWS: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Weights (keys, rows), with zero for unseen keys. A thread has few keys and many rows, so documents are compared
    by the borders of the keys' documents.
    """
    num_queries, num_keys = sizes
    left, right, starts, ends = near
    keys = key + gl.arange(0, OWN_KEYS, gl.SliceLayout(1, S))
    rows = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, S))
    last_keys = find_last_keys(rows, z, sizes, near, CAUSAL, WINDOW, False)
    visible = keys[:, None] <= last_keys[None, :]
    if WINDOW:
        first_keys = find_first_keys(rows, z, sizes, near, True, False)
        visible = visible & (keys[:, None] >= first_keys[None, :])
    if DOCUMENTS:
        end = gl.load(ends + z * num_queries + keys, mask=keys < num_keys, other=0)
        visible = visible & (rows[None, :] < end[:, None])
        if not CAUSAL:
            start = gl.load(starts + z * num_queries + keys, mask=keys < num_keys, other=0)
            visible = visible & (rows[None, :] >= start[:, None])
    return gl.where(visible, p, 0.0)


@gluon.jit
def _consume(
    buffers, barriers, dq_desc, dk_desc, dv_desc, place, sizes, near, base2, scale,
    CONSUMER: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, EXACT_SUMS: gl.constexpr,
):  # fmt: skip
    k_buf, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, unit_bufs, ds_bufs, dq_bufs = buffers
    kv_full, q_full, do_full = barriers
    z, g, key = place
    H, G, heads, num_queries, num_keys = sizes
    lengths = (num_queries, num_keys)
    D: gl.constexpr = k_buf.shape[-1]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    T: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    s_rows: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = k_buf.dtype
    k_all = k_buf.reshape([KEYS, D])
    k = k_all.slice(CONSUMER * OWN_KEYS, OWN_KEYS, dim=0)
    v = v_bufs.index(CONSUMER).reshape([OWN_KEYS, D])
    dq_buf = dq_bufs.index(CONSUMER)
    dk = gl.zeros([OWN_KEYS, D], gl.float32, ACC)
    dv = gl.zeros([OWN_KEYS, D], gl.float32, ACC)
    zeros = gl.zeros([OWN_KEYS, ROWS], gl.float32, S)
    first, low, high, end = _range_of_tiles(key, z, lengths, near, ROWS, CAUSAL, WINDOW, DOCUMENTS)
    steps = (H // G) * (end - first)
    h = g * (H // G)
    tile = first
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = warpgroup_mma(k, q_bufs.index(0).reshape([ROWS, D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for step in range(steps):
        b = step % STAGES
        q = q_bufs.index(b).reshape([ROWS, D])
        do = do_bufs.index(b).reshape([ROWS, D])
        mbarrier.wait(do_full.index(b), (step // STAGES) & 1)
        # The sum starts at -delta, which the gradient of the scores subtracts anyway: saves one register per row.
        delta = delta_bufs.index(b).reshape([ROWS]).load(s_rows)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros - delta[None, :], is_async=True)
        lse = lse_bufs.index(b).reshape([ROWS]).load(s_rows)
        p = gl.exp2(s * base2 - lse[None, :])
        if MASK:
            needs_mask = tile < low
            if WINDOW or DOCUMENTS:
                needs_mask = needs_mask | (tile >= high)
            if needs_mask:
                p = _mask(p, key + CONSUMER * OWN_KEYS, tile, z, lengths, near, ROWS, S, CAUSAL, WINDOW, DOCUMENTS)
        p_operand = gl.convert_layout(p.to(dtype), operand)
        dv = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * dp).to(dtype)
        # Double-buffered: the faster warpgroup writes the next one while the other still reads this one.
        ds_all = ds_bufs.index(step & 1)
        ds_all.slice(CONSUMER * OWN_KEYS, OWN_KEYS, dim=0).store(ds)
        fence_async_shared()
        _signal(DS_BARRIERS + 2 * (1 - CONSUMER) + (step & 1), 256)
        ds_operand = gl.convert_layout(ds, operand)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dv, p_operand = warpgroup_mma_wait(1, deps=[dv, p_operand])

        _sync(DS_BARRIERS + 2 * CONSUMER + (step & 1), 256, 4)
        nothing = gl.zeros([64, 64], gl.float32, T)
        if D == 128:  # half of the columns for each warpgroup, otherwise half of the rows
            half = k_all.slice(CONSUMER * 64, 64, dim=1)
            dq = warpgroup_mma(ds_all.permute((1, 0)), half, nothing, use_acc=False, is_async=True)
        else:
            half = ds_all.slice(CONSUMER * 64, 64, dim=1)
            dq = warpgroup_mma(half.permute((1, 0)), k_all, nothing, use_acc=False, is_async=True)
        # The next scores; after the last tile, those of whatever is in the buffer, which are never read.
        after = step + 1
        mbarrier.wait(q_full.index(after % STAGES), (after // STAGES) & 1, pred=after < steps)
        next_q = q_bufs.index(after % STAGES).reshape([ROWS, D])
        s = warpgroup_mma(k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dk, dq, ds_operand = warpgroup_mma_wait(1, deps=[dk, dq, ds_operand])
        if EXACT_SUMS:
            units = unit_bufs.index(b).reshape([ROWS])
            if D == 64:
                units = units.slice(CONSUMER * 64, 64)
            dq = _round_to_int(dq * units.load(gl.SliceLayout(1, T))[:, None])
        _signal(EMPTY_BARRIERS + b, 256 + 32)
        tma.store_wait(0)
        dq_buf.reshape([64, 64]).store(dq)
        fence_async_shared()
        if D == 128:
            _reduce_add(dq_desc, [z, h, tile * ROWS, CONSUMER * 64], dq_buf)
        else:
            _reduce_add(dq_desc, [z, h, tile * ROWS + CONSUMER * 64, 0], dq_buf)
        s = warpgroup_mma_wait(0, deps=[s])
        h, tile = _next_tile(h, tile, first, end)
    # Only this warpgroup has read its half of V, and only its copies have read its dQ: their memory is free.
    v.store(dv.to(dtype))
    fence_async_shared()
    tma.store_wait(0)
    dk_buf = dq_buf._reinterpret(dtype, [1, 1, OWN_KEYS, D], dk_desc.layout)
    dk_buf.reshape([OWN_KEYS, D]).store((dk * scale).to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_desc, [z, g, key + CONSUMER * OWN_KEYS, 0], v_bufs.index(CONSUMER))
    tma.async_copy_shared_to_global(dk_desc, [z, g, key + CONSUMER * OWN_KEYS, 0], dk_buf)
    tma.store_wait(0)


@gluon.jit
def _produce(
    buffers, barriers, q_desc, k_desc, v_desc, do_desc, rows_desc, place, sizes, near,
    ROWS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
    EXACT_SUMS: gl.constexpr,
):  # fmt: skip
    k_buf, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, unit_bufs, ds_bufs, dq_bufs = buffers
    kv_full, q_full, do_full = barriers
    z, g, key = place
    H, G, heads, num_queries, num_keys = sizes
    lengths = (num_queries, num_keys)
    kv = kv_full.index(0)
    mbarrier.expect(kv, k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [z, g, key, 0], kv, k_buf)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(v_desc, [z, g, key + c * OWN_KEYS, 0], kv, v_bufs.index(c))
    first, _, _, end = _range_of_tiles(key, z, lengths, near, ROWS, CAUSAL, WINDOW, DOCUMENTS)
    h = g * (H // G)
    tile = first
    steps = (H // G) * (end - first)
    for step in range(steps):
        b = step % STAGES
        full = q_full.index(b)
        if step >= STAGES:
            _sync(EMPTY_BARRIERS + b, 256 + 32, 1)
        mbarrier.expect(full, q_desc.block_type.nbytes + (2 if EXACT_SUMS else 1) * ROWS * 4)
        if EXACT_SUMS:
            tma.async_copy_global_to_shared(rows_desc, [2 * heads + z * H + h, tile * ROWS], full, unit_bufs.index(b))
        tma.async_copy_global_to_shared(q_desc, [z, h, tile * ROWS, 0], full, q_bufs.index(b))
        tma.async_copy_global_to_shared(rows_desc, [z * H + h, tile * ROWS], full, lse_bufs.index(b))
        full = do_full.index(b)
        mbarrier.expect(full, do_desc.block_type.nbytes + ROWS * 4)
        tma.async_copy_global_to_shared(do_desc, [z, h, tile * ROWS, 0], full, do_bufs.index(b))
        tma.async_copy_global_to_shared(rows_desc, [heads + z * H + h, tile * ROWS], full, delta_bufs.index(b))
        h, tile = _next_tile(h, tile, first, end)
    for step in range(gl.maximum(0, steps - STAGES), steps):  # no barrier is left half full
        _sync(EMPTY_BARRIERS + step % STAGES, 256 + 32, 1)


@gluon.jit(do_not_specialize=["scale", "H", "G", "heads", "num_queries", "num_keys", "group", "left", "right"])
def attention_hopper_backward(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk_desc, dv_desc, starts, ends, scale, H, G, heads,
    num_queries, num_keys, group, left, right,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
    WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, EXACT_SUMS: gl.constexpr,
):  # fmt: skip
    """dk, dv, and the unscaled sums of dq. `rows_desc` has the log-sum-exp of every row, and below all `heads` of them
    the deltas. EXACT_SUMS: the sums are integers, which are the same in any order; below the deltas follows how many
    units a row's one is. The other arguments mean the same as in forward.
    """
    zg, tile = _locate(gl.cdiv(num_keys, KEYS), group, CAUSAL)
    place = (zg // G, zg % G, tile * KEYS)
    sizes = (H, G, heads, num_queries, num_keys)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q_desc.dtype)
    buffers = (
        gl.allocate_shared_memory(k_desc.dtype, [1, 1, KEYS, D], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, OWN_KEYS, D], v_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout),
        gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], rows_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], rows_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES if EXACT_SUMS else 1, 1, ROWS], rows_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [2, KEYS, ROWS], ds_layout),
        gl.allocate_shared_memory(dq_desc.dtype, [2, 1, 1, 64, 64], dq_desc.layout),
    )
    barriers = (
        make_barriers(1, 1),  # kv_full
        make_barriers(STAGES, 1),  # q_full, with the log-sum-exp
        make_barriers(STAGES, 1),  # do_full, with delta
    )
    near = (left, right, starts, ends)
    base2 = scale * LOG2_E
    gl.warp_specialize([
        (_consume, (buffers, barriers, dq_desc, dk_desc, dv_desc, place, sizes, near, base2, scale,
                    0, ROWS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, EXACT_SUMS)),
        (_consume, (buffers, barriers, dq_desc, dk_desc, dv_desc, place, sizes, near, base2, scale,
                    1, ROWS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, EXACT_SUMS)),
        (_produce, (buffers, barriers, q_desc, k_desc, v_desc, do_desc, rows_desc, place, sizes, near,
                    ROWS, STAGES, CAUSAL, WINDOW, DOCUMENTS, EXACT_SUMS)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit
def _row_lengths(x):
    """The Euclidean length of each row; squares of large numbers would overflow."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST_BOUND)
    shrunk = x / largest[:, None]
    return largest * tl.sqrt(tl.sum(shrunk * shrunk, 1))


@triton.jit(do_not_specialize=["G", "num_keys"])
def attention_hopper_bound(
    k_ptr, v_ptr, bounds_ptr, G, num_keys, D, k_z, k_g, k_l, v_z, v_g, v_l,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For each tile of keys the largest element of k and, below all tiles, the largest length of a v. NaN becomes
    infinity, which no maximum loses.
    """
    tiles = tl.cdiv(num_keys, KEYS_OF_BOUND)
    zg = tl.program_id(0) // tiles
    z, g = (zg // G).to(tl.int64), (zg % G).to(tl.int64)
    keys = ((tl.program_id(0) % tiles) * KEYS_OF_BOUND + tl.arange(0, KEYS_OF_BOUND)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    keep = (keys < num_keys) & (columns < D)
    k = tl.abs(tl.load(k_ptr + z * k_z + g * k_g + keys * k_l + columns, mask=keep, other=0.0).to(tl.float32))
    v = tl.load(v_ptr + z * v_z + g * v_g + keys * v_l + columns, mask=keep, other=0.0).to(tl.float32)
    lengths = _row_lengths(v)
    largest = tl.max(tl.max(tl.where(k <= FINITE, k, float("inf")), 1), 0)
    longest = tl.max(tl.where(lengths <= FINITE, lengths, float("inf")), 0)
    tl.store(bounds_ptr + tl.program_id(0), largest)
    tl.store(bounds_ptr + tl.num_programs(0) + tl.program_id(0), longest)


@triton.jit(do_not_specialize=["H", "G", "num_queries", "padded", "heads", "groups", "num_keys", "left", "right"])
def attention_hopper_prepare(
    o_ptr, do_ptr, lse_ptr, rows_ptr, dq_ptr, bounds_ptr, starts, ends, H, G, num_queries, padded, heads, D,
    o_z, o_h, o_l, do_z, do_h, do_l, do_d, groups, num_keys, left, right,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MOST_KEY_TILES: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, EXACT_SUMS: tl.constexpr,
):  # fmt: skip
    """Each row's log-sum-exp in base 2 and, below all `heads`, delta, the sum of o * do, padded to full tiles; and a dQ
    of zeros.

    EXACT_SUMS: below, how many units of its integer sums are one, a power of two. A row of dQ is a mean, weighted with
    P, of k · (do · (v - o)), so no element of it or of a part of it exceeds the largest |k| · |do| · (|v| + |o|) of a
    key tile that the program's rows see, except for rounding; that bound becomes at most 2^30. Where it is not finite,
    the row becomes NaN.
    """
    tiles = tl.cdiv(num_queries, ROWS)
    bh = tl.program_id(0) // tiles
    z, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    inside = rows < num_queries
    keep = inside[:, None] & (columns < D)[None, :]
    wide = rows.to(tl.int64)[:, None]
    o = tl.load(o_ptr + z * o_z + h * o_h + wide * o_l + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + z * do_z + h * do_h + wide * do_l + columns[None, :] * do_d, mask=keep, other=0.0)
    do = do.to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * num_queries + rows, mask=inside, other=float("inf"))
    tl.store(rows_ptr + bh.to(tl.int64) * padded + rows, lse * LOG2_E)
    tl.store(rows_ptr + (heads + bh).to(tl.int64) * padded + rows, delta)
    dq = dq_ptr + (bh.to(tl.int64) * num_queries + wide) * D + columns[None, :]
    tl.store(dq, tl.zeros([ROWS, BLOCK_D], dq_ptr.dtype.element_ty), mask=keep)
    if EXACT_SUMS:
        key_tiles = tl.cdiv(num_keys, KEYS_OF_BOUND)
        first_row = (tl.program_id(0) % tiles) * ROWS
        last_row = tl.minimum(first_row + ROWS, num_queries) - 1
        shift = num_keys - num_queries
        first_key = 0
        end_key = num_keys
        if CAUSAL:
            end_key = tl.minimum(end_key, last_row + shift + 1)
        elif WINDOW:
            end_key = tl.minimum(end_key, last_row + shift + right + 1)
        if WINDOW:
            first_key = tl.maximum(first_key, first_row + shift - left)
        if DOCUMENTS:
            first_key = tl.maximum(first_key, tl.load(starts + z * num_queries + first_row))
            end_key = tl.minimum(end_key, tl.load(ends + z * num_queries + last_row))
        some = tl.arange(0, MOST_KEY_TILES)
        seen = ((some + 1) * KEYS_OF_BOUND > first_key) & (some * KEYS_OF_BOUND < end_key)
        bounds = bounds_ptr + (z * G + h // (H // G)) * key_tiles + some
        largest = tl.load(bounds, mask=seen, other=0.0)
        longest = tl.load(bounds + groups * key_tiles, mask=seen, other=0.0)
        # The length of o belongs to a row: two maxima instead of one for each row.
        bound = _row_lengths(do) * (tl.max(largest * longest, 0) + tl.max(largest, 0) * _row_lengths(o))
        exponent = tl.minimum(30.0 - tl.ceil(tl.log2(tl.maximum(bound, SMALLEST_BOUND))), 126.0)
        units = tl.where(bound <= FINITE, tl.exp2(exponent), float("nan"))
        tl.store(rows_ptr + (2 * heads + bh).to(tl.int64) * padded + rows, units)


@triton.jit(do_not_specialize=["scale", "H", "num_queries", "padded", "heads"])
def attention_hopper_finish(
    sum_ptr, rows_ptr, dq_ptr, scale, H, num_queries, padded, heads, D, dq_z, dq_h, dq_l,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EXACT_SUMS: tl.constexpr,
):  # fmt: skip
    """dQ from its sums, scaled, in the dtype and memory layout of q."""
    tiles = tl.cdiv(num_queries, ROWS)
    bh = tl.program_id(0) // tiles
    z, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = ((tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    keep = (rows < num_queries) & (columns < D)
    total = tl.load(sum_ptr + (bh.to(tl.int64) * num_queries + rows) * D + columns, mask=keep, other=0)
    if EXACT_SUMS:
        total = total.to(tl.float32) / tl.load(rows_ptr + (2 * heads + bh).to(tl.int64) * padded + rows)
    dq = dq_ptr + z * dq_z + h * dq_h + rows * dq_l + columns
    tl.store(dq, (total * scale).to(dq_ptr.dtype.element_ty), mask=keep)
