"""The dtype that autocast gives each operation on CPU and CUDA, and the reason for the dtype of an output.

PyTorch has three lists per device: operations whose inputs are cast to the lower precision, operations whose inputs are
cast to fp32, and operations that use the widest dtype of their inputs. Every other operation follows its inputs. The
lists are compiled into PyTorch, which has no call to print them, so they are copied here. A test compares the names
with those that the installed PyTorch registers, and runs the operations of the CPU lists.

The lists are the same for fp16 and bf16: on CUDA, LayerNorm is fp32 in bf16 too, whether needed or not. They name
operations, not modules; composite functions (`cross_entropy` on CUDA) behave like their parts.

A reason is given only if it agrees with the observed dtype: if a list changed between two versions of PyTorch, it must
not explain a dtype that it did not cause.
"""

from collections.abc import Sequence
from typing import Literal

from stepscope.recording.rows.precision_report import Output

Policy = Literal["lower", "fp32", "widest"]

_CONVOLUTIONS = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution"
_PRODUCTS = "linear matmul mm bmm addmm addbmm baddbmm linalg_vecdot scaled_dot_product_attention prelu"
_LOSSES = (
    "nll_loss nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits "
    "cosine_embedding_loss hinge_embedding_loss poisson_nll_loss margin_ranking_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss multilabel_margin_loss"
)
_LISTS: dict[str, dict[Policy, str]] = {
    "cpu": {
        "lower": f"{_CONVOLUTIONS} {_PRODUCTS} _addmm_activation mkldnn_rnn_layer _native_multi_head_attention",
        "fp32": f"{_LOSSES} cross_entropy_loss binary_cross_entropy ctc_loss multilabel_margin_loss_forward prod trace "
        "quantile nanquantile cdist polar view_as_complex stft fake_quantize_per_tensor_affine grid_sampler "
        "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback avg_pool3d adaptive_avg_pool3d "
        "adaptive_max_pool3d max_pool3d max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool3d "
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d "
        "cholesky cholesky_inverse cholesky_solve inverse pinverse lu_solve triangular_solve geqrf orgqr ormqr qr svd "
        "_lu_with_info fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_hfft fft_ihfft fft_rfft "
        "fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn linalg_cholesky linalg_cholesky_ex linalg_cond "
        "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex "
        "linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv "
        "linalg_tensorsolve",
        "widest": "cat stack index_copy",
    },
    "cuda": {
        "lower": f"{_CONVOLUTIONS} {_PRODUCTS} convolution cudnn_convolution cudnn_convolution_transpose addmv addr mv "
        "einsum chain_matmul linalg_multi_dot _scaled_dot_product_flash_attention lstm_cell gru_cell rnn_tanh_cell "
        "rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell",
        "fp32": f"{_LOSSES} layer_norm native_layer_norm rms_norm group_norm softmax log_softmax logsumexp sum prod "
        "cumsum cumprod exp expm1 log log10 log1p log2 pow reciprocal rsqrt softplus acos asin cosh sinh tan erfinv "
        "norm frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm renorm dist pdist cdist "
        "cosine_similarity upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
        "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    },
}
LISTS: dict[str, dict[str, Policy]] = {
    device: {name: policy for policy, names in lists.items() for name in names.split()}
    for device, lists in _LISTS.items()
}
# Autocast raises for these: their fp16 gradients overflow. The error names the function that takes logits.
REFUSED = {"cuda": ("binary_cross_entropy",)}

# The ATen names of Python functions.
_OTHER_NAMES = {"cross_entropy": "cross_entropy_loss", "multi_head_attention_forward": "linear"}
# Composite functions on that device; the list of the last part decides.
_PARTS = {("cuda", "cross_entropy_loss"): ("log_softmax", "nll_loss"), ("cpu", "einsum"): ("bmm",)}
_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy")
# These functions convert to fp32 by design, which their last operation would not show.
_OURS = {
    "stepscope.nn.model.RMSNorm": "the built-in rms_norm converts to fp32 for its sums and returns its input's dtype",
    "stepscope.step.builtin.build_builtin.<locals>.loss": "the built-in cross_entropy converts to fp32",
}
_DEVICES = {"cpu": "a CPU", "cuda": "CUDA"}
_AUTOCAST = ("bf16", "fp16")


def find_policy(operation: str, device: str) -> Policy | None:
    """Return the autocast list of an operation, given the name of its function; None if it is on no list."""
    name = _OTHER_NAMES.get(operation, operation)
    parts = _PARTS.get((device, name), (name,))
    return LISTS.get(device, {}).get(parts[-1])


def explain_dtype(output: Output, *, device: str, precision: str) -> str:
    """Return the reason for the dtype of an output, without a full stop."""
    if precision not in _AUTOCAST:
        return "no autocast: every operation follows its inputs"
    if output.operation is None:
        return "no recorded operation produced it"
    if output.kind in _OURS:
        return _OURS[output.kind]
    policy = find_policy(output.operation, device)
    expected = {"lower": precision, "fp32": "fp32", "widest": _widest(output.input_dtypes)}
    if policy is not None and expected[policy] == output.dtype:
        return _explain_listed(output.operation, device, policy)
    return _explain_unlisted(output, device, listed=policy is not None)


def _explain_listed(operation: str, device: str, policy: Policy) -> str:
    name = _OTHER_NAMES.get(operation, operation)
    parts = _PARTS.get((device, name))
    subject = f"`{operation}`" if parts is None else f"`{operation}` is made of {_join(parts)}, which"
    verb = "is" if parts is None or len(parts) == 1 else "are"
    match policy:
        case "lower":
            return f"{subject} {verb} on autocast's lower-precision list{_elsewhere(operation, device, policy)}"
        case "fp32":
            return f"{subject} {verb} on autocast's fp32 list{_elsewhere(operation, device, policy)}"
        case "widest":
            return f"{subject} {verb} on autocast's widest-input list"


def _elsewhere(operation: str, device: str, policy: Policy) -> str:
    """Where the list of the other device differs, a common source of confusion."""
    other = "cuda" if device == "cpu" else "cpu"
    if find_policy(operation, other) == policy:
        return ""
    return f" on {_DEVICES.get(device, device)}, but not on {_DEVICES[other]}"


def _explain_unlisted(output: Output, device: str, *, listed: bool) -> str:
    operation, inputs = output.operation, output.input_dtypes
    assert operation is not None
    if listed:
        return (
            f"{output.dtype} does not match the known list for `{operation}`: this PyTorch version has a different list"
        )
    if operation in _CASTS:
        return f"the model casts it explicitly (`{operation}`)"
    where = _not_on_a_list(operation, device)
    if len(inputs) == 1 and inputs[0] == output.dtype:
        return f"{where}, so it keeps its input's dtype, {output.dtype}"
    if len(inputs) > 1 and output.dtype == _widest(inputs):
        return f"{where}: type promotion of {' and '.join(inputs)} gives {output.dtype}"
    if len(inputs) > 1 and output.dtype == inputs[0]:
        return f"{where}, so it keeps its first input's dtype, {output.dtype}"
    return f"{where}, so it follows its inputs"


def _not_on_a_list(operation: str, device: str) -> str:
    other = "cuda" if device == "cpu" else "cpu"
    elsewhere = find_policy(operation, other)
    if elsewhere is None:
        return f"`{operation}` is on no list"
    word = {"lower": "lower-precision", "fp32": "fp32", "widest": "widest-input"}[elsewhere]
    where = "CUDA's" if other == "cuda" else "the CPU's"
    return f"`{operation}` is on {where} {word} list, but on no list on {_DEVICES.get(device, device)}"


def _widest(dtypes: Sequence[str]) -> str | None:
    """The dtype after type promotion: bf16 and fp16 promote to fp32."""
    unique = set(dtypes)
    if {"bf16", "fp16"} <= unique and not unique & {"fp32", "fp64"}:
        return "fp32"
    order = ("fp16", "bf16", "fp32", "fp64")
    known = [name for name in order if name in unique]
    return known[-1] if known else None


def _join(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
