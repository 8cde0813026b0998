"""Kernels that read the result of a merged product as it is: SwiGLU of gate and up; RoPE and heads of q, k and v."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from stepscope.fast.rewrites.nodes import (
    ADDS,
    ALL,
    LINEAR,
    MULTIPLICATIONS,
    NEGATIONS,
    SDPA,
    SIGMOID,
    SILU,
    SUBTRACTIONS,
    is_call,
    keep_modules,
    only_user,
    operands,
    other_factor,
    reads_slice,
    replace_node,
    skip_casts,
    value_of,
)
from stepscope.kernels.attention.function import flash_attention_in_graph
from stepscope.kernels.gated import swiglu_linear, swiglu_packed
from stepscope.kernels.rotary import rope_packed


def fuse_packed(graph: fx.Graph, castable: Mapping[fx.Node, nn.Parameter], dtype: torch.dtype | None) -> Iterator[str]:
    """`castable` are the parameters that have working weights."""
    gated = rotated = 0
    for split in [node for node in graph.nodes if node.target is torch.split and _is_of_rows(node)]:
        parts = {operands(user)[1]: user for user in split.users if is_call(user, {operator.getitem})}
        if sorted(parts) != list(range(len(split.users))):
            continue
        gated += len(parts) == 2 and _fuse_gate(graph, split, parts[0], parts[1], castable)
        rotated += len(parts) == 3 and _fuse_heads(graph, split, [parts[0], parts[1], parts[2]], dtype)
    if gated:
        yield f"activations: {gated} SwiGLU read gate and up as one tensor"
    if rotated:
        yield f"RoPE: {rotated} layers rotate q and k, and split q, k and v, in one kernel"


def _is_of_rows(split: fx.Node) -> bool:
    """Whether a tensor is split along its last dimension."""
    part = next(iter(split.users), None)
    dim = split.kwargs.get("dim", (*operands(split), 0)[2])
    return part is not None and is_call(part, {operator.getitem}) and dim in (-1, value_of(part).dim() - 1)


# --- SwiGLU -----------------------------------------------------------------------------------------------------------


def _fuse_gate(
    graph: fx.Graph, split: fx.Node, gate: fx.Node, up: fx.Node, castable: Mapping[fx.Node, nn.Parameter]
) -> bool:
    activated = _find_silu(gate)
    result = None if activated is None else only_user(activated)
    if result is None or activated is None or not is_call(result, MULTIPLICATIONS):
        return False
    if other_factor(result, activated) is not up or only_user(up) is not result:
        return False
    if value_of(gate).shape != value_of(up).shape:
        return False
    down = only_user(result)
    with graph.inserting_before(result):
        # Backward multiplies by the weight as it is, without autocast.
        if down is not None and down.target is LINEAR and _is_product_of(down, result, castable):
            replace_node(down, graph.call_function(swiglu_linear, (operands(split)[0], operands(down)[1])))
        else:
            replace_node(result, graph.call_function(swiglu_packed, (operands(split)[0],)))
    return True


def _is_product_of(linear: fx.Node, x: fx.Node, castable: Mapping[fx.Node, nn.Parameter]) -> bool:
    """Whether this is x times a working weight, without a bias."""
    given = (*operands(linear), None, None, None)
    return not linear.kwargs and given[0] is x and given[1] in castable and given[2] is None


def _find_silu(gate: fx.Node) -> fx.Node | None:
    """The node that is silu(gate), as one operation or as gate * sigmoid(gate), if it has no other use."""
    user = only_user(gate)
    if user is not None:
        return user if is_call(user, SILU) else None
    squashed = [user for user in gate.users if is_call(user, SIGMOID)]
    if len(squashed) != 1 or len(gate.users) != 2:
        return None
    result = only_user(squashed[0])
    is_product = result is not None and is_call(result, MULTIPLICATIONS) and result in gate.users
    return result if is_product else None


# --- RoPE -------------------------------------------------------------------------------------------------------------


class _Rotation(NamedTuple):
    """`last` is `source` rotated by the angles of cos and sin."""

    last: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool


def _fuse_heads(graph: fx.Graph, split: fx.Node, parts: list[fx.Node], dtype: torch.dtype | None) -> bool:
    heads = [_split_heads(part) for part in parts]
    q, k, v = heads
    if q is None or k is None or v is None:
        return False
    rotations = [_find_rotation(q), _find_rotation(k)]
    first, second = rotations
    if first is None or second is None or first[1:] != second[1:]:
        return False
    if (
        not _have_one_width(q, k, v)
        or not _has_tables(first, value_of(q).shape)
        or not all(_is_for_attention(one.last, dtype) for one in (first, second))
    ):
        return False
    order = {node: number for number, node in enumerate(graph.nodes)}
    place = min(first.last, second.last, key=order.__getitem__)
    if any(order[user] < order[place] for user in v.users):
        return False
    shape = value_of(q).shape
    with graph.inserting_before(place):
        cos, sin = (_table(graph, one) for one in (first.cos, first.sin))
        counts: dict[str, Any] = {
            "num_heads": shape[1],
            "num_groups": value_of(k).shape[1],
            "interleaved": first.interleaved,
        }
        tensors = graph.call_function(rope_packed, (operands(split)[0], cos, sin), counts)
        keep_modules(tensors, (first.last, second.last))
        for number, old in enumerate((first.last, second.last, v)):
            replace_node(old, graph.call_function(operator.getitem, (tensors, number)))
    return True


def _split_heads(part: fx.Node) -> fx.Node | None:
    """The node that is part as (B, H, L, D), if it is only used that way."""
    viewed = only_user(part)
    if viewed is None or not is_call(viewed, {"view", "reshape"}):
        return None
    if value_of(part).dim() != 3 or value_of(viewed).shape[:2] != value_of(part).shape[:2]:
        return None
    heads = only_user(viewed)
    if heads is None or not is_call(heads, {"transpose", torch.transpose}) or value_of(heads).dim() != 4:
        return None
    return heads if sorted(one % 4 for one in operands(heads)[1:]) == [1, 2] else None


def _find_rotation(x: fx.Node) -> _Rotation | None:
    return _find_half_split(x) or _find_interleaved(x)


def _find_half_split(x: fx.Node) -> _Rotation | None:
    """x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin, as in `transformers`."""
    half = value_of(x).shape[-1] // 2
    products = [user for user in x.users if is_call(user, MULTIPLICATIONS)]
    if len(x.users) != 3 or len(products) != 1:
        return None
    result = only_user(products[0])
    if result is None or not is_call(result, ADDS):
        return None
    turned = other_factor(result, products[0])
    cos = other_factor(products[0], x)
    if not is_call(turned, MULTIPLICATIONS):
        return None
    for joined in operands(turned):
        if not is_call(joined, {torch.cat}) or len((*operands(joined), ())[0]) != 2:
            continue
        negated, first = operands(joined)[0]
        is_last = (*operands(joined)[1:], joined.kwargs.get("dim"))[0] == -1
        is_turned = is_call(negated, NEGATIONS) and reads_slice(operands(negated)[0], x, slice(half, None, None))
        if is_last and is_turned and reads_slice(first, x, slice(None, half, None)):
            return _Rotation(skip_casts(result), cos, other_factor(turned, joined), interleaved=False)
    return None


def _find_interleaved(x: fx.Node) -> _Rotation | None:
    """stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2) of a = x[..., 0::2] and b = x[..., 1::2]."""
    a = next((user for user in x.users if reads_slice(user, x, slice(0, None, 2))), None)
    b = next((user for user in x.users if reads_slice(user, x, slice(1, None, 2))), None)
    if a is None or b is None or len(x.users) != 2 or len(a.users) != 2 or len(b.users) != 2:
        return None
    difference = [user for one in a.users if (user := only_user(one)) is not None and is_call(user, SUBTRACTIONS)]
    total = [user for one in a.users if (user := only_user(one)) is not None and is_call(user, ADDS)]
    if len(difference) != 1 or len(total) != 1:
        return None
    cos = other_factor(operands(difference[0])[0], a)
    sin = other_factor(operands(difference[0])[1], b)
    if not _is_sum_of(total[0], {(a, sin), (b, cos)}):
        return None
    stacked = only_user(difference[0])
    if stacked is None or not is_call(stacked, {torch.stack}) or tuple(operands(stacked)[0]) != (*difference, *total):
        return None
    flat = only_user(stacked)
    if flat is None or not is_call(flat, {"flatten", torch.flatten}) or operands(flat)[1:] != (-2,):
        return None
    return _Rotation(skip_casts(flat), cos, sin, interleaved=True)


def _is_sum_of(node: fx.Node, products: set[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether a node adds these products."""
    found = {frozenset(operands(one)) for one in operands(node) if is_call(one, MULTIPLICATIONS)}
    return found == {frozenset(pair) for pair in products}


def _is_for_attention(node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether the rotated tensor may be of low precision: it is, or autocast makes it so for attention."""
    if dtype is None or value_of(node).dtype == dtype:
        return True
    return all(user.target in (SDPA, flash_attention_in_graph) for user in node.users)


def _have_one_width(q: fx.Node, k: fx.Node, v: fx.Node) -> bool:
    """Whether all heads are equally wide, and keys have as many as values."""
    widths = {value_of(one).shape[-1] for one in (q, k, v)}
    return len(widths) == 1 and value_of(k).shape[1] == value_of(v).shape[1]


def _has_tables(rotation: _Rotation, shape: torch.Size) -> bool:
    """Whether cos and sin are (L, ...), or (B, 1, L, ...) as in `transformers`: the same for all heads, with an entry
    for each position, and not learned."""
    tables = [one for one in (rotation.cos, rotation.sin) if isinstance(one, fx.Node)]
    return len(tables) == 2 and all(_is_table(value_of(one), shape) for one in tables)


def _is_table(table: torch.Tensor, shape: torch.Size) -> bool:
    is_shared = table.dim() == 2 or (table.dim() == 4 and table.shape[1] == 1 and table.shape[0] in (1, shape[0]))
    widths = (shape[3], shape[3] // 2)
    return is_shared and table.shape[-2] == shape[2] and table.shape[-1] in widths and not table.requires_grad


def _table(graph: fx.Graph, node: fx.Node) -> fx.Node:
    is_plain = value_of(node).dim() == 2
    return node if is_plain else graph.call_function(operator.getitem, (node, (ALL, 0)))
