"""Does a run match a claim? Every kernel's work is predicted from the claim and held against what was seen.

Refuted: a kernel did what no model of that shape does, and it is named. Only hard facts refute: products, attention,
norms, lookups, the number of layers, the data type of products, and physics.
Consistent: nothing contradicts, and everything that was claimed was tested, which means that another value would have
been noticed. For each size the values that would have passed as well are listed.
Cannot tell: nothing contradicts, and something that was claimed could not be tested.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stepscope import hardware
from stepscope.recover.claim import FIELDS, Claim
from stepscope.recover.claimed_run import ClaimedRun, open_all
from stepscope.recover.claimed_shape import HEAD_ROWS, SIZE_FIELDS, Shape
from stepscope.recover.evidence import Evidence
from stepscope.recover.facts import Sighting
from stepscope.recover.plausibility import find_contradictions
from stepscope.recover.predicting import describe_launch
from stepscope.recover.sensitivity import Interval, find_passing, is_tested
from stepscope.recover.structure import Role, Zone
from stepscope.recover.unclaimed import (
    Work,
    find_unclaimed_products,
    find_unknown,
    is_explained,
    is_too_much,
    is_unknown,
    summarise,
)
from stepscope.recover.updates import find_updated
from stepscope.recover.verification import (
    Comparison,
    FieldResult,
    FieldVerdict,
    Refutation,
    Verdict,
    Verification,
    describe_interval,
)

# Shares of the GPU's time. Below the first, a product without a place is a detail of an implementation.
_MOST_UNCLAIMED = 0.01
_MOST_UNKNOWN = 0.01
_MOST_UNEXPLAINED = 0.05
# Between the products of a layer stands nothing but what a layer does.
_LAYER_ZONES: tuple[Zone, ...] = ("between", "middle", "feed_forward", "heads", "merge")
_DTYPE_ROLES_EXCLUDED: tuple[Role, ...] = ("head",)  # often done in another precision on purpose


def verify(evidence: Sequence[Evidence], claim: Claim, *, unseen: float = 0.0) -> Verification:
    """`unseen`: the share of the GPU's time that the evidence does not hold. Raises NoTransformerError where a file
    shows no decoder."""
    shape, files = open_all([one for one in evidence if one.sightings], claim)
    assert files, "evidence without kernels is refused before"
    allocations = [size for one in evidence for size in one.allocations]
    return _Judge(files, claim, shape, allocations, unseen).judge()


@dataclass(slots=True)
class _Judge:
    files: list[ClaimedRun]
    claim: Claim
    shape: Shape
    allocations: list[int]
    unseen: float

    def judge(self) -> Verification:
        refutations = [one for file in self.files for one in self._refute(file)]
        works, share, too_much = self._find_work(refutations)
        fields = self._test_fields(refutations)
        missing = [*self._find_missing(fields), *too_much] if not refutations else []
        verdict = Verdict.REFUTED if refutations else Verdict.UNDECIDED if missing else Verdict.CONSISTENT
        compared = {(file.evidence.file, check.sighting.index) for file in self.files for check in file.checks}
        return Verification(
            verdict=verdict,
            why=_explain(verdict, refutations, missing),
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

    def _compare(self) -> Iterator[Comparison]:
        groups: dict[tuple[str, str], dict[tuple[str, int], bool]] = {}
        for file in self.files:
            for check in file.checks:
                launches = groups.setdefault((check.what, check.expect(self.shape)), {})
                key = (file.evidence.file, check.sighting.index)
                launches[key] = launches.get(key, True) and check.test(self.shape) is not False
        for (what, expected), launches in groups.items():
            yield Comparison(what=what, launches=len(launches), agree=sum(launches.values()), expected=expected)

    def _refute(self, file: ClaimedRun) -> Iterator[Refutation]:
        """In the order in which they are to be read: the claim's own sizes first, then the file against itself."""
        found: list[Refutation] = []
        layers = self.claim.num_layers
        for number, seen in enumerate(file.placement.num_layers, start=1):
            if layers is not None and seen != layers and not (seen < layers and file.placement.is_cut(number)):
                found.append(
                    _refutation(
                        file,
                        file.placement.starts[number - 1],
                        where=f"pass {number}",
                        what="number of layers",
                        expected=f"{layers} layers",
                        seen=f"{seen} attentions between which the same products stand",
                    )
                )
        found += [
            _refutation(file, one.sighting, what="layer", expected=one.expected, seen=one.seen)
            for one in file.placement.complaints
            if not one.is_unclear
        ]
        found += [
            _refutation(
                file,
                one.sighting,
                where=f"pass {one.pass_number}, layer {one.layer}",
                what="work that nobody claimed",
                expected="no matrix product here in a layer of the claimed kind",
                seen=f"one of {one.sighting.duration_ns / 1e3:,.1f} µs, {describe_launch(one.sighting)}",
            )
            for one in file.placement.intruders
        ]
        found += self._refute_checks(file)
        found += self._refute_dtype(file)
        found += self._refute_updates(file)
        device = hardware.find(file.evidence.device) if file.evidence.device else None
        found += [
            _refutation(file, one.sighting, what="evidence against itself", expected=one.expected, seen=one.seen)
            for one in find_contradictions(file.run.sightings, file.placement, device)
        ]
        yield from found

    def _refute_checks(self, file: ClaimedRun) -> Iterator[Refutation]:
        wrong = [check for check in file.checks if check.test(self.shape) is False]
        for check in sorted(wrong, key=lambda one: one.sighting.index):
            yield _refutation(
                file,
                check.sighting,
                where=check.where,
                what=check.what,
                expected=check.expect(self.shape),
                seen=", ".join(part for part in (check.seen, check.suggest(self.shape)) if part),
            )

    def _refute_dtype(self, file: ClaimedRun) -> Iterator[Refutation]:
        for one in file.placement.products:
            seen = one.sighting.name.dtype
            if self.claim.dtype and seen and seen != self.claim.dtype and one.role not in _DTYPE_ROLES_EXCLUDED:
                yield _refutation(
                    file,
                    one.sighting,
                    where=f"pass {one.pass_number}, layer {one.layer}",
                    what="data type",
                    expected=f"matrix products in {self.claim.dtype}",
                    seen=f"{seen}, by the kernel's name",
                )

    def _refute_updates(self, file: ClaimedRun) -> Iterator[Refutation]:
        """An optimizer goes over every parameter once, and over nothing else."""
        seen = find_updated(file.run.sightings)
        most, fewest = self.claim.parameters, self.claim.parameters or self.claim.fewest_parameters
        if seen is None or fewest is None:
            return
        first, low, high = seen
        if high < fewest:
            yield _refutation(
                file,
                first,
                what="optimizer",
                expected=f"at least {fewest:,} parameters",
                seen=f"updates of at most {high:,}: layers share weights, or some are not trained",
            )
        elif most is not None and low > most:
            yield _refutation(
                file, first, what="optimizer", expected=f"{most:,} parameters", seen=f"updates of at least {low:,}"
            )

    def _find_work(self, refutations: list[Refutation]) -> tuple[tuple[Work, ...], float, list[str]]:
        works: list[Work] = []
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
            if is_too_much(multiplying, time, _MOST_UNCLAIMED):
                first = min(extra, key=lambda one: one[0].index)[0]
                spent = sum(work.duration_ns for work in multiplying) / time
                refutations.append(
                    _refutation(
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
            inside = [one for one, counted in file.counts if counted.place_zone in _LAYER_ZONES]
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
        for sighting, counted in file.counts:
            key = (counted.place_zone, counted.seen.counts)
            if key not in known:
                known[key] = is_explained(counted, self.shape)
            if not known[key]:
                found.append((sighting, "works on a number of elements that no tensor of the claim has"))
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
        self, name: str, value: int | str | bool, passes: Callable[[Shape], bool], *, is_refuted: bool
    ) -> tuple[FieldVerdict, tuple[Interval, ...]]:
        if is_refuted:
            return ("refuted" if self._is_disputed(name) else "not refuted"), ()
        match name:
            case "num_layers":
                return "tested", ()
            case "dtype":
                known = [one.sighting.name.dtype for file in self.files for one in file.placement.products]
                return ("tested" if any(known) else "not tested"), ()
            case "gated":
                return ("not tested" if any(file.fits_otherwise for file in self.files) else "tested"), ()
            case "parameters":
                return self._test_parameters()
            case "tied":
                return "not tested", ()
        assert isinstance(value, int)
        others = find_passing(self._settle_head(passes), name, passes)
        return ("tested" if is_tested(value, others) else "not tested"), others

    def _settle_head(self, passes: Callable[[Shape], bool]) -> Shape:
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
                return ("tested" if is_tested(value, others) else "not tested"), others
        return "not tested", ()

    def _is_disputed(self, name: str) -> bool:
        """Whether what contradicts the claim would not, if the field were left open."""
        for file in self.files:
            if name == "num_layers" and any(one != self.claim.num_layers for one in file.placement.num_layers):
                return True
            if name == "dtype" and any(self._refute_dtype(file)):
                return True
            if name in SIZE_FIELDS:
                opened = msgspec.structs.replace(self.shape, **{name: None})
                wrong = [one for one in file.checks if one.test(self.shape) is False]
                if any(one.test(opened) is not False for one in wrong):
                    return True
        return False

    def _make_passes(self) -> Callable[[Shape], bool]:
        """Whether a shape passes every check of every file, and leaves no more counts unexplained than the claim."""
        checks = list({check.key: check for file in self.files for check in file.checks}.values())
        counts = {(one.place_zone, one.seen.counts): one for file in self.files for _, one in file.counts}
        explained = [one for one in counts.values() if is_explained(one, self.shape)]

        def passes(shape: Shape) -> bool:
            return all(check.test(shape) is not False for check in checks) and all(
                is_explained(one, shape) for one in explained
            )

        return passes

    def _find_missing(self, fields: dict[str, FieldResult]) -> Iterator[str]:
        for name, result in fields.items():
            if result.verdict == "not tested" and name not in ("tied", "parameters"):
                yield f"{name}: {_describe_untested(result)}"
        if self.unseen > _MOST_UNKNOWN:
            yield f"{self.unseen:.1%} of the GPU's time is in kernels of other streams, which were not looked at"
        claimed = [name for name in SIZE_FIELDS if name in self.claim.fields]
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
            for number, seen in enumerate(file.placement.num_layers, start=1):
                if self.claim.num_layers is not None and seen < self.claim.num_layers:
                    yield f"num_layers: {file.evidence.file} holds a part of pass {number} only, {seen} layers"

    def _take_notes(self) -> Iterator[str]:
        for file in self.files:
            yield from file.evidence.notes
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
            for name in SIZE_FIELDS
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


def _refutation(
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


def _describe_untested(result: FieldResult) -> str:
    values = ", ".join(describe_interval(one) for one in result.passes_too[:4])
    if not values:
        return "nothing in the evidence depends on it"
    return f"{values} would have passed as well as {result.claimed}"


def _explain(verdict: Verdict, refutations: Sequence[Refutation], missing: Iterable[str]) -> str:
    match verdict:
        case Verdict.REFUTED:
            first = refutations[0]
            place = f", {first.where}" if first.where else ""
            return f"#{first.index} {first.kernel} ({first.what}{place}): expected {first.expected}; seen {first.seen}"
        case Verdict.UNDECIDED:
            return "; ".join(missing)
        case Verdict.CONSISTENT:
            return "nothing contradicts the claim, and another value of any size would have been noticed"
