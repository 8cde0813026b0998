"""The result of verifying a claim: a verdict, the refutations, and how well each field was tested."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from stepscope.recover.claims.claim import FIELDS, Claim
from stepscope.recover.claims.unexplained import UnclaimedWork
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Window
from stepscope.recover.shape import ClaimedShape, divisors

# --- Other values that pass
#
# A size that can be changed without any check failing was not tested. Sizes are changed one at a time, and in pairs
# that leave GEMMs unchanged: twice the heads at half of d_head, twice the batch at half the context.

Interval = tuple[int, int | None]  # both included; None: no end was found
_LARGEST = 1 << 22
_FACTORS = (2, 3, 4, 8)
_CLOSE = 0.05  # a value is tested if only values within this share of it pass
_PAIRS = {"num_heads": "d_head", "d_head": "num_heads", "batch": "context", "context": "batch"}


def find_passing(shape: ClaimedShape, name: str, passes: Callable[[ClaimedShape], bool]) -> tuple[Interval, ...]:
    """Return the interval around the claimed value in which every value passes, without the value itself, and values
    that pass if the other size of a pair changes too."""
    value = getattr(shape, name)
    assert isinstance(value, int)
    if value > _LARGEST:
        return ((1, None),)

    def passes_with(size: int) -> bool:
        return passes(msgspec.structs.replace(shape, **{name: size}))

    if name == "num_kv_heads":
        heads = shape.num_heads or value
        return tuple((size, size) for size in divisors(heads) if size != value and passes_with(size))
    low, high = _reach(value, -1, passes_with), _reach(value, 1, passes_with)
    found: list[Interval] = []
    if low < value:
        found.append((low, value - 1))
    if high > value:
        found.append((value + 1, high if high < _LARGEST else None))
    apart = set(_swap(shape, name, passes))
    # Grids of compiled kernels determine a count only up to a power of two.
    apart |= {size for factor in _FACTORS for size in _scale(value, factor) if passes_with(size)}
    found += [(size, size) for size in apart if not low <= size <= high]
    return tuple(sorted(found, key=lambda one: one[0]))


def find_within(
    shape: ClaimedShape, name: str, window: Window, passes: Callable[[ClaimedShape], bool]
) -> Interval | None:
    """Return an interval of this window in which every value passes, if one of its ends or its middle does."""

    def passes_with(size: int) -> bool:
        return size in window and passes(msgspec.structs.replace(shape, **{name: size}))

    found = next(filter(passes_with, (window.low, (window.low + window.high) // 2, window.high)), None)
    return None if found is None else (_reach(found, -1, passes_with), _reach(found, 1, passes_with))


def is_tested(value: int, others: tuple[Interval, ...]) -> bool:
    """Whether only values close to the claimed one pass."""
    return all(
        high is not None and low >= (1 - _CLOSE) * value and high <= (1 + _CLOSE) * value for low, high in others
    )


def is_narrowed(value: int, others: tuple[Interval, ...]) -> bool:
    """Whether all values that pass are more than half and less than twice the claimed one."""
    return all(high is not None and 2 * low > value and high < 2 * value for low, high in others)


def _scale(value: int, factor: int) -> Iterator[int]:
    yield value * factor
    if value % factor == 0:
        yield value // factor


def _reach(value: int, step: int, passes_with: Callable[[int], bool]) -> int:
    """Return the last value in a direction up to which all tried values pass: doubling steps, then bisection."""
    good, stride = value, 1
    while True:
        tried = good + step * stride
        if not 1 <= tried <= _LARGEST:
            tried = 1 if step < 0 else _LARGEST
        if tried == good:
            return good
        if not passes_with(tried):
            return _bisect(good, tried, passes_with)
        good, stride = tried, 2 * stride


def _bisect(good: int, bad: int, passes_with: Callable[[int], bool]) -> int:
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        if passes_with(middle):
            good = middle
        else:
            bad = middle
    return good


def _swap(shape: ClaimedShape, name: str, passes: Callable[[ClaimedShape], bool]) -> Iterator[int]:
    other = _PAIRS.get(name)
    if other is None:
        return
    value, partner = getattr(shape, name), getattr(shape, other)
    if partner is None or partner > _LARGEST:
        return
    for size in divisors(value, partner):
        changed = {name: size, other: value * partner // size}
        if name in ("num_heads", "d_head") and shape.num_kv_heads:
            heads = changed["num_heads"]
            kept = shape.num_kv_heads * (shape.d_head or 1)
            kv_heads, rest = divmod(kept, changed["d_head"])
            if rest or not kv_heads or heads % kv_heads:
                continue
            changed["num_kv_heads"] = kv_heads
        if size != value and passes(msgspec.structs.replace(shape, **changed)):
            yield size


# --- Verdicts

_MOST_SHOWN = 4  # intervals of other values that pass
# "narrowed": values that are more than 5% off pass, but neither half nor twice the claimed value.
# "follows": contradicted only because another field is wrong.
FieldVerdict = Literal["tested", "narrowed", "refuted", "follows", "not refuted", "not tested", "not claimed"]


class ClaimVerdict(StrEnum):
    CONSISTENT = "consistent"
    REFUTED = "refuted"
    UNDECIDED = "cannot tell"


class Refutation(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that contradicts the claim. `index` counts the kernels of the file from 0."""

    file: str
    index: int
    kernel: str
    where: str
    what: str
    expected: str
    seen: str


class FieldResult(msgspec.Struct, frozen=True, kw_only=True):
    """`passes_too`: other values that the evidence also allows, if all other fields are as claimed."""

    claimed: int | str | bool | None
    verdict: FieldVerdict
    passes_too: tuple[Interval, ...] = ()
    implied: bool = False


class KernelComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Launches with the same prediction. `agree` is how many of them match it."""

    what: str
    launches: int
    agree: int
    expected: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """`tested`, `narrowed` and `not_tested` are the claimed fields with this verdict."""

    verdict: ClaimVerdict
    why: str
    tested: tuple[str, ...]
    narrowed: tuple[str, ...]
    not_tested: tuple[str, ...]
    refuted_by: tuple[Refutation, ...]
    fields: dict[str, FieldResult]
    kernels: int
    kernels_compared: int  # with exact predictions
    kernels_counted: int  # by element count
    comparisons: tuple[KernelComparison, ...]
    unexplained: tuple[UnclaimedWork, ...]
    unexplained_share: float
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def undecided(
    claim: Claim, reason: str, evidence: Sequence[KernelEvidence], *, known: tuple[str, ...] = ()
) -> Verification:
    """Return the result for evidence that does not show a plain decoder. `known` is what it shows instead."""
    fields = {
        name: FieldResult(claimed=value, verdict="not claimed" if value is None else "not tested")
        for name in FIELDS
        for value in (claim.fields.get(name),)
    }
    return Verification(
        verdict=ClaimVerdict.UNDECIDED,
        why=reason,
        **group_fields(fields),
        refuted_by=(),
        fields=fields,
        kernels=sum(len(one.sightings) for one in evidence),
        kernels_compared=0,
        kernels_counted=0,
        comparisons=(),
        unexplained=(),
        unexplained_share=0.0,
        missing=(reason,),
        notes=(*known, *(note for one in evidence for note in one.notes)),
    )


def group_fields(fields: dict[str, FieldResult]) -> dict[str, tuple[str, ...]]:
    """Return the lists of fields that a result begins with."""
    verdicts: tuple[FieldVerdict, ...] = ("tested", "narrowed", "not tested")
    return {
        verdict.replace(" ", "_"): tuple(name for name, one in fields.items() if one.verdict == verdict)
        for verdict in verdicts
    }


def describe_interval(interval: Interval) -> str:
    low, high = interval
    if high is None:
        return f"{low:,} or more"
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _describe_others(others: Sequence[Interval]) -> str:
    more = f" and {len(others) - _MOST_SHOWN} more" if len(others) > _MOST_SHOWN else ""
    return ", ".join(describe_interval(one) for one in others[:_MOST_SHOWN]) + more


def describe_untested(name: str, result: FieldResult) -> str:
    if result.passes_too:
        return f"{_describe_others(result.passes_too)} would also pass (claimed: {result.claimed})"
    if name == "dtype":
        return "some GEMM kernel names do not contain the dtype, or other kernels contradict it"
    return "nothing in the evidence depends on it"


def _describe_consistent(fields: dict[str, FieldResult]) -> str:
    """Return a sentence with every other value that passes."""
    open_ = [(name, one) for name, one in fields.items() if one.passes_too]
    text = "nothing contradicts the claim"
    if open_:
        said = ", ".join(f"{name} {_describe_others(one.passes_too)}" for name, one in open_)
        text += f"; other values that pass, changing one size at a time: {said}"
    else:
        text += "; changing any one size would contradict the evidence"
    return text


def explain(
    verdict: ClaimVerdict, refutations: Sequence[Refutation], missing: Iterable[str], fields: dict[str, FieldResult]
) -> str:
    match verdict:
        case ClaimVerdict.REFUTED:
            first = refutations[0]
            place = f", {first.where}" if first.where else ""
            return f"#{first.index} {first.kernel} ({first.what}{place}): expected {first.expected}; got {first.seen}"
        case ClaimVerdict.UNDECIDED:
            return "; ".join(missing)
        case ClaimVerdict.CONSISTENT:
            return _describe_consistent(fields)
