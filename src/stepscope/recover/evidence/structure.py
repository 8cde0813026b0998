"""Layers and roles, from the order of the kernels.

Within a forward pass, the same GEMMs run in the same order between two attention calls; at its end, different ones do.
Their number, and how many of them repeat after the last attention and before the first, show the role of each. If more
than one interpretation fits, all are kept, and the sizes decide.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from stepscope.recover.evidence.completeness import (
    StructureDoubt,
    doubt_ends,
    doubt_layers,
    doubt_projections,
    find_hidden_layers,
    find_lookup,
)
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
    is_of_training,
    is_product,
    layer_roles,
    read_order,
)
from stepscope.recover.facts import Sighting
from stepscope.units import count_noun

_PRODUCTS_OF_LAYER = range(4, 10)
_PASSES_READ = 3  # enough passes: the first may be partial and the next complete


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReading:
    """One interpretation of the roles: the GEMMs of a layer by role, and the other kernels by zone."""

    products: dict[Role, Sighting]
    zones: dict[Zone, tuple[Sighting, ...]]
    doubts: tuple[StructureDoubt, ...] = ()

    @property
    def is_gated(self) -> bool:
        return "gate" in self.products or "gate_up" in self.products


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The structure that the order shows. `attentions` are fused kernels, empty for unfused attention."""

    num_layers: int
    num_passes: int
    is_training: bool
    attentions: tuple[Sighting, ...] = ()
    backward_attentions: tuple[Sighting, ...] = ()
    softmaxes: tuple[Sighting, ...] = ()  # next to the anchors, for unfused attention
    readings: tuple[RoleReading, ...] = ()
    dtype: str | None = None
    layer_indices: tuple[tuple[int, ...], ...] = ()  # the indices of the attention calls, per pass
    # Every attention is followed by the same kernels as the last one: passes of one layer would look the same.
    may_be_one_layer: bool = False
    doubts: tuple[StructureDoubt, ...] = ()  # for all readings
    has_start: bool = False  # an embedding lookup precedes the analyzed pass: its first layer is in the file

    @property
    def is_fused(self) -> bool:
        return bool(self.attentions)


def find_structure(sightings: Sequence[Sighting]) -> Structure:
    """Return the structure. Raises NoTransformerError if the kernels do not show layers."""
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
        dtype=shown.readings[0].products["output"].dtype,
        layer_indices=tuple(tuple(anchor[0].index for anchor in one) for one in passes),
        may_be_one_layer=_may_be_one_layer(order, shown),
        has_start=shown.has_start,
        doubts=tuple(_doubt(order, passes, shown)),
    )


def _doubt(order: KernelOrder, passes: Sequence[Sequence[Anchor]], shown: "_Pass") -> Iterator[StructureDoubt]:
    zones, products = shown.readings[0].zones, shown.readings[0].products
    start = min((one.index for one in zones["before"]), default=shown.layers[0][0].index)
    end = products["head"].index if "head" in products else shown.layers[-1][-1].index
    yield from doubt_layers(order, passes, shown.layers, range(start, end + 1))
    if order.is_fused and _has_others(order, passes):
        yield StructureDoubt(text="there is attention outside these layers", of_layers=True)


def _symbols(gap: Sequence[Sighting]) -> tuple[object, ...]:
    """Return a key that is equal for the same kernels with the same launch and, if counted, the same work."""
    return tuple(
        (one.name.name, one.grid, one.block, one.counters.get("tensor_ops"), one.counters.get("ffma")) for one in gap
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The forward pass that is analyzed. What precedes it is the start of a pass, or the end of a partial one."""

    layers: Sequence[Anchor]
    readings: tuple[RoleReading, ...]
    has_start: bool


def _find_passes(order: KernelOrder) -> tuple[list[tuple[Anchor, ...]], _Pass]:
    """Find the pass to analyze. Embeddings are looked up at the start of a pass. Some models also look up a position
    bias in every layer: if every gap has a lookup, gaps that match those of a layer have priority. Of several passes,
    prefer one that has both a start and an LM head."""
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
    """Return the interpretations of a pass. It has a start if there is a lookup before the first projection. Lookups
    after that belong to the layer, for example rotary positions. `end_before` is the index of the attention before
    this pass."""
    readings = tuple(_read_roles(order, layers, end_before, is_whole=is_whole))
    has_start = any(find_lookup(reading.zones["before"]) is not None for reading in readings)
    return _Pass(layers=layers, readings=readings, has_start=has_start)


def _completeness(one: _Pass) -> tuple[bool, bool, bool]:
    has_head = any("head" in reading.products for reading in one.readings)
    return bool(one.readings), one.has_start and has_head, has_head


def _find_runs(symbols: list[tuple[object, ...]], is_start: list[bool]) -> list[tuple[int, int]]:
    """Return the forward passes as (first anchor, number of anchors). All have the gap that is the first to repeat."""
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
    """Raise NoTransformerError for several models. Compared with two layers, two passes also have an LM head or a
    lookup between them. Kernels outside the passes must not be layers of another model; in training they are the loss
    and recomputed layers, never the same few GEMMs twice in a row."""
    inside = {anchor for start, length in runs for anchor in range(start, start + length)}
    starts = {start for start, _ in runs}
    layer = len(symbols[runs[0][0]]) if runs[0][1] > 1 else 0
    for i, gap in enumerate(symbols):
        if i in inside and i + 1 in starts and len(gap) <= layer and not looked_up[i]:
            raise NoTransformerError(
                "consecutive layers differ: two models ran at once, or there is other work between the layers"
            )
        is_repeated = i + 1 < len(symbols) and gap == symbols[i + 1]
        is_outside = i not in inside and i + 1 not in inside
        if is_outside and len(gap) in _PRODUCTS_OF_LAYER and (is_repeated or not is_training):
            raise NoTransformerError("there are two kinds of layers: several models ran")


def _has_others(order: KernelOrder, passes: Sequence[Sequence[Anchor]]) -> bool:
    """Whether fused attention calls follow closely outside the passes, such as those of an encoder. If layers are
    recomputed for the backward pass, the rest of that pass is between them."""
    inside = {anchor[0].index for layers in passes for anchor in layers}
    pairs = [(a, b) for a, b in itertools.pairwise(order.anchors) if not {a[0].index, b[0].index} & inside]
    return any(len(order.find_gap(a, b)) in range(1, 2 * _PRODUCTS_OF_LAYER.stop) for a, b in pairs)


def _may_be_one_layer(order: KernelOrder, shown: _Pass) -> bool:
    layers = shown.layers
    if len(layers) < 2 or "head" not in shown.readings[0].products:
        return False
    gap = order.find_gap(layers[0], layers[1])
    tail = order.products_between(layers[-1][-1].index, len(order.sightings))
    return len(tail) <= len(gap) and _symbols(tail) == _symbols(gap[: len(tail)])


def _whole_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A recording may begin and end within a pass; the passes in between are complete."""
    longest = max(length for _, length in runs)
    if len(runs) > 1 and runs[0][1] < longest:
        runs = runs[1:]
    if len(runs) > 1 and runs[-1][1] < longest:
        runs = runs[:-1]
    lengths = sorted({length for _, length in runs})
    if len(lengths) > 1:
        raise NoTransformerError(
            f"forward passes with {' and '.join(map(str, lengths))} layers: several models ran, or the layers differ"
        )
    return runs


def _read_roles(
    order: KernelOrder, layers: Sequence[Anchor], end_before: int, *, is_whole: bool
) -> Iterator[RoleReading]:
    """Yield every way in which the GEMMs around the attention calls form a layer. `is_whole`: only an LM head follows
    the last layer, because nothing was trained."""
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
        start = _find_start(order, end_before, begin)
        layer = _symbols(gap if gap is not None else (*tail[: len(behind)], *before[-len(ahead) :]))
        doubts = doubt_ends(
            layers,
            first=_symbols(_since_start(order, before, start if start < begin else None)),
            last=_symbols(tail),
            behind=layer[: len(behind)],
            ahead=layer[len(behind) :],
            follows_pass=end_before >= 0,
        )
        zones = _find_zones(order, placed, layers)
        zones["before"] = _others(order, start - 1, begin)
        # A compiler computes masks right before the first attention, which needs them.
        zones["heads"] += tuple(one for one in _others(order, begin, first.index) if one.name.library == "Inductor")
        zones["final"] = _others(order, tail[len(behind) - 1].index, head.index if head else len(order.sightings))
        zones["after"] = _others(order, head.index, _find_end(order, head.index)) if head else ()
        if not breaks_feed_forward(zones["feed_forward"]):
            products = {role: one for stretch in placed for role, one in stretch}
            head_too: dict[Role, Sighting] = {"head": head} if head else {}
            between = order.sightings[first.index : layers[1][0].index] if len(layers) > 1 else ()
            hidden = find_hidden_layers(zones["before"], zones["final"] if head else (), between)
            yield RoleReading(
                products={**products, **head_too},
                zones=zones,
                doubts=(
                    *doubts,
                    *doubt_projections(ahead),
                    *(StructureDoubt(text=one, of_layers=True) for one in hidden),
                ),
            )


def _find_start(order: KernelOrder, end_before: int, begin: int) -> int:
    """Return the start of a pass whose layers begin here: its first lookup after the end of the pass before."""
    if end_before < 0:
        return 0
    lookup = find_lookup(order.sightings[end_before + 1 : begin])
    return lookup.index if lookup is not None else begin


def _since_start(order: KernelOrder, products: Sequence[Sighting], start: int | None) -> list[Sighting]:
    """Keep the GEMMs of this pass. Without a start they may follow those of the pass before, but not its training."""
    if start is None:
        start = max((one.index for one in order.sightings[: products[-1].index] if is_of_training(one)), default=0)
    return [one for one in products if one.index >= start]


def _find_end(order: KernelOrder, head: int) -> int:
    """Return the end of the LM head's kernels: the next GEMM, the start of the next pass, or this many kernels."""
    following = order.products_between(head, len(order.sightings))
    end = following[0].index if following else len(order.sightings)
    lookup = find_lookup(order.sightings[head + 1 : end])
    return min(lookup.index if lookup is not None else end, head + KERNELS_AFTER_HEAD)


def _until_backward(order: KernelOrder, products: Sequence[Sighting]) -> list[Sighting]:
    """Keep the GEMMs up to the first kernel that certainly belongs to the backward pass or to another pass."""
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
    """Return the other kernels of one layer by zone: from one attention to the next, or for a single layer from its
    first GEMM to its last."""
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
        return "there is a single attention call, with too few GEMMs around it for a layer"
    count = len(order.find_gap(layers[0], layers[1]))
    return f"{count_noun(count, 'GEMM')} between consecutive attention calls cannot be a decoder layer"
