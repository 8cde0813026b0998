"""What attention is asked to do: the arguments checked, and brought to the four dimensions that every backend takes.

Tensors come as (..., L, D). With two or three dimensions there are no heads and the first one is the batch; with four
or more the dimension before L counts the heads and all before it are the batch. Bringing them to (B, H, L, D) takes
views wherever the strides allow it, so (B, L, H, D) tensors with their middle dimensions swapped are never copied.

An argument that cannot be is one ValueError or TypeError that names it. Everything behind this file takes for granted
what is checked here.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES = ("q", "k", "v")
TMA_ALIGNMENT = 16  # bytes, for Hopper's bulk copy engine: of the first element and of every stride but the last
_NEVER_TAKEN = 16  # elements: a stride that passes every check


class UnsupportedError(ValueError):
    """What was asked for is understood, and cannot be done: by this backend, or by any."""


class Problem(NamedTuple):
    """One call of attention. A tuple rather than a dataclass: one is made per call, and microseconds count."""

    q_BHLD: Tensor
    k_BGKD: Tensor
    v_BGKD: Tensor
    causal: bool

    @property
    def head_dim(self) -> int:
        return self.q_BHLD.shape[3]

    @property
    def num_queries(self) -> int:
        return self.q_BHLD.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k_BGKD.shape[2]

    @property
    def hides_keys(self) -> bool:
        """Whether some query may see less than all keys: a single one is level with the last key."""
        return True if self.causal and self.num_queries > 1 else False  # noqa: SIM210  # not a compiler's symbol for it

    @property
    def is_grouped(self) -> bool:
        return True if self.q_BHLD.shape[1] != self.k_BGKD.shape[1] else False  # noqa: SIM210  # as above


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `torch.autocast` wants them for a product: all in its dtype, float64 aside. As for SDPA."""
    kind = tensors[0].device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(kind: str) -> bool:
    """A constant to a compiler: that of torch 2.11 cannot trace the question, and split the model at every layer."""
    return torch.amp.is_autocast_available(kind)


def _check_kinds(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    for name, x in zip(NAMES, (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, not {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"`{name}` is {x.dtype}; attention takes float16, bfloat16, float32 or float64")
    if not isinstance(causal, bool):
        raise TypeError(f"`causal` must be True or False, not {type(causal).__name__}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One dtype, one device, and shapes that belong together."""
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.shape == k.shape == v.shape
    if not alike:  # grouped heads and other lengths, or mistakes: each is looked at by itself
        _check_against_q("k", k, q)
        _check_against_q("v", v, q)
        if v.shape != k.shape:
            raise ValueError(f"`v` has shape {tuple(v.shape)} and `k` has {tuple(k.shape)}; expected the same")
    if q.dim() < 2:
        raise ValueError(f"`q` has shape {tuple(q.shape)}; attention takes (..., length, head dim)")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise UnsupportedError(f"`q` has head dim {q.shape[-1]}; attention takes 1 to {MAX_HEAD_DIM}")
    if q.dim() > 3 and q.shape[-3] == 0:
        raise ValueError(f"`q` has shape {tuple(q.shape)}, which has no heads")


def _check_against_q(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"`{name}` is {x.dtype} and `q` is {q.dtype}; attention takes one dtype")
    if x.device != q.device:
        raise ValueError(f"`{name}` is on {x.device} and `q` on {q.device}; attention takes one device")
    if x.dim() != q.dim():
        raise ValueError(f"`{name}` has {x.dim()} dimensions and `q` has {q.dim()}; expected as many")
    batch = slice(-3) if q.dim() > 3 else slice(-2)
    if x.shape[batch] != q.shape[batch]:
        raise ValueError(f"`{name}` has shape {tuple(x.shape)}, whose batch differs from `q`'s {tuple(q.shape)}")
    if x.shape[-1:] != q.shape[-1:]:
        raise ValueError(f"`{name}` has head dim {x.shape[-1]} and `q` has {q.shape[-1]}; expected the same")
    if q.dim() > 3 and x.shape[-3] != q.shape[-3] and (x.shape[-3] == 0 or q.shape[-3] % x.shape[-3]):
        raise ValueError(
            f"`{name}` has {x.shape[-3]} heads and `q` has {q.shape[-3]}; key/value heads must divide query heads"
        )


def choose_scale(scale: float | None, head_dim: int) -> float:
    """1/sqrt(D) unless given. Kernels take a row's maximum before they scale, which a negative scale would make its
    minimum: exp would overflow."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"`scale` must be a number, not {type(scale).__name__}")
    if not 0 <= scale <= sys.float_info.max:  # not `isfinite`, which a compiler cannot trace
        raise ValueError(
            f"`scale` is {scale}; it must be finite and not negative, as the maximum of a row is taken before scaling"
        )
    return float(scale)


def as_4d(x: Tensor) -> Tensor:
    """(B, H, L, D), a view of x where its strides allow it."""
    match x.dim():
        case 4:
            return x
        case 3:
            return x.unsqueeze(1)
        case 2:
            return x[None, None]
        case _:
            return x.flatten(0, -4)


def check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """q, k and v, cast where autocast wants it. Kinds come before it, as it would make numbers of integers."""
    _check_kinds(q, k, v, causal=causal)
    q, k, v = _autocast(q, k, v)
    _check_shapes(q, k, v)
    return q, k, v


def prepare(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Problem:
    """The checked arguments as a problem. Differentiable: views and casts only."""
    q, k, v = check(q, k, v, causal=causal)
    return Problem(as_4d(q), as_4d(k), as_4d(v), causal)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def wants_tf32() -> bool:
    """Whether products of fp32 numbers may round them to tf32: as `torch.set_float32_matmul_precision` says, and its
    successor, after which PyTorch refuses to answer by the older name. Compiled code is compiled anew when it changes,
    so it may take the answer for a constant."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# --- What Hopper's bulk copy engine (TMA) asks of a tensor ---


def is_tma_able(x: Tensor) -> bool:
    """Whether the copy engine of Hopper can read x where it lies: rows dense, everything else on 16 bytes. A dimension
    of one is never stepped over, so its stride does not matter."""
    sizes, strides = x.shape, x.stride()
    if (strides[-1] != 1 and sizes[-1] != 1) or x.data_ptr() % TMA_ALIGNMENT:
        return False
    elements = TMA_ALIGNMENT // x.element_size()
    outer = zip(sizes[:-1], strides[:-1], strict=True)
    return not any(size != 1 and (stride <= 0 or stride % elements) for size, stride in outer)


def tma_strides(x: Tensor) -> list[int]:
    """The strides of such a tensor for a descriptor: that of a dimension of one is never taken, but it is checked."""
    strides = list(x.stride())
    if 1 in x.shape:
        strides = [_NEVER_TAKEN if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True)]
    strides[-1] = 1
    return strides
