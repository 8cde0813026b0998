"""Triton kernels that read and write a list of tensors in one launch: AdamW, the gradient norm, and gradient sums.

A list is two tables on the GPU. Each tensor has a row of `COLUMNS` int64: the addresses of what belongs to it, its
number of elements, and its group. Each program has a chunk: a tensor, and which `CHUNK` elements of it. So the grid
depends on the total size only, and hundreds of tensors cost one launch. `tensor_lists.py` builds both.

Bytes per element of AdamW with fp32 states, a bf16 gradient and a bf16 working copy: 28. 14 are read (master, two
averages, gradient) and 14 written (the same without the gradient, and the working copy). The norm reads 2 more.

Two things decide the bandwidth. Addresses from a table carry no alignment, so it is asserted here (the list checks
it); without it every load is two or four bytes wide. And a thread has exactly four elements of each tensor: with eight,
which Triton chooses for bf16 on its own, fp32 stores would go through shared memory to close the gaps between the
threads of a warp. Only the last block of a tensor is masked, because a mask makes loads narrow too.

Nothing is added atomically, so that results repeat bit for bit.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)  # of a tensor's row
# The columns. The sums of an accumulation are in the place of the masters.
MASTER = tl.constexpr(0)
EXP_AVG = tl.constexpr(1)
EXP_AVG_SQ = tl.constexpr(2)
WORKING = tl.constexpr(3)
GRADIENT = tl.constexpr(4)
COUNT = tl.constexpr(5)
GROUP = tl.constexpr(6)

FACTORS = tl.constexpr(16)  # per group, what `adamw_prepare` computes and `adamw_update` reads


@triton.jit
def _pointer(row, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _find_chunk(tensors, chunks, chunk, CHUNK: tl.constexpr):
    """Return the tensor's row, the chunk's first element, and how many elements it has."""
    row = tensors + tl.load(chunks + 2 * chunk) * COLUMNS
    start = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    return row, start, tl.minimum(tl.load(row + COUNT) - start, CHUNK).to(tl.int32)


@triton.jit(do_not_specialize=["num_chunks"])
def sum_squares(
    tensors,
    chunks,
    partials,
    num_chunks,
    GRADIENT_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum the squares of the gradients of every `num_programs`-th chunk, in fp32, into one partial sum per program."""
    sums = tl.zeros((CHUNK,), tl.float32)
    elements = tl.arange(0, CHUNK)
    row, start, count = _find_chunk(tensors, chunks, tl.program_id(0), CHUNK)
    pointer = tl.load(row + GRADIENT)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        gradients = pointer.to(tl.pointer_type(GRADIENT_TYPE))
        if ALIGNED:
            gradients = tl.multiple_of(gradients, 16)
        gradients += start + elements
        if count == CHUNK:
            gradient = tl.load(gradients)
        else:
            gradient = tl.load(gradients, mask=elements < count, other=0.0)
        # Where the next chunk is: two loads, one after the other, that would take as long as the gradient's own.
        following = tl.minimum(chunk + tl.num_programs(0), num_chunks - 1)
        row, start, count = _find_chunk(tensors, chunks, following, CHUNK)
        pointer = tl.load(row + GRADIENT)
        gradient = gradient.to(tl.float32)
        sums += gradient * gradient
    tl.store(partials + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["num_groups", "num_partials"])
def adamw_prepare(
    hypers,
    powers,
    steps,
    factors,
    partials,
    grad_norm,
    max_norm,
    num_groups,
    num_partials,
    CLIP: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """One program: advance the step of every group, and compute what all elements of a group share.

    In float64, because 1 - beta2 ** step loses half of fp32's digits in the first steps. The powers are running
    products: no pow on the GPU, and if a beta changes, this is the exact correction of the averages' bias.
    """
    clip = tl.full((), 1.0, tl.float64)
    if CLIP:
        sums = tl.zeros((PARTIALS,), tl.float64)
        for first in range(0, num_partials, PARTIALS):
            places = first + tl.arange(0, PARTIALS)
            sums += tl.load(partials + places, mask=places < num_partials, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(sums, axis=0))
        tl.store(grad_norm, norm.to(tl.float32))
        clip = max_norm / (norm + 1e-6)
        clip = tl.where(clip > 1, 1.0, clip)  # not a minimum, which would hide NaN

    group = tl.arange(0, GROUPS)
    present = group < num_groups
    lr = tl.load(hypers + group, mask=present, other=0.0)
    beta1 = tl.load(hypers + num_groups + group, mask=present, other=0.0)
    beta2 = tl.load(hypers + 2 * num_groups + group, mask=present, other=0.0)
    eps = tl.load(hypers + 3 * num_groups + group, mask=present, other=0.0)
    weight_decay = tl.load(hypers + 4 * num_groups + group, mask=present, other=0.0)
    decoupled = tl.load(hypers + 5 * num_groups + group, mask=present, other=1.0)
    power1 = tl.load(powers + group, mask=present, other=0.0) * beta1
    power2 = tl.load(powers + num_groups + group, mask=present, other=0.0) * beta2
    tl.store(powers + group, power1, mask=present)
    tl.store(powers + num_groups + group, power2, mask=present)
    tl.store(steps + group, tl.load(steps + group, mask=present, other=0.0) + 1, mask=present)

    row = factors + group * FACTORS
    tl.store(row, (1 - lr * weight_decay * decoupled).to(tl.float32), mask=present)
    tl.store(row + 1, (weight_decay * (1 - decoupled)).to(tl.float32), mask=present)
    tl.store(row + 2, (1 - beta1).to(tl.float32), mask=present)
    tl.store(row + 3, beta2.to(tl.float32), mask=present)
    tl.store(row + 4, (1 - beta2).to(tl.float32), mask=present)
    tl.store(row + 5, (lr / (1 - power1)).to(tl.float32), mask=present)
    tl.store(row + 6, (1 / tl.sqrt(1 - power2)).to(tl.float32), mask=present)
    tl.store(row + 7, eps.to(tl.float32), mask=present)
    tl.store(row + 8, tl.zeros((GROUPS,), tl.float32) + clip.to(tl.float32), mask=present)


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32) if MASKED else tl.load(pointers).to(tl.float32)


@triton.jit
def _store(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty))


@triton.jit
def _update_block(pointers, factors, offsets, count, HAS_WORKING: tl.constexpr, MASKED: tl.constexpr):
    master, exp_avg, exp_avg_sq, working, gradient = pointers
    mask = offsets < count
    parameter = _load(master + offsets, mask, MASKED)
    average = _load(exp_avg + offsets, mask, MASKED)
    square = _load(exp_avg_sq + offsets, mask, MASKED)
    grad = _load(gradient + offsets, mask, MASKED)

    decay, l2, weight1, beta2, weight2, step_size, inverse_root, eps, clip = factors
    grad = grad * clip + l2 * parameter
    parameter = parameter * decay
    average += (grad - average) * weight1
    square = square * beta2 + grad * grad * weight2
    # Correctly rounded, as PyTorch's: memory is the limit, so it costs no time.
    denominator = tl.sqrt_rn(square) * inverse_root + eps
    parameter -= step_size * tl.div_rn(average, denominator)

    _store(master + offsets, parameter, mask, MASKED)
    _store(exp_avg + offsets, average, mask, MASKED)
    _store(exp_avg_sq + offsets, square, mask, MASKED)
    if HAS_WORKING:
        _store(working + offsets, parameter, mask, MASKED)


@triton.jit
def adamw_update(
    tensors,
    chunks,
    factors,
    STATE_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    WORKING_TYPE: tl.constexpr,  # None without a working copy
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update one chunk of one parameter."""
    row, start, count = _find_chunk(tensors, chunks, tl.program_id(0), CHUNK)
    master = _pointer(row, MASTER, STATE_TYPE, ALIGNED) + start
    exp_avg = _pointer(row, EXP_AVG, STATE_TYPE, ALIGNED) + start
    exp_avg_sq = _pointer(row, EXP_AVG_SQ, STATE_TYPE, ALIGNED) + start
    gradient = _pointer(row, GRADIENT, GRADIENT_TYPE, ALIGNED) + start
    HAS_WORKING: tl.constexpr = WORKING_TYPE is not None
    working = _pointer(row, WORKING, WORKING_TYPE, ALIGNED) + start if HAS_WORKING else master
    pointers = (master, exp_avg, exp_avg_sq, working, gradient)

    group = factors + tl.load(row + GROUP) * FACTORS
    shared = (
        tl.load(group),
        tl.load(group + 1),
        tl.load(group + 2),
        tl.load(group + 3),
        tl.load(group + 4),
        tl.load(group + 5),
        tl.load(group + 6),
        tl.load(group + 7),
        tl.load(group + 8),
    )
    elements = tl.arange(0, BLOCK)
    whole = count // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        _update_block(pointers, shared, first + elements, count, HAS_WORKING, False)
    if whole < count:
        _update_block(pointers, shared, whole + elements, count, HAS_WORKING, True)


@triton.jit
def _accumulate_block(sums, gradient, offsets, count, OVERWRITE: tl.constexpr, MASKED: tl.constexpr):
    mask = offsets < count
    total = _load(gradient + offsets, mask, MASKED)
    if not OVERWRITE:
        total += _load(sums + offsets, mask, MASKED)
    _store(sums + offsets, total, mask, MASKED)


@triton.jit
def accumulate_chunks(
    tensors,
    chunks,
    GRADIENT_TYPE: tl.constexpr,
    OVERWRITE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add one chunk of a gradient to its fp32 sum, or replace the sum by it."""
    row, start, count = _find_chunk(tensors, chunks, tl.program_id(0), CHUNK)
    sums = _pointer(row, MASTER, tl.float32, ALIGNED) + start
    gradient = _pointer(row, GRADIENT, GRADIENT_TYPE, ALIGNED) + start
    elements = tl.arange(0, BLOCK)
    whole = count // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        _accumulate_block(sums, gradient, first + elements, count, OVERWRITE, False)
    if whole < count:
        _accumulate_block(sums, gradient, whole + elements, count, OVERWRITE, True)
