"""Check a claim: predict the work of every kernel from it, and compare with the evidence.

Refuted: a kernel did what no model of the claimed shape does; the result names it. Only hard facts refute: GEMMs,
attention, norms, lookups, the number of layers, the data type of GEMMs, and physical limits.
Consistent: nothing contradicts the claim, and every claimed field was tested or narrowed down to less than a factor of
two. The result lists the other values of each size that pass.
Cannot tell: nothing contradicts the claim, but a claimed field could not be tested; or the kernels that contradict it
may be one rank's shard of the claimed model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from stepscope.recover.claims.allocations import count_feed_forward, find_misfits
from stepscope.recover.claims.claim import FIELDS, Claim
from stepscope.recover.claims.claimed_run import ClaimedRun, ClaimedRuns, open_all, recover_sizes
from stepscope.recover.claims.plausibility import find_overlap_ns
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
from stepscope.recover.claims.regularity import LAYER_ZONES, disputes_dtype, find_irregularities, is_whole
from stepscope.recover.claims.repetition import find_step_ns, has_noise
from stepscope.recover.claims.roofline import find_idle_share
from stepscope.recover.claims.tying import TyingEvidence, find_tying, read_step
from stepscope.recover.claims.unexplained import (
    UnclaimedWork,
    compute_too_much,
    count_missing_gradients,
    find_surplus,
    find_unclaimed_products,
    find_unknown,
    find_usual_ns,
    is_explained,
    is_too_much,
    is_unknown,
    summarise,
)
from stepscope.recover.claims.updated_blocks import doubt_blocks
from stepscope.recover.claims.verdict import (
    ClaimVerdict,
    FieldResult,
    FieldVerdict,
    Interval,
    KernelComparison,
    Refutation,
    Verification,
    describe_interval,
    describe_untested,
    explain,
    find_passing,
    find_within,
    group_fields,
    is_narrowed,
    is_tested,
    undecided,
)
from stepscope.recover.evidence.recording import KernelEvidence, count_cut_names
from stepscope.recover.facts import Sighting, find_window
from stepscope.recover.shape import HEAD_ROWS, LAYER_SIZES, ClaimedShape, count_head_rows
from stepscope.recover.solve.devices import foreign_devices, make_portable, say_foreign
from stepscope.recover.solve.variants import refuse_variants
from stepscope.units import count_noun

# Shares of GPU time. Below the first, an unclaimed GEMM is an implementation detail.
_MOST_UNCLAIMED = 0.01
_MOST_UNKNOWN = 0.01
_MOST_UNEXPLAINED = 0.05
_MOST_OVERLAP = 0.01  # of kernels on one stream


def verify(evidence: Sequence[KernelEvidence], claim: Claim, *, unseen: float = 0.0) -> Verification:
    """Return the verdict. `unseen` is the share of the work that is not in the evidence. Raises NoTransformerError if a
    file does not show a decoder, or more than a plain one."""
    refuse_variants(evidence)
    found = _judge(evidence, claim, unseen)
    if found.verdict is not ClaimVerdict.REFUTED:
        return found
    if cut := sum(count_cut_names(one.sightings) for one in evidence):
        reason = (
            f"{count_noun(cut, 'kernel name')} of {found.kernels:,} lack template arguments, so kernels may be misread"
        )
        return undecided(claim, reason, evidence)
    foreign = foreign_devices(evidence)
    if not foreign:
        return found
    anywhere = {_identify(one) for one in _judge(make_portable(evidence), claim, unseen).refuted_by}
    proven = tuple(one for one in found.refuted_by if _identify(one) in anywhere)
    if proven:
        return msgspec.structs.replace(found, refuted_by=proven, why=explain(found.verdict, proven, (), found.fields))
    first = found.refuted_by[0]
    reason = f"#{first.index} {first.kernel} contradicts the claim on an H200, but was not measured on {foreign[0]}"
    return undecided(claim, reason, evidence)


def _identify(refutation: Refutation) -> tuple[str, int, str]:
    return refutation.file, refutation.index, refutation.what


def _judge(evidence: Sequence[KernelEvidence], claim: Claim, unseen: float) -> Verification:
    runs = open_all([one for one in evidence if one.sightings], claim)
    assert runs.files, "the caller has checked that there are kernels"
    snapshots = [one for one in evidence if one.allocations]
    tying = find_tying(runs.files, snapshots, claim, runs.shape)
    return _Judge(runs, claim, snapshots, tying, unseen).judge()


@dataclass(slots=True)
class _Judge:
    runs: ClaimedRuns
    claim: Claim
    snapshots: list[KernelEvidence]
    tying: TyingEvidence | None
    unseen: float
    assumptions: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[ClaimedRun]:
        return self.runs.files

    @property
    def shape(self) -> ClaimedShape:
        return self.runs.shape

    def judge(self) -> Verification:
        refutations = [one for file in self.files for one in refute(file, self.claim, self.shape)]
        refutations += self._refute_tying()
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
            **group_fields(fields),
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

    def _refute_tying(self) -> Iterator[Refutation]:
        tying = self.tying
        if tying is None or self.claim.tied in (None, tying.is_tied) or not tying.is_certain:
            return
        assert tying.file is not None
        assert tying.sighting is not None
        claimed = "shares the embedding's weights" if self.claim.tied else "has weights of its own"
        yield make_refutation(
            tying.file, tying.sighting, what="tied", expected=f"an LM head that {claimed}", seen=tying.why
        )

    def _find_untrained(self, file: ClaimedRun) -> Iterator[str]:
        """An optimizer that updates fewer or more parameters than claimed neither contradicts nor supports the
        claim."""
        recovered = {name: getattr(self.shape, name) for name in LAYER_SIZES if getattr(self.claim, name) is None}
        whole = msgspec.structs.replace(self.claim, **recovered)
        seen, fewest = find_updated(file.run.sightings), self.claim.parameters or whole.fewest_parameters
        if seen is not None and fewest is not None and seen[2] < fewest:
            yield (
                f"the optimizer updates at most {seen[2]:,} parameters, but the claim has at least {fewest:,}: "
                "layers share weights, some weights are frozen, or other ranks have the rest"
            )
        yield from (one.doubt for one in read_step(file, self.claim, self.shape) if one.doubt)
        yield from doubt_blocks(file, whole)

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
            usual = find_usual_ns(file.run, file.placement, self.shape)
            if is_too_much(multiplying, time, _MOST_UNCLAIMED) and is_share(file):
                missing.append("GEMMs that the claim does not explain take more than 1% of the GPU time")
            elif is_too_much(summarise("multiplies", self._leave_out_rotary(file, extra)), time, _MOST_UNCLAIMED):
                first = min(extra, key=lambda one: one[0].index)[0]
                spent = sum(work.duration_ns for work in multiplying) / time
                refutations.append(
                    make_refutation(
                        file,
                        first,
                        what="unclaimed work",
                        expected="no GEMMs beyond those in the claim",
                        seen=f"{len(extra)}, taking {spent:.1%} of the GPU time",
                    )
                )
            elif is_too_much(multiplying, time, _MOST_UNCLAIMED):
                missing.append(
                    "GEMMs that may be those of rotary angles take more than 1% of the GPU time: unclaimed sizes would "
                    "tell"
                )
            elif is_too_much(multiplying, usual, _MOST_UNCLAIMED):
                missing.append(
                    "GEMMs that the claim does not explain take less than 1% of the GPU time only because other "
                    "kernels take unusually long"
                )
            elif compute_too_much(multiplying, file.run.sightings, _MOST_UNCLAIMED):
                missing.append("GEMMs that the claim does not explain do more than 1% of the operations")
            surplus = find_surplus(file.run, file.placement, file.predictor, self.shape)
            if sum(one.duration_ns for one in surplus) > _MOST_UNCLAIMED * usual:
                missing.append(f"training has {count_noun(len(surplus), 'GEMM')} more than two gradients of every GEMM")
            if lacking := count_missing_gradients(file.run, file.placement):
                missing.append(
                    f"training has {count_noun(lacking, 'GEMM')} less than two gradients of every GEMM: weights are "
                    "frozen, or kernels are missing"
                )
            strange = [one for one in file.placement.others if one.zone in LAYER_ZONES and is_unknown(one.sighting)]
            if strange:
                missing.append(f"kernels with unknown names inside the layers: {len(strange)}")
            if is_too_much(unknown, usual, _MOST_UNKNOWN):
                missing.append(f"kernels with unknown names take more than {_MOST_UNKNOWN:.0%} of the GPU time")
            if is_too_much(counts, usual, _MOST_UNEXPLAINED):
                missing.append(
                    f"kernels with element counts that the claim does not explain take more than "
                    f"{_MOST_UNEXPLAINED:.0%} of the GPU time"
                )
            inside = [seen.sighting for zone, seen in file.counts if zone in LAYER_ZONES]
            unexplained = {one.index for one, _ in odd}
            if number := sum(one.index in unexplained for one in inside):
                missing.append(
                    f"the claim does not explain the element counts of {number} of {len(inside)} kernels inside the "
                    "layers"
                )
        share = sum(work.duration_ns for work in works) / max(total, 1)
        return tuple(sorted(works, key=lambda work: -work.duration_ns)), share, missing

    def _leave_out_rotary(
        self, file: ClaimedRun, extra: Sequence[tuple[Sighting, str]]
    ) -> Sequence[tuple[Sighting, str]]:
        """Leave out a GEMM per pass, if only sizes that are unknown could tell that it is not that of rotary angles."""
        outside = {one.index for one in file.placement.extras}
        unknown = {
            one.index for one, _ in extra if one.index in outside and file.predictor.is_rotary(one, self.shape) is None
        }
        is_possible = len(unknown) <= len(file.placement.num_layers)
        return [one for one in extra if one[0].index not in unknown] if is_possible else extra

    def _find_counts(self, file: ClaimedRun) -> list[tuple[Sighting, str]]:
        """Return the data movement kernels with an element count that the claim does not explain."""
        known: dict[object, bool] = {}
        found = []
        for zone, seen in file.counts:
            key = (zone, seen.counts)
            if key not in known:
                known[key] = is_explained(zone, seen, self.shape)
            if not known[key]:
                found.append((seen.sighting, "an element count that no tensor of the claimed model has"))
        return found

    def _test_fields(self, refutations: list[Refutation]) -> dict[str, FieldResult]:
        claimed = self.claim.fields
        passes = self._make_passes()
        disputed = {name for name in claimed if self._is_disputed(name)} if refutations else set()
        following = self._find_following(disputed)
        fields: dict[str, FieldResult] = {}
        for name in FIELDS:
            value = claimed.get(name)
            if value is None:
                fields[name] = FieldResult(claimed=None, verdict="not claimed")
                continue
            verdict, others = self._test_field(name, value, passes) if not refutations else ("not refuted", ())
            if name in disputed:
                verdict = "follows" if name in following else "refuted"
            fields[name] = FieldResult(
                claimed=value, verdict=verdict, passes_too=others, implied=name in self.claim.implied
            )
        return fields

    def _test_field(
        self, name: str, value: int | str | bool, passes: Callable[[ClaimedShape], bool]
    ) -> tuple[FieldVerdict, tuple[Interval, ...]]:
        match name:
            case "num_layers":
                return ("tested" if all(map(self._has_whole_pass, self.files)) else "not tested"), ()
            case "dtype":
                return ("tested" if self._knows_dtypes() else "not tested"), ()
            case "gated":
                return ("not tested" if any(file.fits_otherwise for file in self.files) else "tested"), ()
            case "parameters":
                return self._test_parameters()
            case "tied":
                return ("tested" if self.tying and self.tying.is_tied == value else "not tested"), ()
        assert isinstance(value, int)
        if self.runs.is_cut or any(self._count_misfits(file) for file in self.files):
            return "not tested", ()
        settled = self._settle_head(passes)
        others = find_passing(settled, name, passes)
        if name == "vocab_size" and (apart := list(self._find_other_heads(settled, passes))):
            if settled.head_rows == HEAD_ROWS[0]:
                said = ", ".join(map(describe_interval, apart))
                self.assumptions.append(f"vocab_size: if the LM head ran on fewer positions, {said} would pass")
            else:
                others = tuple(sorted({*others, *apart}))
        return _judge_others(value, others), others

    def _knows_dtypes(self) -> bool:
        """Whether the dtype of every GEMM is known. The LM head is ignored: it often uses another precision. An fp32
        kernel on the tensor cores may compute in a narrower dtype."""
        products = [one for file in self.files for one in file.placement.products]
        inside = [one.sighting for one in products if one.role not in OTHER_DTYPE_ROLES]
        is_known = bool(inside) and all(one.dtype and (one.dtype != "fp32" or not one.counted_dtype) for one in inside)
        return is_known and not any(disputes_dtype(file.run.sightings, file.placement) for file in self.files)

    def _count_misfits(self, file: ClaimedRun) -> int:
        """Count the kernels that would refute the sizes if they could not be one rank's shard."""
        return sum(1 for _ in refute_sizes(file, self.shape)) if is_share(file) else 0

    def _settle_head(self, passes: Callable[[ClaimedShape], bool]) -> ClaimedShape:
        """Fix the positions that the LM head runs on: sizes are changed one at a time."""
        ways = (msgspec.structs.replace(self.shape, head_rows=way) for way in HEAD_ROWS)
        return next((shape for shape in ways if passes(shape)), self.shape)

    def _find_other_heads(self, settled: ClaimedShape, passes: Callable[[ClaimedShape], bool]) -> Iterator[Interval]:
        """Yield the values of vocab_size that pass if the LM head runs on other positions, far from the claimed one."""
        places = ((file, one) for file in self.files for one in file.placement.products if one.role == "head")
        file, head = next(places, (None, None))
        product = file.predictor.product(head.sighting) if file and head else None
        for way in HEAD_ROWS:
            rows = count_head_rows(settled, way)
            if way == settled.head_rows or product is None or not rows or settled.d_model is None:
                continue
            window = find_window(product, rows=rows, inner=settled.d_model)
            moved = msgspec.structs.replace(settled, head_rows=way)
            found = find_within(moved, "vocab_size", window, passes) if window else None
            if found and not found[0] <= (settled.vocab_size or 0) <= (found[1] or 0):
                yield found

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
        """Whether the contradictions would disappear if the field were not claimed."""
        for file in self.files:
            if name == "num_layers" and any(find_other_depths(file, self.claim)):
                return True
            if name == "parameters" and any(refute_updates(file, self.claim)):
                return True
            if name == "dtype" and any(refute_dtype(file, self.claim)):
                return True
            if name == "tied" and any(self._refute_tying()):
                return True
            if name in LAYER_SIZES and not is_share(file):
                opened = msgspec.structs.replace(self.shape, **{name: None})
                wrong = [one for one in file.checks if one.test(self.shape) is False]
                if any(one.test(opened) is not False for one in wrong):
                    return True
        return False

    def _find_following(self, disputed: set[str]) -> set[str]:
        """Return the disputed sizes that fit as soon as another one is changed to what the evidence shows, or that the
        evidence itself shows."""
        sizes = disputed & set(LAYER_SIZES)
        answer = recover_sizes([file.evidence for file in self.files]) if len(sizes) > 1 else None
        if answer is None:
            return set()
        checks = [check for file in self.files for check in file.checks]
        found = [(name, value) for name in sizes for one in answer.candidates if (value := getattr(one, name))]
        wrong = {
            name
            for name, value in dict.fromkeys(found)
            for shape in [msgspec.structs.replace(self.shape, **{name: value})]
            if all(check.test(shape) is not False for check in checks)
        }
        fields = answer.fields
        shown = {name for name in sizes if fields[name].certain and fields[name].value == getattr(self.shape, name)}
        return sizes - wrong if wrong else shown if shown < sizes else set()

    def _make_passes(self) -> Callable[[ClaimedShape], bool]:
        """Return a test whether a shape passes every check of every file, and explains every count the claim does."""
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
            yield "not every interpretation of the kernels was tried: another one may match the claim"
        for text in self.runs.left_open:
            yield f"unclaimed sizes: {text}"
        misfits = sum(map(self._count_misfits, self.files))
        if misfits:
            yield (
                f"{count_noun(misfits, 'kernel')} cannot have the claimed sizes, but collectives run between the "
                "layers: this may be one rank's shard"
            )
        for name, result in fields.items():
            is_told = name == "num_layers" or (misfits and name in LAYER_SIZES)
            # Whoever claims a published config does not ask about its storage.
            is_aside = name == "tied" and result.implied
            if result.verdict == "not tested" and not is_told and not is_aside:
                yield f"{name}: {self._describe_tying() if name == 'tied' else describe_untested(name, result)}"
        if "num_kv_heads" in self.claim.fields and any("key_value" in one.placement.pattern for one in self.files):
            yield "num_kv_heads: keys and values share one projection, or one of their two is missing from every layer"
        if (unseen := self._find_unseen()) > _MOST_UNKNOWN:
            yield (
                f"{unseen:.1%} of the GPU time, or of the GEMMs and attention calls, is on other streams, which were "
                "ignored"
            )
        claimed = [name for name in LAYER_SIZES if name in self.claim.fields]
        if self.shape.core is None and claimed:
            yield "no values for the unclaimed sizes fit the claimed ones"
        elif self.shape.core is None and len(self.files) > 1:
            yield "the files may be of different runs: no sizes fit all of them"
        matrices = count_feed_forward(self.snapshots, self.claim)
        if matrices is not None and 0 < matrices[0] < matrices[1]:
            yield "fewer feed-forward matrices were allocated than the claim has: layers may share weights"
        yield from _find_differences(self.files, self.claim)
        for one in self.snapshots:
            for misfit in find_misfits(one, self.claim, self.shape):
                yield f"{one.file} may be of another run: {misfit}"
        for file in self.files:
            if left_out := len(file.placement.left_out):
                passes = count_noun(left_out, "pass", "passes")
                yield f"{file.evidence.file}: skipped {passes} with one token per sequence"
            if any(one.is_unclear for one in file.placement.complaints):
                yield "a layer lacks a GEMM at the end of the evidence or next to a kernel with an unknown name"
            if file.evidence.is_incomplete:
                yield f"{file.evidence.file}: kernels of the run are missing from the file"
            for gap in file.evidence.gaps:
                yield f"{file.evidence.file}: {gap}"
            busy, overlap = sum(one.duration_ns for one in file.run.sightings), find_overlap_ns(file.run.sightings)
            if overlap > _MOST_OVERLAP * busy:
                yield f"{file.evidence.file}: kernels of one stream overlap for {overlap / busy:.1%} of the GPU time"
            for text in find_irregularities(file.evidence, file.placement):
                yield f"{file.evidence.file}: {text}"
            yield from self._find_untrained(file)
            yield from self._find_cut_passes(file)

    def _find_unseen(self) -> float:
        """Return the share of GPU time on other streams, which a slow kernel on this one does not make small."""
        spent = sum(one.duration_ns for file in self.files for one in file.run.sightings)
        usual = sum(find_usual_ns(file.run, file.placement, self.shape) for file in self.files)
        elsewhere = spent * self.unseen / (1 - self.unseen) if self.unseen < 1 else float("inf")
        return 1 - usual / (usual + elsewhere) if elsewhere else 0.0

    def _note_slowness(self, file: ClaimedRun) -> Iterator[str]:
        """A slow run never refutes the claim."""
        slow = None if file.roofline is None else file.roofline.find_slow_pass(file.placement, self.shape)
        if slow is not None:
            spent_ns, usual_ns = slow
            yield (
                f"{file.evidence.file}: a pass took {spent_ns / 1e6:,.2f} ms, but the claimed work usually takes about "
                f"{usual_ns / 1e6:,.2f} ms: sizes were padded, or the GPU was shared or slowed down"
            )
        if idle := find_idle_share(file.run.sightings):
            yield f"{file.evidence.file}: no kernel of this stream ran for {idle:.0%} of the time"

    def _describe_tying(self) -> str:
        if self.tying is None:
            return "only a training step or a memory snapshot shows whether the LM head shares the embedding's weights"
        return f"{self.tying.why}, which contradicts the claim unless weights are frozen or shared otherwise"

    def _has_whole_pass(self, file: ClaimedRun) -> bool:
        """Whether a pass that is certainly complete has the claimed layers."""
        depths = enumerate(file.placement.num_layers, start=1)
        return any(seen == self.claim.num_layers and is_whole(file.placement, number) for number, seen in depths)

    def _find_cut_passes(self, file: ClaimedRun) -> Iterator[str]:
        """Yield why num_layers is open if the evidence has no complete pass."""
        layers, depths = self.claim.num_layers, file.placement.num_layers
        if layers is None or self._has_whole_pass(file):
            return
        for number, seen in enumerate(depths, start=1):
            if seen <= layers:
                yield f"num_layers: {file.evidence.file} has only part of pass {number} ({count_noun(seen, 'layer')})"
            else:
                yield (
                    f"num_layers: it is unclear where the passes of {file.evidence.file} begin "
                    f"({count_noun(seen, 'consecutive attention call')})"
                )

    def _take_notes(self) -> Iterator[str]:
        yield from self.assumptions
        for file in self.files:
            yield from file.evidence.notes
            yield from _note_limits(file)
            yield from self._note_slowness(file)
            if not file.evidence.has_counters:
                yield (
                    f"{file.evidence.file}: no counters, only names, grids and durations; "
                    "collect counters with stepscope profile --counters"
                )
            passes = len(file.placement.num_layers)
            kind = "training" if file.run.is_training else "forward"
            yield f"{file.evidence.file}: {count_noun(passes, f'{kind} pass', f'{kind} passes')}"
        if matrices := count_feed_forward(self.snapshots, self.claim):
            found, needed = matrices
            yield f"allocations with the size of a feed-forward matrix: {found}; the claim has {needed}"
        taken = {
            name: value
            for name in LAYER_SIZES
            if (value := getattr(self.shape, name)) is not None and name not in self.claim.fields
        }
        if taken:
            said = ", ".join(f"{name} {value:,}" for name, value in taken.items())
            yield f"not claimed, recovered from the evidence: {said}"
        yield "counters show the shape of the work, not the weights, the data or whether it was useful: docs/verify.md"


def _find_differences(files: Sequence[ClaimedRun], claim: Claim) -> Iterator[str]:
    """Yield what shows that the files come from different runs. What is claimed was compared with each of them."""
    inside = [
        [one.sighting.dtype for one in file.placement.products if one.role not in OTHER_DTYPE_ROLES] for file in files
    ]
    depths = [
        [seen for number, seen in enumerate(file.placement.num_layers, 1) if is_whole(file.placement, number)]
        for file in files
    ]
    shown: dict[str, list[set[str]]] = {
        "GPU": [{file.evidence.device} - {""} for file in files],
        "number of multiprocessors": [{str(sms)} if (sms := file.evidence.device_sms) else set() for file in files],
        "num_layers": [set(map(str, one)) if claim.num_layers is None else set() for one in depths],
        "dtype": [{dtype for dtype in one if dtype} if claim.dtype is None else set() for one in inside],
    }
    for what, values in shown.items():
        known = [one for one in values if one]
        if known and not set.intersection(*known):
            said = " and ".join("/".join(sorted(one)) for one in known)
            yield f"the files may be of different runs: {what} {said}"


def _note_limits(file: ClaimedRun) -> Iterator[str]:
    """Yield what this evidence cannot show, whatever the claim is."""
    name, sightings = file.evidence.file, file.run.sightings
    yield from map(say_foreign, foreign_devices([file.evidence]))
    if file.evidence.device_sms is None:
        yield f"{name}: the number of SMs is unknown, so the grids of persistent kernels only give lower bounds"
    if is_share(file):
        yield f"{name}: collectives run between the layers: sizes that do not fit may be one rank's shard"
    if not has_noise(sightings):
        yield (
            f"{name}: with a clock resolution of {find_step_ns(sightings):,} ns, durations repeat by chance: copied "
            "layers cannot be detected"
        )


def _judge_others(value: int, others: tuple[Interval, ...]) -> FieldVerdict:
    if is_tested(value, others):
        return "tested"
    return "narrowed" if is_narrowed(value, others) else "not tested"
