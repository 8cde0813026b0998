"""PyTorch's own kernels: elementwise loops around a functor, reductions, foreach, softmax and named kernels.

Log-softmax counts as `loss`: in training it is nearly always the first half of a cross-entropy, and its time belongs
with the second half. Softmax without logarithm is `softmax`. Pooling and running sums are `reduction`.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.aten_operations import (
    BASES,
    FOREACH,
    FUNCTORS,
    INNER,
    PRIMITIVES,
    REDUCTIONS,
    SHELL_WORDS,
    STEM,
)
from stepscope.explain.kernel_names.vocabulary import (
    Direction,
    KernelClass,
    KernelName,
    NamePart,
    all_dtypes,
    build,
    find_dtype,
    find_element_type,
    first_match,
    join,
    part,
)

_SHELL = re.compile(
    r"(?P<shell>(?:vectorized|unrolled|legacy|modern)?_?(?:templated_)?elementwise_kernel\w*|launch_legacy_elementwise\w*"
    r"|distribution_elementwise_grid_stride_kernel|distribution_nullary_kernel)$"
)
_SOFTMAX = re.compile(r"(?:soft_?max|SoftMax)", re.IGNORECASE)
_SOFTMAX_FLAGS = re.compile(r"\b(true|false)\b")
# A kernel without a namespace is PyTorch's only under one of these names: short names of Nsight, anonymous namespaces.
_BARE = re.compile(
    r"(?:vectorized_|unrolled_|index_)?elementwise_kernel\w*|reduce_kernel|multi_tensor_apply_kernel|softmax_warp_\w+"
    r"|cunn_\w*SoftMax\w*|cunn_\w+|CatArrayBatchedCopy\w*|vectorized_\w*kernel|vectorized_layer_norm_kernel"
    r"|indexSelect\w+|indexing_backward\w*|embedding_backward\w*|compute_grad_weight\w*|sum_and_scatter"
    r"|GammaBetaBackward\w*|layer_norm_grad\w*|RowwiseMoments\w*|nll_loss_\w+|batch_norm_\w+"
    r"|distribution_\w+|tensor_kernel_scan\w*|triu_tril_kernel|fused_dropout\w*|max_pool_\w+|upsample_\w+"
    r"|gatherTopK|radixSortKVInPlace|bitonicSort\w*|sbtopk\w*|_scatter_gather_elementwise_kernel"
    r"|krn_partial\w+|write_indices"
)
# Nsight Compute shortens `at::native` to one of its halves.
_SCOPES = ("at", "native", "at_cuda_detail", "c10")


def recognise(anatomy: Anatomy) -> KernelName | None:
    root = anatomy.scope.split("::")[0]
    if not {"cub", "thrust", "rocprim", "hipcub"}.isdisjoint(anatomy.scope.split("::")):
        return _decode_cub(anatomy)
    mine = root in _SCOPES or (root in ("", "transformer_engine") and _BARE.match(anatomy.base))
    # The functor's namespace identifies it too: `<unnamed>::elementwise_kernel_with_index<int, at::native::…>`.
    if not mine and not (root == "" and "native::" in anatomy.template[:600]):
        return None
    if anatomy.base.startswith("multi_tensor_apply_kernel"):
        return _decode_foreach(anatomy)
    if anatomy.base == "reduce_kernel":
        return _decode_reduction(anatomy)
    if _SOFTMAX.search(anatomy.base):
        return _decode_softmax(anatomy)
    if _SHELL.match(anatomy.base) or anatomy.base.startswith("elementwise_kernel_with_index"):
        return _decode_elementwise(anatomy)
    return _decode_named(anatomy)


def _decode_elementwise(anatomy: Anatomy) -> KernelName:
    operation, kernel_class, functor = _find_functor(anatomy)
    width = _vector_width(anatomy)
    changes = _changes_type(anatomy, functor) if kernel_class == "copy" else False
    if changes and operation == "copy":
        operation = "cast"
    elif operation == "copy" and not width:
        operation = "copy between layouts"
    direction: Direction | None = "backward" if "backward" in functor.lower() else None
    dtype = find_element_type(anatomy.template)
    parts = [_explain_shell(anatomy.base, width)]
    if not anatomy.template:
        parts.append(part("<…>", "this short form of the name does not say which operation it is; it may be a copy"))
    if functor:
        parts.append(part(functor, _explain_functor(functor, operation, changes=changes)))
    parts.extend(_explain_scalars(anatomy.template))
    if dtype:
        parts.append(part(dtype, "dtype of the elements, if the name says so"))
    style = f"vectorized ×{width}" if width else "strided" if "gpu_kernel_impl" in anatomy.template else None
    return build(
        anatomy,
        "ATen",
        kernel_class,
        operation,
        ", ".join(piece for piece in (join(operation, None if " to " in operation else dtype), style) if piece),
        direction=direction,
        dtype=dtype,
        is_cast=changes,
        parts=tuple(parts),
    )


def _find_functor(anatomy: Anatomy) -> tuple[str, KernelClass, str]:
    """Return operation, class and the word that determines them: `BinaryFunctor<…, MulFunctor>` multiplies."""
    stem = ""
    for word in anatomy.words():
        if word in FUNCTORS:
            operation, kernel_class = FUNCTORS[word]
            return operation, kernel_class, word
        if not stem and word not in SHELL_WORDS and STEM.match(word):
            stem = word
    if anatomy.base.startswith("distribution_"):
        return "random numbers", "random", ""
    if stem and (match := STEM.match(stem)):
        name = (match["stem"] or match["out"]).replace("_", " ").strip()
        return _classify_stem(name), _class_of_stem(name), stem
    functor = next((word for word in anatomy.words() if word.endswith("Functor") and len(word) > 13), "")
    if functor and functor not in ("AUnaryFunctor", "BUnaryFunctor", "BinaryFunctor"):
        return functor.removesuffix("Functor").lower(), "elementwise", functor
    return "elementwise operation", "elementwise", ""


def _classify_stem(name: str) -> str:
    return {"exp": "exponential", "log": "logarithm", "neg": "negate", "sqrt": "square root"}.get(name, name)


def _class_of_stem(name: str) -> KernelClass:
    if name.endswith("copy") or name == "copy":
        return "copy"
    if "loss" in name or "cross entropy" in name:
        return "loss"
    if name in ("uniform", "normal", "bernoulli", "exponential", "cauchy", "geometric", "log normal", "random"):
        return "random"
    if "norm" in name.split():
        return "norm"
    return "elementwise"


def _vector_width(anatomy: Anatomy) -> int | None:
    if not anatomy.base.startswith("vectorized_"):
        return None
    numbers = anatomy.integers()
    return numbers[0] if numbers and 1 <= numbers[0] <= 64 else None


def _changes_type(anatomy: Anatomy, functor: str) -> bool:
    """PyTorch uses the casting loops only if the dtypes of input and output differ."""
    if functor.endswith("_copy_kernel_cuda") and functor != "direct_copy_kernel_cuda":
        return True
    text = anatomy.template
    return "LoadWithCast" in text or bool(re.search(r"\bgpu_kernel_impl\b", text)) or "templated" in anatomy.base


def _explain_shell(base: str, width: int | None) -> NamePart:
    if width:
        return part(base, f"contiguous elements, read {width} at a time")
    if base.startswith("unrolled"):
        return part(base, "contiguous elements, read one by one: unaligned, or input and output have different dtypes")
    if base.startswith("vectorized"):
        return part(base, "contiguous elements, read several at a time")
    return part(base, "elements with any stride: each thread computes the position of its element")


def _explain_functor(functor: str, operation: str, *, changes: bool) -> str:
    if changes:
        return "a copy whose input and output have different dtypes"
    if functor == "direct_copy_kernel_cuda":
        return "a copy, usually .contiguous() of a transposed or sliced tensor"
    return operation


def _explain_scalars(template: str) -> list[NamePart]:
    if "AUnaryFunctor" in template:
        return [part("AUnaryFunctor", "the first operand is a scalar")]
    if "BUnaryFunctor" in template:
        return [part("BUnaryFunctor", "the second operand is a scalar")]
    if "BinaryFunctor" in template:
        return [part("BinaryFunctor", "both operands are tensors")]
    return []


def _decode_foreach(anatomy: Anatomy) -> KernelName:
    text = anatomy.template
    dtype = find_dtype(text)
    if re.search(r"\bCopy\b|CopyFunctor", text):
        types = all_dtypes(text.partition("Copy")[2])
        changes = len(set(types[:2])) > 1
        parts = (part("CopyFunctor", "copies many tensors in one launch (foreach copy)"),)
        operation = "cast many tensors" if changes else "copy many tensors"
        return build(anatomy, "ATen", "copy", operation, dtype=dtype, is_cast=changes, parts=parts)
    # Apex, Transformer Engine and Megatron have the same kernel outside PyTorch's namespace.
    library = "ATen" if anatomy.scope.startswith("at") or "at::native" in text else "Apex or Transformer Engine"
    found = first_match(FOREACH, text)
    told, operation = (found[0][0], found[1]) if found else ("", "operation on many tensors (foreach)")
    inner = next((INNER[word] for word in anatomy.words() if word in INNER), None)
    parts_ = [part("multi_tensor_apply_kernel", "one launch for many tensors: an optimizer or gradient clipping")]
    if told:
        parts_.append(part(told, operation + (f": {inner}" if inner else "")))
    short = f"foreach {inner}" if inner and "many tensors" in operation else operation
    return build(anatomy, library, "optimizer", operation, join(short, dtype), dtype=dtype, parts=tuple(parts_))


def _decode_reduction(anatomy: Anatomy) -> KernelName:
    found = first_match(REDUCTIONS, anatomy.template)
    told, operation = (found[0][0], found[1]) if found else ("reduce_kernel", "reduction")
    dtype = find_element_type(anatomy.template)
    parts = (part("reduce_kernel", "PyTorch's general reduction"), part(told, operation))
    return build(
        anatomy,
        "ATen",
        "reduction",
        operation,
        join("reduce" if operation == "reduction" else f"reduce, {operation}", dtype),
        dtype=dtype,
        parts=parts,
    )


def _decode_softmax(anatomy: Anatomy) -> KernelName:
    backward = "backward" in anatomy.base.lower() or "Backward" in anatomy.template
    way: Direction = "backward" if backward else "forward"
    # `softmax_warp_forward<input, output, accumulator, log2 of the length, is_log_softmax, is_masked>`
    flags = _SOFTMAX_FLAGS.findall(anatomy.template)
    logarithmic = "LogSoftMax" in anatomy.template or ("softmax_warp" in anatomy.base and flags[:1] == ["true"])
    what = "log-softmax" if logarithmic else "softmax"
    parts = [part(anatomy.base, f"{what} {way}")]
    if "softmax_warp" in anatomy.base:
        parts.append(part("warp", "rows of up to 1024 elements, one or two per warp"))
        numbers = anatomy.integers()
        if numbers and 0 <= numbers[0] <= 12:
            parts.append(part(str(numbers[0]), f"rows of up to {2 ** numbers[0]} elements"))
        if flags:
            parts.append(part(flags[0], "log-softmax" if logarithmic else "softmax without logarithm"))
    elif anatomy.base.startswith("cunn_"):
        parts.append(part("cunn", "long rows, one thread block each"))
    dtype = find_dtype(anatomy.template)
    return build(
        anatomy,
        "ATen",
        "loss" if logarithmic else "softmax",
        f"{what} {way}",
        join(what, "bwd" if backward else "fwd", dtype),
        direction=way,
        dtype=dtype,
        parts=tuple(parts),
    )


def _decode_cub(anatomy: Anatomy) -> KernelName:
    text = anatomy.body[:1500]
    root = anatomy.scope.split("::")[0]
    library = {"thrust": "Thrust", "rocprim": "rocPRIM", "hipcub": "rocPRIM"}.get(root, "CUB")
    found = first_match(PRIMITIVES, text)
    kernel_class, operation = found[1:] if found else ("other", "parallel primitive")
    parts = (part(anatomy.base, f"{operation}, from {library}"),)
    return build(anatomy, library, kernel_class, operation, f"{operation} ({library})", parts=parts)


def _decode_named(anatomy: Anatomy) -> KernelName | None:
    if found := first_match(BASES, anatomy.base):
        _, kernel_class, operation, direction = found
        if direction is None and "backward" in anatomy.base.lower():
            direction = "backward"
        dtype = find_dtype(anatomy.template) or find_dtype(anatomy.arguments)
        return build(
            anatomy,
            "ATen",
            kernel_class,
            operation,
            join(operation, dtype),
            direction=direction,
            dtype=dtype,
            parts=(part(anatomy.base, operation),),
        )
    if anatomy.scope.split("::")[0] != "at":
        return None
    return build(anatomy, "ATen", "other", "PyTorch kernel of unknown kind", anatomy.base)
