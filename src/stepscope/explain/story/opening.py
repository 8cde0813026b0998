"""The first screen: what ran, the step in one sentence, and the few numbers that matter."""

from dataclasses import dataclass
from functools import cached_property

from stepscope.explain.experiments.bench_tables import mfu_of, step_ms, tokens_per_s
from stepscope.explain.experiments.cases import say_extras
from stepscope.explain.memory import MemoryProfile
from stepscope.explain.questions.answers import say_list
from stepscope.explain.statistics import Statistics
from stepscope.explain.story.bounds import Shares
from stepscope.explain.story.commands import find_case, find_strangers
from stepscope.explain.story.phrases import find_torch, name_model, name_step, say_started, with_article
from stepscope.explain.story.sections.environment_facts import find_environment
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.roofline import measure_use
from stepscope.findings import Fact
from stepscope.recording.rows.bench import BenchRow
from stepscope.spec import Case, ModelShape
from stepscope.units import say_percent, say_size, say_time

_MS = 1e6


@dataclass(frozen=True)
class Opening:
    """The headline figures of one run. None is what is not known."""

    materials: Materials

    @cached_property
    def case(self) -> Case | None:
        return find_case(self.materials)

    @cached_property
    def row(self) -> BenchRow | None:
        """The timed row that the page's step is taken from."""
        return self.materials.row

    @property
    def shares(self) -> Shares | None:
        """Of the page's step; of the whole recording where there is no step. A profile of another run has none here."""
        materials = self.materials
        return materials.shares if materials.is_profile_of_step or materials.step_ns is None else None

    @cached_property
    def timed(self) -> Statistics | None:
        return step_ms(self.row) if self.row else None

    @property
    def step_ns(self) -> float | None:
        return self.materials.step_ns

    @cached_property
    def peak_bytes(self) -> int | None:
        row = self.materials.timed_row
        timed = row.measurement.peak_bytes if row and row.measurement else None
        memory = self.materials.memory
        if memory is None or (timed is not None and "memory" in find_strangers(self.materials)):
            return timed
        return memory.peak_bytes

    @cached_property
    def mfu(self) -> tuple[float, str] | None:
        """The share of the peak, and the precision whose peak it is."""
        if self.row is not None:
            share = mfu_of(self.row)
            return (share, self.row.case.workload.precision) if share is not None else None
        profile, step_ns = self.materials.profile, self.step_ns
        use = measure_use(profile, step_ns) if profile is not None and step_ns is not None else None
        return (use.mfu, use.precision) if use and use.mfu is not None and use.precision else None


# --- Title and subtitle -----------------------------------------------------------------------------------------------


def title_of(materials: Materials) -> str:
    case = find_case(materials)
    if case is None:
        return materials.name
    workload = case.workload
    return ", ".join((f"{workload.model.name}: {name_step(workload)}", workload.precision, *say_extras(workload)))


def subtitle_of(materials: Materials) -> str:
    """The device, PyTorch's version and when it ran, as far as they are known."""
    device, torch, started = "", "", ""
    for one in (materials.profile, materials.memory):
        if one is not None:
            manifest = one.recording.manifest
            facts = manifest.memory
            device = device or manifest.device or (facts.device if facts else "")
            torch = torch or find_torch(manifest)
            started = started or manifest.started
    environment = find_environment(materials)
    if environment is not None:
        device, torch = environment.driver_name, environment.torch
    for row in (*materials.bench[:1], *materials.attention[:1]):
        started = started or row.started
    started = started or (materials.precision.started if materials.precision else "")
    words = [device, f"PyTorch {torch}" if torch else "", say_started(started)]
    return " · ".join(word for word in words if word)


# --- The sentence -----------------------------------------------------------------------------------------------------


def say_run(opening: Opening) -> str:
    """The run in one sentence, of what is known and nothing else."""
    materials = opening.materials
    failed = _say_failure(materials)
    if failed:
        return failed
    if opening.step_ns is not None:
        return _say_step(opening, opening.step_ns)
    if opening.shares is not None:
        return _say_stretch(materials.name, opening.shares)
    if materials.memory is not None:
        return _say_memory(opening, materials.memory)
    if materials.precision is not None:
        runs = [run.precision for run in materials.precision.comparison.runs]
        where = materials.precision.environment.driver_name
        return (
            f"{name_model(materials.precision.case)} in {say_list(runs)} against float64 on {where}; no step was timed."
        )
    if materials.attention:
        cases, where = len(materials.attention), materials.attention[0].environment.driver_name
        return f"{cases:,} case{'s' * (cases != 1)} of attention alone on {where}; no step was timed."
    return f"Nothing was recorded of {materials.name}."


def _say_failure(materials: Materials) -> str:
    if not materials.bench or materials.bench[0].measurement is not None:
        return ""
    row = materials.bench[0]
    what = f"{with_article(name_step(row.case.workload))} of {name_model(row.case)}"
    how = "does not fit into memory" if row.status == "oom" else f"did not come to an end ({row.status})"
    return f"{what} {how} on {row.environment.driver_name}."


def _say_step(opening: Opening, step_ns: float) -> str:
    what = _name_step(opening)
    memory = f" and {say_size(opening.peak_bytes)}" if opening.peak_bytes else ""
    said = opening.shares.say_bound() if opening.shares else ""
    if opening.mfu is not None:
        share, precision = opening.mfu
        subject = ", which" if said.endswith("arithmetic") else f"{', and ' if said else ''}arithmetic"
        said += f"{subject} reaches {say_percent(share)} of the {precision} peak"
    return f"{what} takes {say_time(step_ns)}{memory}{f'; {said}' if said else ''}."


def _name_step(opening: Opening) -> str:
    if opening.case is not None:
        return f"{with_article(name_step(opening.case.workload))} of {name_model(opening.case)}"
    profile = opening.materials.profile
    assert profile is not None, "a run without a case has a step's time from its profile alone"
    trains = (profile.kernels["phase"] == "backward").any()
    return f"A {'training step' if trains else 'step'} of {opening.materials.name}"


def _say_stretch(name: str, shares: Shares) -> str:
    """Of a recording that marks no steps."""
    profile = shares.profile
    if profile.is_serialized:
        what = f"{profile.kernels.height:,} kernels take {say_time(profile.gpu_time_ns)}"
        return f"{name}: {what} one after another under Nsight Compute; {shares.say_bound()}."
    what = "operators" if profile.on_cpu else "kernels"
    said = shares.say_bound()
    return f"{name} marks no steps: {profile.kernels.height:,} {what} in {say_time(profile.wall_ns)}; {said}."


def _say_memory(opening: Opening, memory: MemoryProfile) -> str:
    if opening.case is not None:
        what = f"{with_article(name_step(opening.case.workload))} of {name_model(opening.case)}"
    else:
        what = opening.materials.name
    return f"{what} holds {say_peak(memory)}; how long a step takes is not recorded."


def say_peak(memory: MemoryProfile) -> str:
    """`2.77 GiB at its peak, first in backward of step 2, 48% of it activations`."""
    summary = memory.summary
    step = f" of step {summary.peak_step + 1}" if summary.peak_step is not None else ""
    first = "first " if step else ""
    where = f", {first}in {summary.peak_phase}{step}" if summary.peak_phase else ""
    largest = max(summary.categories, key=lambda one: one.bytes)
    share = largest.bytes / summary.peak_bytes if summary.peak_bytes else 0.0
    return f"{say_size(summary.peak_bytes)} at its peak{where}, {say_percent(share)} of it {largest.category}"


# --- Facts ------------------------------------------------------------------------------------------------------------


def list_facts(opening: Opening) -> tuple[Fact, ...]:
    found = (_step(opening), _memory(opening), _bound(opening), _mfu(opening), _busy(opening), _tokens(opening))
    return tuple(fact for fact in found if fact is not None)


def _step(opening: Opening) -> Fact | None:
    if opening.timed is not None and opening.row and opening.row.measurement:
        steps = len(opening.row.measurement.step_ns)
        low, high = (say_time(value * _MS) for value in (opening.timed.p20, opening.timed.p80))
        note = f"median of {steps} steps; middle 60%: {low} to {high}" if steps > 1 else "one step"
        return Fact(key="step", label="step", value=opening.timed.median, kind="ms", note=note)
    profile = opening.materials.profile
    if profile is None:
        return None
    if opening.step_ns is None:
        note = "kernels one after another" if profile.is_serialized else "the whole recording: it marks no steps"
        return Fact(key="step", label="recorded", value=profile.wall_ns / _MS, kind="ms", note=note)
    recorded = f"mean of {profile.num_steps} steps" if profile.num_steps > 1 else "one step"
    note = f"{recorded}, while recorded" if profile.clock.is_recorded else "median without the recorder"
    return Fact(key="step", label="step", value=opening.step_ns / _MS, kind="ms", note=note)


def _memory(opening: Opening) -> Fact | None:
    if opening.peak_bytes is None:
        return None
    memory, row = opening.materials.memory, opening.materials.timed_row
    if memory is not None and memory.peak_bytes == opening.peak_bytes:
        _, phase = memory.place_of(memory.peak_event)
        note = f"allocated at the peak, in {phase}" if phase else "allocated at the peak"
    else:
        of_process = row is not None and row.measurement is not None and row.measurement.peak_kind == "rss above start"
        note = "of the process, above its start" if of_process else "allocated at the peak"
    return Fact(key="memory", label="memory", value=opening.peak_bytes, kind="bytes", note=note)


def _bound(opening: Opening) -> Fact | None:
    if opening.shares is None:
        return None
    bound = opening.shares.bound
    if bound.is_of_kernels:
        of = "the operators' time" if opening.shares.profile.on_cpu else "the kernels' time"
    else:
        of = "the recording" if opening.step_ns is None else "the step"
    label = "most time" if bound.limit == "class" else "bound by"
    return Fact(key="bound", label=label, value=bound.label, note=f"{say_percent(bound.share)} of {of}")


def _mfu(opening: Opening) -> Fact | None:
    if opening.mfu is None:
        return None
    share, precision = opening.mfu
    return Fact(key="mfu", label="MFU", value=share, kind="share", note=f"arithmetic, of the {precision} peak")


def _busy(opening: Opening) -> Fact | None:
    shares = opening.shares
    if shares is None or not shares.profile.has_gaps:
        return None
    what = "some kernel runs" if opening.step_ns is None else "of the step some kernel runs"
    return Fact(key="busy", label="GPU busy", value=1 - shares.idle, kind="share", note=what)


def _tokens(opening: Opening) -> Fact | None:
    rate = tokens_per_s(opening.row) if opening.row else None
    case = opening.case
    is_builtin = case is not None and isinstance(case.workload.model, ModelShape)
    if opening.row is None and case is not None and is_builtin and opening.step_ns:
        rate = round(case.workload.tokens / opening.step_ns * 1e9)
    if rate is None or case is None:
        return None
    return Fact(
        key="tokens",
        label="tokens a second",
        value=rate,
        kind="count",
        note=f"{case.workload.tokens:,} a step",
    )
