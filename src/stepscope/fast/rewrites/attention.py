"""Replaces `scaled_dot_product_attention` by `flash_attention`.

A mask that does not depend on the input is computed and compared: `transformers` builds one even where it only says
causal. Heads of keys and values that were repeated for the query heads are taken before the repetition.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from stepscope.fast.rewrites.nodes import ALL, SDPA, is_call, operands, replace_node, value_of
from stepscope.kernels.attention.function import flash_attention_in_graph
from stepscope.kernels.attention.problem import MAX_HEAD_DIM
from stepscope.units import count_noun

_HIDDEN = -1e4  # exp of this is zero; masks have -inf, or the smallest number of some dtype
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def replace_attention(graph: fx.Graph) -> Iterator[str]:
    masks: dict[fx.Node, str | None] = {}
    count, reasons = 0, set()
    for node in [node for node in graph.nodes if node.target is SDPA]:
        settings = _read_attention(node, masks)
        if isinstance(settings, str):
            reasons.add(settings)
            continue
        if settings.pop("dropout_p"):
            reasons.add("it has dropout")
            given = _read_arguments(node) | {"attn_mask": None, "is_causal": settings["causal"]}
            node.args, node.kwargs = (), given
            continue
        tensors = tuple(_read_arguments(node)[name] for name in _NAMES[:3])
        before = (tensors[0], *(_without_repeats(one) for one in tensors[1:]))
        tensors = before if _can_attend(*before) else tensors
        with graph.inserting_before(node):
            replace_node(node, graph.call_function(flash_attention_in_graph, tensors, settings))
        graph.erase_node(node)
        count += 1
    if count:
        yield f"attention: {count_noun(count, 'call')} of scaled_dot_product_attention replaced with flash_attention"
    for reason in sorted(reasons):
        yield f"attention: kept as it is, because {reason}"


def _read_arguments(node: fx.Node) -> dict[str, Any]:
    return dict(zip(_NAMES, operands(node), strict=False)) | dict(node.kwargs)


def _read_attention(node: fx.Node, masks: dict[fx.Node, str | None]) -> dict[str, Any] | str:
    """The arguments of a call of SDPA, without its mask, or why it is not replaced."""
    given = _read_arguments(node)
    q, k, v = (given[name] for name in _NAMES[:3])
    causal, mask, scale = bool(given.get("is_causal", False)), given.get("attn_mask"), given.get("scale")
    if mask is not None:
        if mask not in masks:
            masks[mask] = _read_mask(mask)
        if masks[mask] is None:
            return "its mask depends on the input, or is neither causal nor empty"
        causal = masks[mask] == "causal"
    elif causal and value_of(q).shape[-2] != value_of(k).shape[-2]:
        return "with fewer queries than keys, its causal mask starts at the first key"
    if not _can_attend(q, k, v) or not (scale is None or (isinstance(scale, int | float) and scale >= 0)):
        return "flash_attention does not support its shapes or its scale"
    return {"causal": causal, "scale": scale, "dropout_p": given.get("dropout_p", 0.0)}


def _can_attend(q: fx.Node, k: fx.Node, v: fx.Node) -> bool:
    """Whether the batch is the same for all, and the heads of keys and values are too, or divide those of queries."""
    q_shape, k_shape, v_shape = (value_of(one).shape for one in (q, k, v))
    if not len(q_shape) == len(k_shape) == len(v_shape) or k_shape[:-1] != v_shape[:-1]:
        return False
    if max(q_shape[-1], v_shape[-1]) > MAX_HEAD_DIM:
        return False
    if len(q_shape) < 4:
        return q_shape[:-2] == k_shape[:-2]
    return q_shape[:-3] == k_shape[:-3] and q_shape[-3] % k_shape[-3] == 0


def _read_mask(mask: fx.Node) -> str | None:
    """What a mask that does not depend on the input hides: `causal` or `nothing`; None for any other."""
    value = _evaluate(mask)
    if value is None or value.dim() < 2:
        return None
    visible = value if value.dtype == torch.bool else value == 0
    if value.dtype != torch.bool and bool((value[~visible] > _HIDDEN).any()):
        return None  # a bias
    first_QK = visible.reshape(-1, *visible.shape[-2:])[0]
    if not bool((visible == first_QK).all()):
        return None  # not the same for every sequence and head
    if bool(first_QK.all()):
        return "nothing"
    is_square = first_QK.shape[0] == first_QK.shape[1]
    return "causal" if is_square and bool((first_QK == torch.ones_like(first_QK).tril()).all()) else None


def _evaluate(node: fx.Node) -> Tensor | None:
    """Compute a node that depends on no input of the graph; None if it does."""
    wanted: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.op not in ("call_function", "call_method", "get_attr"):
            return None
        if one not in wanted:
            wanted.add(one)
            waiting += one.all_input_nodes
    assert node.graph.owning_module is not None
    interpreter = fx.Interpreter(node.graph.owning_module, garbage_collect_values=False)
    with torch.no_grad():
        for one in node.graph.nodes:
            if one in wanted:
                interpreter.env[one] = interpreter.run_node(one)
    value: Tensor = interpreter.env[node]
    return value


def _without_repeats(node: fx.Node) -> fx.Node:
    """The keys or values before their heads were repeated for every query head."""
    if not is_call(node, {"reshape"}) or not is_call(node.args[0], {"expand"}):
        return node
    indexed = operands(operands(node)[0])[0]
    if not is_call(indexed, {operator.getitem}) or indexed.args[1] != (ALL, ALL, None, ALL, ALL):
        return node
    source: fx.Node = indexed.args[0]
    old, new = value_of(source).shape, value_of(node).shape
    return source if (old[0], *old[2:]) == (new[0], *new[2:]) else node
