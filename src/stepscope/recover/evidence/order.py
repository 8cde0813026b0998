"""The order of the kernels, shared by `structure` and `layout`: attention marks the layers, GEMMs are between them.

A decoder layer is a few GEMMs around one attention, repeated. The number of GEMMs between two attention calls shows
which are the query, key and value projections, which is the output projection and which are the feed-forward layer. If
more than one interpretation fits, all are returned. `structure` finds the layers in this order, and `layout` compares
every layer with the claim.
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
# The zone of a kernel that is neither a GEMM nor attention.
Zone = Literal["before", "merge", "middle", "feed_forward", "between", "heads", "final", "after"]

_PROJECTIONS: tuple[tuple[Role, ...], ...] = (("query_key_value",), ("query", "key_value"), ("query", "key", "value"))
_FEED_FORWARDS: tuple[tuple[Role, ...], ...] = (("up", "down"), ("gate_up", "down"), ("gate", "up", "down"))
# If both halves of a layer use the same input, a compiler may run the feed-forward half first.
_BEHIND: tuple[tuple[Role, ...], ...] = (
    *(("output", *roles) for roles in _FEED_FORWARDS),
    *((*roles, "output") for roles in _FEED_FORWARDS),
)
_INTO_HEADS: tuple[Role, ...] = ("query_key_value", "query", "key", "value", "key_value", "scores")
_INTO_FEED_FORWARD: tuple[Role, ...] = ("up", "gate", "gate_up")
KERNELS_AFTER_HEAD = 24
_FLOATS = ("bf16", "fp16", "fp32")
_SUM_OF_PARTS = "partial results"  # in the decoded name of the second kernel of a split-K GEMM

Anchor = tuple[Sighting, ...]  # the kernels of one attention call


class NoTransformerError(Exception):
    """The kernels are not those of a decoder that can be recognized. The message says what is missing or what was seen
    instead, `known` what they show nevertheless."""

    def __init__(self, message: str, *, known: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.known = known


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrder:
    """The kernel order, independent of any model. `attentions` are fused kernels, empty for unfused attention. Then the
    softmaxes mark the layers; those of a loss or of sampling are among them."""

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
        """The GEMMs between two attention calls."""
        return self.products_between(one[-1].index, following[0].index)


def read_order(sightings: Sequence[Sighting]) -> KernelOrder:
    """Return the kernel order. Raises NoTransformerError without GEMMs or attention."""
    fused = tuple(one for one in sightings if is_attention(one, backward=False))
    anchors = _merge_anchors(fused or tuple(one for one in sightings if is_softmax(one)), sightings)
    products = tuple(one for one in sightings if is_product(one))
    if not products:
        raise NoTransformerError("there are no GEMM kernels")
    if not anchors:
        raise NoTransformerError("there are no attention kernels, neither fused nor a softmax between GEMMs")
    return KernelOrder(
        sightings=tuple(sightings),
        products=products,
        product_indices=tuple(one.index for one in products),
        attentions=fused,
        anchors=anchors,
        is_training=any(is_of_training(one) for one in sightings),
    )


def _merge_anchors(anchors: Sequence[Sighting], sightings: Sequence[Sighting]) -> tuple[Anchor, ...]:
    """Group the kernels of each attention call: they have no GEMM between them."""
    merged: list[Anchor] = []
    for anchor in anchors:
        start = merged[-1][-1].index + 1 if merged else 0
        if merged and not any(is_product(one) for one in sightings[start : anchor.index]):
            merged[-1] = (*merged[-1], anchor)
        else:
            merged.append((anchor,))
    return tuple(merged)


def layer_roles(*, is_fused: bool) -> list[tuple[tuple[Role, ...], tuple[Role, ...]]]:
    """Return every order of a layer's GEMMs: those after its attention, and those before it. If attention is not fused,
    a compiler may compute values only after the softmax."""
    orders = list(itertools.product(_BEHIND, _PROJECTIONS))
    if is_fused:
        return orders
    written: list[tuple[tuple[Role, ...], tuple[Role, ...]]] = [
        (("values", *behind), (*ahead, "scores")) for behind, ahead in orders
    ]
    return written + [(("value", "values", *behind), ("query", "key", "scores")) for behind in _BEHIND]


def find_zone(before: Role | None, behind: Role | None) -> Zone:
    """Return the zone of kernels between two GEMMs. The role None is attention itself."""
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
    """Whether these kernels cannot be inside a feed-forward layer: there are none, or a norm is among them."""
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
    """Whether this is a softmax, or the row maximum that starts one made of separate operations."""
    name = sighting.name
    if name.direction == "backward":
        return False
    if name.kernel_class == "softmax":
        return True
    written_out = "amax" in name.fused or "maximum" in name.operation
    return name.kernel_class in ("reduction", "softmax") and written_out


def adds_parts(sighting: Sighting) -> bool:
    """Whether this is the second kernel of a split-K GEMM, which adds the splits."""
    return sighting.name.kernel_class == "GEMM" and _SUM_OF_PARTS in sighting.name.operation


def adds_tensors(sighting: Sighting) -> bool:
    """Whether this adds two tensors, such as the embeddings of positions to those of tokens."""
    name = sighting.name
    return name.kernel_class == "elementwise" and name.operation == "add" and name.dtype in _FLOATS


def is_lookup(sighting: Sighting) -> bool:
    name = sighting.name
    return name.direction != "backward" and (name.kernel_class == "embedding" or "gather by index" in name.operation)
