"""What the compiler says about the modules of its kernels."""

import torch
from torch import fx

from stepscope.measure.compiled_code import FoundModule, find_module, noting_compiled_code
from tests.cpu.product_model import ProductModel


def test_every_product_of_a_compiled_model_has_its_module() -> None:
    model = ProductModel()
    with noting_compiled_code() as code:
        torch.compile(model)(torch.randn(3, 4)).sum().backward()
    forward, backward = code.graphs(name for name, _ in model.named_modules())
    order = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    products = [one.module for one in forward.calls if one.operator == "aten::mm"]
    assert products == order
    assert not forward.is_backward
    gradients = [str(one.module) for one in backward.calls if one.operator == "aten::mm"]
    # Two per matrix, but the input of the first needs no gradient.
    assert sorted(gradients) == sorted([*order[1:], *order])
    assert backward.is_backward


def test_names_are_those_of_the_model_and_what_is_in_none_is_outside() -> None:
    model = ProductModel()
    with noting_compiled_code() as code:
        torch.compile(lambda x: model(x) @ torch.ones(4, 4))(torch.randn(3, 4))
    (graph,) = code.graphs((name for name, _ in model.named_modules()), outside="(loss)")
    found = [one.module for one in graph.calls if one.operator == "aten::mm"]
    assert found == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "(loss)"]


def _node(operator: str, module: str | None, *, backward: bool = False) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["original_aten"] = f"aten.{operator}.default"
    if module is not None:
        node.meta["fwd_nn_module_stack" if backward else "nn_module_stack"] = {"7@2": (module, object)}
    return node


def test_a_kernel_belongs_to_the_module_with_most_of_its_operators() -> None:
    nodes = [_node("add", "a"), _node("mul", "b"), _node("rsqrt", "b"), *(_node("view", "c") for _ in range(5))]
    assert find_module(nodes) == FoundModule("b", 7, object)
    assert find_module([_node("view", "c")]) == FoundModule("c", 7, object)
    assert find_module([_node("add", None)]) is None
    assert find_module([]) is None


def test_operators_of_forward_inside_a_kernel_of_backward_do_not_count() -> None:
    nodes = [*(_node("mul", "a") for _ in range(3)), _node("mul", "b", backward=True)]
    assert find_module(nodes) == FoundModule("b", 7, object)
