"""The tables of a memory profile: the page for the terminal, and each of its parts."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import polars as pl

from stepscope.cost.activations import activations_of
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.memory.categories import name_place
from stepscope.explain.memory.memory_profile import UNKNOWN, MemoryProfile
from stepscope.explain.memory.out_of_memory import (
    MemoryFailure,
    find_out_of_memory,
    request_table,
    say_failure,
    say_rest_of_step,
)
from stepscope.explain.memory.saved import saved_and_predicted, saved_by_module
from stepscope.explain.memory.timeline import label_of, say_shape, say_when
from stepscope.explain.rules.out_of_memory import find_fixes
from stepscope.findings import Cell, Column, Page, Table
from stepscope.recording.rows.memory_summary import Allocation, MemorySummary
from stepscope.spec import ModelShape
from stepscope.units import say_bytes

_ON_A_PAGE = 8
_SETTLED = 2  # steps until one-time allocations are done
_FEWEST = 3
_SIZE = Column(key="bytes", label="size", kind="bytes")
_SHARE = Column(key="share", label="share", kind="share")


def memory_page(profile: MemoryProfile) -> Page:
    oom = find_out_of_memory(profile)
    if oom is not None:
        return _failure_page(oom)
    tables = [categories_table(profile), phases_table(profile), largest_table(profile, top=_ON_A_PAGE)]
    leaks = leaks_table(profile)
    if leaks.rows:
        tables.append(leaks)
    return Page(headline=headline(profile), tables=tuple(tables), findings=None)


def _failure_page(oom: MemoryFailure) -> Page:
    profile, event = oom.profile, oom.event
    tables = (
        request_table(oom),
        categories_table(profile, event=event),
        modules_table(profile, top=_ON_A_PAGE, event=event),
        largest_table(profile, top=_ON_A_PAGE, event=event),
    )
    shown = tuple(table for table in tables if table.rows)
    lines = (say_failure(oom), say_rest_of_step(oom), headline(profile))
    return Page(headline="\n".join(line for line in lines if line), tables=shown, findings=find_fixes(oom))


def headline(profile: MemoryProfile) -> str:
    """What was recorded, when memory peaks, and what stays allocated."""
    summary, manifest = profile.summary, profile.recording.manifest
    case = manifest.case
    what = describe_case(case) if case else manifest.file or "recording"
    where = f" on {manifest.device}" if manifest.device else ""
    lines = [f"{what}: {manifest.source}{where}, {summary.num_allocations:,} allocations", _say_peak(summary)]
    if summary.steps:
        last = summary.steps[-1]
        cached = _say_cached(last.end_bytes, last.end_reserved_bytes)
        lines.append(f"after each step {say_bytes(last.end_bytes)} stays allocated{cached}")
    if summary.allocator_peak_bytes is not None and summary.allocator_peak_bytes != summary.peak_bytes:
        lines.append(f"warning: the allocator reports a peak of {summary.allocator_peak_bytes:,} bytes")
    if summary.estimated_bytes:
        lines.append(f"note: {say_bytes(summary.estimated_bytes)} allocated before the recording is an estimate")
    lines.extend(f"note: {note}" for note in summary.notes)
    return "\n".join(lines)


def _say_peak(summary: MemorySummary) -> str:
    step = f"step {summary.peak_step + 1}" if summary.peak_step is not None else ""
    place = ", ".join(part for part in (step, summary.peak_phase, summary.peak_module) if part)
    there = f"; {say_bytes(summary.before_bytes)} was allocated before the recording" if summary.before_bytes else ""
    held = _say_cached(summary.peak_bytes, summary.reserved_bytes)
    return f"peak {say_bytes(summary.peak_bytes)}{f' in {place}' if place else ''}{held}{there}"


def _say_cached(allocated: int, reserved: int | None) -> str:
    if reserved is None:
        return ""
    return f" ({say_bytes(reserved)} reserved, {say_bytes(reserved - allocated)} of it cached)"


def categories_table(profile: MemoryProfile, *, event: int | None = None) -> Table:
    """Bytes by category at the peak, or after an event; they add up to it."""
    title = "Peak memory by category" if event is None else "Memory held by category"
    event = profile.peak_event if event is None else event
    peak = profile.allocated_at(event)
    rows: list[tuple[Cell, ...]] = [
        (name, size, size / peak if peak else None) for name, size in profile.categories_at(event) if size
    ]
    rows.append(("total", peak, 1.0 if peak else None))
    notes = []
    if dict(profile.categories_at(event))[UNKNOWN]:
        notes.append("unknown: no stacks, which may include parameters, gradients and optimizer state")
    reserved = profile.reserved
    if reserved is not None and event >= 0:
        notes.append(_say_fragments(profile, event, int(reserved[event])))
    return Table(
        title=title,
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
        f"reserved {say_bytes(reserved)}: {say_bytes(idle)} ({share:.1%}) unused, {say_bytes(rounded)} lost to rounding"
    )


def modules_table(profile: MemoryProfile, *, top: int, event: int | None = None) -> Table:
    return _by(profile, "module", top, event)


def layers_table(profile: MemoryProfile, *, top: int, event: int | None = None) -> Table:
    return _by(profile, "layer", top, event)


def _by(profile: MemoryProfile, column: str, top: int, event: int | None) -> Table:
    title = f"{'Peak memory' if event is None else 'Memory held'} by {column}"
    event = profile.peak_event if event is None else event
    peak = profile.allocated_at(event)
    found = profile.share_at(event, column)
    rest = sum(size for _, size in found[top:])
    rows: list[tuple[Cell, ...]] = [(name, size, size / peak if peak else None) for name, size in found[:top]]
    if rest:
        rows.append((f"{len(found) - top} more", rest, rest / peak))
    unknown = dict(found).get(UNKNOWN)
    notes = (f"{UNKNOWN}: allocated outside any module, for example in the loss or the optimizer",) if unknown else ()
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
    notes = _phase_notes(profile, marked=marked) if rows else ()
    return Table(title="Memory by phase", columns=tuple(columns), rows=tuple(rows), notes=notes)


def _phase_notes(profile: MemoryProfile, *, marked: bool) -> tuple[str, ...]:
    if not marked:
        return ("phases are inferred from stacks: this file has no step markers",)
    case = profile.recording.manifest.case
    passes = case.workload.passes if case else 1
    notes = ["forward includes the loss"] if _is_loss_inside(profile) else []
    if passes > 1:
        notes.append(
            f"each step runs {passes} micro-batches: `before` and `after` are those of the last one, `peak` is the "
            "highest"
        )
    return tuple(notes)


def _is_loss_inside(profile: MemoryProfile) -> bool:
    outer, inner = (profile.phase_spans(profile.steps[-1], phase) for phase in ("forward", "loss"))
    return any(start <= first and last <= end for start, end in outer for first, last in inner)


def steps_table(profile: MemoryProfile) -> Table:
    rows = tuple((one.step + 1, one.peak_bytes, one.end_bytes, one.end_reserved_bytes) for one in profile.summary.steps)
    return Table(
        title="Memory by step",
        columns=(
            Column(key="step", label="step", kind="count"),
            Column(key="peak_bytes", label="peak", kind="bytes"),
            Column(key="end_bytes", label="after step", kind="bytes"),
            Column(key="end_reserved_bytes", label="reserved", kind="bytes"),
        ),
        rows=rows,
    )


def largest_table(profile: MemoryProfile, *, top: int, event: int | None = None) -> Table:
    """The largest allocations at the peak, or after an event."""
    found = profile.largest_at(profile.peak_event if event is None else event, top)
    if event is not None:
        return _largest_held(found)
    return Table(
        title="Largest allocations at the peak",
        columns=(
            _SIZE,
            Column(key="category", label="category"),
            Column(key="what", label="tensor"),
            Column(key="shape", label="shape"),
            Column(key="taken", label="allocated in"),
            Column(key="module", label="module", detail=True),
            Column(key="op", label="operator", detail=True),
            Column(key="name", label="name", detail=True),
            Column(key="stack", label="stack", detail=True),
        ),
        rows=tuple(map(_describe, found)),
    )


def _largest_held(found: Sequence[Allocation]) -> Table:
    """What was alive at one moment: the line that allocated it says more than when that was."""
    return Table(
        title="Largest tensors held",
        columns=(
            _SIZE,
            Column(key="category", label="category"),
            Column(key="what", label="tensor"),
            Column(key="shape", label="shape"),
            Column(key="line", label="allocated at"),
            Column(key="stack", label="stack", detail=True),
        ),
        rows=tuple(
            (
                one.bytes,
                one.category,
                label_of(one, one.module),
                say_shape(one) or None,
                name_place(one.stack) or None,
                one.stack.replace("\n", " < ") or None,
            )
            for one in found
        ),
    )


def _describe(one: Allocation) -> tuple[Cell, ...]:
    what = label_of(one, one.module)
    where = name_place(one.stack) if not one.module else ""
    return (
        one.bytes,
        one.category,
        f"{what} at {where}" if where else what,
        say_shape(one) or None,
        say_when(one) or None,
        one.module,
        one.op,
        one.name,
        one.stack.replace("\n", " < ") or None,
    )


def freed_table(profile: MemoryProfile, *, top: int) -> Table:
    """The activations that the last backward pass frees, by layer, in the order in which they are freed."""
    span = profile.span(profile.steps[-1], "backward") if profile.steps else None
    columns = (
        Column(key="layer", label="layer"),
        Column(key="freed_bytes", label="activations freed", kind="bytes"),
        Column(key="taken_bytes", label="gradients allocated", kind="bytes"),
        Column(key="allocated_bytes", label="allocated after", kind="bytes"),
    )
    if span is None:
        return Table(title="Activations freed by backward", columns=columns, rows=())
    held = profile.allocations.filter(pl.col("category") == "activations")
    freed = held.filter(pl.col("end_event").is_between(span[0], span[1] - 1))
    grads = profile.allocations.filter(
        (pl.col("category") == "gradients") & pl.col("start_event").is_between(span[0], span[1] - 1)
    )
    by_layer = freed.group_by("layer").agg(pl.col("bytes").sum(), last=pl.col("end_event").max()).sort("last", "layer")
    taken = dict(grads.group_by("layer").agg(pl.col("bytes").sum()).iter_rows())
    rows = tuple(
        (
            "outside layers" if row["layer"] is None else str(row["layer"]),
            row["bytes"],
            taken.get(row["layer"]),
            profile.allocated_at(row["last"]),
        )
        for row in by_layer.head(top).iter_rows(named=True)
    )
    return Table(title="Activations freed by backward, in order", columns=columns, rows=rows)


_LEAKS = (
    Column(key="bytes_a_step", label="per step", kind="bytes"),
    Column(key="bytes", label="total", kind="bytes"),
    Column(key="steps", label="steps", kind="count"),
    Column(key="where", label="where"),
    Column(key="stack", label="stack", detail=True),
)


def leaks_table(profile: MemoryProfile) -> Table:
    """Memory that a step allocates and no later step frees. A step may keep something once, as an optimizer does in the
    first step. It is a leak if step after step does, so the first steps do not count, and a stack is listed only if at
    least half of the other steps leaked there. No rows if nothing leaks or there are too few steps."""
    title = "Memory leaked per step"
    kept = _left_behind(profile)
    if kept is None:
        fewest = _SETTLED + _FEWEST + 1
        return Table(title=title, columns=_LEAKS, rows=(), notes=(f"finding leaks requires at least {fewest} steps",))
    if not kept.height:
        return Table(title=title, columns=_LEAKS, rows=())
    steps = int(kept["num_steps"][0])
    by_stack = (
        kept.group_by("stack", "module", "op")
        .agg(pl.col("bytes").sum(), hit=pl.col("leak_step").n_unique())
        .filter(pl.col("hit") * 2 >= steps)
        .sort("bytes", "stack", "module", "op", descending=[True, False, False, False])
    )
    rows = []
    for row in by_stack.iter_rows(named=True):
        stack = profile.stack_text(row["stack"])
        where = row["module"] or row["op"] or name_place(stack) or "unknown"
        rows.append((row["bytes"] // row["hit"], row["bytes"], row["hit"], where, stack.replace("\n", " < ") or None))
    note = f"over {steps} steps, excluding the first {_SETTLED} and the last"
    return Table(title=title, columns=_LEAKS, rows=tuple(rows), notes=(note,))


def _left_behind(profile: MemoryProfile) -> pl.DataFrame | None:
    """Allocations made after the first steps and before the last that are never freed, with their steps. None if there
    are too few steps."""
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
    """The marked steps; in a snapshot from another tool, from the start of one forward pass to the next, by stacks."""
    if profile.steps:
        return [span for step in profile.steps if (span := profile.span(step)) is not None]
    staged = profile.allocations.filter(pl.col("phase").is_not_null() & pl.col("start_event").is_not_null())
    staged = staged.sort("start_event").select("start_event", "phase")
    begins = staged.filter((pl.col("phase") == "forward") & (pl.col("phase").shift(1).fill_null("") != "forward"))
    # Checkpointing runs forward inside backward, which does not start a step: if the file has an optimizer, a step
    # ends with it.
    if (staged["phase"] == "optimizer").any():
        begins = staged.filter(
            (pl.col("phase") == "forward") & (pl.col("phase").shift(1).fill_null("optimizer") == "optimizer")
        )
    return list(pairwise([*begins["start_event"].to_list(), profile.num_events]))


def saved_table(profile: MemoryProfile) -> Table:
    """The saved activations, compared with the formula for the built-in model."""
    saved, case = profile.recording.saved, profile.recording.manifest.case
    if not saved.height:
        raise StepscopeError(
            "this recording has no saved activations",
            detail="the step ran without autograd, or another tool made the snapshot",
            hint="stepscope memory --mode train --table saved",
        )
    eager = case is not None and isinstance(case.workload.model, ModelShape) and not case.workload.hides_modules
    if case is None or not eager or case.workload.checkpoint != "none":
        return saved_by_module(saved)
    return saved_and_predicted(saved, activations_of(case.workload))


def fixes_table(profile: MemoryProfile) -> Table:
    """What would have fit if memory ran out."""
    oom = find_out_of_memory(profile)
    return Table(
        title="Findings",
        columns=(
            Column(key="code", label="code"),
            Column(key="title", label="finding"),
            Column(key="saving_bytes", label="saves", kind="bytes"),
            Column(key="is_enough", label="enough alone"),
            Column(key="action", label="what to do"),
            Column(key="evidence", label="evidence", detail=True),
            Column(key="fix", label="fix", detail=True),
        ),
        rows=tuple(
            (one.code, one.title, one.saving_bytes, _ENOUGH[one.is_enough], one.action, one.evidence, one.fix)
            for one in (find_fixes(oom) if oom is not None else ())
        ),
        notes=() if oom is not None else ("memory did not run out in this recording",),
    )


_ENOUGH = {True: "yes", False: "no", None: None}
PARTS = ("categories", "phases", "steps", "modules", "layers", "largest", "freed", "leaks", "saved", "findings")
_WHOLE: dict[str, Callable[[MemoryProfile], Table]] = {
    "categories": categories_table,
    "phases": phases_table,
    "steps": steps_table,
    "leaks": leaks_table,
    "saved": saved_table,
    "findings": fixes_table,
}
_RANKED = {"modules": modules_table, "layers": layers_table, "largest": largest_table, "freed": freed_table}


def make_part(profile: MemoryProfile, name: str, *, top: int) -> Table:
    """Return the table `name`. `top` limits the rows of tables that can be long."""
    if name in _WHOLE:
        return _WHOLE[name](profile)
    if name not in _RANKED:
        raise StepscopeError(f"a memory snapshot has no table `{name}`", detail=f"expected one of {', '.join(PARTS)}")
    return _RANKED[name](profile, top=top)
