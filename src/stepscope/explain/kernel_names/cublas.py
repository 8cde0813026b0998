"""cuBLAS and cuBLASLt: named by hand (`ampere_sgemm_…`), by a generator (`sm80_xmma_…`), and the newest, `nvjet_…`.

NVIDIA does not document these names. The meanings here were derived from kernels with known shapes, dtypes and
transposes; codes without a known meaning are marked as such.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.gemm_words import GemmReading, read, split_along_k
from stepscope.explain.kernel_names.vocabulary import (
    KernelClass,
    KernelName,
    build,
    compile_rows,
    explain_architecture,
    explain_layout,
    explain_slab,
    explain_tile,
    find_dtype,
    first_match,
    join,
    name_architecture,
    part,
    spell_tile,
)

_HAND_NAMED = re.compile(r"(?:kepler|maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell)_\w*?gemm_")
_XMMA = re.compile(r"sm\d+_xmma_(?:\w+?_)?gemm_")
_NVJET = re.compile(
    r"nvjet_(?:(?P<architecture>sm\d+[a-z]?)_)?(?P<types>[a-z]{3,6})_(?:tf32_|mma_)?(?P<tile>\d+x\d+(?:x\d+)?)_(?P<rest>\w+)"
)
# Names that only cuBLAS uses; any other name must contain `cublas`.
_OWN = re.compile(
    r"(?:internal::)?gemvx::|gemv2[NT]|gemvNSP|gemmSN_|gemmk1|(?:\w+::)?dot_kernel|reduce_1Block_kernel|gemm_kernel2x2"
    r"|trsm_|(?:gemm|symm|syrk)_kernel1x1_core"
)
_VECTORS: tuple[tuple[re.Pattern[str], KernelClass, str], ...] = compile_rows(
    (r"dot_kernel|reduce_1Block_kernel", "reduction", "dot product"),
    (r"asum_kernel|nrm2_kernel|iamax_kernel", "reduction", "vector norm"),
    (r"axpy_kernel|scal_kernel", "elementwise", "scale and add vectors"),
    (r"copy_kernel", "copy", "copy"),
)
_SMALL = re.compile(
    r"gemm(?:SN|k1|NN|NT|TN|TT|Batched|_kernel)|sgemm_\w*|dgemm_\w*|hgemm_\w*|cgemm_\w*|zgemm_\w*|trsm|syrk"
)
# From kernels with known dtypes; NVIDIA does not document them.
_NVJET_TYPES = {"h": "fp16", "t": "bf16", "s": "fp32", "d": "fp64", "q": "fp8", "o": "fp4"}


def recognise(anatomy: Anatomy) -> KernelName | None:
    base = anatomy.base
    if base.startswith("nvjet_"):
        return _decode_nvjet(anatomy)
    if _XMMA.match(base) or _HAND_NAMED.match(base):
        return _decode_tuned(anatomy)
    if base.startswith(("splitKreduce", "splitK_reduce")):
        return _decode_split_k_sum(anatomy)
    if anatomy.qualified.endswith("epilogue::impl::globalKernel"):
        return _decode_epilogue(anatomy)
    if _OWN.match(anatomy.qualified) or "cublas" in anatomy.text[:2000].lower():
        return _decode_small(anatomy)
    return None


def _decode_tuned(anatomy: Anatomy) -> KernelName:
    reading = read(anatomy.base)
    is_sum = "execute_split_k_kernel" in anatomy.base
    if is_sum:
        # Its counters show only additions; it follows a kernel of the same name without these words, which multiplies.
        reading.note("execute_split_k_kernel", "second half of a split GEMM: adds up the parts")
    return build(
        anatomy,
        "cuBLAS",
        "GEMM",
        "adds up the partial results of a split GEMM" if is_sum else "GEMM",
        join(
            "split-K sum of" if is_sum else None,
            _product_word(reading),
            spell_tile(reading.tile),
            reading.layout,
            "split-K" if reading.split_k and not is_sum else None,
            "(cuBLAS)",
        ),
        **reading.fields(),
    )


def _product_word(reading: GemmReading) -> str:
    if reading.letter and not reading.tensor_cores:
        return f"{reading.letter}gemm"
    return join(reading.dtype, "GEMM")


def _decode_nvjet(anatomy: Anatomy) -> KernelName:
    """`nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT`"""
    match = _NVJET.match(anatomy.base)
    if match is None:
        return build(anatomy, "cuBLAS", "GEMM", "GEMM", "GEMM (cuBLAS nvjet)")
    types, rest = match["types"], match["rest"].split("_")
    architecture = None
    meaning = "cuBLAS's kernels for Hopper and newer. The naming is not documented: this is its common interpretation"
    parts = [part("nvjet", meaning)]
    if match["architecture"]:
        architecture, generation = name_architecture(match["architecture"].removeprefix("sm"))
        parts.append(explain_architecture(match["architecture"], architecture, generation))
    dtype = "tf32" if "_tf32_" in anatomy.base else _NVJET_TYPES.get(types[0])
    parts.append(part(types, f"dtypes (the letters are not documented): {_spell_types(types)}"))
    tile = tuple(int(number) for number in match["tile"].split("x"))
    parts.append(explain_tile(match["tile"], tile))
    stages, layout, split = None, None, split_along_k(anatomy.base)
    pairs = 0
    for word in rest:
        if pair := re.fullmatch(r"(\d{1,4})x(\d{1,4})", word):
            first, second = int(pair[1]), int(pair[2])
            if pairs == 0 and len(tile) == 2:
                tile, stages = (*tile, first), second
                parts.append(explain_slab(word, first, second))
            else:
                parts.append(part(word, f"thread blocks work in clusters of {first}×{second}"))
            pairs += 1
        elif re.fullmatch(r"[NT]{3,4}", word):
            layout = word[:2].lower()
            parts.append(explain_layout(word[:2]))
            parts.append(part(word[2:], "layout of the result: not documented"))
        else:
            parts.append(part(word, _explain_nvjet_word(word)))
    return build(
        anatomy,
        "cuBLAS",
        "GEMM",
        "GEMM",
        join(dtype, "GEMM", spell_tile(tile), layout, "split-K" if split else None, "(cuBLAS nvjet)"),
        architecture=architecture,
        dtype=dtype,
        tile=tile,
        stages=stages,
        layout=layout,
        tensor_cores=None if dtype in ("fp64", "fp32") else True,
        split_k=split,
        parts=tuple(parts),
    )


def _spell_types(types: str) -> str:
    seen = [f"{letter} occurs with {_NVJET_TYPES[letter]}" for letter in dict.fromkeys(types) if letter in _NVJET_TYPES]
    return "; ".join(seen) or "meaning unknown"


def _explain_nvjet_word(word: str) -> str:
    lower = word.lower()
    if lower.startswith("splitk"):
        return "K is split among thread blocks, and their partial results are added up"
    if lower.startswith("2cta"):
        return "two thread blocks on neighboring SMs share one tensor-core instruction"
    if lower.startswith("coop"):
        return "groups of warps share one tile; the details are not documented"
    if "bias" in lower:
        return "the epilogue adds a bias"
    return "not documented"


def _decode_split_k_sum(anatomy: Anatomy) -> KernelName:
    library = "cuBLASLt" if "cublasLt" in anatomy.scope else "cuBLAS"
    return build(
        anatomy,
        library,
        "GEMM",
        "adds up the partial results of a split GEMM",
        f"split-K sum ({library})",
        dtype=find_dtype(anatomy.template),
        split_k=True,
        parts=(
            part(
                anatomy.base,
                "second half of a split-K GEMM: adds up the parts",
            ),
        ),
    )


def _decode_epilogue(anatomy: Anatomy) -> KernelName:
    return build(
        anatomy,
        "cuBLASLt",
        "GEMM",
        "epilogue of a GEMM",
        "GEMM epilogue (cuBLASLt)",
        dtype=find_dtype(anatomy.template),
        parts=(
            part(
                "epilogue::impl::globalKernel",
                "adds a bias, applies an activation or sums up the bias gradient, in a second kernel after its GEMM",
            ),
        ),
    )


def _decode_small(anatomy: Anatomy) -> KernelName | None:
    """Decode matrix times vector, dot products, and GEMMs too small for the tuned kernels."""
    text = f"{anatomy.scope}::{anatomy.base}"
    dtype = find_dtype(anatomy.template)
    if "gemv" in text:
        parts = (part(anatomy.base, "matrix times vector: reads each element once, so it is memory-bound"),)
        fields = {"dtype": dtype, "tensor_cores": False, "parts": parts}
        return build(anatomy, "cuBLAS", "GEMM", "matrix times vector", "gemv (cuBLAS)", **fields)
    if found := first_match(_VECTORS, anatomy.base):
        _, kernel_class, operation = found
        parts = (part(anatomy.base, f"{operation}: memory-bound"),)
        return build(anatomy, "cuBLAS", kernel_class, operation, f"{operation} (cuBLAS)", dtype=dtype, parts=parts)
    if _SMALL.match(anatomy.base):
        layout = re.search(r"_([NT]{2})_", anatomy.base)
        spelled = layout[1].lower() if layout else None
        explained = (explain_layout(layout[1]),) if layout else ()
        parts = (part(anatomy.base, "a general GEMM for small or unusual shapes"), *explained)
        return build(
            anatomy,
            "cuBLAS",
            "GEMM",
            "GEMM",
            join("small GEMM", spelled, "(cuBLAS)"),
            dtype=dtype,
            layout=spelled,
            parts=parts,
        )
    return None
