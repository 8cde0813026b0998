"""The modules of compiled code in a trace.

A compiler makes one function of a model, in which no module is called any more. It knows from which module each kernel
comes when it generates the code. This is noted then (`measure.compiled_code`), and joined here to the operators of a
trace: both have the same order, and every call of the function is a range in the trace.

The results are ranges like those of annotated modules, one around each operator, with the source `compiled`. Kernels of
CUDA graphs have no operator in the trace: for them, the calls become a table of the recording.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

import polars as pl

from stepscope.recording import EVALUATE, tables
from stepscope.recording.nesting import around, innermost, look_up
from stepscope.recording.rows.compiled_code import CompiledGraph
from stepscope.recording.store import Recording

COMPILED = "compiled"  # the source of these ranges
MODULE_RANGE = "module:"
_RUN = r"^## Call CompiledFxGraph (\S+) ##"
_NO_KEY = "None"
_PLACE = ("process", "thread", "start_ns", "end_ns")
_NUMBERED = r"^graph_\d+_"  # before the names of kernels for CPUs

_Modules = dict[int, str | None]  # of operators, by position


def name_modules(recording: Recording, graphs: Sequence[CompiledGraph]) -> Recording:
    """Add a range for each operator of compiled code that comes from a known module."""
    if not graphs:
        return recording
    found = [
        one for run in _find_callers(recording).iter_rows(named=True) for one in _name_run(run, recording.ops, graphs)
    ]
    if not found:
        return recording
    named = pl.DataFrame(found, schema_overrides=recording.ranges.schema).select(recording.ranges.columns)
    ranges = pl.concat([recording.ranges, named]).sort("start_ns", "end_ns", descending=[False, True])
    return replace(recording, ranges=ranges).with_manifest(modules_recorded=True)


def keep_calls(recording: Recording, graphs: Sequence[CompiledGraph]) -> Recording:
    """Keep the calls of compiled functions if CUDA graphs run kernels: they show the modules of these."""
    has_graphs = recording.launches["name"].str.contains("GraphLaunch").any() or recording.kernels["graph"].any()
    rows = [
        (number, graph.key, graph.is_backward, call.kernel, call.module)
        for number, graph in enumerate(graphs)
        for call in graph.calls
    ]
    if not has_graphs or not any(module for *_, module in rows):
        return recording
    calls = pl.DataFrame(rows, schema=tables.SCHEMAS["compiled_calls"], orient="row")
    return replace(recording, compiled_calls=calls).with_manifest(modules_recorded=True)


def find_runs(recording: Recording) -> pl.DataFrame:
    """The calls of compiled functions (process, thread, start_ns, end_ns, key)."""
    # Depending on the version of PyTorch, the profiler records them as ranges or as operators.
    key = pl.col("name").str.extract(_RUN).replace(_NO_KEY, None).alias("key")
    return pl.concat([table.filter(_is_run()).select(*_PLACE, key) for table in (recording.ranges, recording.ops)])


def say_unknown_runs(recording: Recording, graphs: Sequence[CompiledGraph]) -> tuple[str, ...]:
    """Say that there are calls of code that was not seen when it was compiled, and how to see it."""
    runs = find_runs(recording)
    unknown = runs.filter(~pl.col("key").is_in({one.key for one in graphs}, nulls_equal=True)).height
    if not unknown:
        return ()
    return (
        f"modules are unknown in {unknown:,} of {runs.height:,} calls of compiled code, which may have been compiled "
        "before the recording began or come from the cache of AOTAutograd; `TORCHINDUCTOR_AUTOGRAD_CACHE=0 stepscope "
        "run SCRIPT` sees all of it",
    )


def _is_run() -> pl.Expr:
    return pl.col("name").str.contains(_RUN)


def _is_here(place: dict[str, Any]) -> pl.Expr:
    return pl.all_horizontal(pl.col(name).eq_missing(place[name]) for name in ("process", "thread"))


def _find_callers(recording: Recording) -> pl.DataFrame:
    """The runs of compiled code, with `caller`, the module that called each (in backward, the one that called the run
    of forward), and `runs_once`: whether that call of the module ran the code only once."""
    runs = find_runs(recording)
    calls = recording.ranges.filter(pl.col("name").str.starts_with(MODULE_RANGE))
    numbered = recording.ops.filter(pl.col("sequence").is_not_null())
    nodes = numbered.filter(pl.col("name").str.starts_with(EVALUATE))
    forward = numbered.filter(pl.col("forward_thread").is_null())
    began = runs.select("process", "thread", ns="start_ns")
    run = began.select("process", before_ns="ns", sequence=around(nodes, "sequence", began)).with_row_index("row")
    made = forward.select("process", "thread", "sequence", ns="start_ns")
    makers = run.join(made, on=["process", "sequence"], nulls_equal=True).filter(pl.col("ns") < pl.col("before_ns"))
    last = makers.sort("ns").unique("row", keep="last").select("row", "thread", "ns")
    maker = run.join(last, on="row", how="left", maintain_order="left").select("process", "thread", "ns")
    call = pl.select(pl.coalesce(innermost(calls, began), innermost(calls, maker))).to_series()
    return runs.with_columns(
        caller=look_up(calls, "name", call).str.strip_prefix(MODULE_RANGE),
        runs_once=call.is_not_null() & (pl.len().over("key", call) == 1),
    )


def _name_run(run: dict[str, Any], ops: pl.DataFrame, graphs: Sequence[CompiledGraph]) -> Iterator[dict[str, Any]]:
    """Yield ranges for one call of a compiled function."""
    here = ops.filter(
        _is_here(run), pl.col("start_ns").is_between(run["start_ns"], run["end_ns"], closed="left"), ~_is_run()
    )
    # Operators that another one calls are not calls of the generated code.
    outer = here.sort("start_ns", "end_ns", descending=[False, True]).filter(
        pl.col("end_ns") > pl.col("end_ns").cum_max().shift(1).fill_null(-1)
    )
    names = outer["name"].str.replace(_NUMBERED, "").to_list()
    codes = [one for one in graphs if one.key == run["key"]]
    modules = _find_modules(names, codes, run["caller"], runs_once=run["runs_once"])
    for row, (start_ns, end_ns) in enumerate(outer.select("start_ns", "end_ns").iter_rows()):
        if module := modules.get(row):
            yield {
                "name": f"{MODULE_RANGE}{module}",
                "start_ns": start_ns,
                "end_ns": end_ns,
                "process": run["process"],
                "thread": run["thread"],
                "source": COMPILED,
                "source_line": None,
            }


def _find_modules(
    names: Sequence[str], graphs: Sequence[CompiledGraph], caller: str | None, *, runs_once: bool
) -> _Modules:
    """The modules of these operators. Without a key, or if several graphs have the same one, the order of operators
    tells which of them ran, and what is not the same in all that fit stays unknown."""
    ways = [(_align(names, graph), graph) for graph in graphs]
    # The most operators, and of a graph without others.
    fits = [(len(found), -len(graph.calls)) for found, graph in ways]
    moved = []
    for (found, graph), fit in zip(ways, fits, strict=True):
        if fit == max(fits):
            modules = move_modules([call.module for call in graph.calls], caller, runs_once=runs_once)
            moved.append({row: modules[call] for row, call in found.items()})
    return (
        {row: module for row, module in moved[0].items() if all(one.get(row) == module for one in moved)}
        if moved
        else {}
    )


def move_modules(modules: Sequence[str | None], caller: str | None, *, runs_once: bool = False) -> Sequence[str | None]:
    """The modules of compiled code in the layer that called it. If all are in one layer and the caller is outside, the
    code may run for other layers too: then they are unknown, unless it `runs_once` per call."""
    if not runs_once and any(label.isdecimal() for label in find_shared(modules, caller)):
        return [None] * len(modules)
    return [_move_module(module, caller) for module in modules]


def find_shared(modules: Iterable[str | None], caller: str | None = None) -> Sequence[str]:
    """The labels of the module that contains all of these, without those of the module that called their code."""
    labels = zip(*(module.split(".") for module in modules if module is not None), strict=False)
    shared = [same[0] for same in takewhile(lambda one: len(set(one)) == 1, labels)]
    return shared[len(_split_caller(caller)) :]


def _split_caller(caller: str | None) -> Sequence[str]:
    """The labels of a caller, of which the whole model has none."""
    return () if caller is None or caller.startswith("(") else caller.split(".")


def _move_module(module: str | None, caller: str | None) -> str | None:
    if module is None:
        return None
    labels, outer = module.split("."), _split_caller(caller)
    alike = (one == other or (one.isdecimal() and other.isdecimal()) for one, other in zip(labels, outer, strict=False))
    return ".".join([*outer, *labels[len(outer) :]]) if len(labels) >= len(outer) and all(alike) else None


def _align(names: Sequence[str], graph: CompiledGraph) -> dict[int, int]:
    """The calls of operators, both by position. Not every operator that the profiler sees is a call, and not every call
    is an operator."""
    wanted = [one.operator for one in graph.calls]
    both = set(names) & set(wanted)
    ours = [number for number, name in enumerate(wanted) if name in both]
    theirs = [number for number, name in enumerate(names) if name in both]
    kept, seen = [wanted[number] for number in ours], [names[number] for number in theirs]
    if kept == seen:
        return dict(zip(theirs, ours, strict=True))
    blocks = SequenceMatcher(None, kept, seen, autojunk=False).get_matching_blocks()
    return {theirs[block.b + place]: ours[block.a + place] for block in blocks for place in range(block.size)}
