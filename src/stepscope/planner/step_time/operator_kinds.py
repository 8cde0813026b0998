"""What each operator is: which measured operation its kernels resemble, and what it costs the host.

Names are those of the dispatcher without namespace and overload. An operator that is not listed is elementwise, which
most are.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stepscope.planner.operation import Operation

HostClass = Literal[
    "view", "free", "product", "attention", "norm", "reduction", "pointwise", "copy", "creation", "index", "list", "own"
]

# They launch nothing.
VIEWS = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze"),
        *("squeeze", "split", "split_with_sizes", "chunk", "unbind", "as_strided", "narrow", "diagonal", "movedim"),
        *("flatten", "unflatten", "_reshape_alias", "view_as_real", "view_as_complex", "expand_as", "swapaxes"),
    }
)
# They launch nothing, and outside a simulation most of them are not called at all.
FREE = frozenset(
    {"detach", "detach_", "alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "set_"}
)
GROUPED = "_grouped_mm"
MERGED_SIZES = "merged_sizes"  # an argument of a product that stands for several: rows, columns and depth
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "addmv", "mv", "dot", GROUPED})
_WAITING = frozenset({"_local_scalar_dense", "item", "nonzero"})
COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous", "cat", "stack", "repeat", "repeat_interleave", "copy"})
CREATIONS = frozenset(
    {
        *(
            "zeros",
            "ones",
            "full",
            "zeros_like",
            "ones_like",
            "full_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "arange",
        ),
        *("zero_", "fill_", "scalar_tensor", "rand", "randn", "bernoulli_", "tril", "triu", "new_empty_strided", "eye"),
    }
)
REDUCTIONS = {
    "sum": "sum",
    "mean": "mean",
    "amax": "amax",
    "amin": "amax",
    "max": "amax",
    "min": "amax",
    "argmax": "amax",
    "any": "amax",
    "all": "amax",
    "var_mean": "mean",
    "var": "mean",
    "norm": "sum",
    "linalg_vector_norm": "sum",
    "logsumexp": "sum",
    "cumsum": "sum",
    "prod": "sum",
}
# Operators along rows, with the name of what was measured and the number of passes over the rows in memory.
ROWS = {
    "_softmax": ("softmax", 2),
    "_softmax_backward_data": ("softmax_backward", 3),
    "_safe_softmax": ("softmax", 2),
    "_log_softmax": ("log_softmax", 2),
    "_log_softmax_backward_data": ("log_softmax_backward", 3),
    "native_layer_norm": ("layer_norm", 2),
    "native_layer_norm_backward": ("layer_norm_backward", 3),
    "_fused_rms_norm": ("fused_rms_norm", 2),
    "_fused_rms_norm_backward": ("fused_rms_norm_backward", 3),
    "nll_loss_backward": ("nll_backward", 1),
    "native_group_norm": ("layer_norm", 2),
    "native_group_norm_backward": ("layer_norm_backward", 3),
}
INDEXING = {
    "embedding": "embedding",
    "embedding_dense_backward": "embedding_backward",
    "index_select": "index_select",
    "index_add": "index_add",
    "index_add_": "index_add",
    "index_put": "index_put",
    "index_put_": "index_put",
    "_index_put_impl_": "index_put",
    "index": "index_select",
    "sort": "sort_tokens",
    "argsort": "sort_tokens",
    "topk": "sort_tokens",
}
LISTS = {
    "_foreach_mul": "foreach_mul",
    "_foreach_mul_": "foreach_mul",
    "_foreach_add": "foreach_add",
    "_foreach_add_": "foreach_add",
    "_foreach_sub_": "foreach_add",
    "_foreach_lerp_": "foreach_lerp",
    "_foreach_addcmul_": "foreach_addcmul",
    "_foreach_addcmul": "foreach_addcmul",
    "_foreach_sqrt": "foreach_sqrt",
    "_foreach_sqrt_": "foreach_sqrt",
    "_foreach_div_": "foreach_div",
    "_foreach_div": "foreach_div",
    "_foreach_addcdiv_": "foreach_addcdiv",
    "_foreach_norm": "foreach_norm",
    "_foreach_zero_": "foreach_zero",
    "_foreach_copy_": "foreach_add",
    "_foreach_neg": "foreach_sqrt",
    "_foreach_reciprocal_": "foreach_sqrt",
    "_foreach_maximum_": "foreach_add",
    "_fused_adamw_": "fused_adamw",
    "_fused_adam_": "fused_adamw",
    "_fused_sgd_": "foreach_lerp",
    "_amp_foreach_non_finite_check_and_unscale_": "foreach_mul",
}
# Elementwise operators by the measured one that they are, and the bytes that the measured one moves per element: how
# often it moves a tensor of its dtype, and bytes on top.
ELEMENTWISE = {
    "add": ("add", "add_scalar"),
    "add_": ("add_", "mul_"),
    "sub": ("sub", "add_scalar"),
    "sub_": ("add_", "mul_"),
    "rsub": ("sub", "add_scalar"),
    "mul": ("mul", "mul_scalar"),
    "mul_": ("add_", "mul_"),
    "div": ("div", "mul_scalar"),
    "div_": ("add_", "mul_"),
    "neg": ("mul", "neg"),
    "exp": ("mul", "exp"),
    "exp_": ("mul", "exp_"),
    "log": ("mul", "exp"),
    "sqrt": ("mul", "exp"),
    "rsqrt": ("mul", "exp"),
    "reciprocal": ("mul", "exp"),
    "sigmoid": ("mul", "sigmoid"),
    "tanh": ("mul", "tanh"),
    "relu": ("mul", "relu"),
    "silu": ("mul", "silu"),
    "gelu": ("mul", "gelu"),
    "silu_backward": ("silu_backward", "silu"),
    "gelu_backward": ("gelu_backward", "gelu"),
    "threshold_backward": ("threshold_backward", "relu"),
    "tanh_backward": ("tanh_backward", "tanh"),
    "sigmoid_backward": ("sigmoid_backward", "sigmoid"),
    "where": ("where", "where"),
    "masked_fill_": ("masked_fill_scores", "masked_fill_scores"),
    "native_dropout": ("native_dropout", "native_dropout"),
    "native_dropout_backward": ("native_dropout", "native_dropout"),
}
BYTES_PER_ELEMENT = {
    "zero_": (1, 0),
    "masked_fill": (4, 1),
    "masked_fill_scores": (2, 0),
    "where": (2, 1),
    "native_dropout": (2, 1),
    "mul_row": (2, 0),
    "mul_column": (2, 0),
    "mul_mixed": (0, 10),
    "add_mixed": (0, 10),
    "cast": (0, 6),
    "mul_even": (1.5, 0),
    "half_copy": (1, 0),
    "cat": (4, 0),
    "cat_halves": (2, 0),
    "repeat_heads": (5, 0),
    "slice_backward": (4, 0),
    "select_backward": (4, 0),
    "stack_last": (4, 0),
    "mul_even_row": (0.5, 2),
    "sub_column_mixed": (1, 4),
    "mul_row_mixed": (1, 4),
    **dict.fromkeys(("add", "mul", "sub", "div", "add_", "silu_backward", "gelu_backward", "add_scores_mask"), (3, 0)),
    **dict.fromkeys(("gelu_tanh_backward", "threshold_backward", "tanh_backward", "sigmoid_backward"), (3, 0)),
}
TWO_PASSES = (2, 0)  # of operations that are not listed above: read and written once
# stepscope's own operators by what was measured, and the passes over their largest tensor.
OWN = {
    "rms_norm": ("own_rms_norm", "forward"),
    "add_rms_norm": ("own_add_rms_norm", "forward"),
    "rms_norm_backward": ("own_add_rms_norm", "backward"),
    "layer_norm": ("own_layer_norm", "forward"),
    "add_layer_norm": ("own_add_rms_norm", "forward"),
    "layer_norm_backward": ("own_layer_norm", "backward"),
    "gated_activation": ("own_swiglu_packed", "forward"),
    "gated_activation_packed": ("own_swiglu_packed", "forward"),
    "gated_activation_backward": ("own_swiglu_packed", "backward"),
    "gated_activation_packed_backward": ("own_swiglu_packed", "backward"),
    "gated_activation_packed_again": ("own_swiglu_packed", "backward"),
    "rope": ("own_rope_packed", "forward"),
    "rope_packed": ("own_rope_packed", "forward"),
    "rope_packed_backward": ("own_rope_packed", "backward"),
    "cross_entropy": ("own_cross_entropy", "forward"),
    "cross_entropy_backward": ("own_cross_entropy", "backward"),
}
# Kernels that an operator launches, where it is not one.
LAUNCHES = {
    "slice_backward": 2,
    "select_backward": 2,
    "masked_fill": 2,
    "_softmax_backward_data": 2,
    "_safe_softmax": 4,
    "native_layer_norm_backward": 2,
    "_fused_rms_norm_backward": 2,
    "embedding_dense_backward": 8,
    GROUPED: 2,
    "index_put": 8,
    "index_put_": 8,
    "_index_put_impl_": 8,
    "sort": 3,
    "nll_loss_backward": 2,
    "rms_norm_backward": 2,
    "layer_norm_backward": 2,
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
}


def short_name(name: str) -> str:
    """`aten.mm.default` as `mm`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def waits_for_gpu(operation: "Operation") -> bool:
    """Whether the host waits for what the GPU has not done yet, because it reads a value, or copies one to the GPU from
    memory that is not pinned."""
    return short_name(operation.name) in _WAITING or count_calls(operation) > 1 or _is_upload(operation)


def _is_upload(operation: "Operation") -> bool:
    """Whether an operator copies from the CPU to the GPU and returns only when it has: indexing with a list does."""
    if short_name(operation.name) not in ("_to_copy", "copy_") or operation.arguments.get("non_blocking"):
        return False
    return operation.inputs[-1].storage < 0 <= operation.outputs[0].storage


def count_calls(operation: "Operation") -> int:
    """How many operators the host calls for this one. A grouped GEMM is one kernel in bf16, and in other precisions a
    loop over its groups, whose sizes the host reads."""
    if short_name(operation.name) != GROUPED or operation.inputs[0].dtype == "bfloat16":
        return 1
    return group_sizes(operation)[0]


def group_sizes(operation: "Operation") -> tuple[int, int, int, int]:
    """The number of groups of a grouped GEMM, and rows, columns and depth of one if all are alike."""
    left, right, *offsets = (fact.shape for fact in operation.inputs)
    groups = offsets[0][0] if offsets else left[0]
    rows, columns, depth = left[-2], right[-1], left[-1]
    if len(left) == len(right) == 2:
        depth //= groups
    elif len(left) == 2:
        rows //= groups
    elif len(right) == 2:
        columns //= groups
    return groups, max(1, rows), max(1, columns), max(1, depth)


def host_class(name: str) -> HostClass:
    """The kind of work that a call of this operator is for the host. `name` may lack `aten.` and `.default`."""
    is_own = name.startswith("stepscope")
    short = short_name(name) if name.startswith(("aten.", "stepscope.")) else name.split(".")[0]
    if is_own:
        return "own"
    if short in VIEWS:
        return "view"
    if short in FREE:
        return "free"
    if short in PRODUCTS:
        return "product"
    if "attention" in short:
        return "attention"
    if short in LISTS or short.startswith(("_foreach", "_fused_adam", "_fused_sgd")):
        return "list"
    if short in ROWS:
        return "norm"
    if short in REDUCTIONS:
        return "reduction"
    if short in COPIES:
        return "copy"
    if short in CREATIONS:
        return "creation"
    return "index" if short in INDEXING else "pointwise"
