"""The parameters of a decoder, item by item, from its integers and its kind."""

import msgspec

from stepscope.recover.shape import Core
from stepscope.recover.style import Style


class Item(msgspec.Struct, frozen=True):
    name: str
    count: int


def itemise(core: Core, *, num_layers: int, d_ff: int, vocab_size: int, style: Style) -> tuple[Item, ...]:
    """GPT-2 small gives 124,439,808."""
    width = core.d_model
    norms = width * (2 if style.norm == "layer" else 1)
    matrices = 3 if style.is_gated else 2
    items = {
        "token embedding": vocab_size * width,
        "position embedding": style.positions * width,
        "attention": num_layers * width * (core.joint_width + core.query_width),
        "attention biases": num_layers * _attention_biases(core, style),
        "feed-forward": num_layers * matrices * width * d_ff,
        "feed-forward biases": num_layers * ((matrices - 1) * d_ff + width) * style.has_feed_forward_bias,
        "norms of layers": num_layers * (2 * norms + 2 * core.d_head * style.has_head_norms),
        "last norm": norms,
        "head": 0 if style.is_tied else vocab_size * width,
    }
    return tuple(Item(name, count) for name, count in items.items() if count)


def _attention_biases(core: Core, style: Style) -> int:
    return core.joint_width * style.has_projection_bias + core.d_model * style.has_output_bias


def total(items: tuple[Item, ...]) -> int:
    return sum(item.count for item in items)
