"""PyTorch's elementwise shells: a functor, run over so many elements a block.

`vectorized_elementwise_kernel<4, …>` runs 128 threads a block and, since PyTorch 2.7, eight elements a thread (sixteen
where all it does is write single bytes); before it was four. The name tells the old from the new only sometimes, so
both are possible unless the caller knows better (`is_recent`). The other shells carry their numbers in their names.
"""

import re
from collections.abc import Iterable

import msgspec

from stepscope.explain.kernel_names import KernelName
from stepscope.recover.facts import Elements, Sighting
from stepscope.recover.families.functors import ANY_SIZE, result_sizes
from stepscope.recover.families.grids import (
    covered,
    first_enclosed,
    is_flat,
    is_true,
    join_choices,
    join_windows,
    keep_stored,
    take_apart,
    type_bytes,
    whole_number,
)

_THREADS = 128
_OLD_WORK, _WORK, _BYTE_WORK = 4, 8, 16  # elements a thread
_INDEX_THREADS = 64
# Those that begin with: threads, elements a thread, functor.
_COUNTED_SHELLS = (
    "elementwise_kernel",
    "elementwise_kernel_manual_unroll",
    "index_elementwise_kernel",
    "_scatter_gather_elementwise_kernel",
)
# What a functor returns is stored as it is, or cast first.
_NO_CAST, _CAST = "gpu_kernel_impl_nocast<", "gpu_kernel_impl<"
_OPERANDS = re.compile(r"array<char ?\*, (\d+)>", re.IGNORECASE)
# Kernels and template arguments that came after the change from four to eight.
_RECENT = re.compile(
    r"vectorized_gather_kernel|CatArrayBatchedCopy_vectorized|vectorized_elementwise_kernel<8,"
    r"|vectorized_layer_norm_kernel<[\w:]+, [\w:]+, (?:true|false|[01])>"
)


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    per_block: tuple[int, ...]  # elements, in every way that is possible
    sizes: tuple[int, ...] = ANY_SIZE  # bytes of one result; none where results are not written once each


def is_recent(names: Iterable[KernelName]) -> bool:
    """Whether a kernel of the run shows that its PyTorch gives eight elements to a thread."""
    return any(_RECENT.search(take_apart(name.name)[0].text) for name in names)


def read(sighting: Sighting, *, recent: bool = False) -> Elements | None:
    joined = join_choices(choices(sighting, recent=recent))
    assert joined is None or isinstance(joined, Elements)
    return joined


def choices(sighting: Sighting, *, recent: bool = False) -> tuple[Elements, ...]:
    """One of them holds. `recent`: the run is known to be one of PyTorch 2.7 or later."""
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
    if threads != _THREADS:  # another build of PyTorch than those for NVIDIA's GPUs
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
    # What other launchers wrap may write as often as it likes.
    is_stored_once = _CAST in arguments[2] or is_plain
    sizes = result_sizes(first_enclosed(functor), is_cast=not is_plain) if is_stored_once else ()
    return _Work(per_block=(threads * each,), sizes=sizes)


def _count_vectorized(arguments: tuple[str, ...], *, recent: bool) -> _Work:
    """As in every PyTorch that can have started this kernel."""
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
        # Vectors of eight elements need eight of them a thread.
        if not recent and arguments[0] != "8":
            each.add(_OLD_WORK)
    return _Work(per_block=tuple(_THREADS * work for work in sorted(each)), sizes=sizes)


def _read_triangle(sighting: Sighting) -> tuple[Elements, ...]:
    """`triu_tril_kernel<type, index, upper, elements a thread, in place>`: a thread stays within a line, so lines are
    filled up to whole threads, and at worst each thread has a single element."""
    anatomy, arguments = take_apart(sighting.name.name)
    if anatomy.base != "triu_tril_kernel" or len(arguments) < 5 or not is_flat(sighting):
        return ()
    each = whole_number(arguments[3])
    if not each:
        return ()
    threads = covered(sighting.grid[0], sighting.block[0])
    window = join_windows([threads, covered(sighting.grid[0], sighting.block[0] * each)])
    size = type_bytes(arguments[0])
    # In place only the half that becomes zero is written.
    written = sighting.counters.get("store_bytes") if size and not is_true(arguments[4]) else None
    return tuple(Elements(count=one) for one in keep_stored([window], written, (size or 1,)))
