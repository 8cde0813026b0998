"""Refutations: kernels that no model of the claimed shape can have run, each with what was expected instead."""

import re
from collections.abc import Iterator, Sequence

from stepscope.recover.claims.claim import Claim
from stepscope.recover.claims.claimed_run import ClaimedRun
from stepscope.recover.claims.plausibility import find_contradictions
from stepscope.recover.claims.prediction import describe_launch
from stepscope.recover.claims.verdict import Refutation
from stepscope.recover.evidence.order import Role, is_product
from stepscope.recover.facts import Sighting
from stepscope.recover.families.optimizers import join_launches, read_update, split_calls
from stepscope.recover.shape import ClaimedShape
from stepscope.units import count_noun

# A fused step, or the running mean of gradients in a step of many kernels: each runs once per parameter.
RUNS_ONCE = re.compile(r"Fused\w*(?:Adam|Sgd|Adagrad)\w*Functor|LerpFunctor")
OTHER_DTYPE_ROLES: tuple[Role, ...] = ("head",)  # often uses another precision on purpose


def refute(file: ClaimedRun, claim: Claim, shape: ClaimedShape) -> Iterator[Refutation]:
    """Yield refutations in the order to show them: claimed sizes first, then evidence that contradicts itself."""
    found: list[Refutation] = [
        make_refutation(
            file,
            file.placement.starts[number - 1],
            where=f"pass {number}",
            what="num_layers",
            expected=f"num_layers {claim.num_layers}",
            seen=f"{count_noun(seen, 'attention call')} separated by the same GEMMs",
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
    found += [
        make_refutation(file, one.sighting, what="inconsistent evidence", expected=one.expected, seen=one.seen)
        for one in find_contradictions(file.evidence)
    ]
    yield from found


def find_other_depths(file: ClaimedRun, claim: Claim) -> Iterator[tuple[int, int]]:
    """Yield the passes that do not have the claimed number of layers, with their number. A partial pass may have more
    layers than it shows."""
    layers = claim.num_layers
    for number, seen in enumerate(file.placement.num_layers, start=1):
        is_open = number in file.placement.unclear or (seen < (layers or 0) and file.placement.is_cut(number))
        if layers is not None and seen != layers and not is_open:
            yield number, seen


def refute_sizes(file: ClaimedRun, shape: ClaimedShape) -> Iterator[Refutation]:
    """Yield refutations that do not apply to a rank that computes a shard of each layer."""
    for one in file.placement.intruders:
        yield make_refutation(
            file,
            one.sighting,
            where=f"pass {one.pass_number}, layer {one.layer}",
            what="unclaimed work",
            expected="no GEMM at this position in a layer of the claimed model",
            seen=f"a GEMM of {one.sighting.duration_ns / 1e3:,.1f} µs, {describe_launch(one.sighting)}",
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
        seen = one.sighting.dtype
        if claim.dtype and seen and seen != claim.dtype and one.role not in OTHER_DTYPE_ROLES:
            yield make_refutation(
                file,
                one.sighting,
                where=f"pass {one.pass_number}, layer {one.layer}",
                what="dtype",
                expected=f"GEMMs in {claim.dtype}",
                seen=f"{seen}, according to {'the counters' if one.sighting.counted_dtype else 'its name'}",
            )


def refute_updates(file: ClaimedRun, claim: Claim) -> Iterator[Refutation]:
    """An optimizer updates every parameter exactly once, unless the parameters are sharded over ranks."""
    seen, claimed = find_updated(file.run.sightings), claim.parameters
    if seen is None or claimed is None or file.evidence.exchanges:
        return
    first, low, high = seen
    # If the file begins or ends with a step, that one may have updated more.
    inner = range(1, len(file.run.sightings) - 1)
    is_whole = any(step[0].index in inner and step[-1].index in inner for step in split_steps(file.run.sightings))
    if claimed < low or (high < claimed and is_whole):
        updated = f"at most {high:,} parameters: layers share weights, or some weights are frozen"
        yield make_refutation(
            file,
            first,
            what="optimizer",
            expected=f"{claimed:,} parameters",
            seen=f"updates to {updated}" if high < claimed else f"updates to at least {low:,} parameters",
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
    """Whether collectives run between the layers of a pass, so that each rank may compute a shard of every layer."""
    passes: dict[int, list[int]] = {}
    for one in file.placement.attentions:
        passes.setdefault(one.pass_number, []).append(one.sighting.index)
    return file.evidence.exchanges_within(passes.values())


def find_updated(sightings: Sequence[Sighting]) -> tuple[Sighting, int, int] | None:
    """Return the optimizer's first launch, and the fewest and the most elements that it updates per step.

    A kernel may be called for several lists of tensors, or several times for the same list. So one call is the lower
    bound and all calls of a kernel in a step are the upper bound, preferably of a kernel that runs once per parameter.
    """
    launches = [one for one in sightings if one.name.kernel_class == "optimizer"]
    known = [one for one in launches if read_update(one) is not None]
    if not known or len(known) < len(launches):
        return None
    low, high = 0, 0
    for step in split_steps(sightings):
        calls = [(call[0].name.name, found) for call in split_calls(step) if (found := join_launches(call))]
        low = max([low, *(found.elements.low for _, found in calls)])
        totals: dict[str, int] = {}
        for name, found in calls:
            totals[name] = totals.get(name, 0) + found.elements.high
        once = [total for name, total in totals.items() if RUNS_ONCE.search(name)]
        high = max([high, *(once or totals.values())])
    return known[0], low, high


def split_steps(sightings: Sequence[Sighting]) -> Iterator[list[Sighting]]:
    """Yield the optimizer's launches between one forward pass and the next."""
    step: list[Sighting] = []
    for one in sightings:
        if one.name.kernel_class == "optimizer":
            step.append(one)
        elif is_product(one) and step:
            yield step
            step = []
    if step:
        yield step
