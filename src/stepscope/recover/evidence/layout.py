"""The position of every kernel of a run, assuming it is the claimed model: its pass, layer and role.

`structure` finds out what the layers are, and assumes that the first is like all others. Here the question is whether
each layer is as claimed, so every layer of every pass is arranged. Kernels that do not belong in a layer are kept
separately: they are unclaimed work.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from stepscope.recover.evidence.completeness import find_lookup, look
from stepscope.recover.evidence.order import (
    KERNELS_AFTER_HEAD,
    Anchor,
    KernelOrder,
    Role,
    Zone,
    find_zone,
    is_attention,
    is_lookup,
    is_of_training,
    is_product,
    layer_roles,
    read_order,
)
from stepscope.recover.facts import Sighting

# A position in a gap between two attention calls: a role, or None for a GEMM that a layer does not have.
Pattern = tuple[Role | None, ...]
Fits = Callable[[Role, Sighting], bool]
IsRotary = Callable[[Sighting], bool]
MOST_EXTRAS = 2  # GEMMs in a gap that a layer does not have, for which positions are tried
_PRODUCTS_AT_TURN = 3
_NEAR = 40  # kernels before and after a position where something is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlace:
    """The position of one kernel. Passes and layers count from 1. GEMMs have a role, other kernels a zone."""

    sighting: Sighting
    pass_number: int
    layer: int | None = None
    role: Role | None = None
    zone: Zone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """Something that a layer of the claimed model does not do, with the kernel where it shows."""

    sighting: Sighting
    expected: str
    seen: str
    is_unclear: bool = False  # a kernel with an unknown name is there, which may be the missing one


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedOrder(KernelOrder):
    """The kernel order with its attention kernels in segments, separated by a lookup or a backward kernel."""

    segments: tuple[tuple[Anchor, ...], ...]
    gap: tuple[Sighting, ...] | None  # GEMMs between two attention calls, None if each pass has only one

    @property
    def gap_products(self) -> int | None:
        return None if self.gap is None else len(self.gap)


@dataclass(slots=True, kw_only=True)
class Placement:
    pattern: Pattern
    num_layers: list[int] = field(default_factory=list)  # per pass
    starts: list[Sighting] = field(default_factory=list)  # the first attention of each pass
    attentions: list[KernelPlace] = field(default_factory=list)
    recomputed: list[Sighting] = field(default_factory=list)  # attention recomputed for the backward pass
    backward_attentions: list[Sighting] = field(default_factory=list)
    products: list[KernelPlace] = field(default_factory=list)
    others: list[KernelPlace] = field(default_factory=list)
    extras: list[Sighting] = field(default_factory=list)  # GEMMs before the first layer or after the LM head
    intruders: list[KernelPlace] = field(default_factory=list)  # GEMMs inside a layer that a layer does not have
    backward: list[Sighting] = field(default_factory=list)  # GEMMs of the backward pass, in no particular order
    complaints: list[Complaint] = field(default_factory=list)
    starts_late: bool = False  # no lookup before the first attention
    left_out: set[int] = field(default_factory=set)  # passes that are not compared
    unclear: set[int] = field(default_factory=set)  # what looks like one pass but may be several without visible starts

    def leave_out(self, passes: set[int]) -> None:
        self.left_out |= passes
        for places in (self.attentions, self.products, self.others, self.intruders):
            places[:] = [one for one in places if one.pass_number not in passes]

    def find_zone(self, zone: Zone) -> list[Sighting]:
        return [one.sighting for one in self.others if one.zone == zone]

    def is_cut(self, pass_number: int) -> bool:
        """Whether the file may have only part of the pass: the first if the file starts in it, the last if it ends in
        it."""
        if pass_number == 1 and self.starts_late:
            return True
        return pass_number == len(self.num_layers) and not any(
            one.role == "head" and one.pass_number == pass_number for one in self.products
        )


def split_order(sightings: Sequence[Sighting]) -> SegmentedOrder:
    """Return the segments. Raises NoTransformerError if there are none."""
    order = read_order(sightings)
    anchors = order.anchors if order.is_fused else _keep_common_grid(order.anchors)
    ends = [one for one in sightings if is_lookup(one) or is_of_training(one)]
    segments = _split(anchors, {one.index for one in ends})
    gap = _find_usual_gap(order, segments)
    if order.is_training and gap is not None:
        segments = [part for one in segments for part in _split_at_turn(order, one, len(gap))]
    known = {one.name: getattr(order, one.name) for one in fields(order)}
    return SegmentedOrder(**known, segments=tuple(segments), gap=gap)


def _keep_common_grid(anchors: Sequence[Anchor]) -> list[Anchor]:
    """Attention softmaxes have the same grid in all layers; that of a loss or of sampling has another."""
    grids = Counter(anchor[0].grid for anchor in anchors)
    usual = max(grids, key=lambda grid: grids[grid])
    return [anchor for anchor in anchors if anchor[0].grid == usual]


def _split(anchors: Sequence[Anchor], ends: set[int]) -> list[tuple[Anchor, ...]]:
    """Group the attention kernels that have none of these kernels between them."""
    segments: list[list[Anchor]] = [[anchors[0]]]
    for before, after in itertools.pairwise(anchors):
        if not ends.isdisjoint(range(before[-1].index + 1, after[0].index)):
            segments.append([])
        segments[-1].append(after)
    return [tuple(segment) for segment in segments]


def _find_usual_gap(order: KernelOrder, segments: Sequence[tuple[Anchor, ...]]) -> tuple[Sighting, ...] | None:
    """Return the first gap with the most common number of GEMMs, preferably the number in a layer."""
    gaps = [order.find_gap(before, after) for segment in segments for before, after in itertools.pairwise(segment)]
    counts = Counter(map(len, gaps))
    possible = {len(behind) + len(ahead) for behind, ahead in layer_roles(is_fused=order.is_fused)}
    usual = min(counts, key=lambda count: (-counts[count], count not in possible, count), default=None)
    return next((gap for gap in gaps if len(gap) == usual), None)


def _split_at_turn(order: KernelOrder, segment: tuple[Anchor, ...], usual: int) -> Iterator[tuple[Anchor, ...]]:
    """Find recomputed attention when no kernel name shows a backward pass: between the last layer and the first
    recomputed one there are also the LM head and its two gradients."""
    start = 0
    for i, (before, after) in enumerate(itertools.pairwise(segment), start=1):
        if len(order.find_gap(before, after)) >= usual + _PRODUCTS_AT_TURN:
            yield segment[start:i]
            start = i
    yield segment[start:]


def find_patterns(run: SegmentedOrder, *, gated: bool | None, extras: int = 0) -> list[tuple[Pattern, int]]:
    """Return every interpretation of the GEMMs between two attention calls, with the number of them that belong to the
    preceding layer. `extras` of them have no role."""
    orders = [
        (behind, ahead)
        for behind, ahead in layer_roles(is_fused=run.is_fused)
        if gated is None or gated == any(role in ("gate", "gate_up") for role in behind)
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


def place(
    run: SegmentedOrder, pattern: Pattern, behind: int, num_layers: int | None, fits: Fits, is_rotary: IsRotary
) -> Placement:
    """Arrange all kernels. `fits` tells whether a GEMM can have a role; it is used to find an extra one. `is_rotary`
    tells whether it can be that of rotary angles."""
    first = run.segments[0][0][0].index
    placement = Placement(pattern=pattern, starts_late=find_lookup(run.sightings[:first]) is None)
    placement.backward_attentions = [one for one in run.sightings if is_attention(one, backward=True)]
    passes = _find_passes(run, num_layers, placement)
    for number, anchors in enumerate(passes, start=1):
        previous = passes[number - 2][-1][-1].index if number > 1 else -1
        following = passes[number][0][0].index if number < len(passes) else len(run.sightings)
        layout = _Layout(run, placement, number, pattern, behind, fits, is_rotary, num_layers, len(placement.products))
        layout.lay_out(anchors, previous, following)
    return placement


def _find_passes(run: SegmentedOrder, num_layers: int | None, placement: Placement) -> list[tuple[Anchor, ...]]:
    starts = {one.index for one in run.sightings if is_lookup(one) or one.name.kernel_class == "optimizer"}
    passes: list[tuple[Anchor, ...]] = []
    for segment in run.segments:
        if passes and starts.isdisjoint(range(passes[-1][-1][-1].index + 1, segment[0][0].index)):
            placement.recomputed.extend(one for anchor in segment for one in anchor)
            continue
        parts = _split_unseen(run, segment, num_layers)
        if parts is None:
            placement.unclear.add(len(passes) + 1)
        passes.extend(parts or [segment])
    placement.num_layers = [len(one) for one in passes]
    placement.starts = [one[0][0] for one in passes]
    return passes


def _split_unseen(
    run: SegmentedOrder, segment: tuple[Anchor, ...], num_layers: int | None
) -> list[tuple[Anchor, ...]] | None:
    """Find passes without lookups by the LM head between them. (A compiled lookup does not separate passes: later
    layers may look up embeddings again instead of keeping them.) The first pass may be cut at its start and the last at
    its end. Return None if the gaps show passes of different lengths."""
    pieces: list[list[Anchor]] = [[segment[0]]]
    for before, after in itertools.pairwise(segment):
        if len(run.find_gap(before, after)) == run.gap_products:
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

    run: SegmentedOrder
    placement: Placement
    number: int
    pattern: Pattern
    behind: int
    fits: Fits
    is_rotary: IsRotary
    num_layers: int | None  # claimed
    first_product: int  # of the pass, in the list of the placement

    def lay_out(self, anchors: Sequence[Anchor], previous: int, following: int) -> None:
        """Arrange one pass. `previous` is the end of the last attention of the pass before, `following` the start of
        the next pass."""
        ahead = _only_roles(self.pattern[self.behind :])
        before = list(self.run.products_between(previous, anchors[0][0].index))
        is_cut = self.placement.starts_late and previous < 0
        chosen = self._choose_cut_ahead(before) if is_cut else self._choose_ahead(before)
        self._assign(ahead[-len(chosen) :] if is_cut and chosen else ahead, chosen, layer=1, is_end=is_cut)
        if previous < 0:
            rest = [one for one in before if one not in chosen]
            self.placement.extras.extend(rest[: -len(self._match_cut_layer(rest)) or None] if is_cut else rest)
        for layer, (one, following_one) in enumerate(itertools.pairwise(anchors), start=1):
            self._fill_gap(list(self.run.find_gap(one, following_one)), layer)
        self._finish(anchors, following)
        self.placement.attentions.extend(
            KernelPlace(sighting=kernel, pass_number=self.number, layer=layer)
            for layer, anchor in enumerate(anchors, start=1)
            for kernel in anchor
        )
        self._place_others(anchors, previous, following)

    def _choose_ahead(self, products: list[Sighting]) -> list[Sighting]:
        """Return the GEMMs before a pass's first attention that belong to its first layer. A GEMM for rotary angles may
        come before them, and a compiler may put it between them."""
        ahead = _only_roles(self.pattern[self.behind :])
        return self._choose(ahead, products[-len(ahead) - MOST_EXTRAS :], from_end=True)

    def _choose_cut_ahead(self, products: list[Sighting]) -> list[Sighting]:
        """Return the GEMMs of the first layer before its attention, if the file may start between them. Then nothing
        but a GEMM for rotary angles is before or between those that are left."""
        ahead = _only_roles(self.pattern[self.behind :])
        whole = self._choose_ahead(products)
        for number in range(min(len(ahead), len(products)), -1, -1):
            roles = ahead[len(ahead) - number :]
            chosen = self._choose(roles, products[-number - MOST_EXTRAS :], from_end=True) if number else []
            others = [one for one in products if one not in chosen]
            is_possible = number == len(ahead) or all(map(self.is_rotary, others))
            if is_possible and self._count_fitting(roles, chosen) == number:
                return chosen
        return whole

    def _match_cut_layer(self, products: list[Sighting]) -> list[Sighting]:
        """Return the GEMMs at the end that can belong to the layer in which the file begins."""
        behind = _only_roles(self.pattern[: self.behind])
        number = min(len(behind), len(products))
        roles, last = behind[len(behind) - number :], products[len(products) - number :]
        fitting = [role is not None and self.fits(role, one) for role, one in zip(roles, last, strict=True)]
        return last if all(fitting) else []

    def _assign(self, pattern: Pattern, products: Sequence[Sighting], layer: int, *, is_end: bool = False) -> None:
        # A partial pass can be ignored if others are complete.
        if len(products) < len(pattern) and not (is_end and len(self.placement.num_layers) > 1):
            self._complain_missing(pattern, products, layer, is_end=is_end)
        for role, product in zip(pattern, products, strict=False):
            if role is None:
                self._add_intruder(product, layer)
            else:
                self.placement.products.append(
                    KernelPlace(sighting=product, pass_number=self.number, layer=layer, role=role)
                )

    def _add_intruder(self, product: Sighting, layer: int) -> None:
        self.placement.intruders.append(KernelPlace(sighting=product, pass_number=self.number, layer=layer))

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
        """Return the GEMMs, out of too many, that fit the roles best; among equals the first, or from the end those
        that layers have, and then the last."""
        wanted = len(roles)
        if not wanted <= len(products) <= wanted + MOST_EXTRAS:
            return products[-wanted:] if from_end else products[:wanted]
        choices = [list(chosen) for chosen in itertools.combinations(products, wanted)]
        return max(
            choices[:: -1 if from_end else 1],
            key=lambda chosen: (self._count_fitting(roles, chosen), from_end and self._count_usual(roles, chosen)),
        )

    def _count_usual(self, roles: Pattern, products: Sequence[Sighting]) -> int:
        """Count the GEMMs that are those of the other layers. If no gap shows these, the one for rotary angles may have
        another dtype than the rest."""
        if self.run.gap is None:
            usual = Counter(one.dtype for one in self.run.products).most_common(1)[0][0]
            return sum(one.dtype == usual for one in products)
        known = {(role, look(one)) for role, one in zip(self.pattern, self.run.gap, strict=True)}
        return sum((role, look(one)) in known for role, one in zip(roles, products, strict=True))

    def _count_fitting(self, pattern: Pattern, products: Sequence[Sighting]) -> int:
        return sum(role is None or self.fits(role, one) for role, one in zip(pattern, products, strict=True))

    def _finish(self, anchors: Sequence[Anchor], following: int) -> None:
        """Arrange the second half of the last layer, the LM head, and the backward pass if there is one."""
        tail = list(self.run.products_between(anchors[-1][-1].index, following))
        is_last = following == len(self.run.sightings)
        # The first GEMMs of the next pass come before its first attention.
        following_ones = [] if is_last else self._choose_ahead(tail)
        tail = [one for one in tail if one not in following_ones]
        behind = _only_roles(self.pattern[: self.behind])
        chosen = self._choose(behind, tail[: len(behind) + MOST_EXTRAS])
        self._assign(behind, chosen, len(anchors), is_end=is_last)
        end = chosen[-1].index if chosen else -1
        for one in tail:
            if one.index < end and one not in chosen:
                self._add_intruder(one, len(anchors))
        rest = [one for one in tail if one.index > end]
        if not (is_last and self._begins_layer(rest, len(anchors))):
            self._place_tail(rest, anchors[-1][-1].index, following)

    def _begins_layer(self, products: Sequence[Sighting], layers: int) -> bool:
        """Whether the file ends in the middle of another layer: its last GEMMs are the first ones of the layers before,
        and not the LM head, which no other GEMM follows."""
        ahead = _only_roles(self.pattern[self.behind :])
        if not 0 < len(products) <= len(ahead) or layers == self.num_layers:
            return False
        known = {(one.role, look(one.sighting)) for one in self.placement.products}
        is_alike = all((role, look(one)) in known for role, one in zip(ahead, products, strict=False))
        may_be_head = len(products) == 1 and self.fits("head", products[0])
        return is_alike and (layers < self.num_layers if self.num_layers else not may_be_head)

    def _place_tail(self, products: list[Sighting], last_attention: int, following: int) -> None:
        """Arrange the LM head and what follows. The backward pass starts at the first kernel that certainly belongs to
        it."""
        kernels = (self.run.sightings[index] for index in range(last_attention, following))
        turning = next((one.index for one in kernels if is_of_training(one)), following)
        if products and products[0].index < turning:
            self.placement.products.append(KernelPlace(sighting=products[0], pass_number=self.number, role="head"))
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
                expected=f"{len(pattern)} GEMMs next to the attention of layer {layer}, as in the other layers",
                seen=f"{len(products)}",
                is_unclear=is_unclear,
            )
        )

    def _place_others(self, anchors: Sequence[Anchor], previous: int, following: int) -> None:
        """Assign zones to the kernels between the GEMMs, by the GEMMs before and after them."""
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
            zone = find_zone(before, behind)
            for one in self.run.sightings[start + 1 : end]:
                self._add_other(one, zone, layer)
        last, role, layer = marks[-1]
        end = self._end(last, following) if role == "head" or not self.run.is_training else last
        for one in self.run.sightings[last + 1 : end]:
            self._add_other(one, "after" if role == "head" else "final", layer)

    def _start(self, previous: int, first: int) -> int:
        """Return where the pass begins: at its first lookup, if there is a pass before it."""
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
            self.placement.others.append(
                KernelPlace(sighting=sighting, pass_number=self.number, layer=layer, zone=zone)
            )


def _only_roles(pattern: Pattern) -> Pattern:
    return tuple(role for role in pattern if role is not None)
