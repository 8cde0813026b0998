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

from stepscope.explain.trace.attribution.compiled_graphs import CompiledReplays
from stepscope.explain.trace.attribution.graphs import CAPTURED_KINDS, fill_graphs, find_captures, is_capture
from stepscope.explain.trace.attribution.modules import (
    is_module_call,
    is_own_call,
    join_ancestors,
    module_paths,
    number_layers,
)
from stepscope.explain.trace.attribution.names import classify
from stepscope.explain.trace.attribution.phases import INPUT_RANGE, find_phases, named_ranges, step_ranges
from stepscope.explain.trace.attribution.repeats import fill_from_repeats
from stepscope.explain.trace.attribution.user_ranges import (
    BETWEEN,
    PARTS,
    find_user_ranges,
    is_backward_pass,
    range_paths,
)
from stepscope.recording import EVALUATE, tables
from stepscope.recording.compiled_code import COMPILED
from stepscope.recording.nesting import NOWHERE, around, innermost, look_up
from stepscope.recording.rows.compiled_code import LOSS_MODULE
from stepscope.recording.store import Recording
from stepscope.recording.windows import Disk, EventTable, bordered_windows, in_windows, make_table

# Known work outside all modules.
OPTIMIZER_MODULE, INPUT_MODULE, COMMUNICATION_MODULE = "(optimizer)", "(input)", "(communication)"
# Phases of a training loop outside the model, each known as a module of its name in parentheses.
LOOP_PHASES = ("clipping", "scheduler", "logging", "checkpoint")
_PARTS = "part:"
_USER_PARTS = "user part:"  # from ranges whose names say it
_THREAD = ("process", "thread")
_INTERVAL = (*_THREAD, "start_ns", "end_ns", "name")
_NODE = (*_INTERVAL, "sequence", "forward_thread", "node")
_NODES = ("graph_node", "grid_x", "grid_y", "grid_z")  # what tells kernels of CUDA graphs apart


def attribute_kernels(recording: Recording) -> pl.DataFrame:
    """Return the kernels with these columns added: `names.NAME_COLUMNS`, launched (`op`, `graph` or `before` the
    window), launch_name, launch_ns, launch_end_ns, thread, op_row (in `recording.ops`), op, module, layer, part, phase,
    step, recomputed, user_range (the path of the range that launched it), forward_range (in backward, that of the
    range whose gradients it computes) and matched (`graphs.WAYS`; null if its own launch tells)."""
    attribution = Attribution()
    attribution.add(recording)
    (kernels,) = attribution.kernel_windows()
    return attribution.finish(kernels, modules_recorded=recording.manifest.modules_recorded).drop("ns")


def attribute_ops(recording: Recording, rows: pl.Series) -> pl.DataFrame:
    """Return these operators with module, layer, part, phase, step and recomputed; a null row gives nulls."""
    attribution = Attribution()
    attribution.add(recording)
    ops = recording.ops.with_columns(ns="start_ns", op_row=pl.int_range(pl.len(), dtype=pl.Int64))
    # One evaluation of a node per thread tells which threads run backward.
    witnesses = ops.filter(_is_node(), pl.col("end_ns") > pl.col("start_ns")).unique(_THREAD, keep="first")
    points = EventTable(pl.col("ns"))
    points.add(pl.concat([ops.select(pl.all().gather(rows)), witnesses]))
    (found,) = attribution.point_windows(points)
    asked = found.head(rows.len()).drop("ns", "op_row", "called_ns")
    return attribution.name(asked, modules_recorded=recording.manifest.modules_recorded)


class Attribution:
    """The tables of a recording in the form that attribution needs, in memory or on disk. `add` all of the recording,
    iterate over `kernel_windows` once, then `finish` the result."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        by_start = pl.col("start_ns")
        launched = (*_INTERVAL, "correlation")
        on_device = (
            "start_ns",
            "end_ns",
            "name",
            "kind",
            "process",
            "device",
            "stream",
            "correlation",
            "graph",
            *_NODES,
        )
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
        self._calls = make_table(disk, "calls", by_start, (*_INTERVAL, "source", "module"), _THREAD)
        # A range named after a phase may apply to its whole process.
        self._named = make_table(disk, "named", by_start, (*_INTERVAL, "phase"), ("process",))
        self._parts = make_table(disk, "parts", by_start, _INTERVAL, _THREAD)
        # Autograd's threads belong to the ranges of another thread of their process.
        self._user_ranges = make_table(disk, "user ranges", by_start, _INTERVAL, ("process",))
        self._range_time: list[pl.DataFrame] = []
        self._user_parts: set[str] = set()
        self._steps: list[pl.DataFrame] = []
        self._captures: list[pl.DataFrame] = []
        self._captured = tables.empty("captured")
        self._replays = CompiledReplays()
        self._forward_work: list[pl.DataFrame] = []
        self._first_calls = pl.DataFrame(schema={"path": pl.String, "name": pl.String, "start_ns": pl.Int64})
        # stepscope's annotation takes precedence over the profiler's stacks, and these over names of ranges.
        self._has_own_calls = self._has_frames = False
        self._says_backward = self._says_input = False  # in a range's name

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
        is_node = _is_node()
        forward = ops.filter(pl.col("sequence").is_not_null() & ~is_node)
        first = self._unmade.num_rows
        nodes = ops.filter(is_node).with_columns(node=first + pl.int_range(pl.len(), dtype=pl.Int64)).select(_NODE)
        self.ops.add(ops)
        self._forward.add(forward.select(*_THREAD, "start_ns", "sequence"))
        self._forward_work.append(forward.group_by(_THREAD).len())
        self._unmade.add(nodes)
        self._evaluated.add(nodes)
        calls, named, users = ranges.filter(is_module_call()), named_ranges(ranges), find_user_ranges(ranges)
        self._has_own_calls |= bool(calls.select(is_own_call().any()).item())
        self._has_frames |= bool((calls["source"] == "module").any())
        self._says_backward |= bool((named["phase"] == "backward").any())
        self._says_input |= bool((named["name"] == INPUT_RANGE).any())
        modules = users.filter(pl.col("module").is_not_null())
        self._calls.add(pl.concat([calls.with_columns(module=pl.lit(None, pl.String)), modules.drop("part")]))
        self._named.add(named)
        told = users.filter(pl.col("part").is_not_null()).with_columns(name=pl.concat_str(pl.lit(_USER_PARTS), "part"))
        self._user_parts.update(told["part"])
        self._parts.add(pl.concat([ranges.filter(pl.col("name").str.starts_with(_PARTS)), told.select(ranges.columns)]))
        self._user_ranges.add(users)
        self._range_time.append(users.group_by(_THREAD).agg(ns=(pl.col("end_ns") - pl.col("start_ns")).sum()))
        self._steps.append(step_ranges(recording))
        self._captures.append(recording.launches.filter(is_capture()))
        if recording.captured.height:
            self._captured = recording.captured
        self._replays.add(recording)

    def kernel_windows(self) -> Iterator[pl.DataFrame]:
        """Yield the kernels in windows, with everything that does not depend on later windows. `op_row` is a row of the
        window."""
        ns = pl.coalesce("ns", "start_ns")
        columns = ("ns", "start_ns", "end_ns", "process", "thread", "name", "kind", "launched")
        points = make_table(self._disk, "points", ns, (*columns, "device", "stream", "correlation", "capture", *_NODES))
        captures = find_captures(pl.concat(self._captures))
        for kernels, launches in in_windows(self.kernels, self._launches):
            points.add(_add_captured(_join_launches(kernels, launches), launches, captures))
        self.kernels.delete()
        self._launches.delete()
        yield from fill_from_repeats(fill_graphs(self.point_windows(points), self._captured, self._replays.fill))

    def point_windows(self, points: EventTable) -> Iterator[pl.DataFrame]:
        """Add op_row, op, module, part, phase, step and recomputed to moments on threads. Operators already have their
        op_row and get no op."""
        modules, user_ranges = self._module_calls(), self._range_paths()
        autograd, threads = self._survey(points)
        nodes = self._nodes(modules, user_ranges, threads)
        nodes.change = _Gradients().fill
        has_backward, engine = bool(autograd.height) or self._says_backward, self._engine_threads(autograd)
        steps, main, closures = self.steps, self._main_threads(), self._closures()
        tables = (self.ops, modules, nodes, self._named, self._parts, user_ranges, points)
        for ops, calls, evaluated, named, parts, ranged, moments in in_windows(*tables):
            is_op = "op_row" in moments.columns
            op_row = moments["op_row"] if is_op else innermost(ops, moments)
            framed = moments.with_columns(_find_modules(moments, evaluated, calls, self._sound(parts)), op_row=op_row)
            framed = framed.with_columns(user_range=_find_ranges(framed, ranged, main))
            known = named.join(closures, on=_INTERVAL, how="left", nulls_equal=True, maintain_order="left")
            phased = find_phases(framed, ops, known, engine, has_backward=has_backward, has_input=self._says_input)
            step = around(steps, "step", moments, by_thread=False)
            op = {} if is_op else {"op": look_up(ops, "name", op_row)}  # an operator already has its name
            yield phased.with_columns(step=step, **op)

    def name(self, frame: pl.DataFrame, *, modules_recorded: bool) -> pl.DataFrame:
        """Add what depends on module names only: `layer`, and names for work outside all modules."""
        named = _name_what_is_no_module(frame) if modules_recorded or self._first_calls.height else frame
        return number_layers(named, self._first_calls)

    def finish(self, kernels: pl.DataFrame, *, modules_recorded: bool) -> pl.DataFrame:
        """Return kernels, or groups of them, with layer and class added."""
        named = self.name(kernels, modules_recorded=modules_recorded)
        # Repeats are numbered as they run: backward begins with the last layer.
        is_known = ~pl.col("matched").fill_null("").is_in(["repetition", "order"]) | (pl.col("phase") == "forward")
        return _set_communication_apart(classify(named.with_columns(layer=pl.when(is_known).then("layer"))))

    def _module_calls(self) -> EventTable:
        """Return the module calls with their `path`, and remember the first call of each."""
        modules = make_table(self._disk, "modules", pl.col("start_ns"), (*_INTERVAL, "source", "path"), _THREAD)
        for begin, (calls,) in bordered_windows(self._calls):
            paths = self._paths_of(calls)
            new = paths if begin is None else paths.filter(pl.col("start_ns") >= begin)
            modules.add(new)
            together = pl.concat([self._first_calls, new.select(self._first_calls.columns)])
            ordered = together.sort("start_ns", maintain_order=True)
            self._first_calls = ordered.unique("path", keep="first", maintain_order=True)
        self._calls.delete()
        return modules

    def _paths_of(self, calls: pl.DataFrame) -> pl.DataFrame:
        if self._has_own_calls:
            return module_paths(calls.filter(is_own_call()))
        if self._has_frames:
            return module_paths(calls.filter(pl.col("source") == "module"))
        return calls.with_columns(path=join_ancestors(calls, pl.col("module")))

    def _range_paths(self) -> EventTable:
        """Return the user's ranges with their `path`."""
        paths = make_table(self._disk, "range paths", pl.col("start_ns"), (*_INTERVAL, "path"), ("process",))
        for begin, (ranges,) in bordered_windows(self._user_ranges):
            found = range_paths(ranges)
            paths.add(found if begin is None else found.filter(pl.col("start_ns") >= begin))
        self._user_ranges.delete()
        return paths

    def _main_threads(self) -> pl.DataFrame:
        """Return the thread of each process that calls `backward`: the one with the most operators of forward, or,
        without operators, with the most time in ranges."""
        work = pl.concat(self._forward_work).group_by(_THREAD).agg(pl.col("len").sum())
        time = pl.concat(self._range_time).group_by(_THREAD).agg(pl.col("ns").sum())
        ranked = time.join(work, on=_THREAD, how="full", coalesce=True, nulls_equal=True)
        ranked = ranked.sort("len", "ns", "thread", descending=[True, True, False], nulls_last=True)
        return ranked.unique("process", keep="first", maintain_order=True).select(
            *_THREAD, has_operators=pl.col("len").is_not_null()
        )

    def _sound(self, parts: pl.DataFrame) -> pl.DataFrame:
        """Return the parts of attention. A range named `softmax` is one of them only next to the two GEMMs."""
        complete = self._user_parts.issuperset(PARTS)
        return parts if complete else parts.filter(pl.col("name").str.starts_with(_PARTS))

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

    def _engine_threads(self, autograd: pl.DataFrame) -> pl.DataFrame:
        """Return the threads, of those that run backward, that run nothing else. On a CPU, backward runs on the thread
        that calls it, which also has the rest of the step. Checkpointing runs forward operators on autograd's own
        threads too, but only inside the evaluation of a node."""
        also_forward = autograd.join(pl.concat(self._forward_work), on=_THREAD, how="semi", nulls_equal=True)
        if not also_forward.height:
            return autograd
        outside = []
        for begin, (ops, nodes) in bordered_windows(self.ops, self._evaluated):
            # Operators of earlier windows were judged there, with the nodes around them.
            new = ops if begin is None else ops.filter(pl.col("start_ns") >= begin)
            forward = new.filter(pl.col("sequence").is_not_null(), pl.col("end_ns") > pl.col("start_ns"))
            moments = forward.join(also_forward, on=_THREAD, how="semi", nulls_equal=True).select(
                *_THREAD, ns="start_ns"
            )
            outside.append(moments.filter(innermost(nodes, moments).is_null()).select(_THREAD).unique())
        return autograd.join(pl.concat(outside), on=_THREAD, how="anti", nulls_equal=True)

    def _closures(self) -> pl.DataFrame:
        """Return the optimizer's ranges during which nodes are evaluated, with `closure` set. `optimizer.step(closure)`
        runs forward and backward (LBFGS, Lightning)."""
        found = []
        for begin, (named, nodes) in bordered_windows(self._named, self._evaluated):
            new = nodes if begin is None else nodes.filter(pl.col("start_ns") >= begin)
            of_optimizer = named.filter(pl.col("phase") == "optimizer").select(_INTERVAL)
            row = innermost(of_optimizer, new.select(*_THREAD, ns="start_ns"), by_thread=False)
            found.append(of_optimizer.select(pl.all().gather(row.drop_nulls().unique())))
        return pl.concat(found).unique().with_columns(closure=pl.lit(value=True))

    def _nodes(self, modules: EventTable, user_ranges: EventTable, threads: pl.DataFrame) -> EventTable:
        """Return the evaluations of autograd nodes, with the module, part and user's range around the operator that
        created each."""
        at_maker = pl.coalesce("made_ns", "start_ns")
        made = make_table(self._disk, "made", at_maker, (*_INTERVAL, "node", "made_thread", "made_ns"))
        for forward, nodes in in_windows(self._forward, self._unmade):
            made.add(_find_makers(forward, nodes, threads))
        self._forward.delete()
        self._unmade.delete()
        columns = (*_INTERVAL, "node", "module", "part", "forward_range")
        found = make_table(self._disk, "nodes", pl.col("start_ns"), columns, _THREAD)
        for calls, named, parts, ranged, nodes in in_windows(modules, self._named, self._parts, user_ranges, made):
            at = nodes.select("process", thread="made_thread", ns="made_ns")
            in_loss = innermost(named.filter(pl.col("name") == "phase:loss"), at).is_not_null()
            module = pl.when(in_loss).then(pl.lit(LOSS_MODULE)).otherwise(around(calls, "path", at))
            part, forward_range = _around_parts(self._sound(parts), at), around(ranged, "path", at)
            found.add(nodes.with_columns(module=module, part=part, forward_range=forward_range))
        made.delete()
        return found


def _is_node() -> pl.Expr:
    """Whether an operator evaluates an autograd node."""
    return pl.col("name").str.starts_with(EVALUATE) | pl.col("forward_thread").is_not_null()


def _set_communication_apart(kernels: pl.DataFrame) -> pl.DataFrame:
    """Gradients are reduced in buckets, from the hook of the last parameter: the bucket does not belong to its
    module."""
    in_hook = (pl.col("class") == "communication") & (pl.col("phase") == "backward") & pl.col("module").is_not_null()
    module = pl.when(in_hook).then(pl.lit(COMMUNICATION_MODULE)).otherwise("module")
    return kernels.with_columns(module=module, layer=pl.when(~in_hook.fill_null(value=False)).then("layer"))


def _join_launches(kernels: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Return kernels with the time and thread of their launch."""
    row = _find_launches(kernels, launches)
    columns = {"thread": "thread", "launch_name": "name", "launch_ns": "start_ns", "launch_end_ns": "end_ns"}
    joined = kernels.with_columns(look_up(launches, source, row).alias(name) for name, source in columns.items())
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


def _add_captured(kernels: pl.DataFrame, launches: pl.DataFrame, captures: pl.DataFrame) -> pl.DataFrame:
    """Add what was launched during captures and did not run, with `capture`, the number of the capture."""
    kernels = kernels.with_columns(capture=pl.lit(None, pl.Int64))
    if not captures.height:
        return kernels
    kind = pl.coalesce(
        pl.when(pl.col("name").str.contains(form)).then(pl.lit(kind)) for kind, form in CAPTURED_KINDS.items()
    )
    moments = launches.with_columns(ns="start_ns", launch_ns="start_ns", kind=kind, launched=pl.lit("op"))
    captured = moments.with_columns(capture=innermost(captures, moments, by_thread=False))
    captured = captured.filter(pl.col("capture").is_not_null(), pl.col("kind").is_not_null())
    captured = captured.join(kernels, on=["process", "correlation"], how="anti", nulls_equal=True)
    return pl.concat([kernels, captured.select(name for name in captured.columns if name in kernels)], how="diagonal")


def _find_launches(kernels: pl.DataFrame, launches: pl.DataFrame) -> pl.Series:
    """Return the row of each kernel's launch, null if there is none. A correlation identifies one call; of repeated
    ones (two processes merged into one file), the first counts."""
    found = np.full(kernels.height, NOWHERE, np.int64)
    # Binary search takes a twentieth of the time of a join on two columns.
    columns = ("row", "process", "correlation")
    calls = launches.with_row_index("row").select(columns).partition_by("process", as_dict=True)
    asking = kernels.with_row_index("row").select(columns).filter(pl.col("correlation").is_not_null())
    for process, asked in asking.partition_by("process", as_dict=True).items():
        if process not in calls:
            continue
        numbers, wanted = calls[process]["correlation"].to_numpy(), asked["correlation"].to_numpy()
        order = np.argsort(numbers, kind="stable")
        at = np.minimum(np.searchsorted(numbers[order], wanted), len(order) - 1)
        rows = calls[process]["row"].to_numpy().astype(np.int64)[order[at]]
        found[asked["row"].to_numpy()] = np.where(numbers[order[at]] == wanted, rows, NOWHERE)
    return pl.Series(found).replace(NOWHERE, None)


def _find_modules(
    points: pl.DataFrame, nodes: pl.DataFrame, modules: pl.DataFrame, parts: pl.DataFrame
) -> pl.DataFrame:
    """Return module, part, forward_range, in_backward, recomputed and called_ns (when the module was called) for each
    moment."""
    node_row, module_row = innermost(nodes, points), innermost(modules, points)
    in_backward = node_row.is_not_null()
    # A module called inside the evaluation of a node runs a second time: activation checkpointing.
    called = look_up(modules, "start_ns", module_row) > look_up(nodes, "start_ns", node_row)
    of_backward = look_up(modules.select(is_backward_pass().alias("of_backward")), "of_backward", module_row)
    # Compiled code has its modules in backward as well.
    compiled = (look_up(modules, "source", module_row) == COMPILED).fill_null(value=False)
    recomputed = in_backward & called.fill_null(value=False) & ~of_backward.fill_null(value=False) & ~compiled
    here = recomputed | ~in_backward | compiled
    return pl.select(
        module=pl.when(here).then(look_up(modules, "path", module_row)).otherwise(look_up(nodes, "module", node_row)),
        part=pl.when(here).then(_around_parts(parts, points)).otherwise(look_up(nodes, "part", node_row)),
        forward_range=pl.when(~here).then(look_up(nodes, "forward_range", node_row)),
        in_backward=in_backward,
        recomputed=recomputed,
        called_ns=look_up(modules, "start_ns", module_row),
    )


def _around_parts(parts: pl.DataFrame, points: pl.DataFrame) -> pl.Series:
    return around(parts, "name", points).str.strip_prefix(_USER_PARTS).str.strip_prefix(_PARTS)


def _find_ranges(points: pl.DataFrame, ranges: pl.DataFrame, main: pl.DataFrame) -> pl.Series:
    """Return the path of the user's range around each moment. Backward runs on autograd's threads while the main thread
    waits for it, so its moments are inside the main thread's ranges too."""
    here = around(ranges, "path", points)
    if not ranges.height:
        return here
    of_main = ranges.join(main, on=_THREAD, how="semi", nulls_equal=True)
    known = points.select("in_backward", *_THREAD).join(
        main.rename({"thread": "main"}), on="process", how="left", nulls_equal=True, maintain_order="left"
    )
    waits = known.select((pl.col("in_backward") | ~pl.col("has_operators")) & (pl.col("thread") != pl.col("main")))
    there = around(of_main, "path", points, by_thread=False)
    together = pl.concat_str(there, here, separator=BETWEEN, ignore_nulls=True)
    both = pl.when(there.is_not_null()).then(together).otherwise(here)
    return pl.select(pl.when(waits.to_series()).then(both).otherwise(here)).to_series()


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
        .when(phase.is_in(LOOP_PHASES))
        .then(pl.concat_str(pl.lit("("), phase, pl.lit(")")))
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
