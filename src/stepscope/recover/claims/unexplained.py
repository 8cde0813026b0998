"""Work that a claim does not explain, in time and operations.

A model consists of GEMMs, so a GEMM that no layer has means another model or busy work. Data movement kernels are
compared by element count. Programs create tensors that nobody can predict, so a count that the claim does not explain
is listed but does not refute the claim.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from stepscope.recover.claims.prediction import Predictor, admits
from stepscope.recover.evidence.layout import KernelPlace, Placement, SegmentedOrder
from stepscope.recover.evidence.observation import FEWEST, Seen, see
from stepscope.recover.evidence.order import Role, Zone, adds_parts
from stepscope.recover.facts import Sighting
from stepscope.recover.families import Platform
from stepscope.recover.shape import (
    HEAD_ROWS,
    ClaimedShape,
    count_head_rows,
    feed_forward_sizes,
    product_sizes,
    tensor_sizes,
    times,
)

Kind = Literal["multiplies", "unknown", "count"]
_MULTIPLYING = ("GEMM", "attention", "convolution")
_PADDED = 8  # the compiler pads a vocabulary to a multiple of this
# How long a forward run and a training run may take, in times of their forward GEMMs, before the rest no longer makes
# other work look small; the most measured were 5.5 and 21.8.
_MOST_BESIDE, _MOST_IN_TRAINING = 6, 25


class UnclaimedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Launches of one kernel that the claim does not need."""

    kind: Kind
    name: str
    why: str
    first_index: int
    launches: int
    duration_ns: int
    operations: int | None  # None if they were not counted


def find_counts(placement: Placement, platform: Platform) -> Iterator[tuple[Zone, Seen]]:
    """Yield the data movement kernels and their zones."""
    for place in placement.others:
        seen = see(place.sighting, platform) if place.zone is not None else None
        if seen is not None and place.zone is not None and max(one.high for one in seen.counts) >= FEWEST:
            yield place.zone, seen


def is_explained(zone: Zone, seen: Seen, shape: ClaimedShape) -> bool:
    """Whether the claim explains the element count. Also True if the claim leaves a size open that this needs."""
    core = shape.core
    if core is None:
        return True
    expected = set(tensor_sizes(core, zone)) | set(_cast_weights(shape))
    if zone == "feed_forward":
        if shape.d_ff is None:
            return True
        expected |= set(feed_forward_sizes(core.tokens, core.d_model, shape.d_ff, joint=True))
        expected.add(2 * core.tokens * shape.d_ff)
    if zone == "after":
        if shape.vocab_size is None:
            return True
        ways = HEAD_ROWS if shape.head_rows is None else (shape.head_rows,)
        # Positions may also be dropped after the LM head.
        rows = {count_head_rows(shape, way) or 0 for way in ways} | {core.tokens - core.batch}
        expected |= rows | {number * shape.vocab_size for number in rows}
    return seen.explained_by(one for one in expected if isinstance(one, int))


def _cast_weights(shape: ClaimedShape) -> Iterator[int]:
    """Yield the sizes of weights that are cast before use, or padded to whole tiles."""
    if shape.d_model and shape.d_ff:
        yield from (shape.d_model * shape.d_ff, 2 * shape.d_model * shape.d_ff)
    if shape.d_model and shape.vocab_size:
        yield from (shape.d_model * shape.vocab_size, shape.d_model * (-(-shape.vocab_size // _PADDED) * _PADDED))


def find_left_over(
    run: SegmentedOrder, placement: Placement, predictor: Predictor, shape: ClaimedShape
) -> Iterator[tuple[Sighting, str]]:
    """Yield GEMMs of the forward passes that have no role."""
    for place in placement.intruders:
        yield place.sighting, "a GEMM that a layer of the claimed model does not have"
    roles = _list_roles(placement)
    for one in placement.extras:
        is_of_backward = run.is_training and _is_of_backward(one, roles, predictor, shape)
        if not is_of_backward and not predictor.is_rotary(one, shape):
            yield one, "a GEMM outside the layers that is not the LM head"


def _list_roles(placement: Placement) -> tuple[Role, ...]:
    return (*(role for role in placement.pattern if role is not None), "head")


def find_unclaimed_products(
    run: SegmentedOrder, placement: Placement, predictor: Predictor, shape: ClaimedShape
) -> Iterator[tuple[Sighting, str]]:
    """Yield GEMMs and similar kernels that the claimed model does not have."""
    yield from find_left_over(run, placement, predictor, shape)
    roles = _list_roles(placement)
    for one in placement.backward:
        if not _is_of_backward(one, roles, predictor, shape) and not predictor.is_rotary(one, shape):
            yield one, "a GEMM that is not a gradient of the claimed layers"
    placed = {place.sighting.index for place in (*placement.products, *placement.attentions)}
    placed |= {one.sighting.index for one in placement.intruders}
    placed |= {one.index for one in (*placement.extras, *placement.backward, *placement.recomputed)}
    for one in run.sightings:
        if one.index in placed or adds_parts(one):
            continue
        if one.name.kernel_class == "convolution":
            yield one, "a convolution, which a decoder does not have"
        elif one.name.kernel_class not in _MULTIPLYING and one.counters.get("tensor_ops"):
            yield one, f"uses tensor cores, but is not a GEMM according to its name ({one.name.operation})"


def find_surplus(
    run: SegmentedOrder, placement: Placement, predictor: Predictor, shape: ClaimedShape
) -> Sequence[Sighting]:
    """Return GEMMs of training steps beyond two gradients of every GEMM. Those before the backward pass are the
    likeliest."""
    if not _shows_gradients(run, placement):
        return ()
    gradients = [one for one in (*placement.extras, *placement.backward) if not predictor.is_rotary(one, shape)]
    return gradients[: max(0, len(gradients) - 2 * len(placement.products))]


def count_missing_gradients(run: SegmentedOrder, placement: Placement) -> int:
    """Return how many GEMMs a training run lacks for two gradients of every GEMM."""
    found = len(placement.extras) + len(placement.backward)
    return max(0, 2 * len(placement.products) - found) if _shows_gradients(run, placement) else 0


def _shows_gradients(run: SegmentedOrder, placement: Placement) -> bool:
    """Whether every GEMM should have two gradients. Not in partial passes, nor where layers are recomputed, which
    compilers do with parts of a layer."""
    passes = range(1, len(placement.num_layers) + 1)
    is_partial = any(placement.is_cut(number) or number in placement.unclear for number in passes)
    is_compiled = any(one.name.library == "Inductor" for one in run.sightings)
    return bool(placement.backward) and not (placement.recomputed or is_partial or is_compiled)


def find_unknown(run: SegmentedOrder) -> Iterator[tuple[Sighting, str]]:
    for one in run.sightings:
        if is_unknown(one):
            yield one, "an unknown kernel name"


def is_unknown(sighting: Sighting) -> bool:
    return sighting.name.kernel_class == "other" and not sighting.counters.get("tensor_ops")


def summarise(kind: Kind, found: Iterable[tuple[Sighting, str]]) -> tuple[UnclaimedWork, ...]:
    """Group the kernels by name and reason, longest total time first."""
    groups: dict[tuple[str, str], list[Sighting]] = {}
    for sighting, why in found:
        groups.setdefault((sighting.name.short, why), []).append(sighting)
    works = [
        UnclaimedWork(
            kind=kind,
            name=name,
            why=why,
            first_index=ones[0].index,
            launches=len(ones),
            duration_ns=sum(one.duration_ns for one in ones),
            operations=_sum_operations(ones),
        )
        for (name, why), ones in groups.items()
    ]
    return tuple(sorted(works, key=lambda work: -work.duration_ns))


def count_operations(sighting: Sighting) -> int | None:
    """Return the counted operations, on the tensor cores and outside them. A multiply-add is two operations."""
    counters = sighting.counters
    if not counters:
        return None
    plain = counters.get("fadd", 0) + counters.get("fmul", 0) + 2 * counters.get("ffma", 0)
    return counters.get("tensor_ops", 0) + plain


def _sum_operations(sightings: list[Sighting]) -> int | None:
    counts = [count for one in sightings if (count := count_operations(one)) is not None]
    return sum(counts) if counts else None


def _is_of_backward(sighting: Sighting, roles: tuple[Role, ...], predictor: Predictor, shape: ClaimedShape) -> bool:
    """A gradient is a GEMM of the same three sizes in another order."""
    product = predictor.product(sighting)
    if product is None:
        return True
    for role in roles:
        for rows, columns, inner, batch in product_sizes(role, shape):
            for first, second, third in itertools.permutations((rows, columns, inner)):
                if admits(product, (first, second, third, batch)) is not False:
                    return True
    return False


def find_usual_ns(run: SegmentedOrder, placement: Placement, shape: ClaimedShape) -> float:
    """Return the GPU time, but at most a multiple of what the claimed GEMMs usually take. Otherwise, one kernel that
    was made to look slow would make the share of all other work small.

    A GEMM counts with the median of its role, which is not slower than the median of all roles if the LM head alone was
    slowed down. One of unknown size does not count.
    """
    spent = sum(one.duration_ns for one in run.sightings)
    times_of: dict[Role | None, list[tuple[int, int]]] = {}
    for one in placement.products:
        times_of.setdefault(one.role, []).append((one.sighting.duration_ns, _count_multiplications(one, shape)))
    medians = [(median(time for time, _ in each), each[0][1], len(each)) for each in times_of.values()]
    typical = [one for one in medians if one[0] > 0 and one[1]]
    if not typical:
        return spent
    slowness = median(time / number for time, number, _ in typical)
    usual = sum(launches * min(time, slowness * number) for time, number, launches in typical)
    return min(spent, (_MOST_IN_TRAINING if run.is_training else _MOST_BESIDE) * usual)


def _count_multiplications(place: KernelPlace, shape: ClaimedShape) -> int:
    sizes = product_sizes(place.role, shape) if place.role is not None else ()
    return max((found for one in sizes if (found := times(*one)) is not None), default=0)


def compute_too_much(works: Iterable[UnclaimedWork], sightings: Iterable[Sighting], share: float) -> bool:
    """Whether these do more than this share of the counted operations, however long they take."""
    total = sum(count_operations(one) or 0 for one in sightings)
    return sum(work.operations or 0 for work in works) > share * max(total, 1)


def is_too_much(works: Iterable[UnclaimedWork], total_ns: float, share: float) -> bool:
    return sum(work.duration_ns for work in works) > share * max(total_ns, 1)
