"""What the rewrites share: names of operations in a traced graph, and how to read its nodes."""

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

LINEAR = torch._C._nn.linear
SDPA = torch._C._nn.scaled_dot_product_attention
ADDS = {operator.add, torch.add, "add"}
SUBTRACTIONS = {operator.sub, torch.sub, "sub"}
MULTIPLICATIONS = {operator.mul, torch.mul, "mul"}
NEGATIONS = {operator.neg, torch.neg, "neg"}
SILU = {functional.silu, torch._C._nn.silu, "silu"}
SIGMOID = {torch.sigmoid, functional.sigmoid, "sigmoid"}
CASTS = {"to", "float", "type_as", "type"}
ALL = slice(None, None, None)


def is_call(node: object, targets: set[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


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


def reads_slice(node: object, source: fx.Node, wanted: slice) -> bool:
    """Whether a node is `source[..., wanted]`."""
    return is_call(node, {operator.getitem}) and operands(node) == (source, (Ellipsis, wanted))  # type: ignore[arg-type]
