"""A profile as tables: the page in the terminal, its single tables, and the overhead of recording."""

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.trace.attribution.graphs import WAYS
from stepscope.explain.trace.experts import experts_table
from stepscope.explain.trace.loop.loop_tables import loop_table, syncs_table
from stepscope.explain.trace.loop.source_lines import main_sources
from stepscope.explain.trace.module_tree import SMALLER, ModuleNode, add_up_modules, choose_nodes
from stepscope.explain.trace.profile import (
    Profile,
    coverage_in_graphs,
    kernel_word,
    order_phases,
    shares_by_launch,
    times_in_graphs,
)
from stepscope.explain.trace.ranges_table import ranges_table
from stepscope.explain.trace.summary import KernelTime, kernel_times
from stepscope.findings import Cell, Column, Finding, Table, joint_saving
from stepscope.recording.store import Manifest
from stepscope.units import count_noun

_MS = 1e6
_US = 1e3
_INSIDE = "· "  # a module inside another; renderers drop spaces
_MOSTLY_KNOWN = 0.9  # of the time of CUDA graphs; below it, the reason is said
_NOT_SHOWN = "to see which operators were captured, record a step without CUDA graphs"


def _time_columns(profile: Profile) -> tuple[Column, Column, Column]:
    """Return the columns that all tables of kernel time share."""
    return (
        Column(key="kernel_ms", label=f"{kernel_word(profile)}s ms", kind="ms"),
        Column(key="share", label="share", kind="share"),
        Column(key="count", label="count", kind="number"),
    )


def headline(profile: Profile) -> str:
    """Return a recording in a few lines: its source, the step time, how busy the device is, and what is missing."""
    manifest = profile.recording.manifest
    where = f" on {manifest.device}" if manifest.device else ""
    shares = profile.coverage()
    lines = [
        f"{manifest.file or 'recording'}: {manifest.source}{where}",
        _say_clock(profile),
        f"attributed kernel time: class {shares['class']:.1%}, phase {shares['phase']:.1%}, module "
        + (
            f"{shares['module']:.1%}"
            if manifest.modules_recorded or shares["module"]
            else "unknown: the recording has no module names"
        )
        + (f", layer {profile.layer_share:.1%}" if profile.layer_share else ""),
    ]
    if len(profile.devices) > 1:
        lines.append(f"{len(profile.devices)} devices; tables add up their times, findings are about the busiest one")
    by_launch = shares_by_launch(profile)
    if set(by_launch) == {"before"} and not profile.is_serialized:
        lines.append("kernel launches are not recorded: kernels are known by name only")
    elif by_launch.get("before") and not profile.is_serialized:
        before = profile.kernels.filter((pl.col("launched") == "before") & pl.col("phase").is_not_null())
        matched = float(before["time_ns"].sum() / max(1, profile.gpu_time_ns))
        known = f"{matched:.1%} matched with later steps" if matched else "known by name only"
        lines.append(f"launched before the recording began: {by_launch['before']:.1%} of kernel time, {known}")
    lines.extend([told] if (told := say_graphs(profile)) else [])
    lines.extend(f"note: {note}" for note in profile.notes)
    # They are about the steps that were timed before profiling.
    lines.extend(f"warning: unprofiled steps: {doubt.text}" for doubt in manifest.doubts)
    return "\n".join(lines)


def say_graphs(profile: Profile) -> str:
    """Return what is known about the kernels of CUDA graphs, and how; empty without any."""
    share = shares_by_launch(profile).get("graph")
    if not share:
        return ""
    coverage = coverage_in_graphs(profile)
    known = ", ".join(f"{name} {part:.1%}" for name, part in coverage.items())
    times = times_in_graphs(profile).select("matched", "time_ns")
    total = max(1, int(times["time_ns"].sum()))
    ways = ", ".join(f"{time / total:.1%} {WAYS.get(way, 'not matched')}" for way, time in times.iter_rows())
    said = f"launched by CUDA graphs: {share:.1%} of kernel time; of it {known} known ({ways})"
    return said if coverage["operator"] >= _MOSTLY_KNOWN else f"{said}; {_NOT_SHOWN}"


def _say_clock(profile: Profile) -> str:
    """Return the step time, the other clock if there are two, and how busy the device is, as far as that is known."""
    clock = profile.clock
    steps = f"{count_noun(clock.num_steps, 'step')} of" if clock.has_steps else "no marked steps,"
    took = f"{steps} {clock.step_ns / _MS:,.2f} ms"
    if profile.is_serialized:
        return f"{took} of kernels; idle time unknown"
    if clock.unprofiled_ns is not None and clock.kind == "profiled":
        took += f" profiled ({clock.unprofiled_ns / _MS:,.2f} ms unprofiled)"
    elif clock.kind == "unprofiled":
        took += f" ({clock.profiled_ns / _MS:,.2f} ms profiled)"
    what = "operators" if profile.on_cpu else "GPU"
    return f"{took}; {what} busy {1 - clock.idle_share:.1%}, idle {clock.idle_share:.1%}"


def classes_table(profile: Profile) -> Table:
    """Return kernel time by class, next to the step's wall time without double counting."""
    swept: dict[str, int] = {}
    for device in profile.devices:
        for name, time in device.whole.classes.items():
            swept[name] = swept.get(name, 0) + time
    overlap = sum(device.whole.overlap_ns for device in profile.devices)
    clock, devices = profile.clock, len(profile.devices)
    wall = clock.step_ns * clock.num_steps * devices
    rows: list[tuple[Cell, ...]] = [
        (
            row["class"],
            *_times(profile, row),
            _per_step(profile, swept.get(row["class"], 0)),
            swept.get(row["class"], 0) / wall,
        )
        for row in profile.time_by("class").iter_rows(named=True)
    ]
    if overlap:
        rows.append(("overlap", None, None, None, _per_step(profile, overlap), overlap / wall))
    if profile.is_serialized:
        rows += [(name, *[None] * 5) for name in ("idle", "wall")]
    else:
        rows.append(("idle", None, None, None, clock.idle_ns * devices / _MS, clock.idle_share))
        rows.append(("wall", None, None, None, clock.step_ns * devices / _MS, 1.0))
    return Table(
        title="Time by class",
        columns=(
            Column(key="class", label="class"),
            *_time_columns(profile),
            Column(key="alone_ms", label="alone ms", kind="ms"),
            Column(key="wall_share", label="of wall", kind="share"),
        ),
        rows=tuple(rows),
        notes=(scope(profile),),
    )


def phases_table(profile: Profile) -> Table:
    """Return kernel time by phase, with the largest classes of each."""
    rows: list[tuple[Cell, ...]] = []
    parts = profile.time_by("phase", "class")
    for row in profile.time_by("phase").iter_rows(named=True):
        inside = parts.filter(pl.col("phase") == row["phase"]).head(4)
        mostly = ", ".join(
            f"{name} {time / max(1, row['time_ns']):.0%}"
            for name, time in inside.select("class", "time_ns").iter_rows()
        )
        rows.append((row["phase"], *_times(profile, row), mostly))
    return Table(
        title="Time by phase",
        columns=(
            Column(key="phase", label="phase"),
            *_time_columns(profile),
            Column(key="mostly", label="mostly"),
        ),
        rows=tuple(rows),
        notes=(scope(profile),),
    )


def kernels_table(profile: Profile, *, top: int | None = None) -> Table:
    kernels, lines = kernel_times(profile), main_sources(profile)
    source = (Column(key="source", label="line"),) if lines else ()
    word = kernel_word(profile)
    return Table(
        title=f"{word.capitalize()}s by time",
        columns=(
            Column(key="short", label=word),
            Column(key="class", label="class"),
            Column(key="kernel_ms", label="ms", kind="ms"),
            Column(key="share", label="share", kind="share"),
            Column(key="count", label="count", kind="number"),
            Column(key="mean_us", label="mean µs", kind="us"),
            *source,
            Column(key="min_us", label="min µs", kind="us", detail=True),
            Column(key="max_us", label="max µs", kind="us", detail=True),
            Column(key="name", label="name", detail=True),
        ),
        rows=tuple(kernel_row(profile, one, *((lines.get(one.name),) if source else ())) for one in kernels[:top]),
        notes=(scope(profile), *left_out(kernels[:top], kernels, word)),
    )


def kernel_row(profile: Profile, one: KernelTime, *source: str | None) -> tuple[Cell, ...]:
    """Return a row; `source` is the line that launches the kernel, if the recording has lines."""
    return (
        one.short,
        one.kernel_class,
        _per_step(profile, one.time_ns),
        one.share,
        one.count / profile.num_steps,
        one.mean_ns / _US,
        *source,
        one.min_ns / _US,
        one.max_ns / _US,
        one.name,
    )


def modules_table(profile: Profile, *, top: int | None = None) -> Table:
    return _grouped(profile, "module", ("module", "layer"), top)


def tree_table(profile: Profile, *, top: int | None = None) -> Table:
    """Return the modules as a tree, with alike layers folded. What a module runs itself is a row `(self)` inside it, so
    rows of one depth add up."""
    root = add_up_modules(profile.kernels)
    phases = order_phases(root.phases)
    nodes = choose_nodes(root, top)
    hidden = [node for node in nodes if node.label == SMALLER]
    return Table(
        title="Time by module, alike layers folded",
        columns=(
            Column(key="tree", label="module"),
            *_time_columns(profile),
            Column(key="each_ms", label="each ms", kind="ms"),
            Column(key="min_ms", label="min ms", kind="ms"),
            Column(key="max_ms", label="max ms", kind="ms"),
            *(Column(key=f"{phase}_ms", label=f"{phase} ms", kind="ms") for phase in phases),
            Column(key="module", label="path", detail=True),
            Column(key="depth", label="depth", kind="count", detail=True),
            Column(key="copies", label="copies", kind="count", detail=True),
            Column(key="shortest", label="shortest", detail=True),
            Column(key="longest", label="longest", detail=True),
        ),
        rows=tuple(_tree_row(profile, node, phases) for node in nodes),
        notes=(
            scope(profile),
            "each, min and max: of the modules in one row",
            *((f"{SMALLER}: --top {len(choose_nodes(root))} shows all rows",) if hidden else ()),
        ),
    )


def _tree_row(profile: Profile, node: ModuleNode, phases: Sequence[str]) -> tuple[Cell, ...]:
    copies = len(node.copies)
    label = f"{_INSIDE * node.depth}{f'{copies} × ' if copies > 1 else ''}{node.label}"
    ranked = sorted(node.copies, key=lambda single: (node.copies[single], single)) if copies > 1 else []
    spread: tuple[float | None, ...] = (None, None, None)
    if ranked:
        times_ns = (node.time_ns / copies, node.copies[ranked[0]], node.copies[ranked[-1]])
        spread = tuple(_per_step(profile, time_ns) for time_ns in times_ns)
    return (
        label,
        _per_step(profile, node.time_ns),
        node.time_ns / max(1, profile.gpu_time_ns),
        node.count / profile.num_steps,
        *spread,
        *(_per_step(profile, node.phases[phase]) if phase in node.phases else None for phase in phases),
        node.path,
        node.depth,
        copies or None,
        *((ranked[0], ranked[-1]) if ranked else (None, None)),
    )


def layers_table(profile: Profile, *, top: int | None = None) -> Table:
    return _grouped(profile, "layer", ("layer", "phase"), top)


def ops_table(profile: Profile, *, top: int | None = None) -> Table:
    return _grouped(profile, "operator", ("op", "phase"), top)


def steps_table(profile: Profile) -> Table:
    """Return one row per step: its time on the device, and the kernels that started in it."""
    starts, word = pl.Series([start for start, _ in profile.step_windows]), kernel_word(profile)
    place = starts.search_sorted(profile.kernels["start_ns"], side="right") - 1
    ran = profile.kernels.group_by(place=place.cast(pl.Int64)).agg(pl.col("time_ns").sum(), count=pl.len())
    by_place = {place: (time_ns / _MS, count) for place, time_ns, count in ran.iter_rows()}
    rows = tuple(
        (step, (end - start) / _MS, *by_place.get(place, (0.0, 0)))
        for place, (step, (start, end)) in enumerate(
            zip(profile.steps["step"].to_list(), profile.step_windows, strict=False)  # without steps, no rows
        )
    )
    return Table(
        title="Steps",
        columns=(
            Column(key="step", label="step", kind="count"),
            Column(key="wall_ms", label="wall ms", kind="ms"),
            Column(key="kernel_ms", label=f"{word}s ms", kind="ms"),
            Column(key="count", label=f"{word}s", kind="count"),
        ),
        rows=rows,
        notes=() if rows else ("this recording has no marked steps",),
    )


def streams_table(profile: Profile) -> Table:
    """Return the time of each stream, which adds up to the wall time."""
    names = sorted({name for device in profile.devices for one in device.streams.values() for name in one.classes})
    rows: list[tuple[Cell, ...]] = []
    for device in profile.devices:
        for stream, one in device.streams.items():
            times = [_per_step(profile, one.classes.get(name, 0)) for name in names]
            rest = (one.overlap_ns, one.idle_ns, one.wall_ns)
            rows.append((device.device, stream, *times, *(_per_step(profile, time) for time in rest)))
    return Table(
        title="Streams, ms",
        columns=(
            Column(key="device", label="device", kind="count"),
            Column(key="stream", label="stream", kind="count"),
            *(Column(key=name, label=name, kind="ms") for name in (*names, "overlap", "idle", "wall")),
        ),
        rows=tuple(rows),
        notes=(scope(profile),),
    )


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return one row per finding. Findings that are part of another follow it, without a saving of their own."""
    rows = tuple(
        (
            one.code,
            one.title,
            one.saving_ns / _MS if one.saving_ns is not None and one is lead else None,
            one.share if one is lead else None,
            one.joint_ns / _MS if one.joint_ns is not None else None,
            one.action,
            lead.code if one is not lead else None,
            one.evidence,
            one.fix,
        )
        for lead in findings
        for one in (lead, *lead.also)
    )
    joint = joint_saving(findings)
    is_of_trace = any(one.unit == "trace" for one in findings)
    total = (f"all fixes together: {joint.saving_ns / _MS:,.2f} ms, {joint.share:.1%}",) if joint else ()
    return Table(
        title="Findings",
        columns=(
            Column(key="code", label="code"),
            Column(key="title", label="finding"),
            Column(key="saving_ms", label="saves ms" if is_of_trace else "saves ms per step", kind="ms"),
            Column(key="share", label="of the trace" if is_of_trace else "of the step", kind="share"),
            Column(key="adds_ms", label="ms once the fixes above are in", kind="ms"),
            Column(key="action", label="what to do"),
            Column(key="part_of", label="part of", detail=True),
            Column(key="evidence", label="evidence", detail=True),
            Column(key="fix", label="fix", detail=True),
        ),
        rows=rows,
        notes=total if rows else ("no findings",),
    )


def _grouped(profile: Profile, label: str, columns: tuple[str, str], top: int | None) -> Table:
    grouped = profile.time_by(*columns)
    rows = tuple(
        (row[columns[0]], row[columns[1]], *_times(profile, row))
        for row in grouped.head(top or grouped.height).iter_rows(named=True)
    )
    rest = grouped.height - len(rows)
    return Table(
        title=f"Time by {label}",
        columns=(
            Column(key=columns[0], label=label, kind="count" if columns[0] == "layer" else "text"),
            Column(key=columns[1], label=columns[1], kind="count" if columns[1] == "layer" else "text"),
            *_time_columns(profile),
        ),
        rows=rows,
        notes=(scope(profile), *((f"{count_noun(rest, 'more row')}: --top {grouped.height}",) if rest else ())),
    )


def _times(profile: Profile, row: dict[str, Any]) -> tuple[Cell, Cell, Cell]:
    return _per_step(profile, row["time_ns"]), row["share"], row["count"] / profile.num_steps


def _per_step(profile: Profile, time_ns: float) -> float:
    return time_ns / profile.num_steps / _MS


def scope(profile: Profile) -> str:
    steps = profile.num_steps if profile.steps.height else 0
    mean = f"mean of {steps} steps" if steps > 1 else "one step" if steps else "whole recording: no marked steps"
    idle = "; idle and wall: unprofiled" if profile.clock.kind == "unprofiled" else ""
    return f"{mean}{idle}; share: of total {kernel_word(profile)} time"


def left_out(shown: Sequence[KernelTime], kernels: Sequence[KernelTime], word: str) -> tuple[str, ...]:
    rest = kernels[len(shown) :]
    share = sum(one.share for one in rest)
    return (
        (f"{count_noun(len(rest), f'more {word}')}, {share:.1%} of the time: --table kernels --top {len(kernels)}",)
        if rest
        else ()
    )


# The tables of `--table`: those that are always complete, and those that show `top` rows.
_WHOLE: dict[str, Callable[[Profile], Table]] = {
    "classes": classes_table,
    "phases": phases_table,
    "steps": steps_table,
    "streams": streams_table,
    "loop": loop_table,
    "experts": experts_table,
}
_RANKED = {
    "kernels": kernels_table,
    "modules": modules_table,
    "tree": tree_table,
    "layers": layers_table,
    "ops": ops_table,
    "ranges": ranges_table,
    "syncs": syncs_table,
}
PARTS = (*_WHOLE, *_RANKED)


def make_part(profile: Profile, name: str, *, top: int | None = None) -> Table:
    """Return one of `PARTS`."""
    return _RANKED[name](profile, top=top) if name in _RANKED else _WHOLE[name](profile)


_COLUMNS = (
    Column(key="with", label="steps"),
    Column(key="step_ms", label="step", kind="ms"),
    Column(key="vs_plain", label="vs unprofiled", kind="ratio"),
    Column(key="vs_previous", label="vs previous row", kind="ratio"),
)


def overhead_table(manifest: Manifest) -> Table:
    """Return the step time unprofiled, profiled, and profiled with annotations; rows that were not timed are left
    out."""
    script = manifest.loop.script if manifest.loop is not None else ""
    name = describe_case(manifest.case) if manifest.case is not None else script
    assert manifest.overhead is not None, "stepscope's own recordings have an overhead"
    cost = manifest.overhead
    timed = [("unprofiled", cost.plain_ns), ("profiled", cost.recorded_ns), ("profiled, annotated", cost.annotated_ns)]
    known = [(name, value) for name, value in timed if value is not None]
    previous = [None, *(value for _, value in known)]
    rows = tuple(
        (name, value / 1e6, value / cost.plain_ns, value / before if before else None)
        for (name, value), before in zip(known, previous, strict=False)
    )
    doubts = tuple(f"{doubt.code}: {doubt.text}" for doubt in manifest.doubts)
    return Table(
        title=f"{name}, {manifest.device}: profiling overhead, median step in ms",
        columns=_COLUMNS,
        rows=rows,
        notes=(*manifest.notes, *doubts),
    )
