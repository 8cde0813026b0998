"""What single kernels say about the problems they solved.

A kernel does not say what it was called for. It says how many blocks it started, of which shape, and, under Nsight
Compute, how many operations it did and how many bytes it wrote. Each family of kernels turns that into a fact: a window
for a number of elements, a number of rows, or a predicate on the sizes of a matrix product. A fact may be weak and must
be sound: the sizes that were there are never excluded.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from stepscope.explain.kernel_names import KernelName
from stepscope.recording.readers.counter_metrics import CounterKey

Triple = tuple[int, int, int]
UNLIMITED = 1 << 62
# Above any size of a matrix in a model: the largest are vocabularies and the tokens of a batch.
LARGEST_SIZE = 1 << 24


class Window(msgspec.Struct, frozen=True):
    """Whole numbers from `low` to `high`, both included, in steps from `low` on."""

    low: int
    high: int
    step: int = 1

    def __contains__(self, number: int) -> bool:
        return self.low <= number <= self.high and (number - self.low) % self.step == 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1, self.step))

    @property
    def size(self) -> int:
        return max(0, (self.high - self.low) // self.step + 1)

    @property
    def is_exact(self) -> bool:
        return self.size == 1


def exactly(number: int) -> Window:
    return Window(number, number)


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, as it was seen."""

    index: int
    name: KernelName
    grid: Triple
    block: Triple
    duration_ns: int = 0
    registers: int | None = None
    shared_bytes: int | None = None
    counters: Mapping[CounterKey, int] = {}  # what was not measured is missing
    # Rows, columns, inner and batch of a product, where somebody wrote them down and is believed.
    told: tuple[int, int, int, int] | None = None

    @property
    def has_geometry(self) -> bool:
        """A file may leave out grids, or hold something else in their place: then a kernel's says nothing."""
        return min(*self.grid, *self.block) > 0


class Elements(msgspec.Struct, frozen=True, kw_only=True):
    """Copies and elementwise arithmetic: how many elements were computed."""

    count: Window


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Norms, softmax, losses, row sums: how many rows, and how wide where that is known."""

    rows: Window
    width: Window | None = None


class Gather(msgspec.Struct, frozen=True, kw_only=True):
    """Lookups in a table of embeddings: how many, and how many bytes each."""

    rows: Window
    width_bytes: Window | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels over lists of tensors, as optimizers use: elements in all, and tensors."""

    elements: Window
    tensors: Window | None = None


# --- Matrix products
#
# What a kernel reported is a measure of its problem's sizes, within two limits. Every measure here grows, or stays,
# with rows, columns and inner: tiles, padded work, bytes written. So when all but one are known, what the missing one
# can be is an interval, and bisection finds it without trying them all.

ProductSizes = tuple[int, int, int, int]  # rows, columns, inner, batch
Measure = Callable[[int, int, int, int], int]


class SizeBound(msgspec.Struct, frozen=True):
    """`low <= measure(rows, columns, inner, batch) <= high`, of a measure that never falls as sizes grow."""

    measure: Measure
    low: int
    high: int

    def holds(self, sizes: ProductSizes) -> bool:
        return self.low <= self.measure(*sizes) <= self.high


def equals(measure: Measure, number: int) -> SizeBound:
    return SizeBound(measure, number, number)


def at_least(measure: Measure, number: int) -> SizeBound:
    return SizeBound(measure, number, UNLIMITED)


def at_most(measure: Measure, number: int) -> SizeBound:
    return SizeBound(measure, 0, number)


class Product(msgspec.Struct, frozen=True):
    """A matrix product, maybe a batch of them, known by bounds and by what must divide where work was handed out in
    equal parts. In PyTorch's terms: out[rows, columns] is a sum over inner."""

    bounds: tuple[SizeBound, ...]
    # The measure of the sizes divides the number.
    divisors: tuple[tuple[Measure, int], ...] = ()
    # Of rows, columns and inner, where tensors lie contiguous in memory. A view of a wider matrix need not keep to it,
    # so this ranks and never excludes.
    usual_multiples: tuple[int, int, int] = (1, 1, 1)

    def admits(self, rows: int, columns: int, inner: int, batch: int) -> bool:
        sizes = (rows, columns, inner, batch)
        return all(bound.holds(sizes) for bound in self.bounds) and all(
            number % measure(*sizes) == 0 for measure, number in self.divisors
        )


def find_window(
    product: Product,
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

        def measure(size: int, bound: SizeBound = bound) -> int:
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


# --- Fused attention


class AttentionSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of attention as its kernels see it."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def sequences(self) -> int:
        """Heads of all sequences: each is a problem of its own."""
        return self.batch * self.heads


Rule = Callable[[AttentionSizes], bool]


class Attention(msgspec.Struct, frozen=True):
    """The windows hold besides the rules."""

    direction: Literal["forward", "backward"]
    rules: tuple[Rule, ...] = ()
    heads: Window | None = None
    batch: Window | None = None
    length: Window | None = None  # of the queries
    head_dim: Window | None = None

    def admits(
        self, batch: int, heads: int, kv_heads: int, query_length: int, key_length: int, head_dim: int, causal: bool
    ) -> bool:
        windows = ((self.batch, batch), (self.heads, heads), (self.length, query_length), (self.head_dim, head_dim))
        if any(window is not None and size not in window for window, size in windows):
            return False
        problem = AttentionSizes(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            queries=query_length,
            keys=key_length,
            head_dim=head_dim,
            causal=causal,
        )
        return all(rule(problem) for rule in self.rules)


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def within_tiles(tiles: int, size: int) -> Window:
    """The lengths that take this many tiles."""
    return Window((tiles - 1) * size + 1, tiles * size)


def count_tile_pairs(problem: AttentionSizes, query_tile: int, key_tile: int, *, skips: bool) -> int:
    """Pairs of tiles that a head computes. Under a causal mask that is aligned at the last query and key, a tile of
    queries goes as far as its last query sees."""
    across = ceil_div(problem.keys, key_tile)
    down = ceil_div(problem.queries, query_tile)
    if not skips:
        return down * across
    ahead = problem.keys - problem.queries
    seen = (ceil_div(max(0, (tile + 1) * query_tile + ahead), key_tile) for tile in range(down))
    return sum(min(across, count) for count in seen)


def fits_pairs(problem: AttentionSizes, pairs: int, query_tile: int, key_tile: int) -> bool:
    """Whether so many pairs are those of a head. A mask may have been skipped along or handed over as a tensor."""
    choices = (False, True) if problem.causal else (False,)
    return any(pairs == count_tile_pairs(problem, query_tile, key_tile, skips=skips) for skips in choices)


Fact = Elements | Rows | Gather | Product | Attention | Update
