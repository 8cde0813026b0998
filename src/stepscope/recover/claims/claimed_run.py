"""The kernels of a file arranged according to a claim, with the sizes that are not claimed taken from the evidence.

GEMMs can be interpreted in more than one way. The interpretation that contradicts the claim least is used: a claim is
refuted only if none fits. A claim without batch and context, such as a published config, is compared for every pair
that the tokens of the run allow. Other sizes that are not claimed are those that `recover` finds, if they do not
contradict the claim. They help to test the claimed sizes and never refute the claim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import msgspec

from stepscope import hardware
from stepscope.recover.claims.claim import Claim
from stepscope.recover.claims.prediction import Predictor, ShapeCheck
from stepscope.recover.claims.roofline import WorkLimits
from stepscope.recover.claims.unexplained import find_counts, find_left_over
from stepscope.recover.evidence.layout import (
    MOST_EXTRAS,
    Fits,
    Pattern,
    Placement,
    SegmentedOrder,
    find_patterns,
    place,
    split_order,
)
from stepscope.recover.evidence.observation import Seen
from stepscope.recover.evidence.order import NoTransformerError, Role, Zone, adds_tensors, breaks_feed_forward
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import LARGEST_SIZE, Gather, Rows, Sighting
from stepscope.recover.families import find_platform, read_fact
from stepscope.recover.shape import LAYER_SIZES, ClaimedShape, divisors
from stepscope.recover.solve.recovery import Candidate, Recovery, recover
from stepscope.units import count_noun

_MOST_PAIRS = 64  # of batch and context to try
_MOST_MISFITS = 4  # interpretations to arrange if none fits
_MOST_LAID_OUT = 1_000_000  # kernels of a file, over all interpretations and sizes: about 40 s on a slow machine


class Misfits(NamedTuple):
    """What does not fit an interpretation of the kernels: first what refutes the claim, then what leaves it open."""

    wrong: int  # checks and layers
    left_over: int  # GEMMs without a role
    unclear: int  # layers that lack a GEMM, perhaps because the file does


# With whether the feed-forward layer is broken, and the GEMMs of a layer that have no role.
_Score = tuple[Misfits, bool, int]
_PERFECT: _Score = (Misfits(0, 0, 0), False, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """`misfits`: what contradicts the claim in the best interpretation, and what leaves it open. `fits_otherwise`:
    nothing would contradict the claim with the other kind of feed-forward layer, gated or not."""

    evidence: KernelEvidence
    run: SegmentedOrder
    predictor: Predictor
    roofline: WorkLimits | None
    placement: Placement
    checks: list[ShapeCheck]
    misfits: Misfits
    fits_otherwise: bool = False
    counts: tuple[tuple[Zone, Seen], ...] = ()  # data movement kernels


def make_shape(claim: Claim) -> ClaimedShape:
    return ClaimedShape(**{name: getattr(claim, name) for name in LAYER_SIZES})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRuns:
    """Every file, arranged for the shape that fits the claim best. `left_open`: which sizes that are not claimed were
    not examined. `is_cut`: not every arrangement of the kernels was tried, so that none refutes the claim."""

    shape: ClaimedShape
    files: list[ClaimedRun]
    left_open: tuple[str, ...] = ()
    is_cut: bool = False


def open_all(evidence: Sequence[KernelEvidence], claim: Claim) -> ClaimedRuns:
    opened = [_Opened(one) for one in evidence]
    best: tuple[tuple[int, ...], ClaimedRuns] | None = None
    for shape, left_open in _complete(make_shape(claim), opened, cache(lambda: recover_sizes(evidence))):
        if best is not None and any(one.is_spent for one in opened):
            return _finish(best[1], opened, is_cut=True)
        files = [one.lay_out(claim, shape) for one in opened]
        misfits = tuple(map(sum, zip(*(file.misfits for file in files), strict=True)))
        if best is None or misfits < best[0]:
            best = misfits, ClaimedRuns(shape=shape, files=files, left_open=left_open)
        if not any(misfits):
            break
    assert best is not None, "the claim itself is tried last"
    return _finish(best[1], opened, is_cut=any(one.is_cut for one in opened))


def _finish(runs: ClaimedRuns, opened: Sequence["_Opened"], *, is_cut: bool) -> ClaimedRuns:
    files = [one.count(file) for one, file in zip(opened, runs.files, strict=True)]
    return replace(runs, files=files, is_cut=is_cut)


def _complete(
    shape: ClaimedShape, opened: Sequence["_Opened"], recovered: Callable[[], Recovery | None]
) -> Iterator[tuple[ClaimedShape, tuple[str, ...]]]:
    """Yield the shapes that the claim can mean, most likely first, with what the recovery did not examine. The last one
    leaves unknown sizes open: if it is contradicted, so is the claim, whatever the open sizes are."""
    open_sizes = [name for name in LAYER_SIZES if getattr(shape, name) is None]
    if not open_sizes:
        yield shape, ()
        return
    pairs = list(_pair(shape, opened))
    if not set(open_sizes) <= {"batch", "context"} and (answer := recovered()) is not None:
        for one in answer.candidates:
            if (filled := _fill(shape, one)) is not None:
                yield filled, answer.left_open
    yield from ((one, ()) for one in pairs[:_MOST_PAIRS])
    if not pairs and (answer := recovered()) is not None:
        # In a compiled run only the recovery finds the number of tokens, and it may disagree with the claimed sizes.
        yield from ((_complete_from(shape, one), answer.left_open) for one in answer.candidates)
    if not 0 < len(pairs) <= _MOST_PAIRS:
        yield shape, ()


def recover_sizes(evidence: Sequence[KernelEvidence]) -> Recovery | None:
    try:
        return recover(evidence)
    except NoTransformerError:
        return None


def _fill(shape: ClaimedShape, candidate: Candidate) -> ClaimedShape | None:
    """Return the claim completed with the recovered sizes, or None if the two disagree."""
    known = {name: value for name in LAYER_SIZES if (value := getattr(shape, name)) is not None}
    found = {name: getattr(candidate, name) for name in LAYER_SIZES}
    return ClaimedShape(**found) if all(found[name] == value for name, value in known.items()) else None


def _complete_from(shape: ClaimedShape, candidate: Candidate) -> ClaimedShape:
    """Return the claim with its open sizes as recovered."""
    found = {name: getattr(candidate, name) for name in LAYER_SIZES if getattr(shape, name) is None}
    return msgspec.structs.replace(shape, **found)


def _pair(shape: ClaimedShape, opened: Sequence["_Opened"]) -> Iterator[ClaimedShape]:
    """Yield every batch and context that match the tokens of norms and lookups, and that attention kernels allow."""
    tokens = next((found for one in opened if (found := one.count_tokens()) is not None), None)
    if tokens is None or (shape.batch is not None and shape.context is not None):
        return
    fitting: list[ClaimedShape] = []
    others: list[ClaimedShape] = []
    for batch in divisors(tokens):
        context = tokens // batch
        if shape.batch in (None, batch) and shape.context in (None, context):
            one = msgspec.structs.replace(shape, batch=batch, context=context)
            (fitting if all(file.admits_attention(one) for file in opened) else others).append(one)
    yield from fitting or others[:1]


def _forgive_cuts(
    placement: Placement, checks: list[ShapeCheck], kernels: int, period: int, shape: ClaimedShape
) -> list[ShapeCheck]:
    """Drop contradictions that are caused by a recording that starts or ends in the middle of a pass. If the file
    repeats one pass, every kernel of a partial pass has counterparts in the other passes: what is wrong with it but not
    with them is caused by the cut. `period` is the number of kernels after which they repeat; it must be a whole pass,
    not a layer."""
    inside = {(one.pass_number, one.layer) for one in placement.attentions if one.sighting.index >= kernels - period}
    if period == kernels or len(inside) != max(placement.num_layers):
        return checks

    def keep(wrong: set[int]) -> set[int]:
        twins = {one: (one - period, one + period) for one in wrong}
        return {one for one in wrong if all(twin in wrong for twin in twins[one] if 0 <= twin < kernels)}

    intruders = keep({one.sighting.index for one in placement.intruders})
    placement.intruders[:] = [one for one in placement.intruders if one.sighting.index in intruders]
    complaints = keep({one.sighting.index for one in placement.complaints})
    placement.complaints[:] = [one for one in placement.complaints if one.sighting.index in complaints]
    extras = keep({one.index for one in placement.extras})
    placement.extras[:] = [one for one in placement.extras if one.index in extras]
    depth = max(placement.num_layers)
    ends = {1, len(placement.num_layers)}
    placement.unclear |= {number for number in ends if placement.num_layers[number - 1] < depth}
    wrong = {one.sighting.index for one in checks if one.test(shape) is False}
    forgiven = wrong - keep(wrong)
    placement.products[:] = [one for one in placement.products if one.sighting.index not in forgiven]
    return [one for one in checks if one.sighting.index not in forgiven]


def _find_period(keys: Sequence[object]) -> int:
    """Return the number of kernels after which the sequence repeats."""
    borders = [0]
    for key in keys[1:]:
        length = borders[-1]
        while length and keys[length] != key:
            length = borders[length - 1]
        borders.append(length + (keys[length] == key))
    return len(keys) - borders[-1]


class _Opened:
    """A file, independent of the claim."""

    def __init__(self, evidence: KernelEvidence) -> None:
        self.evidence = evidence
        self.run = split_order(evidence.sightings)
        self.platform = find_platform(evidence.sightings, evidence.device_sms, portable=evidence.is_portable)
        device = hardware.find(evidence.device) if evidence.device else None
        self.predictor = Predictor(self.platform)
        self.roofline = None if device is None else WorkLimits(device)
        self._period = _find_period([self.predictor.identify(one) for one in evidence.sightings])
        self._left = _MOST_LAID_OUT
        self.is_cut = False  # some interpretations were not arranged

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def lay_out(self, claim: Claim, shape: ClaimedShape) -> ClaimedRun:
        best = self._read(claim, shape, claim.gated)
        if best is None:
            count = self.run.gap_products
            gap = "around attention" if count is None else "between consecutive attention calls"
            gemms = "the GEMMs" if count is None else count_noun(count, "GEMM")
            raise NoTransformerError(f"{gemms} {gap} cannot be a decoder layer")
        other = self._read(claim, shape, not claim.gated) if claim.gated is not None else None
        score, placement, checks = best
        return ClaimedRun(
            evidence=self.evidence,
            run=self.run,
            predictor=self.predictor,
            roofline=self.roofline,
            placement=placement,
            checks=checks,
            misfits=score[0],
            fits_otherwise=other is not None and other[0] == _PERFECT,
        )

    def count(self, file: ClaimedRun) -> ClaimedRun:
        """Add the data movement kernels, which only the best arrangement needs."""
        return replace(file, counts=tuple(find_counts(file.placement, self.platform)))

    def _read(
        self, claim: Claim, shape: ClaimedShape, gated: bool | None
    ) -> tuple[_Score, Placement, list[ShapeCheck]] | None:
        """Return the interpretation of the GEMMs that contradicts the claim least."""
        best: tuple[_Score, Placement, list[ShapeCheck]] | None = None

        known: dict[object, bool] = {}

        def fits(role: Role, one: Sighting) -> bool:
            key = (role, self.predictor.identify(one))
            if key not in known:
                known[key] = self.predictor.fits(role, one, shape) is not False
            return known[key]

        def is_rotary(one: Sighting) -> bool:
            return self.predictor.is_rotary(one, shape) is not False

        for pattern, behind in self._choose_patterns(gated, fits):
            if best is not None and self.is_spent:
                self.is_cut = True
                break
            self._left -= len(self.run.sightings)
            placement = place(self.run, pattern, behind, claim.num_layers, fits, is_rotary)
            placement.leave_out(self.predictor.find_single_steps(placement, shape))
            checks = list(self.predictor.predict(placement))
            checks = _forgive_cuts(placement, checks, len(self.run.sightings), self._period, shape)
            if self.roofline is not None:
                checks += self.roofline.predict(placement)
            score = self._score(placement, checks, shape)
            if best is None or score < best[0]:
                best = (score, placement, checks)
            if score == _PERFECT:
                break
        return best

    def _score(self, placement: Placement, checks: Sequence[ShapeCheck], shape: ClaimedShape) -> _Score:
        distinct = {check.key: check for check in checks}.values()
        unclear = sum(one.is_unclear for one in placement.complaints)
        # With a gap, the patterns have as many GEMMs as it, and leave the same ones without a role.
        left_over = find_left_over(self.run, placement, self.predictor, shape) if self.run.gap is None else ()
        misfits = Misfits(
            wrong=sum(check.test(shape) is False for check in distinct) + len(placement.complaints) - unclear,
            left_over=sum(1 for _ in left_over),
            unclear=unclear,
        )
        return misfits, breaks_feed_forward(placement.find_zone("feed_forward")), placement.pattern.count(None)

    def _choose_patterns(self, gated: bool | None, fits: Fits) -> list[tuple[Pattern, int]]:
        """Return the patterns that fit one layer, if necessary with GEMMs that have no role in it. If none fits, the
        claim is refuted in any case, and a few that nearly fit are enough to explain why."""
        gap = self.run.gap
        if gap is None:
            return find_patterns(self.run, gated=gated)
        misfits: list[tuple[int, tuple[Pattern, int]]] = []
        for extras in range(MOST_EXTRAS + 1):
            for pattern, behind in find_patterns(self.run, gated=gated, extras=extras):
                roles = zip(pattern, gap, strict=True)
                wrong = sum(role is not None and not fits(role, one) for role, one in roles)
                misfits.append((wrong, (pattern, behind)))
            fitting = [pattern for wrong, pattern in misfits if not wrong]
            if fitting:
                return fitting
        return [pattern for _, pattern in sorted(misfits, key=lambda one: one[0])[:_MOST_MISFITS]]

    def count_tokens(self) -> int | None:
        """Return the rows of the largest lookup before the first attention: position lookups have fewer rows. Without
        one, or if it may be that of positions, return the rows of the first norm or lookup."""
        first = self.run.segments[0][0][0].index
        rows: dict[type, list[tuple[int, int]]] = {Gather: [], Rows: []}
        for one in self.run.sightings:
            if one.name.kernel_class not in ("index", "embedding", "norm") or one.name.library == "Inductor":
                continue
            fact = read_fact(one, self.platform)
            if isinstance(fact, Gather | Rows) and fact.rows.is_exact and fact.rows.low <= LARGEST_SIZE:
                rows[type(fact)].append((one.index, fact.rows.low))
        ahead = [(number, index) for index, number in rows[Gather] if index < first]
        if len(ahead) > 1 or (ahead and not adds_tensors(self.run.sightings[ahead[0][1] + 1])):
            return max(ahead)[0]
        anywhere = (*rows[Rows], *rows[Gather]) if ahead else (*rows[Gather], *rows[Rows])
        return next((number for _, number in anywhere), None)

    def admits_attention(self, shape: ClaimedShape) -> bool:
        return all(check.test(shape) is not False for check in self._attention_checks)

    @cached_property
    def _attention_checks(self) -> list[ShapeCheck]:
        anchors = [one for segment in self.run.segments for anchor in segment for one in anchor]
        distinct = {(one.name.name, one.grid, one.block): one for one in anchors}.values()
        return [check for one in distinct for check in self.predictor.check_anchor(one, "")]
