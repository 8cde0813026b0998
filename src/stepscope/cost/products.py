"""Costs of operators that consist of GEMMs: GEMMs themselves, attention and convolution."""

import math
from collections.abc import Callable, Sequence

import msgspec

from stepscope.cost.calls import Call, OperatorCost, Tensor, UnknownCost, broadcast, make_cost, numbers

BACKWARD_PRODUCTS = 2.5  # the backward of attention has five GEMMs (one recomputed), forward two

Form = Callable[[Call], OperatorCost]


# --- GEMMs


def product(first: int, *, added: int | None = None) -> Form:
    """Return the cost of a GEMM of the tensors at `first` and the next position, with two or three dimensions, plus the
    tensor at `added`."""

    def cost(call: Call) -> OperatorCost:
        left, right = call.tensor(first), call.tensor(first + 1)
        return _multiply(left, right, [call.tensor(added)] if added is not None else [])

    return cost


def _multiply(left: Tensor, right: Tensor, added: Sequence[Tensor]) -> OperatorCost:
    if len(left.dims) < 2 or len(right.dims) < 2 or left.dims[-1] != right.dims[-2]:
        raise UnknownCost
    result = (*broadcast(left.dims[:-2], right.dims[:-2]), left.dims[-2], right.dims[-1])
    flops = 2 * math.prod(result) * left.dims[-1]
    return make_cost(flops, [left, right, *added], [Tensor(result, left.kind)])


def linear(call: Call) -> OperatorCost:
    x, weight = call.tensor(0), call.tensor(1)
    if not x.dims or len(weight.dims) != 2 or x.dims[-1] != weight.dims[1]:
        raise UnknownCost
    result = (*x.dims[:-1], weight.dims[0])
    bias = [tensor for tensor in call.tensors[2:3] if tensor is not None]
    return make_cost(2 * math.prod(result) * x.dims[-1], [x, weight, *bias], [Tensor(result, x.kind)])


def matmul(call: Call) -> OperatorCost:
    left, right = call.tensor(0), call.tensor(1)
    if not left.dims or not right.dims:
        raise UnknownCost
    wide_left = left if len(left.dims) > 1 else Tensor((1, *left.dims), left.kind)
    wide_right = right if len(right.dims) > 1 else Tensor((*right.dims, 1), right.kind)
    return _multiply(wide_left, wide_right, [])


# --- Attention


def visible_pairs(queries: int, keys: int, *, causal: bool, window: tuple[int, int] = (-1, -1)) -> float:
    """Return how many pairs of a query and a key count: half of all under a causal mask, and exactly the visible ones
    with a window, which is how many keys a query sees before and after its own position (negative: all)."""
    left, right = window
    if left < 0 and right < 0:
        return queries * keys / 2 if causal else queries * keys
    last = 0 if causal else right if right >= 0 else queries + keys
    first = left if left >= 0 else queries + keys
    return _pairs_up_to(last, queries, keys) - _pairs_up_to(-first - 1, queries, keys)


def _pairs_up_to(distance: int, queries: int, keys: int) -> int:
    """Return the number of pairs whose key is at most this far after the position of the query. The last query is
    aligned with the last key. Each query sees one key more than the one before it: first none, in the end all."""
    seen_by_last = keys + distance

    def triangle(size: int) -> int:
        return max(0, size) * (max(0, size) + 1) // 2

    ramp = triangle(seen_by_last) - triangle(seen_by_last - queries)
    beyond = triangle(seen_by_last - keys) - triangle(seen_by_last - keys - queries)
    return ramp - beyond


def attention_columns(head_dim: int, value_dim: int, *, backward: bool) -> int:
    """Return the multiply-adds of attention per pair of a query and a key, for the head dims of q and k, and of v.
    Forward has the scores and the output. Backward has the scores again and the gradients of q and k, and those of the
    weights and of v.
    """
    return 3 * head_dim + 2 * value_dim if backward else head_dim + value_dim


def attention(
    causal_at: int, *, window_at: int | None = None, backward: bool = False, heads_first: bool = True
) -> Form:
    """Return the cost of attention. `causal_at` is the position of `is_causal`, or of the kind of mask, where 0 means
    none; `window_at` that of the first number of a window. If the arguments were not recorded, the full square
    counts."""

    def cost(call: Call) -> OperatorCost:
        start = 1 if backward else 0
        q, k, v = (call.tensor(start + place) for place in range(3))
        if not len(q.dims) == len(k.dims) == len(v.dims) == 4:
            raise UnknownCost  # packed sequences of different lengths: only their sum is known
        length_at, heads_at = (2, 1) if heads_first else (1, 2)
        batch, heads, queries, keys = q.dims[0], q.dims[heads_at], q.dims[length_at], k.dims[length_at]
        causal = call.argument(causal_at) in ("True", "1", "2")
        window = (-1, -1) if window_at is None else (_limit(call, window_at), _limit(call, window_at + 1))
        pairs = visible_pairs(queries, keys, causal=causal, window=window)
        flops = 2 * batch * heads * pairs * attention_columns(q.dims[3], v.dims[3], backward=backward)
        out = Tensor((*q.dims[:3], v.dims[3]), q.kind)
        if backward:
            return make_cost(flops, [q, k, v, out, out], [q, k, v])
        return make_cost(flops, [q, k, v], [out])

    return cost


def _limit(call: Call, place: int) -> int:
    return int(call.argument(place) or "-1")


# --- Convolution


def convolution(padding_at: int, stride_at: int, groups_at: int, transposed_at: int | None = None) -> Form:
    """The dilation follows padding or stride: always at position 5, or one position after the last."""
    dilation_at = max(padding_at, stride_at) + 1

    def cost(call: Call) -> OperatorCost:
        x, weight = call.tensor(0), call.tensor(1)
        groups = int(call.argument(groups_at) or "1")
        inside = len(x.dims) - 2
        if inside < 1 or len(weight.dims) != len(x.dims):
            raise UnknownCost
        if transposed_at is not None and call.argument(transposed_at) == "True":
            raise UnknownCost
        steps, pads, spread = (_spread(call.argument(at), inside) for at in (stride_at, padding_at, dilation_at))
        out = tuple(
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, gap in zip(x.dims[2:], weight.dims[2:], steps, pads, spread, strict=True)
        )
        result = Tensor((x.dims[0], weight.dims[0], *out), x.kind)
        # A weight is (out, in / groups, *kernel): each output element takes as many multiply-adds as its row has
        # elements.
        if x.dims[1] != weight.dims[1] * groups:
            raise UnknownCost
        return make_cost(2 * result.elements * math.prod(weight.dims[1:]), [x, weight], [result])

    return cost


def _spread(text: str, length: int) -> list[int]:
    given = numbers(text)
    return given * length if len(given) == 1 else given


def convolution_backward(call: Call) -> OperatorCost:
    grad, x, weight = (call.tensor(place) for place in range(3))
    mask = msgspec.json.decode(call.argument(10).lower(), type=list[bool])
    if len(mask) != 3 or call.argument(7) == "True":
        raise UnknownCost
    one = 2 * grad.elements * math.prod(weight.dims[1:])
    read = [grad, *([weight] if mask[0] else []), *([x] if mask[1] else [])]
    written: list[Tensor | int] = [tensor for tensor, wanted in zip((x, weight), mask, strict=False) if wanted]
    return make_cost(one * sum(mask[:2]), read, written)
