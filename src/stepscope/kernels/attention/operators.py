"""Flash attention as PyTorch's dispatcher sees it: two operators, forward and backward.

`torch.compile` sees each as one graph node, with a fake-tensor implementation that gives the shapes and strides of the
results. The backend is chosen inside, where tensors have addresses, so a compiled graph does not fix the choice.

They take four dimensions and checked arguments (`problem.py`, `extras.py`), and can be differentiated once. The extras
are the last arguments, with defaults, so that a plain call does not mention them. Forward returns the output and the
log-sum-exp. Backward returns a list: dq, dk, dv, and if `bias_grad` is set the gradient of the bias. The gradient of
the sinks follows from what forward saved, so `sink_gradient` computes it outside the operator.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepscope.cost.operators import attention_flops
from stepscope.cost.products import BACKWARD_PRODUCTS
from stepscope.kernels.attention import backends, planned
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras, Problem

_library = torch.library.Library("stepscope", "DEF")  # type: ignore[no-untyped-call]  # registrations last as long as it does
_EXTRAS = (
    "int left=-1, int right=-1, float softcap=0.0, Tensor? bias=None, Tensor? slopes=None, Tensor? sinks=None,"
    " Tensor? documents=None"
)
_library.define(  # type: ignore[no-untyped-call]
    "flash_attention_forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str backend, bool tf32,"
    f" bool deterministic, {_EXTRAS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(  # type: ignore[no-untyped-call]
    "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal,"
    f" float scale, str backend, bool tf32, bool deterministic, {_EXTRAS}, bool bias_grad=False) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
forward_operator = torch.ops.stepscope.flash_attention_forward.default
backward_operator = torch.ops.stepscope.flash_attention_backward.default
NUM_EXTRAS = len(Extras._fields)
BIAS, SINKS = Extras._fields.index("bias"), Extras._fields.index("sinks")
NUM_TENSORS = NUM_EXTRAS - BIAS  # the bias and everything after it


def _run_forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    causal: bool,
    scale: float,
    backend: str,
    tf32: bool,
    _deterministic: bool,
    *extra: Any,
) -> tuple[Tensor, Tensor]:
    """Forward is always deterministic; backward checks. The dispatcher leaves out trailing defaults, so `extra` is
    empty for a plain call.
    """
    plan = None if extra else planned.find(q_BHLD, k_BGKD, v_BGKD, causal, scale, backend)
    if plan is not None:
        return plan(q_BHLD, k_BGKD, v_BGKD)
    extras = Extras(*extra) if extra else NO_EXTRAS
    problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
    planned.remember(problem, scale, scale, backend)
    if backend == "auto":
        backend = backends.choose(problem, among=backends.KERNELS)
    else:
        backends.require(backend, problem)
    with _device(q_BHLD):
        output: tuple[Tensor, Tensor] = _load(backend).forward(
            q_BHLD, k_BGKD, v_BGKD, causal=causal, scale=scale, tf32=tf32, extras=extras
        )
    return output


def _run_backward(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    causal: bool,
    scale: float,
    backend: str,
    tf32: bool,
    deterministic: bool,
    *extra: Any,
) -> list[Tensor]:
    plan = None if extra or deterministic else planned.find(q_BHLD, k_BGKD, v_BGKD, causal, scale, backend)
    if plan is not None:
        return list(plan.backward(do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL))
    extras = Extras(*extra[:NUM_EXTRAS]) if extra else NO_EXTRAS
    bias_grad = len(extra) > NUM_EXTRAS
    if backend == "auto":
        problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
        backend = backends.choose(problem, deterministic=deterministic, among=backends.KERNELS)
    elif deterministic and backends.FUNCTIONS[backend].repeats == "never":
        backend = "triton"
    with _device(q_BHLD):
        *gradients, dbias = _load(backend).backward(
            do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL,
            causal=causal, scale=scale, tf32=tf32, extras=extras, wants_dbias=bias_grad,
        )  # fmt: skip
    return [*gradients, dbias] if bias_grad else gradients


_SAME_DEVICE = nullcontext()


def _device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. That is nearly always the tensors' own, and then nothing needs to change:
    setting the same device again takes microseconds.
    """
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(x.device)


@cache
def _load(backend: str) -> ModuleType:
    """Return the module with `forward` and `backward`. Triton is not installed everywhere, and takes a while to
    import.
    """
    return import_module(f"stepscope.kernels.attention.{backends.FUNCTIONS[backend].module}")


def _fake_forward(q_BHLD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    return torch.empty_like(q_BHLD), q_BHLD.new_empty(q_BHLD.shape[:3], dtype=wide)


def _fake_backward(
    _: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    _o: Tensor,
    _lse: Tensor,
    _causal: bool,
    _scale: float,
    _backend: str,
    _tf32: bool,
    _deterministic: bool,
    *extra: Any,
) -> list[Tensor]:
    gradients = [torch.empty_like(q_BHLD), torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)]
    if len(extra) > NUM_EXTRAS:
        gradients.append(torch.empty_like(extra[BIAS]))
    return gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.settings, ctx.numbers = inputs[3:-NUM_EXTRAS], inputs[-NUM_EXTRAS:-NUM_TENSORS]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:3], *output, *inputs[-NUM_TENSORS:])


def _differentiate(ctx: Any, do_BHLD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, *tensors = ctx.saved_tensors
    extras = Extras(*ctx.numbers, *tensors)
    # Trailing defaults are missing here, but not in the inputs of `_keep`.
    needs = dict(enumerate(ctx.needs_input_grad[3 + len(ctx.settings) :]))
    wanted = needs.get(BIAS, False), needs.get(SINKS, False)
    dq, dk, dv, dbias, dsinks = differentiate(
        do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, ctx.settings, extras, *wanted
    )
    return dq, dk, dv, *(None for _ in ctx.settings), *(None for _ in ctx.numbers), dbias, None, dsinks, None


def differentiate(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    settings: Sequence[Any],
    extras: Extras,
    wants_dbias: bool,
    wants_dsinks: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, the bias and the sinks, None for those of the last two that are not wanted.
    `settings` are the operator arguments from `causal` to `deterministic`.
    """
    tail = (True,) if wants_dbias else ()
    gradients = backward_operator(do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, *settings, *extras, *tail)
    dbias = gradients[3] if wants_dbias else None
    dsinks = sink_gradient(do_BHLD, o_BHLD, lse_BHL, extras.sinks) if wants_dsinks else None
    return *gradients[:3], dbias, dsinks


def sink_gradient(do_BHLD: Tensor, o_BHLD: Tensor, lse_BHL: Tensor, sinks_H: Tensor | None) -> Tensor:
    """A sink has the weight exp(sink - lse) and no value, so its dP is zero: of dS = P · (dP - delta), only delta is
    left.
    """
    assert sinks_H is not None
    delta_BHL = (do_BHLD.to(lse_BHL.dtype) * o_BHLD).sum(dim=-1)
    return ((sinks_H[:, None] - lse_BHL).exp() * delta_BHL).sum(dim=(0, 2)).neg()


def _refuse_twice(_ctx: Any, *_gradients: Tensor) -> None:
    raise RuntimeError(
        "flash attention does not support double backward; use `backend='naive'` or `backend='sdpa-math'`"
    )


def _count_forward(
    q_shape: Any,
    k_shape: Any,
    _v: Any,
    causal: bool,
    _scale: float,
    _backend: str,
    _tf32: bool,
    _deterministic: bool,
    left: int = -1,
    right: int = -1,
    *_: Any,
    **__: Any,
) -> int:
    """Two matmuls, half of them under a causal mask, as for SDPA in `measure.flops`. What a window hides does not count
    either; what documents hide does, because it depends on their values.
    """
    batch, heads, queries, head_dim = q_shape
    return attention_flops(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=k_shape[2],
        head_dim=head_dim,
        causal=causal,
        window=(left, right),
    )


def _count_backward(
    _do: Any, q_shape: Any, k_shape: Any, v_shape: Any, _o: Any, _lse: Any, *settings: Any, **_: Any
) -> int:
    """Five matmuls, because the scores are recomputed."""
    return int(_count_forward(q_shape, k_shape, v_shape, *settings) * BACKWARD_PRODUCTS)


_library.impl("flash_attention_forward", _run_forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("flash_attention_backward", _run_backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(forward_operator, _fake_forward, lib=_library)
torch.library.register_fake(backward_operator, _fake_backward, lib=_library)
torch.library.register_autograd(forward_operator, _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd(backward_operator, _refuse_twice, lib=_library)
register_flop_formula(torch.ops.stepscope.flash_attention_forward)(_count_forward)
register_flop_formula(torch.ops.stepscope.flash_attention_backward)(_count_backward)
