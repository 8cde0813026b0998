"""Every kernel gets the operator, module, layer, phase and step that it belongs to.

A kernel is joined to the call that launched it, and the call to what was open on its thread at that moment. Backward
kernels are launched by autograd's own thread, where no module is open; there the operator carries the sequence number
of the node it evaluates, the operator that made the node carries the same number, and the module that was open around
that one is the module the kernel belongs to. This is why envelopes of ranges in time, which other tools use, lose the
backward pass.

Nothing is invented: what the recording does not say stays null, and the shares that are known are reported.
"""

import numpy as np
import polars as pl

from stepscope.explain.trace.modules import module_paths, number_layers
from stepscope.explain.trace.names import classify
from stepscope.explain.trace.nesting import innermost
from stepscope.explain.trace.phases import find_phases, find_steps
from stepscope.recording.store import Recording

EVALUATE = "autograd::engine::evaluate_function: "
# What belongs to no module and is known all the same.
OPTIMIZER_MODULE, LOSS_MODULE, INPUT_MODULE, COMMUNICATION_MODULE = (
    "(optimizer)",
    "(loss)",
    "(input)",
    "(communication)",
)
_PARTS = "part:"


def attribute_kernels(recording: Recording) -> pl.DataFrame:
    """The kernels with, beside their own columns: `names.NAME_COLUMNS`, launched (`op`, `graph` or `before` the
    window), launch_name, launch_ns, launch_end_ns, thread, op_row (in `recording.ops`), op, module, layer, part, phase,
    step, recomputed."""
    launched = _join_launches(recording)
    kernels = _attribute_points(recording, launched, innermost(recording.ops, launched)).drop("ns")
    names = recording.ops["name"]
    named = kernels.with_columns(op=names.gather(kernels["op_row"]) if names.len() else pl.lit(None, pl.String))
    return set_communication_apart(classify(named))


def attribute_ops(recording: Recording) -> pl.DataFrame:
    """The operators, in their order, with module, layer, part, phase, step and recomputed."""
    ops = recording.ops.with_columns(ns="start_ns")
    return _attribute_points(recording, ops, pl.Series(np.arange(ops.height))).drop("ns", "op_row")


def set_communication_apart(kernels: pl.DataFrame) -> pl.DataFrame:
    """Gradients are exchanged in buckets, from the hook of whichever parameter came last: its module did not ask."""
    in_hook = (pl.col("class") == "communication") & (pl.col("phase") == "backward") & pl.col("module").is_not_null()
    module = pl.when(in_hook).then(pl.lit(COMMUNICATION_MODULE)).otherwise("module")
    return kernels.with_columns(module=module, layer=pl.when(~in_hook.fill_null(value=False)).then("layer"))


def _join_launches(recording: Recording) -> pl.DataFrame:
    """Kernels with when and on which thread the host asked for them."""
    launches = recording.launches.filter(pl.col("correlation").is_not_null())
    # A correlation names one call; a trace that repeats one (two processes merged into one file) is not resolved.
    launches = launches.unique(["process", "correlation"], keep="first", maintain_order=True).select(
        "process",
        "correlation",
        "thread",
        launch_name="name",
        launch_ns="start_ns",
        launch_end_ns="end_ns",
    )
    joined = recording.kernels.join(
        launches, on=["process", "correlation"], how="left", nulls_equal=True, maintain_order="left"
    )
    on_host = pl.col("kind") == "cpu"
    graph = pl.col("graph").fill_null(value=False) | pl.col("launch_name").str.contains("GraphLaunch").fill_null(
        value=False
    )
    launched = (
        pl.when(graph).then(pl.lit("graph")).when(pl.col("launch_ns").is_null() & ~on_host).then(pl.lit("before"))
    )
    return joined.with_columns(
        launched=launched.otherwise(pl.lit("op")),
        launch_ns=pl.when(on_host).then("start_ns").otherwise("launch_ns"),
        launch_end_ns=pl.when(on_host).then("start_ns").otherwise("launch_end_ns"),
        thread=pl.when(on_host).then("stream").otherwise("thread"),
    ).with_columns(ns="launch_ns")


def _attribute_points(recording: Recording, points: pl.DataFrame, op_row: pl.Series) -> pl.DataFrame:
    """Adds op_row, module, layer, part, phase, step and recomputed to moments on threads."""
    ranges = recording.ranges
    nodes = _autograd_nodes(recording)
    modules = module_paths(ranges)
    found = find_modules(points, nodes, modules)
    parts = ranges.filter(pl.col("name").str.starts_with(_PARTS))
    part = _part(parts, nodes, points, found["node_row"], found["recomputed"])
    framed = points.with_columns(
        found.select("module", "recomputed", "in_backward"),
        op_row=op_row,
        part=part,
    )
    framed = find_steps(recording, find_phases(recording, framed))
    return number_layers(name_what_is_no_module(recording, framed), modules)


def find_modules(points: pl.DataFrame, nodes: pl.DataFrame, modules: pl.DataFrame) -> pl.DataFrame:
    """For each moment: module, node_row (of the autograd node under evaluation), in_backward and recomputed."""
    node_row, module_row = innermost(nodes, points), innermost(modules, points)
    here = modules["path"].gather(module_row) if modules.height else _nulls(points.height)
    made_by = nodes["module"].gather(node_row) if nodes.height else _nulls(points.height)
    in_backward = node_row.is_not_null()
    # A module that was called inside the node under evaluation is being run again: activation checkpointing.
    if modules.height and nodes.height:
        called = modules["start_ns"].gather(module_row) > nodes["start_ns"].gather(node_row)
        recomputed = in_backward & called.fill_null(value=False)
    else:
        recomputed = pl.repeat(False, points.height, dtype=pl.Boolean, eager=True)  # noqa: FBT003
    frame = pl.DataFrame({"node_row": node_row, "in_backward": in_backward, "recomputed": recomputed})
    return frame.with_columns(module=pl.when(recomputed | ~in_backward).then(here).otherwise(made_by))


def name_what_is_no_module(recording: Recording, frame: pl.DataFrame) -> pl.DataFrame:
    if not recording.manifest.modules_recorded:
        return frame
    phase = pl.col("phase")
    named = (
        pl.when(pl.col("module").is_not_null())
        .then("module")
        .when(phase == "optimizer")
        .then(pl.lit(OPTIMIZER_MODULE))
        .when(phase == "loss")
        .then(pl.lit(LOSS_MODULE))
        .when(phase == "input")
        .then(pl.lit(INPUT_MODULE))
    )
    return frame.with_columns(module=named)


def _part(
    parts: pl.DataFrame, nodes: pl.DataFrame, points: pl.DataFrame, node_row: pl.Series, recomputed: pl.Series
) -> pl.Series:
    if not parts.height:
        return _nulls(points.height)
    here = parts["name"].str.strip_prefix(_PARTS).gather(innermost(parts, points))
    if not nodes.height:
        return here
    made_by = nodes["part"].gather(node_row)
    return pl.select(pl.when(node_row.is_not_null() & ~recomputed).then(made_by).otherwise(here)).to_series()


def _autograd_nodes(recording: Recording) -> pl.DataFrame:
    """The evaluations of autograd nodes, with the module and part around the operator that made each node."""
    ops = recording.ops
    is_node = pl.col("name").str.starts_with(EVALUATE) | pl.col("forward_thread").is_not_null()
    nodes = ops.filter(is_node).select("name", "process", "thread", "start_ns", "end_ns", "sequence", "forward_thread")
    if not nodes.height:
        return nodes.with_columns(module=pl.lit(None, pl.String), part=pl.lit(None, pl.String))
    made = _makers(recording, nodes)
    modules = module_paths(recording.ranges)
    at = made.select("process", thread="made_thread", ns="made_ns")
    module = modules["path"].gather(innermost(modules, at)) if modules.height else _nulls(nodes.height)
    parts = recording.ranges.filter(pl.col("name").str.starts_with(_PARTS))
    part = parts["name"].str.strip_prefix(_PARTS).gather(innermost(parts, at)) if parts.height else _nulls(nodes.height)
    loss = recording.ranges.filter(pl.col("name") == "phase:loss")
    in_loss = innermost(loss, at).is_not_null() if loss.height else pl.Series([False] * nodes.height)
    nodes = nodes.with_columns(
        module=pl.when(pl.Series(in_loss)).then(pl.lit(LOSS_MODULE)).otherwise(pl.Series(module, dtype=pl.String)),
        part=part,
    )
    # The engine adds up a parameter's gradient right after the node that produced it, on the same thread.
    ordered = nodes.with_row_index("row").sort("process", "thread", "start_ns")
    gathers = pl.col("name").str.contains("AccumulateGrad")
    filled = ordered.with_columns(
        module=pl.when(gathers & pl.col("module").is_null())
        .then(pl.col("module").forward_fill().over("process", "thread"))
        .otherwise("module")
    )
    return filled.sort("row").drop("row")


def _makers(recording: Recording, nodes: pl.DataFrame) -> pl.DataFrame:
    """For each node, where and when the operator ran that made it: by the profiler's own arrows where it drew them,
    else by sequence number on the forward thread."""
    ops = recording.ops
    forward = (
        ops.filter(pl.col("sequence").is_not_null() & pl.col("forward_thread").is_null())
        .filter(~pl.col("name").str.starts_with(EVALUATE))
        .sort("start_ns")
    )
    threads = _forward_threads(recording, nodes, forward)
    # Operators that make no node carry the number of the next node to be made: the last one is the maker.
    makers = forward.unique(["process", "thread", "sequence"], keep="last", maintain_order=True).select(
        "process", "sequence", made_thread="thread", made_ns="start_ns"
    )
    known = nodes.join(threads, on=["process", "forward_thread"], how="left", nulls_equal=True, maintain_order="left")
    return known.join(makers, on=["process", "sequence", "made_thread"], how="left", maintain_order="left").select(
        "process", "made_thread", "made_ns"
    )


def _forward_threads(recording: Recording, nodes: pl.DataFrame, forward: pl.DataFrame) -> pl.DataFrame:
    """PyTorch numbers threads its own way in `Fwd thread id`. The arrows tell which thread a number means; without
    arrows, a number that is a thread's own (Nsight's) means itself, and otherwise the busiest forward thread."""
    links = recording.links
    if links.height:
        at = links.select("process", thread="backward_thread", ns="backward_ns")
        number = nodes["forward_thread"].gather(innermost(nodes, at))
        counted = links.with_columns(forward_number=number).group_by("process", "forward_number", "forward_thread")
        ranked = counted.len().sort("len", "forward_thread", descending=[True, False])
        seen = ranked.unique(["process", "forward_number"], keep="first")
        return seen.select("process", made_thread="forward_thread", forward_thread="forward_number")
    numbers = nodes.select("process", "forward_thread").unique()
    own = numbers.join(
        forward.select("process", forward_thread="thread").unique().with_columns(made_thread="forward_thread"),
        on=["process", "forward_thread"],
        how="left",
    )
    by_work = forward.group_by("process", "thread").len().sort("len", "thread", descending=[True, False])
    busiest = by_work.unique("process", keep="first")
    return own.join(busiest.select("process", busiest="thread"), on="process", how="left").select(
        "process", "forward_thread", made_thread=pl.coalesce("made_thread", "busiest")
    )


def _nulls(length: int) -> pl.Series:
    return pl.Series([None] * length, dtype=pl.String)
