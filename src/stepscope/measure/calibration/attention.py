"""Attention as one operation, forward and backward: the backends of PyTorch's SDPA, and stepscope's own.

Queries, keys and values have the strides of a projection that was split into heads. Backends that do not take a problem
are skipped.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.measure.calibration.clock import Call, TimedCall
from stepscope.measure.environment import DTYPES

# B batch, H query heads, G key/value heads, L length, D head dim.
_SHAPES = (
    *((1, 16, 16, 512, 64), (4, 12, 12, 128, 64), (4, 12, 12, 512, 64), (8, 12, 12, 1024, 64), (2, 16, 16, 2048, 64)),
    *((1, 8, 8, 1024, 64), (16, 8, 8, 512, 64), (4, 16, 16, 1024, 64), (8, 25, 25, 1024, 64), (1, 32, 32, 4096, 64)),
    *(
        (4, 16, 16, 512, 128),
        (2, 32, 32, 1024, 128),
        (8, 16, 16, 2048, 128),
        (1, 32, 32, 4096, 128),
        (8, 32, 32, 256, 128),
    ),
    *((4, 32, 32, 512, 80), (4, 32, 32, 1024, 80), (2, 32, 32, 2048, 80), (4, 16, 16, 1024, 96), (4, 12, 12, 512, 96)),
    *((4, 32, 8, 1024, 64), (2, 32, 8, 2048, 128), (4, 14, 2, 512, 64), (8, 16, 8, 1024, 128), (8, 32, 4, 512, 64)),
    *((8, 6, 6, 256, 32), (8, 16, 16, 512, 32), (4, 8, 8, 1024, 256), (32, 12, 12, 128, 64), (16, 16, 16, 256, 64)),
)
_COLUMNS = ("batch", "heads", "kv_heads", "length", "head_dim")
_DROPOUT = 0.1
_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_cases(device: torch.device, *, every: int = 1) -> Iterator[TimedCall]:
    """Yield SDPA's backends: what an H200 chooses first."""
    for backend, precision, causal, step in (
        ("cudnn", "bf16", True, 1),
        ("efficient", "fp32", True, 1),
        ("flash", "bf16", True, 1),
        ("cudnn", "bf16", False, 2),
        ("efficient", "fp32", False, 2),
        ("efficient", "bf16", True, 2),
        ("flash", "bf16", False, 3),
        ("efficient", "bf16", False, 3),
        ("cudnn", "fp16", True, 4),
        ("efficient-masked", "fp32", False, 2),
        ("cudnn-masked", "bf16", False, 3),
        ("efficient-masked", "bf16", False, 2),
        ("cudnn-dropout", "bf16", True, 4),
        ("efficient-dropout", "fp32", True, 4),
        ("efficient-dropout", "fp32", False, 4),
        ("flash-dropout", "bf16", True, 4),
    ):
        for shape in _SHAPES[:: step * every]:
            yield from _both_passes(f"sdpa-{backend}", precision, shape, device, _sdpa(backend, causal, shape), causal)


def own_attention_cases(device: torch.device, *, every: int = 1) -> Iterator[TimedCall]:
    """Yield stepscope's attention. Triton compiles it for each head dimension, which takes seconds."""
    from stepscope.kernels import flash_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True)

    for head_dim in (64, 128):
        for shape in [one for one in _SHAPES if one[-1] == head_dim][::every]:
            yield from _both_passes("stepscope-flash", "bf16", shape, device, attend, causal=True)


def _sdpa(backend: str, causal: bool, shape: tuple[int, ...]) -> _Attend:
    name, _, extra = backend.partition("-")
    length, is_grouped = shape[3], shape[1] != shape[2]
    masks: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if extra == "masked" and not masks:
            masks.append(torch.zeros(shape[0], 1, length, length, device=q.device, dtype=q.dtype))
        with sdpa_kernel(_BACKENDS[name]):
            return functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=masks[0] if masks else None,
                dropout_p=_DROPOUT if extra == "dropout" else 0.0,
                is_causal=causal,
                enable_gqa=is_grouped,
            )

    return attend


def _both_passes(
    operation: str, precision: str, shape: tuple[int, ...], device: torch.device, attend: _Attend, causal: bool
) -> Iterator[TimedCall]:
    for passing in ("forward", "backward"):
        yield TimedCall(
            operation=operation,
            dtype=precision,
            variant=f"{'causal' if causal else 'full'} {passing}",
            columns=_COLUMNS,
            sizes=shape,
            make=_maker(shape, DTYPES[precision], device, attend, backward=passing == "backward"),
            fresh_bytes=4 * shape[0] * shape[1] * shape[3] * shape[4] * DTYPES[precision].itemsize,
        )


def _maker(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, attend: _Attend, *, backward: bool
) -> Callable[[], Call]:
    batch, heads, groups, length, head_dim = shape

    def make() -> Call:
        q, k, v = (
            torch.randn(batch, length, count, head_dim, device=device, dtype=dtype).transpose(1, 2)
            for count in (heads, groups, groups)
        )
        inputs = [one.requires_grad_() for one in (q, k, v)]
        if not backward:
            return lambda: attend(*inputs)
        out = attend(*inputs)
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return make
