"""cuDNN: convolutions, and the norms, poolings and layout changes around them."""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.gemm_words import read
from stepscope.explain.kernel_names.vocabulary import (
    Direction,
    KernelClass,
    KernelName,
    build,
    compile_rows,
    find_dtype,
    first_match,
    join,
    part,
    spell_direction,
    spell_tile,
)

# Before the architecture; the version of the kernels is internal to cuDNN.
_PREFIX = r"(?:_5x_)?(?:cudnn_(?:(?:infer|train)_)?)?"
_TUNED = re.compile(_PREFIX + r"(?:maxwell|pascal|volta|turing|ampere|hopper)_\w*?(?:s|h|i)?\d*cudnn_")
_XMMA = re.compile(r"sm\d+_xmma_(?:fprop|dgrad|wgrad|deconv)_|sm\d+_\w*?(?:fprop|dgrad|wgrad)_implicit_gemm")
_ENGINES = re.compile(
    r"dgrad_engine|wgrad_alg\w*|dgrad2?d?_alg\w*|wgrad2d\w*|implicit_convolve\w*"
    r"|precomputed_convolve\w*|explicit_convolve\w*"
    r"|convolve_common_engine\w*|conv2d_\w*|conv3d_\w*|cudnn_convolve\w*|fft[12]d_\w+|flip_filter|winograd\w*"
    r"|compute_gemm_pointers|im2col4d_kernel|computeOffsetsKernel\w*|computeBOffsetsKernel\w*"
    r"|compute\w*OffsetsKernel\w*"
    r"|generateWinograd\w*|reduce_wgrad\w*|dw(?:conv|Conv)\w*|conv\w*[dw]grad\w*|convolve\w*|xmma\w*(?:prop|grad)\w*"
)
_DIRECTIONS: tuple[tuple[str, str, Direction], ...] = (
    ("wgrad", "gradient of a convolution's filter", "backward"),
    ("dgrad", "gradient of a convolution's input", "backward"),
    ("fprop", "convolution forward", "forward"),
    ("winogradforward", "convolution forward", "forward"),
)
# By a part of the base name, first match wins: class, operation, short.
_AROUND: tuple[tuple[re.Pattern[str], KernelClass, str, str], ...] = compile_rows(
    (
        r"nchwToNhwc|nhwcToNchw|nhwcAddPadding|tensorTransform|transposeFilter|foldedNhwc|fold\w*Nhwc",
        "copy",
        "copy between layouts",
        "layout change",
    ),
    (r"(?i)^bn_|batch_?norm|bnorm|BnFwd|BnBwd|bn_fw|bn_bw", "norm", "batch norm", "batch norm"),
    (r"(?i)layer_?norm|ln_(?:fwd|bwd)|rms_?norm|instance_?norm", "norm", "norm", "norm"),
    (r"(?i)pooling|MaxPool|AvgPool|avg_pool|max_pool", "reduction", "pooling", "pooling"),
    (r"(?i)softmax", "softmax", "softmax", "softmax"),
    (r"(?i)dropout", "random", "dropout", "dropout"),
    (
        r"(?i)activation|add_tensor|op_(?:generic_)?tensor|op_tensor|addPacked|scalePacked|setTensor"
        r"|LSTM_elementWise|GRU_elementWise|elementwise|pointwise",
        "elementwise",
        "elementwise",
        "elementwise",
    ),
    (r"(?i)reduce|Reduction", "reduction", "reduction", "reduction"),
    (r"rnn_|RNN|lstm|LSTM|gru_|GRU", "GEMM", "recurrent layer", "recurrent layer"),
    (r"(?i)transpose|copy|convertTensor|cast", "copy", "copy between layouts", "layout change"),
)


def recognise(anatomy: Anatomy) -> KernelName | None:
    base = anatomy.base
    if _TUNED.match(base) or _XMMA.match(base):
        return _decode_tuned(anatomy)
    owned = "cudnn" in anatomy.qualified.lower()
    # cuDNN's oldest engines are outside its namespace.
    if owned or (
        anatomy.scope == ""
        and re.match(r"[dw]grad\w*_(?:engine|alg)|\w*_convolve_|fft2d_|winograd|nchwToNhwc|nhwcToNchw", base)
    ):
        return _decode_engine(anatomy) or _decode_around(anatomy) or _decode_unknown(anatomy)
    return None


def _decode_tuned(anatomy: Anatomy) -> KernelName:
    """`cudnn_infer_volta_scudnn_128x64_relu_xregs_large_nn_v1`, `sm80_xmma_fprop_implicit_gemm_…`"""
    base = anatomy.base
    reading = read(base)
    operation, direction = _name_convolution(base)
    scudnn = re.search(r"_([a-z]+)(\d*)cudnn_", re.sub(f"^{_PREFIX}", "", base))
    reading.layout = None
    if scudnn:
        reading.tensor_cores = bool(scudnn[2])
        letters = {"s": None if reading.tensor_cores else "fp32", "h": "fp16", "i": "int8"}
        reading.dtype = reading.dtype or letters.get(scudnn[1][-1])
        how = "on tensor cores" if reading.tensor_cores else "on the CUDA cores: no tensor cores"
        reading.note(scudnn[0].strip("_"), f"convolution as a GEMM, {how}")
    split = "split-K" if reading.split_k else None
    return build(
        anatomy,
        "cuDNN",
        "convolution",
        operation,
        join("conv", spell_direction(direction), reading.dtype, spell_tile(reading.tile), split, "(cuDNN)"),
        direction=direction,
        **reading.fields(),
    )


def _name_convolution(text: str) -> tuple[str, Direction | None]:
    lower = text.lower()
    for word, operation, direction in _DIRECTIONS:
        if word in lower:
            return operation, direction
    return "convolution", None


def _decode_engine(anatomy: Anatomy) -> KernelName | None:
    match = _ENGINES.search(anatomy.base)
    if match is None and "winograd" not in anatomy.scope and "reduceSplitK" not in anatomy.base:
        return None
    operation, direction = _name_convolution(anatomy.base)
    lower = anatomy.qualified.lower()
    method = next((word for word in ("winograd", "fft", "implicit", "explicit") if word in lower), None)
    helper = "offsets" in lower or "pointers" in lower
    if helper:
        operation = "index tables for a convolution"
    short = join("conv", spell_direction(direction), method, "(cuDNN)")
    parts = [part(anatomy.base, operation)]
    if method == "winograd":
        parts.append(
            part("winograd", "Winograd's algorithm: fewer multiplications for small filters, in several kernels")
        )
    return build(
        anatomy,
        "cuDNN",
        "convolution",
        operation,
        "conv index tables (cuDNN)" if helper else short,
        direction=direction,
        dtype=find_dtype(anatomy.template),
        parts=tuple(parts),
    )


def _decode_around(anatomy: Anatomy) -> KernelName | None:
    if found := first_match(_AROUND, anatomy.base):
        _, kernel_class, operation, short = found
        direction: Direction | None = None
        if kernel_class in ("norm", "softmax", "reduction"):
            if re.search(r"_bw_|bwd|Bwd|backward|_bw", anatomy.base):
                direction = "backward"
            elif re.search(r"_fw_|fwd|Fwd|forward|_fw", anatomy.base):
                direction = "forward"
        return build(
            anatomy,
            "cuDNN",
            kernel_class,
            join(operation, direction),
            join(short, spell_direction(direction), "(cuDNN)"),
            direction=direction,
            dtype=find_dtype(anatomy.template),
            parts=(part(anatomy.base, join(operation, direction)),),
        )
    return None


def _decode_unknown(anatomy: Anatomy) -> KernelName | None:
    if "conv" in anatomy.qualified.lower() or "::cnn" in anatomy.scope:
        operation, direction = _name_convolution(anatomy.qualified)
        parts = (part(anatomy.base, "part of a convolution"),)
        return build(anatomy, "cuDNN", "convolution", operation, "conv (cuDNN)", direction=direction, parts=parts)
    return None
