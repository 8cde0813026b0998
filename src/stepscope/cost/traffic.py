"""Costs of operators without GEMMs: elementwise operations, sums, norms, copies and indexing."""

import re

import msgspec

from stepscope.cost.calls import (
    BYTES,
    PRECISION,
    Call,
    OperatorCost,
    Tensor,
    UnknownCost,
    broadcast,
    make_cost,
    numbers,
)

# Operators in the name of a fused kernel that use a part of an argument, or use it through an index.
_PARTIAL = re.compile(r"embedding|gather|index|nll_loss|scatter|select|slice|split|unfold|_sort|topk|cat(?:_|$)")
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "logical_and"}
# Of one tensor. If there is another one of its shape, it is the `out` that is written.
_UNARY = re.compile(
    r"abs|bitwise_not|ceil|clamp(?:_max|_min)?|cos|cumsum|elu|erf|exp|exp2|expm1|floor|gelu|hardswish|isfinite|isinf|isnan|"
    r"leaky_relu|log|log1p|logical_not|neg|reciprocal|relu|rsqrt|sigmoid|sign|silu|sin|softplus|sqrt|square|tanh|tril|triu"
)


def elementwise(call: Call) -> OperatorCost:
    """The result has the broadcast shape of the inputs; an in-place operation has that of the first."""
    tensors = call.given
    if not tensors:
        raise UnknownCost
    if _UNARY.fullmatch(call.name) and len(tensors) > 1 and tensors[-1].dims == tensors[0].dims:
        tensors = tensors[:-1]
    if call.name.endswith("_"):
        return make_cost(0, tensors, [tensors[0]])
    shape = broadcast(*(tensor.dims for tensor in tensors))
    # A scalar is recorded as a tensor without dimensions and does not change the shape of the result.
    wide = [tensor for tensor in tensors if tensor.dims] or tensors
    kind = max((tensor.kind for tensor in wide), key=lambda kind: (kind in PRECISION, BYTES[kind]))
    return make_cost(0, tensors, [Tensor(shape, "bool" if call.name in _COMPARISONS else kind)])


def like_first(call: Call) -> OperatorCost:
    """Reads all inputs and writes a tensor of the first one's size: softmax, norms and their backward passes."""
    return make_cost(0, call.given, [call.tensor(0)])


def like_second(call: Call) -> OperatorCost:
    return make_cost(0, call.given, [call.tensor(1)])


def cross_entropy(call: Call) -> OperatorCost:
    """Reads the logits and targets, and writes the log-sum-exp of each row in fp32. The loss of a row does not count:
    it is read again at once."""
    rows = Tensor(call.tensor(1).dims, "double" if call.tensor(0).kind == "double" else "float")
    return make_cost(0, call.given, [rows])


def fused(call: Call) -> OperatorCost:
    """A kernel of TorchInductor: its arguments are the tensors that it reads and writes. One that may use only a part
    of an argument has no known cost."""
    if not call.given or _PARTIAL.search(call.name):
        raise UnknownCost
    return make_cost(0, call.given, [])


def copy(call: Call) -> OperatorCost:
    target, source = call.tensor(0), call.tensor(1)
    return make_cost(0, [source], [target])


def fill(call: Call) -> OperatorCost:
    target = call.tensor(0)
    cost = make_cost(0, [], [target])
    return msgspec.structs.replace(cost, dtype=PRECISION.get(target.kind))


def reduction(call: Call) -> OperatorCost:
    x = call.tensor(0)
    dims = _reduced(call.argument(1), len(x.dims))
    kept = tuple(size for place, size in enumerate(x.dims) if place not in dims)
    return make_cost(0, [x], [Tensor(kept, x.kind)])


def _reduced(text: str, rank: int) -> set[int]:
    """Return the dimensions that an argument names, all if it names none."""
    if text.lstrip("-").isdigit():
        return {int(text) % max(1, rank)}
    named = numbers(text) if text.startswith("[") else []
    return {place % max(1, rank) for place in named} or set(range(rank))


def embedding(call: Call) -> OperatorCost:
    weight, index = call.tensor(0), call.tensor(1)
    rows = Tensor((*index.dims, weight.dims[-1]), weight.kind)
    return make_cost(0, [rows, index], [rows])


def embedding_backward(call: Call) -> OperatorCost:
    grad, index = call.tensor(0), call.tensor(1)
    return make_cost(0, [grad, index], [Tensor((int(call.argument(2)), grad.dims[-1]), grad.kind)])


def index_select(call: Call) -> OperatorCost:
    x, index = call.tensor(0), call.tensor(2)
    place = int(call.argument(1)) % len(x.dims)
    rows = Tensor((*x.dims[:place], index.elements, *x.dims[place + 1 :]), x.kind)
    return make_cost(0, [rows, index], [rows])


def gather(call: Call) -> OperatorCost:
    x, index = call.tensor(0), call.tensor(2)
    taken = Tensor(index.dims, x.kind)
    return make_cost(0, [taken, index], [taken])
