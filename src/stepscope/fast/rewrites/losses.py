"""Replaces `cross_entropy` of wide logits by a kernel that reads them as the product wrote them.

Models cast logits to fp32 first. The kernel computes in fp32 from what it reads, so the cast only costs memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from stepscope.fast.rewrites.nodes import CASTS, is_call, is_changed_in_place, operands, replace_node, value_of
from stepscope.kernels.cross_entropy import cross_entropy

_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)
_RESHAPES = {"view", "reshape", "flatten", "contiguous", *CASTS}


def fuse_losses(graph: fx.Graph) -> Iterator[str]:
    count = 0
    for node in [node for node in graph.nodes if node.target is functional.cross_entropy]:
        given: dict[str, Any] = dict(zip(_NAMES, operands(node), strict=False)) | dict(node.kwargs)
        if not _is_plain(given):
            continue
        source = _before_reshapes(given["input"])
        size = value_of(given["input"]).shape[1]
        options = {"ignore_index": given.get("ignore_index", -100), "reduction": given.get("reduction", "mean")}
        options["label_smoothing"] = given.get("label_smoothing", 0.0)
        with graph.inserting_before(node):
            rows = graph.call_method("reshape", (source, -1, size))
            replace_node(node, graph.call_function(cross_entropy, (rows, given["target"]), options))
        count += 1
    if count:
        yield "loss: cross entropy reads the logits in the precision of the product"


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether rows of logits are compared with a class each, with nothing that the kernel does not support."""
    logits, targets = value_of(given["input"]), value_of(given["target"])
    has_rows = logits.dim() == 2 and targets.dim() == 1 and targets.dtype == torch.int64
    others = [given.get(name) for name in ("weight", "size_average", "reduce")]
    return has_rows and others == [None] * 3 and given.get("reduction", "mean") in ("mean", "sum")


def _before_reshapes(node: fx.Node) -> fx.Node:
    """The logits before casts to a wider dtype and views that keep the vocabulary last."""
    size = value_of(node).shape[-1]
    while is_call(node, _RESHAPES) and node.op == "call_method" and not is_changed_in_place(node):
        source = operands(node)[0]
        if value_of(source).shape[-1] != size or value_of(source).dtype.itemsize > value_of(node).dtype.itemsize:
            break
        node = source
    return node
