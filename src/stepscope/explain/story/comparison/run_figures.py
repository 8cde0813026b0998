"""The figures of one run among many: what a row of the table of runs, and a point of the trend, needs.

A comparison of fifty runs cannot keep their kernels, so each run is reduced to this as soon as it is read.
"""

import statistics
from dataclasses import dataclass, field

from stepscope.explain.statistics import Statistics, summarise
from stepscope.explain.story.comparison.aligned_memory import find_peak
from stepscope.explain.story.comparison.changes import DECIDES_WORK, describe_settings
from stepscope.explain.story.comparison.side_by_side import identify_run
from stepscope.explain.story.opening import Opening, list_facts
from stepscope.explain.story.sections.environment_facts import find_environment, find_started
from stepscope.explain.story.sections.step_picture import draw_bar
from stepscope.explain.story.soundness import judge
from stepscope.explain.story.sources import Materials, StepTimes, share_peaks
from stepscope.explain.trace.run_labels import RunIdentity
from stepscope.findings import Cell, Soundness, StepBar


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run; None or empty for what is unknown. Times are nanoseconds per step, or of the whole trace if it marks no
    steps (`is_step`). `classes` and `phases` each add up to the step; the classes include idle time, under an empty
    name. `categories` are bytes at the peak."""

    identity: RunIdentity
    started: str = ""
    commit: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    step: StepTimes | None = None
    is_step: bool = True
    peak_bytes: int | None = None
    is_of_process: bool = False  # the peak counts all memory of the process
    facts: dict[str, Cell] = field(default_factory=dict)  # as at the top of a page, by key
    classes: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    soundness: Soundness
    profiler: str = ""  # what recorded its kernels
    doubts: tuple[str, ...] = ()  # about its unprofiled steps
    failure: str = ""  # the status of a case that did not finish

    @property
    def path(self) -> str:
        return self.identity.name

    @property
    def work(self) -> tuple[str, ...]:
        """What decides how much work a step is, wherever it runs, in the order of `DECIDES_WORK`."""
        return tuple(self.settings.get(name, "") for name in DECIDES_WORK if name != "device")

    @property
    def spread(self) -> Statistics | None:
        """Of the step times, in nanoseconds; None if too few were kept to have one."""
        samples = self.step.samples if self.step else ()
        return summarise([float(one) for one in samples]) if len(samples) > 1 else None


def reduce_run(materials: Materials) -> RunFigures:
    materials = share_peaks(materials)
    opening, profile, environment = Opening(materials), materials.profile, find_environment(materials)
    bar = draw_bar(profile) if profile is not None and not profile.is_serialized else None
    step = materials.step_times
    if step is None and bar is not None:
        step = StepTimes(step_ns=bar.step_ns, samples=(), timed_by="profiled", has_overhead=True)
    row = materials.bench[0] if materials.bench else None
    return RunFigures(
        identity=identify_run(materials),
        started=find_started(materials),
        commit=(environment.commit or "") if environment else "",
        settings=describe_settings(materials),
        step=step,
        is_step=materials.step_ns is not None,
        peak_bytes=opening.peak_bytes,
        is_of_process=opening.is_of_process,
        facts={fact.key: fact.value for fact in list_facts(opening)},
        classes=_sum_classes(bar) if bar else {},
        phases=_sum_phases(bar) if bar else _average_phases(materials),
        categories=find_peak(materials.memory) if materials.memory is not None else {},
        soundness=judge(opening),
        profiler=profile.recording.manifest.source if profile is not None else "",
        doubts=tuple(f"{one.text} ({one.code})" for one in profile.recording.manifest.doubts) if profile else (),
        failure=row.status if row is not None and row.measurement is None else "",
    )


def _sum_classes(bar: StepBar) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phase in bar.phases:
        for name, time in (*zip(phase.classes, phase.times_ns, strict=True), ("", phase.idle_ns)):
            sums[name] = sums.get(name, 0.0) + time
    return sums


def _sum_phases(bar: StepBar) -> dict[str, float]:
    return {phase.name: phase.busy_ns + phase.idle_ns for phase in bar.phases if phase.name}


def _average_phases(materials: Materials) -> dict[str, float]:
    """The phases of a timed case: means, because those add up."""
    row = materials.timed_row
    phases = row.measurement.phases_ns if row is not None and row.measurement is not None else {}
    return {name: statistics.fmean(samples) for name, samples in phases.items() if samples}
