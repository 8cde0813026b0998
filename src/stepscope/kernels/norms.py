"""RMSNorm and LayerNorm, alone or fused with the addition to the residual stream in front of them.

    total, y = add_rms_norm(x, branch, weight)        # total = x + branch, y = rms_norm(total, weight)

is one kernel, and so is its backward pass (plus a small one that sums the gradient of the weight): it takes the
gradients of both results, adds the two, and writes the sum for x and for the branch. Dtypes may differ, as they do with
an fp32 residual stream between bf16 layers; sums are in fp32.

PyTorch's dispatcher sees one operator per function and one for its backward pass, so a compiler does not look inside.
On a GPU Triton kernels run (`norms_kernels.py`), on a CPU and in float64 the formulas below, which use the reference.
"""

# M the width of a row. Tensors without a suffix are (..., M), statistics (1 or 2, ...).

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.launch import KERNEL_DTYPES, register_fake
from stepscope.nn import functional

_library = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]  # registrations last as long as it does


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Scale the rows of x (..., M) to a root mean square of one, then each feature by weight (M).

    The result has the dtype of x, or `out_dtype`.
    """
    _check(x, None, weight, None)
    y: Tensor = torch.ops.stepscope.rms_norm(x, weight, None, eps, out_dtype or x.dtype)[0]
    return y


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-5, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + branch, in the wider of their dtypes, and its `rms_norm`, in the branch's dtype or `out_dtype`."""
    _check(x, branch, weight, None)
    total, y, _ = torch.ops.stepscope.add_rms_norm(x, branch, weight, None, eps, out_dtype or branch.dtype)
    return total, y


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Shift and scale the rows of x (..., M) to mean zero and variance one, then each feature by weight and bias (M).

    The result has the dtype of x, or `out_dtype`.
    """
    _check(x, None, weight, bias)
    y: Tensor = torch.ops.stepscope.layer_norm(x, weight, bias, eps, out_dtype or x.dtype)[0]
    return y


def add_layer_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + branch, in the wider of their dtypes, and its `layer_norm`, in the branch's dtype or `out_dtype`."""
    _check(x, branch, weight, bias)
    total, y, _ = torch.ops.stepscope.add_layer_norm(x, branch, weight, bias, eps, out_dtype or branch.dtype)
    return total, y


def _check(x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"the shape of `weight` must be x's last, but got {_shape(weight)} for x {_shape(x)}")
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"`bias` must have the shape of `weight`, but got {_shape(bias)} for {_shape(weight)}")
    if branch is not None and branch.shape != x.shape:
        raise ValueError(f"`branch` must have the shape of x, but got {_shape(branch)} for {_shape(x)}")
    for tensor in (x, branch):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"expected floating-point numbers, but got {tensor.dtype}")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


# --- The formulas, for CPUs and float64 ---


def _plain_forward(
    x: Tensor,
    branch: Tensor | None,
    weight_M: Tensor,
    bias_M: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    total = None if branch is None else x + branch
    wide = _widen(x if total is None else total)
    if centered:
        y = functional.layer_norm(wide, weight_M, bias_M, eps)
        mean = wide.mean(dim=-1)
        statistics = torch.stack((mean, torch.rsqrt((wide - mean[..., None]).square().mean(dim=-1) + eps)))
    else:
        y = functional.rms_norm(wide, weight_M, eps)
        statistics = torch.rsqrt(wide.square().mean(dim=-1) + eps)[None]
    return total, y.to(dtype), statistics


def _plain_backward(
    dy: Tensor,
    d_total: Tensor | None,
    x: Tensor,
    weight_M: Tensor,
    statistics: Tensor,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    """As `norms_launch.backward`; the formula is in `norms_kernels.py`."""
    inverse_rms = statistics[-1][..., None]
    centered = statistics.shape[0] == 2
    xhat = (_widen(x) - statistics[0][..., None] if centered else _widen(x)) * inverse_rms
    dy = dy.to(xhat.dtype)
    g = dy * weight_M
    dx = g - xhat * (g * xhat).mean(dim=-1, keepdim=True)
    if centered:
        dx = dx - g.mean(dim=-1, keepdim=True)
    dx = dx * inverse_rms
    if d_total is not None:
        dx = dx + d_total
    wanted = [dx.to(dtype) for dtype in dict.fromkeys(dtypes)]
    if weight_grad:
        wanted.append(_sum_rows(dy * xhat).to(weight_M.dtype))
    if bias_grad:
        wanted.append(_sum_rows(dy).to(weight_M.dtype))
    return wanted


def _sum_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(dim=0)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- Operators ---

_Forward = Callable[..., tuple[Tensor | None, Tensor, Tensor]]
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _run_forward(
    x: Tensor, branch: Tensor | None, weight_M: Tensor, bias_M: Tensor | None, eps: float, dtype: torch.dtype, kind: str
) -> tuple[Tensor | None, Tensor, Tensor]:
    centered = kind == "layer_norm"
    wide = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    if x.is_cuda and wide in KERNEL_DTYPES:
        from stepscope.kernels import norms_launch

        return norms_launch.forward(x, branch, weight_M, bias_M, eps=eps, dtype=dtype, centered=centered)
    return _plain_forward(x, branch, weight_M, bias_M, eps=eps, dtype=dtype, centered=centered)


def _run_backward(
    dy: Tensor,
    d_total: Tensor | None,
    x: Tensor,
    weight_M: Tensor,
    statistics: Tensor,
    x_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    run = _plain_backward
    if x.is_cuda and x.dtype in KERNEL_DTYPES:
        from stepscope.kernels import norms_launch

        run = norms_launch.backward
    dtypes = (x_dtype, branch_dtype)
    return run(
        dy, d_total, x, weight_M, statistics, dtypes=dtypes, weight_grad=weight_grad, bias_grad=bias_grad
    )  # fmt: skip


def _fake_forward(
    x: Tensor, branch: Tensor | None, _weight: Tensor, _bias: Tensor | None, _eps: float, dtype: torch.dtype, kind: str
) -> tuple[Tensor | None, Tensor, Tensor]:
    wide = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    total = None if branch is None else x.new_empty(x.shape, dtype=wide)
    statistics_shape = (2 if kind == "layer_norm" else 1, *x.shape[:-1])
    statistics = x.new_empty(statistics_shape, dtype=torch.promote_types(wide, torch.float32))
    return total, x.new_empty(x.shape, dtype=dtype), statistics


def _fake_backward(
    _dy: Tensor,
    _d_total: Tensor | None,
    x: Tensor,
    weight_M: Tensor,
    _statistics: Tensor,
    x_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    streams = [x.new_empty(x.shape, dtype=dtype) for dtype in dict.fromkeys((x_dtype, branch_dtype))]
    return [*streams, *(weight_M.new_empty(weight_M.shape) for _ in range(weight_grad + bias_grad))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *streams, weight_M, bias_M, _eps, _dtype = inputs  # x, or x and the branch
    *sums, _y, statistics = output
    ctx.stream_dtypes = [stream.dtype for stream in streams]
    ctx.bias_dtype = None if bias_M is None else bias_M.dtype
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # the gradient of a sum that nothing else uses is None: not to be read as zeros
    ctx.save_for_backward(*(sums or streams), weight_M, statistics)


def _differentiate(ctx: Any, gradients: tuple[Tensor | None, ...], backward: Any) -> tuple[Tensor | None, ...]:
    *sums, dy, _ = gradients
    d_total = sums[0] if sums else None
    x_dtype, branch_dtype = ctx.stream_dtypes[0], ctx.stream_dtypes[-1]
    if dy is None:
        return *(None if d_total is None else d_total.to(dtype) for dtype in ctx.stream_dtypes), None, None, None, None
    weight_grad, bias_grad = ctx.needs_input_grad[-4:-2]
    found = backward(dy, d_total, *ctx.saved_tensors, x_dtype, branch_dtype, weight_grad, bias_grad)
    # Both streams have the same gradient. Where they have the same dtype, it is the same tensor, as after an addition.
    by_dtype = dict(zip(dict.fromkeys(ctx.stream_dtypes), found, strict=False))
    of_streams = [by_dtype[dtype] for dtype in ctx.stream_dtypes]
    of_bias = found[-1].to(ctx.bias_dtype) if bias_grad else None
    return *of_streams, found[len(by_dtype)] if weight_grad else None, of_bias, None, None


def _refuse_twice(_ctx: Any, *_gradients: Tensor) -> None:
    raise RuntimeError("norms do not support double backward; use the functions of `stepscope.nn.functional`")


def _register(kind: str) -> None:
    """Define the three operators of `rms_norm` or `layer_norm`: alone, with the addition, and backward of both."""
    settings = "Tensor weight, Tensor? bias, float eps, ScalarType dtype"
    _library.define(f"{kind}(Tensor x, {settings}) -> (Tensor, Tensor)", tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.define(f"add_{kind}(Tensor x, Tensor branch, {settings}) -> (Tensor, Tensor, Tensor)", tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.define(  # type: ignore[no-untyped-call]
        f"{kind}_backward(Tensor dy, Tensor? d_total, Tensor x, Tensor weight, Tensor statistics, ScalarType x_dtype,"
        " ScalarType branch_dtype, bool weight_grad, bool bias_grad) -> Tensor[]",
        tags=_TAGS,
    )
    operators = torch.ops.stepscope
    alone, added, backward = (getattr(operators, name).default for name in (kind, f"add_{kind}", f"{kind}_backward"))

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, gradients, backward)

    for operator, run in (
        (alone, _alone(_run_forward, kind)),
        (added, _added(_run_forward, kind)),
        (backward, _run_backward),
    ):
        _library.impl(operator, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    for operator, fake in (
        (alone, _alone(_fake_forward, kind)),
        (added, _added(_fake_forward, kind)),
        (backward, _fake_backward),
    ):
        register_fake(operator, fake, _library)
    for operator in (alone, added):
        torch.library.register_autograd(operator, differentiate, setup_context=_keep, lib=_library)
    torch.library.register_autograd(backward, _refuse_twice, lib=_library)


def _alone(forward: _Forward, kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        _, y, statistics = forward(x, None, *settings, kind)
        return y, statistics

    return run


def _added(forward: _Forward, kind: str) -> _Forward:
    def run(x: Tensor, branch: Tensor, *settings: Any) -> tuple[Tensor | None, Tensor, Tensor]:
        return forward(x, branch, *settings, kind)

    return run


for _kind in ("rms_norm", "layer_norm"):
    _register(_kind)
