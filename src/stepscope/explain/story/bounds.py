"""What limits a step: the CPU, communication, compute, memory bandwidth or, if the device's limits are unknown, the
kernel class that takes the most time. If the first finding is about input or copies that take much of the step, these
are the limit: a headline must not name something else than the first card.

Shares refer to the step's wall time, and the largest one names the bound. An operator is bound by its FLOPs or its
bytes, whichever needs longer at the device's limit (`trace.roofline`); this is known for operators whose shapes were
recorded. If it is unknown for most of the kernel time, no limit is named.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import polars as pl

from stepscope.explain.questions.idle_gaps import BETWEEN_STEPS, HOST_LATE, SYNCHRONISING, find_gaps
from stepscope.explain.rules.joint import leads
from stepscope.explain.story.phrases import name_class, say_class_takes
from stepscope.explain.story.sections.step_picture import draw_bar
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.explain.trace.roofline import roofline
from stepscope.findings import Finding
from stepscope.units import say_percent

Limit = Literal["input", "copies", "host", "idle", "communication", "compute", "memory", "launch", "class"]
_KNOWN_ENOUGH = 0.5  # of the kernel time, to name a limit
_HOST_ENOUGH = 0.5  # of the idle time, to call the step CPU-bound
_FOUND: dict[str, Limit] = {"SS012": "input", "SS020": "copies"}  # what findings are about that no share here knows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """`share` refers to the step's wall time, or to the kernel time if `is_of_kernels`."""

    limit: Limit
    share: float
    kernel_class: str = ""
    is_of_kernels: bool = False

    @property
    def label(self) -> str:
        """One or two words, for a tile."""
        match self.limit:
            case "input":
                return "input"
            case "copies":
                return "copies"
            case "host":
                return "CPU"
            case "idle":
                return "idle time"
            case "communication":
                return "communication"
            case "compute":
                return "compute"
            case "memory":
                return "memory bandwidth"
            case "launch":
                return "launch latency"
            case "class":
                return name_class(self.kernel_class)


@dataclass(frozen=True)
class Shares:
    """The shares of a step's time that decide its bound, by the profile's clock, and the first finding of the page."""

    profile: Profile
    first: Finding | None = None

    @property
    def idle(self) -> float:
        return self.profile.clock.idle_share if self.profile.has_gaps else 0.0

    @cached_property
    def waits_for_host(self) -> bool:
        """Whether most of the idle time ends with a late kernel launch."""
        gaps = find_gaps(self.profile)
        late = gaps.filter(pl.col("cause").is_in([HOST_LATE, SYNCHRONISING, BETWEEN_STEPS]))
        return int(late["time_ns"].sum()) > _HOST_ENOUGH * int(gaps["time_ns"].sum())

    @cached_property
    def communication(self) -> float:
        """Exposed communication, mean over devices."""
        exposed = sum(one.whole.communication_exposed_ns for one in self.profile.devices)
        return min(1.0, exposed / self._wall_ns)

    @property
    def _wall_ns(self) -> float:
        """Summed over all devices."""
        return max(1.0, self.profile.step_ns * self.profile.num_steps * len(self.profile.devices))

    @cached_property
    def limits(self) -> dict[str, float]:
        """Shares of the kernel time by limit: compute, memory, launch. What they leave of 1 is unknown."""
        frame = roofline(self.profile).filter(pl.col("bound") != "unknown")
        sums = frame.group_by("bound", maintain_order=True).agg(pl.col("time_ns").sum()).iter_rows()
        return {bound: time / max(1, self.profile.gpu_time_ns) for bound, time in sums}

    @cached_property
    def bound(self) -> StepBound:
        if self.first is not None and self.first.code in _FOUND and leads(self.first):
            return StepBound(limit=_FOUND[self.first.code], share=self.first.about or 0.0)
        busy = 1 - self.idle
        found = [StepBound(limit="host", share=self.idle), StepBound(limit="communication", share=self.communication)]
        if sum(self.limits.values()) >= _KNOWN_ENOUGH:
            names: tuple[Limit, ...] = ("compute", "memory", "launch")
            found += [StepBound(limit=name, share=busy * self.limits.get(name, 0.0)) for name in names]
        else:
            found.append(self._find_class())
        bound = max(found, key=lambda one: one.share)
        if bound.limit == "host" and not self.waits_for_host:
            return StepBound(limit="idle", share=bound.share)
        return bound

    def _find_class(self) -> StepBound:
        """The class that takes most of the step as the picture shows it, or most kernel time without a usable wall
        time."""
        if not self.profile.has_gaps:
            row = self.profile.time_by("class").row(0, named=True)
            return StepBound(limit="class", share=row["share"], kernel_class=row["class"], is_of_kernels=True)
        bar = draw_bar(self.profile)
        times: dict[str, float] = {}
        for phase in bar.phases:
            for name, time_ns in zip(phase.classes, phase.times_ns, strict=True):
                times[name] = times.get(name, 0.0) + time_ns
        most = max(times, key=lambda name: times[name])
        return StepBound(limit="class", share=min(1.0, times[most] / max(1.0, bar.step_ns)), kernel_class=most)

    def say_bound(self) -> str:
        """A clause that follows `38 ms per training step; `."""
        bound, profile = self.bound, self.profile
        share = say_percent(bound.share)
        match bound.limit:
            case "input" if profile.on_cpu:
                return f"loading input takes {share} of it"
            case "input":
                return f"the GPU waits for input {share} of the time"
            case "copies":
                return f"copies between CPU and GPU take {share} of it"
            case "host":
                return f"the GPU waits for the CPU {share} of the time"
            case "idle":
                return f"the GPU is idle {share} of the time"
            case "communication":
                return f"exposed communication takes {share} of it"
            case "compute":
                return f"compute-bound operators take {share} of it"
            case "memory":
                return f"memory-bound operators take {share} of it"
            case "launch":
                return f"kernels too small to fill the GPU take {share} of it"
            case "class" if bound.is_of_kernels:
                what = kernel_word(profile)
                return f"{say_class_takes(bound.kernel_class)} {share} of the {what} time"
            case "class":
                return f"{say_class_takes(bound.kernel_class)} {share} of it"
