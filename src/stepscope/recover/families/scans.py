"""Running sums along the last dimension, as positions are counted in a padded batch.

A single row goes to CUB. Several are shared out over a block of 512 threads, so that their ratio in the block is about
the ratio of width to rows in the problem: the shape of the block bounds both.
"""

from collections.abc import Iterator

from stepscope.recover.facts import Rows, Sighting, Window, exactly
from stepscope.recover.families.grids import (
    covered,
    factor,
    is_flat,
    join_choices,
    join_windows,
    meet,
    take_apart,
    type_bytes,
)

_SEVERAL_ROWS = "tensor_kernel_scan_innermost_dim"
_ONE_ROW = "DeviceScanKernel"
_THREADS_LOG = 9
_FEWEST_LOG, _MOST_LOG = 4, 9  # threads a row
_LONGEST_LOG = 31


def read(sighting: Sighting) -> Rows | None:
    joined = join_choices(choices(sighting))
    assert joined is None or isinstance(joined, Rows)
    return joined


def choices(sighting: Sighting) -> tuple[Rows, ...]:
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
    for rows_log in range(1, _LONGEST_LOG + 1):  # one row alone is not done here
        rows = meet(by_grid, _rounded_up_to(rows_log))
        logs = range(_LONGEST_LOG + 1)
        widths = [_rounded_up_to(log) for log in logs if threads_a_row(rows_log, log) == threads_log]
        if rows and widths:
            yield Rows(rows=rows, width=join_windows(widths))


def threads_a_row(rows_log: int, width_log: int) -> int:
    """The logarithm of it, from those of rows and width rounded up. PyTorch's difference has no sign: it wraps."""
    balanced = (_THREADS_LOG + width_log - rows_log) % 2**32 // 2
    return min(max(_FEWEST_LOG, balanced), _MOST_LOG)


def _rounded_up_to(logarithm: int) -> Window:
    """The numbers whose next power of two it is."""
    return Window(2 ** (logarithm - 1) + 1 if logarithm else 1, 2**logarithm)
