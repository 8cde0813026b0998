"""The memory of one device over time, by category.

Every allocation has one category for its whole life, so at any moment the categories add up exactly to the allocated
memory: they are sums over the same rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.memory.categories import CATEGORIES, guess_categories, python_frames
from stepscope.explain.memory.saved import held_storages
from stepscope.explain.trace.attribution.modules import number_layers
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
    """`allocations` belong to one device and have `category` and `layer` filled in. `totals[e]` is the number of bytes
    allocated after event `e`; `before_bytes` were allocated before the recording started."""

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
        """Reserved bytes after each event; None if the device has no caching allocator."""
        segments = _of_device(self.recording.segments, self.device)
        return sum_over_events(segments, self.num_events) if segments.height else None

    @cached_property
    def peak_event(self) -> int:
        """The event after which allocated memory first peaks; -1 is before the first event."""
        if not self.num_events or self.before_bytes >= int(self.totals.max()):
            return -1
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        return self.allocated_at(self.peak_event)

    def allocated_at(self, event: int) -> int:
        return int(self.totals[event]) if event >= 0 else self.before_bytes

    def alive_at(self, event: int) -> pl.DataFrame:
        """The allocations that are alive after an event, largest first."""
        started = pl.col("start_event").is_null() | (pl.col("start_event") <= event)
        ended = pl.col("end_event").is_not_null() & (pl.col("end_event") <= event)
        return self.allocations.filter(started & ~ended).sort("bytes", descending=True, maintain_order=True)

    def share_at(self, event: int, by: str) -> list[tuple[str, int]]:
        """Bytes grouped by a column, largest first; they add up to the allocated memory."""
        alive = self.alive_at(event).group_by(pl.col(by).cast(pl.String).fill_null(UNKNOWN)).agg(pl.col("bytes").sum())
        return [(name, size) for name, size in alive.sort("bytes", by, descending=[True, False]).iter_rows()]

    def categories_at(self, event: int) -> list[tuple[str, int]]:
        """Every category in the order of `CATEGORIES`, including empty ones."""
        found = dict(self.share_at(event, "category"))
        return [(name, found.get(name, 0)) for name in CATEGORIES]

    def place_of(self, event: int) -> tuple[int | None, str | None]:
        """Return the step and the innermost phase of an event."""
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
        """Return the event and the bytes of the peak between events `start` and `end` (exclusive)."""
        if end <= start:
            return start - 1, self.allocated_at(start - 1)
        event = start + int(self.totals[start:end].argmax())
        before = self.allocated_at(start - 1)
        return (start - 1, before) if before >= self.totals[event] else (event, int(self.totals[event]))

    def largest_at(self, event: int, count: int) -> tuple[Allocation, ...]:
        """The largest allocations that are alive after an event."""
        return tuple(describe(self, row) for row in self.alive_at(event).head(count).iter_rows(named=True))

    @cached_property
    def summary(self) -> MemorySummary:
        """The document that `--format json` prints; the tables are built from it."""
        return _summarise(self)

    def stack_text(self, stack: int | None) -> str:
        """The frames of a stack, innermost first: those of Python, or all if it has none."""
        text = self._stacks.get(stack, "") if stack is not None else ""
        return "\n".join(python_frames(text)) or text

    @cached_property
    def _stacks(self) -> dict[int, str]:
        return dict(self.recording.stacks.select("stack", "frames").iter_rows())

    @cached_property
    def steps(self) -> tuple[int, ...]:
        spans = self.recording.spans.filter(pl.col("phase").is_null())
        return tuple(int(step) for step in spans["step"].drop_nulls().unique().sort())

    @property
    def last_plain_step(self) -> int:
        """The last step that ran without the profiler and whose events match a profiled step; the last step if there is
        none. Profiling slows a step down."""
        facts = self.recording.manifest.memory
        assert facts is not None, "the recording of a memory profile has memory facts"
        plain = [step for step in self.steps if step not in (*facts.watched_steps, *facts.unmatched_steps)]
        return plain[-1] if plain else self.steps[-1]

    def span(self, step: int, phase: str | None = None) -> tuple[int, int] | None:
        """First and last (exclusive) event of a step, or of the last run of a phase in it."""
        if phase is not None:
            return next(reversed(self.phase_spans(step, phase)), None)
        found = self.recording.spans.filter((pl.col("step") == step) & pl.col("phase").is_null())
        return (int(found["start_event"][0]), int(found["end_event"][-1])) if found.height else None

    def phase_spans(self, step: int, phase: str) -> list[tuple[int, int]]:
        """First and last (exclusive) event of each run of a phase in a step."""
        found = self.recording.spans.filter((pl.col("step") == step) & (pl.col("phase") == phase))
        return list(found.select("start_event", "end_event").iter_rows())

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases in the order of their first events. The loss is nested inside forward."""
        spans = self.recording.spans.filter(pl.col("phase").is_not_null())
        return tuple(str(name) for name in spans["phase"].unique(maintain_order=True))


def sum_over_events(rows: pl.DataFrame, num_events: int) -> Bytes:
    """Return the bytes that are alive after each event."""
    changes = np.zeros(num_events + 1, dtype=np.int64)
    size = rows["bytes"].to_numpy()
    np.add.at(changes, rows["start_event"].fill_null(0).to_numpy(), size)
    ended = rows["end_event"].is_not_null().to_numpy()
    np.add.at(changes, rows["end_event"].fill_null(0).to_numpy()[ended], -size[ended])
    totals: Bytes = np.cumsum(changes)[:num_events]
    return totals


def make_memory_profile(recording: Recording) -> MemoryProfile:
    """Build the profile of the device that ran out of memory or has the highest peak, if the recording has several."""
    facts, allocations = recording.manifest.memory, recording.allocations
    if facts is None or not (allocations.height or facts.oom):
        raise StepscopeError(
            f"the recording has no memory data: `{recording.manifest.file}`",
            detail="it contains no allocations" if facts else "memory was not recorded",
            hint="stepscope memory",
        )
    device = _choose_device(recording)
    allocations = _of_device(allocations, device)
    if allocations["category"].null_count() == allocations.height:
        allocations = guess_categories(allocations, recording.stacks)
    # A category that a later version added counts as `other`, so the sums stay right.
    known = pl.col("category").is_in(CATEGORIES)
    allocations = allocations.with_columns(category=pl.when(known).then("category").otherwise(pl.lit("other")))
    allocations = number_layers(_name_owners(allocations), pl.DataFrame())
    # With several devices, each device numbers its own events, and the file counts all of them. Spans belong to one
    # device.
    events = facts.events if len(_devices(recording)) < 2 or recording.spans.height else 0
    num_events = max(events, _count_events(allocations, _of_device(recording.segments, device)))
    return MemoryProfile(recording=recording, device=device, allocations=allocations, num_events=num_events)


def _name_owners(allocations: pl.DataFrame) -> pl.DataFrame:
    """Assign a parameter, its gradient and its optimizer state to the module that owns the parameter."""
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
    facts = recording.manifest.memory
    if facts is not None and facts.oom is not None and facts.oom.device in devices:
        return facts.oom.device
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
    """Return one more than the last event of any row."""
    lasts = [table[name].max() for table in tables for name in ("start_event", "end_event")]
    return max((last + 1 for last in lasts if isinstance(last, int)), default=0)


# --- Summary ----------------------------------------------------------------------------------------------------------


def _summarise(profile: MemoryProfile) -> MemorySummary:
    manifest, event = profile.recording.manifest, profile.peak_event
    facts = manifest.memory
    assert facts is not None, "the recording of a memory profile has memory facts"
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
        categories=_categories(profile, event),
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


def _categories(profile: MemoryProfile, event: int) -> tuple[CategoryBytes, ...]:
    """Every category. If some memory is unknown, an empty one may be part of that and is left out."""
    sizes = profile.categories_at(event)
    shown = [one for one in sizes if one[1]] if dict(sizes)[UNKNOWN] else [one for one in sizes if one[0] != UNKNOWN]
    return tuple(CategoryBytes(category=name, bytes=size) for name, size in shown)


def _at(values: Bytes | None, event: int) -> int | None:
    return None if values is None or event < 0 else int(values[event])


def describe(profile: MemoryProfile, row: dict[str, object]) -> Allocation:
    stack = row["stack"]
    fields: dict[str, Any] = {name: row[name] for name in Allocation.__struct_fields__ if name in row}
    fields["stack"] = profile.stack_text(stack if isinstance(stack, int) else None)
    return Allocation(**fields, is_from_before=row["start_event"] is None)


def _saved_bytes(saved: pl.DataFrame) -> int | None:
    """Bytes saved for backward: each storage once, without parameters and inputs."""
    if not saved.height:
        return None
    return int(held_storages(saved)["storage_bytes"].sum())


def _phases(profile: MemoryProfile) -> tuple[PhaseBytes, ...]:
    """The phases of the first and the last step; without step markers, the stages inferred from stacks. If a step runs
    a phase several times, start and end come from its last run and the peak is the highest of all runs."""
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
        assert span is not None, "a listed step has a span"
        rows.append(
            StepBytes(
                step=step,
                peak_bytes=profile.peak_between(*span)[1],
                end_bytes=profile.allocated_at(span[1] - 1),
                end_reserved_bytes=_at(profile.reserved, span[1] - 1),
            )
        )
    return tuple(rows)
