"""Working weights in place of parameters, and one GEMM in place of several that have the same input."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from stepscope.fast.rewrites.nodes import LINEAR, operands

NewLeaf = Callable[[tuple[nn.Parameter, ...]], Tensor]
Inputs = dict[fx.Node, int | Tensor]  # the inputs of a graph: the position of an argument, or a leaf in its place

_PRODUCTS = {torch.matmul, torch.mm, torch.bmm, torch.addmm, operator.matmul, "matmul", "mm", "bmm", "addmm"}
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
_TRANSPOSES = {torch.t, torch.transpose, "t", "transpose", "T", "mT"}


def find_castable(weights: Mapping[fx.Node, nn.Parameter]) -> dict[fx.Node, nn.Parameter]:
    """The fp32 parameters that autocast casts wherever they are used."""
    return {
        node: parameter
        for node, parameter in weights.items()
        if parameter.dtype == torch.float32 and parameter.is_contiguous() and node.users and _is_only_operand(node)
    }


def _is_only_operand(node: fx.Node) -> bool:
    return all(_casts(user, node) for user in node.users)


def _casts(user: fx.Node, node: fx.Node) -> bool:
    if user.target is LINEAR:
        return user.args[0] is not node
    if user.target in _PRODUCTS or user.target in _CONVOLUTIONS:
        return True
    is_transpose = user.target in _TRANSPOSES or (user.target is getattr and user.args[1] in _TRANSPOSES)
    return is_transpose and _is_only_operand(user)


def merge_products(
    graph: fx.Graph, castable: Mapping[fx.Node, nn.Parameter], inputs: Inputs, new_leaf: NewLeaf
) -> Iterator[str]:
    count = 0
    for group in list(_mergeable(graph, castable)):
        _merge(graph, group, castable, inputs, new_leaf)
        count += len(group)
    if count:
        yield f"GEMMs: {count} products that share their input are merged"


def _mergeable(graph: fx.Graph, castable: Mapping[fx.Node, nn.Parameter]) -> Iterator[list[fx.Node]]:
    """Groups of products of the same input with different weights, which are used nowhere else."""
    groups: dict[tuple[fx.Node, bool, bool], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is not LINEAR or node.kwargs:
            continue
        source, weight, bias = (*operands(node), None)[:3]
        own = [one for one in (weight, bias) if one is not None]
        if all(one in castable and len(one.users) == 1 for one in own):
            groups[source, bias is None, castable[weight].requires_grad].append(node)
    return (group for group in groups.values() if len(group) > 1)


def _merge(
    graph: fx.Graph,
    group: list[fx.Node],
    castable: Mapping[fx.Node, nn.Parameter],
    inputs: Inputs,
    new_leaf: NewLeaf,
) -> None:
    merged = []
    for position in (1, 2):
        own = [(*operands(node), None)[position] for node in group]
        if own[0] is None:
            continue
        with graph.inserting_after(next(reversed(inputs))):
            place = graph.placeholder(f"merged_{len(inputs)}_{position}")
        inputs[place] = new_leaf(tuple(castable[one] for one in own))
        merged.append(place)
    sizes = [castable[operands(node)[1]].shape[0] for node in group]
    with graph.inserting_before(group[0]):
        product = graph.call_function(LINEAR, (group[0].args[0], *merged))
        parts = graph.call_function(torch.split, (product, sizes, -1))
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
