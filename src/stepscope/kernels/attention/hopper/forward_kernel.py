"""Flash attention forward for Hopper (sm_90a), in Gluon: the kernel and its tiles, without torch, so that it can be
compiled where torch is not installed; `launch.py` launches it.

A program is one producer warp, which loads tiles with the bulk copy engine, and two or three consumer warpgroups of 64
query rows each, which take turns: while one computes its softmax, another uses the tensor cores. Within a warpgroup,
the scores of the next tile are issued before the softmax of this one, so that it overlaps with the matmuls of both
tiles.

Programs are persistent. With one program per SM nothing else covers its start and end, which at 2048 keys are a
tenth of its runtime; here the producer loads the next query tile while the consumers still write the last one. Under a
causal mask, the tiles of a group of heads go out from the longest to the shortest, to the programs in order, then in
reverse order, and so on: that balances them like a queue, without one. (A long tile and a short one of the same head
for each program left up to 15% of the SMs idle, because few such pairs are rarely a multiple of the SMs.)

Keys are visited from the last tile to the first, in one loop with a branch around the mask, which few tiles need: the
diagonal, the ragged end, the edges of a window or a document. Two loops, one without a mask, made the compiler unpack
and pack the weights again in each iteration, 64 instructions of 488 at a head size of 64. Tiles that no row of a
consumer sees are skipped. FLOPs: 4 L K D per head, half of it under a causal mask; bytes: q, k, v and o once, as K and
V of the heads in flight stay in L2.

Three warpgroups need less of L2 and are faster at a head size of 64: by 15% without a mask, and under a causal one by
7% at 4096 keys and 16% at 16384. Below, their 192 rows waste more of the diagonal (23% at 1024 keys), and at 128 there
are not enough registers.

At 64 the limit is the issue of instructions, not the exponentials: computing an eighth of them as polynomials costs 8%.
So the kernels are LEAN: they keep pairs of weights in one register from one iteration to the next (LLVM sometimes keeps
them in two, and packs them again), and rescale the output only if the maximum of a row has grown by a factor of 256;
until then, weights exceed one. That gains 3% to 5%, but nothing with two warpgroups at 64.
"""

# z batch element; H query heads, h one of them; G key/value heads, g one of them; D head dim, padded.
# Rows are queries. A tile is ROWS of them for each consumer, or KEYS keys.

from functools import cache
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

thread_barrier = gl.thread_barrier if triton.__version__.startswith("3.6") else gl.barrier
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.0e38)
SMALLEST_SCALE = gl.constexpr(1e-37)  # instead of zero, which would turn a hidden score into NaN
ROWS_OF_CONSUMER = 64
KEYS_OF_TILE = 128
NUM_STAGES = 2
SLACK = gl.constexpr(8.0)  # in base 2: how far scores may exceed the maximum that weights refer to
LONG = 4096  # queries


def padded_head(head_dim: int) -> int:
    """The tile width for this head size; the copy engine fills the rest with zeros."""
    return 64 if head_dim <= 64 else 128


@cache
def forward_settings(
    width: int,
    *,
    causal: bool,
    whole_keys: bool,
    long: bool = False,
    has_window: bool = False,
    has_documents: bool = False,
) -> dict[str, Any]:
    """The constants and options of the forward kernel, for its launcher and for `make aot`. Nothing needs tuning:
    at each width one choice fills the registers and the shared memory of an SM. `whole_keys`: the key length is a
    multiple of the tile's; `long`: there are at least `LONG` queries.
    """
    is_local = has_window or has_documents
    consumers = 3 if width == 64 and not is_local and (long or not causal) else 2
    return {
        "CONSUMERS": consumers,
        "ROWS": ROWS_OF_CONSUMER,
        "KEYS": KEYS_OF_TILE,
        "D": width,
        "STAGES": NUM_STAGES,
        "CAUSAL": causal,
        "MASK": causal or is_local or not whole_keys,
        "WINDOW": has_window,
        "DOCUMENTS": has_documents,
        "LEAN": width == 128 or consumers == 3,
        "num_warps": 4,
        # Initially; then the warpgroups redistribute registers.
        "maxnreg": {2: 168, 3: 128}[consumers],
    }


def name_kernel(specialization: Any) -> str:
    """Kernels that skip far tiles have a name of their own: their grid does not show how much they do."""
    constants = specialization.constants
    return (
        "attention_hopper_local_forward"
        if constants["WINDOW"] or constants["DOCUMENTS"]
        else "attention_hopper_forward"
    )


def _write_rescaling(count: int) -> str:
    """PTX that multiplies `count` numbers by as many factors, unless all factors of the warp are one. The two rows of a
    thread are in the first four.
    """
    results, numbers, factors = (range(start, start + count) for start in (0, count, 2 * count))
    one = "0f3F800000"
    lines = [f"setp.ne.f32 changed, ${factors[0]}, {one};"]
    lines += [f"setp.ne.or.f32 changed, ${factor}, {one}, changed;" for factor in factors[1:4]]
    lines += ["vote.sync.any.pred changed, changed, 0xffffffff;"]
    lines += [f"mov.f32 ${result}, ${number};" for result, number in zip(results, numbers, strict=True)]
    lines += ["@!changed bra DONE;"]
    lines += [f"mul.f32 ${result}, ${result}, ${factor};" for result, factor in zip(results, factors, strict=True)]
    return f"{{ .reg .pred changed; {' '.join(lines)} DONE: }}"


# For as many numbers as a thread has of the output, at both head widths.
RESCALING_32, RESCALING_64 = (gl.constexpr(_write_rescaling(count)) for count in (32, 64))
OPERANDS_32, OPERANDS_64 = (gl.constexpr(",".join(["=f"] * count + ["f"] * 2 * count)) for count in (32, 64))


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which completes after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def find_last_keys(rows, z, sizes, near, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr):
    """The last key that each row sees, which never falls from one row to the next. A causal mask is aligned at the end:
    the last row sees all keys.
    """
    num_queries, num_keys = sizes
    left, right, starts, ends = near
    last = gl.where(rows >= 0, num_keys - 1, 0)
    if CAUSAL:
        last = gl.minimum(last, rows + (num_keys - num_queries))
    elif WINDOW:
        last = gl.minimum(last, rows + (num_keys - num_queries + right))
    if DOCUMENTS and not CAUSAL:  # with a causal mask, a position of the same document is the last anyway
        end = gl.load(ends + z * num_queries + rows, mask=rows < num_queries, other=num_keys)
        last = gl.minimum(last, end - 1)
    return last


@gluon.jit
def find_first_keys(rows, z, sizes, near, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr):
    """The first key that each row sees, if it sees any; it never falls from one row to the next."""
    num_queries, num_keys = sizes
    left, right, starts, ends = near
    first = gl.where(rows >= 0, 0, 1)
    if WINDOW:
        first = gl.maximum(first, rows + (num_keys - num_queries - left))
    if DOCUMENTS:
        start = gl.load(starts + z * num_queries + rows, mask=rows < num_queries, other=0)
        first = gl.maximum(first, start)
    return first


@gluon.jit
def _count_rounds(sizes, CAUSAL: gl.constexpr):
    """How many tiles each program has, at most."""
    H, G, num_queries, num_keys, num_tiles, heads, group = sizes
    if CAUSAL:
        return gl.cdiv(heads, group) * gl.cdiv(group * num_tiles, gl.num_programs(0))
    else:
        return gl.cdiv(heads * num_tiles, gl.num_programs(0))


@gluon.jit
def _locate(lap, sizes, CAUSAL: gl.constexpr):
    """The batch element, head and query tile of this program in this lap, and 1, or 0 if there is none for it."""
    H, G, num_queries, num_keys, num_tiles, heads, group = sizes
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if CAUSAL:
        rounds = gl.cdiv(group * num_tiles, programs)
        first = lap // rounds * group
        count = gl.minimum(group, heads - first)
        forth = (lap // rounds + lap % rounds) % 2 == 0
        place = lap % rounds * programs + gl.where(forth, program, programs - 1 - program)
        head = first + place % count
        tile = num_tiles - 1 - place // count
        exists = tile >= 0
    else:
        place = lap * programs + program
        head = place // num_tiles
        tile = place % num_tiles
        exists = head < heads
    return head // H, head % H, tile, exists.to(gl.int32)


@gluon.jit
def _find_key_tiles(
    row, z, sizes, near,
    ALL_ROWS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """The key tiles that rows [row, row + ALL_ROWS) see, as four borders: they are [first, end), at least one, and of
    them [low, high) need no mask.
    """
    num_queries, num_keys = sizes
    last_row = gl.minimum(row + ALL_ROWS, num_queries) - 1
    seen_by_all = find_last_keys(row, z, sizes, near, CAUSAL, WINDOW, DOCUMENTS) + 1
    seen_by_any = find_last_keys(last_row, z, sizes, near, CAUSAL, WINDOW, DOCUMENTS) + 1
    first = 0
    low = 0
    if WINDOW or DOCUMENTS:
        first = find_first_keys(row, z, sizes, near, WINDOW, DOCUMENTS)
        first = gl.maximum(0, gl.minimum(first, num_keys - 1)) // KEYS
        low = gl.cdiv(gl.maximum(0, find_first_keys(last_row, z, sizes, near, WINDOW, DOCUMENTS)), KEYS)
    end = gl.maximum(first + 1, gl.cdiv(gl.maximum(0, seen_by_any), KEYS))
    high = gl.maximum(first, gl.minimum(gl.maximum(0, seen_by_all) // KEYS, end - 1))
    return first, gl.maximum(first, gl.minimum(low, high)), high, end


@gluon.jit
def _hide(s, first_key, first_keys, last_keys, LOCAL: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """The scores, with -inf for unseen keys: with a large negative number, a row that sees nothing would average V."""
    keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, S))
    visible = keys[None, :] <= last_keys[:, None]
    if LOCAL:
        visible = visible & (keys[None, :] >= first_keys[:, None])
    return gl.where(visible, s, -float("inf"))


@gluon.jit
def _softmax(s, maximum, totals, scale, LEAN: gl.constexpr):
    """One step of the online softmax, in base 2: the weights, the new maximum and sums, and the factor for the old
    ones. The maximum starts at a finite number, so that -inf minus -inf never happens.
    """
    highest = gl.max(s, 1) * scale
    if LEAN:
        new_maximum = gl.where(highest > maximum + SLACK, highest, maximum)
    else:
        new_maximum = gl.maximum(maximum, highest)
    p = gl.exp2(s * scale - new_maximum[:, None])
    shrink = gl.exp2(maximum - new_maximum)
    own = _sum_in_threads(p)
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, own.type.layout))
    return p, new_maximum, totals * factor[:, None] + own, shrink


@gluon.jit
def _sum_in_threads(p):
    """The sums of each row, one for each of the four threads that share it. They are added up at the end: only the
    maximum of a row is needed in each step, which costs shuffles.
    """
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _carry(p, LEAN: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    """Weights as the loop carries them: as an operand, or if LEAN two in an integer."""
    if LEAN:
        low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
        if dtype == gl.bfloat16:
            return gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
            )
        else:
            return gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
            )
    else:
        return gl.convert_layout(p.to(dtype), P)


@gluon.jit
def _as_operand(carried, LEAN: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    if LEAN:
        low = carried.to(gl.int16).to(dtype, bitcast=True)
        high = (carried >> 16).to(gl.int16).to(dtype, bitcast=True)
        return gl.convert_layout(gl.join(low, high).reshape([carried.shape[0], 2 * carried.shape[1]]), P)
    else:
        return carried


@gluon.jit
def _rescale(acc, shrink, LEAN: gl.constexpr):
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    if not LEAN:
        return acc * factor
    factors = factor.broadcast_to(acc.shape)
    if acc.shape[1] == 64:
        return gl.inline_asm_elementwise(
            RESCALING_32, OPERANDS_32, [acc, factors], dtype=gl.float32, is_pure=True, pack=32
        )
    else:
        return gl.inline_asm_elementwise(
            RESCALING_64, OPERANDS_64, [acc, factors], dtype=gl.float32, is_pure=True, pack=64
        )


@gluon.jit
def _attend_tiles(
    q, k_bufs, v_bufs, held, k_full, v_full, empty, turns, acc, carried, maximum, totals, first, low, high, end,
    visited, turn, first_keys, last_keys, scale,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, MASK: gl.constexpr, LOCAL: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, LEAN: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Tiles end - 2, end - 3 … first: the scores of each, and the values of the one before it."""
    D: gl.constexpr = k_bufs.shape[-1]
    dtype: gl.constexpr = k_bufs.dtype
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S)
    for back in range(end - first - 1):
        tile = end - 2 - back
        kb = visited % STAGES
        vb = (visited - 1) % STAGES
        mbarrier.wait(k_full.index(kb), (visited // STAGES) & 1)
        # Turns: a consumer issues its matmuls, then the next one does; each computes its softmax in the others' turns.
        mbarrier.wait(turns.index(CONSUMER), (turn & 1) ^ (1 if CONSUMER == 0 else 0))
        s = warpgroup_mma(q, k_bufs.index(kb).reshape([KEYS, D]).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(vb), ((visited - 1) // STAGES) & 1)
        p = _as_operand(carried, LEAN, P, dtype)
        acc = warpgroup_mma(p, v_bufs.index(vb).reshape([KEYS, D]), acc, is_async=True)
        mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        if MASK:
            needs_mask = tile >= high
            if LOCAL:
                needs_mask = needs_mask | (tile < low)
            if needs_mask:
                s = _hide(s, tile * KEYS, first_keys, last_keys, LOCAL, KEYS, S)
        new_p, maximum, totals, shrink = _softmax(s, maximum, totals, scale, LEAN)
        if CONSUMERS == 2:
            # ptxas moves the next wait up to the last barrier, past the exponentials that are meant to hide it, unless
            # a store that depends on them comes before a barrier. Two consumers gain up to 7% from it; three have no
            # registers left for it, and hide their exponentials behind each other's matmuls.
            held.index(CONSUMER).store(totals)
            thread_barrier()
        # The operand passes through the wait: its registers must not be reused while the matmul still reads them.
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index(kb), count=1)
        acc = _rescale(acc, shrink, LEAN)
        carried = _carry(new_p, LEAN, P, dtype)
        visited += 1
        turn += 1
    return acc, carried, maximum, totals, visited, turn


@gluon.jit
def _consume(
    buffers, barriers, o_desc, lse_ptr, sizes, near, scale,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs, held = buffers
    q_full, q_empty, k_full, v_full, empty, turns = barriers
    H, G, num_queries, num_keys, num_tiles, heads, group = sizes
    D: gl.constexpr = k_bufs.shape[-1]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = k_bufs.dtype
    LOCAL: gl.constexpr = WINDOW or DOCUMENTS
    lengths = (num_queries, num_keys)
    q = q_bufs.index(CONSUMER).reshape([ROWS, D])
    o = o_bufs.index(CONSUMER)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S)
    tiles = 0
    visited = 0
    turn = 0
    for lap in range(_count_rounds(sizes, CAUSAL)):
        z, h, tile, exists = _locate(lap, sizes, CAUSAL)
        for _ in range(exists):
            row = tile * (CONSUMERS * ROWS)
            first, _, _, end = _find_key_tiles(row, z, lengths, near, CONSUMERS * ROWS, KEYS, CAUSAL, WINDOW, DOCUMENTS)
            row += CONSUMER * ROWS
            _, low, high, own_end = _find_key_tiles(row, z, lengths, near, ROWS, KEYS, CAUSAL, WINDOW, DOCUMENTS)
            own_end = gl.minimum(gl.maximum(own_end, first + 1), end)
            rows = row + gl.arange(0, ROWS, s_rows)
            first_keys = find_first_keys(rows, z, lengths, near, WINDOW, DOCUMENTS)
            last_keys = find_last_keys(rows, z, lengths, near, CAUSAL, WINDOW, DOCUMENTS)
            maximum = gl.full([ROWS], LOWEST, gl.float32, s_rows)
            totals = _sum_in_threads(zeros)
            acc = gl.zeros([ROWS, D], gl.float32, ACC)

            if CAUSAL or LOCAL:
                # Tiles that only the rows of other consumers see: nothing but one's turn and the release of the buffer.
                for _skipped in range(end - own_end):
                    kb = visited % STAGES
                    mbarrier.wait(k_full.index(kb), (visited // STAGES) & 1)
                    mbarrier.wait(turns.index(CONSUMER), (turn & 1) ^ (1 if CONSUMER == 0 else 0))
                    mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)
                    mbarrier.arrive(empty.index(kb), count=1)
                    visited += 1
                    turn += 1
                end = own_end
            mbarrier.wait(q_full.index(CONSUMER), tiles & 1)
            kb = visited % STAGES
            mbarrier.wait(k_full.index(kb), (visited // STAGES) & 1)
            k = k_bufs.index(kb).reshape([KEYS, D])
            s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(kb), count=1)
            if MASK:
                s = _hide(s, (end - 1) * KEYS, first_keys, last_keys, LOCAL, KEYS, S)
            p, maximum, totals, _ = _softmax(s, maximum, totals, scale, LEAN)
            carried = _carry(p, LEAN, P, dtype)
            visited += 1
            acc, carried, maximum, totals, visited, turn = _attend_tiles(
                q, k_bufs, v_bufs, held, k_full, v_full, empty, turns, acc, carried, maximum, totals, first, low, high,
                end, visited, turn, first_keys, last_keys, scale, CONSUMER, CONSUMERS, CAUSAL or LOCAL, LOCAL, ROWS,
                KEYS, STAGES, LEAN, S, P,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)

            vb = (visited - 1) % STAGES
            mbarrier.wait(v_full.index(vb), ((visited - 1) // STAGES) & 1)
            p = _as_operand(carried, LEAN, P, dtype)
            acc = warpgroup_mma(p, v_bufs.index(vb).reshape([KEYS, D]), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])

            total = gl.convert_layout(gl.sum(totals, 1), s_rows)
            blind = total == 0.0
            lse = gl.where(blind, float("inf"), (maximum + gl.log2(total)) * LN_2)
            gl.store(lse_ptr + (z * H + h).to(gl.int64) * num_queries + rows, lse, mask=rows < num_queries)
            inverse = gl.convert_layout(1.0 / gl.where(blind, 1.0, total), gl.SliceLayout(1, ACC))
            tma.store_wait(0)
            o.reshape([ROWS, D]).store((acc * inverse[:, None]).to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [z, h, row, 0], o)
            tiles += 1
    tma.store_wait(0)


@gluon.jit
def _produce(
    buffers, barriers, q_desc, k_desc, v_desc, sizes, near,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs, held = buffers
    q_full, q_empty, k_full, v_full, empty, turns = barriers
    H, G, num_queries, num_keys, num_tiles, heads, group = sizes
    tiles = 0
    fetched = 0
    for lap in range(_count_rounds(sizes, CAUSAL)):
        z, h, tile, exists = _locate(lap, sizes, CAUSAL)
        for _ in range(exists):
            g = h // (H // G)
            row = tile * (CONSUMERS * ROWS)
            for c in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(c), (tiles & 1) ^ 1)
                mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [z, h, row + c * ROWS, 0], q_full.index(c), q_bufs.index(c))
            first, _, _, end = _find_key_tiles(
                row, z, (num_queries, num_keys), near, CONSUMERS * ROWS, KEYS, CAUSAL, WINDOW, DOCUMENTS
            )
            for back in range(end - first):
                key = (end - 1 - back) * KEYS
                b = fetched % STAGES
                mbarrier.wait(empty.index(b), ((fetched // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(b), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, [z, g, key, 0], k_full.index(b), k_bufs.index(b))
                # V is released together with the K after it: saves one barrier in the consumers' loop.
                after = fetched + 1
                mbarrier.wait(empty.index(after % STAGES), ((after // STAGES) & 1) ^ 1, pred=fetched >= STAGES)
                mbarrier.expect(v_full.index(b), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, [z, g, key, 0], v_full.index(b), v_bufs.index(b))
                fetched += 1
            tiles += 1


# No specializations for lengths of one or of multiples of 16: they would gain nothing and cost seconds of compilation
# each.
@gluon.jit(
    repr=name_kernel,
    do_not_specialize=["scale", "H", "G", "num_queries", "num_keys", "num_tiles", "heads", "group", "left", "right"],
)
def attention_hopper_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, starts, ends, scale, H, G, num_queries, num_keys, num_tiles, heads, group,
    left, right,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    """o and the log-sum-exp. A query tile has CONSUMERS * ROWS rows. MASK: some query does not see some key of a tile.
    WINDOW: a query sees `left` keys before its position and `right` after it. DOCUMENTS: it sees only those of its own
    document; `starts` and `ends` have the borders of each position's.
    """
    buffers = (
        gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, KEYS, D], v_desc.layout),
        gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, 1, 1, ROWS, D], o_desc.layout),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    barriers = (
        make_barriers(CONSUMERS, 1),  # q_full
        make_barriers(CONSUMERS, 1),  # q_empty
        make_barriers(STAGES, 1),  # k_full
        make_barriers(STAGES, 1),  # v_full
        make_barriers(STAGES, CONSUMERS),  # empty: a K, and the V before it
        make_barriers(CONSUMERS, 1),  # turns
    )
    sizes = (H, G, num_queries, num_keys, num_tiles, heads, group)
    near = (left, right, starts, ends)
    base2 = gl.maximum(scale * LOG2_E, SMALLEST_SCALE)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (buffers, barriers, o_desc, lse_ptr, sizes, near, base2,
                        0, 2, ROWS, KEYS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, LEAN)),
            (_consume, (buffers, barriers, o_desc, lse_ptr, sizes, near, base2,
                        1, 2, ROWS, KEYS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, LEAN)),
            (_produce, (buffers, barriers, q_desc, k_desc, v_desc, sizes, near,
                        2, ROWS, KEYS, STAGES, CAUSAL, WINDOW, DOCUMENTS)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (buffers, barriers, o_desc, lse_ptr, sizes, near, base2,
                        0, 3, ROWS, KEYS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, LEAN)),
            (_consume, (buffers, barriers, o_desc, lse_ptr, sizes, near, base2,
                        1, 3, ROWS, KEYS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, LEAN)),
            (_consume, (buffers, barriers, o_desc, lse_ptr, sizes, near, base2,
                        2, 3, ROWS, KEYS, STAGES, CAUSAL, MASK, WINDOW, DOCUMENTS, LEAN)),
            (_produce, (buffers, barriers, q_desc, k_desc, v_desc, sizes, near,
                        3, ROWS, KEYS, STAGES, CAUSAL, WINDOW, DOCUMENTS)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
