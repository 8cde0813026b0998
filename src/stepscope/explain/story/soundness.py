"""Measurement quality: whether anything disturbed the measurement, and what is known about its circumstances.

A doubt is a reason why a figure may be wrong. A CPU-bound step is not one: that is a property of the step, and the page
says so elsewhere.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.explain.experiments.attention_tables import DOUBTS
from stepscope.explain.experiments.bench_tables import PHASES
from stepscope.explain.experiments.cases import describe_case, limit_notes
from stepscope.explain.memory.out_of_memory import MemoryFailure
from stepscope.explain.statistics import Statistics, summarise
from stepscope.explain.story.commands import find_strangers
from stepscope.explain.story.measured import say_withheld
from stepscope.explain.story.opening import Opening
from stepscope.explain.story.phrases import name_source
from stepscope.explain.story.sections.environment_facts import find_environment
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.explain.trace.profile_tables import say_graphs
from stepscope.findings import Soundness
from stepscope.recording.rows.bench import STEP_DOUBTS, Doubt
from stepscope.units import count_noun, say_percent, say_size, say_time

DISAGREE = 0.05  # between two peaks of memory, before it is mentioned
DISAGREE_MUCH = 0.15  # between two clocks of one step
NOISE = 0.05  # kernels may exceed the step time by this much, because the two were measured separately
WELL_KNOWN = 0.9  # of the kernel time; below it, the unknown part is mentioned
_FEWEST_LEFT = 3  # steps that count, if others were interrupted
_UNEVEN = 0.25  # of the median, in the middle 60% of profiled steps


def judge(opening: Opening) -> Soundness:
    materials = opening.materials
    doubts = tuple(dict.fromkeys(_doubts(opening)))
    details = tuple(dict.fromkeys((*doubts, *_remarks(opening))))
    if doubts:
        more = f"; {count_noun(len(doubts) - 1, 'more reason')}" if len(doubts) > 1 else ""
        return Soundness(verdict="doubtful", sentence=f"{doubts[0][0].upper()}{doubts[0][1:]}{more}.", details=details)
    if _is_empty(materials):
        return Soundness(verdict="unknown", sentence="Nothing was measured.", details=details)
    if materials.out_of_memory is not None and materials.profile is None:
        return Soundness(verdict="sound", sentence=_say_moment(materials.out_of_memory), details=details)
    if not _knows_circumstances(materials):
        said = "The file does not record other processes or clock throttling."
        return Soundness(verdict="unknown", sentence=said, details=details)
    return Soundness(verdict="sound", sentence=_say_sound(opening), details=details)


def _say_moment(oom: MemoryFailure) -> str:
    if oom.facts.total_bytes is not None:
        return "The snapshot was taken when the request failed, before anything was freed."
    return "The memory at the failed request is that of the allocator's history."


def _is_empty(materials: Materials) -> bool:
    parts = (materials.profile, materials.memory, materials.precision)
    return not materials.bench and not materials.attention and all(part is None for part in parts)


def _knows_circumstances(materials: Materials) -> bool:
    recordings = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    return all(manifest.environment is not None for manifest in recordings)


def _say_sound(opening: Opening) -> str:
    samples = [float(one) for one in opening.materials.step_samples]
    if not samples:
        return "No disturbance detected."
    kind = {"bench": "", "unprofiled": "unprofiled ", "profiled": "profiled "}[opening.materials.timed_by]
    profile = opening.materials.profile
    is_disturbed = profile is not None and profile.extent.interruption
    return (
        f"{count_noun(len(samples), f'{kind}step')} timed, p20 to p80 within {say_percent(summarise(samples).spread)} "
        f"of the median, {'interrupted steps left out' if is_disturbed else 'no disturbance detected'}."
    )


# --- Doubts -----------------------------------------------------------------------------------------------------------


def _doubts(opening: Opening) -> Iterator[str]:
    """One line per reason, the timing of the run first."""
    materials = opening.materials
    for name, case in find_strangers(materials).items():
        yield f"the {name} belongs to another run: {describe_case(case)}"
    own = [doubt for row in materials.bench[:1] for doubt in row.doubts]
    yield from _say_doubts(own, _name_bench(materials))
    # A profile's doubts are about the steps that were timed before profiling.
    for one, when in ((materials.profile, "unprofiled steps"), (materials.memory, "while recording memory")):
        if one is not None:
            yield from _say_doubts(one.recording.manifest.doubts, f"{when}: ")
    yield from _interrupted_steps(materials)
    yield from _few_profiled_steps(materials)
    yield from _kernels_beyond_step(materials)
    yield from _disagreeing_clocks(materials)
    yield from _allocator(materials)
    if opening.case is None and materials.profile is None and materials.memory is None:
        yield from _attention(materials, besides=STEP_DOUBTS)


def _name_bench(materials: Materials) -> str:
    """What comes before a remark about `bench` if the page's step is another one."""
    return "bench, in a separate run: " if materials.clock is not None else ""


def _say_doubts(doubts: Sequence[Doubt], when: str) -> Iterator[str]:
    yield from (f"{when}{doubt.text}" for doubt in doubts if doubt.code not in STEP_DOUBTS)


def _interrupted_steps(materials: Materials) -> Iterator[str]:
    """Too few steps are left to say that only those which do not count were interrupted."""
    profile = materials.profile
    if profile is not None and profile.extent.interruption and profile.num_steps < _FEWEST_LEFT:
        yield profile.extent.interruption


def _few_profiled_steps(materials: Materials) -> Iterator[str]:
    """A script's own steps differ, and a few of them are recorded."""
    profile, samples = materials.profile, [float(one) for one in materials.step_samples]
    if profile is None or profile.recording.manifest.loop is None or materials.timed_by != "profiled" or not samples:
        return
    spread = summarise(samples).spread
    if len(samples) == 1:
        yield "only one profiled step counts" if profile.extent.interruption else "only one profiled step was recorded"
    elif spread > _UNEVEN:
        yield f"the middle 60% of profiled steps spread over {say_percent(spread)} of the median"


def _kernels_beyond_step(materials: Materials) -> Iterator[str]:
    """The kernels of a step cannot take longer than the step. Never on a CPU, where profiling slows the operators
    themselves."""
    profile = materials.profile
    if profile is None or profile.on_cpu or not profile.has_steps:
        return
    clock = profile.clock
    if clock.unprofiled_ns is not None and clock.busy_ns > (1 + NOISE) * clock.unprofiled_ns:
        yield (
            f"unprofiled steps take {say_time(clock.unprofiled_ns)}, but the kernels of a profiled step take "
            f"{say_time(clock.busy_ns)}: all figures come from profiled steps"
        )


def _disagreeing_clocks(materials: Materials) -> Iterator[str]:
    """Compare the step time of `bench` with that of the page, if they are two."""
    timed, clock = materials.timed, materials.clock
    if timed is not None and clock is not None and _share_apart(timed, clock) >= DISAGREE_MUCH:
        yield (
            f"bench timed {say_time(timed.median * 1e6)} per step in a separate run, the recording "
            f"{say_time(clock.step_ns)}"
        )


def _share_apart(timed: Statistics, clock: Clock) -> float:
    return abs(timed.median * 1e6 - clock.step_ns) / max(1, clock.step_ns)


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
    yield from _unknown_relation(materials)
    yield from say_withheld(materials)
    yield from _timing(opening)
    yield from _recording(opening)
    yield from _memory(opening)
    for row in materials.bench[:1]:
        told = [doubt for doubt in row.doubts if doubt.code in STEP_DOUBTS]
        yield from (f"{_name_bench(materials)}{doubt.code}: {doubt.text}" for doubt in told)
    yield from materials.profile.notes if materials.profile else ()
    yield from materials.memory.recording.manifest.notes if materials.memory else ()
    environment = find_environment(materials)
    yield from limit_notes([environment] if environment else [])
    yield from _attention(materials)
    if "bench" in materials.absent:
        yield f"{materials.absent['bench'].what}: {materials.absent['bench'].why}"


def _unknown_relation(materials: Materials) -> Iterator[str]:
    """Users can combine any files. Settings, or the command that recorded both, tell whether they belong together."""
    if materials.profile is None or materials.memory is None:
        return
    time, memory = materials.profile.recording.manifest, materials.memory.recording.manifest
    is_known = (time.case is not None and memory.case is not None) or (time.command and time.command == memory.command)
    if not is_known:
        without = "memory snapshot" if memory.case is None else "trace"
        yield f"warning: the {without} has no settings: trace and snapshot may belong to different models"


def _attention(materials: Materials, besides: Sequence[str] = ()) -> Iterator[str]:
    counts = Counter(doubt.code for row in materials.attention for doubt in row.doubts)
    for code, count in counts.items():
        if code not in besides:
            yield f"attention: {DOUBTS.get(code, code)} ({count} of {len(materials.attention)} cases)"


def _timing(opening: Opening) -> Iterator[str]:
    """How `bench` timed the step: its median only if nothing else on the page says it."""
    materials = opening.materials
    row, timed = materials.timed_row, materials.timed
    if row is None or timed is None or row.measurement is None:
        return
    steps, warmup = len(row.measurement.step_ns), row.case.timing.warmup
    clock = "CUDA events" if row.measurement.clock == "cuda events" else "the CPU clock"
    low, high = say_time(timed.min * 1e6), say_time(timed.max * 1e6)
    said = (
        f"{count_noun(steps, 'step')} timed with {clock} after {count_noun(warmup, 'warm-up step')}: {low} to {high}, "
        f"p20 to p80 spread {say_percent(timed.spread)}"
    )
    if materials.clock is None:
        yield said
        return
    is_told = _share_apart(timed, materials.clock) >= DISAGREE_MUCH
    median = "" if is_told else f"median {say_time(timed.median * 1e6)}, "
    phases = row.measurement.phases_ns
    parts = [f"{name} {say_time(summarise(phases[name]).median)}" for name in PHASES if phases.get(name)]
    yield f"bench, in a separate run: {median}{'; '.join((said, ', '.join(parts)) if len(parts) > 1 else (said,))}"


def _recording(opening: Opening) -> Iterator[str]:
    profile = opening.materials.profile
    if profile is None:
        return
    manifest = profile.recording.manifest
    if profile.has_steps:
        yield f"{count_noun(profile.num_steps, 'step')} recorded with {name_source(manifest)}{_say_range(profile)}"
        yield from _say_clocks(profile.clock)
    else:
        yield f"recorded with {name_source(manifest)}; no steps are marked"
    covered = profile.coverage()
    said = [f"{name} {say_percent(share)}" for name, share in covered.items()]
    said += [f"layer {say_percent(profile.layer_share)}"] if profile.layer_share else []
    yield f"{kernel_word(profile)} time attributed: {', '.join(said)}"
    yield from [told] if (told := say_graphs(profile)) else []
    weak = [name for name, share in covered.items() if 0 < share < WELL_KNOWN]
    if weak:
        yield f"the rest has an unknown {' and '.join(weak)}"


def _say_range(profile: Profile) -> str:
    """The shortest and the longest step on the device."""
    lengths = [float(one) for one in profile.clock.profiled_steps]
    if len(lengths) < 2:
        return ""
    return f", {say_time(min(lengths))} to {say_time(max(lengths))}"


def _say_clocks(clock: Clock) -> Iterator[str]:
    """The recording's other clock, and why it is not the page's."""
    if clock.unprofiled_ns is None:
        return
    unprofiled, profiled = say_time(clock.unprofiled_ns), say_time(clock.profiled_ns)
    times = f"a step takes {unprofiled} unprofiled and {profiled} profiled"
    if clock.kind == "unprofiled":
        yield f"{times}; step and idle time are those of unprofiled steps"
    elif clock.unprofiled_ns < clock.busy_ns:
        yield f"{times}; all times are those of profiled steps: their kernels do not fit into an unprofiled one"
    else:
        yield f"{times}; all times are those of profiled steps: unprofiled ones are not clearly faster"


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
