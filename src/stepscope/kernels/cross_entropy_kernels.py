"""Triton kernels for cross entropy: the loss of each row of logits, its gradient, or both.

One program per row. A row is read once for its log-sum-exp, with a running maximum, and once more for the gradient; a
row of 50,257 bf16 logits is 100 KB, so all that are being worked on stay in L2. With both in one launch, DRAM sees each
logit read once and its gradient written once: 4 bytes per bf16 logit, in place if the caller likes. A row that fits
into the registers of a program is not even read twice.

Loads are 16 bytes wide although rows may start anywhere: 50,257 is odd. A program steps back to the aligned address
before its row and masks what is not its own, in its first block and in its last. The blocks between have no mask,
because with one Triton loads element by element.

Sums are in fp32. The exponentials decide the speed after memory: there is one per logit and pass, which is why the
maximum is one number per program and not one per thread.
"""

import triton
import triton.language as tl

from stepscope.kernels.attention.triton_kernels import scaled_tanh

LOWEST = tl.constexpr(-3.4028234663852886e38)
ALIGNMENT = tl.constexpr(16)  # bytes


@triton.jit
def _load_scores(row, bias, softcap, places, lead, end, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The logits at these places after bias and softcap, -inf outside the row, and the derivative of the softcap."""
    inside = (places >= lead) & (places < end)
    if MASKED:
        scores = tl.load(row + places, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            scores += tl.load(bias + (places - lead), mask=inside, other=0.0).to(tl.float32)
    else:
        scores = tl.load(row + places).to(tl.float32)
        if bias is not None:
            scores += tl.load(bias + (places - lead)).to(tl.float32)
    steepness = 1.0
    if softcap is not None:
        tanh, steepness = scaled_tanh(scores, 1 / softcap, PRECISION)
        scores = tanh * softcap
    if MASKED:
        scores = tl.where(inside, scores, -float("inf"))
    return scores, steepness


@triton.jit
def _add_block(
    state, row, bias, softcap, places, lead, end, MASKED: tl.constexpr, SMOOTH: tl.constexpr, PRECISION: tl.constexpr
):
    """Add a block to the running maximum, the sum of exponentials relative to it, and the sum of the scores."""
    maximum, exponentials, sums = state
    scores, _ = _load_scores(row, bias, softcap, places, lead, end, MASKED, PRECISION)
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
    exponentials = exponentials * tl.exp(maximum - new_maximum) + tl.exp(scores - new_maximum)
    if SMOOTH:
        sums += tl.where((places >= lead) & (places < end), scores, 0.0) if MASKED else scores
    return new_maximum, exponentials, sums


@triton.jit
def _gradient_of(scores, steepness, log_sum_exp, is_target, factor, smoothing, z_loss, vocab):
    """The derivative of a row's loss by its logits, times a factor."""
    gradient = tl.exp(scores - log_sum_exp)
    if z_loss is not None:
        gradient *= 1 + 2 * z_loss * log_sum_exp
    if smoothing is not None:
        gradient -= smoothing / vocab
        gradient = tl.where(is_target, gradient - (1 - smoothing), gradient)
    else:
        gradient = tl.where(is_target, gradient - 1, gradient)
    return gradient * steepness * factor


@triton.jit
def _write_block(
    gradients, row, bias, softcap, places, lead, end, target, log_sum_exp, factor, keep, smoothing, z_loss,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    scores, steepness = _load_scores(row, bias, softcap, places, lead, end, MASKED, PRECISION)
    is_target = places == lead + target
    gradient = _gradient_of(scores, steepness, log_sum_exp, is_target, factor, smoothing, z_loss, end - lead)
    gradient = tl.where(keep, gradient, 0.0).to(gradients.dtype.element_ty)
    if MASKED:
        tl.store(gradients + places, gradient, mask=(places >= lead) & (places < end))
    else:
        tl.store(gradients + places, gradient)


@triton.jit
def _finish(state, target_score, keep, smoothing, z_loss, vocab):
    """The log-sum-exp of a row, and its loss."""
    maximum, exponentials, sums = state
    logarithm = tl.log(tl.sum(exponentials, axis=0))
    log_sum_exp = maximum + logarithm
    # The two large numbers first: their difference is small, and the logarithm then keeps its digits.
    loss = logarithm + (maximum - target_score)
    if smoothing is not None:
        mean = tl.sum(sums, axis=0) / vocab
        loss = (1 - smoothing) * loss + smoothing * (logarithm + (maximum - mean))
    if z_loss is not None:
        loss += z_loss * log_sum_exp * log_sum_exp
    return log_sum_exp, tl.where(keep, loss, 0.0)


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_rows(
    logits,
    gradients,  # may be the logits; None: only the loss
    targets,
    losses,  # None: only the gradient, from the log-sum-exp
    log_sum_exps,
    upstream,  # the gradient of the loss, and what it is scaled by; None: both are one
    scale,
    bias,
    row_stride,
    vocab,
    ignore_index,
    softcap,
    smoothing,
    z_loss,
    ALIGNED: tl.constexpr,  # whether logits and gradients are aligned, possibly after stepping back
    SHIFTED: tl.constexpr,  # whether rows may start between aligned addresses
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row: its loss and log-sum-exp, and the gradient of its logits."""
    index = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + index).to(tl.int32)
    keep = target != ignore_index
    is_valid = (target >= 0) & (target < vocab)
    row = logits + index * row_stride
    lead = 0
    if SHIFTED:
        size: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth // 8
        lead = ((row.to(tl.int64) % ALIGNMENT) // size).to(tl.int32)
    end = lead + vocab
    row -= lead
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    places = tl.arange(0, BLOCK)
    SMOOTH: tl.constexpr = smoothing is not None

    if losses is not None:
        # Before anything is written, as that may be the same memory. A target out of range makes the loss NaN.
        target_score, _ = _load_scores(
            row, bias, softcap, lead + tl.where(is_valid, target, 0), lead, end, False, PRECISION
        )
        target_score = tl.where(is_valid, target_score, float("nan"))
        zeros = tl.zeros((BLOCK,), tl.float32)
        state = (tl.full((), LOWEST, tl.float32), zeros, zeros)
        if ONE_BLOCK:
            scores, steepness = _load_scores(row, bias, softcap, places, lead, end, True, PRECISION)
            maximum = tl.maximum(tl.max(scores, axis=0), LOWEST)
            state = (maximum, tl.exp(scores - maximum), tl.where(places < end, scores, 0.0) if SMOOTH else zeros)
        else:
            begin = 0
            stop = tl.where(keep, end, 0)  # rows that are ignored are not read
            if SHIFTED:
                state = _add_block(state, row, bias, softcap, places, lead, stop, True, SMOOTH, PRECISION)
                begin = BLOCK
            whole = stop // BLOCK * BLOCK
            for start in range(begin, whole, BLOCK):
                state = _add_block(state, row, bias, softcap, start + places, lead, end, False, SMOOTH, PRECISION)
            last = tl.maximum(whole, begin)
            if last < stop:
                state = _add_block(state, row, bias, softcap, last + places, lead, end, True, SMOOTH, PRECISION)
        log_sum_exp, loss = _finish(state, target_score, keep, smoothing, z_loss, vocab)
        tl.store(losses + index, loss)
        if log_sum_exps is not None:
            tl.store(log_sum_exps + index, log_sum_exp)
    else:
        log_sum_exp = tl.load(log_sum_exps + index)

    if gradients is not None:
        factor = 1.0
        if upstream is not None:
            factor = tl.load(upstream).to(tl.float32) * tl.load(scale)
        factor = tl.where(is_valid, factor, float("nan"))
        output = gradients + index * row_stride - lead
        if ALIGNED:
            output = tl.multiple_of(output, 16)
        if ONE_BLOCK:
            if losses is None:
                scores, steepness = _load_scores(row, bias, softcap, places, lead, end, True, PRECISION)
            gradient = _gradient_of(scores, steepness, log_sum_exp, places == target, factor, smoothing, z_loss, vocab)
            tl.store(output + places, tl.where(keep, gradient, 0.0).to(output.dtype.element_ty), mask=places < end)
        else:
            begin = 0
            if SHIFTED:
                _write_block(
                    output, row, bias, softcap, places, lead, end, target, log_sum_exp, factor, keep, smoothing, z_loss,
                    True, PRECISION,
                )  # fmt: skip
                begin = BLOCK
            whole = end // BLOCK * BLOCK
            for start in range(begin, whole, BLOCK):
                _write_block(
                    output, row, bias, softcap, start + places, lead, end, target, log_sum_exp, factor, keep, smoothing,
                    z_loss, False, PRECISION,
                )  # fmt: skip
            last = tl.maximum(whole, begin)
            if last < end:
                _write_block(
                    output, row, bias, softcap, last + places, lead, end, target, log_sum_exp, factor, keep, smoothing,
                    z_loss, True, PRECISION,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "ignore_index"])
def cross_entropy_reduce(losses, targets, loss, scale, num_rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the sum of the losses, or their mean over the targets that are not ignored, and what the gradient
    of each row is scaled by for that. With nothing but ignored targets, the mean is NaN, as PyTorch's, and the scale
    is zero.
    """
    sums = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        present = rows < num_rows
        sums += tl.load(losses + rows, mask=present, other=0.0)
        kept = tl.load(targets + rows, mask=present, other=0) != ignore_index
        counts += (kept & present).to(tl.int32)
    total = tl.sum(sums, axis=0)
    if MEAN:
        count = tl.sum(counts, axis=0).to(tl.float32)
        tl.store(loss, total / count)
        tl.store(scale, tl.where(count > 0, 1 / tl.maximum(count, 1), 0.0))
    else:
        tl.store(loss, total)
        tl.store(scale, 1.0)


@triton.jit
def scale_gradient(gradient, output, upstream, scale, count, BLOCK: tl.constexpr):
    """Multiply by two scalars on the device, and convert."""
    factor = tl.load(upstream).to(tl.float32) * tl.load(scale).to(tl.float32)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(gradient + places, mask=places < count, other=0.0).to(tl.float32) * factor
    tl.store(output + places, values.to(output.dtype.element_ty), mask=places < count)
