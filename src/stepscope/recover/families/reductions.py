"""`reduce_kernel`: sums, means and maxima along any dimensions; and running sums.

The rows of a fact are the results, and its width is the number of elements per result: a mean over the last dimension
has the rows of its input, and the sum of a bias gradient has a row for each of its elements.

PyTorch assigns the fastest dimension of the input to the threads of a warp. If that dimension is reduced, a result
takes a row of threads or a whole block; if it is kept, each thread has its own results. Blocks, shared memory and
bounds on both sizes follow from that. In the other direction, they leave one or a few possibilities.
"""

from collections.abc import Iterator

import msgspec

from stepscope.recover.facts import Rows, Sighting, Window, exactly
from stepscope.recover.families.grids import (
    LARGEST,
    WARP,
    covered,
    factor,
    is_flat,
    join_windows,
    meet,
    split_arguments,
    take_apart,
    type_bytes,
    whole_number,
)

_STATIC_BYTES = 16  # shared memory of every block
_MOST_VALUES_A_THREAD = 256
_VALUES_A_THREAD = 16
# Operations with one result, not a pair of value and position.
_SINGLE_RESULTS = ("func_wrapper_t<", "MeanOps<")


class _Launch(msgspec.Struct, frozen=True, kw_only=True):
    width: int  # threads of a block
    height: int
    blocks: int
    blocks_of_a_result: int
    most_threads: int
    results_a_thread: int
    input_vector: int
    shares_memory: bool | None


def read_reduction(sighting: Sighting) -> tuple[Rows, ...]:
    anatomy, arguments = take_apart(sighting.name.name)
    if anatomy.base != "reduce_kernel" or len(arguments) < 3 or sighting.grid[2] != 1:
        return ()
    launch = _describe(sighting, arguments)
    if launch is None:
        return ()
    possible = tuple(_possible(launch))
    if launch.blocks_of_a_result > 1 or not any(word in arguments[2] for word in _SINGLE_RESULTS):
        return possible
    return _keep_stored(possible, sighting, arguments[2])


def _describe(sighting: Sighting, arguments: tuple[str, ...]) -> _Launch | None:
    """`<threads, results per thread, ReduceOp<type, operation, index, output, values, vector>>`"""
    most_threads, results_a_thread = whole_number(arguments[0]), whole_number(arguments[1])
    if not most_threads or not results_a_thread:
        return None
    inner = _operation(arguments[2])
    shared = sighting.shared_bytes
    return _Launch(
        width=sighting.block[0],
        height=sighting.block[1],
        blocks=sighting.grid[0],
        blocks_of_a_result=sighting.grid[1],
        most_threads=most_threads,
        results_a_thread=results_a_thread,
        input_vector=(whole_number(inner[5]) if len(inner) > 5 else None) or 4,
        shares_memory=None if shared is None else shared > _STATIC_BYTES,
    )


def _operation(argument: str) -> tuple[str, ...]:
    _, _, inner = argument.partition("ReduceOp<")
    return split_arguments(inner.removesuffix(">"))


def _possible(launch: _Launch) -> Iterator[Rows]:
    for lanes_reduce in (True, False):
        if lanes_reduce and launch.results_a_thread > 1:
            continue
        for warps_reduce in (True, False):
            if _fits(launch, lanes_reduce=lanes_reduce, warps_reduce=warps_reduce):
                results = _find_results(launch, lanes_reduce=lanes_reduce, warps_reduce=warps_reduce)
                reduced = _find_reduced(launch, lanes_reduce=lanes_reduce, warps_reduce=warps_reduce)
                if results and reduced:
                    yield Rows(rows=results, width=reduced if reduced.high < LARGEST else None)


def _fits(launch: _Launch, *, lanes_reduce: bool, warps_reduce: bool) -> bool:
    if launch.blocks_of_a_result > 1 and not warps_reduce:
        return False
    through_memory = warps_reduce or (lanes_reduce and launch.width > WARP)
    return launch.shares_memory is None or launch.shares_memory == through_memory


def _find_results(launch: _Launch, *, lanes_reduce: bool, warps_reduce: bool) -> Window | None:
    per_block = (1 if lanes_reduce else launch.width) * (1 if warps_reduce else launch.height)
    by_grid = covered(launch.blocks, per_block)
    by_block = _size_of_height(launch) if lanes_reduce else _size_of_width(launch)
    found = meet(by_grid, by_block)
    each = launch.results_a_thread
    return Window(found.low * each, found.high * each, each) if found else None


def _find_reduced(launch: _Launch, *, lanes_reduce: bool, warps_reduce: bool) -> Window | None:
    """Return the elements per result, from the shape of a block and the limit per thread."""
    if lanes_reduce:
        lanes, by_block = launch.width, _size_of_width(launch)
        # Each lane may have read several elements at once.
        by_block = Window(by_block.low, min(LARGEST, (by_block.high + 1) * launch.input_vector - 1))
    else:
        lanes, by_block = 1, _size_of_height(launch)
    most = lanes * (min(launch.height * _VALUES_A_THREAD, _MOST_VALUES_A_THREAD) - 1)
    by_work = Window(most + 1, LARGEST) if warps_reduce else Window(1, most)
    if launch.blocks_of_a_result > 1:
        threads = lanes * launch.height
        most = launch.blocks_of_a_result * threads * _MOST_VALUES_A_THREAD
        by_work = Window(threads * (_MOST_VALUES_A_THREAD - 1) + 1, most)
    return meet(by_block, by_work)


def _size_of_width(launch: _Launch) -> Window:
    """Return the sizes that give this block width: the largest power of two, unless the block was full."""
    room = launch.most_threads // launch.height
    return Window(launch.width, 2 * launch.width - 1 if launch.width < room else LARGEST)


def _size_of_height(launch: _Launch) -> Window:
    room = launch.most_threads // min(launch.width, WARP)
    return Window(launch.height, 2 * launch.height - 1 if launch.height < room else LARGEST)


def _keep_stored(possible: tuple[Rows, ...], sighting: Sighting, operation: str) -> tuple[Rows, ...]:
    """Each result is stored once, in its output type."""
    inner = _operation(operation)
    size = type_bytes(inner[3]) if len(inner) > 3 else None
    written = sighting.counters.get("store_bytes")
    if size is None or written is None:
        return possible
    results, rest = divmod(written, size)
    exact = [
        msgspec.structs.replace(choice, rows=exactly(results))
        for choice in possible
        if not rest and results in choice.rows
    ]
    return tuple(exact) or possible


# --- Running sums along the last dimension, for example of positions in a padded batch
#
# A single row is processed by CUB. Several rows share a block of 512 threads, whose shape has about the ratio of width
# to rows of the problem: it bounds both.

_SEVERAL_ROWS = "tensor_kernel_scan_innermost_dim"
_ONE_ROW = "DeviceScanKernel"
_THREADS_LOG = 9
_FEWEST_LOG, _MOST_LOG = 4, 9  # threads a row
_LONGEST_LOG = 31


def read_scan(sighting: Sighting) -> tuple[Rows, ...]:
    anatomy, arguments = take_apart(sighting.name.name)
    if not is_flat(sighting):
        return ()
    if anatomy.base == _ONE_ROW:
        return (Rows(rows=exactly(1)),)
    if anatomy.base != _SEVERAL_ROWS or sighting.block[0] * sighting.block[1] != 2**_THREADS_LOG:
        return ()
    found = tuple(_find_ratios(sighting))
    size = type_bytes(arguments[0]) if arguments else None
    elements, rest = divmod(sighting.counters.get("store_bytes", 0), size or 1)
    if not size or not elements or rest:
        return found
    exact = [pair for choice in found if choice.width for pair in factor(elements, choice.rows, choice.width)]
    return tuple(exact) or found


def _find_ratios(sighting: Sighting) -> Iterator[Rows]:
    threads_log = sighting.block[0].bit_length() - 1
    by_grid = covered(sighting.grid[0], sighting.block[1])
    for rows_log in range(1, _LONGEST_LOG + 1):  # this kernel is not used for a single row
        rows = meet(by_grid, _rounded_up_to(rows_log))
        logs = range(_LONGEST_LOG + 1)
        widths = [_rounded_up_to(log) for log in logs if threads_a_row(rows_log, log) == threads_log]
        if rows and widths:
            yield Rows(rows=rows, width=join_windows(widths))


def threads_a_row(rows_log: int, width_log: int) -> int:
    """Return log2 of the threads per row, from log2 of rows and width rounded up. PyTorch's difference is unsigned: it
    wraps around."""
    balanced = (_THREADS_LOG + width_log - rows_log) % 2**32 // 2
    return min(max(_FEWEST_LOG, balanced), _MOST_LOG)


def _rounded_up_to(logarithm: int) -> Window:
    """Return the numbers that round up to this power of two."""
    return Window(2 ** (logarithm - 1) + 1 if logarithm else 1, 2**logarithm)
