"""Facts that can be searched: what a kernel reported is a measure of its problem's sizes, within two limits.

Every measure here grows, or stays, with rows, columns and inner: tiles, padded work, bytes written. So when all but one
are known, what the missing one can be is an interval, and bisection finds it without trying them all.
"""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from stepscope.recover.facts import Product, Window

UNLIMITED = 1 << 62
# Above any size of a matrix in a model: the largest are vocabularies and the tokens of a batch.
LARGEST_SIZE = 1 << 24

Measure = Callable[[int, int, int, int], int]  # of rows, columns, inner, batch
Sizes = tuple[int, int, int, int]


class Bound(msgspec.Struct, frozen=True):
    """`low <= measure(rows, columns, inner, batch) <= high`, of a measure that never falls as sizes grow."""

    measure: Measure
    low: int
    high: int

    def holds(self, sizes: Sizes) -> bool:
        return self.low <= self.measure(*sizes) <= self.high


def exactly(measure: Measure, number: int) -> Bound:
    return Bound(measure, number, number)


def at_least(measure: Measure, number: int) -> Bound:
    return Bound(measure, number, UNLIMITED)


def at_most(measure: Measure, number: int) -> Bound:
    return Bound(measure, 0, number)


class BoundedProduct(Product, frozen=True, kw_only=True):
    """A matrix product, known by bounds and by what must divide where work was handed out in equal parts."""

    bounds: tuple[Bound, ...] = ()
    # The measure of the sizes divides the number.
    divisors: tuple[tuple[Measure, int], ...] = ()
    # Kernels that only add up the partial results of the product before them know nothing of `inner`.
    sums_parts: bool = False
    # Of rows, columns and inner, where tensors lie contiguous in memory. A view of a wider matrix need not keep to it,
    # so this ranks and never excludes.
    usual_multiples: tuple[int, int, int] = (1, 1, 1)


def bounded(
    bounds: Iterable[Bound],
    *,
    tile: tuple[int, ...] | None = None,
    divisors: Iterable[tuple[Measure, int]] = (),
    sums_parts: bool = False,
    usual_multiples: tuple[int, int, int] = (1, 1, 1),
) -> BoundedProduct:
    limits, parts = tuple(bounds), tuple(divisors)
    return BoundedProduct(
        admits=partial(_admits, limits, parts),
        tile=tile,
        bounds=limits,
        divisors=parts,
        sums_parts=sums_parts,
        usual_multiples=usual_multiples,
    )


def _admits(
    bounds: tuple[Bound, ...],
    divisors: tuple[tuple[Measure, int], ...],
    rows: int,
    columns: int,
    inner: int,
    batch: int,
) -> bool:
    sizes = (rows, columns, inner, batch)
    return all(bound.holds(sizes) for bound in bounds) and all(
        number % measure(*sizes) == 0 for measure, number in divisors
    )


def find_window(
    product: BoundedProduct,
    *,
    rows: int | None = None,
    columns: int | None = None,
    inner: int | None = None,
    batch: int = 1,
    largest: int = LARGEST_SIZE,
) -> Window | None:
    """What the one size that is not given can be; None if nothing fits. Batches are tried: there are few.

    Every size that `admits` takes is inside. Where something must divide, `admits` may refuse some that are."""
    sizes = (rows, columns, inner, batch)
    assert sizes.count(None) == 1, "one size is asked for, the others are given"
    axis = sizes.index(None)
    low, high = 1, largest
    for bound in product.bounds:

        def measure(size: int, bound: Bound = bound) -> int:
            filled = [size if index == axis else known or 1 for index, known in enumerate(sizes)]
            return bound.measure(filled[0], filled[1], filled[2], filled[3])

        low = _first_reaching(measure, bound.low, low, high)
        high = _first_reaching(measure, bound.high + 1, low, high) - 1
        if low > high:
            return None
    return Window(low, high)


def _first_reaching(measure: Callable[[int], int], number: int, low: int, high: int) -> int:
    """The first size from `low` to `high` whose measure is at least this, `high + 1` where none is."""
    end = high + 1
    while low < end:
        middle = (low + end) // 2
        if measure(middle) >= number:
            end = middle
        else:
            low = middle + 1
    return low
