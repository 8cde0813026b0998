"""AMD's kernels: convolutions, norms and GEMMs of MIOpen and Composable Kernel, and the GEMMs that Tensile generates
for rocBLAS and hipBLASLt: `Cijk_Alik_Bljk_BBS_BH_MT64x64x64_…`.

A Tensile name is a formula: C has the indices i, j (and k, the batch), and l is summed. An operand whose own index
comes first is stored with that index fastest: `Ailk` is not transposed, `Alik` is.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.vocabulary import (
    CODES,
    Direction,
    KernelClass,
    KernelName,
    NamePart,
    build,
    compile_rows,
    explain_layout,
    explain_tile,
    find_dtype,
    first_match,
    join,
    part,
    spell_direction,
    spell_tile,
)

_IGEMM = re.compile(
    r"igemm_(?P<way>fwd|bwd|wrw|upsampling_clear)_?(?P<engine>gtcx?\d*|\w*?)_(?P<layout>nhwc|nchw|nchwc)?_?(?P<rest>\w*)"
)
_WAYS: dict[str, tuple[str, Direction]] = {
    "fwd": ("convolution forward", "forward"),
    "bwd": ("gradient of a convolution's input", "backward"),
    "wrw": ("gradient of a convolution's filter", "backward"),
}
# By a part of the base name: class, operation.
_MIOPEN: tuple[tuple[re.Pattern[str], KernelClass, str], ...] = compile_rows(
    (r"MIOpenBatchNorm|MIOpenBN|MIOpenLayerNorm|MIOpenGroupNorm|LayernormFwd", "norm", "norm"),
    (r"MIOpenSoftmax|SoftmaxForward|SoftmaxBackward", "softmax", "softmax"),
    (r"mloPooling|MIOpenPooling", "reduction", "pooling"),
    (r"MIOpenNeuron|MIOpenActi|MIOpenActiveFwd|ActivBwd|ActivFwd", "elementwise", "activation"),
    (r"MIOpenDropout|InitKernelStateGpu", "random", "dropout"),
    (r"SubTensorOpWithCastTensor|CastTensor", "copy", "cast"),
    (
        r"SubTensorOpWithScalar|SubTensorOpWith|Op\dd?TensorGeneric|Op\d?d?Tensor\w*|OpTensor\w+",
        "elementwise",
        "fill or scale a tensor",
    ),
    (
        r"batched_transpose_\w+|transpose_(?:[CNHW]{4}2[CNHW]{4}|packed)\w*|general_tensor_reorder_\w*"
        r"|tensor_reorder",
        "copy",
        "copy between layouts",
    ),
    (r"Im2\dd?Col|Im2d2Col|Im3d2Col|Col2Im\w*", "convolution", "unfold a convolution's input"),
    (
        r"miopenSp3AsmConv\w*|miopenGcnAsm\w*|gcnAsm\w*|MIOpenConv\w*|MIOpenCv\w*|naive_conv\w*"
        r"|gridwise_convolution\w*|mlopenConv\w*|xformData\w*|xdlops_conv\w*|conv_\w*asm\w*|winograd\w*",
        "convolution",
        "convolution",
    ),
)
_CK: tuple[tuple[re.Pattern[str], KernelClass, str], ...] = compile_rows(
    (r"(?i)conv", "convolution", "convolution"),
    (r"(?i)gemm\w*bwd_weight|bwd_weight", "convolution", "gradient of a convolution's filter"),
    (r"(?i)softmax", "softmax", "softmax"),
    (r"(?i)rmsnorm", "norm", "RMS norm"),
    (r"(?i)layernorm", "norm", "layer norm"),
    (r"(?i)batchnorm|groupnorm|normalization", "norm", "norm"),
    (r"(?i)moe.?sorting|moesorting", "sort", "sort tokens by expert"),
    (r"(?i)gemm|matmul|fused_?moe", "GEMM", "GEMM"),
    (r"(?i)transpose|permute", "copy", "copy between layouts"),
    (r"(?i)reduce|reduction|pool", "reduction", "reduction"),
    (r"(?i)elementwise|smoothquant|quant", "elementwise", "elementwise"),
)


_SHORTER = {"gradient of a convolution's filter": "conv filter", "convolution": "conv"}


def recognise(anatomy: Anatomy) -> KernelName | None:
    if match := _IGEMM.match(anatomy.base):
        return _decode_igemm(anatomy, match)
    if anatomy.scope.split("::")[0] in ("ck", "ck_tile") or "ck_tile::" in anatomy.template[:200]:
        return _decode_ck(anatomy)
    return _decode_miopen(anatomy)


def _decode_igemm(anatomy: Anatomy, match: re.Match[str]) -> KernelName:
    """`igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_…`"""
    operation, direction = _WAYS.get(match["way"], ("convolution", "backward"))
    rest = match["rest"]
    parts = [
        part(
            f"igemm_{match['way']}", f"{operation}, as an implicit GEMM whose first operand is never written to memory"
        )
    ]
    tensor_cores = None
    if match["engine"].startswith("gtc"):
        tensor_cores = True
        parts.append(part(match["engine"], "written for the matrix cores"))
    if match["layout"]:
        parts.append(part(match["layout"], "order of the tensors' dimensions"))
    type_ = re.match(r"(bf16|fp16|fp32|int8)", rest)
    dtype = CODES[type_[1]] if type_ else None
    tile: tuple[int, ...] | None = None
    if found := re.search(r"(?:^|_)(bt(\d+)x(\d+)x(\d+))", rest):
        tile = (int(found[2][:6]), int(found[3][:6]), int(found[4][:6]))
        parts.append(explain_tile(found[1], tile))
    if found := re.search(r"_(wt(\d+x\d+x\d+))", rest):
        parts.append(part(found[1], f"each wave computes {found[2].replace('x', '×')} at a time"))
    split = rest.endswith("_gkgs")
    if split:
        parts.append(part("gkgs", "K can be split among workgroups"))
    return build(
        anatomy,
        "MIOpen",
        "convolution",
        operation,
        join("conv", "fwd" if direction == "forward" else "bwd", dtype, spell_tile(tile), "(MIOpen)"),
        direction=direction,
        dtype=dtype,
        tile=tile,
        tensor_cores=tensor_cores,
        parts=tuple(parts),
    )


def _decode_miopen(anatomy: Anatomy) -> KernelName | None:
    for pattern, kernel_class, operation in _MIOPEN:
        if match := pattern.match(anatomy.base):
            direction = _find_direction(anatomy.base)
            dtype = "fp32" if re.search(r"fp32|float", anatomy.base) else "bf16" if "bf16" in anatomy.base else None
            return build(
                anatomy,
                "MIOpen",
                kernel_class,
                operation,
                join(operation, spell_direction(direction), "(MIOpen)"),
                direction=direction,
                dtype=dtype,
                is_cast=operation == "cast",
                parts=(part(match[0], operation),),
            )
    return None


def _decode_ck(anatomy: Anatomy) -> KernelName:
    # `ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<…>>`: the kernel is the first template argument.
    wrapped = anatomy.base in ("kentry", "kernel_wrapper")
    what = (
        next((word for word in anatomy.words() if word not in ("ck_tile", "ck")), anatomy.base)
        if wrapped
        else anatomy.base
    )
    dtype = _find_ck_dtype(anatomy)
    if found := first_match(_CK, what):
        _, kernel_class, operation = found
        direction = _find_direction(what)
        # CK computes the gradient of the filter as a batched GEMM named `bwd_weight`.
        tensor_cores = True if re.search(r"xdl|mfma", anatomy.text[:2000], re.IGNORECASE) else None
        return build(
            anatomy,
            "CK",
            kernel_class,
            operation,
            join(dtype, _SHORTER.get(operation, operation), spell_direction(direction), "(CK)"),
            direction=direction,
            dtype=dtype,
            tensor_cores=tensor_cores,
            parts=(part(what, f"{operation}, from AMD's Composable Kernel"),),
        )
    return build(anatomy, "CK", "other", "Composable Kernel of unknown kind", f"{what} (CK)")


def _find_ck_dtype(anatomy: Anatomy) -> str | None:
    """CK's bf16 is an unsigned short; an fp32 after it is the accumulator."""
    if re.search(r"\bushort\b|unsigned short", anatomy.template[:400]):
        return "bf16"
    return find_dtype(anatomy.template)


def _find_direction(text: str) -> Direction | None:
    lower = text.lower()
    if re.search(r"bwd|backward|wrw|dgrad|wgrad", lower):
        return "backward"
    if re.search(r"fwd|forward|fprop", lower):
        return "forward"
    return None


# --- Tensile ----------------------------------------------------------------------------------------------------------


_PRODUCT = re.compile(r"Cij(?:k)?_(?P<a>A[ilk]{2,3})_(?P<b>B[jlk]{2,3})_(?P<type>[A-Za-z0-9]+)(?:_(?P<rest>\w+))?")
_AFTER = re.compile(r"Cij(?:k)?_(?P<type>[A-Z0-9]+)_(?P<step>\w+)")
_TYPE = re.compile(r"F8B8|B8F8|F8|B8|I8|4xi8|S|D|H|B|C|Z|X|I")
_TYPES = {
    "F8B8": "fp8",
    "B8F8": "fp8",
    "F8": "fp8",
    "B8": "fp8",
    "I8": "int8",
    "4xi8": "int8",
    "S": "fp32",
    "D": "fp64",
    "H": "fp16",
    "B": "bf16",
    "C": "complex64",
    "Z": "complex128",
    "X": "tf32",
    "I": "int32",
}
_MACRO_TILE = re.compile(r"(?:^|_)(MT(\d+)x(\d+)x(\d+))")
_INSTRUCTION = re.compile(r"(?:^|_)(MI(\d+)x(\d+)x(\d+)(?:x(\d+))?)")
_SPLIT = re.compile(r"_(GSU(\d+))(?:_|$)")
_ISA = re.compile(r"_(ISA(\w{3,4}?))(?:_|$)")
# Tensile's documented solution parameters.
_PARAMETERS = compile_rows(
    (r"(?:^|_)(Bias)", "the epilogue adds a bias"),
    (r"(?:^|_)(UserArgs)", "can take its arguments from device memory, as hipBLASLt's grouped GEMMs do"),
    (r"_(SAV)_", "the factor alpha may differ per row"),
    (r"_(GSUAMBSK|GSUAMB|GSUASB)", "how the partial sums are combined: one or several buffers"),
    (r"_(PGR\d)", "number of slabs prefetched from global memory"),
    (r"_(PLR\d+)", "number of steps prefetched from local memory"),
    (r"_(SK[1-9]\d*)_", "stream-K: blocks share K evenly"),
    (r"_(WG\d+_\d+_\d+)", "shape of the workgroup"),
    (r"_(WGM\w+?)(?:_|$)", "order in which tiles are assigned"),
)

# rocBLAS's own kernels, by a part of the name.
_HANDWRITTEN: tuple[tuple[re.Pattern[str], KernelClass, str], ...] = compile_rows(
    (r"gemv|ger_|symv", "GEMM", "matrix times vector"),
    (r"gemm|trsm|syrk|symm|trmm", "GEMM", "GEMM"),
    (r"dot|nrm2|asum|reduction|iamax", "reduction", "dot product or vector norm"),
    (r"axpy|scal", "elementwise", "scale and add vectors"),
    (r"copy|transpose", "copy", "copy"),
)


def recognise_tensile(anatomy: Anatomy) -> KernelName | None:
    # Its names are plain and long, so use the full text: the base name is truncated.
    if match := _PRODUCT.match(anatomy.text):
        return _decode_product(anatomy, match)
    if match := _AFTER.match(anatomy.text):
        return _decode_afterwork(anatomy, match)
    if anatomy.base.startswith("rocblas_"):
        return _decode_handwritten(anatomy)
    return None


def _decode_product(anatomy: Anatomy, match: re.Match[str]) -> KernelName:
    rest = match["rest"] or ""
    layout = ("n" if match["a"].startswith("Ai") else "t") + ("n" if match["b"].startswith("Bl") else "t")
    dtype, type_part = _read_type(match["type"])
    library = "hipBLASLt" if "UserArgs" in rest else "rocBLAS"
    parts = [
        part("Cijk", "i and j index the result's rows and columns, k the batch, l the summed dimension"),
        NamePart(f"{match['a']}_{match['b']}", f"{layout}: {explain_layout(layout).meaning}"),
        type_part,
    ]
    tile: tuple[int, ...] | None = None
    if found := _MACRO_TILE.search(rest):
        tile = (int(found[2][:6]), int(found[3][:6]), int(found[4][:6]))
        parts.append(explain_tile(found[1], tile))
    instruction = _INSTRUCTION.search(rest)
    if instruction:
        # Newer names leave out the depth: 16x16x1 is 16×16, one block.
        shape = "×".join(instruction.groups()[1 : 4 if instruction[5] else 3])
        parts.append(part(instruction[1], f"matrix cores (MFMA), {shape} per instruction"))
    split = bool((found := _SPLIT.search(rest)) and int(found[2][:6]) > 1)
    if found:
        meaning = f"K is split among {found[2]} workgroups" if split else "K is not split"
        parts.append(part(found[1], meaning))
    architecture = None
    if found := _ISA.search(rest):
        architecture = f"gfx{found[2].lower()}"
        parts.append(part(found[1], f"compiled for {architecture}"))
    parts.extend(part(found[1], meaning) for pattern, meaning in _PARAMETERS if (found := pattern.search(rest)))
    return build(
        anatomy,
        library,
        "GEMM",
        "GEMM",
        join(dtype, "GEMM", spell_tile(tile), layout, "split-K" if split else None, f"({library})"),
        architecture=architecture,
        dtype=dtype,
        tile=tile,
        layout=layout,
        tensor_cores=True if instruction else None,
        split_k=split,
        parts=tuple(parts),
    )


def _read_type(code: str) -> tuple[str | None, NamePart]:
    """`BBS` is bf16 in, bf16 out, fp32 sums; `SB` is fp32 with a beta."""
    codes = _TYPE.findall(code)
    first = _TYPES[codes[0]] if codes else None
    if len(codes) >= 3:
        meaning = f"{first} operands, {_TYPES[codes[1]]} result, {_TYPES[codes[2]]} accumulation"
    else:
        meaning = f"{first or 'unknown'} data"
    return first, part(code, meaning)


def _decode_afterwork(anatomy: Anatomy, match: re.Match[str]) -> KernelName | None:
    dtype, type_part = _read_type(match["type"])
    if "GSU" not in match["step"] and match["step"] not in ("GA", "GB", "B", "A") and "Beta" not in match["step"]:
        return None
    operation = (
        "adds up the partial results of a split GEMM" if "GSU" in match["step"] else "scales the result before the GEMM"
    )
    parts = (type_part, part(match["step"], operation))
    return build(
        anatomy,
        "rocBLAS",
        "GEMM",
        operation,
        "split-K sum (Tensile)",
        dtype=dtype,
        split_k="GSU" in match["step"],
        parts=parts,
    )


def _decode_handwritten(anatomy: Anatomy) -> KernelName | None:
    if found := first_match(_HANDWRITTEN, anatomy.base):
        _, kernel_class, operation = found
        dtype, parts = find_dtype(anatomy.template), (part(anatomy.base, operation),)
        return build(anatomy, "rocBLAS", kernel_class, operation, f"{operation} (rocBLAS)", dtype=dtype, parts=parts)
    return None
