"""What a step's time is bound by: the host, communication, arithmetic, memory traffic, or, where limits are not known,
the class of kernels that takes most.

Shares are of the step's wall time, and the largest names the bound. An operator is bound by whichever of its FLOPs and
its bytes needs longer at the device's limit (`trace.roofline`); that is known for those whose shapes were recorded.
Where it is not known for most of the kernels' time, nothing is said of limits.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import polars as pl

from stepscope.explain.questions.idle_gaps import BETWEEN_STEPS, HOST_LATE, SYNCHRONISING, find_gaps
from stepscope.explain.story.phrases import name_class, say_class_takes
from stepscope.explain.trace.profile import Profile
from stepscope.explain.trace.roofline import roofline
from stepscope.units import say_percent

Limit = Literal["host", "idle", "communication", "compute", "memory", "launch", "class"]
_KNOWN_ENOUGH = 0.5  # of the kernels' time, to speak of limits
_HOST_ENOUGH = 0.5  # of the idle time, to blame the host for it
WORTH_A_WORD = 0.2  # of the step, for idle time that is not the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """`share` is of the step's wall time, or of the kernels' time where `is_of_kernels`."""

    limit: Limit
    share: float
    kernel_class: str = ""
    is_of_kernels: bool = False

    @property
    def label(self) -> str:
        """In two or three words, for a fact."""
        match self.limit:
            case "host":
                return "the host"
            case "idle":
                return "idle time"
            case "communication":
                return "communication"
            case "compute":
                return "arithmetic"
            case "memory":
                return "memory traffic"
            case "launch":
                return "kernels too small"
            case "class":
                return name_class(self.kernel_class)


@dataclass(frozen=True)
class Shares:
    """Where a step's wall time goes, as far as it matters for what bounds it."""

    profile: Profile
    step_ns: float  # the wall time that shares are of

    @property
    def idle(self) -> float:
        return self.profile.clock.idle_share_of(self.step_ns) if self.profile.has_gaps else 0.0

    @cached_property
    def waits_for_host(self) -> bool:
        """Whether most of the idle time ends with a launch that came late."""
        gaps = find_gaps(self.profile)
        late = gaps.filter(pl.col("cause").is_in([HOST_LATE, SYNCHRONISING, BETWEEN_STEPS]))
        return int(late["time_ns"].sum()) > _HOST_ENOUGH * int(gaps["time_ns"].sum())

    @cached_property
    def communication(self) -> float:
        """Communication that runs alone, mean over devices."""
        exposed = sum(one.whole.communication_exposed_ns for one in self.profile.devices)
        return min(1.0, exposed / self._wall_ns)

    @property
    def _wall_ns(self) -> float:
        """Of all devices together."""
        return max(1.0, self.step_ns * self.profile.steps_in_window * len(self.profile.devices))

    @cached_property
    def limits(self) -> dict[str, float]:
        """Of the kernels' time: compute, memory, launch; what is missing from one is not known."""
        frame = roofline(self.profile).filter(pl.col("bound") != "unknown")
        sums = frame.group_by("bound").agg(pl.col("time_ns").sum()).iter_rows()
        return {bound: time / max(1, self.profile.gpu_time_ns) for bound, time in sums}

    @cached_property
    def bound(self) -> StepBound:
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
        """The class that takes most, by the time in which it runs alone; by its kernels' time where wall time means
        nothing."""
        if not self.profile.has_gaps:
            row = self.profile.time_by("class").row(0, named=True)
            return StepBound(limit="class", share=row["share"], kernel_class=row["class"], is_of_kernels=True)
        alone: Counter[str] = Counter()
        for device in self.profile.devices:
            alone.update(device.whole.classes)
        name, time = alone.most_common(1)[0]
        return StepBound(limit="class", share=min(1.0, time / self._wall_ns), kernel_class=name)

    def say_bound(self) -> str:
        """A clause after `takes 60.9 ms;`: what `it` is spent on."""
        bound, profile = self.bound, self.profile
        share = say_percent(bound.share)
        match bound.limit:
            case "host":
                return f"the GPU waits for the host {share} of it"
            case "idle":
                return f"the GPU is idle {share} of it"
            case "communication":
                said = f"communication that nothing hides takes {share} of it"
            case "compute":
                said = f"{share} of it goes to operators bound by arithmetic"
            case "memory":
                said = f"{share} of it goes to operators bound by memory traffic"
            case "launch":
                said = f"{share} of it goes to kernels too small to fill the GPU"
            case "class" if bound.is_of_kernels:
                what = "operators'" if profile.on_cpu else "kernels'"
                said = f"{say_class_takes(bound.kernel_class)} {share} of the {what} time"
            case "class":
                said = f"{say_class_takes(bound.kernel_class)} {share} of it"
        if self.idle < WORTH_A_WORD:
            return said
        waits = "waits for the host" if self.waits_for_host else "is idle"
        return f"{said}, the GPU {waits} {say_percent(self.idle)}"
