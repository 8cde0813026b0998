"""The modules of compiled code in a trace.

A compiler makes one function of a model, in which no module is called any more. It knows from which module each kernel
comes when it generates the code. This is noted then (`measure.compiled_code`), and joined here to the operators of a
trace: both have the same order, and every call of the function is a range in the trace.

The result are ranges like those of annotated modules, one around each operator, with the source `compiled`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import polars as pl

from stepscope.recording.rows.compiled_code import CompiledGraph
from stepscope.recording.store import Recording

COMPILED = "compiled"  # the source of these ranges
MODULE_RANGE = "module:"
_RUN = r"^## Call CompiledFxGraph "
_PLACE = ("start_ns", "end_ns", "process", "thread")
_NUMBERED = r"^graph_\d+_"  # before the names of kernels for CPUs


def name_modules(recording: Recording, graphs: Sequence[CompiledGraph]) -> Recording:
    """Add a range for each operator of compiled code that comes from a known module."""
    # Depending on the version of PyTorch, the profiler records them as ranges or as operators.
    runs = pl.concat([table.filter(_is_run()).select(_PLACE) for table in (recording.ranges, recording.ops)])
    found = [one for run in runs.iter_rows(named=True) for one in _name_run(run, recording.ops, graphs)]
    if not found:
        return recording
    named = pl.DataFrame(found, schema_overrides=recording.ranges.schema).select(recording.ranges.columns)
    ranges = pl.concat([recording.ranges, named]).sort("start_ns", "end_ns", descending=[False, True])
    return replace(recording, ranges=ranges).with_manifest(modules_recorded=True)


def _is_run() -> pl.Expr:
    return pl.col("name").str.contains(_RUN)


def _name_run(run: dict[str, Any], ops: pl.DataFrame, graphs: Sequence[CompiledGraph]) -> Iterator[dict[str, Any]]:
    """Yield ranges for one call of a compiled function. Which graph it ran is known from the order of its operators."""
    here = ops.filter(
        pl.col("process").eq_missing(run["process"]),
        pl.col("thread").eq_missing(run["thread"]),
        pl.col("start_ns").is_between(run["start_ns"], run["end_ns"], closed="left"),
        ~_is_run(),
    )
    # Operators that another one calls are not calls of the generated code.
    outer = here.sort("start_ns", "end_ns", descending=[False, True]).filter(
        pl.col("end_ns") > pl.col("end_ns").cum_max().shift(1).fill_null(-1)
    )
    names = outer["name"].str.replace(_NUMBERED, "").to_list()
    ways = [(_align(names, graph), graph) for graph in graphs]
    # The most operators, and of a graph without others.
    calls, _ = max(ways, key=lambda way: (len(way[0]), -len(way[1].calls)), default=({}, None))
    for row, (start_ns, end_ns) in enumerate(outer.select("start_ns", "end_ns").iter_rows()):
        if module := calls.get(row):
            yield {
                "name": f"{MODULE_RANGE}{module}",
                "start_ns": start_ns,
                "end_ns": end_ns,
                "process": run["process"],
                "thread": run["thread"],
                "source": COMPILED,
                "source_line": None,
            }


def _align(names: Sequence[str], graph: CompiledGraph) -> dict[int, str | None]:
    """The modules of operators, by position. Not every operator that the profiler sees is a call, and not every call
    is an operator."""
    wanted = [one.operator for one in graph.calls]
    both = set(names) & set(wanted)
    ours = [number for number, name in enumerate(wanted) if name in both]
    theirs = [number for number, name in enumerate(names) if name in both]
    kept, seen = [wanted[number] for number in ours], [names[number] for number in theirs]
    if kept == seen:
        return {row: graph.calls[number].module for row, number in zip(theirs, ours, strict=True)}
    blocks = SequenceMatcher(None, kept, seen, autojunk=False).get_matching_blocks()
    return {
        theirs[block.b + place]: graph.calls[ours[block.a + place]].module
        for block in blocks
        for place in range(block.size)
    }
