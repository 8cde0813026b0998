"""A profile of memory as tables: the page on the terminal, and each of its parts alone."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import polars as pl

from stepscope.cost.activations import activations_of
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.memory.memory_profile import UNKNOWN, MemoryProfile
from stepscope.explain.memory.saved import saved_beside_closed_form, saved_by_module
from stepscope.explain.memory.timeline import label_of, say_shape, say_when
from stepscope.findings import Cell, Column, Page, Table
from stepscope.recording.rows.memory_summary import Allocation, MemorySummary
from stepscope.spec import ModelShape
from stepscope.units import say_bytes

_ON_A_PAGE = 8
_SETTLED = 2  # steps until everything that is made once is made
_FEWEST = 3
_SIZE = Column(key="bytes", label="size", kind="bytes")
_SHARE = Column(key="share", label="share", kind="share")


def memory_page(profile: MemoryProfile) -> Page:
    tables = [categories_table(profile), phases_table(profile), largest_table(profile, top=_ON_A_PAGE)]
    leaks = leaks_table(profile)
    if leaks.rows:
        tables.append(leaks)
    return Page(headline=headline(profile), tables=tuple(tables), findings=None)


def headline(profile: MemoryProfile) -> str:
    """What was recorded, when most was allocated and by whom, and what stays."""
    summary, manifest = profile.summary, profile.recording.manifest
    case = manifest.case
    what = describe_case(case) if case else manifest.file or "recording"
    where = f" on {manifest.device}" if manifest.device else ""
    lines = [f"{what}: {manifest.source}{where}, {summary.num_allocations:,} allocations", _say_peak(summary)]
    if summary.steps:
        last = summary.steps[-1]
        cached = _say_cached(last.end_bytes, last.end_reserved_bytes)
        lines.append(f"after a step {say_bytes(last.end_bytes)} stay{cached}")
    if summary.allocator_peak_bytes is not None and summary.allocator_peak_bytes != summary.peak_bytes:
        lines.append(f"doubt: the allocator itself counted {summary.allocator_peak_bytes:,} bytes at the peak")
    if summary.estimated_bytes:
        lines.append(f"note: the sizes of {say_bytes(summary.estimated_bytes)} are estimated: the file begins too late")
    lines.extend(f"note: {note}" for note in summary.notes)
    return "\n".join(lines)


def _say_peak(summary: MemorySummary) -> str:
    step = f"step {summary.peak_step + 1}" if summary.peak_step is not None else ""
    place = ", ".join(part for part in (step, summary.peak_phase, summary.peak_module) if part)
    there = f"; {say_bytes(summary.before_bytes)} of it was there before" if summary.before_bytes else ""
    held = _say_cached(summary.peak_bytes, summary.reserved_bytes)
    return f"peak {say_bytes(summary.peak_bytes)}{f' in {place}' if place else ''}{held}{there}"


def _say_cached(allocated: int, reserved: int | None) -> str:
    if reserved is None:
        return ""
    return f" ({say_bytes(reserved)} reserved, so {say_bytes(reserved - allocated)} cached by the allocator)"


def categories_table(profile: MemoryProfile) -> Table:
    """At the peak; they add up to it."""
    event, peak = profile.peak_event, profile.peak_bytes
    rows: list[tuple[Cell, ...]] = [
        (name, size, size / peak if peak else None) for name, size in profile.categories_at(event) if size
    ]
    rows.append(("together", peak, 1.0 if peak else None))
    notes = []
    reserved = profile.reserved
    if reserved is not None and event >= 0:
        notes.append(_say_fragments(profile, event, int(reserved[event])))
    return Table(
        title="At the peak, by category",
        columns=(Column(key="category", label="category"), _SIZE, _SHARE),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _say_fragments(profile: MemoryProfile, event: int, reserved: int) -> str:
    alive = profile.alive_at(event)
    rounded = int((alive["bytes"] - alive["requested_bytes"]).drop_nulls().sum())
    idle = reserved - profile.allocated_at(event)
    share = idle / reserved if reserved else 0.0
    return (
        f"reserved {say_bytes(reserved)}: {say_bytes(idle)} ({share:.1%}) in no use, "
        f"{say_bytes(rounded)} lost to rounding"
    )


def modules_table(profile: MemoryProfile, *, top: int) -> Table:
    return _by(profile, "module", "At the peak, by module", top)


def layers_table(profile: MemoryProfile, *, top: int) -> Table:
    return _by(profile, "layer", "At the peak, by layer", top)


def _by(profile: MemoryProfile, column: str, title: str, top: int) -> Table:
    peak = profile.peak_bytes
    found = profile.share_at(profile.peak_event, column)
    rest = sum(size for _, size in found[top:])
    rows: list[tuple[Cell, ...]] = [(name, size, size / peak if peak else None) for name, size in found[:top]]
    if rest:
        rows.append((f"{len(found) - top} more", rest, rest / peak))
    unknown = dict(found).get(UNKNOWN)
    notes = (f"{UNKNOWN}: no module was at work, as in the loss or the optimizer",) if unknown else ()
    return Table(title=title, columns=(Column(key=column, label=column), _SIZE, _SHARE), rows=tuple(rows), notes=notes)


def phases_table(profile: MemoryProfile) -> Table:
    summary = profile.summary
    marked = bool(summary.steps)
    columns = [Column(key="step", label="step", kind="count")] if marked else []
    columns += [
        Column(key="phase", label="phase"),
        Column(key="start_bytes", label="before", kind="bytes", detail=not marked),
        Column(key="peak_bytes", label="peak", kind="bytes"),
        Column(key="end_bytes", label="after", kind="bytes", detail=not marked),
    ]
    rows: list[tuple[Cell, ...]] = []
    for one in summary.phases:
        number: tuple[Cell, ...] = (one.step + 1 if one.step is not None else None,) if marked else ()
        rows.append((*number, one.phase, one.start_bytes, one.peak_bytes, one.end_bytes))
    notes = () if marked or not rows else ("phases as stacks tell them: no steps are marked in this file",)
    return Table(title="By phase", columns=tuple(columns), rows=tuple(rows), notes=notes)


def steps_table(profile: MemoryProfile) -> Table:
    rows = tuple((one.step + 1, one.peak_bytes, one.end_bytes, one.end_reserved_bytes) for one in profile.summary.steps)
    return Table(
        title="By step, from the first after the model was built",
        columns=(
            Column(key="step", label="step", kind="count"),
            Column(key="peak_bytes", label="peak", kind="bytes"),
            Column(key="end_bytes", label="stays", kind="bytes"),
            Column(key="end_reserved_bytes", label="reserved", kind="bytes"),
        ),
        rows=rows,
    )


def largest_table(profile: MemoryProfile, *, top: int) -> Table:
    """The largest pieces of memory at the peak."""
    rows = tuple(_describe(one) for one in profile.largest_at(profile.peak_event, top))
    return Table(
        title="At the peak, the largest allocations",
        columns=(
            _SIZE,
            Column(key="category", label="category"),
            Column(key="what", label="what"),
            Column(key="shape", label="shape"),
            Column(key="taken", label="taken in"),
            Column(key="module", label="module", detail=True),
            Column(key="op", label="operator", detail=True),
            Column(key="name", label="name", detail=True),
            Column(key="stack", label="stack", detail=True),
        ),
        rows=rows,
    )


def _describe(one: Allocation) -> tuple[Cell, ...]:
    what = label_of(one, one.module)
    where = one.stack.partition("\n")[0] if not one.module and one.stack else ""
    return (
        one.bytes,
        one.category,
        f"{what} at {where}" if where else what,
        say_shape(one) or None,
        say_when(one) or "before",
        one.module,
        one.op,
        one.name,
        one.stack.replace("\n", " < ") or None,
    )


def freed_table(profile: MemoryProfile, *, top: int) -> Table:
    """What the backward pass of the last step gives back, layer by layer in the order in which it happens."""
    span = profile.span(profile.steps[-1], "backward") if profile.steps else None
    columns = (
        Column(key="layer", label="layer"),
        Column(key="freed_bytes", label="activations given back", kind="bytes"),
        Column(key="taken_bytes", label="gradients taken", kind="bytes"),
        Column(key="allocated_bytes", label="allocated after", kind="bytes"),
    )
    if span is None:
        return Table(title="What backward gives back", columns=columns, rows=())
    held = profile.allocations.filter(pl.col("category") == "activations")
    freed = held.filter(pl.col("end_event").is_between(span[0], span[1] - 1))
    grads = profile.allocations.filter(
        (pl.col("category") == "gradients") & pl.col("start_event").is_between(span[0], span[1] - 1)
    )
    by_layer = freed.group_by("layer").agg(pl.col("bytes").sum(), last=pl.col("end_event").max()).sort("last")
    taken = dict(grads.group_by("layer").agg(pl.col("bytes").sum()).iter_rows())
    rows = tuple(
        (
            "outside of layers" if row["layer"] is None else str(row["layer"]),
            row["bytes"],
            taken.get(row["layer"]),
            profile.allocated_at(row["last"]),
        )
        for row in by_layer.head(top).iter_rows(named=True)
    )
    return Table(title="What backward gives back, in its order", columns=columns, rows=rows)


_LEAKS = (
    Column(key="bytes_a_step", label="a step", kind="bytes"),
    Column(key="bytes", label="in all", kind="bytes"),
    Column(key="steps", label="steps", kind="count"),
    Column(key="where", label="where"),
    Column(key="stack", label="stack", detail=True),
)


def leaks_table(profile: MemoryProfile) -> Table:
    """Memory that one step takes and neither it nor a later one gives back. A step may keep something once, as an
    optimizer does in the first. It is a leak when step after step does, so the first steps do not count, and a stack is
    named only if at least half of the others left something behind there. No rows where nothing leaks, or where there
    are too few steps to tell."""
    title = "Left behind by every step"
    kept = _left_behind(profile)
    if kept is None:
        fewest = _SETTLED + _FEWEST + 1
        return Table(title=title, columns=_LEAKS, rows=(), notes=(f"fewer than {fewest} steps tell nothing",))
    if not kept.height:
        return Table(title=title, columns=_LEAKS, rows=())
    steps = int(kept["num_steps"][0])
    by_stack = (
        kept.group_by("stack", "module", "op")
        .agg(pl.col("bytes").sum(), hit=pl.col("leak_step").n_unique())
        .filter(pl.col("hit") * 2 >= steps)
        .sort("bytes", descending=True)
    )
    rows = []
    for row in by_stack.iter_rows(named=True):
        stack = profile.stack_text(row["stack"])
        where = row["module"] or row["op"] or stack.partition("\n")[0] or "unknown"
        rows.append((row["bytes"] // row["hit"], row["bytes"], row["hit"], where, stack.replace("\n", " < ") or None))
    note = f"of {steps} steps, the first {_SETTLED} and the last left out"
    return Table(title=title, columns=_LEAKS, rows=tuple(rows), notes=(note,))


def _left_behind(profile: MemoryProfile) -> pl.DataFrame | None:
    """What is still there at the end and was taken after the first steps and before the last, with its step."""
    bounds = _step_bounds(profile)
    first, last = _SETTLED, len(bounds) - 1
    if last - first < _FEWEST:
        return None
    starts = np.array([start for start, _ in bounds], dtype=np.int64)
    staying = profile.allocations.filter(pl.col("end_event").is_null() & pl.col("start_event").is_not_null())
    step = np.searchsorted(starts, staying["start_event"].to_numpy(), side="right") - 1
    staying = staying.with_columns(leak_step=pl.Series(step, dtype=pl.Int64), num_steps=pl.lit(last - first))
    return staying.filter(pl.col("leak_step").is_between(first, last - 1))


def _step_bounds(profile: MemoryProfile) -> list[tuple[int, int]]:
    """Marked steps, or, by the stacks of a foreign snapshot, from one beginning of a forward pass to the next."""
    if profile.steps:
        return [span for step in profile.steps if (span := profile.span(step)) is not None]
    staged = profile.allocations.filter(pl.col("phase").is_not_null() & pl.col("start_event").is_not_null())
    staged = staged.sort("start_event").select("start_event", "phase")
    begins = staged.filter((pl.col("phase") == "forward") & (pl.col("phase").shift(1).fill_null("") != "forward"))
    # A forward pass inside of backward, as checkpointing has it, begins no step: a step ends with an optimizer if the
    # file has any.
    if (staged["phase"] == "optimizer").any():
        begins = staged.filter(
            (pl.col("phase") == "forward") & (pl.col("phase").shift(1).fill_null("optimizer") == "optimizer")
        )
    return list(pairwise([*begins["start_event"].to_list(), profile.num_events]))


def saved_table(profile: MemoryProfile) -> Table:
    """What autograd keeps; beside the closed forms where the model is our own."""
    saved, case = profile.recording.saved, profile.recording.manifest.case
    if not saved.height:
        raise StepscopeError(
            "this recording does not say what autograd keeps",
            detail="it has no forward pass with a graph, or is somebody else's snapshot",
            hint="stepscope memory --mode train --table saved",
        )
    eager = case is not None and isinstance(case.workload.model, ModelShape) and not case.workload.compile
    if case is None or not eager or case.workload.checkpoint != "none":
        return saved_by_module(saved)
    return saved_beside_closed_form(saved, activations_of(case.workload))


PARTS = ("categories", "phases", "steps", "modules", "layers", "largest", "freed", "leaks", "saved")
_WHOLE: dict[str, Callable[[MemoryProfile], Table]] = {
    "categories": categories_table,
    "phases": phases_table,
    "steps": steps_table,
    "leaks": leaks_table,
    "saved": saved_table,
}
_RANKED = {"modules": modules_table, "layers": layers_table, "largest": largest_table, "freed": freed_table}


def make_part(profile: MemoryProfile, name: str, *, top: int) -> Table:
    """One part of the page, or one that is too long for it. `top` is how many rows of those that can be many."""
    if name in _WHOLE:
        return _WHOLE[name](profile)
    if name not in _RANKED:
        raise StepscopeError(f"a recording of memory has no `{name}`", detail=f"it has {', '.join(PARTS)}")
    return _RANKED[name](profile, top=top)
