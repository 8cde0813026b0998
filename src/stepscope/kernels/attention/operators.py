"""Flash attention as PyTorch's dispatcher sees it: two operators, forward and backward.

`torch.compile` sees each as one graph node, with a fake-tensor implementation that gives the shapes and strides of the
results. The backend is chosen inside, where tensors have addresses, so a compiled graph does not fix the choice.

These two bypass autograd, which would add 10 µs to every call. A compiler traces a third operator, which can be
differentiated once, and finds the two inside it.

They take four dimensions and checked arguments (`problem.py`, `extras.py`). Both have an overload with extras, which is
differentiable itself: arguments cost time even where they are defaults, 2 µs in a plain forward and backward pass.
Its backward returns a list, with the gradient of the bias as the last of it if `bias_grad` is set. The gradient of the
sinks follows from what forward saved, so `sink_gradient` computes it outside the operator.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim (v and o have their own).

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepscope.cost.operators import attention_flops
from stepscope.kernels.attention import backends, plans
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras, Problem, empty_output
from stepscope.kernels.launch import register_fake

_library = torch.library.Library("stepscope", "DEF")  # type: ignore[no-untyped-call]  # registrations last as long as it does
_INPUTS = "Tensor q, Tensor k, Tensor v"
_SETTINGS = "bool causal, float scale, str backend, bool tf32, bool deterministic"
_EXTRAS = "int left, int right, float softcap, Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? documents"
for _schema in (
    f"flash_attention({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)",
    f"flash_attention_forward({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)",
    f"flash_attention_forward.extras({_INPUTS}, {_SETTINGS}, {_EXTRAS}) -> (Tensor, Tensor)",
    f"flash_attention_backward(Tensor grad, {_INPUTS}, Tensor o, Tensor lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    f"flash_attention_backward.extras(Tensor grad, {_INPUTS}, Tensor o, Tensor lse, {_SETTINGS}, {_EXTRAS},"
    " bool bias_grad) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
differentiable_operator = torch.ops.stepscope.flash_attention.default
forward_operator = torch.ops.stepscope.flash_attention_forward.default
forward_with_extras = torch.ops.stepscope.flash_attention_forward.extras
backward_operator = torch.ops.stepscope.flash_attention_backward.default
backward_with_extras = torch.ops.stepscope.flash_attention_backward.extras
BIAS, SINKS = Extras._fields.index("bias"), Extras._fields.index("sinks")


def _run_forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    causal: bool,
    scale: float,
    backend: str,
    tf32: bool,
    deterministic: bool,
    *extra: Any,
) -> tuple[Tensor, Tensor]:
    """Forward is always deterministic; backward checks."""
    plan = None if extra or deterministic else plans.find(q_BHLD, k_BGKD, v_BGKD, causal, scale, backend)
    if plan is not None:
        return plan(q_BHLD, k_BGKD, v_BGKD)
    extras = Extras(*extra) if extra else NO_EXTRAS
    problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
    plans.remember(problem, scale, scale, backend)
    if backend == "auto":
        backend = backends.choose(problem, "forward", among=backends.KERNELS)
    else:
        backends.require(backend, problem)
    with _device(q_BHLD):
        output: tuple[Tensor, Tensor] = backends.load(backend).forward(
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
) -> tuple[Tensor, ...]:
    plan = None if extra or deterministic else plans.find(q_BHLD, k_BGKD, v_BGKD, causal, scale, backend)
    if plan is not None:
        return plan.backward(do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL)
    extras, wants_dbias = (Extras(*extra[:-1]), extra[-1]) if extra else (NO_EXTRAS, False)
    if backend == "auto":
        problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
        backend = backends.choose(problem, "backward", deterministic=deterministic, among=backends.KERNELS)
    elif deterministic and backends.FUNCTIONS[backend].repeats == "never":
        problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
        backend, _ = backends.decide(problem, "backward", deterministic=True, among=backends.KERNELS)
    with _device(q_BHLD):
        gradients: tuple[Tensor, ...] = backends.load(backend).backward(
            do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL,
            causal=causal, scale=scale, tf32=tf32, extras=extras, wants_dbias=wants_dbias, deterministic=deterministic,
        )  # fmt: skip
    return gradients if wants_dbias else gradients[:3]


_SAME_DEVICE = nullcontext()


def _device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. That is nearly always the tensors' own, and then nothing needs to change:
    setting the same device again takes microseconds.
    """
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(x.device)


def _fake_forward(q_BHLD: Tensor, _: Tensor, v_BGKD: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    return empty_output(q_BHLD, v_BGKD), q_BHLD.new_empty(q_BHLD.shape[:3], dtype=wide)


def _fake_backward(_: Tensor, q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q_BHLD), torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)


def _fake_backward_with_extras(*arguments: Any) -> list[Tensor]:
    *_, bias, _slopes, _sinks, _documents, bias_grad = arguments
    return [*_fake_backward(*arguments), *([torch.empty_like(bias)] if bias_grad else [])]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        o_BHLD, lse_BHL = forward_operator(q_BHLD, k_BGKD, v_BGKD, *settings)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse_BHL)
        ctx.save_for_backward(q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL)
        return o_BHLD, lse_BHL

    @staticmethod
    def backward(ctx: Any, do_BHLD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *differentiate_once(do_BHLD, *ctx.saved_tensors, *ctx.settings), *(None for _ in ctx.settings)


class _RefusesTwice(torch.autograd.Function):
    """The backward pass as part of a graph (`create_graph=True`), which must not silently lack a part."""

    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = backward_operator(*arguments)
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        _refuse_twice(ctx, *gradients)


def differentiate_once(*arguments: Any) -> tuple[Tensor, ...]:
    """Call the backward operator. If its result is differentiated in turn, that raises."""
    gradients: tuple[Tensor, ...] = (
        _RefusesTwice.apply(*arguments) if torch.is_grad_enabled() else backward_operator(*arguments)  # type: ignore[no-untyped-call]
    )
    return gradients


def _run_differentiably(q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHLD, k_BGKD, v_BGKD))
    run: Callable[..., tuple[Tensor, Tensor]] = _Differentiable.apply if needs_graph else forward_operator
    return run(q_BHLD, k_BGKD, v_BGKD, *settings)


def _keep_with_extras(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BHLD, k_BGKD, v_BGKD, *settings, left, right, softcap, bias, slopes, sinks, documents = inputs
    ctx.settings, ctx.numbers = settings, (left, right, softcap)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_BHLD, k_BGKD, v_BGKD, *output, bias, slopes, sinks, documents)


def _differentiate_with_extras(ctx: Any, do_BHLD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, *tensors = ctx.saved_tensors
    extras = Extras(*(*ctx.numbers, *tensors))
    first = 3 + len(ctx.settings)
    wants_dbias, wants_dsinks = ctx.needs_input_grad[first + BIAS], ctx.needs_input_grad[first + SINKS]
    *gradients, dbias, dsinks = differentiate(
        do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, ctx.settings, extras, wants_dbias, wants_dsinks
    )
    return *gradients, *(None for _ in (*ctx.settings, *ctx.numbers)), dbias, None, dsinks, None


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
    tensors = do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL
    gradients = backward_with_extras(*tensors, *settings, *extras, wants_dbias)
    dbias = gradients[3] if wants_dbias else None
    if not wants_dsinks:
        return *gradients[:3], dbias, None
    of_sinks = _SinkGradient.apply if torch.is_grad_enabled() else sink_gradient
    return *gradients[:3], dbias, of_sinks(do_BHLD, o_BHLD, lse_BHL, extras.sinks)


class _SinkGradient(torch.autograd.Function):
    """`sink_gradient` as part of a graph, which would lack what the log-sum-exp depends on."""

    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> Tensor:
        return sink_gradient(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        _refuse_twice(ctx, *gradients)


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
    v_shape: Any,
    causal: bool,
    _scale: float,
    _backend: str,
    _tf32: bool,
    _deterministic: bool,
    left: int = -1,
    right: int = -1,
    *_: Any,
    backward: bool = False,
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
        value_dim=v_shape[3],
        causal=causal,
        window=(left, right),
        backward=backward,
    )


def _count_backward(
    _do: Any, q_shape: Any, k_shape: Any, v_shape: Any, _o: Any, _lse: Any, *settings: Any, **_: Any
) -> int:
    """Five matmuls, because the scores are recomputed."""
    return _count_forward(q_shape, k_shape, v_shape, *settings, backward=True)


for _operator, _run, _fake in (
    (differentiable_operator, _run_forward, _fake_forward),
    (forward_operator, _run_forward, _fake_forward),
    (forward_with_extras, _run_forward, _fake_forward),
    (backward_operator, _run_backward, _fake_backward),
    (backward_with_extras, _run_backward, _fake_backward_with_extras),
):
    _library.impl(_operator, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(_operator, _fake, _library)
_library.impl(differentiable_operator, _run_differentiably, "Autograd")  # type: ignore[no-untyped-call]
for _operator in (forward_operator, backward_operator):
    _library.impl(_operator, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
torch.library.register_autograd(
    forward_with_extras, _differentiate_with_extras, setup_context=_keep_with_extras, lib=_library
)
torch.library.register_autograd(backward_with_extras, _refuse_twice, lib=_library)
# For both overloads.
register_flop_formula(torch.ops.stepscope.flash_attention_forward)(_count_forward)
register_flop_formula(torch.ops.stepscope.flash_attention_backward)(_count_backward)
