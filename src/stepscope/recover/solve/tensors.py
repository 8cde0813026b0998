"""The sizes that kernels of a decoder have, in terms of its integers: what a count of elements can stand for.

A kernel that only moves or transforms data works on a tensor of the model, and there are few kinds of those. A count
that none of them has speaks against a candidate; one that several candidates explain decides nothing between them.
"""

from collections.abc import Iterator

from stepscope.recover.evidence.structure import Zone
from stepscope.recover.shape import Core, Cores, Ints

Quantity = int | Ints  # of one candidate, or of each of many
_ROTARY_PARTS = (1, 2, 4, 8)  # whole heads, halves that change places, and a quarter of either


def sizes(core: Core | Cores, zone: Zone) -> Iterator[Quantity]:
    """Of the tensors of a layer's attention half, and of what is made before the first layer."""
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
    """Tables of positions, turned or learned, and what is built to find out whether sequences are packed: one more a
    sequence."""
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
    """Weights that are cast before each product, as autocast does."""
    yield from (core.d_model * width for width in (core.query_width, core.key_width, core.joint_width))


def counted_up_to(core: Core | Cores) -> Iterator[Quantity]:
    """What numbers are counted for: positions of a sequence, sequences, pairs of features."""
    yield from (core.context, core.context + 1, core.batch, core.d_head, core.d_head // 2, core.d_head // 4)


def feed_forward_sizes(tokens: int, d_model: int, d_ff: Quantity, *, joint: bool) -> tuple[Quantity, ...]:
    """Between the two halves: activations, and weights that are cast. `joint`: one product makes gate and up."""
    return (tokens * d_ff, d_model * d_ff, *((2 * d_model * d_ff,) if joint else ()))
