"""Give kernels that a CUDA graph launched what the same kernels show elsewhere.

A graph is a single launch, in which no operator and no module is open any more. Its kernels run in the order in which
they were captured; where branches run in parallel, the numbers of the nodes have that order. So the kernels of a launch
are compared with sequences whose operators are known:

- `capture`: what stepscope captured, run without the graph, or what was launched during a capture in the same trace.
  Of the latter, only the number and the kinds of launches are recorded. All must be equal, and no GEMM may come from an
  operator that has none.
- `eager`: the same kernels, by name and grid, launched one by one in the same trace.
- `compiled`: the code that a compiler generated, whose calls are known from when it was compiled (`compiled_graphs`).
- `repetition`: without any of these, a sequence of kernels that runs again and again within one launch, or within one
  call of a module. Layers do.
- `order`: the part of such a layer that a kernel belongs to, where the order of GEMMs, norms and attention shows it
  (`layer_parts`).

Nothing is guessed. A sequence may fit in several places, and in each of them in several ways: only what is the same in
all of them is taken. The column `matched` says how the owner of a kernel is known.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.explain.alignment import MOST_ITEMS, align
from stepscope.explain.kernel_names import decode
from stepscope.explain.trace.attribution.layer_parts import find_parts
from stepscope.explain.trace.attribution.names import classify_operator
from stepscope.recording.nesting import NOWHERE, look_up

# How the owner of a kernel is known, in words.
WAYS = {
    "capture": "from the captured order",
    "eager": "from the same kernels launched one by one",
    "compiled": "from the code that the compiler generated",
    "repetition": "from repetition",
    "order": "from the order of kernels in a layer",
}
REPEAT = "repeat of"  # the beginning of the names that repeats have among modules
# The kinds of launches during a capture. They are among the kernels until these are matched.
CAPTURED_KINDS = {"kernel": r"(?i)launch(?:cooperative)?kernel", "memcpy": r"(?i)memcpy", "memset": r"(?i)memset"}
_TAKEN = ("op", "module", "part", "phase", "recomputed")
LAUNCH = ("process", "device", "correlation")
_GRID = ("grid_x", "grid_y", "grid_z")
_COMPARED = 100_000  # kernels at the beginning of a recording, which show what the others belong to
_LEAST_KERNELS = 4  # of a graph in a trace of others, or of a repeated sequence: fewer may be equal by chance
_ALIKE = 0.95  # of a graph's kernels: as many must be found in the other sequence
_LONGEST = 1.5  # times the number of a graph's kernels: within so many launches they must be found
_MOST_SEQUENCES = 8
_LEAST_REPEATS = 3
_REPEATED = 0.5  # of a sequence, to be made of repeats
_NEARLY = 0.95  # of what the best period explains: a shorter one that does is the period
_PRODUCTS = ("GEMM", "attention", "convolution")
_CLASS_PATH = r"^[^.]*_\d+(?:\.[^.]*_\d+)*$"

Name = tuple[tuple[Any, ...], ...]  # of a sequence: kind, name and grid of each launch
_Places = list[int | None]


def is_capture() -> pl.Expr:
    """Whether a call begins or ends a capture."""
    return pl.col("name").str.contains(r"(?i)^(?:cuda|hip|cu)Stream(?:Begin|End)Capture")


def find_captures(launches: pl.DataFrame) -> pl.DataFrame:
    """Return the times (process, start_ns, end_ns) in which the CPU captures CUDA graphs: what it launches then does
    not run."""
    calls = launches.filter(is_capture()).sort("start_ns")
    begins = pl.col("name").str.contains("Begin")
    by_thread = ["process", "thread"]
    ends = calls.with_columns(
        next_begins=begins.shift(-1).over(by_thread), next_ns=pl.col("end_ns").shift(-1).over(by_thread)
    )
    return ends.filter(begins & ~pl.col("next_begins")).select("process", "start_ns", end_ns="next_ns")


def fill_graphs(
    windows: Iterable[pl.DataFrame], captured: pl.DataFrame, fill_compiled: Callable[[pl.DataFrame], pl.DataFrame]
) -> Iterator[pl.DataFrame]:
    """Yield the windows of kernels without launches of captures, with `matched` added, and `_TAKEN` filled in for
    kernels of graphs. `captured` is that table of the recording; `fill_compiled` fills in what compiled code shows."""
    remaining = iter(windows)
    first: list[pl.DataFrame] = []
    while sum(window.height for window in first) <= _COMPARED and (window := next(remaining, None)) is not None:
        first.append(window)
    shown = pl.concat(first)
    # By time, not by row: windows may have rows with equal times in another order.
    key = shown.select(pl.coalesce("ns", "start_ns")).to_series()
    known = _KnownLaunches(shown.filter(key <= key.sort()[min(_COMPARED, key.len()) - 1]), captured)
    upcoming = chain(first, remaining)
    current, held = next(upcoming, None), shown.clear()
    while current is not None:
        following = next(upcoming, None)
        ready, held = pl.concat([held, current]), shown.clear()
        if following is not None:
            ready, held = _split_last_call(ready)
        kernels = known.fill(ready.filter(pl.col("capture").is_null()).drop("capture"))
        yield _number_repeats(fill_compiled(kernels)).drop("called_ns")
        current = following


def _split_last_call(kernels: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the kernels before the last module call that launches graphs, and the others: the next window may have
    more of its launches."""
    graphs = kernels.filter(is_graph()).sort("ns")
    called_ns = graphs["called_ns"].tail(1)
    begin = graphs.filter(pl.col("called_ns").is_in(called_ns.implode()))["ns"].min()
    inside = (pl.col("ns") >= pl.lit(begin, pl.Int64)).fill_null(value=False)
    later = kernels.filter(inside)
    return (kernels.filter(~inside), later) if later.height <= _COMPARED else (kernels, kernels.clear())


def is_graph() -> pl.Expr:
    return (pl.col("launched") == "graph") & pl.col("correlation").is_not_null()


def order_launches(kernels: pl.DataFrame) -> pl.DataFrame:
    return kernels.sort("ns", "graph_node", "start_ns", maintain_order=True, nulls_last=True)


def _name(launches: pl.DataFrame, *, with_grid: bool) -> Name:
    return tuple(launches.select("kind", "name", *(_GRID if with_grid else ())).iter_rows())


class _KnownSequence(NamedTuple):
    """Launches in order. `values` are rows of what they belong to."""

    names: Name
    bare_names: Name  # without grids
    values: range


class _KnownLaunches:
    """Sequences of launches that show what each belongs to. Equal graphs are compared with them once."""

    def __init__(self, shown: pl.DataFrame, captured: pl.DataFrame) -> None:
        self._values: list[tuple[Any, ...]] = []  # of `_TAKEN`, and the way
        self._schema = {name: shown.schema[name] for name in _TAKEN} | {"matched": pl.String()}
        self._found: dict[Name, _Places] = {}
        self._run = [self._keep("capture", captured)] if captured.height else []
        ordered = shown.sort("ns", "start_ns", maintain_order=True)
        captures = ordered.filter(pl.col("capture").is_not_null()).partition_by("capture", maintain_order=True)
        self._during_captures = [self._keep("capture", one) for one in captures]
        is_eager = (pl.col("launched") == "op") & (pl.col("kind") != "cpu") & pl.col("capture").is_null()
        eager = ordered.filter(is_eager) if shown.select(is_graph().any()).item() else ordered.clear()
        steps = eager.partition_by("process", "step", maintain_order=True)
        self._eager = [self._keep("eager", one) for one in steps[:_MOST_SEQUENCES]]

    def _keep(self, way: str, launches: pl.DataFrame) -> _KnownSequence:
        begin = len(self._values)
        self._values += [(*row, way) for row in launches.select(_TAKEN).iter_rows()]
        names, bare_names = (_name(launches, with_grid=with_grid) for with_grid in (True, False))
        return _KnownSequence(names, bare_names, range(begin, len(self._values)))

    def fill(self, kernels: pl.DataFrame) -> pl.DataFrame:
        """Add `matched`, and fill in `_TAKEN` for kernels of graphs."""
        rows: list[int] = []
        found: list[int] = []
        graphs = order_launches(kernels.with_row_index("row").filter(is_graph()))
        compared = graphs.select("row", *LAUNCH, "kind", "name", *_GRID, "start_ns")
        for launch in compared.partition_by(LAUNCH, maintain_order=True):
            # If the numbers of nodes have another order than the capture, time may still have it.
            is_known = any(one is not None for one in self._match(launch))
            order = launch if is_known else launch.sort("start_ns", maintain_order=True)
            rows += order["row"].to_list()
            found += (NOWHERE if one is None else one for one in self._match(order))
        places = np.full(kernels.height, NOWHERE, np.int64)
        places[rows] = found
        values = pl.DataFrame(self._values, schema=self._schema, orient="row")
        taken = {name: look_up(values, name, pl.Series(places).replace(NOWHERE, None)) for name in self._schema}
        filled = {name: pl.coalesce(taken[name], pl.col(name)).alias(name) for name in _TAKEN}
        # The call around the launch of a graph has other shapes than the operator of a kernel.
        op_row = pl.when(taken["matched"].is_null()).then("op_row")
        return kernels.with_columns(**filled, matched=taken["matched"], op_row=op_row)

    def _match(self, launch: pl.DataFrame) -> _Places:
        """Return the row of values of each kernel of a launch."""
        # Some profilers leave out the grids of graphs.
        has_grids = not launch.filter(pl.col("kind") == "kernel")["grid_x"].has_nulls()
        names = _name(launch, with_grid=has_grids)
        if names not in self._found:
            self._found[names] = [None] * len(names)
            if fits := self._fit(launch, names, has_grids=has_grids):
                self._found[names] = self._agree(fits)
        return self._found[names]

    def _fit(self, launch: pl.DataFrame, names: Name, *, has_grids: bool) -> list[_Places]:
        """Return the rows of values in each place where the launch fits."""
        kinds = launch["kind"].to_list()
        others = (self._during_captures, self._eager) if len(names) >= _LEAST_KERNELS else ()
        for sequences in (self._run, *others):
            fits: list[_Places] = []
            for sequence in sequences:
                if sequences is not self._during_captures:
                    other = sequence.names if has_grids else sequence.bare_names
                    fits += [[None if at is None else sequence.values[at] for at in one] for one in _fit(names, other)]
                elif [kind for kind, _ in sequence.bare_names] == kinds and self._may_launch(sequence, launch["name"]):
                    fits.append(list(sequence.values))
            if fits:
                return fits
        return []

    def _may_launch(self, sequence: _KnownSequence, kernels: Iterable[str]) -> bool:
        """Whether the operators of a capture may have launched these kernels, as far as names tell."""
        operators = (self._values[row][0] for row in sequence.values)
        return all(
            operator is None or classify_operator(operator) in (*_PRODUCTS, "other")
            for operator, kernel in zip(operators, kernels, strict=True)
            if decode(kernel).kernel_class in _PRODUCTS
        )

    def _agree(self, fits: Sequence[_Places]) -> _Places:
        """Return new rows of values, with what is the same in all fits; None if neither operator nor module is."""
        rows: _Places = []
        for places in zip(*fits, strict=True):
            known = [self._values[place] for place in dict.fromkeys(places) if place is not None]
            row = tuple(one[0] if len(set(one)) == 1 else None for one in zip(*known, strict=True))
            is_known = None not in places and row[:2] != (None, None)
            rows.append(len(self._values) if is_known else None)
            self._values += [row] if is_known else []
        return rows


def _fit(names: Name, other: Name) -> Iterator[_Places]:
    """Yield the first and the last place of these names in another sequence, if it has nearly all of them close
    together."""
    if max(len(names), len(other)) > MOST_ITEMS:
        return
    backward = align(names[::-1], other[::-1])
    for pairs in (align(names, other), [(len(names) - 1 - at, len(other) - 1 - to) for at, to in backward[::-1]]):
        found = dict(pairs)
        if len(found) < _ALIKE * len(names) or pairs[-1][1] - pairs[0][1] >= _LONGEST * len(names):
            return
        yield [found.get(at) for at in range(len(names))]


# --- Repetition -------------------------------------------------------------------------------------------------------


def _number_repeats(kernels: pl.DataFrame) -> pl.DataFrame:
    """Number the repeats of a sequence in graphs that nothing else explains. The launches of one call of a module are
    one pass of it. Other launches that follow each other may be different steps, and are looked at one by one."""
    unknown = is_graph() & pl.col("matched").is_null().all().over(LAUNCH)
    if not kernels.select(unknown.any()).item():
        return kernels
    columns = ("ns", "graph_node", "start_ns", "process", "correlation", "called_ns", "kind", "name", *_GRID)
    ordered = order_launches(kernels.select(pl.int_range(pl.len()).alias("row"), *columns, unknown=unknown))
    passes = ordered.filter("unknown").group_by("process", pl.coalesce("called_ns", "correlation").alias("pass"))
    times = ordered["ns"].drop_nulls()
    found: dict[Name, list[RepeatedKernel | None]] = {}
    rows: list[int] = []
    repeats: list[RepeatedKernel | None] = []
    for process, first, last in passes.agg(pl.col("ns").min(), last=pl.col("ns").max()).drop("pass").iter_rows():
        begin, end = times.search_sorted(first, "left"), times.search_sorted(last, "right")
        of_pass = pl.col("process").eq_missing(process) & (pl.col("kind") == "kernel")
        launches = ordered.slice(begin, end - begin).filter(of_pass)
        name = _name(launches, with_grid=True)
        if name not in found:
            found[name] = find_repeats(name)
        is_unknown = launches["unknown"].to_list()
        rows += launches["row"].filter(launches["unknown"]).to_list()
        repeats += [one for one, is_ours in zip(found[name], is_unknown, strict=True) if is_ours]
    schema = {"period": pl.Int64, "number": pl.Int64, "layer_part": pl.String}
    own = pl.DataFrame([one or (None,) * len(schema) for one in repeats], schema=schema, orient="row")
    places = kernels.select(pl.int_range(pl.len()).alias("row")).join(
        own.with_columns(row=pl.Series(rows, dtype=pl.Int64)), on="row", how="left", maintain_order="left"
    )
    named = pl.concat([kernels, places.drop("row")], how="horizontal")
    # In paths of classes, a number follows the class; in other paths, it is a name of its own.
    is_of_classes = pl.col("module").str.contains(_CLASS_PATH)
    joint = pl.when(is_of_classes).then(pl.lit("_")).otherwise(pl.lit("."))
    repeat = pl.concat_str(pl.format(f"{REPEAT} {{}} kernels", "period"), joint, "number")
    part = pl.when(is_of_classes).then(pl.col("layer_part") + "_0").otherwise("layer_part")
    path = pl.concat_str("module", repeat, part, separator=".", ignore_nulls=True)
    way = pl.when(pl.col("layer_part").is_null()).then(pl.lit("repetition")).otherwise(pl.lit("order"))
    is_repeat = pl.col("period").is_not_null()
    filled = named.with_columns(
        module=pl.when(is_repeat).then(path).otherwise("module"),
        matched=pl.when(is_repeat).then(way).otherwise("matched"),
    )
    return filled.select(kernels.columns)


class RepeatedKernel(NamedTuple):
    """A kernel in a sequence of `period` kernels that repeats: the number of the repeat, and the part of a layer."""

    period: int
    number: int
    part: str | None


def find_repeats(names: Name) -> list[RepeatedKernel | None]:
    """Return which repeat of which sequence each name is in. Forward and backward have sequences of their own. A
    layer begins where its order says, otherwise where the first repeat does."""
    numbers: dict[tuple[Any, ...], int] = {}
    codes = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    found: list[RepeatedKernel | None] = [None] * len(names)
    counts: dict[int, int] = {}
    waiting = [(0, len(names))] if len(names) <= MOST_ITEMS else []
    while waiting:
        begin, end = waiting.pop()
        period, runs = _find_period(codes[begin:end])
        first = begin + runs[0][0] if runs else begin
        if not any(decode(name).kernel_class in _PRODUCTS for _, name, *_ in names[first : first + period]):
            continue  # no layer: an optimizer repeats a few kernels for every parameter
        for start, stop in runs:
            complete = begin + stop
            while complete < end and codes[complete] == codes[complete - period]:
                complete += 1
            repeats = _number_run([name for _, name, *_ in names[begin + start : complete]], period)
            base = counts.get(period, 0)
            for place, (number, part) in repeats.items():
                found[begin + start + place] = RepeatedKernel(period, base + number, part)
            counts[period] = base + 1 + max(number for number, _ in repeats.values())
        borders = [0, *(border for run in runs for border in run), end - begin]
        waiting += [(begin + one, begin + other) for one, other in zip(borders[::2], borders[1::2], strict=True)]
    return found


def _number_run(kernels: Sequence[str], period: int) -> dict[int, tuple[int, str | None]]:
    """Return the number of the repeat and the part of kernels that repeat, by their place. The first and the last
    repeat may be cut off."""
    offset, parts = find_parts(kernels[:period]) or (0, [None] * period)
    least = _REPEATED * period
    first = 0 if offset >= least else offset
    rest = (len(kernels) - offset) % period
    last = len(kernels) - (rest if rest < least else 0)
    return {at: ((at - offset) // period + (first < offset), parts[at % period]) for at in range(first, last)}


def _find_period(codes: NDArray[np.int64]) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of items after which most of a sequence repeats, and where it does, as (start, end); no places
    if nothing repeats often enough."""
    found: dict[int, list[tuple[int, int]]] = {}
    for period in range(_LEAST_KERNELS, len(codes) // _LEAST_REPEATS + 1):
        same = np.concatenate(([0], codes[period:] == codes[:-period], [0]))
        stretches = np.flatnonzero(np.diff(same)).reshape(-1, 2)
        long = (_LEAST_REPEATS - 1) * period
        runs: list[tuple[int, int]] = []
        for start, stop in stretches[stretches[:, 1] - stretches[:, 0] >= long].tolist():
            begin = max(start, runs[-1][1]) if runs else start  # two runs may share their border
            rest = (stop - begin) % period
            if stop - begin >= long:  # the last repeat may be cut off
                runs.append((begin, stop + period - (rest if rest < _REPEATED * period else 0)))
        if runs:
            found[period] = runs
    covered = {period: sum(stop - start for start, stop in runs) for period, runs in found.items()}
    most = max(covered.values(), default=0)
    if most < max(1, _REPEATED * len(codes)):
        return 0, []
    period = min(period for period, items in covered.items() if items >= _NEARLY * most)
    return period, found[period]
