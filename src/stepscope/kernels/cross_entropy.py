"""Cross entropy of logits: `cross_entropy`, and the operators and launchers that linear + cross entropy shares.

The forward pass reads the logits once and keeps one number per row, the log-sum-exp. The backward pass reads them again
and writes the gradient, already multiplied by that of the loss: 6 bytes per bf16 logit. Writing the gradient in the
forward pass, as others do, takes 8, because it has to be scaled afterwards.

PyTorch's dispatcher sees two operators, so a compiler does not look inside. On a GPU Triton kernels run
(`cross_entropy_kernels.py`), on a CPU and in float64 the reference and the formula of its gradient.
"""

# N targets, V vocabulary.

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stepscope.kernels.launch import register_fake
from stepscope.nn import functional

_library = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]  # registrations last as long as it does

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORE_INDEX = -100
ALIGNMENT = 16  # bytes
# A row of at most this many logits stays in the registers of its program. More of them do not fit.
LONGEST_BLOCK = 16384
# 16 logits per thread, and eight programs per SM: while some wait for their maximum, others read.
BLOCK, NUM_WARPS = 4096, 8
REDUCE_BLOCK = 4096
Reduction = Literal["mean", "sum"]


class LossSettings(NamedTuple):
    """The arguments of the operators that are not tensors. Zero turns an extra off."""

    ignore_index: int = IGNORE_INDEX
    mean: bool = True
    softcap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean (or sum) of logsumexp(logits) - logits[target], in fp32, from logits (..., V) and targets (...).

    The arguments are those of `nn.functional.cross_entropy`. Rows may be longer than V in memory, as those of a padded
    vocabulary are (`logits[..., :V]`). The number of targets that count is found on the device: nothing waits for it.
    On a GPU a target that is out of range makes the loss NaN; on a CPU it raises.
    """
    check_targets(logits.shape[:-1], targets)
    settings = make_settings(ignore_index, reduction, softcap, label_smoothing, z_loss)
    if not logits.is_floating_point():
        raise ValueError(f"expected floating-point logits, but got {logits.dtype}")
    logits_NV = logits.reshape(-1, logits.shape[-1])
    loss: Tensor = torch.ops.stepscope.cross_entropy(logits_NV, targets.reshape(-1), *settings)[0]
    return loss


def make_settings(
    ignore_index: int, reduction: str, softcap: float | None, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossSettings:
    """Check the arguments that are not tensors."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"`reduction` must be 'mean' or 'sum', but got {reduction!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"`softcap` must be positive, but got {softcap}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"`label_smoothing` must be in [0, 1), but got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"`z_loss` must not be negative, but got {z_loss}")
    if not -(2**31) <= ignore_index < 2**31:
        raise ValueError(f"`ignore_index` must fit into 32 bits, but got {ignore_index}")
    return LossSettings(ignore_index, reduction == "mean", softcap or 0.0, label_smoothing, z_loss)


def check_targets(rows: torch.Size, targets: Tensor) -> None:
    if rows != targets.shape:
        raise ValueError(f"expected targets of shape {tuple(rows)}, one per row, but got {tuple(targets.shape)}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be int64 or int32, but are {targets.dtype}")


# --- Launchers ---


@cache
def load_kernels() -> Any:
    """The module with the kernels, imported when first needed: without a GPU, Triton may be missing."""
    from stepscope.kernels import cross_entropy_kernels

    return cross_entropy_kernels


def launch_rows(
    logits_NV: Tensor,
    targets_N: Tensor,
    settings: LossSettings,
    *,
    gradient_NV: Tensor | None = None,
    losses_N: Tensor | None = None,
    log_sum_exps_N: Tensor | None = None,
    factors: tuple[Tensor, Tensor] | None = None,
    bias_V: Tensor | None = None,
) -> None:
    """Write the losses and log-sum-exps, or the gradient from the log-sum-exps, or all of it. The gradient has the
    strides of the logits, and may be the logits. `factors` are two scalars on the device that multiply it.
    """
    num_rows, vocab = logits_NV.shape
    if num_rows == 0:
        return
    others = () if gradient_NV is None else (gradient_NV,)
    assert all(x.stride() == logits_NV.stride() for x in others)
    assert logits_NV.stride(1) == 1
    in_line = _is_in_line(logits_NV)
    is_aligned = len({x.data_ptr() % ALIGNMENT for x in (logits_NV, *others)}) == 1
    in_one = in_line and is_aligned and vocab <= LONGEST_BLOCK and vocab % 16 == 0 and logits_NV.stride(0) % 16 == 0
    longest = LONGEST_BLOCK if in_one else BLOCK
    block = min(longest, max(128, 1 << (vocab - 1).bit_length()))
    load_kernels().cross_entropy_rows[(num_rows,)](
        logits_NV,
        gradient_NV,
        targets_N,
        losses_N,
        log_sum_exps_N,
        *(factors or (None, None)),
        bias_V,
        logits_NV.stride(0),
        vocab,
        settings.ignore_index,
        settings.softcap or None,
        settings.label_smoothing or None,
        settings.z_loss or None,
        ALIGNED=is_aligned,
        SHIFTED=is_aligned and not in_line,
        ONE_BLOCK=in_one,
        BLOCK=block,
        PRECISION="tf32x3" if logits_NV.dtype == torch.float32 else "tf32",
        num_warps=16 if block > BLOCK else NUM_WARPS if block > 1024 else 4,
    )


def _is_in_line(x_NV: Tensor) -> bool:
    """Whether every row starts at an aligned address."""
    return x_NV.data_ptr() % ALIGNMENT == 0 and x_NV.stride(0) * x_NV.element_size() % ALIGNMENT == 0


def launch_reduce(losses_N: Tensor, targets_N: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return the loss, and what the gradients of the rows are scaled by."""
    loss, scale = (losses_N.new_empty(()) for _ in range(2))
    load_kernels().cross_entropy_reduce[(1,)](
        losses_N,
        targets_N,
        loss,
        scale,
        losses_N.numel(),
        settings.ignore_index,
        MEAN=settings.mean,
        BLOCK=REDUCE_BLOCK,
        num_warps=NUM_WARPS,
    )
    return loss, scale


def launch_forward(logits_NV: Tensor, targets_N: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the log-sum-exps, and the scale of the gradient."""
    logits_NV, targets_N = readable(logits_NV), targets_N.contiguous()
    losses_N, log_sum_exps_N = (
        torch.empty(len(targets_N), dtype=torch.float32, device=logits_NV.device) for _ in range(2)
    )
    launch_rows(logits_NV, targets_N, settings, losses_N=losses_N, log_sum_exps_N=log_sum_exps_N)
    loss, scale = launch_reduce(losses_N, targets_N, settings)
    return loss, log_sum_exps_N, scale


def launch_backward(
    upstream: Tensor, logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, scale: Tensor, settings: LossSettings
) -> Tensor:
    """Return the gradient of the logits, in their layout."""
    logits_NV, targets_N = readable(logits_NV), targets_N.contiguous()
    gradient_NV = torch.empty_strided(
        logits_NV.shape, logits_NV.stride(), dtype=logits_NV.dtype, device=logits_NV.device
    )
    launch_rows(
        logits_NV,
        targets_N,
        settings,
        gradient_NV=gradient_NV,
        log_sum_exps_N=lse_N,
        factors=(upstream, scale),
    )
    return gradient_NV


def readable(x_NV: Tensor) -> Tensor:
    """x with rows that are contiguous and do not overlap, copied if need be."""
    return x_NV if x_NV.stride(1) == 1 and x_NV.stride(0) >= x_NV.shape[1] else x_NV.contiguous()


# --- The formulas, for CPUs and float64 ---


def plain_forward(logits_NV: Tensor, targets_N: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """As `launch_forward`, with the reference."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    loss = functional.cross_entropy(
        logits_NV,
        targets_N.long(),
        ignore_index=settings.ignore_index,
        reduction="mean" if settings.mean else "sum",
        softcap=settings.softcap or None,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
    )
    count = (targets_N != settings.ignore_index).sum()
    scale = torch.where(count > 0, 1 / count.clamp(min=1), 0.0).to(wide) if settings.mean else loss.new_ones(())
    return loss, _cap(logits_NV, settings)[0].logsumexp(dim=-1), scale


def plain_backward(
    upstream: Tensor, logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, scale: Tensor, settings: LossSettings
) -> Tensor:
    """As `launch_backward`; the formula is also in `cross_entropy_kernels.py`."""
    scores_NV, steepness_NV = _cap(logits_NV, settings)
    is_ignored_N1 = (targets_N == settings.ignore_index)[:, None]
    targets_N1 = targets_N.long()[:, None].masked_fill(is_ignored_N1, 0)
    gradient_NV = (scores_NV - lse_N[:, None]).exp_()
    gradient_NV *= 1 + 2 * settings.z_loss * lse_N[:, None]
    gradient_NV -= settings.label_smoothing / logits_NV.shape[1]
    share = torch.full_like(targets_N1, settings.label_smoothing - 1, dtype=gradient_NV.dtype)
    gradient_NV.scatter_add_(1, targets_N1, share)
    gradient_NV *= steepness_NV * (upstream * scale)
    output_NV = torch.empty_strided(
        logits_NV.shape, readable(logits_NV).stride(), dtype=logits_NV.dtype, device=logits_NV.device
    )
    return output_NV.copy_(gradient_NV.masked_fill_(is_ignored_N1, 0.0))


def _cap(logits_NV: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The logits after the softcap, in at least fp32, and its derivative."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if not settings.softcap:
        return wide_NV, wide_NV.new_ones(())
    tanh_NV = torch.tanh(wide_NV / settings.softcap)
    return settings.softcap * tanh_NV, 1 - tanh_NV.square()


# --- Operators ---

_SETTINGS = "int ignore_index, bool mean, float softcap, float label_smoothing, float z_loss"
for _schema in (
    f"cross_entropy(Tensor logits, Tensor targets, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    f"cross_entropy_backward(Tensor grad, Tensor logits, Tensor targets, Tensor lse, Tensor scale, {_SETTINGS})"
    " -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
forward_operator = torch.ops.stepscope.cross_entropy.default
backward_operator = torch.ops.stepscope.cross_entropy_backward.default


def runs_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_DTYPES


def _run_forward(logits_NV: Tensor, targets_N: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_kernels(logits_NV):
        return plain_forward(logits_NV, targets_N, LossSettings(*settings))
    with torch.cuda.device(logits_NV.device):
        return launch_forward(logits_NV, targets_N, LossSettings(*settings))


def _run_backward(
    upstream: Tensor, logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, scale: Tensor, *settings: Any
) -> Tensor:
    if not runs_kernels(logits_NV):
        return plain_backward(upstream, logits_NV, targets_N, lse_N, scale, LossSettings(*settings))
    with torch.cuda.device(logits_NV.device):
        return launch_backward(upstream, logits_NV, targets_N, lse_N, scale, LossSettings(*settings))


def _fake_forward(logits_NV: Tensor, targets_N: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    loss, scale = (logits_NV.new_empty((), dtype=wide) for _ in range(2))
    return loss, logits_NV.new_empty(targets_N.shape, dtype=wide), scale


def _fake_backward(_upstream: Tensor, logits_NV: Tensor, *_: Any) -> Tensor:
    strides = readable(logits_NV).stride()
    return torch.empty_strided(logits_NV.shape, strides, dtype=logits_NV.dtype, device=logits_NV.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits_NV, targets_N, *settings = inputs
    _, lse_N, scale = output
    ctx.settings = settings
    ctx.mark_non_differentiable(lse_N, scale)
    ctx.save_for_backward(logits_NV, targets_N, lse_N, scale)


def _differentiate(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradient_NV = backward_operator(upstream, *ctx.saved_tensors, *ctx.settings)
    return gradient_NV, None, *(None for _ in ctx.settings)


def refuse_twice(_ctx: Any, *_gradients: Tensor) -> None:
    raise RuntimeError("cross entropy does not support double backward; use `nn.functional.cross_entropy`")


for _operator, _run, _fake in (
    (forward_operator, _run_forward, _fake_forward),
    (backward_operator, _run_backward, _fake_backward),
):
    _library.impl(_operator, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(_operator, _fake, _library)
torch.library.register_autograd(forward_operator, _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd(backward_operator, refuse_twice, lib=_library)
