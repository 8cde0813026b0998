"""Kernels that torch.compile generated: `triton_poi_fused_add_mul_0` lists its operations.

The operations are joined with underscores (`_to_copy_mean_pow_rsqrt`), so they are matched greedily against the list of
names that contain underscores. A kernel often does several things; its class is the most specific one: a loss before a
softmax before a norm before anything common.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.vocabulary import Direction, KernelClass, KernelName, build, part

_GENERATED = re.compile(
    r"triton_(?P<kind>poi|red|per|tem|for|unk|foreach|combo|split_scan|scan|sca)?_?(?:fused_?)(?P<rest>\w*)$"
)
_TEMPLATE = re.compile(
    r"triton_(?P<what>mm|bmm|addmm|baddbmm|mixed_mm|scaled_mm|_scaled_mm|flex_attention|flex_attention_backward|flex_decoding|convolution\w*|grouped_mm\w*|tem_\w*mm)(?:_\d+|\d*)?(?:_.*)?$"
)
_OLD = re.compile(r"triton__(?:0d|\d+$|\w*$)")
_NUMBER = re.compile(r"_?(\d+)$")
_KINDS = {
    "poi": "pointwise: each element independently",
    "red": "a reduction that loops over its dimension",
    "per": "a persistent reduction: the reduced dimension fits into one block",
    "tem": "from a template: a GEMM, convolution or attention, with operations fused onto it",
    "for": "one kernel for a list of tensors (foreach)",
    "foreach": "one kernel for a list of tensors (foreach)",
    "combo": "several independent kernels in one launch",
    "unk": "kind not decided by Inductor",
    "scan": "a running sum or product",
    "sca": "a running sum or product",
    "split_scan": "a running sum or product over several blocks",
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that determine the class, and others whose names contain underscores.
_LOSS = _names(
    """
    _log_softmax _log_softmax_backward_data binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss
    huber_loss kl_div l1_loss log_softmax logsumexp mse_loss mse_loss_backward nll_loss nll_loss2d_backward
    nll_loss2d_forward nll_loss_backward nll_loss_forward smooth_l1_loss
    """
)
_SOFTMAX = _names("_safe_softmax _softmax _softmax_backward_data prepare_softmax_online softmax")
_NORM = _names(
    """
    _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training batch_norm cudnn_batch_norm
    cudnn_batch_norm_backward fused_add_rms_norm group_norm instance_norm layer_norm native_batch_norm
    native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward rms_norm
    """
)
_EMBEDDING = _names("_embedding_bag embedding embedding_dense_backward")
_OPTIMIZER = _names(
    """
    _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_copy _foreach_div _foreach_lerp _foreach_mul
    _foreach_sqrt _fused_adam _fused_adamw _fused_sgd addcdiv
    """
)
_RANDOM = _names(
    """
    bernoulli dropout exponential inductor_lookup_seed inductor_randint inductor_random inductor_seeds
    native_dropout native_dropout_backward rand rand_like randn randn_like uniform
    """
)
_INDEX = _names(
    """
    _unsafe_index _unsafe_index_put _unsafe_masked_index gather index index_add index_copy index_put index_select
    scatter scatter_add scatter_reduce select_scatter slice_scatter take
    """
)
_SORT = _names("argsort sort topk")
_COPY = _names(
    """
    _reshape_alias _to _to_copy _unsafe_view alias as_strided cat chunk clone constant_pad_nd contiguous
    convert_element_type copy copy_ detach expand flip narrow permute repeat reshape roll select select_backward
    slice slice_backward split split_with_sizes squeeze stack t to transpose unbind unfold unsqueeze view
    """
)
_GEMM = _names(
    """
    _grouped_mm _int_mm _scaled_grouped_mm _scaled_mm addmm baddbmm bmm cutlass_scaled_mm grouped_mm mixed_mm mm
    """
)
_ATTENTION = _names(
    """
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_fused_attention_overrideable flex_attention
    flex_attention_backward flex_decoding
    """
)
_CONVOLUTION = _names("_convolution convolution convolution_backward")
_POOLING = _names(
    """
    _adaptive_avg_pool2d _low_memory_max_pool2d_with_offsets _low_memory_max_pool_with_offsets avg_pool2d
    avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    """
)
# They do not determine the class, but their names must not be split.
_OTHER_LONG = _names(
    """
    _assert_async _fused_moving_avg_obs_fq_helper all_gather_into_tensor all_reduce avg_pool3d bitwise_and
    bitwise_not bitwise_or bitwise_xor clamp_max clamp_min empty_like floor_divide full_like gelu_backward
    hardswish_backward hardtanh leaky_relu leaky_relu_backward lift_fresh linalg_vector_norm logical_and logical_not
    logical_or logical_xor masked_fill masked_scatter moe_forward new_full new_ones new_zeros ones_like
    prims_convert reduce_scatter_tensor reflection_pad2d remainder rms_norm_forward scalar_tensor sigmoid_backward
    silu_backward sum_backward tanh_backward threshold_backward true_divide unified_attention
    unified_attention_with_output upsample_bilinear2d upsample_nearest2d var_mean view_as_complex view_as_real
    wait_tensor zeros_like
    """
)
# Custom operations that run in separate kernels; a generated kernel only prepares their inputs.
_NEIGHBOURS = _names(
    """
    all_gather_into_tensor all_reduce moe_forward moe_forward_shared reduce_scatter_tensor unified_attention
    unified_attention_with_output wait_tensor
    """
)
_KNOWN = (
    _LOSS | _SOFTMAX | _NORM | _EMBEDDING | _OPTIMIZER | _RANDOM | _INDEX | _SORT | _COPY | _GEMM | _ATTENTION
    | _CONVOLUTION | _POOLING | _OTHER_LONG | _NEIGHBOURS
)  # fmt: skip
_LONGEST = max(name.count("_") for name in _KNOWN) + 1
_MOST_OPERATIONS = 64


def recognise(anatomy: Anatomy) -> KernelName | None:
    base = anatomy.base
    if not base.startswith("triton_"):
        return None
    if match := _GENERATED.match(base):
        return _decode_generated(anatomy, match["kind"] or "", match["rest"])
    if match := _TEMPLATE.match(base):
        return _decode_template(anatomy, match["what"])
    if _OLD.match(base):
        parts = (part("triton_", "generated by torch.compile, without a list of its operations"),)
        return build(anatomy, "Inductor", "elementwise", "generated kernel", "generated kernel (Inductor)", parts=parts)
    return None


def split_operations(text: str) -> tuple[str, ...]:
    """`_to_copy_mean_pow` to (`_to_copy`, `mean`, `pow`)."""
    pieces = text.split("_")[: 4 * _MOST_OPERATIONS]
    found: list[str] = []
    index = 0
    while index < len(pieces) and len(found) < _MOST_OPERATIONS:
        for size in range(min(_LONGEST, len(pieces) - index), 0, -1):
            candidate = "_".join(pieces[index : index + size])
            if candidate in _KNOWN:
                found.append(candidate)
                index += size
                break
        else:
            if pieces[index]:
                found.append(pieces[index])
            index += 1
    return tuple(found)


def _decode_generated(anatomy: Anatomy, kind: str, rest: str) -> KernelName:
    listed = _NUMBER.sub("", rest)
    operations = split_operations(listed)
    kernel_class, operation = _classify(kind, operations)
    parts = [part("triton", "generated by torch.compile (Inductor), in Triton")]
    if kind:
        parts.append(part(kind, _KINDS[kind]))
    parts.extend(part(name, _explain(name)) for name in operations)
    if number := _NUMBER.search(rest):
        parts.append(part(number[1], "running number within the compiled graph"))
    shown = " ".join(name.strip("_") for name in operations)
    return build(
        anatomy,
        "Inductor",
        kernel_class,
        operation,
        f"{shown} (Inductor {kind or 'fused'})" if len(shown) < 30 and shown else f"{operation} (Inductor)",
        direction=_find_direction(operations),
        tensor_cores=None,
        is_cast=kernel_class == "copy" and "_to_copy" in operations,
        fused=operations,
        parts=tuple(parts),
    )


def _classify(kind: str, operations: tuple[str, ...]) -> tuple[KernelClass, str]:
    # GEMMs, convolutions and attention run in separate kernels; a pointwise kernel with their name only
    # prepares or finishes their data.
    held = set(operations)
    own = held - _NEIGHBOURS - _GEMM - _ATTENTION - _CONVOLUTION
    if kind == "tem" or (kind == "" and held and not own):
        return _classify_template(held)
    if kind in ("for", "foreach") or held & _OPTIMIZER:
        return "optimizer", "optimizer update"
    ranked: tuple[tuple[frozenset[str], KernelClass, str], ...] = (
        (_LOSS, "loss", "loss"),
        (_SOFTMAX, "softmax", "softmax"),
        (_NORM, "norm", "norm"),
        (_SORT, "sort", "sort"),
        (_POOLING, "reduction", "pooling"),
        (_EMBEDDING, "embedding", "embedding"),
        (_RANDOM, "random", "dropout or other random numbers"),
    )
    # RMS norm usually has no name: it is a mean of squares and a reciprocal square root.
    if "rsqrt" in held and held & {"mean", "var_mean", "var", "sum"}:
        held = held | {"rms_norm"}
    for names, kernel_class, operation in ranked:
        if held & names:
            return kernel_class, operation
    if own and own <= _COPY:
        return "copy", "cast" if "_to_copy" in own else "copy between layouts"
    if held & _INDEX and own <= _COPY | _INDEX:
        return "index", "indexing"
    if kind in ("red", "per", "scan", "sca", "split_scan"):
        return "reduction", "fused reduction"
    return "elementwise", "fused elementwise"


def _classify_template(held: set[str]) -> tuple[KernelClass, str]:
    if held & _ATTENTION:
        return "attention", "attention"
    if held & _CONVOLUTION:
        return "convolution", "convolution"
    return "GEMM", "GEMM"


def _find_direction(operations: tuple[str, ...]) -> Direction | None:
    return "backward" if any("_backward" in name for name in operations) else None


def _explain(name: str) -> str:
    if name == "_to_copy":
        return "aten._to_copy: a cast to another dtype"
    if name in _NEIGHBOURS | _GEMM | _ATTENTION | _CONVOLUTION:
        return "usually runs in a separate kernel; this one prepares or finishes its data"
    return f"aten.{name}, fused into this kernel"


def _decode_template(anatomy: Anatomy, what: str) -> KernelName:
    if "flex" in what:
        direction: Direction = "backward" if "backward" in what else "forward"
        return build(
            anatomy,
            "Inductor",
            "attention",
            "attention",
            f"{what} (Inductor)",
            direction=direction,
            parts=(part(what, "FlexAttention, generated by torch.compile"),),
        )
    kernel_class, operation = _classify_template({"convolution"} if "conv" in what else {"mm"})
    parts = (part(what, f"{operation} from a Triton template of torch.compile"),)
    return build(anatomy, "Inductor", kernel_class, operation, f"{what} (Inductor)", parts=parts)
