"""Which operations autocast runs in which dtype, on a CPU and on CUDA, and what that says about one output.

PyTorch keeps three lists a device: operations whose inputs are cast to the lower precision, operations whose inputs are
cast to fp32, and operations that take the widest of their inputs' dtypes. Whatever is on none of them follows its
inputs. The lists are compiled into PyTorch and it has no call that prints them, so they stand here as facts; a test
holds the names against those that the installed PyTorch has registered, and runs the CPU's.

The lists are the same for fp16 and bf16: LayerNorm is fp32 on CUDA in bf16 as well, needed or not. They name operations
and not modules, and functions that are made of others (`cross_entropy` on CUDA) get the treatment of their parts.

A reason is given only where it agrees with what was seen. A list that changed between two versions of PyTorch must not
explain a dtype that it did not make.
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
# Registered so that it raises: its fp16 gradients overflow, and the user is told of the one that takes logits.
REFUSED = {"cuda": ("binary_cross_entropy",)}

# What a function of Python's is called below it.
_OTHER_NAMES = {"cross_entropy": "cross_entropy_loss", "multi_head_attention_forward": "linear"}
# Made of others on that device; the last one's list decides.
_PARTS = {("cuda", "cross_entropy_loss"): ("log_softmax", "nll_loss"), ("cpu", "einsum"): ("bmm",)}
_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy")
# Our own functions widen by design; their last operation would not say so.
_OURS = {
    "stepscope.nn.model.RMSNorm": "our rms_norm widens to fp32 itself for its sums and returns its input's dtype",
    "stepscope.step.builtin.build_builtin.<locals>.loss": "our cross_entropy widens to fp32 itself",
}
_DEVICES = {"cpu": "a CPU", "cuda": "CUDA"}
_AUTOCAST = ("bf16", "fp16")


def find_policy(operation: str, device: str) -> Policy | None:
    """The list that an operation is on, by the name of its function; None where it is on none."""
    name = _OTHER_NAMES.get(operation, operation)
    parts = _PARTS.get((device, name), (name,))
    return LISTS.get(device, {}).get(parts[-1])


def explain_dtype(output: Output, *, device: str, precision: str) -> str:
    """Why an output has the dtype it has, in one sentence without a full stop."""
    if precision not in _AUTOCAST:
        return "no autocast: everything follows its inputs"
    if output.operation is None:
        return "made by no operation that was seen"
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
            return f"{subject} {verb} on the list of those that take their widest input's dtype"


def _elsewhere(operation: str, device: str, policy: Policy) -> str:
    """Where the other device's list differs, which is what people's notes disagree about."""
    other = "cuda" if device == "cpu" else "cpu"
    if find_policy(operation, other) == policy:
        return ""
    return f" on {_DEVICES.get(device, device)}, and not on {_DEVICES[other]}"


def _explain_unlisted(output: Output, device: str, *, listed: bool) -> str:
    operation, inputs = output.operation, output.input_dtypes
    assert operation is not None
    if listed:
        return f"`{operation}` is on a list by which it would not be {output.dtype}: this PyTorch has another one"
    if operation in _CASTS:
        return f"the model casts it by itself (`{operation}`)"
    where = _not_on_a_list(operation, device)
    if len(inputs) == 1 and inputs[0] == output.dtype:
        return f"{where}, so it keeps its input's dtype, {output.dtype}"
    if len(inputs) > 1 and output.dtype == _widest(inputs):
        return f"{where}: type promotion of {' and '.join(inputs)} gives {output.dtype}"
    if len(inputs) > 1 and output.dtype == inputs[0]:
        return f"{where}, so it keeps its first input's dtype, {output.dtype}"
    return f"{where}, and follows its inputs"


def _not_on_a_list(operation: str, device: str) -> str:
    other = "cuda" if device == "cpu" else "cpu"
    elsewhere = find_policy(operation, other)
    if elsewhere is None:
        return f"`{operation}` is on no list"
    word = {"lower": "lower-precision", "fp32": "fp32", "widest": "widest-input"}[elsewhere]
    where = "CUDA's" if other == "cuda" else "the CPU's"
    return f"`{operation}` is on {where} {word} list and on no list on {_DEVICES.get(device, device)}"


def _widest(dtypes: Sequence[str]) -> str | None:
    """What type promotion makes of them: two different floats of 16 bits make one of 32."""
    unique = set(dtypes)
    if {"bf16", "fp16"} <= unique and not unique & {"fp32", "fp64"}:
        return "fp32"
    order = ("fp16", "bf16", "fp32", "fp64")
    known = [name for name in order if name in unique]
    return known[-1] if known else None


def _join(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
