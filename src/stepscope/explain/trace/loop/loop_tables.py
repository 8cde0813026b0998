"""The time of a training loop as tables: its parts, and where the CPU waits for the GPU."""

import polars as pl

from stepscope.explain.trace.loop.loop_time import SYNCHRONISATION, LoopTime, measure_loop, scale_to_clock
from stepscope.explain.trace.loop.waits import locate_waits
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.units import count_noun

_MS = 1e6
LOOP_TITLE, SYNCS_TITLE = "Time of the training loop", "Synchronizations"


def loop_table(profile: Profile) -> Table:
    """Return what the thread of the loop does in a step, in the order of a step. The parts add up to the step."""
    return tabulate_loop(profile, measure_loop(profile))


def tabulate_loop(profile: Profile, loop: LoopTime | None) -> Table:
    columns = [
        Column(key="part", label="part"),
        Column(key="cpu_ms", label="CPU ms", kind="ms"),
        Column(key="share", label="of the step", kind="share"),
        Column(key="calls", label="calls", kind="number"),
        Column(key="each_ms", label="ms per call", kind="ms"),
    ]
    if not profile.on_cpu:
        columns.append(Column(key="gpu_ms", label="GPU ms", kind="ms"))
    if loop is None:
        return Table(title=LOOP_TITLE, columns=tuple(columns), rows=(), notes=(_why_none(profile),))
    rows: list[tuple[Cell, ...]] = [
        (
            part.label,
            part.cpu_ns / _MS,
            part.cpu_ns / max(1.0, loop.step_ns),
            part.calls,
            part.cpu_ns / part.calls / _MS if part.calls else None,
            part.device_ns / _MS,
        )
        for part in loop.parts
    ]
    rows.append(("step", loop.step_ns / _MS, 1.0, None, None, sum(part.device_ns for part in loop.parts) / _MS))
    cut = slice(len(columns))
    return Table(
        title=LOOP_TITLE,
        columns=tuple(columns),
        rows=tuple(row[cut] for row in rows),
        notes=tuple(_list_notes(profile, loop)),
    )


def _why_none(profile: Profile) -> str:
    if not profile.has_steps:
        return "this recording has no marked steps"
    return "nothing on the thread of the steps names a part of them, such as a DataLoader or an optimizer"


def _list_notes(profile: Profile, loop: LoopTime) -> list[str]:
    notes = ["CPU: what the thread of the loop does; the parts add up to the step"]
    if not profile.on_cpu:
        notes[0] += ". GPU: the kernels that a part launched, which may run later"
    if loop.timed is not None:
        notes.append(
            "a profiler slows Python down: loading, backward and the optimizer have the shares that they have in "
            "unprofiled steps, and the other parts are scaled to the rest"
        )
    elif profile.clock.kind == "unprofiled":
        notes.append("profiling slows the CPU down: all parts are scaled to the unprofiled step")
    elif profile.clock.has_overhead:
        notes.append("these are profiled steps: profiling makes Python slower")
    if any(part.key == SYNCHRONISATION for part in loop.parts):
        notes.append("waiting for the GPU counts where it happens and not in the part around it: --table syncs")
    return notes


def syncs_table(profile: Profile, *, top: int | None = None, loop: LoopTime | None = None) -> Table:
    """Return the places where the CPU waits for the GPU by line of code, the longest first. `loop` is measured unless
    it is given."""
    if profile.on_cpu:
        return _tabulate((), ("the model ran on a CPU, which does not wait for a GPU",))
    if profile.is_serialized:
        return _tabulate((), ("kernels ran one at a time: waits of the CPU are not recorded",))
    grouped = find_syncs(profile, measure_loop(profile) if loop is None else loop)
    shown = grouped.head(top or grouped.height)
    clock, has_lines = profile.clock, profile.ops["source"].null_count() < profile.ops.height
    rows = tuple(
        (
            row["line"],
            row["what"],
            row["phase"],
            row["calls"],
            row["ns"] / _MS,
            row["ns"] / max(1.0, clock.step_ns),
            row["op"],
        )
        for row in shown.iter_rows(named=True)
    )
    rest = grouped.height - shown.height
    notes = [clock.reword("calls and CPU time per step; calls that return within 10 µs do not count")]
    if not rows:
        notes = ["the CPU never waits for the GPU in these steps"]
    elif not has_lines and grouped["line"].null_count() == grouped.height:
        notes.append("this recording has no lines of code: `stepscope run`, or torch.profiler.profile(with_stack=True)")
    if rest:
        notes.append(f"{count_noun(rest, 'more row')}: --top {grouped.height}")
    return _tabulate(rows, tuple(notes))


def _tabulate(rows: tuple[tuple[Cell, ...], ...], notes: tuple[str, ...]) -> Table:
    return Table(
        title=SYNCS_TITLE,
        columns=(
            Column(key="line", label="line"),
            Column(key="what", label="what waits"),
            Column(key="phase", label="phase"),
            Column(key="calls", label="calls", kind="number"),
            Column(key="wait_ms", label="CPU waits ms", kind="ms"),
            Column(key="share", label="share", kind="share"),
            Column(key="op", label="operator", detail=True),
        ),
        rows=rows,
        notes=notes,
    )


def find_syncs(profile: Profile, loop: LoopTime | None) -> pl.DataFrame:
    """Return the waits of the CPU by line, what waits and phase: calls and `ns` per step by the clock, and `op`."""
    steps = profile.steps
    window = (int(steps["start_ns"][0]), int(steps["end_ns"][-1])) if steps.height else profile.window
    waits = locate_waits(profile, window)
    scales = scale_to_clock(profile, loop, waits.select("process", "thread", ns="start_ns"))
    clipped = waits.with_columns(
        ns=(pl.col("end_ns").clip(*window) - pl.col("start_ns").clip(*window)) * scales,
        call=pl.coalesce(pl.col("op_row"), -1 - pl.int_range(pl.len(), dtype=pl.Int64)),
    )
    grouped = clipped.group_by("line", "what", "phase").agg(
        calls=pl.col("call").n_unique() / profile.num_steps,
        ns=pl.col("ns").sum() / profile.num_steps,
        op=pl.col("op").mode().sort().first(),
    )
    return grouped.sort("ns", "line", "what", "phase", descending=[True, False, False, False], nulls_last=True)
