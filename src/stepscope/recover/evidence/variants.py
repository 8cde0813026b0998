"""Models that are not plain decoders, and the plain decoder inside them.

A mixture of experts, low-rank adapters, or an encoder with a decoder: each shows in the order of the kernels. Without
the kernels that a plain decoder does not have, or without the decoder, the rest can be read like any other run. None of
these models was measured, so nothing that is concluded this way is certain, and nothing refutes a claim.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from stepscope.recover.evidence.adapters import LowRankAdapter, drop_adapters, find_adapters
from stepscope.recover.evidence.encoders import TwoStacks, find_two_stacks
from stepscope.recover.evidence.experts import RoutedLayer, drop_experts, drop_feed_forward, find_routed
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.units import count_noun


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderVariant:
    """What a file shows beyond a plain decoder. `plain` are versions of the file without it, the one that keeps most
    first; none if no part of the file is a plain stack of layers."""

    seen: str
    plain: tuple[KernelEvidence, ...]
    experts: tuple[RoutedLayer, ...] = ()
    adapters: tuple[LowRankAdapter, ...] = ()
    stacks: TwoStacks | None = None


def find_variant(evidence: KernelEvidence) -> DecoderVariant | None:
    """Return the variant, or None for a plain decoder and for kernels that show no Transformer at all."""
    experts = tuple(find_routed(evidence.sightings))
    if experts:
        kept = [drop_experts(evidence.sightings, experts), drop_feed_forward(evidence.sightings, experts)]
        return _drop_both(experts, [_keep(evidence, one) for one in kept])
    adapters = tuple(find_adapters(evidence.sightings))
    if adapters:
        return _adapted(evidence, adapters)
    stacks = _find_stacks(evidence.sightings)
    if stacks is None:
        return None
    seen = (
        "an encoder and a decoder: layers with two attention calls after layers with one"
        if stacks.encoder_layers
        else "cross-attention: layers with two attention calls"
    )
    return DecoderVariant(seen=seen, plain=(_keep(evidence, stacks.encoder),) if stacks.encoder else (), stacks=stacks)


def _find_stacks(sightings: Sequence[Sighting]) -> TwoStacks | None:
    try:
        return find_two_stacks(sightings)
    except NoTransformerError:
        return None


def _drop_both(experts: tuple[RoutedLayer, ...], kept: Sequence[KernelEvidence]) -> DecoderVariant:
    """A mixture of experts may have adapters as well."""
    grouped = any(layer.is_grouped for layer in experts)
    seen = "grouped GEMMs: a mixture of experts" if grouped else "GEMMs after a top-k: a mixture of experts"
    adapters = tuple(find_adapters(kept[0].sightings))
    if not adapters:
        return DecoderVariant(seen=seen, plain=tuple(kept), experts=experts)
    below = _adapted(kept[0], adapters)
    return replace(below, seen=f"{seen}; {below.seen}", experts=experts)


def _adapted(evidence: KernelEvidence, adapters: tuple[LowRankAdapter, ...]) -> DecoderVariant:
    seen = f"low-rank adapters next to the projections: {count_noun(len(adapters), 'pair')} of small GEMMs"
    return DecoderVariant(
        seen=seen, plain=(_keep(evidence, drop_adapters(evidence.sightings, adapters)),), adapters=adapters
    )


def _keep(evidence: KernelEvidence, kernels: Iterable[Sighting]) -> KernelEvidence:
    """Return the file with only these kernels, numbered again."""
    kept = list(kernels)
    indices = [one.index for one in kept]
    return replace(
        evidence,
        sightings=tuple(msgspec.structs.replace(one, index=place) for place, one in enumerate(kept)),
        exchanges=tuple(bisect_left(indices, index) for index in evidence.exchanges),
        flaws=(),  # their rows are indices, too, and only a claim is judged by them
    )
