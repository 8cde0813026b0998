"""Operations whose time is that of moving bytes: elementwise, reductions, copies, indexing, and the optimizer's lists.

Each is called as a model calls it, in the dtypes and strides that occur. The time per element differs by more than the
bytes: a kernel that reads a broadcast scale, a strided slice or two dtypes does not vectorize its loads.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.measure.calibration.clock import Call, TimedCall
from stepscope.measure.environment import DTYPES

_ELEMENTS = tuple(2**power for power in (12, 15, 18, 20, 21, 22, 23, 24, 25, 26, 28))
_MOST_WARM = 2**25
_WIDTH = 1024  # of the rows in elementwise operations
_HEADS, _HEAD_DIM = 16, 64
_ROW_ELEMENTS = (2**16, 2**20, 2**22, 2**24, 2**27)
_COLUMNS = (64, 128, 512, 768, 1024, 2048, 4096, 10000, 32000, 50257, 151936)

# x and y have the same shape; `row` has one value per column, `column` one per row, both broadcast.
_Make = Callable[["_Inputs"], Call]


class _Inputs:
    """Tensors of `elements` elements, made when an operation asks for them."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, width: int = _WIDTH) -> None:
        self.elements, self.dtype, self.device = elements, dtype, device
        self.shape = (max(1, elements // width), min(width, elements))

    def new(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.rand(self.shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    @property
    def other_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype != torch.float32 else torch.bfloat16

    @property
    def row(self) -> Tensor:
        return torch.rand(self.shape[1], device=self.device).to(self.dtype)

    @property
    def column(self) -> Tensor:
        return torch.rand(self.shape[0], 1, device=self.device).to(self.dtype)

    @property
    def heads(self) -> Tensor:
        """The same elements as the output of a projection, split into heads."""
        return self.new().view(1, self.shape[0], -1, min(_HEAD_DIM, self.shape[1]))

    @property
    def heads_first(self) -> Tensor:
        return self.heads.transpose(1, 2).contiguous()


def _binary(operator: Callable[[Tensor, Tensor], Tensor]) -> _Make:
    def make(inputs: _Inputs) -> Call:
        x, y = inputs.new(), inputs.new()
        return lambda: operator(x, y)

    return make


def _unary(operator: Callable[[Tensor], object]) -> _Make:
    def make(inputs: _Inputs) -> Call:
        x = inputs.new()
        return lambda: operator(x)

    return make


def _with(second: Callable[[_Inputs], Tensor], operator: Callable[[Tensor, Tensor], object]) -> _Make:
    def make(inputs: _Inputs) -> Call:
        x, y = inputs.new(), second(inputs)
        return lambda: operator(x, y)

    return make


def _of(first: Callable[[_Inputs], Tensor], operator: Callable[[Tensor], object]) -> _Make:
    def make(inputs: _Inputs) -> Call:
        x = first(inputs)
        return lambda: operator(x)

    return make


def _mask(inputs: _Inputs) -> Tensor:
    return torch.rand(inputs.shape, device=inputs.device) > 0.5


def _square_scores(inputs: _Inputs) -> Tensor:
    """Scores of several heads: square matrices, of at most 512 rows."""
    side = min(512, 2 ** (int(math.log2(inputs.elements)) // 2))
    return inputs.new().view(-1, side, side)


def _causal_fill(inputs: _Inputs) -> Call:
    scores = _square_scores(inputs)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=inputs.device).triu(1)
    return lambda: scores.masked_fill_(mask, -1.0)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), dim=-1)


def _repeat_heads(x_BGLD: Tensor) -> Tensor:
    batch, groups, length, head_dim = x_BGLD.shape
    return x_BGLD[:, :, None].expand(batch, groups, 4, length, head_dim).reshape(batch, 4 * groups, length, head_dim)


_aten = torch.ops.aten

# The bytes of one call are those of x once for each entry of the comment: r read, w written.
_ELEMENTWISE: dict[str, _Make] = {
    "add": _binary(torch.add),  # r r w
    "mul": _binary(torch.mul),
    "sub": _binary(torch.sub),
    "div": _binary(torch.div),
    "add_": _binary(lambda x, y: x.add_(y, alpha=1e-9)),
    "mul_scalar": _unary(lambda x: x * 0.5),  # r w
    "add_scalar": _unary(lambda x: x + 1.0),
    "mul_": _unary(lambda x: x.mul_(1.0)),
    "neg": _unary(torch.neg),
    "pow": _unary(lambda x: x.pow(2)),
    "pow3": _unary(lambda x: x.pow(3.0)),
    "exp": _unary(torch.exp),
    "exp_": _unary(torch.Tensor.exp_),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "relu": _unary(torch.relu),
    "silu": _unary(functional.silu),
    "gelu": _unary(functional.gelu),
    "gelu_tanh": _unary(lambda x: functional.gelu(x, approximate="tanh")),
    "silu_backward": _binary(lambda x, y: _aten.silu_backward(x, y)),
    "gelu_backward": _binary(lambda x, y: _aten.gelu_backward(x, y)),
    "gelu_tanh_backward": _binary(lambda x, y: _aten.gelu_backward(x, y, approximate="tanh")),
    "threshold_backward": _binary(lambda x, y: _aten.threshold_backward(x, y, 0)),
    "tanh_backward": _binary(lambda x, y: _aten.tanh_backward(x, y)),
    "sigmoid_backward": _binary(lambda x, y: _aten.sigmoid_backward(x, y)),
    "mul_row": _with(lambda inputs: inputs.row, torch.mul),  # a weight or bias of the last dimension
    "mul_column": _with(lambda inputs: inputs.column, torch.mul),  # a scale of each row
    "div_column": _with(lambda inputs: inputs.column, torch.div),
    "sub_column_mixed": _with(lambda inputs: inputs.column.to(inputs.other_dtype), torch.sub),
    "mul_row_mixed": _with(lambda inputs: inputs.row.to(inputs.other_dtype), torch.mul),
    "mul_mixed": _with(lambda inputs: inputs.new(inputs.other_dtype), torch.mul),
    "add_mixed": _with(lambda inputs: inputs.new(inputs.other_dtype), torch.add),
    "cast": _unary(lambda x: x.to(torch.float32 if x.dtype != torch.float32 else torch.bfloat16)),
    "clone": _unary(torch.clone),
    "zero_": _unary(torch.Tensor.zero_),  # w
    "masked_fill": _with(_mask, lambda x, mask: x.masked_fill(mask, -1.0)),
    "masked_fill_scores": _causal_fill,
    "add_scores_mask": _of(_square_scores, lambda x: x + x[:1]),
    "where": _with(_mask, lambda x, mask: torch.where(mask, x, 0.0)),
    "native_dropout": _unary(lambda x: torch.native_dropout(x, 0.1, True)),  # r w, and a byte per element  # noqa: FBT003
    "split_heads": _of(lambda inputs: inputs.heads, lambda x: x.transpose(1, 2).contiguous()),
    "merge_heads": _of(lambda inputs: inputs.heads_first, lambda x: x.transpose(1, 2).contiguous()),
    "transpose_copy": _unary(lambda x: x.t().contiguous()),
    "half_copy": _unary(lambda x: x[..., : x.shape[-1] // 2].contiguous()),  # half of it
    "mul_even": _unary(lambda x: x[..., 0::2] * x[..., 1::2]),
    "mul_even_row": _with(
        lambda inputs: inputs.row[::2].float().contiguous(), lambda x, row: x[..., 0::2] * row
    ),  # an angle's cosine times every second element
    "mul_heads": _of(lambda inputs: inputs.heads, lambda x: x.transpose(1, 2) * x[:, :, :1, :].transpose(1, 2)),
    "cat_halves": _of(lambda inputs: inputs.heads_first, _rotate_half),
    "cat": _unary(lambda x: torch.cat((x, x), dim=-1)),
    "repeat_heads": _of(lambda inputs: inputs.heads_first, _repeat_heads),  # writes four times as much
    "stack_last": _unary(lambda x: torch.stack((x, x), dim=-1)),
    "slice_backward": _unary(
        lambda x: _aten.slice_backward(x, (x.shape[0], 2 * x.shape[1]), 1, 0, x.shape[1], 1)
    ),  # zeros of twice the size, and a copy
    "select_backward": _unary(lambda x: _aten.slice_backward(x, (x.shape[0], 2 * x.shape[1]), 1, 0, 2 * x.shape[1], 2)),
    "triu": _of(_square_scores, torch.triu),
}


def _norm(kind: str, *, backward: bool) -> _Make:
    def make(inputs: _Inputs) -> Call:
        x, dy, weight, width = inputs.new(), inputs.new(), inputs.row, [inputs.shape[1]]
        if kind == "layer_norm":
            _, mean, inverse = _aten.native_layer_norm(x, width, weight, weight, 1e-5)
            if backward:
                wanted = [True, True, True]
                return lambda: _aten.native_layer_norm_backward(dy, x, width, mean, inverse, weight, weight, wanted)
            return lambda: _aten.native_layer_norm(x, width, weight, weight, 1e-5)
        _, inverse = _aten._fused_rms_norm(x, width, weight, 1e-5)
        if backward:
            return lambda: _aten._fused_rms_norm_backward(dy, x, width, inverse, weight, [True, True])
        return lambda: _aten._fused_rms_norm(x, width, weight, 1e-5)

    return make


def _targets(inputs: _Inputs) -> Tensor:
    return torch.randint(inputs.shape[1], (inputs.shape[0],), device=inputs.device)


def _nll_backward(inputs: _Inputs) -> Call:
    x, targets = inputs.new(), _targets(inputs)
    _, weight = _aten.nll_loss_forward(x, targets, None, 1, -100)
    upstream = torch.ones((), device=inputs.device, dtype=inputs.dtype)
    return lambda: _aten.nll_loss_backward(upstream, x, targets, None, 1, -100, weight)


# Along the last dimension, or the first where the name says so.
_ROWS: dict[str, _Make] = {
    "softmax": _unary(lambda x: _aten._softmax(x, -1, False)),  # noqa: FBT003
    "softmax_backward": _binary(lambda x, y: _aten._softmax_backward_data(x, y, -1, x.dtype)),
    "log_softmax": _unary(lambda x: _aten._log_softmax(x, -1, False)),  # noqa: FBT003
    "log_softmax_backward": _binary(lambda x, y: _aten._log_softmax_backward_data(x, y, -1, x.dtype)),
    "layer_norm": _norm("layer_norm", backward=False),
    "layer_norm_backward": _norm("layer_norm", backward=True),
    "fused_rms_norm": _norm("rms_norm", backward=False),
    "fused_rms_norm_backward": _norm("rms_norm", backward=True),
    "sum_rows": _unary(lambda x: x.sum(0)),
    "sum_columns": _unary(lambda x: x.sum(-1, keepdim=True)),
    "mean_columns": _unary(lambda x: x.mean(-1, keepdim=True)),
    "amax_columns": _unary(lambda x: x.amax(-1, keepdim=True)),
    "sum_all": _unary(torch.sum),
    "nll_backward": _nll_backward,
    "gather_columns": _with(lambda inputs: _targets(inputs)[:, None], lambda x, index: x.gather(-1, index)),
    "scatter_columns": _with(
        lambda inputs: _targets(inputs)[:, None], lambda x, index: torch.zeros_like(x).scatter_add_(-1, index, x[:, :1])
    ),
}


def memory_cases(device: torch.device, *, most_elements: int = 2**28, every: int = 1) -> Iterator[TimedCall]:
    """Yield elementwise operations cold and warm, and operations along rows."""
    for precision in ("bf16", "fp32"):
        dtype = DTYPES[precision]
        for name, make in _ELEMENTWISE.items():
            for elements in _ELEMENTS[::every]:
                if elements > most_elements:
                    continue
                for warm in (False, True)[: 1 + (elements <= _MOST_WARM)]:
                    yield _elementwise(name, make, precision, _Inputs(elements, dtype, device), warm=warm)
        for name, make in _ROWS.items():
            for columns in _COLUMNS[::every]:
                for elements in _ROW_ELEMENTS[::every]:
                    if columns <= elements <= most_elements:
                        yield _by_row(name, make, precision, _Inputs(elements, dtype, device, columns))
    for elements in (2**20, 2**24, 2**26)[::every]:  # fp16 differs from bf16 in nothing that matters here
        for name in ("add", "gelu", "cast", "mul_row"):
            if elements <= most_elements:
                inputs = _Inputs(elements, torch.float16, device)
                yield _elementwise(name, _ELEMENTWISE[name], "fp16", inputs, warm=False)


def _elementwise(name: str, make: _Make, precision: str, inputs: _Inputs, *, warm: bool) -> TimedCall:
    return TimedCall(
        operation=name,
        dtype=precision,
        variant="warm" if warm else "cold",
        columns=("elements",),
        sizes=(inputs.elements,),
        make=lambda: make(inputs),
        fresh_bytes=0 if warm else 2 * inputs.elements * inputs.dtype.itemsize,
    )


def _by_row(name: str, make: _Make, precision: str, inputs: _Inputs) -> TimedCall:
    rows, columns = inputs.shape
    return TimedCall(
        operation=name,
        dtype=precision,
        columns=("rows", "columns"),
        sizes=(rows, columns),
        make=lambda: make(inputs),
        fresh_bytes=2 * rows * columns * inputs.dtype.itemsize,
    )


# --- Embeddings -------------------------------------------------------------------------------------------------------

_TOKENS = (512, 2048, 8192, 32768)
_EMBEDDINGS = ((10000, 768), (32000, 2048), (50257, 768), (50257, 1600), (128256, 1024), (151936, 2560))
_INDEXING = ("embedding", "embedding_backward", "index_select", "index_add", "index_put", "sort_tokens")


def index_cases(device: torch.device, *, every: int = 1) -> Iterator[TimedCall]:
    for precision in ("fp32", "bf16"):
        for vocab, width in _EMBEDDINGS[::every]:
            for tokens in _TOKENS[::every]:
                for name in _INDEXING:
                    yield _indexing(name, precision, tokens, vocab, width, device)


def _indexing(name: str, precision: str, tokens: int, vocab: int, width: int, device: torch.device) -> TimedCall:
    dtype = DTYPES[precision]
    weights: list[Tensor] = []

    def make() -> Call:
        ids = torch.randint(vocab, (tokens,), device=device)
        rows = torch.randn(tokens, width, device=device, dtype=dtype)
        if not weights:
            weights.append(torch.randn(vocab, width, device=device, dtype=dtype))
        weight = weights[0]
        calls: dict[str, Call] = {
            "embedding": lambda: functional.embedding(ids, weight),
            "embedding_backward": lambda: _aten.embedding_dense_backward(rows, ids, vocab, -1, False),  # noqa: FBT003
            "index_select": lambda: weight.index_select(0, ids),
            "index_add": lambda: torch.zeros_like(weight).index_add_(0, ids, rows),
            "index_put": lambda: torch.zeros_like(weight).index_put_((ids,), rows, accumulate=True),
            "sort_tokens": lambda: ids.sort(),
        }
        return calls[name]

    return TimedCall(
        operation=name,
        dtype=precision,
        columns=("tokens", "vocab", "width"),
        sizes=(tokens, vocab, width),
        make=make,
        fresh_bytes=tokens * width * dtype.itemsize * 2,
    )


# --- Lists of tensors, as optimizers update them ----------------------------------------------------------------------

_LISTS = ((16, 2**12), (64, 2**16), (100, 2**19), (48, 2**20), (24, 2**22), (300, 2**18), (8, 2**25), (200, 2**10))


def _foreach(name: str, tensors: list[list[Tensor]]) -> Call:
    params, grads, first, second = tensors
    steps = [torch.ones((), device=params[0].device) for _ in params]
    scalars = [-1e-9] * len(params)
    calls: dict[str, Call] = {
        "foreach_mul": lambda: torch._foreach_mul_(params, 1.0),
        "foreach_add": lambda: torch._foreach_add_(params, grads, alpha=1e-9),
        "foreach_lerp": lambda: torch._foreach_lerp_(first, grads, 0.1),
        "foreach_addcmul": lambda: torch._foreach_addcmul_(second, grads, grads, 0.001),
        "foreach_sqrt": lambda: torch._foreach_sqrt(second),
        "foreach_div": lambda: torch._foreach_div_(second, 1.0),
        "foreach_addcdiv": lambda: torch._foreach_addcdiv_(params, first, second, scalars),
        "foreach_norm": lambda: torch._foreach_norm(grads),
        "foreach_zero": lambda: torch._foreach_zero_(grads),
        "fused_adamw": lambda: torch._fused_adamw_(
            params,
            grads,
            first,
            second,
            [],
            steps,
            lr=1e-9,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        ),
    }
    return calls[name]


_FOREACH = (
    *("foreach_mul", "foreach_add", "foreach_lerp", "foreach_addcmul", "foreach_sqrt", "foreach_div"),
    *("foreach_addcdiv", "foreach_norm", "foreach_zero", "fused_adamw"),
)


def list_cases(device: torch.device, *, most_elements: int = 2**30, every: int = 1) -> Iterator[TimedCall]:
    for name in _FOREACH:
        for tensors, elements in _LISTS[::every]:
            if tensors * elements <= most_elements:
                yield _list_case(name, tensors, elements, device)


def _list_case(name: str, tensors: int, elements: int, device: torch.device) -> TimedCall:
    def make() -> Call:
        return _foreach(name, [[torch.rand(elements, device=device) for _ in range(tensors)] for _ in range(4)])

    return TimedCall(
        operation=name,
        dtype="fp32",
        columns=("tensors", "elements"),
        sizes=(tensors, elements),
        make=make,
        fresh_bytes=4 * tensors * elements * 4,
    )
