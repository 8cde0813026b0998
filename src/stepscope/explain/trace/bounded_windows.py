"""What encloses what, and what runs beside what, in a trace larger than memory: time is gone through in windows.

A window's border may lie anywhere. What is still open there is carried into the next window, together with all that was
open on the same thread since the oldest of it began, so that `nesting.innermost` counts the same depths as over the
whole recording; a kernel that runs across a border is swept in two pieces.
"""

from collections import Counter
from dataclasses import dataclass, field

import polars as pl

from stepscope.explain.trace.accounting import Account, DeviceAccount, account
from stepscope.explain.trace.attribution import EVALUATE, LOSS_MODULE, find_modules
from stepscope.explain.trace.bounded_intake import Facts, Spills, Thread
from stepscope.explain.trace.modules import module_paths
from stepscope.explain.trace.names import classify
from stepscope.explain.trace.nesting import innermost
from stepscope.explain.trace.phases import find_phases
from stepscope.recording.readers.kineto_stream import Names
from stepscope.recording.readers.spill import choose_borders
from stepscope.recording.store import Recording

WINDOW_ROWS = 200_000
_MOST_CARRIED = 100_000  # rows that have ended; only what crosses instead of nesting could ever miss more
_MOST_GROUPS = 100_000
GROUPS = ("name", "launched", "op", "module", "phase")
_NO_THREAD = -1
_NODE_COLUMNS = ("name", "process", "thread", "start_ns", "end_ns", "sequence", "forward_thread", "node")


class _Open:
    """What the next window needs of the intervals of those before."""

    def __init__(self, *keys: str) -> None:
        self._keys = list(keys)
        self._carried: pl.DataFrame | None = None

    def extend(self, new: pl.DataFrame, border: int | None) -> pl.DataFrame:
        """The window's intervals, which ends at `border`: those that it was given, and those from before."""
        together = new if self._carried is None else pl.concat([self._carried, new])
        self._carried = None if border is None else self._keep(together, border)
        return together

    def _keep(self, intervals: pl.DataFrame, border: int) -> pl.DataFrame:
        still_open = pl.col("end_ns") > border
        since = intervals.filter(still_open).group_by(self._keys).agg(since=pl.col("start_ns").min())
        kept = intervals.join(since, on=self._keys, how="inner", nulls_equal=True, maintain_order="left")
        kept = kept.filter(pl.col("end_ns") > pl.col("since")).drop("since")
        if kept.height > _MOST_CARRIED:
            kept = kept.filter(still_open | (pl.int_range(pl.len()) >= kept.height - _MOST_CARRIED))
        return kept


@dataclass(kw_only=True)
class Survey:
    """What must be known of the whole recording before any kernel can be attributed."""

    borders: list[int]
    node_counts: list[int] = field(default_factory=list)  # up to each border
    numbers: set[Thread] = field(default_factory=set)
    votes: Counter[tuple[Thread, int | None]] = field(default_factory=Counter)
    autograd: set[Thread] = field(default_factory=set)  # threads that launched a kernel inside a node


def survey_nodes(facts: Facts, spills: Spills) -> Survey:
    """Numbers autograd's nodes and finds the threads they run on."""
    tables = (spills.ops, spills.modules, spills.named, spills.points, spills.links)
    survey = Survey(borders=choose_borders(tables, WINDOW_ROWS))
    opened = _Open("process", "thread")
    count = 0
    read = (spills.ops, spills.links, spills.points)
    windows = zip((*survey.borders, None), *(table.windows(survey.borders) for table in read), strict=True)
    for border, ops, links, points in windows:
        new = _nodes(facts.names, ops, count)
        count += new.height
        survey.node_counts.append(count)
        spills.nodes.add(new.filter(pl.col("sequence").is_not_null()))
        survey.numbers.update(new.select("process", "forward_thread").unique().iter_rows())
        nodes = opened.extend(new, border)
        if not nodes.height:
            number = pl.Series([None] * links.height, dtype=pl.Int64)
        else:
            number = nodes["forward_thread"].gather(innermost(nodes, links))
            inside = points.filter(innermost(nodes, points).is_not_null())
            survey.autograd.update(inside.select("process", "thread").unique().iter_rows())
        voted = links.with_columns(number=number).group_by("process", "number", "forward_thread").len()
        for process, meant, thread, votes in voted.iter_rows():
            survey.votes[(process, meant), thread] += votes
    return survey


def _nodes(names: Names, ops: pl.DataFrame, first: int) -> pl.DataFrame:
    """Those operators that evaluate autograd's nodes, numbered from `first`."""
    spelled = ops.with_columns(name=names.spell(ops["name"]))
    is_node = pl.col("name").str.starts_with(EVALUATE) | pl.col("forward_thread").is_not_null()
    found = spelled.filter(is_node)
    return found.with_columns(node=first + pl.int_range(pl.len(), dtype=pl.Int64)).select(_NODE_COLUMNS)


def find_made_modules(facts: Facts, spills: Spills) -> None:
    """The module around each node's maker."""
    borders = choose_borders((spills.modules, spills.named, spills.made), WINDOW_ROWS)
    opened, opened_loss = _Open("process", "thread"), _Open("process", "thread")
    read = (spills.modules, spills.named, spills.made)
    windows = zip((*borders, None), *(table.windows(borders) for table in read), strict=True)
    for border, new, named, made in windows:
        modules = module_paths(opened.extend(_spell_modules(facts, new), border))
        is_loss = facts.names.spell(named["name"]) == "phase:loss"
        loss = opened_loss.extend(named.filter(is_loss), border)
        module = modules["path"].gather(innermost(modules, made)) if modules.height else _nulls(made.height)
        in_loss = innermost(loss, made).is_not_null()
        found = pl.select(pl.when(in_loss).then(pl.lit(LOSS_MODULE)).otherwise(module)).to_series()
        known = made.with_columns(module=facts.names.numbers(found))
        spills.node_modules.add(known.filter(pl.col("module").is_not_null()))
    spills.made.delete()


def _spell_modules(facts: Facts, modules: pl.DataFrame) -> pl.DataFrame:
    spelled = modules.with_columns(name=facts.names.spell(modules["name"]))
    return spelled.filter(pl.col("name").str.starts_with("module:")) if facts.names_modules_itself else spelled


@dataclass(kw_only=True)
class Groups:
    """Kernels added up by what they belong to, as far as it is known."""

    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, kernels: pl.DataFrame) -> None:
        time = pl.col("time_ns")
        grouped = kernels.group_by(GROUPS).agg(
            time.sum(), count=pl.len().cast(pl.Int64), min_ns=time.min(), max_ns=time.max()
        )
        self.parts.append(grouped)
        if len(self.parts) > 1 and sum(part.height for part in self.parts) > _MOST_GROUPS:
            self.parts = [self.together()]

    def together(self) -> pl.DataFrame:
        sums = pl.col("time_ns", "count").sum()
        return pl.concat(self.parts).group_by(GROUPS).agg(sums, pl.col("min_ns").min(), pl.col("max_ns").max())


class FirstCalls:
    """When each path of modules was first called: the table from which layers are numbered."""

    def __init__(self) -> None:
        self.modules = pl.DataFrame(schema={"path": pl.String, "name": pl.String, "start_ns": pl.Int64})

    def add(self, modules: pl.DataFrame) -> None:
        together = pl.concat([self.modules, modules.select("path", "name", "start_ns")])
        self.modules = together.sort("start_ns", maintain_order=True).unique("path", keep="first", maintain_order=True)


def attribute_windows(facts: Facts, spills: Spills, survey: Survey, groups: Groups) -> FirstCalls:
    """Every kernel gets its operator, module and phase (`attribution._attribute_points`), and is added to `groups`."""
    first_calls = FirstCalls()
    opened_ops, opened_nodes, opened_modules = (_Open("process", "thread") for _ in range(3))
    # A named range may count for its whole process.
    opened_named = _Open("process")
    gradients = _Gradients()
    evidence = _evidence(facts, survey)
    borders = survey.borders
    read = (spills.ops, spills.modules, spills.named, spills.points)
    tables = (table.windows(borders) for table in read)
    node_modules = spills.node_modules.windows(survey.node_counts[:-1])
    counts = (0, *survey.node_counts[:-1])
    for border, first, ops, modules, named, points, made in zip(
        (*borders, None), counts, *tables, node_modules, strict=True
    ):
        new_nodes = _nodes(facts.names, ops, first).join(made, on="node", how="left", maintain_order="left")
        new_nodes = new_nodes.with_columns(module=facts.names.spell(new_nodes["module"]))
        nodes = opened_nodes.extend(gradients.fill(new_nodes), border)
        paths = module_paths(opened_modules.extend(_spell_modules(facts, modules), border))
        first_calls.add(paths)
        recording = Recording(
            manifest=facts.manifest,
            ops=opened_ops.extend(ops.with_columns(name=facts.names.spell(ops["name"])), border),
            ranges=opened_named.extend(named.with_columns(name=facts.names.spell(named["name"])), border),
        )
        if points.height:
            spelled = points.with_columns(name=facts.names.spell(points["name"]))
            groups.add(_attribute(recording, spelled, nodes, paths, evidence))
    return first_calls


def _evidence(facts: Facts, survey: Survey) -> pl.DataFrame:
    """Moments that are none, on the threads known to run backward: `find_phases` looks at all it is given for that."""
    threads = sorted(survey.autograd, key=str)
    if facts.says_backward:
        threads.append((_NO_THREAD, _NO_THREAD))
    rows = pl.DataFrame(threads, schema={"process": pl.Int64, "thread": pl.Int64}, orient="row")
    return rows.with_columns(in_backward=pl.lit(value=True))


def _attribute(
    recording: Recording, points: pl.DataFrame, nodes: pl.DataFrame, modules: pl.DataFrame, evidence: pl.DataFrame
) -> pl.DataFrame:
    op_row = innermost(recording.ops, points)
    found = find_modules(points, nodes, modules)
    framed = points.with_columns(found.select("module", "in_backward"), op_row=op_row)
    phased = find_phases(recording, pl.concat([framed, evidence], how="diagonal")).head(points.height)
    op = recording.ops["name"].gather(op_row) if recording.ops.height else _nulls(points.height)
    return phased.with_columns(op=op)


class _Gradients:
    """The engine adds up a parameter's gradient right after the node that produced it, on the same thread: the module
    of the last node that has one, across windows."""

    _KEYS = ("process", "thread")

    def __init__(self) -> None:
        self._last: pl.DataFrame | None = None

    def fill(self, nodes: pl.DataFrame) -> pl.DataFrame:
        ordered = nodes.with_row_index("row").sort(*self._KEYS, "start_ns", maintain_order=True)
        with_last = ordered if self._last is None else pl.concat([self._last, ordered], how="diagonal")
        known = pl.col("module").forward_fill().over(self._KEYS)
        with_last = with_last.with_columns(known=known)
        known_rows = with_last.filter(pl.col("known").is_not_null())
        self._last = known_rows.group_by(self._KEYS).agg(pl.col("known").last()).rename({"known": "module"})
        gathers = pl.col("name").str.contains("AccumulateGrad") & pl.col("module").is_null()
        filled = with_last.with_columns(module=pl.when(gathers).then("known").otherwise("module"))
        return filled.filter(pl.col("row").is_not_null()).sort("row").select(nodes.columns)


@dataclass(kw_only=True)
class _Sums:
    classes: Counter[str] = field(default_factory=Counter)
    overlap_ns: int = 0
    hidden_ns: int = 0
    exposed_ns: int = 0

    def add(self, one: Account) -> None:
        self.classes.update(one.classes)  # keeps those at zero
        self.overlap_ns += one.overlap_ns
        self.hidden_ns += one.communication_hidden_ns
        self.exposed_ns += one.communication_exposed_ns

    def over(self, wall_ns: int) -> Account:
        return Account(
            wall_ns=wall_ns,
            classes={name: self.classes[name] for name in sorted(self.classes)},
            overlap_ns=self.overlap_ns,
            idle_ns=wall_ns - self.classes.total() - self.overlap_ns,
            communication_hidden_ns=self.hidden_ns,
            communication_exposed_ns=self.exposed_ns,
        )


def sweep_windows(
    facts: Facts, spills: Spills, kind: str, steps: pl.DataFrame
) -> tuple[tuple[DeviceAccount, ...], tuple[int, int]]:
    """The account of each device, and the window from the first thing to the last."""
    borders = choose_borders((spills.swept,), WINDOW_ROWS)
    devices: dict[tuple[int | None, int], _Sums] = {}
    streams: dict[tuple[int | None, int, int], _Sums] = {}
    moments: list[int] = [*steps["start_ns"], *steps["end_ns"]]
    start, end = min(moments, default=None), max(moments, default=None)
    carried: pl.DataFrame | None = None
    for border, window in zip((*borders, None), spills.swept.windows(borders), strict=True):
        named = window.with_columns(name=facts.names.spell(window["name"]), kind=pl.lit(kind))
        new = classify(named).drop("name", "short", "is_cast", "kind")
        running = new if carried is None else pl.concat([carried, new])
        if not running.height:
            continue
        first, last = _span(running)
        start, end = (first, last) if start is None or end is None else (min(start, first), max(end, last))
        if border is not None:
            # What runs across the border is swept up to it now, and from it on with the next window.
            carried = running.filter(pl.col("end_ns") > border).with_columns(start_ns=pl.lit(border, pl.Int64))
            running = running.with_columns(end_ns=pl.min_horizontal("end_ns", pl.lit(border, pl.Int64)))
        for key, sums in ((("process", "device"), devices), (("process", "device", "stream"), streams)):
            for name, group in running.partition_by(key, as_dict=True).items():
                sums.setdefault(name, _Sums()).add(account(group, _span(group)))
    assert start is not None
    assert end is not None
    return _accounts(devices, streams, end - start), (start, end)


def _accounts(
    devices: dict[tuple[int | None, int], _Sums], streams: dict[tuple[int | None, int, int], _Sums], wall_ns: int
) -> tuple[DeviceAccount, ...]:
    accounts = []
    for (process, device), sums in sorted(devices.items(), key=lambda item: str(item[0])):
        own = sorted((key[2], one) for key, one in streams.items() if key[:2] == (process, device))
        accounts.append(
            DeviceAccount(
                process=process,
                device=device,
                whole=sums.over(wall_ns),
                streams={stream: one.over(wall_ns) for stream, one in own},
            )
        )
    return tuple(accounts)


def _span(intervals: pl.DataFrame) -> tuple[int, int]:
    start, end = intervals["start_ns"].min(), intervals["end_ns"].max()
    assert isinstance(start, int)
    assert isinstance(end, int)
    return start, end


def _nulls(length: int) -> pl.Series:
    return pl.Series([None] * length, dtype=pl.String)
