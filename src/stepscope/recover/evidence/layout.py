"""Where every kernel of a run stands, if it is a run of the claimed model: which pass, which layer, which role.

`structure` asks what the layers are, and takes the first for all. Here the question is whether each is what was
claimed, so every layer of every pass is laid out, and what has no place in a layer is kept as such: it is work that
nobody claimed.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stepscope.recover.evidence.structure import (
    BEHIND,
    KERNELS_AFTER_HEAD,
    PROJECTIONS,
    SUM_OF_PARTS,
    NoTransformerError,
    Role,
    Zone,
    is_attention,
    is_lookup,
    is_norm,
    is_of_training,
    is_product,
    is_softmax,
    merge_anchors,
)
from stepscope.recover.facts import Sighting

Anchor = tuple[Sighting, ...]
# A place in a gap between two attentions: a role, or nothing that a layer has.
Pattern = tuple[Role | None, ...]
Fits = Callable[[Role, Sighting], bool]
MOST_EXTRAS = 2  # products in a gap that no layer has, for which places are tried
_INTO_HEADS: tuple[Role, ...] = ("query_key_value", "query", "key", "value", "key_value", "scores")
_INTO_FEED_FORWARD: tuple[Role, ...] = ("up", "gate", "gate_up")
_PRODUCTS_AT_TURN = 3
_NEAR = 40  # kernels to either side of a place where something is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of one kernel. Passes and layers count from 1; products have a role, other kernels a zone."""

    sighting: Sighting
    pass_number: int
    layer: int | None = None
    role: Role | None = None
    zone: Zone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """Something that no layer of the claimed kind does, and the kernel where it is seen."""

    sighting: Sighting
    expected: str
    seen: str
    is_unclear: bool = False  # a kernel of unknown kind stands there, which may be what is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the order of kernels shows before anything is claimed."""

    sightings: tuple[Sighting, ...]
    products: tuple[Sighting, ...]
    segments: tuple[tuple[Anchor, ...], ...]  # attentions between which neither a lookup nor a backward kernel stands
    is_fused: bool
    is_training: bool
    gap: tuple[Sighting, ...] | None  # matrix products between two attentions, None where there is one a pass
    product_indices: tuple[int, ...]

    @property
    def gap_products(self) -> int | None:
        return None if self.gap is None else len(self.gap)


@dataclass(slots=True, kw_only=True)
class Placement:
    pattern: Pattern
    num_layers: list[int] = field(default_factory=list)  # of each pass
    starts: list[Sighting] = field(default_factory=list)  # the first attention of each pass
    attentions: list[Place] = field(default_factory=list)
    recomputed: list[Sighting] = field(default_factory=list)  # attention run again for the backward pass
    backward_attentions: list[Sighting] = field(default_factory=list)
    products: list[Place] = field(default_factory=list)
    others: list[Place] = field(default_factory=list)
    extras: list[Sighting] = field(default_factory=list)  # products before the first layer or behind the head
    intruders: list[Place] = field(default_factory=list)  # products inside of a layer that no layer has
    backward: list[Sighting] = field(default_factory=list)  # products of the backward pass, in no order
    complaints: list[Complaint] = field(default_factory=list)
    starts_late: bool = False  # no lookup before the first attention
    left_out: set[int] = field(default_factory=set)  # passes that are not compared
    unclear: set[int] = field(default_factory=set)  # passes that may be several, of which nothing shows the starts

    def leave_out(self, passes: set[int]) -> None:
        self.left_out |= passes
        for places in (self.attentions, self.products, self.others, self.intruders):
            places[:] = [one for one in places if one.pass_number not in passes]

    def is_cut(self, pass_number: int) -> bool:
        """Whether the file may hold only a part of the pass: the first where it starts, the last where it ends."""
        if pass_number == 1 and self.starts_late:
            return True
        return pass_number == len(self.num_layers) and not any(
            one.role == "head" and one.pass_number == pass_number for one in self.products
        )


def examine(sightings: Sequence[Sighting]) -> Run:
    """Raises NoTransformerError where there is nothing to lay out."""
    fused = [one for one in sightings if is_attention(one, backward=False)]
    anchors = merge_anchors(fused, sightings) if fused else _find_softmaxes(sightings)
    products = tuple(one for one in sightings if is_product(one))
    if not products or not anchors:
        missing = "matrix product" if not products else "attention"
        raise NoTransformerError(f"no {missing} among the kernels")
    is_training = any(is_of_training(one) for one in sightings)
    segments = _split(anchors, [one.index for one in sightings if is_lookup(one) or is_of_training(one)])
    usual = _find_usual(segments, products, is_fused=bool(fused))
    if is_training and usual is not None:
        segments = [part for one in segments for part in _split_at_turn(one, products, len(usual))]
    return Run(
        sightings=tuple(sightings),
        products=products,
        segments=tuple(segments),
        is_fused=bool(fused),
        is_training=is_training,
        gap=usual,
        product_indices=tuple(one.index for one in products),
    )


def _find_softmaxes(sightings: Sequence[Sighting]) -> list[Anchor]:
    """Those of attention have one grid in all layers; that of a loss or of sampling has another."""
    anchors = merge_anchors([one for one in sightings if is_softmax(one)], sightings)
    grids = Counter(anchor[0].grid for anchor in anchors)
    usual = max(grids, key=lambda grid: grids[grid], default=None)
    return [anchor for anchor in anchors if anchor[0].grid == usual]


def _split(anchors: Sequence[Anchor], ends: Sequence[int]) -> list[tuple[Anchor, ...]]:
    """Attentions between which none of these kernels stands."""
    segments: list[list[Anchor]] = [[anchors[0]]]
    for before, after in itertools.pairwise(anchors):
        if _between(ends, before[-1].index, after[0].index):
            segments.append([])
        segments[-1].append(after)
    return [tuple(segment) for segment in segments]


def _find_usual(
    segments: Sequence[tuple[Anchor, ...]], products: Sequence[Sighting], *, is_fused: bool
) -> tuple[Sighting, ...] | None:
    """The first of the gaps with as many products as most have, if possible as many as a layer."""
    where = [one.index for one in products]
    gaps = [
        tuple(products[bisect_right(where, before[-1].index) : bisect_left(where, after[0].index)])
        for segment in segments
        for before, after in itertools.pairwise(segment)
    ]
    counts = Counter(map(len, gaps))
    possible = {len(first) + len(second) + (0 if is_fused else 2) for first in PROJECTIONS for second in BEHIND}
    usual = min(counts, key=lambda count: (-counts[count], count not in possible, count), default=None)
    return next((gap for gap in gaps if len(gap) == usual), None)


def _split_at_turn(
    segment: tuple[Anchor, ...], products: Sequence[Sighting], usual: int
) -> Iterator[tuple[Anchor, ...]]:
    """Where nothing in the names of a backward pass shows it, and attention is run again in it: between the last layer
    and the first that is run again stand the head and its two gradients besides."""
    where = [one.index for one in products]
    start = 0
    for i, (before, after) in enumerate(itertools.pairwise(segment), start=1):
        if len(_between(where, before[-1].index, after[0].index)) >= usual + _PRODUCTS_AT_TURN:
            yield segment[start:i]
            start = i
    yield segment[start:]


def find_patterns(run: Run, *, gated: bool | None, extras: int = 0) -> list[tuple[Pattern, int]]:
    """Every way to read the products between two attentions, with how many of its places belong to the layer behind.
    `extras` of them have no role."""
    orders = [
        (
            (*(() if run.is_fused else ("values",)), *feed_forward),
            (*projections, *(() if run.is_fused else ("scores",))),
        )
        for projections, feed_forward in itertools.product(PROJECTIONS, BEHIND)
        if gated is None or gated == any(role in ("gate", "gate_up") for role in feed_forward)
    ]
    if run.gap is None:
        return [((*behind, *ahead), len(behind)) for behind, ahead in orders] if not extras else []
    return [
        pattern
        for behind, ahead in orders
        if len(behind) + len(ahead) + extras == len(run.gap)
        for pattern in _spread((*behind, *ahead), len(behind), len(run.gap))
    ]


def _spread(roles: tuple[Role, ...], behind: int, places: int) -> Iterator[tuple[Pattern, int]]:
    for skipped in itertools.combinations(range(places), places - len(roles)):
        names = iter(roles)
        pattern: Pattern = tuple(None if place in skipped else next(names) for place in range(places))
        ahead = [place for place in range(places) if place not in skipped][behind]
        yield pattern, ahead


def place(run: Run, pattern: Pattern, behind: int, num_layers: int | None, fits: Fits) -> Placement:
    """Every kernel in its place. `fits` says whether a product can have a role, to find the one that is too many."""
    first = run.segments[0][0][0].index
    placement = Placement(pattern=pattern, starts_late=not any(map(is_lookup, run.sightings[:first])))
    placement.backward_attentions = [one for one in run.sightings if is_attention(one, backward=True)]
    passes = _find_passes(run, num_layers, placement)
    for number, anchors in enumerate(passes, start=1):
        previous = passes[number - 2][-1][-1].index if number > 1 else -1
        following = passes[number][0][0].index if number < len(passes) else len(run.sightings)
        layout = _Layout(run, placement, number, pattern, behind, fits, len(placement.products))
        layout.lay_out(anchors, previous, following)
    return placement


def _find_passes(run: Run, num_layers: int | None, placement: Placement) -> list[tuple[Anchor, ...]]:
    optimizers = [one.index for one in run.sightings if is_lookup(one) or one.name.kernel_class == "optimizer"]
    passes: list[tuple[Anchor, ...]] = []
    for segment in run.segments:
        if passes and not _between(optimizers, passes[-1][-1][-1].index, segment[0][0].index):
            placement.recomputed.extend(one for anchor in segment for one in anchor)
            continue
        parts = _split_unseen(run, segment, num_layers)
        if parts is None:
            placement.unclear.add(len(passes) + 1)
        passes.extend(parts or [segment])
    placement.num_layers = [len(one) for one in passes]
    placement.starts = [one[0][0] for one in passes]
    return passes


def _split_unseen(run: Run, segment: tuple[Anchor, ...], num_layers: int | None) -> list[tuple[Anchor, ...]] | None:
    """Where lookups do not show, passes follow each other without a mark, but with the head's product in between. (That
    of a compiled lookup is no mark: later layers may look embeddings up again rather than keep them.) The first may be
    cut off at its start and the last at its end. None where the gaps show passes of different lengths."""
    where = run.product_indices
    pieces: list[list[Anchor]] = [[segment[0]]]
    for before, after in itertools.pairwise(segment):
        if len(_between(where, before[-1].index, after[0].index)) == run.gap_products:
            pieces[-1].append(after)
        else:
            pieces.append([after])
    lengths = [len(piece) for piece in pieces]
    if len(pieces) == 1 or len(segment) == num_layers:
        return [segment]
    whole = lengths[1] if len(lengths) > 2 else num_layers if num_layers in lengths else max(lengths)
    is_even = set(lengths[1:-1]) <= {whole} and max(lengths) == whole
    if is_even and (whole == num_layers or (whole > 1 and (len(lengths) > 2 or len(set(lengths)) == 1))):
        return [tuple(piece) for piece in pieces]
    return None if len(pieces) > 2 else [segment]


@dataclass(slots=True)
class _Layout:
    """One forward pass."""

    run: Run
    placement: Placement
    number: int
    pattern: Pattern
    behind: int
    fits: Fits
    first_product: int  # of the pass, in the placement's list

    def lay_out(self, anchors: Sequence[Anchor], previous: int, following: int) -> None:
        """`previous` and `following`: where the pass before ended its attentions and where the next begins."""
        ahead = _only_roles(self.pattern[self.behind :])
        before = self._products(previous, anchors[0][0].index)
        chosen = self._choose_ahead(before)
        is_cut = self.placement.starts_late and previous < 0
        self._assign(ahead[-len(chosen) :] if is_cut and chosen else ahead, chosen, layer=1, is_end=is_cut)
        if previous < 0:
            rest = [one for one in before if one not in chosen]
            self.placement.extras.extend(rest[: -len(self._match_cut_layer(rest)) or None] if is_cut else rest)
        for layer, (one, following_one) in enumerate(itertools.pairwise(anchors), start=1):
            self._fill_gap(self._products(one[-1].index, following_one[0].index), layer)
        self._finish(anchors, following)
        self.placement.attentions.extend(
            Place(sighting=kernel, pass_number=self.number, layer=layer)
            for layer, anchor in enumerate(anchors, start=1)
            for kernel in anchor
        )
        self._place_others(anchors, previous, following)

    def _choose_ahead(self, products: list[Sighting]) -> list[Sighting]:
        """Those before a pass's first attention that are its first layer's. Positions may be turned into angles by a
        product, and a compiler may put it between them."""
        ahead = _only_roles(self.pattern[self.behind :])
        return self._choose(ahead, products[-len(ahead) - MOST_EXTRAS :], from_end=True)

    def _match_cut_layer(self, products: list[Sighting]) -> list[Sighting]:
        """Those at the end that can be of the layer in whose middle the file begins."""
        behind = _only_roles(self.pattern[: self.behind])
        number = min(len(behind), len(products))
        roles, last = behind[len(behind) - number :], products[len(products) - number :]
        fitting = [role is not None and self.fits(role, one) for role, one in zip(roles, last, strict=True)]
        return last if all(fitting) else []

    def _products(self, after: int, before: int) -> list[Sighting]:
        where = self.run.product_indices
        return list(self.run.products[bisect_right(where, after) : bisect_left(where, before)])

    def _assign(self, pattern: Pattern, products: Sequence[Sighting], layer: int, *, is_end: bool = False) -> None:
        # One pass that is cut off is no loss where others are whole.
        if len(products) < len(pattern) and not (is_end and len(self.placement.num_layers) > 1):
            self._complain_missing(pattern, products, layer, is_end=is_end)
        for role, product in zip(pattern, products, strict=False):
            if role is None:
                self._add_intruder(product, layer)
            else:
                self.placement.products.append(Place(sighting=product, pass_number=self.number, layer=layer, role=role))

    def _add_intruder(self, product: Sighting, layer: int) -> None:
        self.placement.intruders.append(Place(sighting=product, pass_number=self.number, layer=layer))

    def _fill_gap(self, products: list[Sighting], layer: int) -> None:
        pattern, behind = self.pattern, self.behind
        if len(products) > len(pattern):
            pattern, behind = _only_roles(pattern), len(_only_roles(pattern[:behind]))
            chosen = self._choose(pattern, products)
            for one in products:
                if one not in chosen:
                    self._add_intruder(one, layer)
            products = chosen
        if len(products) < len(pattern):
            self._complain_missing(pattern, products, layer)
            return
        self._assign(pattern[:behind], products[:behind], layer)
        self._assign(pattern[behind:], products[behind:], layer + 1)

    def _choose(self, roles: Pattern, products: list[Sighting], *, from_end: bool = False) -> list[Sighting]:
        """Those of too many products that fit the roles best, and of equals the first, or the last."""
        wanted = len(roles)
        if not wanted <= len(products) <= wanted + MOST_EXTRAS:
            return products[-wanted:] if from_end else products[:wanted]
        choices = [list(chosen) for chosen in itertools.combinations(products, wanted)]
        return max(choices[:: -1 if from_end else 1], key=lambda chosen: self._count_fitting(roles, chosen))

    def _count_fitting(self, pattern: Pattern, products: Sequence[Sighting]) -> int:
        return sum(role is None or self.fits(role, one) for role, one in zip(pattern, products, strict=True))

    def _finish(self, anchors: Sequence[Anchor], following: int) -> None:
        """The last layer's second half, the head, and what comes after: the backward pass, or nothing."""
        tail = self._products(anchors[-1][-1].index, following)
        is_last = following == len(self.run.sightings)
        # The next pass's own first products stand before its first attention.
        following_ones = [] if is_last else self._choose_ahead(tail)
        tail = [one for one in tail if one not in following_ones]
        behind = _only_roles(self.pattern[: self.behind])
        chosen = self._choose(behind, tail[: len(behind) + MOST_EXTRAS])
        self._assign(behind, chosen, len(anchors), is_end=is_last)
        end = chosen[-1].index if chosen else -1
        for one in tail:
            if one.index < end and one not in chosen:
                self._add_intruder(one, len(anchors))
        self._place_tail([one for one in tail if one.index > end], anchors[-1][-1].index, following)

    def _place_tail(self, products: list[Sighting], last_attention: int, following: int) -> None:
        """The head, and what comes behind it. The backward pass begins with what is certainly of it."""
        kernels = (self.run.sightings[index] for index in range(last_attention, following))
        turning = next((one.index for one in kernels if is_of_training(one)), following)
        if products and products[0].index < turning:
            self.placement.products.append(Place(sighting=products[0], pass_number=self.number, role="head"))
            products = products[1:]
        for product in products:
            (self.placement.backward if product.index > turning else self.placement.extras).append(product)

    def _complain_missing(
        self, pattern: Pattern, products: Sequence[Sighting], layer: int, *, is_end: bool = False
    ) -> None:
        near = products[0] if products else self.run.segments[0][0][0]
        around = self.run.sightings[max(0, near.index - _NEAR) : near.index + _NEAR]
        is_unclear = is_end or any(one.name.kernel_class == "other" for one in around)
        self.placement.complaints.append(
            Complaint(
                sighting=near,
                expected=f"{len(pattern)} matrix products by the attention of layer {layer}, as in the other layers",
                seen=f"{len(products)}",
                is_unclear=is_unclear,
            )
        )

    def _place_others(self, anchors: Sequence[Anchor], previous: int, following: int) -> None:
        """Kernels between the products, by what stands before and behind them."""
        own = self.placement.products[self.first_product :]
        marks = sorted(
            [(one.sighting.index, one.role, one.layer) for one in own]
            + [(kernel.index, None, layer) for layer, anchor in enumerate(anchors, 1) for kernel in anchor]
        )
        if not own:
            return
        first = self._start(previous, marks[0][0])
        for one in self.run.sightings[first : marks[0][0]]:
            self._add_other(one, "before", None)
        for (start, before, layer), (end, behind, _) in itertools.pairwise(marks):
            zone = _find_zone(before, behind)
            for one in self.run.sightings[start + 1 : end]:
                self._add_other(one, zone, layer)
        last, role, layer = marks[-1]
        end = self._end(last, following) if role == "head" or not self.run.is_training else last
        for one in self.run.sightings[last + 1 : end]:
            self._add_other(one, "after" if role == "head" else "final", layer)

    def _start(self, previous: int, first: int) -> int:
        """Where the pass begins: at its first lookup, if another pass came before it."""
        if previous < 0:
            return 0
        training = [i for i in range(previous + 1, first) if is_of_training(self.run.sightings[i])]
        start = training[-1] + 1 if training else previous + 1
        return next((i for i in range(start, first) if is_lookup(self.run.sightings[i])), first)

    def _end(self, last: int, following: int) -> int:
        stop = min(following, last + 1 + KERNELS_AFTER_HEAD)
        for index in range(last + 1, stop):
            one = self.run.sightings[index]
            if is_of_training(one) or is_product(one) or is_lookup(one):
                return index
        return stop

    def _add_other(self, sighting: Sighting, zone: Zone, layer: int | None) -> None:
        if not is_product(sighting):
            self.placement.others.append(Place(sighting=sighting, pass_number=self.number, layer=layer, zone=zone))


def breaks_feed_forward(placement: Placement) -> bool:
    """Whether the products that are read as a feed-forward layer have none of its arithmetic, or a norm in between."""
    inside = [one.sighting for one in placement.others if one.zone == "feed_forward"]
    return not inside or any(is_norm(one) for one in inside)


def adds_parts(sighting: Sighting) -> bool:
    """Whether it is the second kernel of a product whose sum was split."""
    return sighting.name.kernel_class == "gemm" and SUM_OF_PARTS in sighting.name.operation


def _only_roles(pattern: Pattern) -> Pattern:
    return tuple(role for role in pattern if role is not None)


def _find_zone(before: Role | None, behind: Role | None) -> Zone:
    """None is attention itself."""
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


def _between(indices: Sequence[int], after: int, before: int) -> Sequence[int]:
    return indices[bisect_right(indices, after) : bisect_left(indices, before)]
