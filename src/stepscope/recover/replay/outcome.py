"""What a replay shows: the verdict, and what it depends on.

Kernels that differ refute a claim only if nothing else can explain them. On another GPU or with other versions,
libraries choose other kernels. And a claim says how large a model is, not how it is written: without the settings of
the run, a kernel with another name may belong to another implementation. If a layer has the same kernels in the same
order, it is the same program, and other grids or operations are other sizes.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from stepscope.recover.replay.comparison import EXACT, ReplayComparison, ReplayDifference
from stepscope.units import count_noun

_MOST_OUTSIDE = 0.05  # of the time; at most 1% in repeated recordings of a run
_MOST_RATIO = 1.5  # of durations on the same kind of GPU: clocks and power limits differ by less
# The versions that decide which kernels run. Those of the first two must be known to be sure that they are the same.
_PROGRAMS = ("torch", "transformers")
_LIBRARIES = (*_PROGRAMS, "triton", "cuda", "cuda_runtime_version")


class ReplayVerdict(StrEnum):
    AGREES = "agrees"
    REFUTED = "refuted"
    UNDECIDED = "cannot tell"


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the evidence and the replay were recorded, as far as their files say. `is_stated`: the evidence says with
    which settings it was recorded, and the replay has the same."""

    device: str
    evidence_device: str
    versions: dict[str, str] = {}
    evidence_versions: dict[str, str] = {}
    is_stated: bool = False

    @property
    def other_versions(self) -> list[str]:
        return [
            f"{name} {self.evidence_versions[name]} in the evidence, {self.versions[name]} here"
            for name in self._both_known
            if self.evidence_versions[name] != self.versions[name]
        ]

    @property
    def has_same_versions(self) -> bool:
        needed = [name for name in _PROGRAMS if name in self.versions]
        return bool(needed) and set(needed) <= set(self._both_known) and not self.other_versions

    @property
    def _both_known(self) -> list[str]:
        return [name for name in _LIBRARIES if name in self.versions and name in self.evidence_versions]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one file. `program` is what ran here, with `layers` of the claimed `num_layers`."""

    file: str
    verdict: ReplayVerdict
    why: str
    program: str
    layers: int
    num_layers: int
    recorder: str
    seconds: float
    surroundings: Surroundings
    comparison: ReplayComparison


def judge(comparison: ReplayComparison, where: Surroundings, *, layers: str) -> tuple[ReplayVerdict, str]:
    """Return the verdict and the reason for it. `layers` says how many ran, such as `2 of 32 layers`."""
    refuting = _find_refutation(comparison, where)
    if refuting is not None:
        return ReplayVerdict.REFUTED, _describe(refuting)
    missing = list(_find_missing(comparison, where))
    if missing:
        return ReplayVerdict.UNDECIDED, "; ".join(missing)
    exact = [key for key in comparison.counters if key in EXACT]
    counted = f", and the same {' and '.join(exact)}" if exact else ""
    return ReplayVerdict.AGREES, (
        f"all {comparison.compared:,} compared kernels have the same names, grids and blocks{counted} as {layers} that "
        f"ran here on {where.device}"
    )


def rank(result: ReplayResult) -> tuple[bool, bool, float]:
    """Return how well a replay explains the evidence; of several programs, the one with the highest rank is used."""
    compared, equal = result.comparison.compared, result.comparison.equal
    return result.verdict is ReplayVerdict.AGREES, compared > 0, equal / max(1, compared)


def _find_refutation(comparison: ReplayComparison, where: Surroundings) -> ReplayDifference | None:
    hard = _hard(comparison)
    if not hard or where.device != where.evidence_device or where.other_versions:
        return None
    if where.is_stated and where.has_same_versions:
        return hard[0]
    inside = [one for one in hard if one.in_layers]
    is_same_program = bool(inside) and all(one.kind in ("launch", "work") for one in inside)
    return inside[0] if is_same_program else None


def _find_missing(comparison: ReplayComparison, where: Surroundings) -> Iterator[str]:
    yield from comparison.missing
    hard = _hard(comparison)
    is_same_gpu = where.device == where.evidence_device
    if hard:
        number = max(1, comparison.compared - comparison.equal)  # a kernel that is missing is not counted
        yield f"{count_noun(number, 'kernel')} of {comparison.compared:,} differ from the replay: {_describe(hard[0])}"
        yield from _explain(hard, where)
        return
    if not comparison.compared and not comparison.missing:
        yield "no kernel could be compared"
    if comparison.outside_share > _MOST_OUTSIDE:
        yield (
            f"{comparison.outside_share:.0%} of the time is in kernels whose duration or counters are outside their "
            "bands"
        )
    ratio = comparison.time_ratio
    if is_same_gpu and ratio is not None and not 1 / _MOST_RATIO <= ratio <= _MOST_RATIO:
        yield f"kernels take {ratio:.2f} times as long as here, on a GPU of the same name"


def _explain(hard: Sequence[ReplayDifference], where: Surroundings) -> Iterator[str]:
    """Yield what may explain the difference other than a false claim."""
    if where.device != where.evidence_device:
        yield (
            f"the evidence was recorded on {where.evidence_device or 'an unknown GPU'}, and this is {where.device}: "
            "libraries choose other kernels and grids"
        )
    yield from where.other_versions
    if where.device != where.evidence_device or where.other_versions:
        return
    if any(one.kind == "build" for one in hard):
        yield "a kernel of the same name was built differently: the versions of the libraries differ"
    else:
        yield (
            "the evidence does not say with which settings and versions it was recorded: this may be another "
            "implementation of the claimed model; record it with stepscope profile"
        )


def _hard(comparison: ReplayComparison) -> list[ReplayDifference]:
    return [one for one in comparison.differences if one.kind != "band"]


def _describe(one: ReplayDifference) -> str:
    return f"#{one.index} {one.kernel} ({one.where}): expected {one.expected}, as in the replay; got {one.seen}"
