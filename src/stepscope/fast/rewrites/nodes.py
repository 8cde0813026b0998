"""What the rewrites share: names of operations in a traced graph, and how to read its nodes."""

import inspect
import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

LINEAR = torch._C._nn.linear
PRODUCTS = {LINEAR, torch.matmul, torch.mm, torch.bmm, torch.addmm, operator.matmul, "matmul", "mm", "bmm", "addmm"}
SDPA = torch._C._nn.scaled_dot_product_attention
ADDS = {operator.add, torch.add, "add"}
SUBTRACTIONS = {operator.sub, torch.sub, "sub"}
MULTIPLICATIONS = {operator.mul, torch.mul, "mul"}
NEGATIONS = {operator.neg, torch.neg, "neg"}
SILU = {functional.silu, torch._C._nn.silu, "silu"}
SIGMOID = {torch.sigmoid, functional.sigmoid, "sigmoid"}
CASTS = {"to", "float", "type_as", "type"}
ALL = slice(None, None, None)
_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.setitem,
}  # fmt: skip


def is_call(node: object, targets: set[Any]) -> bool:
    """Whether a node calls one of these. `torch.add(x, y, alpha=2)` and the like are not the additions meant here."""
    is_any = isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets
    return is_any and not {"alpha", "out"} & node.kwargs.keys()  # type: ignore[attr-defined]


def is_changed_in_place(node: fx.Node) -> bool:
    """Whether a later operation writes into this tensor."""
    return any(_writes(user) and user.args[:1] == (node,) for user in node.users)


def _writes(node: fx.Node) -> bool:
    """Whether a node writes into its first argument: `x.add_(y)`, `x += y`, `x[...] = y`, `relu(x, inplace=True)`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_named_so = name.endswith("_") and not name.endswith("__")
    is_asked_to = bool(node.kwargs.get("inplace")) or True in node.args[_place_of_inplace(node.target) :][:1]
    return node.op.startswith("call") and (node.target in _IN_PLACE or is_named_so or is_asked_to)


@cache
def _place_of_inplace(target: object) -> int:
    """The position of an argument `inplace` of a function, beyond all if it has none."""
    try:
        names = list(inspect.signature(target).parameters) if callable(target) else []
    except ValueError:  # a builtin without a signature
        names = []
    return names.index("inplace") if "inplace" in names else 100


def remove_unused(graph: fx.Graph) -> None:
    """Remove nodes without a use, except those that write into a tensor, which `torch.fx` does not know."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or _writes(node))


class Region(NamedTuple):
    """Where in a graph a node is: `number` counts the changes of autocast and of gradients before it."""

    number: int
    has_own_autocast: bool


def find_regions(graph: fx.Graph) -> dict[fx.Node, Region]:
    regions, number, depth = {}, 0, 0
    for node in graph.nodes:
        regions[node] = Region(number, depth > 0)
        if node.target is torch.amp.autocast_mode._enter_autocast:
            number, depth = number + 1, depth + 1
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            number, depth = number + 1, depth - 1
        elif node.target is torch._C._set_grad_enabled:
            number += 1
    return regions


def operands(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node: nodes, numbers and other constants."""
    return node.args


def value_of(node: fx.Node) -> torch.Tensor:
    """The tensor that was traced, with its shape and dtype but without data."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def other_factor(product: fx.Node, factor: fx.Node) -> Any:
    """The other operand of a multiplication; None if both are the same."""
    others = [one for one in product.args if one is not factor]
    return others[0] if len(others) == 1 else None


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def skip_casts(node: fx.Node) -> fx.Node:
    """The last of the casts that follow a node, if nothing else uses it."""
    while (user := only_user(node)) is not None:
        if user.op != "call_method" or user.target not in CASTS or user.args[0] is not node:
            break
        node = user
    return node


def before_casts(node: fx.Node) -> fx.Node:
    """What was cast to become this node."""
    while node.op == "call_method" and node.target in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def replace_node(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def keep_modules(new: fx.Node, replaced: Sequence[fx.Node]) -> None:
    """Let a node be in the modules that all the nodes it replaces are in, so that a recorder knows whose it is."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in replaced]
    new.meta["nn_module_stack"] = {key: stacks[0][key] for key in stacks[0] if all(key in one for one in stacks)}


def reads_slice(node: object, source: fx.Node, wanted: slice) -> bool:
    """Whether a node is `source[..., wanted]`."""
    return is_call(node, {operator.getitem}) and operands(node) == (source, (Ellipsis, wanted))  # type: ignore[arg-type]
