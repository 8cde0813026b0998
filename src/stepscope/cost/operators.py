"""FLOPs and bytes of one operator, from its shapes, dtypes and arguments in PyTorch's profiler.

FLOPs follow the convention of `model.py`: two operations per multiply-add, GEMMs only, causal attention as half. Bytes
are the minimum: every input read once, every output written once. A kernel that reads a tensor twice moves more, which
shows as a low share of the bandwidth; one that finds its input in the cache moves less, which shows as over 100%.

The cost of an unknown operator, or of one with insufficient data, is None, not zero.
"""

import re
from typing import Any

import msgspec

from stepscope.cost import fused, products, traffic
from stepscope.cost.calls import OperatorCost, UnknownCost, parse_call
from stepscope.cost.products import Form

SOFTMAX_OPERATIONS = 5
_MOST = 2**56  # operations or bytes per call: hours on any device. Anything above is not plausible
SOFTMAX_CONVENTION = (
    "5 operations per softmax element: compare for the maximum, subtract it, exponential, add, divide. A common "
    "convention of 3 (exponential, add, divide) gives 3/5 of that. Softmax does not count in the FLOPs of a step"
)


def operator_cost(name: str, shapes: str | None, dtypes: str | None, arguments: str | None) -> OperatorCost | None:
    """Return the cost of a call of `name`. The other arguments are JSON as recorded: `Input Dims`, `Input type` and
    `Concrete Inputs`. None if the operator is unknown or they are not sufficient."""
    bare = name.rpartition("::")[2].partition(".")[0]
    form = _FORMS.get(bare) or (traffic.fused if _INDUCTOR.match(bare) else None)
    if form is None or not shapes or not dtypes:
        return None
    try:
        found = form(parse_call(bare, shapes, dtypes, arguments))
        return found if max(found.flops, found.bytes) <= _MOST else None
    except (UnknownCost, msgspec.DecodeError, msgspec.ValidationError, IndexError, ValueError, OverflowError):
        return None


def softmax_flops(elements: int) -> int:
    """Return the operations of a softmax, by `SOFTMAX_CONVENTION`."""
    return SOFTMAX_OPERATIONS * elements


def attention_flops(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int | None = None,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    backward: bool = False,
) -> int:
    """Return the operations of a forward or backward pass. `value_dim` is the head dim of v, by default that of q. A
    causal mask counts as half. With a window, which is how many keys a query sees before and after its own position
    (negative: all), the visible pairs count.
    """
    pairs = products.visible_pairs(queries, keys, causal=causal, window=window)
    columns = products.attention_columns(head_dim, head_dim if value_dim is None else value_dim, backward=backward)
    return batch * heads * columns * int(2 * pairs)


def linear_cross_entropy_flops(*, tokens: int, width: int, vocab: int, gradients: int) -> int:
    """Return the operations of linear + cross entropy: the logits, and as many gradients as are computed with them, of
    x and of the weight. In a trace the operator has no cost of its own, because its GEMMs are operators inside it.
    """
    return 2 * tokens * width * vocab * (1 + gradients)


def product_dims(name: str, shapes: str | None) -> tuple[int, int, int, int] | None:
    """Return batch, M, N and K of a GEMM, None for any other operator."""
    places = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
    bare = name.rpartition("::")[2].partition(".")[0]
    if bare not in places or not shapes:
        return None
    try:
        dims = msgspec.json.decode(shapes, type=list[Any])
        left, right = (dims[place] for place in places[bare])
        if not (len(left) == len(right) in (2, 3) and all(type(size) is int for size in (*left, *right))):
            return None
    except (msgspec.DecodeError, msgspec.ValidationError, IndexError, TypeError):
        return None
    return (left[0] if len(left) == 3 else 1), left[-2], right[-1], left[-1]


# The kernels that TorchInductor generates: pointwise, reductions, and reductions that fit into a block.
_INDUCTOR = re.compile(r"triton_(?:poi|red|per)_fused_")
_POINTWISE = """
abs add addcdiv addcmul bernoulli bitwise_and bitwise_not ceil clamp clamp_max clamp_min cos cumsum div dropout elu
elu_backward eq erf exp exp2 expm1 floor ge gelu gelu_backward gt hardswish isfinite isinf isnan le leaky_relu lerp log
log1p log_sigmoid_forward logical_and logical_not lt masked_fill maximum minimum mul native_dropout ne neg pow
reciprocal relu rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward sin softplus sqrt square sub tanh
tanh_backward threshold_backward tril triu where
"""
_REDUCTIONS = "sum mean amax amin max min norm linalg_vector_norm prod var std any all argmax argmin logsumexp"
_LIKE_FIRST = """
native_layer_norm native_batch_norm cudnn_batch_norm miopen_batch_norm native_group_norm _fused_rms_norm
_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
"""
_LIKE_SECOND = """
native_layer_norm_backward native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward
native_group_norm_backward _fused_rms_norm_backward
"""
_FORMS: dict[str, Form] = {
    **{name + suffix: traffic.elementwise for name in _POINTWISE.split() for suffix in ("", "_")},
    **dict.fromkeys(_REDUCTIONS.split(), traffic.reduction),
    **dict.fromkeys(_LIKE_FIRST.split(), traffic.like_first),
    **dict.fromkeys(_LIKE_SECOND.split(), traffic.like_second),
    "copy_": traffic.copy,
    "fill_": traffic.fill,
    "zero_": traffic.fill,
    "embedding": traffic.embedding,
    "embedding_dense_backward": traffic.embedding_backward,
    "index_select": traffic.index_select,
    "gather": traffic.gather,
    "mm": products.product(0),
    "bmm": products.product(0),
    "_scaled_mm": products.product(0),
    "addmm": products.product(1, added=0),
    "baddbmm": products.product(1, added=0),
    "linear": products.linear,
    "matmul": products.matmul,
    "convolution": products.convolution(4, 3, 8, transposed_at=6),
    "_convolution": products.convolution(4, 3, 8, transposed_at=6),
    "conv1d": products.convolution(4, 3, 6),
    "conv2d": products.convolution(4, 3, 6),
    "conv3d": products.convolution(4, 3, 6),
    "cudnn_convolution": products.convolution(2, 3, 5),
    "miopen_convolution": products.convolution(3, 4, 6),
    "mkldnn_convolution": products.convolution(3, 4, 6),
    "convolution_backward": products.convolution_backward,
    "_scaled_dot_product_flash_attention": products.attention(4),
    "_scaled_dot_product_efficient_attention": products.attention(6),
    "_scaled_dot_product_cudnn_attention": products.attention(6),
    "_scaled_dot_product_flash_attention_backward": products.attention(11, backward=True),
    "_scaled_dot_product_efficient_attention_backward": products.attention(11, backward=True),
    "_scaled_dot_product_cudnn_attention_backward": products.attention(14, backward=True),
    "_flash_attention_forward": products.attention(8, heads_first=False),
    "_flash_attention_backward": products.attention(11, backward=True, heads_first=False),
    "_efficient_attention_forward": products.attention(9, heads_first=False),
    "_efficient_attention_backward": products.attention(14, backward=True, heads_first=False),
    "_cudnn_attention_forward": products.attention(10),
    # our own, `stepscope::`
    "flash_attention_forward": products.attention(3, window_at=8),
    "flash_attention_backward": products.attention(6, window_at=11, backward=True),
    **dict.fromkeys(("rms_norm", "layer_norm"), fused.norm),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm"), fused.add_norm),
    **dict.fromkeys(("rms_norm_backward", "layer_norm_backward"), fused.norm_backward),
    "gated_activation": traffic.elementwise,
    "gated_activation_backward": fused.gated_backward,
    "gated_activation_packed": fused.gated_packed,
    "gated_activation_packed_backward": traffic.like_second,
    "rope": fused.rope,
    "rope_packed": traffic.like_first,
    "rope_packed_backward": fused.rope_packed_backward,
    "cross_entropy": traffic.cross_entropy,
    "cross_entropy_backward": traffic.like_second,
}
