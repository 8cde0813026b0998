"""Recognizes RMSNorm and LayerNorm in a traced graph, with the addition to the residual stream in front of them.

An RMSNorm is found by its reciprocal root: of the mean square of x, plus a small number, times x, times a weight.
Models write this in many ways; what lies between may be casts. If every use of the result is a product, which autocast
would cast, the kernel writes it in low precision.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from stepscope.fast.rewrites.nodes import (
    ADDS,
    MULTIPLICATIONS,
    PRODUCTS,
    before_casts,
    find_regions,
    is_call,
    is_changed_in_place,
    keep_modules,
    only_user,
    operands,
    other_factor,
    remove_unused,
    replace_node,
    skip_casts,
    value_of,
)
from stepscope.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_VIEWS = {operator.getitem, "view", "reshape", "flatten"}


class _FoundNorm(NamedTuple):
    """`last` computes norm(source) * weight + bias."""

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    eps: float
    last: fx.Node


def fuse_norms(graph: fx.Graph, dtype: torch.dtype | None) -> Iterator[str]:
    regions = find_regions(graph)
    norms = [*_find_rms_norms(graph), *_find_named_norms(graph)]
    norms = [norm for norm in norms if not is_changed_in_place(norm.source)]
    casting = {node for node, region in regions.items() if not region.has_own_autocast}
    renamed: dict[fx.Node, fx.Node] = {}  # the source of a norm may be the result of one replaced before
    added = sum(
        _replace(graph, norm._replace(source=renamed.get(norm.source, norm.source)), dtype, casting, renamed)
        for norm in norms
    )
    if norms:
        yield f"norms: {len(norms)} fused, {added} with the addition in front of them"


_NAMED = {
    functional.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    functional.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}


def _find_named_norms(graph: fx.Graph) -> Iterator[_FoundNorm]:
    """PyTorch's own norms."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _NAMED:
            continue
        given = dict(zip(_NAMED[node.target], operands(node), strict=False)) | dict(node.kwargs)
        if not isinstance(given.get("weight"), fx.Node) or len(given["normalized_shape"]) != 1:
            continue
        is_layer_norm = node.target is functional.layer_norm
        default = 1e-5 if is_layer_norm else torch.finfo(value_of(given["input"]).dtype).eps
        eps = given.get("eps")
        yield _FoundNorm(given["input"], given["weight"], given.get("bias"), default if eps is None else eps, node)


def _find_rms_norms(graph: fx.Graph) -> Iterator[_FoundNorm]:
    for node in graph.nodes:
        if is_call(node, {torch.rsqrt, "rsqrt"}) and (found := _read_rms_norm(node)) is not None:
            yield found


def _read_rms_norm(root: fx.Node) -> _FoundNorm | None:
    total = (*operands(root), None)[0]
    if not is_call(total, ADDS) or len(operands(total)) != 2:
        return None
    mean, eps = operands(total)
    if not isinstance(eps, float) or not is_call(mean, {"mean", torch.mean}) or not _is_over_rows(mean):
        return None
    wide = _squared((*operands(mean), None)[0])
    return None if wide is None else _read_scaling(root, wide, eps)


def _is_over_rows(mean: fx.Node) -> bool:
    names = ("input", "dim", "keepdim")
    given = dict(zip(names, operands(mean), strict=False)) | dict(mean.kwargs)
    return given.get("dim") in (-1, (-1,), [-1]) and bool(given.get("keepdim"))


def _squared(node: Any) -> fx.Node | None:
    """The node that is squared."""
    is_power = is_call(node, {"pow", torch.pow, operator.pow}) and operands(node)[1:] == (2,)
    is_product = is_call(node, MULTIPLICATIONS) and operands(node)[1:] == operands(node)[:1]
    if is_power or is_product or is_call(node, {"square", torch.square}):
        source: fx.Node = operands(node)[0]
        return source
    return None


def _read_scaling(root: fx.Node, wide: fx.Node, eps: float) -> _FoundNorm | None:
    """Follow the only use of each result: times x, times a weight, and casts."""
    current, weight, has_source = root, None, False
    while weight is None or not has_source:
        current = skip_casts(current)
        following = only_user(current)
        if following is None or not is_call(following, MULTIPLICATIONS):
            return None
        other = other_factor(following, current)
        if other is wide:
            has_source = True
        elif weight is None and _is_weight(other, wide):
            weight = other
        else:
            return None
        current = following
    return _FoundNorm(before_casts(wide), weight, None, eps, skip_casts(current))


def _is_weight(node: Any, x: fx.Node) -> bool:
    """Whether a node is an input of the graph with a number for each feature of x."""
    is_input = isinstance(node, fx.Node) and node.op == "placeholder"
    return is_input and value_of(node).shape == value_of(x).shape[-1:]


def _replace(
    graph: fx.Graph,
    norm: _FoundNorm,
    dtype: torch.dtype | None,
    casting: set[fx.Node],
    renamed: dict[fx.Node, fx.Node],
) -> bool:
    """Replace a norm, and return whether the addition in front of it went into the kernel."""
    out_dtype = value_of(norm.last).dtype
    if dtype is not None and out_dtype == torch.float32 and _feeds_products(norm.last, casting):
        out_dtype = dtype
    added = _addends(norm.source) if _come_before(graph, (norm.weight, norm.bias), norm.source) else None
    is_layer_norm = norm.last.target is functional.layer_norm
    own = (norm.weight, norm.bias, norm.eps) if is_layer_norm else (norm.weight, norm.eps)
    options: dict[str, Any] = {"out_dtype": out_dtype}
    if added is None:
        with graph.inserting_before(norm.last):
            kernel: Any = layer_norm if is_layer_norm else rms_norm
            result = graph.call_function(kernel, (norm.source, *own), options)
    else:
        with graph.inserting_before(norm.source):
            kernel = add_layer_norm if is_layer_norm else add_rms_norm
            both = graph.call_function(kernel, (*added, *own), options)
            keep_modules(both, (norm.last,))
            total, result = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        replace_node(norm.source, total)
        renamed[norm.source] = total
    replace_node(norm.last, result)
    renamed |= {norm.last: result, before_casts(norm.last): result}
    remove_unused(graph)
    return added is not None


def _come_before(graph: fx.Graph, nodes: tuple[fx.Node | None, ...], place: fx.Node) -> bool:
    """Whether these are computed before a place in the graph."""
    waiting = {node for node in nodes if node is not None and node.op != "placeholder"}
    for node in graph.nodes:
        if node is place or not waiting:
            break
        waiting.discard(node)
    return not waiting


def _feeds_products(node: fx.Node, casting: set[fx.Node]) -> bool:
    """Whether all uses of a tensor are inputs of products, directly or through a view, which autocast casts."""
    return bool(node.users) and all(
        (user.target in PRODUCTS and user in casting) or (is_call(user, _VIEWS) and _feeds_products(user, casting))
        for user in node.users
        if not is_call(user, {"size"})
    )


def _addends(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of the same shape that a node adds, the wider one first."""
    if not is_call(node, ADDS) or len(node.args) != 2 or node.kwargs:
        return None
    first, second = operands(node)
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    one, other = value_of(first), value_of(second)
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or not one.is_floating_point():
        return None
    if not other.is_floating_point() or one.shape != other.shape:
        return None
    return (second, first) if one.dtype.itemsize < other.dtype.itemsize else (first, second)
