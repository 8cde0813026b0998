"""What comes of verifying: a verdict, what refutes a claim, and how well each field was tested."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from stepscope.recover.claims.claim import FIELDS, Claim
from stepscope.recover.claims.sensitivity import Interval
from stepscope.recover.claims.unexplained import UnclaimedWork
from stepscope.recover.evidence.recording import KernelEvidence

_MOST_SHOWN = 4  # intervals of values that would have passed
# "narrowed": more than a twentieth off would have passed as well, but neither half nor twice the value.
FieldVerdict = Literal["tested", "narrowed", "refuted", "not refuted", "not tested", "not claimed"]


class ClaimVerdict(StrEnum):
    CONSISTENT = "consistent"
    REFUTED = "refuted"
    UNDECIDED = "cannot tell"


class Refutation(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that the claim does not explain. `index` counts the kernels of the file from 0."""

    file: str
    index: int
    kernel: str
    where: str
    what: str
    expected: str
    seen: str


class FieldResult(msgspec.Struct, frozen=True, kw_only=True):
    """`passes_too`: other values that this evidence cannot tell from the claimed one, all else being as claimed."""

    claimed: int | str | bool | None
    verdict: FieldVerdict
    passes_too: tuple[Interval, ...] = ()
    implied: bool = False


class KernelComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Launches that the claim makes one prediction for. `agree` is how many can have done that."""

    what: str
    launches: int
    agree: int
    expected: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    verdict: ClaimVerdict
    why: str
    refuted_by: tuple[Refutation, ...]
    fields: dict[str, FieldResult]
    kernels: int
    kernels_compared: int  # with what exact predictions are made of
    kernels_counted: int  # by the number of their elements
    comparisons: tuple[KernelComparison, ...]
    unexplained: tuple[UnclaimedWork, ...]
    unexplained_share: float
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def undecided(claim: Claim, reason: str, evidence: Sequence[KernelEvidence]) -> Verification:
    """For evidence of something that is no decoder."""
    fields = {
        name: FieldResult(claimed=value, verdict="not claimed" if value is None else "not tested")
        for name in FIELDS
        for value in (claim.fields.get(name),)
    }
    return Verification(
        verdict=ClaimVerdict.UNDECIDED,
        why=reason,
        refuted_by=(),
        fields=fields,
        kernels=sum(len(one.sightings) for one in evidence),
        kernels_compared=0,
        kernels_counted=0,
        comparisons=(),
        unexplained=(),
        unexplained_share=0.0,
        missing=(reason,),
        notes=tuple(note for one in evidence for note in one.notes),
    )


def describe_interval(interval: Interval) -> str:
    low, high = interval
    if high is None:
        return f"{low:,} and more"
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _describe_others(others: Sequence[Interval]) -> str:
    more = f" and {len(others) - _MOST_SHOWN} others" if len(others) > _MOST_SHOWN else ""
    return ", ".join(describe_interval(one) for one in others[:_MOST_SHOWN]) + more


def describe_untested(name: str, result: FieldResult) -> str:
    if result.passes_too:
        return f"{_describe_others(result.passes_too)} would have passed as well as {result.claimed}"
    if name == "dtype":
        return "not all names of products tell it"
    return "nothing in the evidence depends on it"


def _describe_consistent(fields: dict[str, FieldResult]) -> str:
    """With every value that would have passed in place of the claimed one."""
    open_ = [(name, one) for name, one in fields.items() if one.passes_too]
    untested = [name for name, one in fields.items() if one.verdict == "not tested"]
    text = "nothing contradicts the claim"
    if open_:
        said = ", ".join(f"{name} could be {_describe_others(one.passes_too)} as well" for name, one in open_)
        text += f"; each size changed by itself, {said}"
    else:
        text += ", and no other value of any size, changed by itself, would have passed"
    return f"{text}; not tested: {', '.join(untested)}" if untested else text


def explain(
    verdict: ClaimVerdict, refutations: Sequence[Refutation], missing: Iterable[str], fields: dict[str, FieldResult]
) -> str:
    match verdict:
        case ClaimVerdict.REFUTED:
            first = refutations[0]
            place = f", {first.where}" if first.where else ""
            return f"#{first.index} {first.kernel} ({first.what}{place}): expected {first.expected}; seen {first.seen}"
        case ClaimVerdict.UNDECIDED:
            return "; ".join(missing)
        case ClaimVerdict.CONSISTENT:
            return _describe_consistent(fields)
