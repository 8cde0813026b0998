"""Turns the raw trace of a recorded loop into the recording of its rank.

The trace has no unprofiled times and no source lines: they come from the document that the training process wrote next
to it. Operators are matched with those of the step that was recorded with stacks by their order: if both steps run the
same operators, one by one; otherwise each operator whose number of calls is the same, call by call.
"""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.ranks.activity_file import save_rank
from stepscope.explain.statistics import summarise
from stepscope.files import decode_as, read_plain
from stepscope.recording import EVALUATE, store, tables
from stepscope.recording.compiled_code import keep_calls, name_modules, say_unknown_runs
from stepscope.recording.memory import reader
from stepscope.recording.memory.labels import SNAPSHOT_NAME
from stepscope.recording.nesting import around, innermost
from stepscope.recording.readers import kineto
from stepscope.recording.rows.compiled_code import load_graphs
from stepscope.recording.rows.loop_run import HANDOVER_NAME, SCHEMA, TRACE_NAME, UNKNOWN_LINE, LoopRun, SourceLines
from stepscope.recording.store import Overhead, Recording

_STEP = r"^step:(\d+)$"
_SYNC, _BETWEEN = "sync:", "@"


def reduce_rank(raw: Path, folder: Path, *, command: str) -> Recording:
    """Save the recording of a rank in `folder`, and delete the raw files."""
    run = _read_handover(raw)
    trace, graphs = kineto.read(raw / TRACE_NAME), load_graphs(raw)
    notes = (*trace.manifest.notes, *say_unknown_runs(trace, graphs))
    named = keep_calls(name_modules(trace, graphs), graphs)
    recording = describe_loop(named.with_manifest(notes=notes), run, command=command)
    save_rank(recording, folder, force=True)
    shutil.rmtree(raw)
    return recording


def reduce_memory(raw: Path, folder: Path, *, command: str) -> None:
    """Save the recording of a memory history in `folder`, and delete the raw files."""
    recording = reader.read(raw / SNAPSHOT_NAME)
    store.save(recording.with_manifest(command=command), folder, force=True)
    shutil.rmtree(raw)


def _read_handover(raw: Path) -> LoopRun:
    try:
        return decode_as(read_plain(raw / HANDOVER_NAME), LoopRun, SCHEMA)
    except (OSError, msgspec.DecodeError) as error:
        raise StepscopeError(f"cannot read `{raw / HANDOVER_NAME}`", detail=str(error)[:200]) from None


def describe_loop(recording: Recording, run: LoopRun, *, command: str) -> Recording:
    """Add what the trace does not contain: the loop, its environment, unprofiled times and source lines."""
    if run.is_whole_trace:
        ranges, windows = recording.ranges, _find_whole(recording.ops)
    else:
        ranges = _read_syncs(_drop_incomplete(recording.ranges, run.recorded_steps))
        windows = ranges.filter(pl.col("name").str.contains(_STEP)).sort("start_ns")
    ops = add_sources(recording.ops, windows, run.sources)
    environment = run.environment
    versions = {"python": environment.python, "torch": environment.torch, "stepscope": environment.stepscope}
    described = recording.with_manifest(
        file="",
        loop=run.facts,
        environment=environment,
        device=environment.driver_name,
        rank=run.rank if run.world_size > 1 else None,
        world_size=run.world_size if run.world_size > 1 else None,
        versions=recording.manifest.versions | versions,
        command=command,
        started=run.started,
        doubts=run.doubts,
        expert_tokens=run.expert_tokens,
        parameters=run.parameters,
        optimizer=run.optimizer,
        compiled=run.compiled,
        notes=(*recording.manifest.notes, *run.facts.notes),
        overhead=_measure_overhead(run),
    )
    return replace(described, ranges=ranges, ops=ops, steps=_steps_table(run))


def _measure_overhead(run: LoopRun) -> Overhead | None:
    samples = [sum(parts) for parts in zip(*run.phases_ns.values(), strict=True)]
    plain_ns = round(summarise(samples).median) if samples else 0
    if not plain_ns:
        return None
    recorded_ns = round(summarise(run.recorded_step_ns).median) if run.recorded_step_ns else 0
    return Overhead(plain_ns=plain_ns, annotated_ns=recorded_ns or None)


def _steps_table(run: LoopRun) -> pl.DataFrame:
    rows = [
        {"phase": phase, "step": step, "duration_ns": duration_ns, "clock": run.clock}
        for phase, durations_ns in run.phases_ns.items()
        for step, duration_ns in enumerate(durations_ns)
    ]
    return tables.conform("steps", pl.DataFrame(rows, schema=tables.SCHEMAS["steps"]).sort("step", maintain_order=True))


def _drop_incomplete(ranges: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """The script may have ended inside the last step that was marked."""
    number = pl.col("name").str.extract(_STEP).cast(pl.Int64, strict=False)
    return ranges.filter(number.is_null() | (number < num_steps))


def _read_syncs(ranges: pl.DataFrame) -> pl.DataFrame:
    """The name of an explicit synchronization has its line."""
    name, is_sync = pl.col("name"), pl.col("name").str.starts_with(_SYNC)
    parts = name.str.splitn(_BETWEEN, 2)
    line = parts.struct.field("field_1")
    return ranges.with_columns(
        name=pl.when(is_sync).then(parts.struct.field("field_0")).otherwise(name),
        source_line=pl.when(is_sync & (line != "")).then(line),
    )


# --- Source lines -----------------------------------------------------------------------------------------------------


def _find_whole(ops: pl.DataFrame) -> pl.DataFrame:
    """The thread with the most operators outside the backward pass, over the whole trace."""
    outside = ops.filter(pl.col("forward_thread").is_null())
    end_ns = pl.col("end_ns").max() + 1  # exclusive
    threads = outside.group_by("process", "thread").agg(pl.len(), start_ns=pl.col("start_ns").min(), end_ns=end_ns)
    return threads.sort("len", "thread", descending=[True, False]).head(1)


def add_sources(ops: pl.DataFrame, steps: pl.DataFrame, sources: SourceLines) -> pl.DataFrame:
    """Return operators with their `source`. Operators of the backward pass have the line of the forward operator whose
    gradient they compute. `steps` (process, thread, start_ns, end_ns) each run the operators of `sources`."""
    if not sources.names or not steps.height:
        return ops
    numbered = ops.with_row_index("place")
    nodes = numbered.filter(pl.col("name").str.starts_with(EVALUATE))
    in_node = innermost(nodes, numbered.select("process", "thread", ns="start_ns")).is_not_null()
    forward = numbered.filter(~in_node)
    found: dict[int, str] = {}
    for start_ns, end_ns, process, thread in steps.select("start_ns", "end_ns", "process", "thread").iter_rows():
        here = (pl.col("process") == process) & (pl.col("thread") == thread)
        inside = pl.col("start_ns").is_between(start_ns, end_ns, closed="left")
        step = forward.filter(here & inside).sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)
        found |= _match(step, sources)
    lines = pl.DataFrame(
        {"place": list(found), "source": list(found.values())}, schema={"place": pl.UInt32, "source": pl.String}
    )
    known = numbered.drop("source").join(lines, on="place", how="left", maintain_order="left")
    return _follow_gradients(known, nodes, in_node).select(ops.columns)


def _match(step: pl.DataFrame, sources: SourceLines) -> dict[int, str]:
    """Return the lines of the operators of a step, by row."""
    rows, names = step["place"].to_list(), step["name"].to_list()
    if tuple(names) == sources.names:
        pairs = zip(rows, sources.places, strict=True)
        return {row: sources.lines[place] for row, place in pairs if place != UNKNOWN_LINE}
    calls, recorded = Counter(names), Counter(sources.names)
    places: dict[str, list[int]] = {}
    for name, place in zip(sources.names, sources.places, strict=True):
        places.setdefault(name, []).append(place)
    seen: Counter[str] = Counter()
    found = {}
    for row, name in zip(rows, names, strict=True):
        if calls[name] == recorded[name]:
            place = places[name][seen[name]]
            if place != UNKNOWN_LINE:
                found[row] = sources.lines[place]
        elif len(only := set(places.get(name, ()))) == 1 and UNKNOWN_LINE not in only:
            found[row] = sources.lines[next(iter(only))]
        seen[name] += 1
    return found


def _follow_gradients(ops: pl.DataFrame, nodes: pl.DataFrame, in_node: pl.Series) -> pl.DataFrame:
    """Give the operators inside an autograd node the line of the operator that created it."""
    made = ops.filter(~in_node & pl.col("sequence").is_not_null() & pl.col("source").is_not_null())
    makers = made.group_by("process", "sequence").agg(made=pl.col("source").last())
    lines = nodes.drop("source").join(makers, on=["process", "sequence"], how="left", maintain_order="left")
    points = ops.select("process", "thread", ns="start_ns")
    inherited = around(lines, "made", points)
    return ops.with_columns(source=pl.when(in_node).then(inherited).otherwise("source"))
