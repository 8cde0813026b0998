"""`scaled_dot_product_attention` of fake CUDA tensors, with the kernel that the GPU would take.

A build without CUDA would decompose it into products and a softmax, which save the whole score matrix. The function
here is registered with the dispatcher below autocast: a Python override would miss calls that a checkpoint repeats
inside autograd's engine.
"""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.planner.assumptions import Accelerator, AttentionCall, SdpaKernel, choose_sdpa

aten = torch.ops.aten
_HEAD_MULTIPLE = 8  # flash pads the head dimension
_MASK_MULTIPLE = 16  # the memory-efficient kernel pads the last dimension of a mask

_library: torch.library.Library | None = None
_gpu: Accelerator | None = None
chosen: Counter[SdpaKernel] = Counter()


def install(gpu: Accelerator) -> None:
    """Choose kernels for this GPU from now on, for every fake CUDA tensor of this process."""
    global _library, _gpu
    _gpu = gpu
    chosen.clear()
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for key in ("AutogradCUDA", "CUDA"):
            _library.impl("scaled_dot_product_attention", _attend, key)  # type: ignore[no-untyped-call]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert _gpu is not None, "install chooses the GPU"
    call = _describe(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choose_sdpa(call, _gpu, _enabled())
    chosen[kernel] += 1
    if kernel == "flash":
        return _attend_flash(query, key, value, dropout_p, is_causal, scale)
    mask = _as_bias(attn_mask, query)
    if kernel == "math":
        attend: Any = partial(aten._scaled_dot_product_attention_math, enable_gqa=enable_gqa)
        found = attend(query, key, value, mask, dropout_p, is_causal, scale=scale)
    elif kernel == "cudnn":
        attend = aten._scaled_dot_product_cudnn_attention
        found = attend(query, key, value, mask, call.needs_grad, dropout_p, is_causal, scale=scale)
    else:
        mask = None if mask is None else _pad_mask(mask).expand(*query.shape[:3], key.shape[2])
        attend = aten._scaled_dot_product_efficient_attention
        found = attend(query, key, value, mask, call.needs_grad, dropout_p, is_causal, scale=scale)
    result: Tensor = found[0]
    return result


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    dim = query.shape[-1]
    padding = -dim % _HEAD_MULTIPLE
    if padding:
        query, key, value = (functional.pad(one, (0, padding)) for one in (query, key, value))
    scale = dim**-0.5 if scale is None else scale
    result: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return result[..., :dim] if padding else result


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of booleans as one of numbers, which the kernels add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    nothing, hidden = (torch.full((), value, dtype=query.dtype, device=query.device) for value in (0.0, -torch.inf))
    return torch.where(mask, nothing, hidden)


def _pad_mask(mask: Tensor) -> Tensor:
    length = mask.shape[-1]
    padding = -length % _MASK_MULTIPLE
    return functional.pad(mask, (0, padding))[..., :length] if padding else mask


def _enabled() -> frozenset[SdpaKernel]:
    backends: Any = torch.backends.cuda
    switches: dict[SdpaKernel, bool] = {
        "cudnn": backends.cudnn_sdp_enabled(),
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    return frozenset(kernel for kernel, is_on in switches.items() if is_on)


def _describe(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, enable_gqa: bool
) -> AttentionCall:
    tensors = (query, key, value)
    is_whole = query.dim() == key.dim() == value.dim() == 4
    return AttentionCall(
        dtype=str(query.dtype).removeprefix("torch."),
        same_dtype=query.dtype == key.dtype == value.dtype,
        num_dims=4 if is_whole else 0,
        batches=tuple(one.shape[0] for one in tensors),  # type: ignore[arg-type]
        heads=tuple(one.shape[1] for one in tensors) if is_whole else (0, 0, 0),  # type: ignore[arg-type]
        lengths=(query.shape[-2], key.shape[-2]),
        dims=tuple(one.shape[-1] for one in tensors),  # type: ignore[arg-type]
        packed=all(one.stride(-1) == 1 for one in tensors),
        has_mask=mask is not None,
        mask_fits=mask is None or _fits(mask, query, key),
        mask_learns=mask is not None and mask.requires_grad,
        is_causal=is_causal,
        dropout=dropout,
        enable_gqa=enable_gqa,
        needs_grad=torch.is_grad_enabled() and any(one.requires_grad for one in tensors),
    )


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether cuDNN takes the shape of the mask: 2 or 4 dimensions that broadcast."""
    wanted = (*query.shape[:-1], key.shape[-2])
    return mask.dim() in (2, 4) and all(
        size in (1, goal) for size, goal in zip(mask.shape, wanted[-mask.dim() :], strict=True)
    )
