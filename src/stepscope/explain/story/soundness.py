"""How far the figures can be trusted: what was seen while they were taken, and what is known of their circumstances.

A doubt is a reason why a figure may be off. That a GPU waits for its host is none: it is what the step is like, and the
page says so elsewhere.
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
from stepscope.units import say_percent, say_size, say_time

NO_DOUBT = ("host-bound", "uncounted")  # codes that say something of the step, and nothing against its figures
DISAGREE = 0.05  # two clocks of one step, before it is worth a word
DISAGREE_MUCH = 0.15
WELL_KNOWN = 0.9  # of the kernels' time, before what is not known is worth a word


def judge(opening: Opening) -> Soundness:
    materials = opening.materials
    doubts = tuple(dict.fromkeys(_doubts(opening)))
    details = (*doubts, *dict.fromkeys(_remarks(opening)))
    if doubts:
        more = f"; {len(doubts) - 1} more below" if len(doubts) > 1 else ""
        return Soundness(
            verdict="doubtful", sentence=f"Take the figures with care: {doubts[0]}{more}.", details=details
        )
    if _is_empty(materials):
        return Soundness(verdict="unknown", sentence="Nothing was measured.", details=details)
    if not _knows_circumstances(materials):
        said = "The file does not say what else ran on the machine, or whether its clocks were held back."
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
        return "Nothing was seen that disturbed the measurement."
    steps = len(opening.row.measurement.step_ns)
    return (
        f"{steps} steps were timed, the middle 60% of them within {say_percent(opening.timed.spread)} of the median, "
        "and nothing was seen that disturbed them."
    )


# --- Doubts -----------------------------------------------------------------------------------------------------------


def _doubts(opening: Opening) -> Iterator[str]:
    """One line for each reason, the run's own timing first."""
    materials = opening.materials
    for name, case in find_strangers(materials).items():
        yield f"the {name} is of another run: {describe_case(case)}"
    own = [doubt for row in materials.bench[:1] for doubt in row.doubts]
    yield from _say_doubts(own, "")
    for one, when in ((materials.profile, "while recording"), (materials.memory, "while recording memory")):
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
            f"the step was timed at {say_time(materials.timed_ns)}, and its kernels alone ran for "
            f"{say_time(profile.busy_step_ns)} when it was recorded: all figures go by the recording"
        )


def _disagreeing_clocks(opening: Opening, *, least: float, below: float = float("inf")) -> Iterator[str]:
    """The step timed by itself, and again around the recording."""
    profile = opening.materials.profile
    overhead = profile.recording.manifest.overhead if profile is not None else None
    if opening.timed is None or overhead is None:
        return
    timed, again = opening.timed.median * 1e6, float(overhead.plain_ns)
    apart = abs(timed - again) / timed
    if least <= apart < below:
        yield (
            f"the step took {say_time(timed)} when it was timed and {say_time(again)}, {say_percent(apart)} "
            f"{'more' if again > timed else 'less'}, when it was timed again for the recording"
        )


def _allocator(materials: Materials) -> Iterator[str]:
    memory = materials.memory
    facts = memory.recording.manifest.memory if memory is not None else None
    if memory is None or facts is None:
        return
    counted = facts.allocator_peak_bytes
    if counted is not None and counted != memory.peak_bytes:
        yield (
            f"the recording adds up to {memory.peak_bytes:,} bytes at the peak, and the allocator itself counted "
            f"{counted:,}"
        )
    if facts.estimated_bytes:
        yield f"the sizes of {say_size(facts.estimated_bytes)} are estimated: the snapshot begins too late"


# --- What it rests on -------------------------------------------------------------------------------------------------


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
    clock = "CUDA events" if row.measurement.clock == "cuda events" else "the host's clock"
    low, high = say_time(timed.min * 1e6), say_time(timed.max * 1e6)
    width = say_percent(timed.spread)
    yield f"{steps} steps by {clock} after {warmup} to warm up: {low} to {high}, the middle 60% {width} wide"


def _recording(opening: Opening) -> Iterator[str]:
    profile = opening.materials.profile
    if profile is None:
        return
    manifest = profile.recording.manifest
    if profile.has_steps:
        lengths = [end - start for start, end in profile.step_windows]
        said = f", {say_time(min(lengths))} to {say_time(max(lengths))} long" if len(lengths) > 1 else ""
        yield f"{profile.num_steps} step{'s' * (profile.num_steps != 1)} recorded by {name_source(manifest)}{said}"
    else:
        yield f"recorded by {name_source(manifest)}; no steps are marked"
    if manifest.overhead is not None and manifest.overhead.recorded_ns:
        overhead = manifest.overhead
        last = overhead.annotated_ns or overhead.recorded_ns
        assert last is not None, "one of the two was timed"
        is_recorded = opening.materials.profile_step_ns == profile.recorded_step_ns
        clock = "times are as recorded" if is_recorded else "idle time is taken from the clock without it"
        yield f"recording made the step {last / overhead.plain_ns:.3g} times as long; {clock}"
    covered = profile.coverage()
    said = ", ".join(f"{name} {say_percent(share)}" for name, share in covered.items())
    yield f"known of the {'operators' if profile.on_cpu else 'kernels'}' time: {said}"
    weak = [name for name, share in covered.items() if 0 < share < WELL_KNOWN]
    if weak:
        yield f"the {' and '.join(weak)} of the rest is unknown, and is shown as such"
    if profile.steps_in_window > 1.01 * profile.num_steps:
        yield (
            f"the recording holds the work of about {profile.steps_in_window:.1f} steps, {profile.num_steps} of them "
            "marked; figures a step are of that"
        )


def _memory(opening: Opening) -> Iterator[str]:
    memory, row = opening.materials.memory, opening.materials.timed_row
    if memory is None:
        return
    facts = memory.recording.manifest.memory
    assert facts is not None, "a profile of memory is made of a recording of memory"
    if facts.allocator_peak_bytes == memory.peak_bytes:
        yield "memory adds up to what the allocator counted at its peak, to the byte"
    if row is not None and row.measurement is not None and row.measurement.peak_kind == "cuda allocator":
        apart = abs(memory.peak_bytes - row.measurement.peak_bytes) / max(1, row.measurement.peak_bytes)
        if apart > DISAGREE:
            yield (
                f"the peak was {say_size(row.measurement.peak_bytes)} while steps were timed and "
                f"{say_size(memory.peak_bytes)} while memory was recorded"
            )
