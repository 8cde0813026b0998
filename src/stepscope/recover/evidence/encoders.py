"""Encoders with decoders (T5, BART): two stacks of layers, of which the second also attends to the first.

A decoder layer has two attention calls. After the first one, the output projection is directly followed by the
projections for the second; only after the second one comes a feed-forward layer. So between attention calls there are
alternately few GEMMs and more. The layers of the encoder come before, and a lookup of embeddings separates the two.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.recover.evidence.order import Anchor, KernelOrder, is_lookup, is_of_training, read_order
from stepscope.recover.facts import Sighting

# GEMMs from self-attention to cross-attention: output, query, and key and value, both in one, or neither if they are
# kept from an earlier step.
_CROSS = (2, 3, 4)
_WRITTEN = 2  # more of them if attention is not fused: values and scores
_FEED_FORWARD = 2  # at least so many more elsewhere
_ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "clamp", "mish", "elu", "glu", "threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoStacks:
    """The attention calls of a pass through both. `encoder` are the kernels before the decoder's embedding lookup; none
    if there are no encoder layers in the file."""

    encoder_layers: int
    decoder_layers: int
    encoder: tuple[Sighting, ...]
    self_attentions: tuple[Sighting, ...]  # of the decoder
    cross_attentions: tuple[Sighting, ...]


def find_two_stacks(sightings: Sequence[Sighting]) -> TwoStacks | None:
    """Return the stacks of the first pass, or None if the attention calls do not show two. Raises NoTransformerError if
    there are no attention calls or GEMMs."""
    order = read_order(sightings)
    anchors = _take_pass(order)
    gaps = list(itertools.pairwise(anchors))
    is_cross = [_is_cross(order, *gap) for gap in gaps]
    if True not in is_cross:
        return None
    first = is_cross.index(True)
    last = first
    while last + 2 < len(gaps) and is_cross[last + 2] and not is_cross[last + 1]:
        last += 2
    others = [gap for place, gap in enumerate(gaps[: last + 1]) if not is_cross[place]]
    shortest = len(order.find_gap(*gaps[first]))
    is_longer = all(len(order.find_gap(*gap)) >= shortest + _FEED_FORWARD for gap in others)
    if any(is_cross[last + 1 :][:1]) or not is_longer or not _feed_forward(order, others, anchors[last + 1]):
        return None
    decoder = range(first, last + 1, 2)
    return TwoStacks(
        encoder_layers=first,
        decoder_layers=len(decoder),
        encoder=_cut_encoder(order, anchors[:first], anchors[first]),
        self_attentions=tuple(anchors[place][0] for place in decoder),
        cross_attentions=tuple(anchors[place + 1][0] for place in decoder),
    )


def _take_pass(order: KernelOrder) -> tuple[Anchor, ...]:
    """Return the attention calls up to the first kernel of a backward pass."""
    first = order.anchors[0][0].index
    end = next((one.index for one in order.sightings[first:] if is_of_training(one)), len(order.sightings))
    return tuple(anchor for anchor in order.anchors if anchor[-1].index < end)


def _is_cross(order: KernelOrder, one: Anchor, following: Anchor) -> bool:
    written = 0 if order.is_fused else _WRITTEN
    count = len(order.find_gap(one, following)) - written
    return count in _CROSS and not _activates(order.sightings[one[-1].index + 1 : following[0].index])


def _activates(kernels: Sequence[Sighting]) -> bool:
    texts = (f"{one.name.operation} {' '.join(one.name.fused)}".lower() for one in kernels)
    return any(word in text for text in texts for word in _ACTIVATIONS)


def _feed_forward(order: KernelOrder, gaps: Sequence[tuple[Anchor, Anchor]], last: Anchor) -> bool:
    """Whether there is a feed-forward layer between these attention calls, and after the last one."""
    following = next((one[0].index for one in order.anchors if one[0].index > last[-1].index), len(order.sightings))
    spans = [(one[-1].index, two[0].index) for one, two in gaps] + [(last[-1].index, following)]
    return all(_activates(order.sightings[start + 1 : end]) for start, end in spans)


def _cut_encoder(order: KernelOrder, layers: Sequence[Anchor], decoder: Anchor) -> tuple[Sighting, ...]:
    if not layers:
        return ()
    last = layers[-1][-1].index
    end = next((one.index for one in order.sightings[last : decoder[0].index] if is_lookup(one)), None)
    return order.sightings[:end] if end is not None else ()
