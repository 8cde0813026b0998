"""The shape of a model's attention, from the shapes that its operators were recorded with.

Fused attention takes queries, keys and values, so one call has everything. Attention in single operators shows in its
softmax over scores of every query and key, and in the GEMM that made them. Only self-attention counts: as many queries
as keys. Of several shapes, the one with the most work is returned.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec
import polars as pl

from stepscope.cost import attention_flops, product_dims
from stepscope.cost.calls import PRECISION, UnknownCost, parse_call
from stepscope.recording.store import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """`kv_heads` are fewer than `heads` if groups of queries share keys and values. `is_causal` says whether a fused
    operator was told so; a mask in a tensor can mean anything."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str  # fp32, bf16, ...
    is_causal: bool

    @property
    def flops(self) -> int:
        return attention_flops(
            batch=self.batch,
            heads=self.heads,
            queries=self.length,
            keys=self.length,
            head_dim=self.head_dim,
            causal=self.is_causal,
        )


@dataclass(frozen=True, slots=True)
class _Fused:
    """Where an operator has its `is_causal`, and whether heads come before the length."""

    causal_at: int
    heads_first: bool = True


_FUSED = {
    "aten::scaled_dot_product_attention": _Fused(5),
    "aten::_scaled_dot_product_flash_attention": _Fused(4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Fused(4),
    "aten::_scaled_dot_product_efficient_attention": _Fused(6),
    "aten::_scaled_dot_product_cudnn_attention": _Fused(6),
    "aten::_flash_attention_forward": _Fused(8, heads_first=False),
    "flash_attn::_flash_attn_forward": _Fused(5, heads_first=False),
    "stepscope::flash_attention_forward": _Fused(3),
}
_SOFTMAX = "aten::_softmax"
_PRODUCTS = ("aten::bmm", "aten::baddbmm")


def find_attention_shape(recording: Recording) -> AttentionShape | None:
    """Return the shape with the most work; None if no operator shows one."""
    columns = ("name", "shapes", "dtypes", "arguments")
    asked = recording.ops.filter(pl.col("name").is_in([*_FUSED, _SOFTMAX, *_PRODUCTS]) & pl.col("shapes").is_not_null())
    counted = asked.group_by(columns, maintain_order=True).len()
    work: Counter[AttentionShape] = Counter()
    for name, shapes, dtypes, arguments, count in counted.iter_rows():
        shape = _read_fused(name, shapes, dtypes, arguments) if name in _FUSED else None
        if shape is not None:
            work[shape] += count * shape.flops
    if not work:
        head_dims = _find_head_dims(counted)
        for name, shapes, dtypes, arguments, count in counted.iter_rows():
            shape = _read_softmax(shapes, dtypes, arguments, head_dims) if name == _SOFTMAX else None
            if shape is not None:
                work[shape] += count * shape.flops
    return max(work, key=lambda shape: work[shape], default=None)


def _read_fused(name: str, shapes: str, dtypes: str | None, arguments: str | None) -> AttentionShape | None:
    layout = _FUSED[name]
    try:
        call = parse_call(name, shapes, dtypes or "[]", arguments)
        q, k = call.tensor(0), call.tensor(1)
        batch, heads, length, head_dim = q.dims if layout.heads_first else (q.dims[i] for i in (0, 2, 1, 3))
        _, kv_heads, keys, _ = k.dims if layout.heads_first else (k.dims[i] for i in (0, 2, 1, 3))
    except (UnknownCost, msgspec.DecodeError, msgspec.ValidationError, ValueError, IndexError):
        return None
    if length != keys or not min(batch, heads, length, head_dim, kv_heads) or q.kind not in PRECISION:
        return None
    return AttentionShape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        length=length,
        head_dim=head_dim,
        dtype=PRECISION[q.kind],
        is_causal=call.argument(layout.causal_at) == "True",
    )


def _find_head_dims(counted: pl.DataFrame) -> dict[tuple[int, int], int]:
    """Return the size of a head by the number of score matrices and their size: that of the GEMM of queries and keys,
    whose inner dimension is shorter than the length it produces."""
    found: dict[tuple[int, int], int] = {}
    for name, shapes in counted.select("name", "shapes").iter_rows():
        dims = product_dims(name, shapes) if name in _PRODUCTS else None
        if dims is not None and dims[1] == dims[2]:
            batch, length, _, head_dim = dims
            found[batch, length] = min(head_dim, found.get((batch, length), head_dim))
    return found


def _read_softmax(
    shapes: str, dtypes: str | None, arguments: str | None, head_dims: dict[tuple[int, int], int]
) -> AttentionShape | None:
    """Return the shape behind a softmax over (batch, heads, length, length), or (batch × heads, length, length)."""
    try:
        scores = parse_call("_softmax", shapes, dtypes or "[]", arguments).tensor(0)
    except (UnknownCost, msgspec.DecodeError, msgspec.ValidationError, ValueError):
        return None
    if len(scores.dims) not in (3, 4) or scores.dims[-1] != scores.dims[-2] or scores.kind not in PRECISION:
        return None
    *outer, length, _ = scores.dims
    batch, heads = (1, outer[0]) if len(outer) == 1 else outer
    head_dim = head_dims.get((batch * heads, length))
    if head_dim is None or not min(batch, heads, length, head_dim):
        return None
    return AttentionShape(
        batch=batch,
        heads=heads,
        kv_heads=heads,
        length=length,
        head_dim=head_dim,
        dtype=PRECISION[scores.kind],
        is_causal=False,
    )
