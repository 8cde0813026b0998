"""Costs of the fused kernels of `stepscope.kernels`: norms, gated activations and rotary embeddings.

They contain no GEMM, so their cost is bytes. A dtype among the arguments is recorded as PyTorch's number of it.
"""

from stepscope.cost.calls import BYTES, Call, OperatorCost, Tensor, UnknownCost, make_cost

_DTYPES = {"5": "c10::Half", "6": "float", "7": "double", "15": "c10::BFloat16"}


def norm(call: Call) -> OperatorCost:
    """(x, weight, bias, eps, dtype of y). PyTorch's own operator of the same name has no dtype, and then it is x's."""
    x = call.tensor(0)
    y = Tensor(x.dims, _DTYPES.get(call.argument(4), x.kind))
    statistics = [] if call.argument(4) not in _DTYPES else [_statistics(x, 2 if "layer" in call.name else 1)]
    return make_cost(0, call.given, [y, *statistics])


def add_norm(call: Call) -> OperatorCost:
    """(x, branch, weight, bias, eps, dtype of y): writes the sum, in the wider dtype, and y."""
    x, branch = call.tensor(0), call.tensor(1)
    total = Tensor(x.dims, max((x.kind, branch.kind), key=lambda kind: BYTES[kind]))
    y = Tensor(x.dims, _dtype(call, 5))
    return make_cost(0, call.given, [total, y, _statistics(x, 2 if "layer" in call.name else 1)])


def norm_backward(call: Call) -> OperatorCost:
    """(dy, d_total, x, weight, statistics, dtypes of x and branch, whether the weight and the bias have gradients)."""
    x, weight = call.tensor(2), call.tensor(3)
    streams = [Tensor(x.dims, kind) for kind in dict.fromkeys((_dtype(call, 5), _dtype(call, 6)))]
    sums = [weight for place in (7, 8) if call.argument(place) == "True"]
    return make_cost(0, call.given, [*streams, *sums])


def _statistics(x: Tensor, count: int) -> int:
    """Bytes of one or two fp32 numbers per row."""
    return count * 4 * (x.elements // x.dims[-1]) if x.elements else 0


def _dtype(call: Call, place: int) -> str:
    found = _DTYPES.get(call.argument(place))
    if found is None:
        raise UnknownCost
    return found


def gated_backward(call: Call) -> OperatorCost:
    """(dy, gate, up): writes the gradients of the last two."""
    return make_cost(0, call.given, [call.tensor(1), call.tensor(2)])


def gated_packed(call: Call) -> OperatorCost:
    gate_up = call.tensor(0)
    return make_cost(0, [gate_up], [gate_up.bytes // 2])


def rope(call: Call) -> OperatorCost:
    """(q, k, tables): writes q and k."""
    return make_cost(0, call.given, [call.tensor(0), call.tensor(1)])


def rope_packed_backward(call: Call) -> OperatorCost:
    """(dq, dk, dv, tables): writes one gradient of the size of the three."""
    return make_cost(0, call.given, [call.tensor(0), call.tensor(1), call.tensor(2)])
