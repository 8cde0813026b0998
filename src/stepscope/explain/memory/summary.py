"""A recording of memory summed up: what `--format json` prints and what tables are made from."""

import polars as pl

from stepscope.explain.memory.profile import Bytes, MemoryProfile
from stepscope.explain.memory.saved import held_storages
from stepscope.recording.rows.memory_summary import (
    Allocation,
    CategoryBytes,
    MemorySummary,
    ModuleBytes,
    PhaseBytes,
    StepBytes,
)

_LARGEST = 20
_MODULES = 50


def summarise_memory(profile: MemoryProfile) -> MemorySummary:
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
        largest=largest_at(profile, event, _LARGEST),
        phases=_phases(profile),
        steps=_steps(profile),
        reserved_bytes=_at(reserved, event),
        peak_reserved_bytes=None if reserved is None or not reserved.size else int(reserved.max()),
        saved_bytes=saved_bytes(profile.recording.saved),
        allocator_peak_bytes=facts.allocator_peak_bytes,
        estimated_bytes=facts.estimated_bytes,
        num_allocations=profile.allocations.height,
        notes=manifest.notes,
    )


def _at(values: Bytes | None, event: int) -> int | None:
    return None if values is None or event < 0 else int(values[event])


def largest_at(profile: MemoryProfile, event: int, count: int) -> tuple[Allocation, ...]:
    alive = profile.alive_at(event).head(count)
    return tuple(describe(profile, row) for row in alive.iter_rows(named=True))


def describe(profile: MemoryProfile, row: dict[str, object]) -> Allocation:
    stack = row["stack"]
    fields = {name: row[name] for name in Allocation.__struct_fields__ if name != "stack"}
    return Allocation(**fields, stack=profile.stack_text(stack if isinstance(stack, int) else None))  # type: ignore[arg-type]


def saved_bytes(saved: pl.DataFrame) -> int | None:
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
