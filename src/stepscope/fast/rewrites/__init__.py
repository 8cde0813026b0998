"""Rewrites of a traced graph.

They see the operations that PyTorch recorded, not the model's classes, so they work on any model. Each checks what it
needs and leaves the graph alone otherwise, and says in a sentence what it did.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from stepscope.fast.rewrites.attention import replace_attention
from stepscope.fast.rewrites.losses import fuse_losses
from stepscope.fast.rewrites.nodes import remove_unused
from stepscope.fast.rewrites.norms import fuse_norms
from stepscope.fast.rewrites.packed import fuse_packed
from stepscope.fast.rewrites.products import Inputs, find_castable, merge_products
from stepscope.fast.weights import WorkingWeights

__all__ = ["Rewrites", "rewrite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """The rewrites to apply. `packed` needs `merge`, and `merge` needs `working_weights`."""

    attention: bool = False
    norms: bool = False
    loss: bool = False
    working_weights: bool = False
    merge: bool = False
    packed: bool = False


def rewrite(
    module: fx.GraphModule,
    parameters: Mapping[int, nn.Parameter],
    wanted: Rewrites,
    weights: WorkingWeights,
    dtype: torch.dtype | None,
) -> tuple[list[int | Tensor], list[str]]:
    """Rewrite the graph in place. `parameters` are those among its inputs, by position, and `dtype` is that of
    autocast. Returns the inputs that it takes now, and what was done."""
    graph = module.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    inputs: Inputs = {node: number for number, node in enumerate(places)}
    done: list[str] = []
    if wanted.attention:
        done += replace_attention(graph)
    if wanted.norms:
        done += fuse_norms(graph, dtype)
    if wanted.loss:
        done += fuse_losses(graph)
    if wanted.working_weights and dtype is not None:
        castable = find_castable(graph, {places[number]: parameter for number, parameter in parameters.items()})
        if wanted.merge:
            done += merge_products(graph, castable, inputs, weights, dtype)
        castable = {node: own for node, own in castable.items() if node.users and weights.can_hold((own,))}
        if wanted.packed:
            done += fuse_packed(graph, castable, dtype)
        inputs |= {node: weights.leaf((own,), dtype) for node, own in castable.items() if node.users}
    remove_unused(graph)
    for node in [node for node in inputs if not node.users]:
        graph.erase_node(node)
        del inputs[node]
    graph.lint()
    module.recompile()
    return [inputs[node] for node in graph.nodes if node.op == "placeholder"], done
