"""`flash_attention`, and the autograd functions behind it.

A compiler uses the operators (`operators.py`) directly. Eager code goes through the autograd functions, which call them
below the autograd dispatch key, because the code PyTorch generates around an operator is slow: on one core, a call that
does nothing costs 28 µs with a graph this way, 65 µs through a differentiable operator, and 77 µs through `custom_op`.

Saved for backward: q, k, v, the output, and one number per query. With extras, also their tensors.

A plain call and one with extras part ways in `flash_attention`, so that a plain call pays nothing for them.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim (v and o have their own).

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from stepscope.kernels.attention import backends, fast_path, plain, plans
from stepscope.kernels.attention.extras import Window, prepare_extras
from stepscope.kernels.attention.operators import (
    differentiable_operator,
    differentiate,
    differentiate_once,
    forward_operator,
    forward_with_extras,
)
from stepscope.kernels.attention.problem import (
    Extras,
    Problem,
    as_4d,
    check,
    choose_scale,
    output_shape,
    prepare,
    wants_tf32,
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v for (..., L, D), without storing the scores.

    With two or three dimensions the tensors have no heads; with four or more, the dimension before L is the heads, of
    which k and v may have fewer (grouped-query and multi-query attention). Query and key lengths may differ: a causal
    mask is aligned at the end, so the last query sees every key. A query that sees none returns zero, with zero
    gradients. The head dim of v, and with it that of the output, may differ from D, as in DeepSeek's latent attention.

    `window` hides distant keys: an int is the number of keys that a query sees under a causal mask, its own included; a
    pair is how many it sees before and after its own position, None for all. `cu_seqlens` packs documents end to end
    into a batch of one, and a query sees only its own; `documents` is the same as a table, for any batch, which
    `document_bounds` computes once for all layers.

    `softcap` bounds the scores: softcap · tanh(score / softcap). `bias` is added to them; it broadcasts to (..., L, K).
    `alibi_slopes`, one per head, add slope · (key - query position). `sinks`, one per head, are one more score in the
    softmax, without a value. `bias` and `sinks` have gradients.

    `scale` defaults to 1/sqrt(D). `backend` is one of `BACKENDS`; a named backend runs or raises, and `auto` uses the
    fastest that can run (see `chosen_backends`). `deterministic` requests bitwise reproducible gradients, and defaults
    to `torch.use_deterministic_algorithms`. fp32 has full fp32 accuracy unless `torch.set_float32_matmul_precision`
    allows tf32. See `docs/kernels.md`.
    """
    backends.check_backend(backend)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not (
        window is None
        and softcap is None
        and bias is None
        and alibi_slopes is None
        and sinks is None
        and cu_seqlens is None
        and documents is None
    ):
        problem = prepare_extras(
            prepare(q, k, v, causal=causal),
            q,
            window=window,
            softcap=softcap,
            bias=bias,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            cu_seqlens=cu_seqlens,
            documents=documents,
        )
        if problem.extras.names:
            return _run_with_extras(problem, scale, backend, deterministic).view(output_shape(q, v))
        causal = problem.causal
    # A plain call.
    if not deterministic and not torch.compiler.is_compiling():
        out = fast_path.attend(q, k, v, causal, scale, backend)
        if out is not None:
            return out
    if backend in backends.PLAIN or (backend == "auto" and not _has_kernel(q)):
        return _run_plain(q, k, v, causal, scale, backend, deterministic)
    return _run_flash(q, k, v, causal, scale, backend, deterministic)


def _run_with_extras(problem: Problem, scale: float | None, backend: str, deterministic: bool) -> Tensor:
    """Four dimensions in and out: views around it are differentiated by PyTorch."""
    if backend in backends.PLAIN or (backend == "auto" and not _has_kernel(problem.q_BHLD)):
        backend = _choose_plain(problem, backend, deterministic)
    settings = problem.causal, *_settings(problem.q_BHLD, scale, backend, deterministic)
    if backend in backends.PLAIN:
        return plain.run(backend, problem, settings[1])
    if torch.compiler.is_compiling():
        return cast(Tensor, forward_with_extras(*problem[:3], *settings, *problem.extras)[0])
    extras = problem.extras
    return _apply(
        _FlashAttentionWithExtras, *problem[:3], extras.bias, extras.sinks, extras.slopes, extras.documents, settings,
        extras,
    )  # fmt: skip


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str, deterministic: bool
) -> Tensor:
    if torch.compiler.is_compiling():
        return _trace_flash(q, k, v, causal, scale, backend, deterministic)
    if backend == "tiled":
        return _apply(FlashAttentionTiled, q, k, v, causal, scale)
    return _apply(FlashAttention, q, k, v, causal, scale, backend, deterministic)


def _trace_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str, deterministic: bool
) -> Tensor:
    problem = prepare(q, k, v, causal=causal)
    o_BHLD, _ = differentiable_operator(*problem[:4], *_settings(problem.q_BHLD, scale, backend, deterministic))
    return cast(Tensor, o_BHLD.view(output_shape(q, v)))


def flash_attention_in_graph(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """`flash_attention` for graphs that are compiled without `torch.compile`'s own tracing, which it would ask."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if _has_kernel(q):
        return _trace_flash(q, k, v, causal, scale, "auto", deterministic)
    return _run_plain(q, k, v, causal, scale, "auto", deterministic)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def _has_kernel(q: Tensor) -> bool:
    return isinstance(q, Tensor) and q.is_cuda and backends.has_kernel(q.device, q.dtype)


def _run_plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: str, deterministic: bool
) -> Tensor:
    """`auto` also ends here where our kernels do not run: SDPA if it can, tiles otherwise."""
    problem = prepare(q, k, v, causal=causal)
    scale = choose_scale(scale, problem.head_dim)
    backend = _choose_plain(problem, backend, deterministic)
    if backend not in backends.PLAIN:
        return _run_flash(q, k, v, causal, scale, backend, deterministic)
    return plain.run(backend, problem, scale).view(output_shape(q, v))


def _choose_plain(problem: Problem, backend: str, deterministic: bool) -> str:
    """Return the backend to run where `auto` has no kernel, and check one requested by name."""
    if backend != "auto":
        backends.require(backend, problem, deterministic=deterministic)
        return backend
    if torch.compiler.is_compiling():
        # The compiler traces this line; a counter that changes with every call would recompile every time.
        return "tiled" if backends.refusal("sdpa", problem, deterministic=deterministic) else "sdpa"
    return backends.choose(problem, deterministic=deterministic)


class FlashAttention(torch.autograd.Function):
    """Attention with GPU kernels, ours or others: `FlashAttention.apply(q, k, v, is_causal)`.

    `output.grad_fn.saved_tensors` are q, k, v, the output, and the log-sum-exp of every query (natural logarithm, shape
    `q.shape[:-1]`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> Tensor:
        backends.check_backend(backend, among=("auto", *backends.FLASH))
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        return _forward(ctx, q, k, v, is_causal, scale, backend, deterministic)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, do), None, None, None, None


class FlashAttentionTiled(torch.autograd.Function):
    """The same in tiled PyTorch, on any device: `FlashAttentionTiled.apply(q, k, v, is_causal)`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        return _forward(ctx, q, k, v, is_causal, scale, "tiled", deterministic=True)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, do), None, None


class _FlashAttentionWithExtras(torch.autograd.Function):
    """The same with extras and for any of our backends, in four dimensions. Tensors are separate arguments, because
    autograd does not look into tuples.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHLD: Tensor,
        k_BGKD: Tensor,
        v_BGKD: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        documents: Tensor | None,
        settings: tuple[bool, float, str, bool, bool],
        extras: Extras,
    ) -> Tensor:
        o_BHLD, lse_BHL = _call(forward_with_extras, q_BHLD, k_BGKD, v_BGKD, *settings, *extras)
        ctx.settings, ctx.numbers = settings, extras._replace(bias=None, sinks=None, slopes=None, documents=None)
        ctx.save_for_backward(q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, bias, sinks, slopes, documents)
        return cast(Tensor, o_BHLD)

    @staticmethod
    def backward(ctx: Any, do_BHLD: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, bias, sinks, slopes, documents = ctx.saved_tensors
        extras = ctx.numbers._replace(bias=bias, sinks=sinks, slopes=slopes, documents=documents)
        wanted = ctx.needs_input_grad[3:5]
        gradients = _call(differentiate, do_BHLD, *tensors, ctx.settings, extras, *wanted)
        return *gradients, None, None, None, None


def _settings(q: Tensor, scale: float | None, backend: str, deterministic: bool) -> tuple[float, str, bool, bool]:
    """The operator arguments after `causal`."""
    tf32 = q.dtype == torch.float32 and wants_tf32()
    return choose_scale(scale, q.shape[-1]), backend, tf32, deterministic


def _forward(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    backend: str,
    deterministic: bool,
) -> Tensor:
    q, k, v = check(q, k, v, causal=causal)
    ctx.settings = (causal, *_settings(q, scale, backend, deterministic))
    o, lse = forward_operator(as_4d(q), as_4d(k), as_4d(v), *ctx.settings)
    if q.dim() == 4 and not torch.compiler.is_compiling():
        plans.remember(Problem(q, k, v, causal), scale, ctx.settings[1], backend)
    elif q.dim() != 4:
        # Not `view`: autograd forbids in-place changes of views created in here.
        o, lse = torch.ops.aten._unsafe_view(o, output_shape(q, v)), lse.view(q.shape[:-1])
    ctx.save_for_backward(q, k, v, o, lse)
    return cast(Tensor, o)


def _backward(ctx: Any, do: Tensor) -> Sequence[Tensor]:
    q, k, v, o, lse = ctx.saved_tensors
    if q.dim() == 4:
        return differentiate_once(do, q, k, v, o, lse, *ctx.settings)
    lse_BHL = as_4d(lse.unsqueeze(-1)).squeeze(-1)
    dq, dk, dv = differentiate_once(*map(as_4d, (do, q, k, v, o)), lse_BHL, *ctx.settings)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _call(operator: Callable[..., Any], *args: Any) -> Any:
    """Call an operator with extras below autograd, unless a graph of it is needed (`create_graph=True`), or for a
    compiler, which has layers of its own.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)
