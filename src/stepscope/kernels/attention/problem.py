"""An attention problem: the arguments, checked and brought to the four dimensions that every backend takes.

Tensors are (..., L, D). With two or three dimensions they have no heads and the first one is the batch; with four or
more, the dimension before L is the heads and all before it are the batch. Bringing them to (B, H, L, D) uses views
wherever the strides allow it, so (B, L, H, D) tensors with their middle dimensions swapped are never copied.

An invalid argument raises one ValueError or TypeError that names it. Everything downstream relies on these checks.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim (v and o have their own).

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# bytes, for Hopper's bulk copy engine: alignment of the first element and of every stride but the last
TMA_ALIGNMENT = 16
# Instead of zero, for implementations that multiply a masked score of -inf by the scale. It gives the same weights to
# the last bit.
SMALLEST_SCALE = 1e-37
_NEVER_TAKEN = 16  # elements: a stride that passes every check


class UnsupportedError(ValueError):
    """The request is valid, but not supported: by this backend, or by any."""


class Extras(NamedTuple):
    """What a call adds to plain attention: it hides keys or changes scores. The defaults add nothing.

    The position of query i is i + K - L, as for a causal mask. A query at position p sees the keys from p - `left` to
    p + `right`; a negative number means all, and a causal mask is a `right` of 0. With `documents`, it sees only keys
    of its own document, which requires as many queries as keys: the table has the first position of each position's
    document, and the one after its last.

    A score is scale · q·k, then softcap · tanh(score / softcap) unless `softcap` is zero, then plus `bias`, then plus
    slope · (key - position of the query). `sinks` are one more score per head, which takes part in the softmax and has
    no value.

    With a causal mask, `right` stays negative: so a plain causal call has no extras. In float64, `slopes` and `sinks`
    are float64 too.
    """

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    bias: Tensor | None = None  # (B or 1, H or 1, L or 1, K or 1), in the dtype of q or fp32
    slopes: Tensor | None = None  # (B or 1, H), fp32
    sinks: Tensor | None = None  # (H,), fp32
    documents: Tensor | None = None  # (2, B, L), int32

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments of `flash_attention` that these come from."""
        used = {
            "window": self.left >= 0 or self.right >= 0,
            "softcap": self.softcap != 0,
            "bias": self.bias is not None,
            "alibi_slopes": self.slopes is not None,
            "sinks": self.sinks is not None,
            "documents": self.documents is not None,
        }
        return tuple(name for name, is_used in used.items() if is_used)


NO_EXTRAS = Extras()


class Problem(NamedTuple):
    """One call of attention. A tuple rather than a dataclass: one is created per call, and microseconds count."""

    q_BHLD: Tensor
    k_BGKD: Tensor
    v_BGKD: Tensor
    causal: bool
    extras: Extras = NO_EXTRAS

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
        """Whether some query may see less than all keys: a single query is aligned with the last key."""
        return True if self.causal and self.num_queries > 1 else False  # noqa: SIM210  # not a compiler's symbol for it

    @property
    def is_grouped(self) -> bool:
        return True if self.q_BHLD.shape[1] != self.k_BGKD.shape[1] else False  # noqa: SIM210  # as above


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as `torch.autocast` casts them for a matmul: all in its dtype, except float64. As for SDPA."""
    kind = tensors[0].device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(kind: str) -> bool:
    """A constant for the compiler: torch 2.11 cannot trace this call, and would break the graph at every layer."""
    return torch.amp.is_autocast_available(kind)


def _check_kinds(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, but got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"expected `{name}` to be float16, bfloat16, float32 or float64, but got {x.dtype}")
    if not isinstance(causal, bool):
        raise TypeError(f"`causal` must be True or False, but got {type(causal).__name__}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check for one dtype, one device, and matching shapes."""
    shape = q.shape  # each access creates a tuple
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and shape == k.shape == v.shape
    if not alike:  # grouped heads, different lengths, or mistakes: check each
        _check_against_q("k", k, q)
        _check_against_q("v", v, q)
        if k.shape[-1:] != shape[-1:]:
            raise ValueError(f"expected `k` to have head dim {shape[-1]} like `q`, but got {k.shape[-1]}")
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(
                f"expected `v` to have the shape of `k` {tuple(k.shape)} except for the head dim, but got "
                f"{tuple(v.shape)}"
            )
    if len(shape) < 2:
        raise ValueError(f"expected `q` to have shape (..., length, head dim), but got {tuple(shape)}")
    for name, head_dim in (("q", shape[-1]), ("v", v.shape[-1])):
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise UnsupportedError(f"expected `{name}` to have a head dim from 1 to {MAX_HEAD_DIM}, but got {head_dim}")
    if len(shape) > 3 and shape[-3] == 0:
        raise ValueError(f"expected `q` to have at least one head, but got shape {tuple(shape)}")


def _check_against_q(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"expected all tensors to have the same dtype, but `q` is {q.dtype} and `{name}` is {x.dtype}")
    if x.device != q.device:
        raise ValueError(
            f"expected all tensors to be on the same device, but `q` is on {q.device} and `{name}` is on {x.device}"
        )
    if x.dim() != q.dim():
        raise ValueError(f"expected `{name}` to have {q.dim()} dimensions like `q`, but got {x.dim()}")
    batch = slice(-3) if q.dim() > 3 else slice(-2)
    if x.shape[batch] != q.shape[batch]:
        raise ValueError(
            f"expected `{name}` to have the batch dimensions of `q` {tuple(q.shape)}, but got shape {tuple(x.shape)}"
        )
    if q.dim() > 3 and x.shape[-3] != q.shape[-3] and (x.shape[-3] == 0 or q.shape[-3] % x.shape[-3]):
        raise ValueError(
            f"the number of heads of `q` ({q.shape[-3]}) must be divisible by that of `{name}` ({x.shape[-3]})"
        )


def choose_scale(scale: float | None, head_dim: int) -> float:
    """1/sqrt(D) by default. Kernels take a row's maximum before they scale, which a negative scale would turn into its
    minimum: exp would overflow.
    """
    if scale is None:
        return 1 / math.sqrt(head_dim)
    check_number("scale", scale)
    if not 0 <= scale <= sys.float_info.max:  # not `isfinite`, which a compiler cannot trace
        raise ValueError(
            f"`scale` must be finite and non-negative, because the row maximum is taken before scaling, but got {scale}"
        )
    return float(scale)


def check_number(name: str, number: float) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"`{name}` must be a number, but got {type(number).__name__}")


def as_4d(x: Tensor) -> Tensor:
    """Return (B, H, L, D), a view of x where its strides allow it."""
    match x.dim():
        case 4:
            return x
        case 3:
            return x.unsqueeze(1)
        case 2:
            return x[None, None]
        case _:
            return x.flatten(0, -4)


def output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return *q.shape[:-1], v.shape[-1]


def empty_output(q_BHLD: Tensor, v_BGKD: Tensor) -> Tensor:
    """Allocate an output in the memory layout of q, or with another head dim in the order of its dimensions."""
    if v_BGKD.shape[3] == q_BHLD.shape[3]:
        return torch.empty_like(q_BHLD)
    order = *sorted(range(3), key=q_BHLD.stride, reverse=True), 3
    return torch.empty_permuted(output_shape(q_BHLD, v_BGKD), order, dtype=q_BHLD.dtype, device=q_BHLD.device)


def check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """Return q, k and v, cast as autocast requires. Types are checked first, because autocast would turn integers into
    floats.
    """
    _check_kinds(q, k, v, causal=causal)
    q, k, v = _autocast(q, k, v)
    _check_shapes(q, k, v)
    return q, k, v


def prepare(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Problem:
    """Return the checked arguments as a problem. Differentiable: views and casts only."""
    q, k, v = check(q, k, v, causal=causal)
    return Problem(as_4d(q), as_4d(k), as_4d(v), causal)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def wants_tf32() -> bool:
    """Whether fp32 matmuls may round to tf32, by `torch.set_float32_matmul_precision` or its successor, after which
    PyTorch refuses to answer under the older name. Compiled code is recompiled when it changes, so it may treat this as
    a constant.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# --- What Hopper's bulk copy engine (TMA) requires of a tensor ---


def is_tma_able(x: Tensor) -> bool:
    """Whether Hopper's copy engine can read x in place: dense rows, and everything else aligned to 16 bytes. The stride
    of a dimension of size one does not matter, because it is never used.
    """
    sizes, strides = x.shape, x.stride()
    if (strides[-1] != 1 and sizes[-1] != 1) or x.data_ptr() % TMA_ALIGNMENT:
        return False
    elements = TMA_ALIGNMENT // x.element_size()
    outer = zip(sizes[:-1], strides[:-1], strict=True)
    return not any(size != 1 and (stride <= 0 or stride % elements) for size, stride in outer)


def make_readable(x: Tensor) -> Tensor:
    """x, or a copy that the copy engine can read. The gradient of a sum, for example, is one number broadcast."""
    return x if is_tma_able(x) else x.clone(memory_format=torch.contiguous_format)


def tma_strides(x: Tensor) -> list[int]:
    """Return the strides of such a tensor for a descriptor: that of a dimension of size one is never used, but it is
    checked.
    """
    strides = list(x.stride())
    if 1 in x.shape:
        strides = [_NEVER_TAKEN if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True)]
    strides[-1] = 1
    return strides
