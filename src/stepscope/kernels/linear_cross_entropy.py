"""The last layer and the loss in one: `linear_cross_entropy`, which never has all logits in memory.

Tokens are processed in chunks. A chunk's logits are one GEMM into a buffer that all chunks share; the cross entropy
kernel turns them into their gradient in place; two more GEMMs give the gradient of the chunk's x, and add to that of
the weight. So the gradients exist after the forward pass, and the backward pass only multiplies them by that of the
loss, which stays on the device.

Memory: the buffer has at most `MOST_LOGIT_BYTES`, or 1,024 tokens if those take more; next to it are the two
gradients. Chunks have the same number of tokens, up to a multiple of 128. Larger chunks would be faster, because every
chunk but the first reads and writes the sum of the weight's gradient: at 2,048 tokens that takes a tenth of the time of
its GEMMs. Smaller ones save no memory that matters.

That sum is in fp32 if there are several chunks: GEMMs with bf16 operands add to an fp32 matrix (`torch.addmm` with
`out_dtype`, which cuBLAS computes without a copy). With a single chunk the GEMM's own sum is in fp32, and its result is
rounded once.

Rows of logits have to start at aligned addresses for cuBLAS to use its fast kernels, so a vocabulary that is not a
multiple of 8 is padded with rows of zeros to the next multiple of 64: one copy of the weight. The logits behind the
vocabulary are zero, and as the kernel does not touch them, so is their gradient.
"""

# N tokens, C tokens of a chunk, D width, V vocabulary, P padded vocabulary.

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepscope.cost import linear_cross_entropy_flops
from stepscope.kernels.cross_entropy import (
    IGNORE_INDEX,
    LossSettings,
    Reduction,
    check_targets,
    launch_reduce,
    launch_rows,
    load_kernels,
    make_settings,
    plain_backward,
    plain_forward,
    refuse_twice,
    runs_kernels,
)
from stepscope.kernels.launch import register_fake

_library = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]  # registrations last as long as it does

MOST_LOGIT_BYTES = 2**29
FEWEST_TOKENS = 1024
SCALE_BLOCK = 2048


class Wanted(NamedTuple):
    """Which gradients to compute."""

    x: bool
    weight: bool
    bias: bool


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return `cross_entropy(x @ weight.T + bias, targets)` in fp32, for x (..., D), weight (V, D) and targets (...).

    Only gradients that are needed are computed, in the forward pass. `chunk` is the number of tokens whose logits are
    in memory at once; by default it is chosen so that they take at most 512 MiB. Under autocast, x and the weight are
    cast as for a linear layer.
    """
    check_targets(x.shape[:-1], targets)
    settings = make_settings(ignore_index, reduction, softcap)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check(x, weight, bias)
    x_ND, targets_N = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if chunk is None:
        chunk = choose_chunk(x_ND.shape[0], padded_vocab(weight) * x.element_size())
    elif chunk < 1:
        raise ValueError(f"`chunk` must be positive, but got {chunk}")
    wanted = Wanted(*(_is_wanted(tensor) for tensor in (x, weight, bias)))
    loss: Tensor = torch.ops.stepscope.linear_cross_entropy(
        x_ND, weight, bias, targets_N, settings.ignore_index, settings.mean, settings.softcap, chunk, *wanted
    )[0]
    return loss


def _is_wanted(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x (..., D) and weight (V, D), but got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},), but got {tuple(bias.shape)}")
    if not x.is_floating_point() or any(y is not None and y.dtype != x.dtype for y in (weight, bias)):
        raise ValueError(f"x, weight and bias must have one floating-point dtype, but x is {x.dtype}, {weight.dtype}")


def choose_chunk(num_tokens: int, row_bytes: int) -> int:
    """Return the number of tokens per chunk, for logits of this many bytes per token."""
    most = max(FEWEST_TOKENS, MOST_LOGIT_BYTES // row_bytes)
    if num_tokens <= most:
        return max(1, num_tokens)
    num_chunks = -(-num_tokens // most)
    return -(-num_tokens // (128 * num_chunks)) * 128


def padded_vocab(weight_VD: Tensor) -> int:
    """Return V, or the next multiple of 64 if rows of V logits would not be aligned."""
    vocab = weight_VD.shape[0]
    return vocab if vocab % 8 == 0 else -(-vocab // 64) * 64


def compute(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    settings: LossSettings,
    chunk: int,
    wanted: Wanted,
    *,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, what the gradients have to be scaled by, and those of x, the weight and the bias; a gradient
    that is not wanted is empty.
    """
    num_tokens, vocab = len(targets_N), weight_VD.shape[0]
    targets_N = targets_N.contiguous()
    weight_PD = _pad(weight_VD)
    buffer_CP = x_ND.new_empty(min(chunk, num_tokens), len(weight_PD))
    losses_N = x_ND.new_zeros(num_tokens, dtype=torch.promote_types(x_ND.dtype, torch.float32))
    dx_ND, dweight_VD, dbias_V = _empty_gradients(x_ND, weight_VD, bias_V, chunk, wanted)
    dweight_PD = dweight_VD
    if wanted.weight and len(weight_PD) > vocab:
        dweight_PD = dweight_VD.new_empty(weight_PD.shape)
    if num_tokens == 0:
        dweight_PD.zero_()
    for start in range(0, num_tokens, chunk):
        part = slice(start, min(start + chunk, num_tokens))
        x_CD, logits_CP = x_ND[part], buffer_CP[: part.stop - start]
        torch.mm(x_CD, weight_PD.T, out=logits_CP)
        _differentiate_rows(
            logits_CP[:, :vocab], targets_N[part], losses_N[part], settings, bias_V,
            wants_gradient=any(wanted), in_triton=in_triton,
        )  # fmt: skip
        if wanted.x:
            torch.mm(logits_CP, weight_PD, out=dx_ND[part])
        if wanted.weight:
            _add_product(dweight_PD, logits_CP.T, x_CD, is_first=start == 0)
        if wanted.bias:
            dbias_V += logits_CP[:, :vocab].sum(dim=0, dtype=dbias_V.dtype)
    loss, scale = _reduce(losses_N, targets_N, settings, in_triton=in_triton)
    return loss, scale, dx_ND, dweight_PD[:vocab] if wanted.weight else dweight_VD, dbias_V


def _pad(weight_VD: Tensor) -> Tensor:
    missing = padded_vocab(weight_VD) - len(weight_VD)
    return weight_VD if missing == 0 else torch.nn.functional.pad(weight_VD, (0, 0, 0, missing))


def _empty_gradients(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, chunk: int, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients. The last one is zero."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    # fp16 has too few exponents for gradients that are scaled later.
    is_summed = chunk < x_ND.shape[0] or x_ND.dtype == torch.float16
    return (
        x_ND.new_empty(x_ND.shape if wanted.x else 0),
        x_ND.new_empty(weight_VD.shape if wanted.weight else 0, dtype=wide if is_summed else x_ND.dtype),
        x_ND.new_zeros(0 if bias_V is None or not wanted.bias else bias_V.shape, dtype=wide),
    )


def _differentiate_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    settings: LossSettings,
    bias_V: Tensor | None,
    *,
    wants_gradient: bool,
    in_triton: bool,
) -> None:
    """Write the losses, and replace the logits by their gradient. In plain PyTorch, the first loss is their sum."""
    if in_triton:
        gradient_CV = logits_CV if wants_gradient else None
        launch_rows(logits_CV, targets_C, settings, gradient_NV=gradient_CV, losses_N=losses_C, bias_V=bias_V)
        return
    added_CV = logits_CV if bias_V is None else logits_CV + bias_V
    summed = settings._replace(mean=False)
    loss, lse_C, one = plain_forward(added_CV, targets_C, summed)
    losses_C[0] = loss
    if wants_gradient:
        logits_CV.copy_(plain_backward(one, added_CV, targets_C, lse_C, one, summed))


def _add_product(sums_PD: Tensor, left_PC: Tensor, right_CD: Tensor, *, is_first: bool) -> None:
    """Add a product of low-precision matrices to a sum that may be in fp32; the first one overwrites it."""
    options: dict[str, Any] = {"out": sums_PD}
    if sums_PD.dtype != left_PC.dtype and sums_PD.is_cuda:
        options["out_dtype"] = sums_PD.dtype
    else:
        left_PC, right_CD = left_PC.to(sums_PD.dtype), right_CD.to(sums_PD.dtype)
    if is_first:
        torch.mm(left_PC, right_CD, **options)
    else:
        torch.addmm(sums_PD, left_PC, right_CD, **options)


def _reduce(losses_N: Tensor, targets_N: Tensor, settings: LossSettings, *, in_triton: bool) -> tuple[Tensor, Tensor]:
    if in_triton:
        return launch_reduce(losses_N, targets_N, settings)
    count = (targets_N != settings.ignore_index).sum()
    if not settings.mean:
        return losses_N.sum(), losses_N.new_ones(())
    return losses_N.sum() / count, torch.where(count > 0, 1 / count.clamp(min=1), 0.0).to(losses_N.dtype)


def scale_gradient(gradient: Tensor, upstream: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient · upstream · scale in this dtype, in one pass; the last two are scalars on the device."""
    output = torch.empty_like(gradient, dtype=dtype)
    count = gradient.numel()
    if count:
        load_kernels().scale_gradient[(-(-count // SCALE_BLOCK),)](
            gradient, output, upstream, scale, count, BLOCK=SCALE_BLOCK, num_warps=8
        )
    return output


# --- Operators ---

_SETTINGS = "int ignore_index, bool mean, float softcap, int chunk, bool x_grad, bool weight_grad, bool bias_grad"
for _schema in (
    f"linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "scale_gradient(Tensor gradient, Tensor grad, Tensor scale, ScalarType dtype) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
forward_operator = torch.ops.stepscope.linear_cross_entropy.default
scale_operator = torch.ops.stepscope.scale_gradient.default
_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _run_forward(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    ignore_index: int,
    mean: bool,
    softcap: float,
    chunk: int,
    *wanted: bool,
) -> _Results:
    settings = LossSettings(ignore_index, mean, softcap)
    arguments = (x_ND, weight_VD, bias_V, targets_N, settings, chunk, Wanted(*wanted))
    if not runs_kernels(x_ND):
        return compute(*arguments, in_triton=False)
    with torch.cuda.device(x_ND.device):
        return compute(*arguments, in_triton=True)


def _fake_forward(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, _targets: Tensor, *settings: Any) -> _Results:
    *_, chunk, x_grad, weight_grad, bias_grad = settings
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    loss, scale = (x_ND.new_empty((), dtype=wide) for _ in range(2))
    return loss, scale, *_empty_gradients(x_ND, weight_VD, bias_V, chunk, Wanted(x_grad, weight_grad, bias_grad))


def _run_scale(gradient: Tensor, upstream: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not runs_kernels(gradient):
        return (gradient * (upstream * scale)).to(dtype)
    with torch.cuda.device(gradient.device):
        return scale_gradient(gradient, upstream, scale, dtype)


def _fake_scale(gradient: Tensor, _upstream: Tensor, _scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    ctx.wanted, ctx.num_settings = Wanted(*inputs[-3:]), len(inputs) - 4
    ctx.dtype = inputs[0].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    scale, *gradients = ctx.saved_tensors
    dx, dweight, dbias = (
        scale_operator(gradient, upstream, scale, ctx.dtype) if is_wanted else None
        for gradient, is_wanted in zip(gradients, ctx.wanted, strict=True)
    )
    return dx, dweight, dbias, None, *(None for _ in range(ctx.num_settings))


def _count_flops(x_shape: Any, weight_shape: Any, _bias: Any, _targets: Any, *settings: Any, **_: Any) -> int:
    x_grad, weight_grad = settings[-3:-1]
    tokens, width = x_shape
    gradients = int(x_grad) + int(weight_grad)
    return linear_cross_entropy_flops(tokens=tokens, width=width, vocab=weight_shape[0], gradients=gradients)


for _operator, _run, _fake in (
    (forward_operator, _run_forward, _fake_forward),
    (scale_operator, _run_scale, _fake_scale),
):
    _library.impl(_operator, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(_operator, _fake, _library)
torch.library.register_autograd(forward_operator, _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd(scale_operator, refuse_twice, lib=_library)
register_flop_formula(torch.ops.stepscope.linear_cross_entropy)(_count_flops)
