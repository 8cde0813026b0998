"""Layers and roles, from the order in which kernels ran.

Between two attentions the same products stand in the same order as long as a forward pass lasts, and other ones where
it ends. How many stand there, how many of them come again after the last attention, and how many before the first, says
what each of them is. Where more than one reading fits, all are kept, and sizes decide.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from stepscope.recover.evidence.order import (
    KERNELS_AFTER_HEAD,
    Anchor,
    KernelOrder,
    NoTransformerError,
    Role,
    Zone,
    breaks_feed_forward,
    find_zone,
    is_attention,
    is_lookup,
    is_product,
    layer_roles,
    read_order,
)
from stepscope.recover.facts import Sighting

_PRODUCTS_OF_LAYER = range(4, 10)
_PASSES_READ = 3  # of many: the first may be cut off, and the next be whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReading:
    """One way to read the roles: the products of a layer by role, and the other kernels by where they stand."""

    products: dict[Role, Sighting]
    zones: dict[Zone, tuple[Sighting, ...]]

    @property
    def is_gated(self) -> bool:
        return "gate" in self.products or "gate_up" in self.products


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What the order shows. `attentions` are fused kernels, none where scores were written out."""

    num_layers: int
    num_passes: int
    is_training: bool
    attentions: tuple[Sighting, ...] = ()
    backward_attentions: tuple[Sighting, ...] = ()
    softmaxes: tuple[Sighting, ...] = ()  # around the anchors, where attention is not fused
    readings: tuple[RoleReading, ...] = ()
    dtype: str | None = None
    layer_indices: tuple[tuple[int, ...], ...] = ()  # of each pass: where its attentions stand
    # What comes after the last attention is what comes after each: passes of one layer would look the same.
    may_be_one_layer: bool = False
    has_others: bool = False  # attentions outside of the passes that are no layers computed again
    layers_differ: bool = False  # in kernels that are no products: the one layer that was read need not stand for all
    has_start: bool = False  # embeddings were looked up before the pass that was read: its first layer is in the file

    @property
    def is_fused(self) -> bool:
        return bool(self.attentions)


def find_structure(sightings: Sequence[Sighting]) -> Structure:
    """Raises NoTransformerError where there is none to be seen."""
    order = read_order(sightings)
    passes, shown = _find_passes(order)
    return Structure(
        num_layers=len(passes[0]),
        num_passes=len(passes),
        is_training=order.is_training,
        attentions=order.attentions,
        backward_attentions=tuple(one for one in sightings if is_attention(one, backward=True)),
        softmaxes=() if order.is_fused else tuple(kernel for anchor in shown.layers for kernel in anchor),
        readings=shown.readings,
        dtype=shown.readings[0].products["output"].name.dtype,
        layer_indices=tuple(tuple(anchor[0].index for anchor in one) for one in passes),
        may_be_one_layer=_may_be_one_layer(order, shown),
        has_start=shown.has_start,
        layers_differ=_differ(order, passes),
        has_others=order.is_fused and _has_others(order, passes),
    )


def _symbols(gap: Sequence[Sighting]) -> tuple[object, ...]:
    """Equal where the same kernels ran with the same geometry and, where it was counted, the same work."""
    return tuple(
        (one.name.name, one.grid, one.block, one.counters.get("tensor_ops"), one.counters.get("ffma")) for one in gap
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A forward pass that was read. What comes before it is the start of a pass, or the end of one that was cut off."""

    layers: Sequence[Anchor]
    readings: tuple[RoleReading, ...]
    has_start: bool


def _find_passes(order: KernelOrder) -> tuple[list[tuple[Anchor, ...]], _Pass]:
    """Embeddings are looked up at the start of a pass. Some models look up a bias of positions in every layer, too: so
    where every gap has a lookup, gaps that are those of a layer count for more. Of several passes one is read that has
    both a start and a head, if there is one."""
    anchors = order.anchors
    symbols = [_symbols(order.find_gap(a, b)) for a, b in itertools.pairwise(anchors)]
    looked_up = [
        any(is_lookup(one) for one in order.sightings[a[-1].index : b[0].index]) for a, b in itertools.pairwise(anchors)
    ]
    ways = [[False] * len(symbols), looked_up] if symbols and all(looked_up) else [looked_up]
    for way in ways:
        runs = _find_runs(symbols, way)
        _refuse_other_layers(symbols, looked_up, runs, is_training=order.is_training)
        passes = [anchors[start : start + length] for start, length in runs]
        is_whole = not order.is_training and len(passes) == 1
        ends = [anchors[start - 1][-1].index if start else -1 for start, _ in runs]
        looked_at = [
            _read_pass(order, layers, end, is_whole=is_whole)
            for layers, end in list(zip(passes, ends, strict=True))[:_PASSES_READ]
        ]
        if any(one.readings for one in looked_at):
            return passes, max(looked_at, key=_completeness)
    raise NoTransformerError(_describe_gap(order, passes[0]))


def _read_pass(order: KernelOrder, layers: Sequence[Anchor], end_before: int, *, is_whole: bool) -> _Pass:
    """`end_before`: where the attention before this pass stands. A start is a lookup ahead of the first projection;
    those after it are of the layer, as are positions that are looked up to turn queries."""
    readings = tuple(_read_roles(order, layers, end_before, is_whole=is_whole))
    has_start = any(_begins(one) for reading in readings for one in reading.zones["before"])
    return _Pass(layers=layers, readings=readings, has_start=has_start)


def _begins(sighting: Sighting) -> bool:
    return is_lookup(sighting) or "embedding" in sighting.name.fused


def _completeness(one: _Pass) -> tuple[bool, bool, bool]:
    has_head = any("head" in reading.products for reading in one.readings)
    return bool(one.readings), one.has_start and has_head, has_head


def _find_runs(symbols: list[tuple[object, ...]], is_start: list[bool]) -> list[tuple[int, int]]:
    """Forward passes as (first anchor, number of anchors): those with the gap that is met first."""
    inner = [i for i in range(len(symbols)) if not is_start[i]]
    if not inner:
        return [(i, 1) for i in range(len(symbols) + 1)]
    repeated = [i for i in inner if i + 1 < len(symbols) and symbols[i] == symbols[i + 1]]
    gap = symbols[repeated[0]] if repeated else min((symbols[i] for i in inner), key=len)
    runs: list[tuple[int, int]] = []
    i = 0
    while i < len(symbols):
        if symbols[i] != gap or is_start[i]:
            i += 1
            continue
        start = i
        while i < len(symbols) and symbols[i] == gap and not is_start[i]:
            i += 1
        runs.append((start, i - start + 1))
    return _whole_runs(runs)


def _refuse_other_layers(
    symbols: list[tuple[object, ...]], looked_up: list[bool], runs: list[tuple[int, int]], *, is_training: bool
) -> None:
    """Between two passes there is a head or a lookup more than between two layers. And what stands outside of the
    passes must not be the layers of another model; in training the loss and layers that are computed again stand there,
    never the same few products twice in a row."""
    inside = {anchor for start, length in runs for anchor in range(start, start + length)}
    starts = {start for start, _ in runs}
    layer = len(symbols[runs[0][0]]) if runs[0][1] > 1 else 0
    for i, gap in enumerate(symbols):
        if i in inside and i + 1 in starts and len(gap) <= layer and not looked_up[i]:
            raise NoTransformerError(
                "layers that differ follow one another: two models at once, or work put in between"
            )
        is_repeated = i + 1 < len(symbols) and gap == symbols[i + 1]
        is_outside = i not in inside and i + 1 not in inside
        if is_outside and len(gap) in _PRODUCTS_OF_LAYER and (is_repeated or not is_training):
            raise NoTransformerError("layers of two kinds, one after the other: several models ran")


def _has_others(order: KernelOrder, passes: Sequence[Sequence[Anchor]]) -> bool:
    """Fused attentions close to each other outside of the passes, as a decoder has beside its encoder. Where layers are
    computed again for the backward pass, all of that pass stands between them."""
    inside = {anchor[0].index for layers in passes for anchor in layers}
    pairs = [(a, b) for a, b in itertools.pairwise(order.anchors) if not {a[0].index, b[0].index} & inside]
    return any(len(order.find_gap(a, b)) in range(1, 2 * _PRODUCTS_OF_LAYER.stop) for a, b in pairs)


def _differ(order: KernelOrder, passes: Sequence[Sequence[Anchor]]) -> bool:
    """Whether layers, of this pass or of another, show other kernels. A compiler writes a kernel of its own for some
    layers; there attentions are compared alone."""
    attentions = {tuple(map(_look, anchor)) for layers in passes for anchor in layers}
    between = [order.sightings[a[-1].index : b[0].index] for layers in passes for a, b in itertools.pairwise(layers)]
    if any(one.name.library == "Inductor" for gap in between[:1] for one in gap):
        return len(attentions) > 1
    return len(attentions) > 1 or len({tuple(map(_look, gap)) for gap in between}) > 1


def _look(sighting: Sighting) -> tuple[object, ...]:
    return sighting.name.name, sighting.grid, sighting.block, sighting.counters.get("store_bytes")


def _may_be_one_layer(order: KernelOrder, shown: _Pass) -> bool:
    layers = shown.layers
    if len(layers) < 2 or "head" not in shown.readings[0].products:
        return False
    gap = order.find_gap(layers[0], layers[1])
    tail = order.products_between(layers[-1][-1].index, len(order.sightings))
    return len(tail) <= len(gap) and _symbols(tail) == _symbols(gap[: len(tail)])


def _whole_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A recorder may begin and end within a pass; those in between are whole."""
    longest = max(length for _, length in runs)
    if len(runs) > 1 and runs[0][1] < longest:
        runs = runs[1:]
    if len(runs) > 1 and runs[-1][1] < longest:
        runs = runs[:-1]
    lengths = sorted({length for _, length in runs})
    if len(lengths) > 1:
        raise NoTransformerError(
            f"forward passes of {' and '.join(map(str, lengths))} layers: several models, or layers that differ"
        )
    return runs


def _read_roles(
    order: KernelOrder, layers: Sequence[Anchor], end_before: int, *, is_whole: bool
) -> Iterator[RoleReading]:
    """Every way in which the products around the attentions are those of a layer. `is_whole`: nothing but a head comes
    after the last layer, because nothing was trained."""
    first, last = layers[0][0], layers[-1][-1]
    before = order.products_between(end_before, first.index)
    tail = _until_backward(order, order.products_between(last.index, len(order.sightings)))
    gap = order.find_gap(layers[0], layers[1]) if len(layers) > 1 else None
    for behind, ahead in layer_roles(is_fused=order.is_fused):
        if len(before) < len(ahead) or not len(behind) <= len(tail) <= (len(behind) + 1 if is_whole else len(tail)):
            continue
        if gap is None:
            stretches = [zip(ahead, before[-len(ahead) :], strict=True), zip(behind, tail, strict=False)]
        elif len(gap) == len(behind) + len(ahead) and _symbols(tail[: len(behind)]) == _symbols(gap[: len(behind)]):
            stretches = [zip([*behind, *ahead], gap, strict=True)]
        else:
            continue
        placed = [list(stretch) for stretch in stretches]
        head = tail[len(behind)] if len(tail) > len(behind) else None
        begin = before[-len(ahead)].index
        zones = _find_zones(order, placed, layers)
        zones["before"] = _others(order, _find_start(order, end_before, begin) - 1, begin)
        zones["final"] = _others(order, tail[len(behind) - 1].index, head.index if head else len(order.sightings))
        zones["after"] = _others(order, head.index, _find_end(order, head.index)) if head else ()
        if not breaks_feed_forward(zones["feed_forward"]):
            products = {role: one for stretch in placed for role, one in stretch}
            yield RoleReading(products={**products, **({"head": head} if head else {})}, zones=zones)


def _find_start(order: KernelOrder, end_before: int, begin: int) -> int:
    """Of a pass whose layers begin there: its first lookup, behind what is left of the pass before it."""
    if end_before < 0:
        return 0
    return next((one.index for one in order.sightings[end_before + 1 : begin] if _begins(one)), begin)


def _find_end(order: KernelOrder, head: int) -> int:
    """Of what belongs to the head: the next product, or so many kernels."""
    following = order.products_between(head, len(order.sightings))
    end = following[0].index if following else len(order.sightings)
    return min(end, head + KERNELS_AFTER_HEAD)


def _until_backward(order: KernelOrder, products: Sequence[Sighting]) -> list[Sighting]:
    """What comes after the last attention and before anything that is certainly of the backward pass or of another."""
    ends = [
        one.index
        for one in order.sightings
        if one.name.direction == "backward" or one.name.kernel_class in ("optimizer", "attention") or is_lookup(one)
    ]
    start = products[0].index if products else 0
    end = min((index for index in ends if index > start), default=len(order.sightings))
    return [product for product in products if product.index < end]


def _find_zones(
    order: KernelOrder, placed: Sequence[Sequence[tuple[Role, Sighting]]], layers: Sequence[Anchor]
) -> dict[Zone, tuple[Sighting, ...]]:
    """Of one layer: from one attention to the next, or of an only layer from its first product to its attention and on
    to its last."""
    zones: dict[Zone, tuple[Sighting, ...]] = dict.fromkeys(get_args(Zone), ())
    marks: list[list[tuple[int, Role | None]]] = [[(one.index, role) for role, one in part] for part in placed]
    marks[0].append((layers[1 if len(layers) > 1 else 0][0].index, None))
    marks[-1].insert(0, (layers[0][-1].index, None))
    for stretch in marks:
        for (start, before), (end, behind) in itertools.pairwise(stretch):
            zone = find_zone(before, behind)
            zones[zone] += _others(order, start, end)
    return zones


def _others(order: KernelOrder, after: int, before: int) -> tuple[Sighting, ...]:
    return tuple(one for one in order.sightings[max(0, after + 1) : before] if not is_product(one))


def _describe_gap(order: KernelOrder, layers: Sequence[Anchor]) -> str:
    if len(layers) < 2:
        return "one attention alone, and too few matrix products around it for a layer"
    count = len(order.find_gap(layers[0], layers[1]))
    return f"{count} matrix products between one attention and the next, which are not those of a decoder's layer"
