"""The kernel time of a step by class, phase, module, operator and kernel at once.

Rows add up to `Profile.gpu_time_ns` per step. A row is everything that agrees in all dimensions; for two runs, a row
that only one of them has is 0 in the other. The page shows the rows as lists, as a tree of modules and as a flame view,
which is why they cannot contradict each other. If a page cannot hold all rows, the smallest lose first which of the
alike layers they are in, then their operator, then more, so that the times by class, phase and kernel stay exact.
Dropping kernels first was tried: the kernel table of a deep model was then mostly `(rest)`. Summed over one dimension,
the rows become a table. If only one of two runs has modules, a comparison has none: every module would be gone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.explain.trace.attribution.names import cut_name, describe_kernel
from stepscope.explain.trace.compare import REST
from stepscope.explain.trace.loop.source_lines import has_sources, launch_sources
from stepscope.explain.trace.module_tree import Levels, fold_modules, join_roles, list_kinds, name_nodes, plant_tree
from stepscope.explain.trace.profile import UNKNOWN, Profile, order_phases
from stepscope.explain.trace.profile_tables import scope
from stepscope.findings import Breakdown, Cell, Column, Dimension, Table
from stepscope.units import say_list, say_time

TITLE = "Where the time goes"
MOST_ROWS = 15_000
# The most kernels to describe. A recording with more names is hostile or has a name per call.
MOST_DESCRIBED = 2_000
_KEYS = ["class", "phase", "module", "op", "kernel"]
_LABELS = {"op": "operator"}
# What the smallest rows lose, one by one, until they are few enough. Before that, a module loses its layer.
_GIVEN_UP = ("op", "module", "kernel", "phase")


def break_down(profiles: Sequence[Profile], names: Sequence[str]) -> Breakdown:
    """`names` has one run per profile."""
    assert len(profiles) == len(names), "one name per profile"
    steps = [profile.num_steps for profile in profiles]
    absent = say_lacking_modules(profiles, names)
    levels = _find_levels(profiles) if not absent else {}
    frames = [_rows(profile, has_modules=not absent) for profile in profiles]
    rows, notes = _fit(_join(frames, steps), steps, MOST_ROWS, levels)
    on_cpu = all(profile.on_cpu for profile in profiles)
    left_out = {"module": bool(absent), "op": on_cpu}  # on a CPU, operators are the kernels
    keys = [key for key in _KEYS if not left_out.get(key)]
    dimensions = {key: _dimension(rows, key) for key in keys}
    places = [_number(rows[key], order) for key, (order, _) in dimensions.items()]
    lines = rows["line"].drop_nulls().unique(maintain_order=True).to_list()
    runs = range(len(profiles))
    return Breakdown(
        title=TITLE,
        runs=tuple(names),
        dimensions=tuple(dimension for _, dimension in dimensions.values()),
        places=tuple(zip(*places, strict=True)),
        times_ns=tuple(tuple((rows[f"time_{run}"] / steps[run]).to_list()) for run in runs),
        counts=tuple(tuple((rows[f"count_{run}"] / steps[run]).to_list()) for run in runs),
        shortest_ns=tuple(tuple(rows[f"shortest_{run}"].cast(pl.Float64).to_list()) for run in runs),
        longest_ns=tuple(tuple(rows[f"longest_{run}"].cast(pl.Float64).to_list()) for run in runs),
        walls_ns=tuple(profile.clock.step_ns for profile in profiles),
        idles_ns=tuple(profile.clock.idle_ns for profile in profiles),
        what="operators" if on_cpu else "kernels",
        unit="step" if any(profile.clock.has_steps for profile in profiles) else "trace",
        num_devices=max(len(profile.devices) for profile in profiles),
        tree=plant_tree(dimensions["module"][0], levels) if "module" in dimensions else None,
        lines=tuple(map(cut_name, lines)),
        sources=tuple(_number(rows["line"], lines)) if lines else (),
        notes=(*_say_scopes(profiles, names), *([f"modules: {absent}"] if absent else []), *notes),
    )


def _number(column: pl.Series, order: Sequence[str]) -> list[int]:
    """The place of each value in `order`, -1 for null."""
    numbers = column.replace_strict(order, list(range(len(order))), default=-1, return_dtype=pl.Int64)
    return numbers.to_list()


def say_lacking_modules(profiles: Sequence[Profile], names: Sequence[str]) -> str:
    """Why runs cannot be compared by module: some have modules and others do not. Empty if they can."""
    lacking = [pair for pair in zip(profiles, names, strict=True) if not _has_modules(pair[0])]
    if not lacking or len(lacking) == len(profiles):
        return ""
    profile, name = lacking[0]
    case = profile.recording.manifest.case
    is_hidden = case is not None and case.workload.hides_modules
    return f"not recorded in {name}{': compiled code has no modules' if is_hidden else ''}"


def _has_modules(profile: Profile) -> bool:
    """Whether a kernel belongs to a part of the model, not only to all of it, or to the `(optimizer)`."""
    return bool((~profile.kernels["module"].str.starts_with("(")).any())


def _rows(profile: Profile, *, has_modules: bool) -> pl.DataFrame:
    time, is_on_host = pl.col("time_ns"), pl.col("kind") == "cpu"
    lines = launch_sources(profile, profile.kernels) if has_sources(profile.recording) else pl.lit(None, pl.String)
    kernels = profile.kernels.select(
        "class",
        pl.col("phase").fill_null(UNKNOWN),
        pl.col("module").fill_null(UNKNOWN) if has_modules else pl.lit(UNKNOWN).alias("module"),
        pl.when(is_on_host).then(None).otherwise("op").fill_null(UNKNOWN).alias("op"),
        "time_ns",
        "short",
        kernel="name",
        on_host=is_on_host,
        line=lines,
    )
    return kernels.group_by(*_KEYS, "line").agg(
        pl.col("short", "on_host").first(),
        time=time.sum(),
        count=pl.len().cast(pl.Int64),
        shortest=time.min(),
        longest=time.max(),
    )


def _join(frames: Sequence[pl.DataFrame], steps: Sequence[float]) -> pl.DataFrame:
    """The rows of all runs, the largest first, with columns per run: time and count are 0, shortest and longest null,
    if a run has no such row."""
    spread = []
    for mine, frame in enumerate(frames):
        columns = [
            (pl.col(name) if run == mine else pl.lit(nothing, pl.Int64)).alias(f"{name}_{run}")
            for run in range(len(frames))
            for name, nothing in (("time", 0), ("count", 0), ("shortest", None), ("longest", None))
        ]
        spread.append(frame.select(*_KEYS, "short", "on_host", "line", *columns))
    return _regroup(pl.concat(spread), steps)


def _total(steps: Sequence[float]) -> pl.Expr:
    """A row's time per step, summed over runs."""
    return pl.sum_horizontal(pl.col(f"time_{run}") / num_steps for run, num_steps in enumerate(steps))


def _sort(rows: pl.DataFrame, steps: Sequence[float]) -> pl.DataFrame:
    return rows.sort(_total(steps), *_KEYS, descending=[True, *([False] * len(_KEYS))])


def _fit(rows: pl.DataFrame, steps: Sequence[float], most: int, levels: Levels) -> tuple[pl.DataFrame, list[str]]:
    """The largest rows unchanged, and the rest merged into a third of the space."""
    if rows.height <= most:
        return rows, []
    head, tail = rows.head(most - most // 3), rows.tail(rows.height - (most - most // 3))
    roles = {module: join_roles(own) for module, own in levels.items()}
    module = pl.col("module").replace_strict(roles, default=pl.col("module"), return_dtype=pl.String)
    merged, given_up = _regroup(tail.with_columns(module), steps), []
    for key in _GIVEN_UP:
        if merged.height <= most // 3:
            break
        merged = _regroup(merged.with_columns(pl.lit(REST).alias(key)), steps)
        given_up.append(_LABELS.get(key, key))
    total = _total(steps).sum()
    share = tail.select(total).item() / max(1.0, rows.select(total).item())
    lost = f", and have `{REST}` as their {say_list(given_up)}" if given_up else ""
    note = (
        f"the smallest {tail.height:,} of {rows.height:,} combinations ({share:.2%} of the time) are merged over alike "
        f"layers{lost}"
    )
    return _regroup(pl.concat([head, merged]), steps), [note]


def _regroup(rows: pl.DataFrame, steps: Sequence[float]) -> pl.DataFrame:
    """Merge rows that agree in all dimensions, the largest first. They have the line with most of their time."""
    columns = []
    for run in range(len(steps)):
        columns += [pl.col(f"time_{run}", f"count_{run}").sum()]
        columns += [pl.col(f"shortest_{run}").min(), pl.col(f"longest_{run}").max()]
    short = pl.when(pl.col("kernel").first() == REST).then(pl.lit(REST)).otherwise(pl.col("short").first())
    line = pl.col("line").drop_nulls().first()
    grouped = _sort(rows, steps).group_by(_KEYS, maintain_order=True)
    return _sort(grouped.agg(short.alias("short"), pl.col("on_host").first(), line, *columns), steps)


def _dimension(rows: pl.DataFrame, key: str) -> tuple[list[str], Dimension]:
    """The values in the order of a step for phases, otherwise in that of first appearance, which is about the largest
    first; and the dimension that shows them."""
    order = rows[key].unique(maintain_order=True).to_list()
    order = order_phases(order) if key == "phase" else order
    if key != "kernel":
        values = tuple(cut_name(value) for value in order)
        return order, Dimension(key=key, label=_LABELS.get(key, key), values=values)
    known = {row[0]: row for row in rows.select("kernel", "short", "on_host").unique("kernel").iter_rows()}
    values = tuple(cut_name(known[name][1]) for name in order)
    described = [name for name in order if name != REST][:MOST_DESCRIBED]
    texts = {name: describe_kernel(name, on_host=known[name][2]) for name in described}
    details = tuple(texts.get(name, "") for name in order)
    return order, Dimension(key=key, label=key, values=values, details=details)


def _say_scopes(profiles: Sequence[Profile], names: Sequence[str]) -> list[str]:
    notes = []
    for profile, name in zip(profiles, names, strict=True):
        prefix, clock = f"{name}: " if name else "", profile.clock
        if not profile.is_serialized:
            what = "outside operators" if profile.on_cpu else "idle"
            took = f"{say_time(clock.step_ns)} {clock.say_per_step}"
            notes.append(f"{prefix}{took}, {say_time(clock.idle_ns)} of it {what}")
        notes.append(prefix + scope(profile))
        if len(profile.devices) > 1:
            notes.append(f"{prefix}{len(profile.devices)} devices: times are sums, wall and idle time are means")
    return list(dict.fromkeys(notes))


def _find_levels(profiles: Sequence[Profile]) -> Levels:
    """The levels of every module, in the order in which the modules first run."""
    kinds: dict[str, str] = {}
    for profile in profiles:
        kinds = list_kinds(profile.kernels.sort("start_ns")) | kinds
    return fold_modules(kinds)


# --- One dimension at a time ------------------------------------------------------------------------------------------


_MS, _US = 1e6, 1e3
# Its rows also have a class and the time of a single call.
_SINGLE = "kernel"
# Its values are in the order of a step; the others are sorted by time.
ORDERED = ("phase",)

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The values of a dimension in display order, and their totals, one row per run."""

    dimension: Dimension
    order: tuple[int, ...]
    times_ns: Numbers
    counts: Numbers
    shortest_ns: Numbers
    longest_ns: Numbers


def fold_layers(breakdown: Breakdown) -> Breakdown:
    """The breakdown with the nodes of its tree instead of single modules. Several rows may agree in all dimensions."""
    tree = breakdown.tree
    if tree is None:
        return breakdown
    at = [one.key for one in breakdown.dimensions].index("module")
    module = msgspec.structs.replace(breakdown.dimensions[at], values=name_nodes(tree))
    return msgspec.structs.replace(
        breakdown,
        dimensions=(*breakdown.dimensions[:at], module, *breakdown.dimensions[at + 1 :]),
        places=tuple((*row[:at], tree.nodes[row[at]], *row[at + 1 :]) for row in breakdown.places),
        tree=None,
    )


def tabulate_dimensions(breakdown: Breakdown) -> Iterable[tuple[str, Table]]:
    """One table per dimension; the one of kernels has their class and the time of a single call."""
    for place, dimension in enumerate(breakdown.dimensions):
        totals = add_up(breakdown, place)
        columns = [Column(key=dimension.key, label=dimension.label.lower())]
        cells: list[Sequence[Cell]] = [[dimension.values[at] or "unknown" for at in totals.order]]
        if dimension.key == _SINGLE:
            _add_class(breakdown, place, totals, columns, cells)
        for run, name in enumerate(breakdown.runs):
            _add_run(totals, run, name, columns, cells)
        if len(breakdown.runs) == 2:
            _add_change(totals, columns, cells)
        if dimension.details:
            columns.append(Column(key="detail", label="detail", detail=True))
            cells.append([dimension.details[at] for at in totals.order])
        title = f"{breakdown.title}, by {dimension.label.lower()}"
        rows = tuple(zip(*cells, strict=True))
        yield dimension.key, Table(title=title, columns=tuple(columns), rows=rows, notes=breakdown.notes)


def add_up(breakdown: Breakdown, place: int) -> Totals:
    dimension = breakdown.dimensions[place]
    size = len(dimension.values)
    members = np.array([row[place] for row in breakdown.places], dtype=np.int64)
    times = np.array([np.bincount(members, _numbers(own), size) for own in breakdown.times_ns])
    counts = np.array([np.bincount(members, _numbers(own), size) for own in breakdown.counts])
    shortest = np.full(times.shape, np.inf)
    longest = np.full(times.shape, -np.inf)
    for run in range(len(breakdown.runs)):
        np.minimum.at(shortest[run], members, _numbers(breakdown.shortest_ns[run], np.inf))
        np.maximum.at(longest[run], members, _numbers(breakdown.longest_ns[run], -np.inf))
    order: Iterable[int] = range(size)
    if dimension.key not in ORDERED:
        weights = times.max(axis=0) if len(times) else np.zeros(size)
        order = sorted(order, key=lambda at: -weights[at])
    return Totals(
        dimension=dimension,
        order=tuple(order),
        times_ns=times,
        counts=counts,
        shortest_ns=shortest,
        longest_ns=longest,
    )


def _numbers(values: Sequence[float | None], instead: float = 0.0) -> Numbers:
    return np.array([instead if value is None else value for value in values], dtype=np.float64)


def _add_class(
    breakdown: Breakdown, place: int, totals: Totals, columns: list[Column], cells: list[Sequence[Cell]]
) -> None:
    """Add the class of each kernel, from its first row: a name has only one class."""
    keys = [dimension.key for dimension in breakdown.dimensions]
    if "class" not in keys:
        return
    at = keys.index("class")
    classes = {row[place]: breakdown.dimensions[at].values[row[at]] for row in reversed(breakdown.places)}
    columns.append(Column(key="class", label="class"))
    cells.append([classes.get(value, "") for value in totals.order])


def _add_run(totals: Totals, run: int, name: str, columns: list[Column], cells: list[Sequence[Cell]]) -> None:
    suffix, label = (f"_{'abcdefgh'[run]}", f"{name} ") if name else ("", "")
    times, counts = totals.times_ns[run], totals.counts[run]
    whole = max(float(times.sum()), 1e-12)
    order = totals.order
    columns += [
        Column(key=f"ms{suffix}", label=f"{label}ms", kind="ms"),
        Column(key=f"share{suffix}", label=f"{label}share", kind="share"),
        Column(key=f"count{suffix}", label=f"{label}count", kind="number", detail=bool(name)),
    ]
    cells += [
        [float(times[at]) / _MS for at in order],
        [float(times[at]) / whole for at in order],
        [float(counts[at]) for at in order],
    ]
    if totals.dimension.key == _SINGLE:
        columns += [
            Column(key=f"mean_us{suffix}", label=f"{label}mean µs", kind="us", detail=bool(name)),
            Column(key=f"min_us{suffix}", label=f"{label}min µs", kind="us", detail=True),
            Column(key=f"max_us{suffix}", label=f"{label}max µs", kind="us", detail=True),
        ]
        cells += [
            [float(times[at]) / float(counts[at]) / _US if counts[at] else None for at in order],
            [_finite(totals.shortest_ns[run][at]) for at in order],
            [_finite(totals.longest_ns[run][at]) for at in order],
        ]


def _finite(value_ns: float) -> float | None:
    return float(value_ns) / _US if np.isfinite(value_ns) else None


def _add_change(totals: Totals, columns: list[Column], cells: list[Sequence[Cell]]) -> None:
    before, after = totals.times_ns
    columns.append(Column(key="change_ms", label="change ms", kind="ms"))
    cells.append([float(after[at] - before[at]) / _MS for at in totals.order])
