"""The parts of a report that show several runs on one scale: two steps and two memory timelines, place by place, and
many runs as a trend.

All times and sizes are whole nanoseconds and bytes, and those of a run add up to its step, or to its allocated memory.
"""

from typing import Literal

import msgspec


class PlaceTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one run does at a place, per step: the time of each kernel class, the longest first, and idle time."""

    classes: tuple[str, ...] = ()
    times_ns: tuple[int, ...] = ()
    idle_ns: int = 0

    @property
    def total_ns(self) -> int:
        return sum(self.times_ns) + self.idle_ns


class StepPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the steps of two runs: a part of a layer in one phase. Outside layers, `layer` is empty; `part` is
    empty for the rest of a layer, or if only the phase is known. A run that has nothing there takes no time.

    `verdict` is as in a table of changes: slower, faster, noise, same, cannot tell, new or gone."""

    phase: str
    layer: str = ""
    part: str = ""
    sides: tuple[PlaceTime, PlaceTime]
    verdict: str = ""

    @property
    def name(self) -> str:
        """Without the phase; empty if only that is known."""
        return " ".join(word for word in (self.layer, self.part) if word)

    @property
    def change_ns(self) -> int:
        return self.sides[1].total_ns - self.sides[0].total_ns

    @property
    def width_ns(self) -> int:
        """The time of the run that takes longer."""
        return max(side.total_ns for side in self.sides)


class StepChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is large enough for a label, at one or more places. `change_ns` is part of the change of the
    step."""

    text: str
    change_ns: int
    places: tuple[int, ...]  # indices


class AlignedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of two runs, cut at the same places, in the order of the step. The places add up to `steps_ns`.
    `changes` are the largest ones, the largest first."""

    title: str
    runs: tuple[str, str]
    places: tuple[StepPlace, ...]
    changes: tuple[StepChange, ...] = ()
    unit: Literal["step", "trace"] = "step"
    idle: str = "idle"  # what the time without kernels is called
    notes: tuple[str, ...] = ()

    @property
    def steps_ns(self) -> tuple[int, int]:
        one, other = (sum(place.sides[run].total_ns for place in self.places) for run in (0, 1))
        return one, other


class MemoryStretch(msgspec.Struct, frozen=True, kw_only=True):
    """A phase in columns `start` to `end` (exclusive), and which of the runs have it. The label is empty between
    phases."""

    label: str
    start: int
    end: int
    runs: tuple[bool, bool] = (True, True)


class AlignedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The allocated memory of two steps on one axis: each phase has the same columns in both. A column shows the moment
    of the most memory in it. `heights` has, for each run, the bytes of every category, from bottom to top, in every
    column."""

    title: str
    runs: tuple[str, str]
    categories: tuple[str, ...]
    stretches: tuple[MemoryStretch, ...]
    heights: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for columns in self.heights:
            assert len(columns) == len(self.categories), "one row per category"
            assert {len(row) for row in columns} <= {self.num_columns}, "one value per column"

    @property
    def num_columns(self) -> int:
        return self.stretches[-1].end if self.stretches else 0

    def totals(self, run: int) -> tuple[int, ...]:
        """The allocated memory in every column."""
        return tuple(map(sum, zip(*self.heights[run], strict=True)))

    def peak(self, run: int) -> int:
        """The first column with the most memory."""
        totals = self.totals(run)
        return totals.index(max(totals))


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The value of one run and its spread. `verdict` compares it with the baseline: baseline (it is that run), slower,
    faster, noise, same or cannot tell; empty if it is not judged."""

    run: int
    value: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""


class TrendLine(msgspec.Struct, frozen=True, kw_only=True):
    """One case over the runs, in their order. The name is empty if there is only one."""

    name: str
    points: tuple[TrendPoint, ...]


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity over several runs. `kind` is that of the values; a ratio is relative to the baseline."""

    title: str
    label: str  # of the axis
    kind: Literal["ms", "bytes", "count", "ratio"]
    runs: tuple[str, ...]
    lines: tuple[TrendLine, ...]
    baseline: int  # a run
    notes: tuple[str, ...] = ()


def is_empty(part: AlignedSteps | AlignedMemory | Trend) -> bool:
    """Whether there is nothing to draw."""
    match part:
        case AlignedSteps():
            return not any(part.steps_ns)
        case AlignedMemory():
            return not any(any(part.totals(run)) for run in (0, 1))
        case Trend():
            return not any(line.points for line in part.lines)
