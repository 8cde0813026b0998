"""Does a run match a claim? Every kernel's work is predicted from the claim and held against what was seen.

Refuted: a kernel did what no model of that shape does, and it is named. Only hard facts refute: products, attention,
norms, lookups, the number of layers, the data type of products, and physics.
Consistent: nothing contradicts, and everything that was claimed was tested or narrowed down to less than a factor of
two. For each size the values that would have passed as well are listed, and the answer says them.
Cannot tell: nothing contradicts, and something that was claimed could not be tested; or the kernels that contradict may
be one rank's share of what was claimed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stepscope.recover.claims.claim import FIELDS, Claim
from stepscope.recover.claims.claimed_run import ClaimedRun, ClaimedRuns, open_all
from stepscope.recover.claims.plausibility import find_contradictions, find_step_ns
from stepscope.recover.claims.refutation import (
    OTHER_DTYPE_ROLES,
    find_other_depths,
    find_updated,
    is_share,
    make_refutation,
    refute,
    refute_dtype,
    refute_sizes,
    refute_updates,
)
from stepscope.recover.claims.unexplained import (
    UnclaimedWork,
    find_unclaimed_products,
    find_unknown,
    is_explained,
    is_too_much,
    is_unknown,
    summarise,
)
from stepscope.recover.claims.verdict import (
    ClaimVerdict,
    FieldResult,
    FieldVerdict,
    Interval,
    KernelComparison,
    Refutation,
    Verification,
    describe_untested,
    explain,
    find_passing,
    is_narrowed,
    is_tested,
)
from stepscope.recover.evidence.order import Zone
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.recover.shape import HEAD_ROWS, LAYER_SIZES, ClaimedShape

# Shares of the GPU's time. Below the first, a product without a place is a detail of an implementation.
_MOST_UNCLAIMED = 0.01
_MOST_UNKNOWN = 0.01
_MOST_UNEXPLAINED = 0.05
# Between the products of a layer stands nothing but what a layer does.
_LAYER_ZONES: tuple[Zone, ...] = ("between", "middle", "feed_forward", "heads", "merge")


def verify(evidence: Sequence[KernelEvidence], claim: Claim, *, unseen: float = 0.0) -> Verification:
    """`unseen`: the share of the GPU's time that the evidence does not hold. Raises NoTransformerError where a file
    shows no decoder."""
    runs = open_all([one for one in evidence if one.sightings], claim)
    assert runs.files, "evidence without kernels is refused before"
    allocations = [size for one in evidence for size in one.allocations]
    return _Judge(runs, claim, allocations, unseen).judge()


@dataclass(slots=True)
class _Judge:
    runs: ClaimedRuns
    claim: Claim
    allocations: list[int]
    unseen: float

    @property
    def files(self) -> list[ClaimedRun]:
        return self.runs.files

    @property
    def shape(self) -> ClaimedShape:
        return self.runs.shape

    def judge(self) -> Verification:
        refutations = [one for file in self.files for one in refute(file, self.claim, self.shape)]
        works, share, too_much = self._find_work(refutations)
        if self.runs.is_cut:
            refutations = []
        fields = self._test_fields(refutations)
        missing = [*self._find_missing(fields), *too_much] if not refutations else []
        verdict = (
            ClaimVerdict.REFUTED if refutations else ClaimVerdict.UNDECIDED if missing else ClaimVerdict.CONSISTENT
        )
        compared = {(file.evidence.file, check.sighting.index) for file in self.files for check in file.checks}
        return Verification(
            verdict=verdict,
            why=explain(verdict, refutations, missing, fields),
            refuted_by=tuple(refutations),
            fields=fields,
            kernels=sum(len(file.run.sightings) for file in self.files),
            kernels_compared=len(compared),
            kernels_counted=sum(len(file.counts) for file in self.files),
            comparisons=tuple(self._compare()),
            unexplained=works,
            unexplained_share=share,
            missing=tuple(missing),
            notes=tuple(self._take_notes()),
        )

    def _compare(self) -> Iterator[KernelComparison]:
        groups: dict[tuple[str, str], dict[tuple[str, int], bool]] = {}
        for file in self.files:
            for check in file.checks:
                launches = groups.setdefault((check.what, check.expect(self.shape)), {})
                key = (file.evidence.file, check.sighting.index)
                launches[key] = launches.get(key, True) and check.test(self.shape) is not False
        for (what, expected), launches in groups.items():
            yield KernelComparison(what=what, launches=len(launches), agree=sum(launches.values()), expected=expected)

    def _find_untrained(self, file: ClaimedRun) -> Iterator[str]:
        """Updates of fewer parameters than the claimed matrices have are no contradiction, and not what is claimed."""
        seen, fewest = find_updated(file.run.sightings), self.claim.parameters or self.claim.fewest_parameters
        if seen is not None and fewest is not None and seen[2] < fewest:
            yield (
                f"the optimizer went over at most {seen[2]:,} parameters, and the claim has at least {fewest:,}: "
                "layers share weights, some are not trained, or other ranks have the rest"
            )

    def _find_work(self, refutations: list[Refutation]) -> tuple[tuple[UnclaimedWork, ...], float, list[str]]:
        works: list[UnclaimedWork] = []
        missing: list[str] = []
        total = sum(one.duration_ns for file in self.files for one in file.run.sightings)
        for file in self.files:
            extra = list(find_unclaimed_products(file.run, file.placement, file.predictor, self.shape))
            multiplying = summarise("multiplies", extra)
            unknown = summarise("unknown", find_unknown(file.run))
            odd = self._find_counts(file)
            counts = summarise("count", odd)
            works += [*multiplying, *unknown, *counts]
            time = sum(one.duration_ns for one in file.run.sightings)
            if is_too_much(multiplying, time, _MOST_UNCLAIMED) and not is_share(file):
                first = min(extra, key=lambda one: one[0].index)[0]
                spent = sum(work.duration_ns for work in multiplying) / time
                refutations.append(
                    make_refutation(
                        file,
                        first,
                        what="work that nobody claimed",
                        expected="no matrix products besides those of the claim",
                        seen=f"{len(extra)}, in {spent:.1%} of the GPU's time",
                    )
                )
            strange = [one for one in file.placement.others if one.zone in _LAYER_ZONES and is_unknown(one.sighting)]
            if strange:
                missing.append(f"{len(strange)} kernels of unknown names stand inside the layers")
            if is_too_much(unknown, time, _MOST_UNKNOWN):
                missing.append(f"kernels of unknown names take more than {_MOST_UNKNOWN:.0%} of the GPU's time")
            if is_too_much(counts, time, _MOST_UNEXPLAINED):
                missing.append(
                    f"kernels that work on numbers of elements which the claim does not explain take more than "
                    f"{_MOST_UNEXPLAINED:.0%} of the GPU's time"
                )
            inside = [seen.sighting for zone, seen in file.counts if zone in _LAYER_ZONES]
            unexplained = {one.index for one, _ in odd}
            if number := sum(one.index in unexplained for one in inside):
                missing.append(
                    f"{number} of {len(inside)} kernels inside the layers work on numbers of elements that the claim "
                    "does not explain"
                )
        share = sum(work.duration_ns for work in works) / max(total, 1)
        return tuple(sorted(works, key=lambda work: -work.duration_ns)), share, missing

    def _find_counts(self, file: ClaimedRun) -> list[tuple[Sighting, str]]:
        """Kernels that move data and take a number of elements without an explanation."""
        known: dict[object, bool] = {}
        found = []
        for zone, seen in file.counts:
            key = (zone, seen.counts)
            if key not in known:
                known[key] = is_explained(zone, seen, self.shape)
            if not known[key]:
                found.append((seen.sighting, "works on a number of elements that no tensor of the claim has"))
        return found

    def _test_fields(self, refutations: list[Refutation]) -> dict[str, FieldResult]:
        claimed = self.claim.fields
        passes = self._make_passes()
        fields: dict[str, FieldResult] = {}
        for name in FIELDS:
            value = claimed.get(name)
            if value is None:
                fields[name] = FieldResult(claimed=None, verdict="not claimed")
                continue
            verdict, others = self._test_field(name, value, passes, is_refuted=bool(refutations))
            fields[name] = FieldResult(
                claimed=value, verdict=verdict, passes_too=others, implied=name in self.claim.implied
            )
        return fields

    def _test_field(
        self, name: str, value: int | str | bool, passes: Callable[[ClaimedShape], bool], *, is_refuted: bool
    ) -> tuple[FieldVerdict, tuple[Interval, ...]]:
        if is_refuted:
            return ("refuted" if self._is_disputed(name) else "not refuted"), ()
        match name:
            case "num_layers":
                return "tested", ()
            case "dtype":
                return ("tested" if self._knows_dtypes() else "not tested"), ()
            case "gated":
                return ("not tested" if any(file.fits_otherwise for file in self.files) else "tested"), ()
            case "parameters":
                return self._test_parameters()
            case "tied":
                return "not tested", ()
        assert isinstance(value, int)
        if self.runs.is_cut or any(self._count_misfits(file) for file in self.files):
            return "not tested", ()
        others = find_passing(self._settle_head(passes), name, passes)
        return _judge_others(value, others), others

    def _knows_dtypes(self) -> bool:
        """The head is often in another precision on purpose, and stands for no other product."""
        products = [one for file in self.files for one in file.placement.products]
        inside = [one.sighting.name.dtype for one in products if one.role not in OTHER_DTYPE_ROLES]
        return bool(inside) and all(inside)

    def _count_misfits(self, file: ClaimedRun) -> int:
        """Kernels that would refute the sizes, if they were not those of one rank among several."""
        return sum(1 for _ in refute_sizes(file, self.shape)) if is_share(file) else 0

    def _settle_head(self, passes: Callable[[ClaimedShape], bool]) -> ClaimedShape:
        """With the positions that the head is asked about: a product for few of them and a larger vocabulary would look
        the same, and is another question."""
        ways = (msgspec.structs.replace(self.shape, head_rows=way) for way in HEAD_ROWS)
        return next((shape for shape in ways if passes(shape)), self.shape)

    def _test_parameters(self) -> tuple[FieldVerdict, tuple[Interval, ...]]:
        value = self.claim.parameters or 0
        for file in self.files:
            if seen := find_updated(file.run.sightings):
                _, low, high = seen
                others: tuple[Interval, ...] = ((low, value - 1), (value + 1, high))
                others = tuple(one for one in others if one[1] is not None and one[0] <= one[1])
                return _judge_others(value, others), others
        return "not tested", ()

    def _is_disputed(self, name: str) -> bool:
        """Whether what contradicts the claim would not, if the field were left open."""
        for file in self.files:
            if name == "num_layers" and any(find_other_depths(file, self.claim)):
                return True
            if name == "parameters" and any(refute_updates(file, self.claim)):
                return True
            if name == "dtype" and any(refute_dtype(file, self.claim)):
                return True
            if name in LAYER_SIZES and not is_share(file):
                opened = msgspec.structs.replace(self.shape, **{name: None})
                wrong = [one for one in file.checks if one.test(self.shape) is False]
                if any(one.test(opened) is not False for one in wrong):
                    return True
        return False

    def _make_passes(self) -> Callable[[ClaimedShape], bool]:
        """Whether a shape passes every check of every file, and leaves no more counts unexplained than the claim."""
        checks = list({check.key: check for file in self.files for check in file.checks}.values())
        counts = {(zone, seen.counts): (zone, seen) for file in self.files for zone, seen in file.counts}
        explained = [one for one in counts.values() if is_explained(*one, self.shape)]

        def passes(shape: ClaimedShape) -> bool:
            return all(check.test(shape) is not False for check in checks) and all(
                is_explained(*one, shape) for one in explained
            )

        return passes

    def _find_missing(self, fields: dict[str, FieldResult]) -> Iterator[str]:
        if self.runs.is_cut:
            yield "not every interpretation of the kernels was tried; another one may match the claim"
        for text in self.runs.left_open:
            yield f"sizes that are not claimed: {text}"
        misfits = sum(map(self._count_misfits, self.files))
        if misfits:
            yield (
                f"{misfits} kernels do not fit the claimed sizes, and collectives inside of the passes show that ranks "
                "may share the layers: these may be one rank's share"
            )
        for name, result in fields.items():
            is_told = misfits and name in LAYER_SIZES
            if result.verdict == "not tested" and name != "tied" and not is_told:
                yield f"{name}: {describe_untested(name, result)}"
        if self.unseen > _MOST_UNKNOWN:
            yield f"{self.unseen:.1%} of the GPU's time is in kernels of other streams, which were not looked at"
        claimed = [name for name in LAYER_SIZES if name in self.claim.fields]
        if self.shape.core is None and claimed:
            yield "for the sizes that are not claimed none were found that go with those that are"
        matrices = self._count_matrices()
        if matrices is not None and 0 < matrices[0] < matrices[1]:
            yield "fewer feed-forward matrices were allocated than the claim has: layers may share their weights"
        for file in self.files:
            if left_out := len(file.placement.left_out):
                yield f"{left_out} passes of {file.evidence.file} are of one token a sequence, and were not compared"
            if any(one.is_unclear for one in file.placement.complaints):
                yield "a layer lacks a matrix product where the evidence ends or a kernel of unknown name stands"
            yield from self._find_untrained(file)
            yield from self._find_cut_passes(file)

    def _find_cut_passes(self, file: ClaimedRun) -> Iterator[str]:
        """Where no pass is there as a whole, to show the number of layers."""
        layers, depths = self.claim.num_layers, file.placement.num_layers
        if layers is None or layers in depths:
            return
        for number, seen in enumerate(depths, start=1):
            if seen < layers:
                yield f"num_layers: {file.evidence.file} holds a part of pass {number} only, {seen} layers"
            else:
                yield f"num_layers: where passes of {file.evidence.file} begin is unclear, {seen} attentions in a row"

    def _take_notes(self) -> Iterator[str]:
        for file in self.files:
            yield from file.evidence.notes
            yield from _note_limits(file)
            if not file.evidence.has_counters:
                yield (
                    f"{file.evidence.file}: no counters, so names, grids and durations had to do; "
                    "counters are collected with stepscope profile --counters"
                )
            passes = len(file.placement.num_layers)
            kind = "of training" if file.run.is_training else "forward"
            yield f"{file.evidence.file}: {passes} {'pass' if passes == 1 else 'passes'} {kind}"
        if matrices := self._count_matrices():
            found, needed = matrices
            yield f"allocations: {found} of the size of a feed-forward matrix, of which the claim has {needed}"
        taken = {
            name: value
            for name in LAYER_SIZES
            if (value := getattr(self.shape, name)) is not None and name not in self.claim.fields
        }
        if taken:
            said = ", ".join(f"{name} {value:,}" for name, value in taken.items())
            yield f"not claimed, taken from the evidence: {said}"
        yield "counters show the shape of work, not weights, data or usefulness: docs/verify.md"

    def _count_matrices(self) -> tuple[int, int] | None:
        """Allocations of the size of a feed-forward matrix, and how many such matrices the claim has."""
        width, hidden, layers = self.claim.d_model, self.claim.d_ff, self.claim.num_layers
        if not self.allocations or not width or not hidden or not layers:
            return None
        found = max(self.allocations.count(width * hidden * size) for size in (2, 4))
        return found, layers * (3 if self.claim.gated else 2)


def _note_limits(file: ClaimedRun) -> Iterator[str]:
    """What this evidence cannot show, whatever is claimed."""
    name, sightings = file.evidence.file, file.run.sightings
    if file.evidence.device_sms is None:
        yield f"{name}: how many SMs the GPU has is not known, so grids that may have filled it tell only the least"
    if is_share(file):
        yield f"{name}: collectives inside of the passes: sizes refute nothing, they may be one rank's share"
    if any(one.is_unclear for one in find_contradictions(sightings, file.placement, None)):
        yield (
            f"{name}: layers agree in all their times, which come in steps of {find_step_ns(sightings):,} ns: that may "
            "be chance, and a layer that was copied is not told from one that ran"
        )


def _judge_others(value: int, others: tuple[Interval, ...]) -> FieldVerdict:
    if is_tested(value, others):
        return "tested"
    return "narrowed" if is_narrowed(value, others) else "not tested"
