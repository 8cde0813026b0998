"""Working weights in place of parameters, and one GEMM in place of several that have the same input."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from stepscope.fast.rewrites.nodes import (
    LINEAR,
    PRODUCTS,
    Region,
    find_regions,
    is_changed_in_place,
    keep_modules,
    operands,
)
from stepscope.fast.weights import WorkingWeights

NewLeaf = Callable[[tuple[nn.Parameter, ...]], Tensor]
Regions = Mapping[fx.Node, Region]
Inputs = dict[fx.Node, int | Tensor]  # the inputs of a graph: the position of an argument, or a leaf in its place

_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
_TRANSPOSES = {torch.t, torch.transpose, "t", "transpose", "T", "mT"}


def find_castable(graph: fx.Graph, weights: Mapping[fx.Node, nn.Parameter]) -> dict[fx.Node, nn.Parameter]:
    """The fp32 parameters that autocast casts wherever they are used."""
    regions = find_regions(graph)
    return {
        node: parameter
        for node, parameter in weights.items()
        if parameter.dtype == torch.float32 and parameter.is_contiguous() and node.users
        if _is_only_operand(node, regions)
    }


def _is_only_operand(node: fx.Node, regions: Regions) -> bool:
    return all(_casts(user, node, regions) for user in node.users)


def _casts(user: fx.Node, node: fx.Node, regions: Regions) -> bool:
    if regions[user].has_own_autocast:
        return False
    if user.target is LINEAR:
        return user.args[:1] != (node,) and user.kwargs.get("input") is not node
    if user.target in PRODUCTS or user.target in _CONVOLUTIONS:
        return True
    is_transpose = user.target in _TRANSPOSES or (user.target is getattr and user.args[1] in _TRANSPOSES)
    return is_transpose and _is_only_operand(user, regions)


def merge_products(
    graph: fx.Graph,
    castable: Mapping[fx.Node, nn.Parameter],
    inputs: Inputs,
    weights: WorkingWeights,
    dtype: torch.dtype,
) -> Iterator[str]:
    count = 0
    for group in list(_mergeable(graph, castable)):
        operand_groups = [tuple(castable[one] for one in own) for own in _own_operands(group)]
        if all(weights.can_hold(own) for own in operand_groups):
            _merge(graph, group, castable, inputs, lambda own: weights.leaf(own, dtype))
            count += len(group)
    if count:
        yield f"GEMMs: {count} products that share their input are merged"


def _own_operands(group: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """The weights of a group of products, and their biases if they have any."""
    for position in (1, 2):
        own = [(*operands(node), None)[position] for node in group]
        if own[0] is not None:
            yield own


def _mergeable(graph: fx.Graph, castable: Mapping[fx.Node, nn.Parameter]) -> Iterator[list[fx.Node]]:
    """Groups of products of the same input with different weights, which are used nowhere else. What backward needs of
    them is the same, and nothing is written into their results, which will be views."""
    regions = find_regions(graph)
    groups: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is not LINEAR or node.kwargs or is_changed_in_place(node):
            continue
        source, *own = (one for one in operands(node) if one is not None)
        is_own = all(one in castable and len(one.users) == 1 for one in own)
        if is_own and castable[own[0]].dim() == 2:
            needs_grad = tuple(castable[one].requires_grad for one in own)
            groups[source, regions[node].number, needs_grad].append(node)
    return (group for group in groups.values() if len(group) > 1)


def _merge(
    graph: fx.Graph,
    group: list[fx.Node],
    castable: Mapping[fx.Node, nn.Parameter],
    inputs: Inputs,
    new_leaf: NewLeaf,
) -> None:
    merged = []
    for own in _own_operands(group):
        with graph.inserting_after(next(reversed(inputs))):
            place = graph.placeholder(f"merged_{len(inputs)}")
        inputs[place] = new_leaf(tuple(castable[one] for one in own))
        merged.append(place)
    sizes = [castable[operands(node)[1]].shape[0] for node in group]
    with graph.inserting_before(group[0]):
        product = graph.call_function(LINEAR, (group[0].args[0], *merged))
        parts = graph.call_function(torch.split, (product, sizes, -1))
        for new in (product, parts):
            keep_modules(new, group)
        for number, node in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            _allow_strides(part)
    for node in group:
        graph.erase_node(node)


def _allow_strides(part: fx.Node) -> None:
    """A slice of a product is not contiguous, so its views become reshapes, which are views wherever possible."""
    for user in part.users:
        if user.op == "call_method" and user.target == "view" and not isinstance(user.args[1], torch.dtype):
            user.target = "reshape"
