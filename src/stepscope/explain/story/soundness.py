"""Measurement quality: whether anything disturbed the measurement, and what is known about its circumstances.

A doubt is a reason why a figure may be wrong. A CPU-bound step is not one: that is a property of the step, and the page
says so elsewhere.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.explain.experiments.attention_tables import DOUBTS
from stepscope.explain.experiments.bench_tables import step_ms
from stepscope.explain.experiments.cases import describe_case, limit_notes
from stepscope.explain.story.commands import find_strangers
from stepscope.explain.story.opening import Opening
from stepscope.explain.story.phrases import name_source
from stepscope.explain.story.sections.environment_facts import find_environment
from stepscope.explain.story.sources import Materials
from stepscope.findings import Soundness
from stepscope.recording.rows.bench import Doubt
from stepscope.units import count_noun, say_factor, say_percent, say_size, say_time

NO_DOUBT = ("host-bound", "uncounted")  # codes that describe the step and do not question its figures
DISAGREE = 0.05  # between two clocks of one step, before it is mentioned
DISAGREE_MUCH = 0.15
WELL_KNOWN = 0.9  # of the kernel time; below it, the unknown part is mentioned


def judge(opening: Opening) -> Soundness:
    materials = opening.materials
    doubts = tuple(dict.fromkeys(_doubts(opening)))
    details = (*doubts, *dict.fromkeys(_remarks(opening)))
    if doubts:
        more = f"; {count_noun(len(doubts) - 1, 'more reason')} below" if len(doubts) > 1 else ""
        return Soundness(verdict="doubtful", sentence=f"{doubts[0][0].upper()}{doubts[0][1:]}{more}.", details=details)
    if _is_empty(materials):
        return Soundness(verdict="unknown", sentence="Nothing was measured.", details=details)
    if not _knows_circumstances(materials):
        said = "The file does not record other processes or clock throttling."
        return Soundness(verdict="unknown", sentence=said, details=details)
    return Soundness(verdict="sound", sentence=_say_sound(opening), details=details)


def _is_empty(materials: Materials) -> bool:
    parts = (materials.profile, materials.memory, materials.precision)
    return not materials.bench and not materials.attention and all(part is None for part in parts)


def _knows_circumstances(materials: Materials) -> bool:
    recordings = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    return all(manifest.environment is not None for manifest in recordings)


def _say_sound(opening: Opening) -> str:
    if opening.timed is None or opening.row is None or opening.row.measurement is None:
        return "No disturbance detected."
    steps = len(opening.row.measurement.step_ns)
    return (
        f"{count_noun(steps, 'step')} timed, p20 to p80 within {say_percent(opening.timed.spread)} of the median, no "
        "disturbance detected."
    )


# --- Doubts -----------------------------------------------------------------------------------------------------------


def _doubts(opening: Opening) -> Iterator[str]:
    """One line per reason, the timing of the run first."""
    materials = opening.materials
    for name, case in find_strangers(materials).items():
        yield f"the {name} belongs to another run: {describe_case(case)}"
    own = [doubt for row in materials.bench[:1] for doubt in row.doubts]
    yield from _say_doubts(own, "")
    for one, when in ((materials.profile, "while profiling"), (materials.memory, "while recording memory")):
        if one is not None:
            yield from _say_doubts(one.recording.manifest.doubts, f"{when}: ")
    yield from _kernels_beyond_step(materials)
    yield from _disagreeing_clocks(opening, least=DISAGREE_MUCH)
    yield from _allocator(materials)
    if opening.case is None and materials.profile is None and materials.memory is None:
        yield from _attention(materials, besides=NO_DOUBT)


def _say_doubts(doubts: Sequence[Doubt], when: str) -> Iterator[str]:
    yield from (f"{when}{doubt.text}" for doubt in doubts if doubt.code not in NO_DOUBT)


def _kernels_beyond_step(materials: Materials) -> Iterator[str]:
    profile = materials.profile
    if profile is not None and materials.timed_ns is not None and materials.is_bench_too_short:
        yield (
            f"the unprofiled step takes {say_time(materials.timed_ns)}, but its profiled kernels take "
            f"{say_time(profile.busy_step_ns)}: all figures come from the profile"
        )


def _disagreeing_clocks(opening: Opening, *, least: float, below: float = float("inf")) -> Iterator[str]:
    """Compare the step time of `bench` with the unprofiled one of `profile`."""
    profile = opening.materials.profile
    overhead = profile.recording.manifest.overhead if profile is not None else None
    if opening.timed is None or overhead is None:
        return
    timed, again = opening.timed.median * 1e6, float(overhead.plain_ns)
    apart = abs(timed - again) / timed
    if least <= apart < below:
        yield (
            f"the step takes {say_time(timed)} in bench and {say_time(again)} ({say_percent(apart)} "
            f"{'more' if again > timed else 'less'}) before profiling"
        )


def _allocator(materials: Materials) -> Iterator[str]:
    memory = materials.memory
    facts = memory.recording.manifest.memory if memory is not None else None
    if memory is None or facts is None:
        return
    counted = facts.allocator_peak_bytes
    if counted is not None and counted != memory.peak_bytes:
        yield (
            f"the recorded allocations add up to {memory.peak_bytes:,} bytes at the peak, but the allocator counted "
            f"{counted:,}"
        )
    if facts.estimated_bytes:
        yield f"{say_size(facts.estimated_bytes)} of allocations are estimated: the snapshot starts too late"


# --- Details ----------------------------------------------------------------------------------------------------------


def _remarks(opening: Opening) -> Iterator[str]:
    materials = opening.materials
    yield from _timing(opening)
    yield from _disagreeing_clocks(opening, least=DISAGREE, below=DISAGREE_MUCH)
    yield from _recording(opening)
    yield from _memory(opening)
    for row in materials.bench[:1]:
        yield from (f"{doubt.code}: {doubt.text}" for doubt in row.doubts if doubt.code in NO_DOUBT)
    for one in (materials.profile, materials.memory):
        if one is not None:
            yield from one.recording.manifest.notes
    environment = find_environment(materials)
    yield from limit_notes([environment] if environment else [])
    yield from _attention(materials)
    if "bench" in materials.absent:
        yield f"{materials.absent['bench'].what}: {materials.absent['bench'].why}"


def _attention(materials: Materials, besides: Sequence[str] = ()) -> Iterator[str]:
    counts = Counter(doubt.code for row in materials.attention for doubt in row.doubts)
    for code, count in counts.items():
        if code not in besides:
            yield f"attention: {DOUBTS.get(code, code)} ({count} of {len(materials.attention)} cases)"


def _timing(opening: Opening) -> Iterator[str]:
    row = opening.materials.timed_row
    timed = step_ms(row) if row else None
    if row is None or timed is None or row.measurement is None:
        return
    steps, warmup = len(row.measurement.step_ns), row.case.timing.warmup
    clock = "CUDA events" if row.measurement.clock == "cuda events" else "the CPU clock"
    low, high = say_time(timed.min * 1e6), say_time(timed.max * 1e6)
    width = say_percent(timed.spread)
    yield (
        f"{count_noun(steps, 'step')} timed with {clock} after {count_noun(warmup, 'warm-up step')}: {low} to {high}, "
        f"p20 to p80 spread {width}"
    )


def _recording(opening: Opening) -> Iterator[str]:
    profile = opening.materials.profile
    if profile is None:
        return
    manifest = profile.recording.manifest
    if profile.has_steps:
        lengths = [end - start for start, end in profile.step_windows]
        said = f", {say_time(min(lengths))} to {say_time(max(lengths))}" if len(lengths) > 1 else ""
        yield f"{count_noun(profile.num_steps, 'step')} recorded with {name_source(manifest)}{said}"
    else:
        yield f"recorded with {name_source(manifest)}; no steps are marked"
    if manifest.overhead is not None and manifest.overhead.recorded_ns:
        overhead = manifest.overhead
        last = overhead.annotated_ns or overhead.recorded_ns
        assert last is not None, "at least one of the two was timed"
        is_recorded = opening.materials.profile_step_ns == profile.recorded_step_ns
        clock = "all times include this" if is_recorded else "idle time comes from unprofiled steps"
        yield f"profiling made the step {say_factor(last / overhead.plain_ns)} as long; {clock}"
    covered = profile.coverage()
    said = ", ".join(f"{name} {say_percent(share)}" for name, share in covered.items())
    yield f"{'operator' if profile.on_cpu else 'kernel'} time attributed: {said}"
    weak = [name for name, share in covered.items() if 0 < share < WELL_KNOWN]
    if weak:
        yield f"the rest has an unknown {' and '.join(weak)}"
    if profile.steps_in_window > 1.01 * profile.num_steps:
        yield (
            f"the recording has about {profile.steps_in_window:.1f} steps of work, {profile.num_steps} of them marked; "
            "per-step figures use the former"
        )


def _memory(opening: Opening) -> Iterator[str]:
    memory, row = opening.materials.memory, opening.materials.timed_row
    if memory is None:
        return
    facts = memory.recording.manifest.memory
    assert facts is not None, "a memory profile comes from a memory recording"
    if facts.allocator_peak_bytes == memory.peak_bytes:
        yield "recorded allocations match the allocator's peak to the byte"
    if row is not None and row.measurement is not None and row.measurement.peak_kind == "cuda allocator":
        apart = abs(memory.peak_bytes - row.measurement.peak_bytes) / max(1, row.measurement.peak_bytes)
        if apart > DISAGREE:
            yield (
                f"peak memory was {say_size(row.measurement.peak_bytes)} while timing steps and "
                f"{say_size(memory.peak_bytes)} while recording memory"
            )
