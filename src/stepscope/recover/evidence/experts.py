"""Mixtures of experts: where the experts of each layer run, and the plain decoder that remains without them.

A router, a GEMM with one column per expert, is followed by a top-k or a sort. The experts are one grouped GEMM, or a
loop of GEMMs over the rows of each expert, until their results are added up per token. What they are depends on the
data: in a loop, the number of rows and even of kernels differs between layers. So the experts are taken out of the
kernel order, and the rest is read like that of any decoder. A dense feed-forward layer next to them (a shared expert)
takes their place. Without one, two GEMMs that say nothing about their sizes do.

The order of the operators is that of `transformers` 5; kernels of other libraries are recognized by their names.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stepscope.recover.evidence.order import is_attention, is_norm, is_of_training, is_product
from stepscope.recover.facts import Sighting
from stepscope.recover.families.products import GROUPED

_SELECTING = ("select experts (top-k)", "group tokens by expert")
_ADDING = ("add by index", "sum the experts' results")
_FEWEST_PRODUCTS = 2  # of an expert
_DENSE = (2, 3)  # GEMMs of a feed-forward layer


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayer:
    """The experts of one layer: the kernels from the router to the sum of the results. `shared` are the GEMMs of a
    dense feed-forward layer next to them."""

    kernels: tuple[Sighting, ...]
    router: Sighting | None
    products: tuple[Sighting, ...]
    shared: tuple[Sighting, ...]
    dropped: tuple[Sighting, ...]  # a GEMM next to the experts that belongs to neither, such as the gate of `shared`

    @property
    def is_grouped(self) -> bool:
        return any(map(is_grouped, self.products))


def is_grouped(sighting: Sighting) -> bool:
    return sighting.name.operation == GROUPED


def _is_routing(sighting: Sighting) -> bool:
    name = sighting.name
    return name.direction != "backward" and (name.kernel_class == "sort" or name.operation in _SELECTING)


def _ends_layer(sighting: Sighting) -> bool:
    return (
        is_norm(sighting)
        or is_attention(sighting, backward=False)
        or is_attention(sighting, backward=True)
        or is_of_training(sighting)
    )


def find_routed(sightings: Sequence[Sighting]) -> list[RoutedLayer]:
    """Return the experts of every layer that has them. Between a top-k and the next norm or attention, they compute at
    least two GEMMs. Sampling, which sorts logits, computes none."""
    found: list[RoutedLayer] = []
    start = 0  # after the last norm or attention
    for stop in [*(one.index for one in sightings if _ends_layer(one)), len(sightings)]:
        if layer := _read_stretch(sightings[start:stop]):
            found.append(layer)
        start = stop + 1
    return found


def _read_stretch(kernels: Sequence[Sighting]) -> RoutedLayer | None:
    """Return the experts among the kernels between two norms."""
    routing = next((place for place, one in enumerate(kernels) if _is_routing(one) or is_grouped(one)), None)
    if routing is None:
        return None
    before = [place for place, one in enumerate(kernels[:routing]) if is_product(one)]
    behind = [place for place, one in enumerate(kernels) if place >= routing and is_product(one)]
    if len(behind) < _FEWEST_PRODUCTS and not any(is_grouped(kernels[place]) for place in behind):
        return None
    end = _find_end(kernels, behind)
    first = before[-1] if before else routing
    outside = [kernels[place] for place in (*before[:-1], *(one for one in behind if one > end))]
    extra = tuple(outside[-1:]) if len(outside) - 1 in (0, *_DENSE[1:]) else ()
    return RoutedLayer(
        kernels=tuple(kernels[first : end + 1]),
        router=kernels[before[-1]] if before else None,
        products=tuple(kernels[place] for place in behind if place <= end),
        shared=tuple(one for one in outside if one not in extra),
        dropped=extra,
    )


def _find_end(kernels: Sequence[Sighting], products: Sequence[int]) -> int:
    """Return the last kernel of the experts. A loop adds each expert's rows to the result. Grouped results are
    weighted, put into the order of the tokens and summed."""
    first = products[0]
    added = [place for place, one in enumerate(kernels) if place > first and one.name.operation in _ADDING]
    if added:
        return added[-1]
    summed = [place for place, one in enumerate(kernels) if place > first and _sums(one)]
    if summed:
        return summed[0]
    grouped = [place for place in products if is_grouped(kernels[place])]
    if not grouped:
        return products[-1]
    following = next((place for place in products if place > grouped[-1]), len(kernels))
    moved = [place for place in range(grouped[-1], following) if kernels[place].name.kernel_class == "index"]
    return max([grouped[-1], *moved])


def _sums(sighting: Sighting) -> bool:
    name = sighting.name
    return name.kernel_class == "reduction" and name.operation == "sum"


def drop_experts(sightings: Sequence[Sighting], layers: Sequence[RoutedLayer]) -> list[Sighting]:
    """Return the kernels without the experts, as those of a plain decoder. Those that remain keep their indices."""
    spans = {layer.kernels[0].index: () if layer.shared else _stand_in(layers[0], layer.kernels[0]) for layer in layers}
    return _replace(sightings, spans, {one.index for layer in layers for one in (*layer.kernels, *layer.dropped)})


def drop_feed_forward(sightings: Sequence[Sighting], layers: Sequence[RoutedLayer]) -> list[Sighting]:
    """Return the kernels without any feed-forward layer, for models in which some layers have no experts: GEMMs between
    two norms with none of attention between them."""
    spans = {layer.kernels[0].index: layer.kernels for layer in layers}
    inside = {one.index for layer in layers for one in (*layer.kernels, *layer.dropped, *layer.shared)}
    for start, stop in itertools.pairwise(one.index for one in sightings if _ends_layer(one)):
        products = [one for one in sightings[start:stop] if is_product(one)]
        between_norms = is_norm(sightings[start]) and is_norm(sightings[stop])
        if between_norms and len(products) in _DENSE and products[0].index not in inside:
            kernels = tuple(sightings[products[0].index : products[-1].index + 1])
            spans[kernels[0].index] = kernels
            inside |= {one.index for one in kernels}
    stand_ins = {index: _stand_in(layers[0], kernels[0]) for index, kernels in spans.items()}
    return _replace(sightings, stand_ins, inside)


def _replace(
    sightings: Sequence[Sighting], stand_ins: Mapping[int, Sequence[Sighting]], inside: Collection[int]
) -> list[Sighting]:
    left: list[Sighting] = []
    for one in sightings:
        left.extend(stand_ins.get(one.index, ()))
        if one.index not in inside:
            left.append(one)
    return left


def _stand_in(layer: RoutedLayer, place: Sighting) -> tuple[Sighting, ...]:
    """Return two GEMMs with a kernel between them, without a launch that could be read. They are the same in all
    layers, whatever the experts of each did."""
    first, last = layer.products[0], layer.products[-1]
    between = next((one for one in layer.kernels if first.index < one.index and not is_product(one)), first)
    return tuple(
        msgspec.structs.replace(one, index=place.index, grid=(0, 0, 0), block=(0, 0, 0), counters={}, told=None)
        for one in (first, between, last)
    )
