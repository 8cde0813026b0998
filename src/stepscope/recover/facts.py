"""Facts that a single kernel gives about its problem.

A launch does not say what it is for. It has a number of blocks and their shape, and under Nsight Compute the number of
operations and of stored bytes. Each kernel family turns that into a fact: a window for a number of elements, a number
of rows, or a predicate on the sizes of a GEMM. A fact may be weak but must be sound: it never excludes the true sizes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from stepscope.explain.kernel_names import KernelName
from stepscope.recording.readers.counter_metrics import CounterKey

Triple = tuple[int, int, int]
UNLIMITED = 1 << 62
# Larger than any matrix dimension in a model: the largest are vocabularies and the tokens of a batch.
LARGEST_SIZE = 1 << 24


class Window(msgspec.Struct, frozen=True):
    """The integers from `low` to `high`, both included, in steps of `step`."""

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
    """One kernel launch in the evidence."""

    index: int
    name: KernelName
    grid: Triple
    block: Triple
    duration_ns: int = 0
    registers: int | None = None
    shared_bytes: int | None = None
    counters: Mapping[CounterKey, int] = {}  # only those that were measured
    tensor_dtypes: Mapping[str, int] = {}  # tensor core operations by dtype of the inputs, if they were counted
    noise: Mapping[str, float] = {}  # metrics that differ between launches of the same work, such as cycles
    launch: int | None = None  # its number among all calls to the driver, or its ID in Nsight Compute; both increase
    start_ns: int | None = None  # None if the file has no timeline
    in_graph: bool = False  # kernels of a CUDA graph have one number, and may run at the same time
    # Rows, columns, inner and batch of a GEMM, if the profiler recorded them and the user trusts them.
    told: tuple[int, int, int, int] | None = None

    @property
    def counted_dtype(self) -> str | None:
        """The dtype in which the tensor cores counted the most operations."""
        counted = {dtype: number for dtype, number in self.tensor_dtypes.items() if number}
        return max(counted, key=lambda dtype: counted[dtype], default=None)

    @property
    def is_misnamed(self) -> bool:
        """Whether the tensor cores counted another dtype than the name has. An fp32 kernel may split its inputs into
        several of fewer bits, unless its name says that it does not use tensor cores."""
        named, counted = self.name.dtype, self.counted_dtype
        if named is None or counted is None:
            return False
        return self.name.tensor_cores is False if named == "fp32" else counted != named

    @property
    def dtype(self) -> str | None:
        """The dtype of the inputs. Counters decide: a name can be changed without changing what the kernel did."""
        return self.counted_dtype if self.is_misnamed else self.name.dtype or self.counted_dtype

    @property
    def has_geometry(self) -> bool:
        """Whether the launch has a grid and a block. Some files leave them out or have other values instead."""
        return min(*self.grid, *self.block) > 0


class Elements(msgspec.Struct, frozen=True, kw_only=True):
    """Copies and elementwise arithmetic: the number of elements."""

    count: Window


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Norms, softmax, losses, row sums: the number of rows, and their width if known."""

    rows: Window
    width: Window | None = None


class Gather(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding lookups: how many, and how many bytes each."""

    rows: Window
    width_bytes: Window | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer kernels over lists of tensors: total elements, and tensors."""

    elements: Window
    tensors: Window | None = None


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels that divide rows into groups, such as tokens by expert: the number of groups."""

    count: Window


# --- GEMMs
#
# What a kernel reports is a measure of its problem's sizes, within two limits. Every measure here increases or stays
# the same with rows, columns and inner: tiles, padded work, stored bytes. So if all sizes but one are known, the
# possible values of the last form an interval, and bisection finds it.

ProductSizes = tuple[int, int, int, int]  # rows, columns, inner, batch
Measure = Callable[[int, int, int, int], int]


class SizeBound(msgspec.Struct, frozen=True):
    """`low <= measure(rows, columns, inner, batch) <= high`, for a measure that never decreases as sizes grow."""

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
    """A GEMM or a batch of GEMMs, given by bounds, and by divisibility where work is divided into equal parts. In
    PyTorch's terms: out[rows, columns] is a sum over inner."""

    bounds: tuple[SizeBound, ...]
    # (measure, number): the measure of the sizes must divide the number.
    divisors: tuple[tuple[Measure, int], ...] = ()
    # Multiples of rows, columns and inner for contiguous tensors. A view of a wider matrix can differ, so this only
    # ranks candidates and never excludes one.
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
    """Return the window of the one size that is not given, or None if nothing fits. The batch must be given: a caller
    tries all, there are few.

    The window contains every size that `admits` accepts. With divisors, `admits` may reject some sizes in the window.
    """
    sizes = (rows, columns, inner, batch)
    assert sizes.count(None) == 1, "exactly one size must be None"
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
    """Return the first size from `low` to `high` with at least this measure, or `high + 1` if there is none."""
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
    """An attention problem from the point of view of its kernels."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def sequences(self) -> int:
        """The heads of all sequences: each is a separate problem."""
        return self.batch * self.heads


Rule = Callable[[AttentionSizes], bool]


class Attention(msgspec.Struct, frozen=True):
    """A fused attention kernel. Both the windows and the rules must hold."""

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
    """Return the lengths that need this many tiles."""
    return Window((tiles - 1) * size + 1, tiles * size)


def count_tile_pairs(problem: AttentionSizes, query_tile: int, key_tile: int, *, skips: bool) -> int:
    """Return the pairs of tiles that one head computes. With a causal mask, aligned at the last query and key, a tile
    of queries stops at the last key that it can see."""
    across = ceil_div(problem.keys, key_tile)
    down = ceil_div(problem.queries, query_tile)
    if not skips:
        return down * across
    ahead = problem.keys - problem.queries
    seen = (ceil_div(max(0, (tile + 1) * query_tile + ahead), key_tile) for tile in range(down))
    return sum(min(across, count) for count in seen)


def fits_pairs(problem: AttentionSizes, pairs: int, query_tile: int, key_tile: int) -> bool:
    """Whether one head computes this many pairs. A causal mask may be skipped, or passed as a tensor and computed."""
    choices = (False, True) if problem.causal else (False,)
    return any(pairs == count_tile_pairs(problem, query_tile, key_tile, skips=skips) for skips in choices)


Fact = Elements | Rows | Gather | Product | Attention | Update | Groups
