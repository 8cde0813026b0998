"""What comes of verifying: a verdict, what refutes a claim, and how well each field was tested."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from stepscope.recover.claim import FIELDS, Claim
from stepscope.recover.evidence import Evidence
from stepscope.recover.sensitivity import Interval
from stepscope.recover.unclaimed import Work

# "narrowed": more than a twentieth off would have passed as well, but neither half nor twice the value.
FieldVerdict = Literal["tested", "narrowed", "refuted", "not refuted", "not tested", "not claimed"]


class Verdict(StrEnum):
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


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Launches that the claim makes one prediction for. `agree` is how many can have done that."""

    what: str
    launches: int
    agree: int
    expected: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    why: str
    refuted_by: tuple[Refutation, ...]
    fields: dict[str, FieldResult]
    kernels: int
    kernels_compared: int  # with what exact predictions are made of
    kernels_counted: int  # by the number of their elements
    comparisons: tuple[Comparison, ...]
    unexplained: tuple[Work, ...]
    unexplained_share: float
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def undecided(claim: Claim, reason: str, evidence: Sequence[Evidence]) -> Verification:
    """For evidence of something that is no decoder."""
    fields = {
        name: FieldResult(claimed=value, verdict="not claimed" if value is None else "not tested")
        for name in FIELDS
        for value in (claim.fields.get(name),)
    }
    return Verification(
        verdict=Verdict.UNDECIDED,
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
