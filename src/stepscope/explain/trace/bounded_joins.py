"""What belongs together by a number rather than by time, in a trace larger than memory: both sides are read in the
order of the number, a window at a time, so that it does not matter how far apart in time the two are."""

from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

import polars as pl

from stepscope.explain.trace.bounded_intake import Facts, Spills, Thread
from stepscope.recording.readers import kineto
from stepscope.recording.readers.spill import choose_borders

WINDOW_ROWS = 200_000
T = TypeVar("T")


def join_launches(facts: Facts, spills: Spills) -> Iterator[pl.DataFrame]:
    """Kernels find the calls that launched them. Yields those without one, which belong to nothing."""
    process = pl.lit(facts.launch_process, dtype=pl.Int64)
    borders = choose_borders((spills.launches, spills.kernels), WINDOW_ROWS)
    both = zip(spills.launches.windows(borders), spills.kernels.windows(borders), strict=True)
    for launches, kernels in both:
        calls = launches.filter(pl.col("process").eq_missing(process)).unique(
            "correlation", keep="first", maintain_order=True
        )
        replay = facts.names.spell(calls["name"]).str.contains("GraphLaunch")
        joined = kernels.join(
            calls.select("correlation", "thread", "ns", replay=replay), on="correlation", how="left"
        ).with_columns(process=process, time_ns=pl.col("end_ns") - pl.col("start_ns"))
        graph = pl.col("graph") | pl.col("replay").fill_null(value=False)
        launched = pl.when(graph).then(pl.lit("graph")).when(pl.col("ns").is_null()).then(pl.lit("before"))
        joined = joined.with_columns(launched=launched.otherwise(pl.lit("op")))
        spills.swept.add(joined)
        spills.points.add(joined.filter(pl.col("ns").is_not_null()))
        yield joined.filter(pl.col("ns").is_null())
    spills.launches.delete()
    spills.kernels.delete()


def take_operators_for_kernels(facts: Facts, spills: Spills) -> None:
    """`kineto._host_kernels` for a stream of operators: a tree of calls is decided when it is complete."""
    borders = choose_borders((spills.ops,), WINDOW_ROWS)
    trees: dict[Thread, _CallTree] = {}
    keys = ("process", "thread", "start_ns", "end_ns")
    for window in spills.ops.windows(borders):
        machinery = facts.names.spell(window["name"]).str.contains(kineto.MACHINERY)
        ordered = window.filter(~machinery).sort(keys, descending=[False, False, False, True])
        for (process, thread), group in ordered.partition_by("process", "thread", as_dict=True).items():
            tree = trees.setdefault((process, thread), _CallTree())
            for row in group.select("name", "start_ns", "end_ns").iter_rows():
                tree.add(*row)
            _add_host_kernels(spills, process, thread, tree.take())
    for (process, thread), tree in trees.items():
        tree.decide()
        _add_host_kernels(spills, process, thread, tree.take())


def _add_host_kernels(
    spills: Spills, process: int | None, thread: int | None, rows: list[tuple[int, int, int]]
) -> None:
    if not rows:
        return
    frame = pl.DataFrame(rows, schema={"name": pl.UInt32, "start_ns": pl.Int64, "end_ns": pl.Int64}, orient="row")
    frame = frame.with_columns(
        process=pl.lit(process, pl.Int64),
        device=pl.lit(-1, pl.Int64),
        stream=pl.lit(thread, pl.Int64),
        thread=pl.lit(thread, pl.Int64),
        ns="start_ns",
        time_ns=pl.col("end_ns") - pl.col("start_ns"),
        launched=pl.lit("op"),
    )
    spills.swept.add(frame)
    spills.points.add(frame)


class _CallTree:
    """One thread's calls since nothing was open on it: each with its own time, and the call around it."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, int]] = []
        self._own: list[int] = []
        self._parents: list[int] = []
        self._open: list[int] = []
        self._taken: list[tuple[int, int, int]] = []

    def add(self, name: int, start: int, end: int) -> None:
        while self._open and self._calls[self._open[-1]][2] <= start:
            self._open.pop()
        if not self._open:
            self.decide()
        self._parents.append(self._open[-1] if self._open else -1)
        if self._open:
            self._own[self._open[-1]] -= end - start
        self._open.append(len(self._calls))
        self._calls.append((name, start, end))
        self._own.append(end - start)

    def decide(self) -> None:
        """The outermost calls that spend at least half of their time by themselves."""
        inside = [False] * len(self._calls)
        for row, (call, own, parent) in enumerate(zip(self._calls, self._own, self._parents, strict=True)):
            inside[row] = parent != -1 and inside[parent]
            if not inside[row] and 2 * own >= call[2] - call[1]:
                inside[row] = True
                self._taken.append(call)
        self._calls, self._own, self._parents, self._open = [], [], [], []

    def take(self) -> list[tuple[int, int, int]]:
        taken, self._taken = self._taken, []
        return taken


def join_flows(spills: Spills) -> None:
    """The profiler's arrows from forward to backward, as the moments where they end."""
    borders = choose_borders((spills.flow_starts, spills.flow_ends), WINDOW_ROWS)
    for starts, ends in zip(spills.flow_starts.windows(borders), spills.flow_ends.windows(borders), strict=True):
        first = starts.unique("id", keep="first", maintain_order=True)
        spills.links.add(
            ends.join(first.select("process", "id", forward_thread="thread"), on=["process", "id"], how="inner")
        )
    spills.flow_starts.delete()
    spills.flow_ends.delete()


def choose_forward_threads(
    facts: Facts, numbers: set[Thread], votes: Counter[tuple[Thread, int | None]], *, has_links: bool
) -> pl.DataFrame:
    """Which thread `forward_thread` means, as in `attribution`: process, forward_thread, made_thread. `numbers` are
    those that nodes carry, `votes` count the arrows from each number to each thread."""
    chosen: dict[Thread, int | None] = {}
    if has_links:
        for carried, meant in _most_first(votes):
            chosen.setdefault(carried, meant)
    else:
        busiest: dict[int | None, int | None] = {}
        for process, thread in _most_first(facts.forward_threads):
            busiest.setdefault(process, thread)
        for process, number in numbers:
            own = number is not None and process is not None and (process, number) in facts.forward_threads
            chosen[process, number] = number if own else busiest.get(process) if process is not None else None
    schema = {"process": pl.Int64, "forward_thread": pl.Int64, "made_thread": pl.Int64}
    rows = [(process, number, thread) for (process, number), thread in chosen.items()]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _most_first(counts: Counter[tuple[T, int | None]]) -> list[tuple[T, int | None]]:
    """The thread with the smallest number among equals."""
    return sorted(counts, key=lambda one: (-counts[one], one[1] is None, one[1] or 0))


def join_makers(spills: Spills, threads: pl.DataFrame) -> None:
    """Autograd's nodes find the operators that made them, as the moments at which those ran."""
    borders = choose_borders((spills.forward, spills.nodes), WINDOW_ROWS)
    for forward, nodes in zip(spills.forward.windows(borders), spills.nodes.windows(borders), strict=True):
        # Operators that make no node carry the number of the next node to be made: the last one is the maker.
        makers = forward.group_by("process", "sequence", made_thread="thread").agg(made_ns=pl.col("start_ns").max())
        known = nodes.join(threads, on=["process", "forward_thread"], how="inner", nulls_equal=True)
        found = known.join(makers, on=["process", "sequence", "made_thread"], how="inner")
        spills.made.add(found.select("process", "node", thread="made_thread", ns="made_ns"))
    spills.forward.delete()
    spills.nodes.delete()
