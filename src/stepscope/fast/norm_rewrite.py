"""Recognizes RMSNorm and LayerNorm in a traced graph, with the addition to the residual stream in front of them.

An RMSNorm is found by its reciprocal root: of the mean square of x, plus a small number, times x, times a weight. Models
write this in many ways; what lies between may be casts. If every use of the result is a product, which autocast would
cast, the kernel writes it in low precision.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from stepscope.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_CASTS = {"to", "float", "type_as", "type"}
_ADDS = {operator.add, torch.add, "add"}
_MULTIPLIES = {operator.mul, torch.mul, "mul"}
_LINEAR = torch._C._nn.linear


class _Norm(NamedTuple):
    """`last` computes norm(source) * weight + bias."""

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    eps: float
    last: fx.Node


def fuse_norms(graph: fx.Graph, dtype: torch.dtype | None) -> Iterator[str]:
    norms = [*_find_rms_norms(graph), *_find_layer_norms(graph)]
    added = sum(_replace(graph, norm, dtype) for norm in norms)
    if norms:
        yield f"{len(norms)} norms are fused kernels, {added} with the addition in front of them"


def _find_layer_norms(graph: fx.Graph) -> Iterator[_Norm]:
    for node in graph.nodes:
        if node.target is not torch.nn.functional.layer_norm:
            continue
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        if given.get("weight") is not None and len(given["normalized_shape"]) == 1:
            yield _Norm(given["input"], given["weight"], given.get("bias"), given.get("eps", 1e-5), node)


def _find_rms_norms(graph: fx.Graph) -> Iterator[_Norm]:
    for node in graph.nodes:
        if node.target in (torch.rsqrt, "rsqrt"):
            found = _read_rms_norm(node)
            if found is not None:
                yield found


def _read_rms_norm(root: fx.Node) -> _Norm | None:
    total = root.args[0]
    if not isinstance(total, fx.Node) or total.target not in _ADDS or not isinstance(total.args[1], float):
        return None
    mean, eps = total.args
    if not isinstance(mean, fx.Node) or mean.target not in ("mean", torch.mean) or not _is_over_rows(mean):
        return None
    wide = _squared(mean.args[0])
    if wide is None or len(root.users) != 1:
        return None
    return _read_scaling(root, wide, float(eps))


def _is_over_rows(mean: fx.Node) -> bool:
    dim = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    keepdim = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
    return dim in (-1, (-1,), [-1]) and bool(keepdim)


def _squared(node: Any) -> fx.Node | None:
    if not isinstance(node, fx.Node):
        return None
    if node.target in ("pow", torch.pow, operator.pow) and node.args[1] == 2:
        return node.args[0]  # type: ignore[return-value]
    if node.target in ("square", torch.square):
        return node.args[0]  # type: ignore[return-value]
    if node.target in _MULTIPLIES and node.args[0] is node.args[1]:
        return node.args[0]  # type: ignore[return-value]
    return None


def _read_scaling(root: fx.Node, wide: fx.Node, eps: float) -> _Norm | None:
    """Follow the only use of each result: times x, times a weight, and casts."""
    current, weight, has_source = root, None, False
    while weight is None or not has_source:
        current = _skip_casts(current)
        if len(current.users) != 1:
            return None
        (following,) = current.users
        if following.target not in _MULTIPLIES:
            return None
        (other,) = [one for one in following.args if one is not current] or [None]
        if other is wide:
            has_source = True
        elif isinstance(other, fx.Node) and other.op == "placeholder" and weight is None:
            weight = other
        else:
            return None
        current = following
    source = wide.args[0] if wide.target in _CASTS and wide.op == "call_method" else wide
    assert isinstance(source, fx.Node)
    return _Norm(source, weight, None, eps, _skip_casts(current))


def _skip_casts(node: fx.Node) -> fx.Node:
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_method" or user.target not in _CASTS or user.args[0] is not node:
            break
        node = user
    return node


def _replace(graph: fx.Graph, norm: _Norm, dtype: torch.dtype | None) -> bool:
    """Replace a norm, and return whether the addition in front of it went into the kernel."""
    value = norm.last.meta["example_value"]
    is_cast = dtype is not None and value.dtype == torch.float32 and _feeds_products(norm.last)
    options = {"out_dtype": dtype if is_cast else value.dtype}
    added = _addends(norm.source)
    rest = (norm.weight,) if norm.last.target is not torch.nn.functional.layer_norm else (norm.weight, norm.bias)
    with graph.inserting_after(norm.source):
        if added is None:
            kernel = rms_norm if len(rest) == 1 else layer_norm
            new = graph.call_function(kernel, (norm.source, *rest, norm.eps), options)
        else:
            kernel = add_rms_norm if len(rest) == 1 else add_layer_norm
            both = graph.call_function(kernel, (*added, *rest, norm.eps), options)
    if added is not None:
        with graph.inserting_after(both):
            total = graph.call_function(operator.getitem, (both, 0))
            new = graph.call_function(operator.getitem, (both, 1))
        total.meta = dict(norm.source.meta)
        norm.source.replace_all_uses_with(total)
    new.meta = dict(norm.last.meta)
    norm.last.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    return added is not None


def _feeds_products(node: fx.Node) -> bool:
    """Whether all uses of a tensor are inputs of products, directly or through a slice."""
    return bool(node.users) and all(
        user.target is _LINEAR or (user.target is operator.getitem and _feeds_products(user)) for user in node.users
    )


def _addends(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of the same shape that a node adds, the wider one first."""
    if node.target not in _ADDS or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    shapes = [one.meta["example_value"] for one in (first, second)]
    if shapes[0].shape != shapes[1].shape:
        return None
    return (second, first) if shapes[0].dtype.itemsize < shapes[1].dtype.itemsize else (first, second)
