"""Rewrites of a traced graph: attention, merged products, and working weights in place of parameters.

They see the operations that PyTorch recorded, not the model's classes, so they work on any model. Each rewrite checks
what it needs and leaves the graph alone otherwise; what it did is kept as a sentence.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from stepscope.fast.norm_rewrite import fuse_norms
from stepscope.kernels.attention.function import flash_attention_in_graph

if TYPE_CHECKING:
    from stepscope.fast.tracing import RewritingBackend

Inputs = list[int | Tensor]
_LINEAR = torch._C._nn.linear
_ATTENTION = torch._C._nn.scaled_dot_product_attention
_PRODUCTS = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    operator.matmul,
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "__matmul__",
}
_TRANSPOSES = {torch.t, torch.transpose, "t", "transpose", "permute", "T", "mT"}
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """The rewrites to apply."""

    attention: bool = False
    norms: bool = False
    working_weights: bool = False
    merge: bool = False


def rewrite(
    module: fx.GraphModule,
    parameters: Mapping[int, nn.Parameter],
    arguments: Sequence[Any],
    backend: "RewritingBackend",
) -> Inputs:
    """Rewrite the graph in place, and return the inputs that it takes now."""
    graph, wanted = module.graph, backend.wanted
    places = [node for node in graph.nodes if node.op == "placeholder"]
    inputs: dict[fx.Node, int | Tensor] = {node: number for number, node in enumerate(places)}
    weights = {places[number]: parameter for number, parameter in parameters.items()}
    if wanted.attention:
        backend.done += _replace_attention(graph)
    if wanted.norms:
        backend.done += fuse_norms(graph, backend.dtype)
    if wanted.working_weights and backend.dtype is not None:
        castable = {
            node: parameter
            for node, parameter in weights.items()
            if parameter.dtype == torch.float32 and node.users and _is_only_operand(node)
        }
        if wanted.merge:
            for group in _mergeable(graph, castable):
                _merge(graph, group, castable, inputs, backend)
        for node, parameter in castable.items():
            if node.users:
                inputs[node] = backend.weights.leaf((parameter,), backend.dtype)
    graph.eliminate_dead_code()
    for node in [node for node in inputs if not node.users]:
        graph.erase_node(node)
        del inputs[node]
    graph.lint()
    module.recompile()
    return [inputs[node] for node in graph.nodes if node.op == "placeholder"]


# --- Working weights --------------------------------------------------------------------------------------------------


def _is_only_operand(node: fx.Node) -> bool:
    """Whether autocast casts every use of a tensor: as an operand of a product, transposed or not."""
    return all(_casts(user, node) for user in node.users)


def _casts(user: fx.Node, node: fx.Node) -> bool:
    if user.target is _LINEAR:
        return node not in user.args[:1]
    if user.target in _PRODUCTS or user.target in _CONVOLUTIONS:
        return True
    is_transpose = user.target in _TRANSPOSES or (user.target is getattr and user.args[1] in _TRANSPOSES)
    return is_transpose and _is_only_operand(user)


# --- Merged products --------------------------------------------------------------------------------------------------


def _mergeable(graph: fx.Graph, castable: Mapping[fx.Node, nn.Parameter]) -> Iterator[list[fx.Node]]:
    """Groups of products of the same input with different weights, which are used nowhere else."""
    groups: dict[tuple[fx.Node, bool, bool], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is not _LINEAR or node.kwargs:
            continue
        source, weight, bias = (*node.args, None)[:3]
        own = [one for one in (weight, bias) if one is not None]
        if all(one in castable and len(one.users) == 1 for one in own):
            groups[source, bias is None, castable[weight].requires_grad].append(node)
    return (group for group in groups.values() if len(group) > 1)


def _merge(
    graph: fx.Graph,
    group: list[fx.Node],
    castable: Mapping[fx.Node, nn.Parameter],
    inputs: dict[fx.Node, int | Tensor],
    backend: "RewritingBackend",
) -> None:
    assert backend.dtype is not None
    merged = []
    for position in (1, 2):
        parameters = tuple(castable[node.args[position]] for node in group if (*node.args, None)[position] is not None)
        if parameters:
            with graph.inserting_after(next(reversed(inputs))):
                place = graph.placeholder(f"merged_{len(inputs)}_{position}")
            inputs[place] = backend.weights.leaf(parameters, backend.dtype)
            merged.append(place)
    sizes = [castable[node.args[1]].shape[0] for node in group]
    with graph.inserting_before(group[0]):
        product = graph.call_function(_LINEAR, (group[0].args[0], *merged))
        parts = graph.call_function(torch.split, (product, sizes, -1))
        for number, node in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, number))
            node.replace_all_uses_with(part)
            _allow_strides(part)
    for node in group:
        graph.erase_node(node)


def _allow_strides(part: fx.Node) -> None:
    """A slice of a product is not contiguous, so its views become reshapes, which are views wherever possible."""
    for user in part.users:
        if user.op == "call_method" and user.target == "view" and not isinstance(user.args[1], torch.dtype):
            user.target = "reshape"


# --- Attention --------------------------------------------------------------------------------------------------------


def _replace_attention(graph: fx.Graph) -> Iterator[str]:
    masks: dict[fx.Node, str | None] = {}
    count, reasons = 0, set()
    for node in [node for node in graph.nodes if node.target is _ATTENTION]:
        settings = _read_attention(node, masks)
        if isinstance(settings, str):
            reasons.add(settings)
            continue
        q, k, v = node.args[:3]
        with graph.inserting_before(node):
            new = graph.call_function(flash_attention_in_graph, (q, _without_repeats(k), _without_repeats(v)), settings)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    if count:
        yield f"{count} calls of scaled_dot_product_attention are flash_attention"
    for reason in sorted(reasons):
        yield f"attention was not replaced: {reason}"


def _read_attention(node: fx.Node, masks: dict[fx.Node, str | None]) -> dict[str, Any] | str:
    """The arguments of `flash_attention` for a call of SDPA, or why it cannot replace it."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("dropout_p", 0.0):
        return "it has dropout"
    causal, mask = bool(given.get("is_causal", False)), given.get("attn_mask")
    if mask is not None:
        if mask not in masks:
            masks[mask] = _read_mask(mask)
        if masks[mask] is None:
            return "its mask depends on the input"
        causal = masks[mask] == "causal"
    return {"causal": causal, "scale": given.get("scale")}


def _read_mask(mask: fx.Node) -> str | None:
    """What a mask that does not depend on the input hides: `causal` or `nothing`; None for any other."""
    values: dict[fx.Node, Any] = {}
    if not _evaluate(mask, values):
        return None
    value = values[mask]
    visible_QK = (value if value.dtype == torch.bool else value == 0).flatten(0, -3).all(dim=0)
    if not bool((visible_QK == (value if value.dtype == torch.bool else value == 0)).all()):
        return None  # not the same for every sequence and head
    if bool(visible_QK.all()):
        return "nothing"
    return "causal" if bool((visible_QK == torch.ones_like(visible_QK).tril()).all()) else None


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Compute a node that depends on no input of the graph; False if it does."""
    ancestors: list[fx.Node] = []
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.op not in ("call_function", "call_method", "get_attr"):
            return False
        ancestors.append(one)
        waiting += one.all_input_nodes
    wanted = set(ancestors)
    interpreter = fx.Interpreter(node.graph.owning_module, garbage_collect_values=False)
    with torch.no_grad():
        for one in node.graph.nodes:
            if one in wanted:
                interpreter.env[one] = interpreter.run_node(one)
    values[node] = interpreter.env[node]
    return True


def _without_repeats(node: fx.Node) -> fx.Node:
    """The keys or values before their heads were repeated for every query head, which `flash_attention` does not
    need."""
    if node.target != "reshape" or node.op != "call_method":
        return node
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target != "expand":
        return node
    indexed = expanded.args[0]
    if not isinstance(indexed, fx.Node) or indexed.target is not operator.getitem:
        return node
    full = slice(None, None, None)
    if indexed.args[1] != (full, full, None, full, full):
        return node
    return indexed.args[0]  # type: ignore[return-value]
