"""What refutes a claim: kernels that no model of the claimed shape can have run, each with what was expected of it."""

import re
from collections.abc import Iterator, Sequence

from stepscope import hardware
from stepscope.recover.claims.claim import Claim
from stepscope.recover.claims.claimed_run import ClaimedRun
from stepscope.recover.claims.plausibility import find_contradictions
from stepscope.recover.claims.prediction import describe_launch
from stepscope.recover.claims.verdict import Refutation
from stepscope.recover.evidence.order import Role, is_product
from stepscope.recover.facts import Sighting
from stepscope.recover.families.optimizers import join_launches, read_update, split_calls
from stepscope.recover.shape import ClaimedShape

# A fused step, and the running mean of gradients in a step of many kernels.
_ONCE = re.compile(r"Fused\w*(?:Adam|Sgd|Adagrad)\w*Functor|LerpFunctor")
OTHER_DTYPE_ROLES: tuple[Role, ...] = ("head",)  # often done in another precision on purpose


def refute(file: ClaimedRun, claim: Claim, shape: ClaimedShape) -> Iterator[Refutation]:
    """In the order in which they are to be read: the claim's own sizes first, then the file against itself."""
    found: list[Refutation] = [
        make_refutation(
            file,
            file.placement.starts[number - 1],
            where=f"pass {number}",
            what="number of layers",
            expected=f"{claim.num_layers} layers",
            seen=f"{seen} attentions between which the same products stand",
        )
        for number, seen in find_other_depths(file, claim)
    ]
    found += [
        make_refutation(file, one.sighting, what="layer", expected=one.expected, seen=one.seen)
        for one in file.placement.complaints
        if not one.is_unclear
    ]
    if not is_share(file):
        found += refute_sizes(file, shape)
    found += refute_dtype(file, claim)
    found += refute_updates(file, claim)
    device = hardware.find(file.evidence.device) if file.evidence.device else None
    found += [
        make_refutation(file, one.sighting, what="evidence against itself", expected=one.expected, seen=one.seen)
        for one in find_contradictions(file.run.sightings, file.placement, device)
        if not one.is_unclear
    ]
    yield from found


def find_other_depths(file: ClaimedRun, claim: Claim) -> Iterator[tuple[int, int]]:
    """Passes with another number of layers than claimed, and it. A pass that is cut has more than it shows."""
    layers = claim.num_layers
    for number, seen in enumerate(file.placement.num_layers, start=1):
        is_open = number in file.placement.unclear or (seen < (layers or 0) and file.placement.is_cut(number))
        if layers is not None and seen != layers and not is_open:
            yield number, seen


def refute_sizes(file: ClaimedRun, shape: ClaimedShape) -> Iterator[Refutation]:
    """What is not held against a rank that does a share of each layer."""
    for one in file.placement.intruders:
        yield make_refutation(
            file,
            one.sighting,
            where=f"pass {one.pass_number}, layer {one.layer}",
            what="work that nobody claimed",
            expected="no matrix product here in a layer of the claimed kind",
            seen=f"one of {one.sighting.duration_ns / 1e3:,.1f} µs, {describe_launch(one.sighting)}",
        )
    yield from _refute_checks(file, shape)


def _refute_checks(file: ClaimedRun, shape: ClaimedShape) -> Iterator[Refutation]:
    wrong = [check for check in file.checks if check.test(shape) is False]
    for check in sorted(wrong, key=lambda one: one.sighting.index):
        yield make_refutation(
            file,
            check.sighting,
            where=check.where,
            what=check.what,
            expected=check.expect(shape),
            seen=", ".join(part for part in (check.seen, check.suggest(shape)) if part),
        )


def refute_dtype(file: ClaimedRun, claim: Claim) -> Iterator[Refutation]:
    for one in file.placement.products:
        seen = one.sighting.name.dtype
        if claim.dtype and seen and seen != claim.dtype and one.role not in OTHER_DTYPE_ROLES:
            yield make_refutation(
                file,
                one.sighting,
                where=f"pass {one.pass_number}, layer {one.layer}",
                what="data type",
                expected=f"matrix products in {claim.dtype}",
                seen=f"{seen}, by the kernel's name",
            )


def refute_updates(file: ClaimedRun, claim: Claim) -> Iterator[Refutation]:
    """An optimizer goes over every parameter once, and over nothing else: unless ranks share them out."""
    seen, claimed = find_updated(file.run.sightings), claim.parameters
    if seen is None or claimed is None or file.evidence.exchanges:
        return
    first, low, high = seen
    if not low <= claimed <= high:
        updated = f"at most {high:,}: layers share weights, or some are not trained"
        yield make_refutation(
            file,
            first,
            what="optimizer",
            expected=f"{claimed:,} parameters",
            seen=f"updates of {updated}" if high < claimed else f"updates of at least {low:,}",
        )


def make_refutation(
    file: ClaimedRun, sighting: Sighting, *, what: str, expected: str, seen: str, where: str = ""
) -> Refutation:
    return Refutation(
        file=file.evidence.file,
        index=sighting.index,
        kernel=sighting.name.short,
        where=where,
        what=what,
        expected=expected,
        seen=seen,
    )


def is_share(file: ClaimedRun) -> bool:
    """Whether ranks exchange results between the layers of a pass, so that each may do a share of every layer."""
    passes: dict[int, list[int]] = {}
    for one in file.placement.attentions:
        passes.setdefault(one.pass_number, []).append(one.sighting.index)
    return file.evidence.exchanges_within(passes.values())


def find_updated(sightings: Sequence[Sighting]) -> tuple[Sighting, int, int] | None:
    """The first launch of an optimizer, and how many elements it went over in a step: at least, at most.

    A kernel may be called for several lists of tensors, or several times for the same one. So a single call is the
    least, and all calls of a kernel in a step are the most; where one is there that goes over each parameter once, its
    calls are."""
    launches = [one for one in sightings if one.name.kernel_class == "optimizer"]
    known = [one for one in launches if read_update(one) is not None]
    if not known or len(known) < len(launches):
        return None
    low, high = 0, 0
    for step in _split_steps(sightings):
        calls = [(call[0].name.name, found) for call in split_calls(step) if (found := join_launches(call))]
        low = max([low, *(found.elements.low for _, found in calls)])
        totals: dict[str, int] = {}
        for name, found in calls:
            totals[name] = totals.get(name, 0) + found.elements.high
        once = [total for name, total in totals.items() if _ONCE.search(name)]
        high = max([high, *(once or totals.values())])
    return known[0], low, high


def _split_steps(sightings: Sequence[Sighting]) -> Iterator[list[Sighting]]:
    """The optimizer's launches between one forward pass and the next."""
    step: list[Sighting] = []
    for one in sightings:
        if one.name.kernel_class == "optimizer":
            step.append(one)
        elif is_product(one) and step:
            yield step
            step = []
    if step:
        yield step
