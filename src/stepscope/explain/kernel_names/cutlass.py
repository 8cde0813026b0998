"""CUTLASS: kernels with a generated name (`cutlass_80_simt_sgemm_…`), and those known by template arguments only.

cuBLAS ships the first kind (`cutlass::Kernel2<cutlass_80_…>`); PyTorch, vLLM and others build the second.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.gemm_words import read, split_along_k
from stepscope.explain.kernel_names.vocabulary import (
    Direction,
    KernelClass,
    KernelName,
    build,
    find_dtype,
    join,
    part,
    spell_tile,
)

_GENERATED = re.compile(r"(cutlass(?:3x)?_\w+)")
_WRAPPER = re.compile(r"(?:Kernel2?|device_kernel|GemmKernel)$")
_SHAPE = re.compile(r"GemmShape(?:<|, )(\d+), (\d+), (\d+)")
_SIZE = r"cute::C<(?:\(int\))?(\d+)>"
# CUTLASS 3: a tuple of three sizes before the element type. Before the schedule, it is the cluster.
_TILE = re.compile(rf"cute::tuple<{_SIZE}, {_SIZE}, {_SIZE} ?>, (?:cutlass::\w+_t|float)\b")
_ARCHITECTURE = re.compile(r"\bSm(\d{2,3})\b")
_CONVOLUTIONS: dict[str, tuple[str, Direction]] = {
    "fprop": ("convolution forward", "forward"),
    "dgrad": ("gradient of a convolution's input", "backward"),
    "wgrad": ("gradient of a convolution's filter", "backward"),
}

_SHORTER = {
    "convolution forward": "conv fprop",
    "gradient of a convolution's input": "conv dgrad",
    "gradient of a convolution's filter": "conv wgrad",
    "convolution": "conv",
    "adds up the partial results of a split convolution": "split-K sum of conv",
    "adds up the partial results of a split GEMM": "split-K sum of GEMM",
}


def recognise(anatomy: Anatomy) -> KernelName | None:
    if not ("cutlass" in anatomy.body[:4000] or _WRAPPER.match(anatomy.base)):
        return None
    generated = _GENERATED.search(anatomy.base) or _GENERATED.search(anatomy.template[:400])
    if generated and any(word in generated[1] for word in ("gemm", *_CONVOLUTIONS)):
        return _decode_generated(anatomy, generated[1])
    if "cutlass" in anatomy.body[:4000]:
        return _decode_template(anatomy)
    if anatomy.template or anatomy.arguments or anatomy.scope:
        return None
    meaning = "CUTLASS's wrapper; this short form of the name does not say what it runs"
    return build(anatomy, "CUTLASS", "other", "CUTLASS kernel, short name", parts=(part(anatomy.base, meaning),))


def _decode_generated(anatomy: Anatomy, name: str) -> KernelName:
    reading = read(name)
    convolution = _CONVOLUTIONS.get(reading.operation)
    library = "cuDNN" if "cudnn" in anatomy.scope else "CUTLASS"
    operation, direction = convolution or ("GEMM", None)
    is_gemm = reading.operation in ("", "gemm")
    if is_gemm and reading.letter and not reading.tensor_cores:
        word = f"{reading.letter}gemm"
    else:
        word = join(reading.dtype, "GEMM" if is_gemm else reading.operation)
    return build(
        anatomy,
        library,
        "convolution" if convolution else "GEMM",
        operation,
        join(word, spell_tile(reading.tile), reading.layout, "split-K" if reading.split_k else None, f"({library})"),
        direction=direction,
        **reading.fields(),
    )


def _decode_template(anatomy: Anatomy) -> KernelName:
    """Decode a name of types only, which include the kind of kernel, its tile and its architecture."""
    text = anatomy.body
    kernel_class, operation, direction = _classify(text)
    tile: tuple[int, ...] | None = None
    parts = []
    if shape := _SHAPE.search(text) or _TILE.search(text):
        tile = (int(shape[1][:6]), int(shape[2][:6]), int(shape[3][:6]))
        parts.append(part(shape[0], f"each thread block computes a {tile[0]}×{tile[1]} tile, {tile[2]} deep"))
    architecture = _ARCHITECTURE.search(text)
    library = "cuDNN" if "cudnn" in text[:200] else "CUTLASS"
    dtype = "tf32" if "tfloat32_t" in text else find_dtype(anatomy.template)
    split = split_along_k(text)
    words = ", ".join(dict.fromkeys(word for word in anatomy.words()[:6] if word not in ("cutlass", "kernel", "gemm")))
    parts.append(part(anatomy.base, "CUTLASS's wrapper; the template arguments say what it runs"))
    if words:
        parts.append(part(words, "the kernel's outermost types"))
    return build(
        anatomy,
        library,
        kernel_class,
        operation,
        join(dtype, _SHORTER.get(operation, operation), spell_tile(tile), f"({library})"),
        direction=direction,
        architecture=f"sm_{architecture[1]}" if architecture else None,
        dtype=dtype,
        tile=tile,
        tensor_cores=_uses_tensor_cores(text),
        split_k=split,
        parts=tuple(parts),
    )


def _classify(text: str) -> tuple[KernelClass, str, Direction | None]:
    lower = text.lower()
    if "convolution" in lower or "conv2d" in lower or "conv3d" in lower or "::conv::" in lower:
        for word, (operation, direction) in _CONVOLUTIONS.items():
            if word in lower:
                return "convolution", operation, direction
        return "convolution", "convolution", None
    if "reducesplitk" in lower:
        if "cudnn" in lower:
            return "convolution", "adds up the partial results of a split convolution", None
        return "GEMM", "adds up the partial results of a split GEMM", None
    if "gemm" in lower or "collectivemma" in lower or "collective_mma" in lower:
        return "GEMM", "grouped GEMM" if "grouped" in lower or "groupproblem" in lower else "GEMM", None
    return "other", "CUTLASS kernel of unknown kind", None


def _uses_tensor_cores(text: str) -> bool | None:
    if "OpClassSimt" in text:
        return False
    on_tensor_cores = ("OpClassTensorOp", "OpClassWmma", "GMMA", "Gmma", "WarpSpecialized")
    return True if any(word in text for word in on_tensor_cores) else None
