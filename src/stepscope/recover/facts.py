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


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix product, maybe a batch of them. `admits(rows, columns, inner, batch)` in PyTorch's terms:
    out[rows, columns] is a sum over inner."""

    admits: Callable[[int, int, int, int], bool]
    tile: tuple[int, ...] | None = None


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Fused attention. `admits(batch, heads, kv_heads, query_length, key_length, head_dim, causal)`."""

    direction: Literal["forward", "backward"]
    admits: Callable[[int, int, int, int, int, int, bool], bool]
    heads: Window | None = None
    batch: Window | None = None
    length: Window | None = None  # of the queries
    head_dim: Window | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels over lists of tensors, as optimizers use: elements in all, and tensors."""

    elements: Window
    tensors: Window | None = None


Fact = Elements | Rows | Gather | Product | Attention | Update
