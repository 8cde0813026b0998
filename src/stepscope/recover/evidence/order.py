"""The order in which kernels ran, read once for whoever asks: attention marks the layers, products lie between.

A decoder's layer is a few matrix products around one attention, over and over. How many products stand between two
attentions says which are the projections of queries, keys and values, which the output and which the feed-forward
layer; where more than one reading fits, all are given. `structure` looks for the layers that the order shows, and
`layout` holds every layer against what was claimed.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.recover.facts import Sighting

Role = Literal[
    "query_key_value",
    "query",
    "key",
    "value",
    "key_value",
    "scores",
    "values",
    "output",
    "gate",
    "up",
    "gate_up",
    "down",
    "head",
]
# Where a kernel stands that is neither a product nor attention.
Zone = Literal["before", "merge", "middle", "feed_forward", "between", "heads", "final", "after"]

_PROJECTIONS: tuple[tuple[Role, ...], ...] = (("query_key_value",), ("query", "key_value"), ("query", "key", "value"))
_FEED_FORWARDS: tuple[tuple[Role, ...], ...] = (("up", "down"), ("gate_up", "down"), ("gate", "up", "down"))
# Where both halves of a layer start from the same input, a compiler may do the feed-forward half first.
_BEHIND: tuple[tuple[Role, ...], ...] = (
    *(("output", *roles) for roles in _FEED_FORWARDS),
    *((*roles, "output") for roles in _FEED_FORWARDS),
)
_INTO_HEADS: tuple[Role, ...] = ("query_key_value", "query", "key", "value", "key_value", "scores")
_INTO_FEED_FORWARD: tuple[Role, ...] = ("up", "gate", "gate_up")
KERNELS_AFTER_HEAD = 24
_SUM_OF_PARTS = "partial results"  # what a decoded name calls the second kernel of a split product

Anchor = tuple[Sighting, ...]  # the kernels of one attention


class NoTransformerError(Exception):
    """The kernels show no decoder that could be read. Its text says what was missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrder:
    """What is there before anything is sought or claimed. `attentions` are fused kernels, none where scores were
    written out; then softmaxes are the anchors, among them those of a loss or of sampling."""

    sightings: tuple[Sighting, ...]
    products: tuple[Sighting, ...]
    product_indices: tuple[int, ...]
    attentions: tuple[Sighting, ...]
    anchors: tuple[Anchor, ...]
    is_training: bool

    @property
    def is_fused(self) -> bool:
        return bool(self.attentions)

    def products_between(self, after: int, before: int) -> tuple[Sighting, ...]:
        where = self.product_indices
        return self.products[bisect_right(where, after) : bisect_left(where, before)]

    def find_gap(self, one: Anchor, following: Anchor) -> tuple[Sighting, ...]:
        """The products between two attentions."""
        return self.products_between(one[-1].index, following[0].index)


def read_order(sightings: Sequence[Sighting]) -> KernelOrder:
    """Raises NoTransformerError where there is nothing to read."""
    fused = tuple(one for one in sightings if is_attention(one, backward=False))
    anchors = _merge_anchors(fused or tuple(one for one in sightings if is_softmax(one)), sightings)
    products = tuple(one for one in sightings if is_product(one))
    if not products:
        raise NoTransformerError("no matrix product among the kernels")
    if not anchors:
        raise NoTransformerError("no attention among the kernels, neither fused nor a softmax between matrix products")
    return KernelOrder(
        sightings=tuple(sightings),
        products=products,
        product_indices=tuple(one.index for one in products),
        attentions=fused,
        anchors=anchors,
        is_training=any(is_of_training(one) for one in sightings),
    )


def _merge_anchors(anchors: Sequence[Sighting], sightings: Sequence[Sighting]) -> tuple[Anchor, ...]:
    """Kernels of one attention: nothing that multiplies matrices stands between them."""
    merged: list[Anchor] = []
    for anchor in anchors:
        start = merged[-1][-1].index + 1 if merged else 0
        if merged and not any(is_product(one) for one in sightings[start : anchor.index]):
            merged[-1] = (*merged[-1], anchor)
        else:
            merged.append((anchor,))
    return tuple(merged)


def layer_roles(*, is_fused: bool) -> list[tuple[tuple[Role, ...], tuple[Role, ...]]]:
    """Every order of a layer's products: those behind its attention, and those ahead of it."""
    return [
        ((*(() if is_fused else ("values",)), *behind), (*ahead, *(() if is_fused else ("scores",))))
        for ahead, behind in itertools.product(_PROJECTIONS, _BEHIND)
    ]


def find_zone(before: Role | None, behind: Role | None) -> Zone:
    """Of kernels between two products. None is attention itself."""
    if behind == "head":
        return "final"
    if before in _INTO_FEED_FORWARD:
        return "feed_forward"
    if behind in _INTO_FEED_FORWARD:
        return "middle"
    if before in _INTO_HEADS:
        return "heads"
    if behind in ("output", "values"):
        return "merge"
    return "between"


def breaks_feed_forward(kernels: Sequence[Sighting]) -> bool:
    """Whether what stands between the products that are read as a feed-forward layer has none of its arithmetic, or a
    norm in it."""
    return not kernels or any(is_norm(one) for one in kernels)


def is_product(sighting: Sighting) -> bool:
    name = sighting.name
    return name.kernel_class == "GEMM" and _SUM_OF_PARTS not in name.operation


def is_of_training(sighting: Sighting) -> bool:
    return sighting.name.direction == "backward" or sighting.name.kernel_class == "optimizer"


def is_norm(sighting: Sighting) -> bool:
    name = sighting.name
    return name.kernel_class == "norm" or (name.kernel_class == "reduction" and "mean" in (*name.fused, name.operation))


def is_attention(sighting: Sighting, *, backward: bool) -> bool:
    name = sighting.name
    return (
        name.kernel_class == "attention" and (name.direction == "backward" or "backward" in name.operation) == backward
    )


def is_softmax(sighting: Sighting) -> bool:
    """Softmax, or the maximum of rows which one that is written out begins with."""
    name = sighting.name
    if name.direction == "backward":
        return False
    if name.kernel_class == "softmax":
        return True
    written_out = "amax" in name.fused or "maximum" in name.operation
    return name.kernel_class in ("reduction", "softmax") and written_out


def adds_parts(sighting: Sighting) -> bool:
    """Whether it is the second kernel of a product whose sum was split."""
    return sighting.name.kernel_class == "GEMM" and _SUM_OF_PARTS in sighting.name.operation


def is_lookup(sighting: Sighting) -> bool:
    name = sighting.name
    return name.direction != "backward" and (name.kernel_class == "embedding" or "gather by index" in name.operation)
