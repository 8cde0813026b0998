"""The parameters of a recovered decoder by item, and its family.

The kind of norm and of positions, biases, and tied embeddings do not change any recovered size, but they change the
number of parameters. Kernels show the norm and rotary positions. The names of cuBLAS kernels for Hopper show biases.
A forward pass does not show whether the LM head is tied to the embedding: that is assumed from the family, and the
result says so.
"""

from collections.abc import Iterable

import msgspec

from stepscope.cost import DecoderShape, decoder_parameters
from stepscope.recover.evidence.observation import Observation
from stepscope.recover.evidence.order import Role
from stepscope.recover.facts import Sighting
from stepscope.recover.shape import Core

_POSITIONS = 1024  # of a learned table, unless the context is longer
_ROTARY = ("cosine", "sine", "_cos_", "_sin_", "cos_kernel", "sin_kernel", "rotary")


class Style(msgspec.Struct, frozen=True, kw_only=True):
    norm: str  # layer or rms
    has_rotary: bool
    positions: int  # rows of a learned table, 0 where there is none
    has_projection_bias: bool
    has_output_bias: bool
    has_feed_forward_bias: bool
    has_head_norms: bool  # queries and keys are normalized per head
    is_tied: bool
    is_gated: bool

    @property
    def family(self) -> str:
        if self.norm == "layer":
            return "GPT-2 style" if not self.has_rotary else "GPT-NeoX style"
        return "Qwen style" if self.has_projection_bias or self.has_head_norms else "Llama style"


def find_style(observation: Observation, context: int) -> Style:
    reading = observation.reading
    kernels = [one for zone in reading.zones.values() for one in zone]
    norm = "layer" if any(_is_layer_norm(one) for one in kernels) else "rms"
    has_rotary = any(_mentions(one, _ROTARY) for one in kernels)
    learned = not has_rotary and (norm == "layer" or len(observation.lookups) > 1)
    return Style(
        norm=norm,
        has_rotary=has_rotary,
        positions=max(_POSITIONS, context) if learned else 0,
        has_projection_bias=_has_bias(observation, ("query_key_value", "query"), norm),
        has_output_bias=_has_bias(observation, ("output",), norm),
        has_feed_forward_bias=_has_bias(observation, ("up", "gate", "gate_up"), norm),
        has_head_norms=_count_norms(reading.zones["heads"]) >= 2,
        is_tied=learned and norm == "layer",
        is_gated=reading.is_gated,
    )


def _is_layer_norm(sighting: Sighting) -> bool:
    return _mentions(sighting, ("layer norm", "layer_norm", "layernorm"))


def _mentions(sighting: Sighting, words: Iterable[str]) -> bool:
    text = f"{sighting.name.operation} {sighting.name.name[:2000]}".lower()
    return any(word in text for word in words)


def _has_bias(observation: Observation, roles: Iterable[Role], norm: str) -> bool:
    """Read from the name of a cuBLAS kernel for Hopper. For other kernels, models with layer norm have biases."""
    names = [observation.reading.products[role].name.name for role in roles if role in observation.reading.products]
    return any("_bias" in name if "nvjet" in name else norm == "layer" for name in names)


def _count_norms(kernels: Iterable[Sighting]) -> int:
    return sum(
        one.name.kernel_class == "norm" or (one.name.kernel_class == "reduction" and "mean" in one.name.operation)
        for one in kernels
    )


class Item(msgspec.Struct, frozen=True):
    name: str
    count: int


def itemise(core: Core, *, num_layers: int, d_ff: int, vocab_size: int, style: Style) -> tuple[Item, ...]:
    """Return the parameters by item. For GPT-2 small they add up to 124,439,808."""
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
