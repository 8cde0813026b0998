"""Rotary position embeddings: q and k rotated by one kernel, in both conventions.

`interleaved=True` rotates the pairs (2i, 2i+1), as `nn.functional.rope` does; `interleaved=False` the pairs
(i, i + D/2), as `transformers` does. Backward is the rotation by the negative angle: the same kernel, and nothing is
saved but the tables.

q, k and v may have any strides, so views of (B, L, H, D) memory or of one packed tensor are read in place. Results are
(B, H, L, D) views of contiguous (B, L, H, D) memory. That is what a product writes, what attention reads by descriptor,
and what makes the gradient of the product's result a view.

With one product for q, k and v, `rope_packed` takes its result and returns all three. Its gradient is one tensor of the
packed shape, written by one kernel. v is copied on the way: a view of it would keep the packed tensor until the
backward pass.

On a GPU a Triton kernel runs (`rotary_kernels.py`), on a CPU and in float64 the reference.
"""

# B batch, H query heads, G key/value heads, L length, D head dim, P = D/2 rotated pairs, W = (H + 2G) · D.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.launch import KERNEL_DTYPES, on_device_of, register_fake
from stepscope.nn import functional

_library = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]  # registrations last as long as it does


def rope(q_BHLD: Tensor, k_BGLD: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions' angles.

    cos and sin are (L, P), or (B, L, P) if positions differ within the batch. The tables of `transformers`, which
    contain each angle twice and have D columns, are accepted too. They have no gradient.
    """
    if q_BHLD.dim() != 4 or k_BGLD.dim() != 4:
        raise ValueError(f"expected q and k of shape (B, H, L, D), but got {_shape(q_BHLD)} and {_shape(k_BGLD)}")
    batch, _, length, head_dim = q_BHLD.shape
    if (k_BGLD.shape[0], *k_BGLD.shape[2:]) != (batch, length, head_dim):
        raise ValueError(f"q and k may only differ in their heads, but got {_shape(q_BHLD)} and {_shape(k_BGLD)}")
    tables = [_as_table(table, q_BHLD.shape, interleaved=interleaved) for table in (cos, sin)]
    q_BHLD, k_BGLD = torch.ops.stepscope.rope(q_BHLD, k_BGLD, *tables, interleaved, False)  # noqa: FBT003 - operators take positions
    return q_BHLD, k_BGLD


def rope_packed(
    qkv_BLW: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_groups: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, H, L, D), k and v (B, G, L, D) from the result of one product: first the H heads of q, then the G
    of k and the G of v. q and k are rotated; the tables are as for `rope`.
    """
    heads = num_heads + 2 * num_groups
    if qkv_BLW.dim() != 3 or qkv_BLW.shape[2] % (2 * heads):
        raise ValueError(f"expected (B, L, {heads} heads of an even size), but got the shape {_shape(qkv_BLW)}")
    shape = (qkv_BLW.shape[0], num_heads, qkv_BLW.shape[1], qkv_BLW.shape[2] // heads)
    tables = [_as_table(table, shape, interleaved=interleaved) for table in (cos, sin)]
    q_BHLD, k_BGLD, v_BGLD = torch.ops.stepscope.rope_packed(qkv_BLW, *tables, num_heads, num_groups, interleaved)
    return q_BHLD, k_BGLD, v_BGLD


def _as_table(table: Tensor, shape: Sequence[int], *, interleaved: bool) -> Tensor:
    """A table as (B or 1, L, P)."""
    batch, _, length, head_dim = shape
    if head_dim % 2:
        raise ValueError(f"the head dim must be even because RoPE rotates pairs, but got {head_dim}")
    found = table[None] if table.dim() == 2 else table
    if found.dim() != 3 or found.shape[0] not in (1, batch) or found.shape[1] != length:
        raise ValueError(f"expected tables of {length} positions, (L, P) or (B, L, P), but got {_shape(table)}")
    if found.shape[2] == head_dim:
        return found[..., ::2] if interleaved else found[..., : head_dim // 2]
    if found.shape[2] != head_dim // 2:
        raise ValueError(f"expected tables with {head_dim // 2} or {head_dim} columns, but got {_shape(table)}")
    return found


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _empty_heads(like: Tensor, batch: int, heads: int, length: int, head_dim: int) -> Tensor:
    """A (B, H, L, D) view of (B, L, H, D) memory."""
    return like.new_empty((batch, length, heads, head_dim)).transpose(1, 2)


def _split_heads(qkv_BLW: Tensor, num_heads: int, num_groups: int) -> list[Tensor]:
    """Views of q, k and v in the packed tensor."""
    heads = (num_heads, num_groups, num_groups)
    batch, length, width = qkv_BLW.shape
    qkv = qkv_BLW.view(batch, length, sum(heads), width // sum(heads)).transpose(1, 2)
    return list(qkv.split_with_sizes(heads, dim=1))


# --- Both write the rotated q and k, and a copy of v if there is one, to `targets` ---


def _plain_rotate(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    cos_BLP: Tensor,
    sin_BLP: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
) -> None:
    reference = functional.rope if interleaved else functional.rope_half
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    cos, sin = cos_BLP[:, None].to(dtype), sin_BLP[:, None].to(dtype)
    for x, target in zip(sources[:2], targets[:2], strict=True):
        target.copy_(reference(x, cos, -sin if inverse else sin))
    for x, target in zip(sources[2:], targets[2:], strict=True):
        target.copy_(x)


def _launch_rotate(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    cos_BLP: Tensor,
    sin_BLP: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
) -> None:
    from stepscope.kernels.rotary_kernels import choose_tile, rotate_heads

    batch, num_heads, length, head_dim = sources[0].shape
    tile = choose_tile(head_dim)
    num_programs = sum(-(-batch * length * x.shape[1] // tile.rows) for x in sources)
    if num_programs == 0:
        return
    if cos_BLP.stride() != sin_BLP.stride() or cos_BLP.shape != sin_BLP.shape:
        cos_BLP, sin_BLP = (x.expand(batch, length, -1).contiguous() for x in (cos_BLP, sin_BLP))
    # q, k, v, or without v
    padded = [[*tensors, *[None] * (3 - len(tensors))] for tensors in (sources, targets)]
    with on_device_of(sources[0]):
        rotate_heads[num_programs,](
            *padded[0],
            *padded[1],
            cos_BLP,
            sin_BLP,
            batch * length,
            length,
            *(None if x is None else x.stride() for tensors in padded for x in tensors),
            cos_BLP.expand(batch, length, -1).stride(),
            HEADS=num_heads,
            GROUPS=sources[1].shape[1],
            HEAD_DIM=head_dim,
            BLOCK=tile.block,
            ROWS=tile.rows,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            num_warps=tile.num_warps,
        )


# --- Operators ---


def _rotate(
    sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool
) -> None:
    on_gpu = sources[0].is_cuda and all(x.dtype in KERNEL_DTYPES for x in (*sources, *targets))
    rotate = _launch_rotate if on_gpu else _plain_rotate
    rotate(sources, targets, cos, sin, interleaved=interleaved, inverse=inverse)


def _run(
    q_BHLD: Tensor, k_BGLD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = (_empty_heads(x, *x.shape) for x in (q_BHLD, k_BGLD))
    _rotate((q_BHLD, k_BGLD), (q_out, k_out), cos, sin, interleaved=interleaved, inverse=inverse)
    return q_out, k_out


def _run_packed(
    qkv_BLW: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_groups: int, interleaved: bool
) -> tuple[Tensor, ...]:
    sources = _split_heads(qkv_BLW, num_heads, num_groups)
    targets = tuple(_empty_heads(x, *x.shape) for x in sources)
    _rotate(sources, targets, cos, sin, interleaved=interleaved, inverse=False)
    return targets


def _run_packed_backward(
    dq_BHLD: Tensor, dk_BGLD: Tensor, dv_BGLD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    gradient_BLW = _empty_packed(dq_BHLD, dk_BGLD)
    targets = _split_heads(gradient_BLW, dq_BHLD.shape[1], dk_BGLD.shape[1])
    _rotate((dq_BHLD, dk_BGLD, dv_BGLD), targets, cos, sin, interleaved=interleaved, inverse=True)
    return gradient_BLW


def _empty_packed(q_BHLD: Tensor, k_BGLD: Tensor) -> Tensor:
    batch, num_heads, length, head_dim = q_BHLD.shape
    return q_BHLD.new_empty((batch, length, (num_heads + 2 * k_BGLD.shape[1]) * head_dim))


def _fake(q_BHLD: Tensor, k_BGLD: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_heads(x, *x.shape) for x in (q_BHLD, k_BGLD))


def _fake_packed(
    qkv_BLW: Tensor, _cos: Tensor, _sin: Tensor, num_heads: int, num_groups: int, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(_empty_heads(x, *x.shape) for x in _split_heads(qkv_BLW, num_heads, num_groups))


def _fake_packed_backward(dq_BHLD: Tensor, dk_BGLD: Tensor, *_: Any) -> Tensor:
    return _empty_packed(dq_BHLD, dk_BGLD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    ctx.settings = inputs[4:]
    ctx.save_for_backward(*inputs[2:4])


def _differentiate(ctx: Any, dq_BHLD: Tensor, dk_BGLD: Tensor) -> tuple[Tensor | None, ...]:
    interleaved, inverse = ctx.settings
    gradients = torch.ops.stepscope.rope(dq_BHLD, dk_BGLD, *ctx.saved_tensors, interleaved, not inverse)
    return *gradients, None, None, None, None


def _keep_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    ctx.interleaved = inputs[-1]
    ctx.save_for_backward(*inputs[1:3])


def _differentiate_packed(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    packed = torch.ops.stepscope.rope_packed_backward(*gradients, *ctx.saved_tensors, ctx.interleaved)
    return packed, None, None, None, None, None


def _keep_packed_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    dq_BHLD, dk_BGLD, _, cos, sin, interleaved = inputs
    ctx.settings = (dq_BHLD.shape[1], dk_BGLD.shape[1], interleaved)
    ctx.save_for_backward(cos, sin)


def _differentiate_packed_backward(ctx: Any, gradient_BLW: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.stepscope.rope_packed(gradient_BLW, *ctx.saved_tensors, *ctx.settings), None, None, None


_TABLES = "Tensor cos, Tensor sin"
for _schema, _implementation, _fake_implementation, _backward, _setup in (
    (
        f"rope(Tensor q, Tensor k, {_TABLES}, bool interleaved, bool inverse) -> (Tensor, Tensor)",
        _run,
        _fake,
        _differentiate,
        _keep,
    ),
    (
        f"rope_packed(Tensor qkv, {_TABLES}, int heads, int groups, bool interleaved) -> (Tensor, Tensor, Tensor)",
        _run_packed,
        _fake_packed,
        _differentiate_packed,
        _keep_packed,
    ),
    (
        f"rope_packed_backward(Tensor dq, Tensor dk, Tensor dv, {_TABLES}, bool interleaved) -> Tensor",
        _run_packed_backward,
        _fake_packed_backward,
        _differentiate_packed_backward,
        _keep_packed_backward,
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(getattr(torch.ops.stepscope, _name).default, _fake_implementation, _library)
    torch.library.register_autograd(f"stepscope::{_name}", _backward, setup_context=_setup, lib=_library)
