"""The first screen: what ran, the headline, and the few numbers that matter."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from stepscope.explain.experiments.bench_tables import mfu_of
from stepscope.explain.experiments.cases import say_extras
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.memory.out_of_memory import say_failure
from stepscope.explain.model_names import describe_model, name_model
from stepscope.explain.ranks.matching import rank_numbers
from stepscope.explain.ranks.rank_tables import label_ranks, say_others
from stepscope.explain.statistics import summarise
from stepscope.explain.story.bounds import Shares
from stepscope.explain.story.commands import find_case, find_strangers
from stepscope.explain.story.phrases import name_step, say_started
from stepscope.explain.story.script import find_loop, find_model_class, name_script, say_passes
from stepscope.explain.story.sections.environment_facts import find_environment, find_started
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.profile import kernel_word
from stepscope.explain.trace.roofline import measure_use
from stepscope.explain.trace.run_labels import find_torch
from stepscope.findings import Fact
from stepscope.recording.rows.bench import NO_SIZES, ConfigSizes
from stepscope.spec import Case, HuggingFace, ModelShape
from stepscope.units import clip, count_noun, say_list, say_percent, say_size, say_time

_MS = 1e6
MOST_HEADLINE = 140  # characters: two lines of a page
_MOST_TITLE = 90
SEPARATOR = " · "  # of the parts of a subtitle
_MOST_FILE, _MOST_DEVICE = 60, 30  # characters of their names
# A late rank is in the headline from this share of the step on, if it causes most of the waiting.
_LATE_ENOUGH, _MOSTLY = 0.05, 0.5


@dataclass(frozen=True)
class Opening:
    """The headline figures of one run; None if unknown."""

    materials: Materials

    @cached_property
    def case(self) -> Case | None:
        return find_case(self.materials)

    @property
    def shares(self) -> Shares | None:
        """Shares of the page's step, or of the whole recording if it marks no steps. None for another run's profile."""
        materials = self.materials
        return materials.shares if materials.clock is not None or materials.step_ns is None else None

    @property
    def step_ns(self) -> float | None:
        return self.materials.step_ns

    @property
    def trace_ns(self) -> float | None:
        """The length of a trace without marked steps; None if its kernels ran one at a time."""
        if self.step_ns is not None or self.shares is None or self.shares.profile.is_serialized:
            return None
        return self.shares.profile.clock.step_ns

    @cached_property
    def peak_bytes(self) -> int | None:
        row = self.materials.timed_row
        timed = row.measurement.peak_bytes if row and row.measurement else None
        memory = self.materials.memory
        if memory is None or (timed is not None and "memory" in find_strangers(self.materials)):
            return timed
        return memory.peak_bytes

    @property
    def is_of_process(self) -> bool:
        """Whether the peak counts all memory of the process rather than what an allocator handed out."""
        row, memory = self.materials.timed_row, self.materials.memory
        if row is None or row.measurement is None or (memory is not None and memory.peak_bytes == self.peak_bytes):
            return False
        return row.measurement.peak_kind == "rss above start"

    @cached_property
    def parameters(self) -> int | None:
        rows = [row.measurement.parameters for row in self.materials.bench if row.measurement is not None]
        recorded = (self.materials.profile, self.materials.memory)
        counts = [one.recording.manifest.parameters for one in recorded if one is not None]
        return next((count for count in (*rows, *counts) if count), None)

    @cached_property
    def sizes(self) -> ConfigSizes:
        """The sizes in the model's config. Recordings of earlier versions lack them; the layers of a `transformers`
        model can then be counted in the trace. Other models may number anything."""
        rows = [row.measurement.sizes for row in self.materials.bench if row.measurement is not None]
        profile = self.materials.profile
        known = [*rows, *([profile.recording.manifest.sizes] if profile else [])]
        if found := [sizes for sizes in known if sizes != NO_SIZES]:
            return found[0]
        if profile is None or self.case is None or not isinstance(self.case.workload.model, HuggingFace):
            return NO_SIZES
        return ConfigSizes(num_layers=profile.kernels["layer"].drop_nulls().n_unique() or None)

    @cached_property
    def mfu(self) -> tuple[float, str] | None:
        """The share of the peak, and the precision of that peak."""
        profile, row, step_ns = self.materials.profile, self.materials.timed_row, self.step_ns
        if profile is not None and self.materials.clock is not None:
            use = measure_use(profile)
            if use is not None and use.mfu is not None and use.precision:
                return use.mfu, use.precision
        share, timed = mfu_of(row) if row else None, self.materials.timed
        if row is None or share is None or timed is None or not step_ns:
            return None
        return share * timed.median * _MS / step_ns, row.case.workload.precision


# --- Title and subtitle -----------------------------------------------------------------------------------------------


def title_of(materials: Materials) -> str:
    case = find_case(materials)
    if case is None and materials.out_of_memory is not None:
        script = materials.out_of_memory.facts.script or materials.name
        return f"{clip(script, _MOST_FILE)}: out of memory"
    if case is None:
        return clip(_title_script(materials) or _count_ranks(materials) or materials.name, _MOST_TITLE)
    workload = case.workload
    words = (f"{name_model(workload.model)}: {name_step(workload)}", workload.precision, *say_extras(workload))
    return clip(", ".join(words), _MOST_TITLE)


def _title_script(materials: Materials) -> str:
    """Return `train.py: GPT, training step, 4 ranks`; empty if the run is not a script."""
    loop = find_loop(materials)
    if loop is None:
        return ""
    passes = loop.backwards_per_step
    micro = f"{say_passes(loop)} per step" if passes > 1 else ""
    words = (find_model_class(materials), "training step", micro, _count_ranks(materials))
    return f"{loop.script}: {', '.join(word for word in words if word)}"


def subtitle_of(materials: Materials) -> str:
    """The rank if there are several, the device, the PyTorch version and the start time, as far as they are known."""
    device, torch = "", ""
    for one in (materials.profile, materials.memory):
        if one is not None:
            manifest = one.recording.manifest
            facts = manifest.memory
            device = device or manifest.device or (facts.device if facts else "")
            torch = torch or find_torch(manifest)
    environment = find_environment(materials)
    rank = f"{name_rank(materials)} of {len(materials.ranks)} recorded ranks" if len(materials.ranks) > 1 else ""
    if environment is not None:
        device, torch = environment.driver_name, environment.torch
    words = [
        rank,
        device,
        f"PyTorch {torch}" if torch else "",
        say_started(find_started(materials)),
    ]
    return SEPARATOR.join(word for word in words if word)


def name_rank(materials: Materials) -> str:
    """The rank whose figures the page shows; empty for a single one."""
    if len(materials.ranks) < 2:
        return ""
    return label_ranks(materials.ranks)[materials.shown]


def _count_ranks(materials: Materials) -> str:
    """Return `4 of 8 ranks`; empty for a single one."""
    count = len(materials.ranks)
    if count < 2:
        return ""
    world = materials.ranks[0].manifest.world_size
    if rank_numbers(materials.ranks) is None:
        return f"{count} recordings"
    return f"{count} of {world} ranks" if world not in (None, count) else f"{count} ranks"


# --- The headline -----------------------------------------------------------------------------------------------------


def say_run(opening: Opening) -> str:
    """The model, its step time and the one thing that matters, in at most `MOST_HEADLINE` characters."""
    said = say_what_matters(opening)
    for name in _name_run(opening):
        if len(f"{name}: {said}.") <= MOST_HEADLINE:
            return f"{name}: {said}."
    return f"{clip(said[0].upper() + said[1:], MOST_HEADLINE - 1)}."


def _name_run(opening: Opening) -> tuple[str, ...]:
    """Names for the run, the longest first."""
    if opening.materials.out_of_memory is not None:
        return ()  # the headline names the line
    if opening.case is None:
        ranks = _count_ranks(opening.materials)
        script = [clip(name, _MOST_FILE) for name in name_script(opening.materials)]
        together = tuple(f"{name}, {ranks}" if ranks else name for name in script)
        return together or (ranks or clip(opening.materials.name, _MOST_FILE),)
    model = opening.case.workload.model
    return describe_model(model, parameters=opening.parameters, sizes=opening.sizes), name_model(model)


def say_what_matters(opening: Opening) -> str:
    """The headline without the model."""
    materials = opening.materials
    if materials.out_of_memory is not None:
        return say_failure(materials.out_of_memory)
    failed = _say_failure(materials)
    if failed:
        return failed
    if opening.step_ns is not None:
        rank = name_rank(materials)
        step = f"{say_time(opening.step_ns)} per {_name_step(opening)}{f' on {rank}' if rank else ''}"
        if opening.shares is not None:
            return f"{step}; {_say_late_rank(materials) or opening.shares.say_bound()}"
        return f"{step} at {say_percent(opening.mfu[0])} MFU" if opening.mfu else step
    if opening.shares is not None:
        return _say_stretch(opening.shares)
    if materials.memory is not None:
        return f"peak memory {say_peak(materials.memory)}"
    if materials.precision is not None:
        runs = [run.precision for run in materials.precision.comparison.runs]
        where = clip(materials.precision.environment.driver_name, _MOST_DEVICE)
        return f"{say_list(runs)} compared with float64 on {where}; no step was timed"
    if materials.attention:
        where = clip(materials.attention[0].environment.driver_name, _MOST_DEVICE)
        return f"{count_noun(len(materials.attention), 'attention case')} on {where}; no step was timed"
    if materials.plan is not None:
        return f"nothing was measured; predicted peak memory {say_size(materials.plan.start.peak_allocated_bytes)}"
    return "nothing was measured"


def _say_late_rank(materials: Materials) -> str:
    """Which rank the others wait for, if that matters and it is mostly the same one."""
    times, profile = materials.rank_times, materials.profile
    if times is None or times.straggler is None or profile is None or times.straggler.share <= _MOSTLY:
        return ""
    late = times.straggler.lateness
    caused_ns = late.per_step(late.caused_ns)
    if caused_ns < _LATE_ENOUGH * profile.clock.step_ns:
        return ""
    label = label_ranks(materials.ranks)[times.lateness.index(late)]
    return f"{say_others(times, late, 'wait')} {say_time(caused_ns)} for {label}"


def _say_failure(materials: Materials) -> str:
    if not materials.bench or materials.bench[0].measurement is not None:
        return ""
    row = materials.bench[0]
    where = clip(row.environment.driver_name, _MOST_DEVICE)
    if row.status == "oom":
        return f"out of memory on {where}"
    return f"the {name_step(row.case.workload)} failed on {where} ({row.status})"


def _name_step(opening: Opening) -> str:
    if opening.case is not None:
        return name_step(opening.case.workload)
    profile = opening.materials.profile
    assert profile is not None, "without a case, the step time comes from the profile"
    return "training step" if (profile.kernels["phase"] == "backward").any() else "step"


def _say_stretch(shares: Shares) -> str:
    """For a recording without marked steps."""
    profile = shares.profile
    if profile.is_serialized:
        count = count_noun(profile.kernels.height, "kernel")
        took = f"{count}, {say_time(profile.gpu_time_ns)} in total, run one at a time by Nsight Compute"
    else:
        count = count_noun(profile.kernels.height, kernel_word(profile))
        took = f"{count} in {say_time(profile.wall_ns)}, no steps marked"
    return f"{took}; {shares.say_bound()}"


def say_peak(memory: MemoryProfile) -> str:
    """Return `2.77 GiB, first reached in backward of step 2, 48% of it activations`."""
    summary = memory.summary
    step = f" of step {summary.peak_step + 1}" if summary.peak_step is not None else ""
    first = "first " if step else ""
    where = f", {first}reached in {summary.peak_phase}{step}" if summary.peak_phase else ""
    largest = max(summary.categories, key=lambda one: one.bytes)
    share = largest.bytes / summary.peak_bytes if summary.peak_bytes else 0.0
    return f"{say_size(summary.peak_bytes)}{where}, {say_percent(share)} of it {largest.category}"


# --- Facts ------------------------------------------------------------------------------------------------------------


def list_facts(opening: Opening) -> tuple[Fact, ...]:
    """Those of one rank name it."""
    found = (
        *_out_of_memory(opening),
        _step(opening),
        _memory(opening),
        _bound(opening),
        _mfu(opening),
        _busy(opening),
        _tokens(opening),
    )
    rank = name_rank(opening.materials)
    return tuple(
        msgspec.structs.replace(fact, note=f"{fact.note}; {rank}") if rank else fact
        for fact in found
        if fact is not None
    )


def _out_of_memory(opening: Opening) -> Iterator[Fact]:
    oom = opening.materials.out_of_memory
    if oom is None:
        return
    where = f"{oom.phase}, {oom.place}" if oom.phase and oom.place else oom.phase or oom.place
    yield Fact(key="asked", label="asked for", value=oom.facts.asked_bytes, kind="bytes", note=where)
    yield Fact(key="free", label="free", value=oom.room_bytes, kind="bytes", note="that CUDA could still give")
    yield Fact(key="held", label="held by tensors", value=oom.held_bytes, kind="bytes", note="when the request failed")


def _step(opening: Opening) -> Fact | None:
    materials = opening.materials
    if opening.step_ns is not None:
        note = _say_samples(materials)
        return Fact(key="step", label="step time", value=opening.step_ns / _MS, kind="ms", note=note)
    profile = materials.profile
    if profile is None:
        return None
    note = "kernels run one at a time" if profile.is_serialized else "no steps marked"
    return Fact(key="step", label="trace length", value=profile.wall_ns / _MS, kind="ms", note=note)


def _say_samples(materials: Materials) -> str:
    """What the step time is the mean or median of."""
    steps = len(materials.step_samples)
    if materials.timed_by == "profiled":
        return f"mean of {steps} profiled steps" if steps > 1 else "one profiled step"
    word = "unprofiled step" if materials.timed_by == "unprofiled" else "step"
    if steps <= 1:
        return f"one {word}" if steps else f"median of {word}s"
    middle = summarise([float(one) for one in materials.step_samples])
    return f"median of {steps} {word}s; p20 to p80: {say_time(middle.p20)} to {say_time(middle.p80)}"


def _memory(opening: Opening) -> Fact | None:
    if opening.peak_bytes is None:
        return None
    memory = opening.materials.memory
    if memory is not None and memory.peak_bytes == opening.peak_bytes:
        _, phase = memory.place_of(memory.peak_event)
        note = f"allocated, in {phase}" if phase else "allocated"
    else:
        note = "growth of the process since it started" if opening.is_of_process else "allocated"
    return Fact(key="memory", label="peak memory", value=opening.peak_bytes, kind="bytes", note=note)


def _bound(opening: Opening) -> Fact | None:
    if opening.shares is None:
        return None
    bound = opening.shares.bound
    if bound.is_of_kernels:
        of = "the operator time" if opening.shares.profile.on_cpu else "the kernel time"
    else:
        of = opening.shares.profile.clock.say_of_step.removeprefix("of ")
    label = "most time in" if bound.limit == "class" else "bound by"
    return Fact(key="bound", label=label, value=bound.label, note=f"{say_percent(bound.share)} of {of}")


def _mfu(opening: Opening) -> Fact | None:
    if opening.mfu is None:
        return None
    share, precision = opening.mfu
    profile = opening.materials.profile
    hardware = profile.hardware if profile is not None else None
    measured = hardware.peak_flops.get(precision) if hardware is not None and hardware.source == "measured" else None
    # A measured peak is lower while other processes run, and the share of it higher.
    peak = f"measured {precision} peak, {measured / 1e12:.3g} TFLOP/s" if measured else f"{precision} peak"
    return Fact(key="mfu", label="MFU", value=share, kind="share", note=f"of the {peak}")


def _busy(opening: Opening) -> Fact | None:
    shares = opening.shares
    if shares is None or not shares.profile.has_gaps:
        return None
    note = shares.profile.clock.say_of_step
    return Fact(key="busy", label="GPU busy", value=1 - shares.idle, kind="share", note=note)


def _tokens(opening: Opening) -> Fact | None:
    case, row = opening.case, opening.materials.timed_row
    if case is None or not opening.step_ns:
        return None
    has_tokens = row.measurement.has_tokens if row and row.measurement else isinstance(case.workload.model, ModelShape)
    if not has_tokens:
        return None
    return Fact(
        key="tokens",
        label="tokens per second",
        value=round(case.workload.tokens / opening.step_ns * 1e9),
        kind="count",
        note=f"{case.workload.tokens:,} per step",
    )
