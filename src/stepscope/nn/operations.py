"""The table of operations a model is built from: the one place where faster kernels slot in.

The model calls `ops.attention(...)` and never `functional.attention(...)`. To run it with another kernel,
hand it another table; the model's code, its parameters and its state dict stay the same:

    ops = dataclasses.replace(REFERENCE, attention=flash_attention)
    model = TransformerLM(..., ops=ops)

An entry has to give what the reference of the same name in `functional.py` gives, its gradients included, for
every input the model hands it. What differs is how fast, and how much is kept for the backward pass.
"""

# B batch, H query heads, G key/value heads, L length, D head dim.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stepscope.nn import functional


class RMSNormOp(Protocol):
    """(x, weight, eps) -> x normalised, in x's dtype."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


class AttentionOp(Protocol):
    """(q, k, v) -> one output per query; grouped heads, and a causal mask aligned at the end."""

    def __call__(
        self, q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, /, *, causal: bool, scale: float | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """One callable per replaceable operation, each with the contract of its namesake in `functional.py`."""

    linear: Callable[[Tensor, Tensor], Tensor]  # (x, weight)
    embedding: Callable[[Tensor, Tensor], Tensor]  # (ids, weight)
    rms_norm: RMSNormOp
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, cos, sin)
    swiglu: Callable[[Tensor, Tensor], Tensor]  # (gate, up)
    attention: AttentionOp
    cross_entropy: Callable[[Tensor, Tensor], Tensor]  # (logits, targets)


REFERENCE = Operations(
    linear=functional.linear,
    embedding=functional.embedding,
    rms_norm=functional.rms_norm,
    rope=functional.rope,
    swiglu=functional.swiglu,
    attention=functional.attention,
    cross_entropy=functional.cross_entropy,
)
