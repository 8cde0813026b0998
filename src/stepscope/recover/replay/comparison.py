"""Evidence next to a replay, kernel by kernel.

Which kernels run, their grids, blocks, registers and shared memory, the operations of the tensor cores and the bytes
that they store are the same whenever the same program runs on the same kind of GPU: in the recorded runs of
`tests/fixtures/evidence`, no kernel of two recordings differs in any of them. The weights do not matter.

Other counters vary between repetitions of a layer, and have a band. Instructions outside the tensor cores differ by up
to 0.1% in kernels whose branches depend on the data (tanh, softmax), written sectors by up to 8%, and durations of
single kernels by up to a third, with 1% of the time in kernels that differ by more than a quarter. Bytes from and to
DRAM are not compared: the caches decide, and equal layers differ by 99%. Neither are launches of kernels that a
compiler generated: it measures its choices anew in every process.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal

import msgspec

from stepscope.recording.readers.counter_metrics import CounterKey
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.recover.replay.sections import (
    PLACES,
    CutRun,
    Kernels,
    PassSection,
    SectionKind,
    cut_evidence,
    cut_replay,
)

EXACT: tuple[CounterKey, ...] = ("tensor_ops", "store_bytes")
# The share by which a counter may be outside the range of the replayed repetitions.
BANDS: dict[CounterKey, float] = {
    "tensor_instructions": 0.01,
    "fadd": 0.01,
    "fmul": 0.01,
    "ffma": 0.01,
    "write_sectors": 0.1,
}
DURATION_BAND = 0.25
_FEWEST = 1000  # smaller counts may be outside their band: a few sectors or instructions more are a large share
_LAYER_KINDS: tuple[SectionKind, ...] = ("layer", "backward")

# `kernel`: another kernel, or one that is missing or added. `launch`: grid or block. `build`: registers or shared
# memory. `work`: a counter that must be equal. `band`: a counter outside its band.
DifferenceKind = Literal["kernel", "launch", "build", "work", "band"]


class ReplayDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first of `launches` kernels that differ from the replay in the same way. `index` counts the kernels of the
    file from 0."""

    kind: DifferenceKind
    index: int
    kernel: str
    where: str
    expected: str
    seen: str
    launches: int
    in_layers: bool


class ReplayComparison(msgspec.Struct, kw_only=True):
    """`compared` and `equal` are numbers of kernels. `missing` says what the replay should cover and does not, and
    `notes` what it cannot cover. Durations are compared if the same recorder measured both."""

    kernels: int
    compared: int = 0
    equal: int = 0
    missing: list[str] = []
    notes: list[str] = []
    differences: list[ReplayDifference] = []
    counters: tuple[CounterKey, ...] = ()
    time_ratio: float | None = None  # the median duration of a kernel, compared with that of the replay
    outside_share: float = 0.0  # of the compared time, in kernels whose duration or a counter is outside its band


def compare(evidence: KernelEvidence, replayed: KernelEvidence, num_layers: int) -> ReplayComparison:
    """Compare a file with a replay of at most `num_layers` layers, the claimed number. Raises NoTransformerError if one
    of them does not show whole passes."""
    here = cut_replay(replayed.sightings)
    is_same_recorder = evidence.source == replayed.source
    reference = _Reference(here, is_whole=here.num_layers == num_layers, by_name=is_same_recorder)
    seen = cut_evidence(evidence.sightings, here, num_layers, reference.identify)
    result = ReplayComparison(kernels=len(evidence.sightings))
    comparer = _Comparer(result, is_timed=is_same_recorder)
    for section in seen.sections:
        samples = reference.find(section)
        if samples:
            comparer.add(section, samples, reference)
    result.missing += reference.missing
    result.notes += reference.notes
    comparer.finish()
    return result


class _Reference:
    """What the replay shows of every section: one or more repetitions of it. If all layers ran, sections are matched
    by their number; otherwise every layer must look the same."""

    def __init__(self, run: CutRun, *, is_whole: bool, by_name: bool) -> None:
        self._is_whole, self._by_name = is_whole, by_name
        self.missing: list[str] = []
        self.notes: list[str] = []
        self._samples: dict[object, list[Kernels]] = {}
        for section in run.sections:
            self._samples.setdefault(self._key(section), []).append(self._shorten(section))
        for key, samples in self._samples.items():
            looks = Counter(tuple(map(self.identify, one)) for one in samples)
            usual, _ = looks.most_common(1)[0]
            self._samples[key] = [one for one in samples if tuple(map(self.identify, one)) == usual]
            if not is_whole and key in _LAYER_KINDS and (len(looks) > 1 or _is_compiled(samples)):
                # A compiler sees all layers at once and gives some of them other kernels.
                self.missing.append("the replayed layers are compiled or differ: replay all layers of the claim")
                self._samples[key] = []

    def identify(self, one: Sighting) -> object:
        """Return what makes two launches the same kernel. Recorders spell names differently, and a compiler numbers
        its kernels."""
        name = one.name
        if name.library == "Inductor":
            return name.kernel_class, name.fused
        if self._by_name:
            return name.name
        return name.kernel_class, name.operation, name.direction, name.dtype, name.tile, name.layout

    def find(self, section: PassSection) -> list[Kernels]:
        samples = self._samples.get(self._key(section))
        if samples is None:
            reason = f"the replay has no kernels {PLACES[section.kind]}"
            self.missing += [reason] if reason not in self.missing else []
        return samples or []

    def _key(self, section: PassSection) -> object:
        return (section.kind, section.number) if self._is_whole else section.kind

    def _shorten(self, section: PassSection) -> Kernels:
        """Return the part of a section that does not depend on the number of layers."""
        if self._is_whole or section.kind not in ("update", "step"):
            return section.kernels
        what = "the optimizer depends" if section.kind == "update" else "the backward pass and the optimizer depend"
        self.notes = [f"{what} on the number of layers: replay all layers to compare it"]
        classes = [one.name.kernel_class for one in section.kernels]
        can_cut = section.kind == "update" and "optimizer" in classes
        return section.kernels[: classes.index("optimizer")] if can_cut else ()


def _is_compiled(samples: Sequence[Kernels]) -> bool:
    return any(one.name.library == "Inductor" for kernels in samples for one in kernels)


class _Comparer:
    """Collects differences. Those that repeat in every layer are one."""

    def __init__(self, result: ReplayComparison, *, is_timed: bool) -> None:
        self._result = result
        self._is_timed = is_timed
        self._found: dict[object, ReplayDifference] = {}
        self._times: list[tuple[Sighting, list[int]]] = []
        self._outside: set[int] = set()  # indices of kernels with a counter outside its band
        self._counters: set[CounterKey] = set()

    def add(self, section: PassSection, samples: list[Kernels], reference: _Reference) -> None:
        kernels = section.kernels
        length = len(samples[0])
        if section.kind in ("end", "update", "step"):  # later kernels are not part of the pass
            kernels = kernels[:length]
        expected = [reference.identify(one) for one in samples[0]]
        seen = [reference.identify(one) for one in kernels]
        blocks = [(0, 0, length)] if expected == seen else _match(expected, seen)
        self._result.compared += len(kernels)
        there, here = 0, 0
        for first, begin, count in [*blocks, (length, len(seen), 0)]:
            self._add_others(section, samples[0][there:first], kernels[here:begin])
            for position in range(count):
                repetitions = [one[first + position] for one in samples]
                self._add_pair(section, repetitions, kernels[begin + position])
            there, here = first + count, begin + count

    def finish(self) -> None:
        result = self._result
        result.counters = tuple(key for key in (*EXACT, *BANDS) if key in self._counters)
        result.differences = sorted(self._found.values(), key=lambda one: (one.kind == "band", one.index))
        total = sum(one.duration_ns for one, _ in self._times)
        if not total:
            return
        if self._is_timed:
            ratio = statistics.median(one.duration_ns / statistics.median(times) for one, times in self._times)
            result.time_ratio = ratio
            self._outside |= {
                one.index for one, times in self._times if not _is_near(one.duration_ns / ratio, times, DURATION_BAND)
            }
        outside = sum(one.duration_ns for one, _ in self._times if one.index in self._outside)
        result.outside_share = outside / total

    def _add_others(self, section: PassSection, expected: Sequence[Sighting], seen: Sequence[Sighting]) -> None:
        """Add kernels that only one side has."""
        if not expected and not seen:
            return
        first = seen[0] if seen else next(iter(section.kernels), expected[0])
        names = [", ".join(one.name.short for one in kernels) or "no kernel" for kernels in (expected, seen)]
        self._add(section, first, "kernel", names[0], names[1], launches=max(1, len(seen)))

    def _add_pair(self, section: PassSection, samples: list[Sighting], seen: Sighting) -> None:
        differences = list(self._differ(samples, seen))
        for kind, expected, got in differences:
            self._add(section, seen, kind, expected, got)
        self._result.equal += all(kind == "band" for kind, _, _ in differences)
        if seen.duration_ns and all(one.duration_ns for one in samples):
            self._times.append((seen, [one.duration_ns for one in samples]))

    def _differ(self, samples: list[Sighting], seen: Sighting) -> Iterator[tuple[DifferenceKind, str, str]]:
        first = samples[0]
        if seen.name.library == "Inductor":
            return
        if first.has_geometry and seen.has_geometry and (first.grid, first.block) != (seen.grid, seen.block):
            yield "launch", _describe_launch(first), _describe_launch(seen)
        elif _build(first, seen) != _build(seen, first):
            yield "build", _describe_build(first), _describe_build(seen)
        for key in EXACT:
            if key in first.counters and key in seen.counters:
                self._counters.add(key)
                if first.counters[key] != seen.counters[key]:
                    yield "work", f"{key} {first.counters[key]:,}", f"{key} {seen.counters[key]:,}"
        for key, band in BANDS.items():
            values = [one.counters[key] for one in samples if key in one.counters]
            if not values or key not in seen.counters:
                continue
            self._counters.add(key)
            got = seen.counters[key]
            if max(got, *values) >= _FEWEST and not _is_near(got, values, band):
                self._outside.add(seen.index)
                yield "band", f"{key} {min(values):,} to {max(values):,}, ±{band:.0%}", f"{key} {got:,}"

    def _add(
        self, section: PassSection, seen: Sighting, kind: DifferenceKind, expected: str, got: str, launches: int = 1
    ) -> None:
        key = (section.kind, kind, seen.name.name, expected, got if kind != "band" else "")
        known = self._found.get(key)
        if known is not None:
            self._found[key] = msgspec.structs.replace(known, launches=known.launches + launches)
            return
        self._found[key] = ReplayDifference(
            kind=kind,
            index=seen.index,
            kernel=seen.name.short,
            where=section.where,
            expected=expected,
            seen=got,
            launches=launches,
            in_layers=section.kind in _LAYER_KINDS,
        )


def _match(expected: list[object], seen: list[object]) -> list[tuple[int, int, int]]:
    """Return the matching parts as (first expected, first seen, number)."""
    matcher = SequenceMatcher(None, expected, seen, autojunk=False)
    return [(one.a, one.b, one.size) for one in matcher.get_matching_blocks() if one.size]


def _is_near(value: float, samples: Sequence[int], band: float) -> bool:
    return min(samples) / (1 + band) <= value <= max(samples) * (1 + band)


def _build(one: Sighting, other: Sighting) -> tuple[int | None, int | None]:
    """Return the registers and shared memory of a launch, as far as both sides know them."""
    registers = one.registers if other.registers is not None else None
    return registers, one.shared_bytes if other.shared_bytes is not None else None


def _describe_launch(one: Sighting) -> str:
    return f"grid {one.grid}, block {one.block}"


def _describe_build(one: Sighting) -> str:
    return f"{one.registers} registers, {one.shared_bytes} bytes of shared memory"
