"""The memory of one device over time, and what it is made of at any moment.

Every piece of memory has one category for its whole life, so at any moment the categories add up to what is allocated,
exactly: they are sums over the same rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.memory.categories import CATEGORIES, guess_categories
from stepscope.explain.memory.saved import held_storages
from stepscope.explain.trace.modules import number_layers
from stepscope.recording.rows.memory_summary import (
    Allocation,
    CategoryBytes,
    MemorySummary,
    ModuleBytes,
    PhaseBytes,
    StepBytes,
)
from stepscope.recording.store import Recording

Bytes = np.ndarray[Any, np.dtype[np.int64]]
UNKNOWN = "unknown"
_LARGEST = 20
_MODULES = 50


@dataclass(frozen=True)
class MemoryProfile:
    """`allocations` are those of one device, with `category` and `layer` filled in. `totals[e]` is what is allocated
    after event `e`; `before` what was there at the start."""

    recording: Recording
    device: int | None
    allocations: pl.DataFrame
    num_events: int

    @cached_property
    def before_bytes(self) -> int:
        return int(self.allocations.filter(pl.col("start_event").is_null())["bytes"].sum())

    @cached_property
    def totals(self) -> Bytes:
        return sum_over_events(self.allocations, self.num_events)

    @cached_property
    def reserved(self) -> Bytes | None:
        """What the allocator holds after each event, and None where there is none."""
        segments = _of_device(self.recording.segments, self.device)
        return sum_over_events(segments, self.num_events) if segments.height else None

    @cached_property
    def peak_event(self) -> int:
        """The first event after which most is allocated; -1 is before any."""
        if not self.num_events or self.before_bytes >= int(self.totals.max()):
            return -1
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        return self.allocated_at(self.peak_event)

    def allocated_at(self, event: int) -> int:
        return int(self.totals[event]) if event >= 0 else self.before_bytes

    def alive_at(self, event: int) -> pl.DataFrame:
        """What is there after an event, the largest first."""
        started = pl.col("start_event").is_null() | (pl.col("start_event") <= event)
        ended = pl.col("end_event").is_not_null() & (pl.col("end_event") <= event)
        return self.allocations.filter(started & ~ended).sort("bytes", descending=True, maintain_order=True)

    def share_at(self, event: int, by: str) -> list[tuple[str, int]]:
        """Bytes by a column, the largest first; they add up to what is allocated."""
        alive = self.alive_at(event).group_by(pl.col(by).cast(pl.String).fill_null(UNKNOWN)).agg(pl.col("bytes").sum())
        return [(name, size) for name, size in alive.sort("bytes", by, descending=[True, False]).iter_rows()]

    def categories_at(self, event: int) -> list[tuple[str, int]]:
        """Every category in the order of the list, those with nothing too."""
        found = dict(self.share_at(event, "category"))
        return [(name, found.get(name, 0)) for name in CATEGORIES]

    def place_of(self, event: int) -> tuple[int | None, str | None]:
        """The step and the innermost phase of an event."""
        spans = self.recording.spans.filter((pl.col("start_event") <= event) & (pl.col("end_event") > event))
        phases = spans.filter(pl.col("phase").is_not_null()).sort(pl.col("end_event") - pl.col("start_event"))
        step = spans["step"].drop_nulls()
        if phases.height:
            return (int(step[0]) if step.len() else None), str(phases["phase"][0])
        if self.recording.spans.height or event < 0:
            return (int(step[0]) if step.len() else None), None
        taken = self.allocations.filter(pl.col("start_event") == event)["phase"].drop_nulls()
        return None, (str(taken[0]) if taken.len() else None)

    def peak_between(self, start: int, end: int) -> tuple[int, int]:
        """The event and the bytes of the highest moment among events `start` to `end` (exclusive)."""
        if end <= start:
            return start - 1, self.allocated_at(start - 1)
        event = start + int(self.totals[start:end].argmax())
        before = self.allocated_at(start - 1)
        return (start - 1, before) if before >= self.totals[event] else (event, int(self.totals[event]))

    def largest_at(self, event: int, count: int) -> tuple[Allocation, ...]:
        """The largest pieces of memory that are there after an event."""
        return tuple(describe(self, row) for row in self.alive_at(event).head(count).iter_rows(named=True))

    @cached_property
    def summary(self) -> MemorySummary:
        """What `--format json` prints and what tables are made from."""
        return _summarise(self)

    def stack_text(self, stack: int | None) -> str:
        return self._stacks.get(stack, "") if stack is not None else ""

    @cached_property
    def _stacks(self) -> dict[int, str]:
        return dict(self.recording.stacks.select("stack", "frames").iter_rows())

    @cached_property
    def steps(self) -> tuple[int, ...]:
        spans = self.recording.spans.filter(pl.col("phase").is_null())
        return tuple(int(step) for step in spans["step"].drop_nulls().unique().sort())

    @property
    def last_plain_step(self) -> int:
        """The last step that nobody watched and of which all is known all the same: watching takes its time. Where all
        were watched, the last."""
        facts = self.recording.manifest.memory
        assert facts is not None, "a profile is made of a recording of memory"
        plain = [step for step in self.steps if step not in (*facts.watched_steps, *facts.unmatched_steps)]
        return plain[-1] if plain else self.steps[-1]

    def span(self, step: int, phase: str | None = None) -> tuple[int, int] | None:
        """First and last (exclusive) event of a step or of one of its phases: of the last, where it runs several."""
        if phase is not None:
            return next(reversed(self.phase_spans(step, phase)), None)
        found = self.recording.spans.filter((pl.col("step") == step) & pl.col("phase").is_null())
        return (int(found["start_event"][0]), int(found["end_event"][-1])) if found.height else None

    def phase_spans(self, step: int, phase: str) -> list[tuple[int, int]]:
        """The same of a phase, as often as the step runs it."""
        found = self.recording.spans.filter((pl.col("step") == step) & (pl.col("phase") == phase))
        return list(found.select("start_event", "end_event").iter_rows())

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """In the order in which they come; the loss lies inside of forward."""
        spans = self.recording.spans.filter(pl.col("phase").is_not_null())
        return tuple(str(name) for name in spans["phase"].unique(maintain_order=True))


def sum_over_events(rows: pl.DataFrame, num_events: int) -> Bytes:
    """Bytes that are there after each event."""
    changes = np.zeros(num_events + 1, dtype=np.int64)
    size = rows["bytes"].to_numpy()
    np.add.at(changes, rows["start_event"].fill_null(0).to_numpy(), size)
    ended = rows["end_event"].is_not_null().to_numpy()
    np.add.at(changes, rows["end_event"].fill_null(0).to_numpy()[ended], -size[ended])
    totals: Bytes = np.cumsum(changes)[:num_events]
    return totals


def make_memory_profile(recording: Recording) -> MemoryProfile:
    """Of the device that holds most, where a recording has several."""
    facts, allocations = recording.manifest.memory, recording.allocations
    if facts is None or not allocations.height:
        raise StepscopeError(
            f"the recording holds no memory: `{recording.manifest.file}`",
            detail="nothing in it was ever allocated" if facts else "it was made without recording memory",
            hint="stepscope memory",
        )
    device = _choose_device(recording)
    allocations = _of_device(allocations, device)
    if allocations["category"].null_count() == allocations.height:
        allocations = guess_categories(allocations, recording.stacks)
    # What a later version calls by a name of its own is something else to this one, and still adds up.
    known = pl.col("category").is_in(CATEGORIES)
    allocations = allocations.with_columns(category=pl.when(known).then("category").otherwise(pl.lit("other")))
    allocations = number_layers(_name_owners(allocations), pl.DataFrame())
    # With several devices, each numbers its own events and the file's figure counts all of them. Spans belong to one.
    events = facts.events if len(_devices(recording)) < 2 or recording.spans.height else 0
    num_events = max(events, _count_events(allocations, _of_device(recording.segments, device)))
    return MemoryProfile(recording=recording, device=device, allocations=allocations, num_events=num_events)


def _name_owners(allocations: pl.DataFrame) -> pl.DataFrame:
    """A parameter, its gradient and its state belong to the module that has the parameter, whoever took the memory."""
    name = pl.col("name")
    owner = (
        pl.when(pl.col("category").is_in(["parameters", "gradients", "autocast copies"]))
        .then(name.str.extract(r"^(.*)\.[^.]*$"))
        .when(pl.col("category") == "optimizer state")
        .then(name.str.extract(r"^(.*)\.[^.]*\.[^.]*$"))
    )
    return allocations.with_columns(module=pl.coalesce(owner, "module"))


def _devices(recording: Recording) -> list[int]:
    return [int(one) for one in recording.allocations["device"].drop_nulls().unique().sort()]


def _choose_device(recording: Recording) -> int | None:
    devices = _devices(recording)
    if len(devices) < 2:
        return devices[0] if devices else None
    return max(devices, key=lambda device: _most_bytes(_of_device(recording.allocations, device)))


def _most_bytes(allocations: pl.DataFrame) -> int:
    before = int(allocations.filter(pl.col("start_event").is_null())["bytes"].sum())
    totals = sum_over_events(allocations, _count_events(allocations))
    return max(before, int(totals.max(initial=0)))


def _of_device(table: pl.DataFrame, device: int | None) -> pl.DataFrame:
    return table if device is None else table.filter(pl.col("device").fill_null(device) == device)


def _count_events(*tables: pl.DataFrame) -> int:
    """One more than the last event that any row tells of."""
    lasts = [table[name].max() for table in tables for name in ("start_event", "end_event")]
    return max((last + 1 for last in lasts if isinstance(last, int)), default=0)


# --- Summed up --------------------------------------------------------------------------------------------------------


def _summarise(profile: MemoryProfile) -> MemorySummary:
    manifest, event = profile.recording.manifest, profile.peak_event
    facts = manifest.memory
    assert facts is not None, "a profile is made of a recording of memory"
    step, phase = profile.place_of(event)
    taken = profile.allocations.filter(pl.col("start_event") == event)["module"].drop_nulls()
    reserved = profile.reserved
    return MemorySummary(
        file=manifest.file,
        source=manifest.source,
        device=manifest.device or facts.device,
        peak_bytes=profile.peak_bytes,
        peak_step=step,
        peak_phase=phase,
        peak_module=str(taken[0]) if taken.len() else None,
        before_bytes=profile.before_bytes,
        categories=tuple(CategoryBytes(category=name, bytes=size) for name, size in profile.categories_at(event)),
        modules=tuple(
            ModuleBytes(module=name, bytes=size) for name, size in profile.share_at(event, "module")[:_MODULES]
        ),
        largest=profile.largest_at(event, _LARGEST),
        phases=_phases(profile),
        steps=_steps(profile),
        reserved_bytes=_at(reserved, event),
        peak_reserved_bytes=None if reserved is None or not reserved.size else int(reserved.max()),
        saved_bytes=_saved_bytes(profile.recording.saved),
        allocator_peak_bytes=facts.allocator_peak_bytes,
        estimated_bytes=facts.estimated_bytes,
        num_allocations=profile.allocations.height,
        notes=manifest.notes,
    )


def _at(values: Bytes | None, event: int) -> int | None:
    return None if values is None or event < 0 else int(values[event])


def describe(profile: MemoryProfile, row: dict[str, object]) -> Allocation:
    stack = row["stack"]
    fields = {name: row[name] for name in Allocation.__struct_fields__ if name != "stack"}
    return Allocation(**fields, stack=profile.stack_text(stack if isinstance(stack, int) else None))  # type: ignore[arg-type]


def _saved_bytes(saved: pl.DataFrame) -> int | None:
    """What autograd keeps, each storage once, without what is there anyway."""
    if not saved.height:
        return None
    return int(held_storages(saved)["storage_bytes"].sum())


def _phases(profile: MemoryProfile) -> tuple[PhaseBytes, ...]:
    """Of the first and the last step; where no steps are marked, of the stages that stacks tell. A phase that a step
    runs several times begins and ends as its last run does, and peaks where any of them does."""
    if not profile.steps:
        return _stages(profile)
    rows = []
    for step in dict.fromkeys((profile.steps[0], profile.steps[-1])):
        for phase in profile.phases:
            spans = profile.phase_spans(step, phase)
            if spans:
                start, end = spans[-1]
                rows.append(
                    PhaseBytes(
                        step=step,
                        phase=phase,
                        start_bytes=profile.allocated_at(start - 1),
                        peak_bytes=max(profile.peak_between(*span)[1] for span in spans),
                        end_bytes=profile.allocated_at(end - 1),
                    )
                )
    return tuple(rows)


def _stages(profile: MemoryProfile) -> tuple[PhaseBytes, ...]:
    rows = []
    known = profile.allocations.filter(pl.col("phase").is_not_null() & pl.col("start_event").is_not_null())
    for phase in ("forward", "backward", "optimizer"):
        events = known.filter(pl.col("phase") == phase)["start_event"].to_numpy()
        if events.size:
            peak = int(profile.totals[events].max())
            rows.append(PhaseBytes(step=None, phase=phase, start_bytes=None, peak_bytes=peak, end_bytes=None))
    return tuple(rows)


def _steps(profile: MemoryProfile) -> tuple[StepBytes, ...]:
    rows = []
    for step in profile.steps:
        span = profile.span(step)
        assert span is not None, "a step that is listed has a span"
        rows.append(
            StepBytes(
                step=step,
                peak_bytes=profile.peak_between(*span)[1],
                end_bytes=profile.allocated_at(span[1] - 1),
                end_reserved_bytes=_at(profile.reserved, span[1] - 1),
            )
        )
    return tuple(rows)
