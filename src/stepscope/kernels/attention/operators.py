"""Flash attention as PyTorch's dispatcher sees it: two operators, forward and backward.

`torch.compile` sees each as one graph node, with a fake-tensor implementation that gives the shapes and strides of the
results. The backend is chosen inside, where tensors have addresses, so a compiled graph does not fix the choice.

They take four dimensions and checked arguments (`problem.py`), and can be differentiated once.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.

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
from stepscope.kernels.attention import backends
from stepscope.kernels.attention.problem import Problem

_library = torch.library.Library("stepscope", "DEF")  # type: ignore[no-untyped-call]  # registrations last as long as it does
_library.define(  # type: ignore[no-untyped-call]
    "flash_attention_forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str backend, bool tf32,"
    " bool deterministic) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(  # type: ignore[no-untyped-call]
    "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal,"
    " float scale, str backend, bool tf32, bool deterministic) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
forward_operator = torch.ops.stepscope.flash_attention_forward.default
backward_operator = torch.ops.stepscope.flash_attention_backward.default


def _run_forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    causal: bool,
    scale: float,
    backend: str,
    tf32: bool,
    _deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Forward is always deterministic; backward checks."""
    problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal)
    if backend == "auto":
        backend = backends.choose(problem, among=backends.KERNELS)
    else:
        backends.require(backend, problem)
    with _device(q_BHLD):
        output: tuple[Tensor, Tensor] = _load(backend).forward(
            q_BHLD, k_BGKD, v_BGKD, causal=causal, scale=scale, tf32=tf32
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
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "auto":
        problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal)
        backend = backends.choose(problem, deterministic=deterministic, among=backends.KERNELS)
    elif deterministic and backends.FUNCTIONS[backend].repeats == "never":
        backend = "triton"
    with _device(q_BHLD):
        gradients: tuple[Tensor, Tensor, Tensor] = _load(backend).backward(
            do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, causal=causal, scale=scale, tf32=tf32
        )
    return gradients[:3]  # without that of a bias


def _device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. That is nearly always the tensors' own, and then nothing needs to change:
    setting the same device again takes microseconds.
    """
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
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


def _fake_backward(_: Tensor, q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q_BHLD), torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BHLD, k_BGKD, v_BGKD, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_BHLD, k_BGKD, v_BGKD, *output)


def _differentiate(ctx: Any, do_BHLD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = backward_operator(do_BHLD, *ctx.saved_tensors, *ctx.settings)
    return *gradients, *(None for _ in ctx.settings)


def _refuse_twice(_ctx: Any, *_gradients: Tensor) -> None:
    raise RuntimeError(
        "flash attention does not support double backward; use `backend='naive'` or `backend='sdpa-math'`"
    )


def _count_forward(q_shape: Any, k_shape: Any, _v: Any, causal: bool, *_: Any, **__: Any) -> int:
    """Two matmuls, half of them under a causal mask, as for SDPA in `measure.flops`."""
    batch, heads, queries, head_dim = q_shape
    return attention_flops(batch=batch, heads=heads, queries=queries, keys=k_shape[2], head_dim=head_dim, causal=causal)


def _count_backward(
    _do: Any, q_shape: Any, k_shape: Any, v_shape: Any, _o: Any, _lse: Any, causal: bool, *_: Any, **__: Any
) -> int:
    """Five matmuls, because the scores are recomputed."""
    return int(_count_forward(q_shape, k_shape, v_shape, causal) * BACKWARD_PRODUCTS)


_library.impl("flash_attention_forward", _run_forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("flash_attention_backward", _run_backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(forward_operator, _fake_forward, lib=_library)
torch.library.register_fake(backward_operator, _fake_backward, lib=_library)
torch.library.register_autograd(forward_operator, _differentiate, setup_context=_keep, lib=_library)
torch.library.register_autograd(backward_operator, _refuse_twice, lib=_library)
register_flop_formula(torch.ops.stepscope.flash_attention_forward)(_count_forward)
register_flop_formula(torch.ops.stepscope.flash_attention_backward)(_count_backward)
