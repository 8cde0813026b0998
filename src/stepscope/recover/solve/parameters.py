"""The parameters of a recovered decoder, item by item."""

import msgspec

from stepscope.cost import DecoderShape, decoder_parameters
from stepscope.recover.evidence.style import Style
from stepscope.recover.shape import Core


class Item(msgspec.Struct, frozen=True):
    name: str
    count: int


def itemise(core: Core, *, num_layers: int, d_ff: int, vocab_size: int, style: Style) -> tuple[Item, ...]:
    """GPT-2 small gives 124,439,808."""
    shape = DecoderShape(
        num_layers=num_layers,
        d_model=core.d_model,
        query_width=core.query_width,
        key_width=core.key_width,
        d_ff=d_ff,
        vocab_size=vocab_size,
        is_gated=style.is_gated,
        is_tied=style.is_tied,
        positions=style.positions,
        norm_vectors=2 if style.norm == "layer" else 1,
        head_norm_width=core.d_head if style.has_head_norms else 0,
        has_projection_bias=style.has_projection_bias,
        has_output_bias=style.has_output_bias,
        has_feed_forward_bias=style.has_feed_forward_bias,
    )
    return tuple(Item(name, count) for name, count in decoder_parameters(shape).items() if count)


def total(items: tuple[Item, ...]) -> int:
    return sum(item.count for item in items)
