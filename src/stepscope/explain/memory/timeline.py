"""The data of the memory chart: time slices, areas by category or module, and the largest allocations.

A million events do not fit on a screen, and most allocations are too small to see. Time is cut into slices, and each
slice shows its highest point, so no peak is lost. The largest allocations in any slice are drawn one by one; the rest
of an area is drawn as one.
"""

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import polars as pl

from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.memory.categories import CATEGORIES, STACKED
from stepscope.explain.memory.memory_profile import UNKNOWN, Bytes, MemoryProfile, describe
from stepscope.findings import Area, Axis, Piece, Stretch, Timeline
from stepscope.recording.rows.memory_summary import Allocation

By = Literal["category", "module"]
Instants = np.ndarray[Any, np.dtype[np.int64]]  # events
MOST_SLICES = 4096
MOST_PIECES = 2000
_STACK_LINES = 8


def memory_timeline(
    profile: MemoryProfile, *, by: By = "category", title: str = "", step: int | None = None
) -> Timeline:
    """Return the timeline of the whole recording, or of one step."""
    span = profile.span(step) if step is not None else None
    start, end = span or (0, profile.num_events)
    instants = _instants(profile, start, end)
    first = int(instants[0]) if len(instants) else start
    allocations = _in_view(profile.allocations, first, end).with_columns(area=_area(by))
    areas = _stack_areas(allocations, instants, by)
    times = _times_ms(profile, instants)
    return Timeline(
        title=title or "Memory over time",
        subtitle=_subtitle(profile, step),
        x=Axis(label="CPU time of allocations", unit="ms"),
        y=Axis(label="allocated memory", unit="bytes"),
        times=tuple(times),
        areas=areas,
        stretches=_stretches(profile, instants, start, end),
        pieces=_pieces(profile, allocations, [area.name for area in areas], instants),
        line=_reserved_line(profile, instants),
        notes=_notes(profile, instants, start, end, step),
    )


def stack_categories(profile: MemoryProfile, instants: Instants) -> tuple[Area, ...]:
    """The categories from bottom to top, each with its bytes after the given events, which must be in order. They add
    up to the allocated memory."""
    return _stack_areas(profile.allocations.with_columns(area=_area("category")), instants, "category")


def _stack_areas(allocations: pl.DataFrame, instants: Instants, by: By) -> tuple[Area, ...]:
    names = _area_names(allocations, by)
    return tuple(Area(name=name, values=_heights(allocations, name, instants)) for name in names)


def _instants(profile: MemoryProfile, start: int, end: int) -> Instants:
    """The event at the highest point of each slice. For the first slice this can be the event just before it, which is
    the peak if a step only frees memory; before the first event it is -1."""
    totals: Bytes = profile.totals
    count = min(MOST_SLICES, end - start)
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    edges = start + np.arange(count + 1, dtype=np.int64) * (end - start) // count
    instants = np.array([low + int(totals[low:high].argmax()) for low, high in pairwise(edges)])
    if profile.allocated_at(start - 1) > totals[instants[0]]:
        instants[0] = start - 1
    return instants


def _reserved_line(profile: MemoryProfile, instants: Instants) -> Area | None:
    if profile.reserved is None:
        return None
    known = profile.reserved[np.maximum(instants, 0)]  # before the first event, use the value after it
    return Area(name="reserved by the allocator", values=tuple(int(value) for value in known))


def _in_view(allocations: pl.DataFrame, start: int, end: int) -> pl.DataFrame:
    began = pl.col("start_event").is_null() | (pl.col("start_event") < end)
    ended = pl.col("end_event").is_not_null() & (pl.col("end_event") <= start)
    return allocations.filter(began & ~ended)


def _area(by: By) -> pl.Expr:
    if by == "category":
        return pl.col("category")
    layer = pl.col("layer").cast(pl.String)
    outside = pl.col("module").str.split(".").list.first()
    return pl.when(layer.is_not_null()).then(pl.lit("layer ") + layer).otherwise(outside).fill_null(UNKNOWN)


def _area_names(allocations: pl.DataFrame, by: By) -> list[str]:
    """The areas from bottom to top: categories by lifetime, layers in order."""
    if by == "category":
        found = set(allocations["area"].unique())
        return [name for name in dict.fromkeys((*STACKED, *CATEGORIES)) if name in found]
    return sorted(allocations["area"].unique(), key=_module_order)


def _module_order(name: str) -> tuple[int, int, str]:
    if name == UNKNOWN:
        return (0, 0, name)
    number = name.removeprefix("layer ")
    return (1, int(number), "") if number.isdecimal() else (2, 0, name)


def _heights(allocations: pl.DataFrame, name: str, instants: Instants) -> tuple[int, ...]:
    rows = allocations.filter(pl.col("area") == name)
    first, last = _slices(rows, instants)
    changes = np.zeros(len(instants) + 1, dtype=np.int64)
    np.add.at(changes, first, rows["bytes"].to_numpy())
    np.add.at(changes, last, -rows["bytes"].to_numpy())
    return tuple(int(value) for value in np.cumsum(changes)[: len(instants)])


def _slices(rows: pl.DataFrame, instants: Instants) -> tuple[Instants, Instants]:
    """The first and the last slice (exclusive) in which each allocation is alive."""
    first = np.searchsorted(instants, rows["start_event"].fill_null(-1).to_numpy(), side="left")
    forever = np.iinfo(np.int64).max
    last = np.searchsorted(instants, rows["end_event"].fill_null(forever).to_numpy(), side="left")
    return first, np.maximum(first, last)


def _pieces(
    profile: MemoryProfile, allocations: pl.DataFrame, names: list[str], instants: Instants
) -> tuple[Piece, ...]:
    first, last = _slices(allocations, instants)
    shown = allocations.with_columns(first=pl.Series(first), last=pl.Series(last)).filter(
        pl.col("last") > pl.col("first")
    )
    shown = shown.sort("bytes", "first", descending=[True, False]).head(MOST_PIECES)
    places = {name: number for number, name in enumerate(names)}
    return tuple(
        Piece(
            area=places[row["area"]],
            start=row["first"],
            end=row["last"],
            size=row["bytes"],
            label=label_of(one, one.module or one.phase),
            detail=_detail(one),
        )
        for row in shown.iter_rows(named=True)
        for one in (describe(profile, row),)
    )


def label_of(one: Allocation, where: str | None) -> str:
    """A short label of an allocation: its name, or its operator and `where`."""
    if one.category in ("parameters", "gradients", "optimizer state", "other") and one.name:
        return one.name
    what = one.op or one.name or one.category
    return f"{what} in {where}" if where else what


def say_shape(one: Allocation) -> str:
    return f"{one.dtype} {one.shape}" if one.shape else ""


def say_when(one: Allocation) -> str:
    """The step and phase that made the allocation, or that it is older than the recording; empty if unknown."""
    if one.is_from_before:
        return "before recording"
    return ", ".join(part for part in (f"step {one.step + 1}" if one.step is not None else "", one.phase) if part)


def _detail(one: Allocation) -> tuple[str, ...]:
    when = say_when(one)
    allocated = "allocated before the recording" if one.is_from_before else f"allocated in {when}" if when else ""
    kept = f"{one.category}: {one.name}" if one.name else one.category
    frames = one.stack.splitlines()[:_STACK_LINES]
    return tuple(line for line in (kept, say_shape(one), allocated, *frames) if line)


def _times_ms(profile: MemoryProfile, instants: Instants) -> list[float]:
    """The time of each event, or its number if the snapshot has no timestamps."""
    known = profile.allocations.select("start_event", "start_ns").drop_nulls()
    ended = profile.allocations.select(start_event="end_event", start_ns="end_ns").drop_nulls()
    known = pl.concat([known, ended]).unique("start_event", keep="first").sort("start_event")
    if not known.height:
        return [float(event) for event in instants]
    times = np.interp(instants, known["start_event"].to_numpy(), known["start_ns"].to_numpy() / 1e6)
    times = np.maximum.accumulate(times)
    return [float(value) for value in times - times[0]] if len(times) else []


def _stretches(profile: MemoryProfile, instants: Instants, start: int, end: int) -> tuple[Stretch, ...]:
    stretches = []
    spans = profile.recording.spans.filter(pl.col("phase").is_not_null() & (pl.col("phase") != "loss"))
    for row in spans.iter_rows(named=True):
        low, high = max(start, row["start_event"]), min(end, row["end_event"])
        first, last = np.searchsorted(instants, [low, high], side="left")
        if last > first:
            stretches.append(Stretch(label=row["phase"], start=int(first), end=int(last)))
    return tuple(stretches)


def _subtitle(profile: MemoryProfile, step: int | None) -> str:
    manifest = profile.recording.manifest
    case = manifest.case
    what = describe_case(case) if case else manifest.file
    which = f", step {step + 1}" if step is not None else ""
    return f"{what}{which}; {manifest.device}" if manifest.device else f"{what}{which}"


def _notes(profile: MemoryProfile, instants: Instants, start: int, end: int, step: int | None) -> tuple[str, ...]:
    # The CPU allocates ahead of the GPU, so phases take other times here than in a picture of the step.
    notes = ["time is that of the CPU when it allocates and frees, not of kernels"]
    if step is not None and step == profile.last_plain_step != profile.steps[-1]:
        last = profile.steps[-1] + 1
        notes.append(f"step {step + 1}: step {last} was profiled, which slows the CPU but allocates the same")
    if len(instants) < end - start:
        notes.append(f"{end - start:,} events in {len(instants):,} slices; each slice shows its peak")
    if profile.recording.manifest.memory and profile.recording.manifest.memory.estimated_bytes:
        notes.append("memory allocated before the recording is an estimate")
    return tuple(notes)
