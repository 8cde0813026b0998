"""What fused kernels share: the GPU that tensors are on, tensors as rows, and what compilers are told of operators."""

# N rows, M the width of a row.

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import get_layout_constraint_tag

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNKNOWN_MULTIPROCESSORS = 132  # Hopper's. In Triton's interpreter
_SAME_DEVICE = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device. That is nearly always the tensors' own, and then nothing needs to change:
    setting the same device again takes microseconds.
    """
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(x.device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return UNKNOWN_MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def as_rows(x: Tensor) -> Tensor:
    """x as (N, M) with neighboring elements of a row next to each other; in place if rows are equally far apart."""
    x_NM = x.reshape(-1, x.shape[-1])
    return x_NM if x_NM.stride(1) == 1 else x_NM.contiguous()


def vector_elements(*written: Tensor | None) -> int:
    """How many neighboring elements a thread takes: 16 bytes of the widest dtype written."""
    return 16 // max(x.element_size() for x in written if x is not None)


def register_fake(operator: torch._ops.OpOverload, fake: Callable[..., Any], library: torch.library.Library) -> None:
    """What the operator returns, for tracers. Inductor, which traces before it generates code, is told at that moment
    that the operator stays a call. Otherwise PyTorch 2.11 writes everything that the first call depends on as
    text, for a log message nobody asked for; a tensor that is used twice is written twice, and compiling never ends.
    """

    @wraps(fake)
    def describe(*arguments: Any, **settings: Any) -> Any:
        inductor: Any = sys.modules.get("torch._inductor.lowering")
        if inductor is not None and operator not in inductor.lowerings:
            constraint = inductor.tag_to_layout_constraint(get_layout_constraint_tag(operator))
            inductor.make_fallback(operator, layout_constraint=constraint)
        return fake(*arguments, **settings)

    torch.library.register_fake(operator, describe, lib=library)
