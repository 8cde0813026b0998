"""The sizes of a decoder and of its run, and what follows from them.

`RunShape` has all of them as far as they are known; claims and candidates extend it. The search works on the sizes that
attention depends on, of one candidate (`Core`) or of many at once (`Cores`). Below are the sizes of the GEMMs and
tensors of a model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.recover.evidence.order import Role, Zone

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Quantity = int | Ints  # of one candidate, or of many
Number = TypeVar("Number", int, Ints)
Size = int | None
# In display order.
SizeName = Literal[
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "d_head",
    "d_ff",
    "vocab_size",
    "batch",
    "context",
]
SIZES: tuple[SizeName, ...] = get_args(SizeName)
LAYER_SIZES: tuple[SizeName, ...] = SIZES[1:]  # the sizes that single kernels depend on
CORE_FIELDS = ("d_model", "num_heads", "num_kv_heads", "d_head", "batch", "context")
# The positions that the LM head runs on: all, all but the last of each sequence, or only the last.
HeadRows = Literal["all", "all but last", "last"]
HEAD_ROWS: tuple[HeadRows, ...] = get_args(HeadRows)
ProductShape = tuple[Size, Size, Size, Size]  # rows, columns, inner, batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHalf(Generic[Number]):
    """The sizes that the attention half of a layer depends on. `tokens` = batch · context."""

    batch: Number
    context: Number
    d_model: Number
    num_heads: Number
    num_kv_heads: Number
    d_head: Number

    @property
    def tokens(self) -> Number:
        return self.batch * self.context

    @property
    def query_width(self) -> Number:
        return self.num_heads * self.d_head

    @property
    def key_width(self) -> Number:
        return self.num_kv_heads * self.d_head

    @property
    def joint_width(self) -> Number:
        """The width of queries, keys and values in one matrix."""
        return self.query_width + 2 * self.key_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Core(AttentionHalf[int]):
    """One candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores(AttentionHalf[Ints]):
    """Many candidates, as one array per field. With little evidence there are hundreds of thousands."""

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: int) -> Core:
        return Core(**{name: int(getattr(self, name)[index]) for name in CORE_FIELDS})

    def rows(self) -> list[tuple[int, ...]]:
        return list(zip(*(getattr(self, name).tolist() for name in CORE_FIELDS), strict=True))

    def take(self, chosen: Flags | Ints | slice) -> "Cores":
        return Cores(**{name: getattr(self, name)[chosen] for name in CORE_FIELDS})

    def with_width(self, d_model: int) -> "Cores":
        fields = {name: getattr(self, name) for name in CORE_FIELDS}
        return Cores(**{**fields, "d_model": np.full(len(self), d_model, np.int64)})


def join_cores(parts: Sequence[Cores]) -> Cores:
    none = np.zeros(0, np.int64)
    return Cores(**{name: np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in CORE_FIELDS})


class RunShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model and of its run. None is unknown: checks that need it are skipped."""

    num_layers: Size = None
    d_model: Size = None
    num_heads: Size = None
    num_kv_heads: Size = None
    d_head: Size = None
    d_ff: Size = None
    vocab_size: Size = None
    batch: Size = None
    context: Size = None

    @property
    def tokens(self) -> Size:
        return times(self.batch, self.context)

    @property
    def query_width(self) -> Size:
        return times(self.num_heads, self.d_head)

    @property
    def key_width(self) -> Size:
        return times(self.num_kv_heads, self.d_head)

    @property
    def core(self) -> Core | None:
        sizes = {name: size for name in CORE_FIELDS if (size := getattr(self, name)) is not None}
        return Core(**sizes) if len(sizes) == len(CORE_FIELDS) else None


class ClaimedShape(RunShape, frozen=True, kw_only=True):
    """A shape to run checks for."""

    head_rows: HeadRows | None = None  # None: any of them


def times(*sizes: Size) -> Size:
    product = 1
    for size in sizes:
        if size is None:
            return None
        product *= size
    return product


def plus(first: Size, second: Size) -> Size:
    return None if first is None or second is None else first + second


def product_sizes(role: Role, shape: ClaimedShape) -> tuple[ProductShape, ...]:
    """Return the sizes of the GEMM with this role, for every way in which a model of this shape may compute it."""
    tokens, width = shape.tokens, shape.d_model
    match role:
        case "query_key_value":
            return ((tokens, plus(shape.query_width, times(2, shape.key_width)), width, 1),)
        case "query":
            return ((tokens, shape.query_width, width, 1),)
        case "key" | "value":
            return ((tokens, shape.key_width, width, 1),)
        case "key_value":
            return ((tokens, times(2, shape.key_width), width, 1),)
        case "output":
            return ((tokens, width, shape.query_width, 1),)
        case "gate" | "up":
            return ((tokens, shape.d_ff, width, 1),)
        case "gate_up":
            return ((tokens, times(2, shape.d_ff), width, 1),)
        case "down":
            return ((tokens, width, shape.d_ff, 1),)
        case "head":
            ways = HEAD_ROWS if shape.head_rows is None else (shape.head_rows,)
            return tuple((count_head_rows(shape, way), shape.vocab_size, width, 1) for way in ways)
        case "scores" | "values":
            return _attention_sizes(role, shape)


def count_head_rows(shape: ClaimedShape, way: HeadRows) -> Size:
    match way:
        case "all":
            return shape.tokens
        case "all but last":
            return plus(shape.tokens, None if shape.batch is None else -shape.batch)
        case "last":
            return shape.batch


def _attention_sizes(role: Role, shape: ClaimedShape) -> tuple[ProductShape, ...]:
    """One GEMM per head, or one per group of heads if they share keys."""
    length, head, heads, kv_heads = shape.context, shape.d_head, shape.num_heads, shape.num_kv_heads
    group = heads // kv_heads if heads and kv_heads else None
    choices: list[ProductShape] = []
    for rows, sequences in ((length, times(shape.batch, heads)), (times(group, length), times(shape.batch, kv_heads))):
        choices.append((rows, length, head, sequences) if role == "scores" else (rows, head, length, sequences))
    return tuple(choices)


# --- Tensors
#
# A data movement kernel works on one of a few kinds of tensors of the model. A count that fits none of them is evidence
# against a candidate. A count that several candidates explain does not decide between them.

_ROTARY_PARTS = (1, 2, 4, 8)  # whole heads, rotated halves, and quarters of both


def tensor_sizes(core: Core | Cores, zone: Zone) -> Iterator[Quantity]:
    """Yield the sizes of tensors in the attention half of a layer, or before the first layer."""
    yield core.tokens * core.d_model
    yield core.tokens
    match zone:
        case "before":
            yield from _positions(core)
            yield from _masks(core)
            yield from _weights(core)
        case "heads" | "merge":
            yield from _heads(core)
            yield from _masks(core)
            yield from _positions(core)
            yield from _weights(core)
        case "final":
            yield from (core.batch * core.d_model, core.batch, core.tokens - core.batch, core.context)
        case _:
            yield from _weights(core)


def _heads(core: Core | Cores) -> Iterator[Quantity]:
    query, key = core.query_width, core.key_width
    for width in (query, key, core.joint_width, 2 * key, query + key):
        yield from (core.tokens * width // part for part in _ROTARY_PARTS)
    for heads in (core.num_heads, core.num_kv_heads):
        yield core.tokens * heads
        yield core.tokens * heads * core.context


def _positions(core: Core | Cores) -> Iterator[Quantity]:
    """Yield the sizes of rotary and learned position tables, and of what is computed to detect packed sequences: one
    more element per sequence."""
    for part in _ROTARY_PARTS:
        width = core.d_head // part
        yield from (width, core.context * width, core.tokens * width)
    yield from (core.context, core.batch, core.context * core.d_model, core.context - 1)
    yield from (core.tokens + core.batch, core.tokens - core.batch)


def _masks(core: Core | Cores) -> Iterator[Quantity]:
    square = core.context * core.context
    padded = core.context * (-(-core.context // 8) * 8)
    yield from (square, core.batch * square, core.batch * padded)


def _weights(core: Core | Cores) -> Iterator[Quantity]:
    """Yield the sizes of weights that are cast before each GEMM, as autocast does."""
    yield from (core.d_model * width for width in (core.query_width, core.key_width, core.joint_width))


def counted_up_to(core: Core | Cores) -> Iterator[Quantity]:
    """Yield the lengths of aranges: positions of a sequence, sequences, pairs of features."""
    yield from (core.context, core.context + 1, core.batch, core.d_head, core.d_head // 2, core.d_head // 4)


def feed_forward_sizes(tokens: int, d_model: int, d_ff: Quantity, *, joint: bool) -> tuple[Quantity, ...]:
    """Return the sizes in the feed-forward layer: activations, and weights that are cast. `joint`: one GEMM computes
    gate and up."""
    return (tokens * d_ff, d_model * d_ff, *((2 * d_model * d_ff,) if joint else ()))


def divisors(*factors: int) -> list[int]:
    """Return the divisors of the product of the factors, in ascending order. Passing the factors makes it fast for
    large products."""
    found = {1}
    for prime in (prime for factor in factors for prime in _primes(factor)):
        found |= {number * prime for number in found}
    return sorted(found)


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
    if number > 1:
        yield number
