"""Find the operator, module, layer, phase and step of every kernel.

A kernel is joined to the call that launched it, and the call to the ranges open on its thread at that moment. Backward
kernels are launched by autograd's own thread, where no module is open. There the operator has the sequence number of
the node it evaluates, the forward operator that made the node has the same number, and the kernel belongs to the module
that was open around that operator. Tools that only compare time ranges lose the backward pass.

Rows that belong together by number (a launch, an autograd node) are joined in windows of that number, and rows that
belong together by time in windows of time (`recording.windows`). In memory there is one window; a trace larger than
memory has many. The functions are the same.

Nothing is guessed: unknown values stay null, and the shares of time that are known are reported.
"""

from collections.abc import Iterator

import numpy as np
import polars as pl

from stepscope.explain.trace.modules import is_module_call, is_own_call, module_paths, number_layers
from stepscope.explain.trace.names import classify
from stepscope.explain.trace.nesting import around, innermost, look_up
from stepscope.explain.trace.phases import find_phases, named_ranges, step_ranges
from stepscope.recording.store import Recording
from stepscope.recording.windows import Disk, EventTable, bordered_windows, in_windows, make_table

EVALUATE = "autograd::engine::evaluate_function: "
# Known work outside all modules.
OPTIMIZER_MODULE, LOSS_MODULE, INPUT_MODULE, COMMUNICATION_MODULE = (
    "(optimizer)",
    "(loss)",
    "(input)",
    "(communication)",
)
_PARTS = "part:"
_THREAD = ("process", "thread")
_INTERVAL = (*_THREAD, "start_ns", "end_ns", "name")
_NODE = (*_INTERVAL, "sequence", "forward_thread", "node")


def attribute_kernels(recording: Recording) -> pl.DataFrame:
    """Return the kernels with these columns added: `names.NAME_COLUMNS`, launched (`op`, `graph` or `before` the
    window), launch_name, launch_ns, launch_end_ns, thread, op_row (in `recording.ops`), op, module, layer, part, phase,
    step, recomputed."""
    attribution = Attribution()
    attribution.add(recording)
    (kernels,) = attribution.kernel_windows()
    return attribution.finish(kernels, modules_recorded=recording.manifest.modules_recorded).drop("ns")


def attribute_ops(recording: Recording) -> pl.DataFrame:
    """Return the operators, in order, with module, layer, part, phase, step and recomputed."""
    attribution = Attribution()
    attribution.add(recording)
    points = EventTable(pl.col("ns"))
    points.add(recording.ops.with_columns(ns="start_ns", op_row=pl.Series(np.arange(recording.ops.height))))
    (ops,) = attribution.point_windows(points)
    return attribution.name(ops, modules_recorded=recording.manifest.modules_recorded).drop("ns", "op_row")


class Attribution:
    """The tables of a recording in the form that attribution needs, in memory or on disk. `add` all of the recording,
    iterate over `kernel_windows` once, then `finish` the result."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        by_start = pl.col("start_ns")
        launched = (*_INTERVAL, "correlation")
        on_device = ("start_ns", "end_ns", "name", "kind", "process", "device", "stream", "correlation", "graph")
        # Rows without a number fit into any window; time spreads them over many.
        by_correlation, by_sequence = pl.coalesce("correlation", by_start), pl.coalesce("sequence", by_start)
        self.kernels = make_table(disk, "kernels", by_correlation, on_device)
        self._launches = make_table(disk, "launches", by_correlation, launched)
        self.ops = make_table(disk, "ops", by_start, (*_INTERVAL, "sequence"), _THREAD)
        # Operators that may have created a node, and the evaluations of nodes.
        self._forward = make_table(disk, "forward", by_sequence, (*_THREAD, "start_ns", "sequence"))
        self._unmade = make_table(disk, "unmade", by_sequence, _NODE)
        self._evaluated = make_table(disk, "evaluated", by_start, _NODE, _THREAD)
        link = ("backward_ns", "backward_thread", "forward_thread", "process")
        self.links = make_table(disk, "links", pl.col("backward_ns"), link)
        self._calls = make_table(disk, "calls", by_start, (*_INTERVAL, "source"), _THREAD)
        # A range named after a phase may apply to its whole process.
        self._named = make_table(disk, "named", by_start, (*_INTERVAL, "phase"), ("process",))
        self._parts = make_table(disk, "parts", by_start, _INTERVAL, _THREAD)
        self._steps: list[pl.DataFrame] = []
        self._forward_work: list[pl.DataFrame] = []
        self._first_calls = pl.DataFrame(schema={"path": pl.String, "name": pl.String, "start_ns": pl.Int64})
        self._has_own_calls = False  # from stepscope's annotation, which takes precedence over the profiler's stacks
        self._says_backward = False  # in a range's name

    @property
    def steps(self) -> pl.DataFrame:
        """`phases.step_ranges` of everything added."""
        return pl.concat(self._steps).sort("start_ns", maintain_order=True)

    def add(self, recording: Recording) -> None:
        """Add a whole recording, or its parts one by one."""
        ops, ranges = recording.ops, recording.ranges
        self.kernels.add(recording.kernels)
        self.links.add(recording.links)
        self._launches.add(recording.launches.filter(pl.col("correlation").is_not_null()))
        evaluates = pl.col("name").str.starts_with(EVALUATE)
        is_node = evaluates | pl.col("forward_thread").is_not_null()
        forward = ops.filter(pl.col("sequence").is_not_null() & ~is_node)
        first = self._unmade.num_rows
        nodes = ops.filter(is_node).with_columns(node=first + pl.int_range(pl.len(), dtype=pl.Int64)).select(_NODE)
        self.ops.add(ops)
        self._forward.add(forward.select(*_THREAD, "start_ns", "sequence"))
        self._forward_work.append(forward.group_by(_THREAD).len())
        self._unmade.add(nodes)
        self._evaluated.add(nodes)
        calls, named = ranges.filter(is_module_call()), named_ranges(ranges)
        self._has_own_calls |= bool(calls.select(is_own_call().any()).item())
        self._says_backward |= bool((named["phase"] == "backward").any())
        self._calls.add(calls)
        self._named.add(named)
        self._parts.add(ranges.filter(pl.col("name").str.starts_with(_PARTS)))
        self._steps.append(step_ranges(recording))

    def kernel_windows(self) -> Iterator[pl.DataFrame]:
        """Yield the kernels in windows, with everything that does not depend on later windows. `op_row` is a row of the
        window."""
        ns = pl.coalesce("ns", "start_ns")
        columns = ("ns", "start_ns", "end_ns", "process", "thread", "name", "kind", "launched")
        points = make_table(self._disk, "points", ns, columns)
        for kernels, launches in in_windows(self.kernels, self._launches):
            points.add(_join_launches(kernels, launches))
        self.kernels.delete()
        self._launches.delete()
        yield from self.point_windows(points)

    def point_windows(self, points: EventTable) -> Iterator[pl.DataFrame]:
        """Add op_row, op, module, part, phase, step and recomputed to moments on threads. Operators already have their
        op_row and get no op."""
        modules = self._module_calls()
        autograd, threads = self._survey(points)
        nodes = self._nodes(modules, threads)
        nodes.change = _Gradients().fill
        has_backward = bool(autograd.height) or self._says_backward
        steps = self.steps
        tables = (self.ops, modules, nodes, self._named, self._parts, points)
        for ops, calls, evaluated, named, parts, moments in in_windows(*tables):
            is_op = "op_row" in moments.columns
            op_row = moments["op_row"] if is_op else innermost(ops, moments)
            framed = moments.with_columns(_find_modules(moments, evaluated, calls, parts), op_row=op_row)
            phased = find_phases(framed, ops, named, autograd, has_backward=has_backward)
            step = around(steps, "step", moments, by_thread=False)
            op = {} if is_op else {"op": look_up(ops, "name", op_row)}  # an operator already has its name
            yield phased.with_columns(step=step, **op)

    def name(self, frame: pl.DataFrame, *, modules_recorded: bool) -> pl.DataFrame:
        """Add what depends on module names only: `layer`, and names for work outside all modules."""
        return number_layers(_name_what_is_no_module(frame) if modules_recorded else frame, self._first_calls)

    def finish(self, kernels: pl.DataFrame, *, modules_recorded: bool) -> pl.DataFrame:
        """Return kernels, or groups of them, with layer and class added."""
        return _set_communication_apart(classify(self.name(kernels, modules_recorded=modules_recorded)))

    def _module_calls(self) -> EventTable:
        """Return the module calls with their `path`, and remember the first call of each."""
        modules = make_table(self._disk, "modules", pl.col("start_ns"), (*_INTERVAL, "path"), _THREAD)
        for begin, (calls,) in bordered_windows(self._calls):
            paths = module_paths(calls.filter(is_own_call()) if self._has_own_calls else calls)
            new = paths if begin is None else paths.filter(pl.col("start_ns") >= begin)
            modules.add(new)
            together = pl.concat([self._first_calls, new.select(self._first_calls.columns)])
            ordered = together.sort("start_ns", maintain_order=True)
            self._first_calls = ordered.unique("path", keep="first", maintain_order=True)
        self._calls.delete()
        return modules

    def _survey(self, points: EventTable) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the threads that run backward, and the thread that each `forward_thread` of nodes refers to: process,
        forward_thread, made_thread."""
        running, numbers, votes = [], [], []
        for nodes, links, moments in in_windows(self._evaluated, self.links, points):
            # One query for both: most of the time goes into sorting the nodes.
            arrows = links.select("process", thread="backward_thread", ns="backward_ns")
            asked = pl.concat([arrows, moments.select(arrows.columns)])
            node_row = innermost(nodes, asked)
            inside = asked.filter(node_row.is_not_null() & (pl.int_range(pl.len()) >= arrows.height))
            running.append(inside.select(_THREAD).unique())
            numbers.append(nodes.select("process", "forward_thread").unique())
            voted = links.with_columns(forward_number=look_up(nodes, "forward_thread", node_row.head(arrows.height)))
            votes.append(voted.group_by("process", "forward_number", "forward_thread").len())
        autograd = pl.concat(running).unique()
        if self.links.num_rows:
            return autograd, _threads_by_arrows(pl.concat(votes))
        return autograd, _threads_by_work(pl.concat(numbers).unique(), pl.concat(self._forward_work))

    def _nodes(self, modules: EventTable, threads: pl.DataFrame) -> EventTable:
        """Return the evaluations of autograd nodes, with the module and part around the operator that created each."""
        at_maker = pl.coalesce("made_ns", "start_ns")
        made = make_table(self._disk, "made", at_maker, (*_INTERVAL, "node", "made_thread", "made_ns"))
        for forward, nodes in in_windows(self._forward, self._unmade):
            made.add(_find_makers(forward, nodes, threads))
        self._forward.delete()
        self._unmade.delete()
        found = make_table(self._disk, "nodes", pl.col("start_ns"), (*_INTERVAL, "node", "module", "part"), _THREAD)
        for calls, named, parts, nodes in in_windows(modules, self._named, self._parts, made):
            at = nodes.select("process", thread="made_thread", ns="made_ns")
            in_loss = innermost(named.filter(pl.col("name") == "phase:loss"), at).is_not_null()
            module = pl.when(in_loss).then(pl.lit(LOSS_MODULE)).otherwise(around(calls, "path", at))
            found.add(nodes.with_columns(module=module, part=_around_parts(parts, at)))
        made.delete()
        return found


def _set_communication_apart(kernels: pl.DataFrame) -> pl.DataFrame:
    """Gradients are reduced in buckets, from the hook of the last parameter: the bucket does not belong to its
    module."""
    in_hook = (pl.col("class") == "communication") & (pl.col("phase") == "backward") & pl.col("module").is_not_null()
    module = pl.when(in_hook).then(pl.lit(COMMUNICATION_MODULE)).otherwise("module")
    return kernels.with_columns(module=module, layer=pl.when(~in_hook.fill_null(value=False)).then("layer"))


def _join_launches(kernels: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Return kernels with the time and thread of their launch."""
    # A correlation identifies one call. Repeated ones (two processes merged into one file) are left unresolved.
    launches = launches.unique(["process", "correlation"], keep="first", maintain_order=True).select(
        "process",
        "correlation",
        "thread",
        launch_name="name",
        launch_ns="start_ns",
        launch_end_ns="end_ns",
    )
    joined = kernels.join(launches, on=["process", "correlation"], how="left", nulls_equal=True, maintain_order="left")
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


def _find_modules(
    points: pl.DataFrame, nodes: pl.DataFrame, modules: pl.DataFrame, parts: pl.DataFrame
) -> pl.DataFrame:
    """Return module, part, in_backward and recomputed for each moment."""
    node_row, module_row = innermost(nodes, points), innermost(modules, points)
    in_backward = node_row.is_not_null()
    # A module called inside the evaluation of a node runs a second time: activation checkpointing.
    called = look_up(modules, "start_ns", module_row) > look_up(nodes, "start_ns", node_row)
    recomputed = in_backward & called.fill_null(value=False)
    here = recomputed | ~in_backward
    return pl.select(
        module=pl.when(here).then(look_up(modules, "path", module_row)).otherwise(look_up(nodes, "module", node_row)),
        part=pl.when(here).then(_around_parts(parts, points)).otherwise(look_up(nodes, "part", node_row)),
        in_backward=in_backward,
        recomputed=recomputed,
    )


def _around_parts(parts: pl.DataFrame, points: pl.DataFrame) -> pl.Series:
    return around(parts, "name", points).str.strip_prefix(_PARTS)


def _name_what_is_no_module(frame: pl.DataFrame) -> pl.DataFrame:
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


class _Gradients:
    """The engine accumulates a parameter's gradient right after the node that produced it, on the same thread. It
    belongs to the module of the last node that has one, which may be in an earlier window."""

    def __init__(self) -> None:
        self._last: list[pl.DataFrame] = []

    def fill(self, nodes: pl.DataFrame) -> pl.DataFrame:
        ordered = nodes.sort(*_THREAD, "start_ns", "node")
        together = pl.concat([*self._last, ordered], how="diagonal")
        together = together.with_columns(known=pl.col("module").forward_fill().over(_THREAD))
        known = together.filter(pl.col("known").is_not_null())
        self._last = [known.group_by(_THREAD).agg(module=pl.col("known").last())]
        gathers = pl.col("name").str.contains("AccumulateGrad") & pl.col("module").is_null()
        filled = together.with_columns(module=pl.when(gathers).then("known").otherwise("module"))
        return filled.filter(pl.col("node").is_not_null()).sort("node").select(nodes.columns)


def _find_makers(forward: pl.DataFrame, nodes: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """Add thread and time of the operator that created each node: made_thread, made_ns."""
    # Operators without a node have the number of the next node: the last operator with a number created the node.
    makers = forward.group_by("process", "sequence", made_thread="thread").agg(made_ns=pl.col("start_ns").max())
    known = nodes.join(threads, on=["process", "forward_thread"], how="left", nulls_equal=True, maintain_order="left")
    return known.join(makers, on=["process", "sequence", "made_thread"], how="left", maintain_order="left")


def _threads_by_arrows(votes: pl.DataFrame) -> pl.DataFrame:
    """PyTorch has its own thread numbers in `Fwd thread id`; the profiler's flow arrows identify the thread."""
    counted = votes.group_by("process", "forward_number", "forward_thread").agg(pl.col("len").sum())
    ranked = counted.sort("len", "forward_thread", descending=[True, False])
    seen = ranked.unique(["process", "forward_number"], keep="first")
    return seen.select("process", made_thread="forward_thread", forward_thread="forward_number")


def _threads_by_work(numbers: pl.DataFrame, forward: pl.DataFrame) -> pl.DataFrame:
    """Without flow arrows, a number that is a thread id (Nsight's) is that thread; any other number is the busiest
    forward thread."""
    work = forward.group_by(_THREAD).agg(pl.col("len").sum()).sort("len", "thread", descending=[True, False])
    busiest = work.unique("process", keep="first").select("process", busiest="thread")
    threads = work.select("process", forward_thread="thread", made_thread="thread")
    own = numbers.join(threads, on=["process", "forward_thread"], how="left")
    return own.join(busiest, on="process", how="left").select(
        "process", "forward_thread", made_thread=pl.coalesce("made_thread", "busiest")
    )
