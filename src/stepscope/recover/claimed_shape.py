"""The sizes of a claim, and of the matrix products that a model of that shape asks for."""

from typing import Literal, get_args

import msgspec

from stepscope.recover.evidence.structure import Role
from stepscope.recover.shape import Core

Size = int | None
# The positions that the head is asked about: all, all but the last of each sequence, the last alone.
HeadRows = Literal["all", "all but last", "last"]
HEAD_ROWS: tuple[HeadRows, ...] = get_args(HeadRows)
Sizes = tuple[Size, Size, Size, Size]  # rows, columns, inner, batch; None is not claimed


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that checks are asked about. None is not known, and what needs it is not checked."""

    d_model: Size = None
    num_heads: Size = None
    num_kv_heads: Size = None
    d_head: Size = None
    d_ff: Size = None
    vocab_size: Size = None
    batch: Size = None
    context: Size = None
    head_rows: HeadRows | None = None  # None: any of them

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
        sizes = (self.batch, self.context, self.d_model, self.num_heads, self.num_kv_heads, self.d_head)
        batch, context, width, heads, kv_heads, head = (size or 0 for size in sizes)
        if None in sizes:
            return None
        return Core(batch=batch, context=context, d_model=width, num_heads=heads, num_kv_heads=kv_heads, d_head=head)


def times(*sizes: Size) -> Size:
    product = 1
    for size in sizes:
        if size is None:
            return None
        product *= size
    return product


def plus(first: Size, second: Size) -> Size:
    return None if first is None or second is None else first + second


def product_sizes(role: Role, shape: Shape) -> tuple[Sizes, ...]:
    """In every way in which a model of this shape may ask for the product."""
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


def count_head_rows(shape: Shape, way: HeadRows) -> Size:
    match way:
        case "all":
            return shape.tokens
        case "all but last":
            return plus(shape.tokens, None if shape.batch is None else -shape.batch)
        case "last":
            return shape.batch


def _attention_sizes(role: Role, shape: Shape) -> tuple[Sizes, ...]:
    """A product a head; or, where heads share keys, one for each group of them."""
    length, head, heads, kv_heads = shape.context, shape.d_head, shape.num_heads, shape.num_kv_heads
    group = heads // kv_heads if heads and kv_heads else None
    choices: list[Sizes] = []
    for rows, sequences in ((length, times(shape.batch, heads)), (times(group, length), times(shape.batch, kv_heads))):
        choices.append((rows, length, head, sequences) if role == "scores" else (rows, head, length, sequences))
    return tuple(choices)


SIZE_FIELDS: tuple[str, ...] = tuple(name for name in Shape.__struct_fields__ if name != "head_rows")
