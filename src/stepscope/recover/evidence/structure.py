"""Layers and roles, from the order in which kernels ran.

A decoder's layer is a few matrix products around one attention, over and over. So attention marks the layers: between
two of them the same products stand in the same order as long as a forward pass lasts, and other ones where it ends. How
many stand there, how many of them come again after the last attention, and how many before the first, says which are
the projections of queries, keys and values, which the output, which the feed-forward layer, and which the head. Where
more than one reading fits, all are kept, and sizes decide.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
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
Zone = Literal["before", "heads", "merge", "middle", "feed_forward", "between", "final", "after"]

PROJECTIONS: tuple[tuple[Role, ...], ...] = (("query_key_value",), ("query", "key_value"), ("query", "key", "value"))
_FEED_FORWARDS: tuple[tuple[Role, ...], ...] = (("up", "down"), ("gate_up", "down"), ("gate", "up", "down"))
# Where both halves of a layer start from the same input, a compiler may do the feed-forward half first.
BEHIND: tuple[tuple[Role, ...], ...] = (
    *(("output", *roles) for roles in _FEED_FORWARDS),
    *((*roles, "output") for roles in _FEED_FORWARDS),
)
KERNELS_AFTER_HEAD = 24
_PRODUCTS_OF_LAYER = range(4, 10)
_PASSES_READ = 3  # of many: the first may be cut off, and the next be whole
SUM_OF_PARTS = "partial results"  # what a decoded name calls the second kernel of a split product


Anchor = tuple[Sighting, ...]  # the kernels of one attention


class NoTransformerError(Exception):
    """The kernels show no decoder that could be read. Its text says what was missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
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
    readings: tuple[Reading, ...] = ()
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
    fused = [sighting for sighting in sightings if is_attention(sighting, backward=False)]
    anchors = merge_anchors(fused or [one for one in sightings if is_softmax(one)], sightings)
    products = [sighting for sighting in sightings if is_product(sighting)]
    if not products:
        raise NoTransformerError("no matrix product among the kernels")
    if not anchors:
        raise NoTransformerError("no attention among the kernels, neither fused nor a softmax between matrix products")
    is_training = any(is_of_training(one) for one in sightings)
    passes, shown = _find_passes(sightings, products, anchors, is_fused=bool(fused), is_training=is_training)
    readings = shown.readings
    backward = tuple(sighting for sighting in sightings if is_attention(sighting, backward=True))
    return Structure(
        num_layers=len(passes[0]),
        num_passes=len(passes),
        is_training=is_training,
        attentions=tuple(fused),
        backward_attentions=backward,
        softmaxes=() if fused else tuple(kernel for anchor in shown.layers for kernel in anchor),
        readings=readings,
        dtype=_main_dtype(readings[0]),
        layer_indices=tuple(tuple(anchor[0].index for anchor in one) for one in passes),
        may_be_one_layer=_may_be_one_layer(products, shown.layers, readings[0]),
        has_start=shown.has_start,
        layers_differ=_differ(sightings, passes),
        has_others=bool(fused) and _has_others(products, anchors, passes),
    )


def is_product(sighting: Sighting) -> bool:
    name = sighting.name
    return name.kernel_class == "gemm" and SUM_OF_PARTS not in name.operation


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


def merge_anchors(anchors: list[Sighting], sightings: Sequence[Sighting]) -> list[Anchor]:
    """Kernels of one attention: nothing that multiplies matrices stands between them."""
    merged: list[Anchor] = []
    for anchor in anchors:
        start = merged[-1][-1].index + 1 if merged else 0
        if merged and not any(is_product(one) for one in sightings[start : anchor.index]):
            merged[-1] = (*merged[-1], anchor)
        else:
            merged.append((anchor,))
    return merged


def _between(products: Sequence[Sighting], start: Sighting, end: Sighting) -> Sequence[Sighting]:
    first = bisect_right(products, start.index, key=_index)
    return products[first : bisect_left(products, end.index, lo=first, key=_index)]


def _index(sighting: Sighting) -> int:
    return sighting.index


def _symbols(gap: Sequence[Sighting]) -> tuple[object, ...]:
    """Equal where the same kernels ran with the same geometry and, where it was counted, the same work."""
    return tuple(
        (one.name.name, one.grid, one.block, one.counters.get("tensor_ops"), one.counters.get("ffma")) for one in gap
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A forward pass that was read. What comes before it is the start of a pass, or the end of one that was cut off."""

    layers: Sequence[Anchor]
    readings: tuple[Reading, ...]
    has_start: bool


def _find_passes(
    sightings: Sequence[Sighting],
    products: Sequence[Sighting],
    anchors: Sequence[Anchor],
    *,
    is_fused: bool,
    is_training: bool,
) -> tuple[list[Sequence[Anchor]], _Pass]:
    """Embeddings are looked up at the start of a pass. Some models look up a bias of positions in every layer, too: so
    where every gap has a lookup, gaps that are those of a layer count for more. Of several passes one is read that has
    both a start and a head, if there is one."""
    symbols = [_symbols(_between(products, a[-1], b[0])) for a, b in itertools.pairwise(anchors)]
    looked_up = [
        any(is_lookup(one) for one in sightings[a[-1].index : b[0].index]) for a, b in itertools.pairwise(anchors)
    ]
    ways = [[False] * len(symbols), looked_up] if symbols and all(looked_up) else [looked_up]
    for way in ways:
        runs = _find_runs(symbols, way)
        _refuse_other_layers(symbols, looked_up, runs, is_training=is_training)
        passes = [anchors[start : start + length] for start, length in runs]
        is_whole = not is_training and len(passes) == 1
        ends = [anchors[start - 1][-1].index if start else -1 for start, _ in runs]
        looked_at = [
            _read_pass(sightings, products, layers, end, is_fused=is_fused, is_whole=is_whole)
            for layers, end in list(zip(passes, ends, strict=True))[:_PASSES_READ]
        ]
        if any(one.readings for one in looked_at):
            return passes, max(looked_at, key=_completeness)
    raise NoTransformerError(_describe_gap(products, passes[0]))


def _read_pass(
    sightings: Sequence[Sighting],
    products: Sequence[Sighting],
    layers: Sequence[Anchor],
    end_before: int,
    *,
    is_fused: bool,
    is_whole: bool,
) -> _Pass:
    """`end_before`: where the attention before this pass stands. A start is a lookup ahead of the first projection;
    those after it are of the layer, as are positions that are looked up to turn queries."""
    readings = tuple(_read_roles(sightings, products, layers, end_before, is_fused=is_fused, is_whole=is_whole))
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


def _has_others(products: Sequence[Sighting], anchors: Sequence[Anchor], passes: Sequence[Sequence[Anchor]]) -> bool:
    """Fused attentions close to each other outside of the passes, as a decoder has beside its encoder. Where layers are
    computed again for the backward pass, all of that pass stands between them."""
    inside = {anchor[0].index for layers in passes for anchor in layers}
    pairs = [(a, b) for a, b in itertools.pairwise(anchors) if not {a[0].index, b[0].index} & inside]
    return any(len(_between(products, a[-1], b[0])) in range(1, 2 * _PRODUCTS_OF_LAYER.stop) for a, b in pairs)


def _differ(sightings: Sequence[Sighting], passes: Sequence[Sequence[Anchor]]) -> bool:
    """Whether layers, of this pass or of another, show other kernels. A compiler writes a kernel of its own for some
    layers; there attentions are compared alone."""
    attentions = {tuple(map(_look, anchor)) for layers in passes for anchor in layers}
    between = [sightings[a[-1].index : b[0].index] for layers in passes for a, b in itertools.pairwise(layers)]
    if any(one.name.library == "Inductor" for gap in between[:1] for one in gap):
        return len(attentions) > 1
    return len(attentions) > 1 or len({tuple(map(_look, gap)) for gap in between}) > 1


def _look(sighting: Sighting) -> tuple[object, ...]:
    return sighting.name.name, sighting.grid, sighting.block, sighting.counters.get("store_bytes")


def _may_be_one_layer(products: Sequence[Sighting], layers: Sequence[Anchor], reading: Reading) -> bool:
    if len(layers) < 2 or "head" not in reading.products:
        return False
    gap = _between(products, layers[0][-1], layers[1][0])
    tail = [product for product in products if product.index > layers[-1][-1].index]
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


def is_lookup(sighting: Sighting) -> bool:
    name = sighting.name
    return name.direction != "backward" and (name.kernel_class == "embedding" or "gather by index" in name.operation)


def _read_roles(
    sightings: Sequence[Sighting],
    products: Sequence[Sighting],
    layers: Sequence[Anchor],
    end_before: int,
    *,
    is_fused: bool,
    is_whole: bool,
) -> Iterator[Reading]:
    """Every way in which the products around the attentions are those of a layer. `is_whole`: nothing but a head comes
    after the last layer, because nothing was trained."""
    first, last = layers[0][0], layers[-1][-1]
    before = [product for product in products if end_before < product.index < first.index]
    tail = _until_backward(sightings, [product for product in products if product.index > last.index])
    gap = _between(products, layers[0][-1], layers[1][0]) if len(layers) > 1 else None
    for projections, feed_forward in itertools.product(PROJECTIONS, BEHIND):
        behind: list[Role] = [*(() if is_fused else ("values",)), *feed_forward]
        ahead: list[Role] = [*projections, *(() if is_fused else ("scores",))]
        if len(before) < len(ahead) or not len(behind) <= len(tail) <= (len(behind) + 1 if is_whole else len(tail)):
            continue
        if gap is None:
            placed = [*zip(ahead, before[-len(ahead) :], strict=True), *zip(behind, tail, strict=False)]
        elif len(gap) == len(behind) + len(ahead) and _symbols(tail[: len(behind)]) == _symbols(gap[: len(behind)]):
            placed = list(zip([*behind, *ahead], gap, strict=True))
        else:
            continue
        head = tail[len(behind)] if len(tail) > len(behind) else None
        begin = before[-len(ahead)].index
        edges = (_find_start(sightings, end_before, begin), begin, tail[len(behind) - 1].index)
        zones = _find_zones(sightings, placed, layers, edges, head)
        if any(is_norm(one) for one in zones["feed_forward"]) or not zones["feed_forward"]:
            continue
        yield Reading(products={**dict(placed), **({"head": head} if head else {})}, zones=zones)


def _find_start(sightings: Sequence[Sighting], end_before: int, begin: int) -> int:
    """Of a pass whose layers begin there: its first lookup, behind what is left of the pass before it."""
    if end_before < 0:
        return 0
    return next((one.index for one in sightings[end_before + 1 : begin] if _begins(one)), begin)


def _until_backward(sightings: Sequence[Sighting], products: list[Sighting]) -> list[Sighting]:
    """What comes after the last attention and before anything that is certainly of the backward pass or of another."""
    ends = [
        one.index
        for one in sightings
        if one.name.direction == "backward" or one.name.kernel_class in ("optimizer", "attention") or is_lookup(one)
    ]
    start = products[0].index if products else 0
    end = min((index for index in ends if index > start), default=len(sightings))
    return [product for product in products if product.index < end]


def _find_zones(
    sightings: Sequence[Sighting],
    placed: list[tuple[Role, Sighting]],
    layers: Sequence[Anchor],
    edges: tuple[int, int, int],
    head: Sighting | None,
) -> dict[Zone, tuple[Sighting, ...]]:
    """`edges`: where the pass begins, its first product, and the last of its layers'."""
    start, first_product, last = edges
    where = dict(placed)
    up = next(where[role] for role in ("gate", "gate_up", "up") if role in where)
    ahead = next(where[role] for role in ("query_key_value", "query") if role in where)
    has_gap = len(layers) > 1
    anchor, output, down = layers[0][-1].index, where["output"].index, where["down"].index
    is_usual = output < down
    after_head = next((s.index for s in sightings if head and s.index > head.index and is_product(s)), len(sightings))
    spans: dict[Zone, tuple[int, int]] = {
        "before": (start - 1, first_product),
        "merge": (anchor, output) if is_usual else (down, output),
        "middle": (output, up.index) if is_usual else (anchor, up.index),
        "feed_forward": (up.index, down),
        "between": (max(output, down), ahead.index) if has_gap else (0, 0),
        "heads": (ahead.index, layers[1 if has_gap else 0][0].index),
        "final": (last, head.index if head else len(sightings)),
        "after": (head.index, min(after_head, head.index + KERNELS_AFTER_HEAD)) if head else (0, 0),
    }
    return {
        zone: tuple(one for one in sightings[max(0, start + 1) : end] if not is_product(one))
        for zone, (start, end) in spans.items()
    }


def _describe_gap(products: Sequence[Sighting], layers: Sequence[Anchor]) -> str:
    if len(layers) < 2:
        return "one attention alone, and too few matrix products around it for a layer"
    count = len(_between(products, layers[0][-1], layers[1][0]))
    return f"{count} matrix products between one attention and the next, which are not those of a decoder's layer"


def _main_dtype(reading: Reading) -> str | None:
    return reading.products["output"].name.dtype
