"""stepscope's own kernels, forward and backward, which `--preset fast` puts into a step. Triton compiles each once."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stepscope import kernels
from stepscope.measure.calibration.clock import Call, TimedCall

_ROWS_AND_WIDTHS = ((512, 768), (2048, 1024), (4096, 2048), (8192, 1600), (16384, 4096))
_LOGITS = ((512, 10000), (2048, 50257), (8192, 32000))
_LISTS = ((48, 2**16), (150, 2**20), (24, 2**24))
_HEAD_DIM = 64
_Run = Callable[..., Tensor | tuple[Tensor, ...]]


def own_cases(device: torch.device, *, every: int = 1) -> Iterator[TimedCall]:
    for rows, width in _ROWS_AND_WIDTHS[::every]:
        yield from _passes("own_rms_norm", rows, width, device, kernels.rms_norm, vectors=1)
        yield from _passes("own_add_rms_norm", rows, width, device, kernels.add_rms_norm, inputs=2, vectors=1)
        yield from _passes("own_layer_norm", rows, width, device, kernels.layer_norm, vectors=2)
        yield from _passes("own_swiglu_packed", rows, 2 * width, device, kernels.swiglu_packed)
        yield from _passes("own_rope_packed", rows, 3 * (width // 192) * 64, device, _rope)
    for rows, width in _LOGITS[::every]:
        yield from _passes("own_cross_entropy", rows, width, device, _cross_entropy)
    for tensors, elements in _LISTS[::every]:
        yield _update(tensors, elements, device)


def _rope(qkv: Tensor) -> tuple[Tensor, ...]:
    heads = qkv.shape[-1] // (3 * _HEAD_DIM)
    table = torch.empty(qkv.shape[0], _HEAD_DIM // 2, device=qkv.device)
    return kernels.rope_packed(qkv[None], table, table, num_heads=heads, num_groups=heads, interleaved=False)


def _cross_entropy(logits: Tensor) -> Tensor:
    return kernels.cross_entropy(logits, torch.empty(logits.shape[0], dtype=torch.long, device=logits.device).zero_())


def _passes(
    operation: str, rows: int, width: int, device: torch.device, run: _Run, *, inputs: int = 1, vectors: int = 0
) -> Iterator[TimedCall]:
    def make(*, backward: bool) -> Call:
        tensors = [torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(inputs)]
        tensors += [torch.ones(width, device=device) for _ in range(vectors)]
        tracked = [one.requires_grad_() for one in tensors]
        if not backward:
            return lambda: run(*tracked)
        result = run(*tracked)
        outputs = result if isinstance(result, tuple) else (result,)
        upstream = [torch.ones_like(one) for one in outputs]
        return lambda: torch.autograd.grad(outputs, tracked, upstream, retain_graph=True)

    for passing in ("forward", "backward"):
        yield TimedCall(
            operation=operation,
            dtype="bf16",
            variant=passing,
            columns=("rows", "columns"),
            sizes=(rows, width),
            make=lambda passing=passing: make(backward=passing == "backward"),  # type: ignore[misc]
            fresh_bytes=2 * rows * width * inputs * 2,
        )


def _update(tensors: int, elements: int, device: torch.device) -> TimedCall:
    def make() -> Call:
        params = [torch.rand(elements, device=device).requires_grad_() for _ in range(tensors)]
        for param in params:
            param.grad = torch.rand_like(param)
        return kernels.OneLaunchAdamW(params, lr=1e-9).step

    return TimedCall(
        operation="own_adamw",
        dtype="fp32",
        columns=("tensors", "elements"),
        sizes=(tensors, elements),
        make=make,
        fresh_bytes=16 * tensors * elements,
    )
