"""Kernels with a fixed number of elements per block: PyTorch's elementwise shells and `torch.cat`.

A shell runs a functor over its elements. `vectorized_elementwise_kernel<4, …>` has 128 threads per block and, since
PyTorch 2.7, eight elements per thread (sixteen if it only writes single bytes); before that it was four. The name does
not always show which, so both are possible unless the caller knows (`is_recent`). Other shells have these numbers in
their names.
"""

import re
from collections.abc import Iterable

import msgspec

from stepscope.explain.kernel_names import KernelName
from stepscope.recover.facts import Elements, Sighting, Window
from stepscope.recover.families.grids import (
    LARGEST,
    covered,
    first_enclosed,
    is_flat,
    is_true,
    join_windows,
    keep_stored,
    take_apart,
    type_bytes,
    whole_number,
)

# --- The type that an elementwise kernel writes, according to the functor in its name
#
# The stored bytes are the number of elements times the size of one. The size is known if the functor names its result
# (`BinaryFunctor<float, float, bool, …>`), returns the type of its argument, or compares. Otherwise it is open.
#
# Additions and multiplications were tried too and do not work: the last block computes past the end of the data, so
# they match the elements only if every block is full.

ANY_SIZE = (1, 2, 4, 8, 16)
_SCOPES = re.compile(
    r"\b(?:void |(?:at|native|c10|binary_internal|detail|std)::)|\(anonymous namespace\)::|<unnamed>::"
)
_NAMED_RESULT = re.compile(r"(?:Binary|AUnary|BUnary)Functor<([^<>,]+), ([^<>,]+), ([^<>,]+),")
_OWN_TYPE = re.compile(r"(?:CUDAFunctor_add|CUDAFunctorOnSelf_add|FillFunctor)<([^<>,]+)>")
_COMPARISON = re.compile(r"(?:Compare\w*Functor|is(?:neg|pos)inf_kernel|isnan_kernel|isinf_kernel|logical_\w+_kernel)")
_HALF_COPY = re.compile(r"b?float16_copy_kernel_cuda")
# These return the type of their first argument that is not a condition.
_SAME_TYPE = re.compile(
    r"(?:direct_copy|neg|tanh|tanh_backward|sigmoid|sigmoid_backward|exp|rsqrt|sqrt|cos|sin|silu|silu_backward|masked_fill"
    r"|where|log|reciprocal|pow_tensor_scalar|GeluCUDA|GeluBackwardCUDA|launch_clamp)_?(?:kernel|scalar|Kernel)"
)
_PARAMETERS = re.compile(r"lambda\(([^()]+)\)")


def result_sizes(functor: str, *, is_cast: bool) -> tuple[int, ...]:
    """Return the possible bytes per result: one size if it is known. A kernel that casts its result may write any
    type."""
    if is_cast:
        return ANY_SIZE
    plain = _SCOPES.sub("", functor)
    if _HALF_COPY.match(plain):
        return (2,)
    if _COMPARISON.match(plain):
        return (1,)
    spelled = _spell_result(plain)
    size = type_bytes(spelled) if spelled else None
    return (size,) if size else ANY_SIZE


def _spell_result(plain: str) -> str | None:
    if match := _NAMED_RESULT.match(plain):
        return match[3]
    if match := _OWN_TYPE.match(plain):
        return match[1]
    if _SAME_TYPE.match(plain):
        written = [one.strip() for group in _PARAMETERS.findall(plain)[-1:] for one in group.split(",")]
        return next((one for one in written if one != "bool"), "bool" if written else None)
    return None


# --- Shells

_THREADS = 128
_OLD_WORK, _WORK, _BYTE_WORK = 4, 8, 16  # elements a thread
_INDEX_THREADS = 64
# Shells whose template starts with: threads, elements per thread, functor.
_COUNTED_SHELLS = (
    "elementwise_kernel",
    "elementwise_kernel_manual_unroll",
    "index_elementwise_kernel",
    "_scatter_gather_elementwise_kernel",
)
# The functor's result is stored as it is, or cast first.
_NO_CAST, _CAST = "gpu_kernel_impl_nocast<", "gpu_kernel_impl<"
_OPERANDS = re.compile(r"array<char ?\*, (\d+)>", re.IGNORECASE)
# Kernels and template arguments that were added after the change from four to eight.
_RECENT = re.compile(
    r"vectorized_gather_kernel|CatArrayBatchedCopy_vectorized|vectorized_elementwise_kernel<8,"
    r"|vectorized_layer_norm_kernel<[\w:]+, [\w:]+, (?:true|false|[01])>"
)


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    per_block: tuple[int, ...]  # elements, for every possibility
    sizes: tuple[int, ...] = ANY_SIZE  # bytes per result; empty if results may be written more than once


def is_recent(names: Iterable[KernelName]) -> bool:
    """Whether a kernel of the run shows that its PyTorch gives eight elements to each thread."""
    return any(_RECENT.search(take_apart(name.name)[0].text) for name in names)


def read_elementwise(sighting: Sighting, *, recent: bool = False) -> tuple[Elements, ...]:
    """Return the possibilities, of which one holds. `recent`: the run is known to use PyTorch 2.7 or later."""
    work = _find_work(sighting, recent=recent) if is_flat(sighting) else None
    if work is None:
        return _read_triangle(sighting)
    windows = [covered(sighting.grid[0], per_block) for per_block in work.per_block]
    stored = keep_stored(windows, sighting.counters.get("store_bytes"), work.sizes)
    return tuple(Elements(count=window) for window in stored)


def _find_work(sighting: Sighting, *, recent: bool) -> _Work | None:
    anatomy, arguments = take_apart(sighting.name.name)
    threads = sighting.block[0]
    if anatomy.base == "elementwise_kernel_with_index":
        return _Work(per_block=(threads,)) if threads == _INDEX_THREADS else None
    if len(arguments) < 3:
        return None
    if anatomy.base in _COUNTED_SHELLS:
        return _count_written(arguments, threads)
    if threads != _THREADS:  # not a PyTorch build for NVIDIA GPUs
        return None
    if anatomy.base == "vectorized_elementwise_kernel":
        return _count_vectorized(arguments, recent=recent)
    if anatomy.base == "unrolled_elementwise_kernel":
        sizes = result_sizes(arguments[0], is_cast="StoreWithCast" in anatomy.template)
        return _Work(per_block=(threads * (whole_number(arguments[2]) or _OLD_WORK),), sizes=sizes)
    return None


def _count_written(arguments: tuple[str, ...], threads: int) -> _Work | None:
    each = whole_number(arguments[1])
    if whole_number(arguments[0]) != threads or not each:
        return None
    _, is_plain, functor = arguments[2].partition(_NO_CAST)
    # Kernels from other launchers may write a result more than once.
    is_stored_once = _CAST in arguments[2] or is_plain
    sizes = result_sizes(first_enclosed(functor), is_cast=not is_plain) if is_stored_once else ()
    return _Work(per_block=(threads * each,), sizes=sizes)


def _count_vectorized(arguments: tuple[str, ...], *, recent: bool) -> _Work:
    """Return the work per block in every PyTorch version that can have launched this kernel."""
    sizes = result_sizes(arguments[1], is_cast=False)
    operands = _OPERANDS.search(arguments[2])
    may_read, may_not = (operands is None or operands[1] != "1"), (operands is None or operands[1] == "1")
    each = set()
    if "detail::Array" in arguments[2]:  # before 2.4
        each.add(_OLD_WORK)
    else:
        if may_read or sizes != (1,):
            each.add(_WORK)
        if may_not and 1 in sizes:
            each.add(_BYTE_WORK)
        # Vectors of eight elements require eight elements per thread.
        if not recent and arguments[0] != "8":
            each.add(_OLD_WORK)
    return _Work(per_block=tuple(_THREADS * work for work in sorted(each)), sizes=sizes)


def _read_triangle(sighting: Sighting) -> tuple[Elements, ...]:
    """`triu_tril_kernel<type, index, upper, elements per thread, in place>`: a thread stays within a row, so rows are
    padded to whole threads. In the worst case each thread has a single element."""
    anatomy, arguments = take_apart(sighting.name.name)
    if anatomy.base != "triu_tril_kernel" or len(arguments) < 5 or not is_flat(sighting):
        return ()
    each = whole_number(arguments[3])
    if not each:
        return ()
    threads = covered(sighting.grid[0], sighting.block[0])
    window = join_windows([threads, covered(sighting.grid[0], sighting.block[0] * each)])
    size = type_bytes(arguments[0])
    # In place, only the half that becomes zero is written.
    written = sighting.counters.get("store_bytes") if size and not is_true(arguments[4]) else None
    return tuple(Elements(count=one) for one in keep_stored([window], written, (size or 1,)))


# --- torch.cat
#
# Each tensor has a row of blocks, sized for the largest tensor.
#
# The plain kernels launch two blocks per SM whatever the sizes, so only stored bytes give a count. Kernels that copy
# sixteen bytes per thread launch as many blocks as the largest tensor needs, up to 32 per SM.

_ALIGNED_CAT = (
    "CatArrayBatchedCopy_aligned16_contig",
    "CatArrayBatchedCopy_alignedK_contig",
    "CatArrayBatchedCopy_vectorized",
)
_MOST_BLOCKS_OF_AN_SM = 32


def read_concatenation(sighting: Sighting) -> Elements | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if not anatomy.base.startswith("CatArrayBatchedCopy") or not arguments:
        return None
    _, _, opaque = arguments[0].partition("OpaqueType<")
    size = whole_number(opaque.removesuffix(">"))
    if not size:
        return None
    window = Window(1, LARGEST)
    if anatomy.base in _ALIGNED_CAT:
        # Newer names have the bytes per thread after the other numbers. Before, it was 8 or 16.
        said = whole_number(arguments[5]) if len(arguments) > 5 else None
        window = join_windows(
            [_count_concatenated(sighting, max(1, moved // size)) for moved in ((said,) if said else (8, 16))]
        )
    stored = keep_stored([window], sighting.counters.get("store_bytes"), (size,))
    return Elements(count=stored[0]) if stored[0].high < LARGEST else None


def _count_concatenated(sighting: Sighting, per_thread: int) -> Window:
    """Return the elements of all tensors together: the largest fills its grid to within a block, others may be nearly
    empty."""
    blocks, tensors = sighting.grid[0], sighting.grid[1]
    largest = covered(blocks, sighting.block[0] * per_thread)
    capped = blocks % _MOST_BLOCKS_OF_AN_SM == 0
    return Window(largest.low, LARGEST if capped else tensors * largest.high)
