"""The kernels' time of a step, taken apart by class, phase, layer, module and kernel at once.

Rows add up to `Profile.gpu_time_ns` a step. Where two runs are joined, a row is what agrees in all five; what only one
of them has is nothing in the other. Beyond what a page can hold, the smallest rows lose their layer first, then their
module, and only then more, so that the times of classes, phases and kernels stay whole. Losing kernels first was tried:
the table of kernels of a deep model then was mostly a rest.
"""

from collections.abc import Sequence

import polars as pl

from stepscope.explain.story.kernel_details import MOST_DESCRIBED, name_layers
from stepscope.explain.trace.breakdown import scope
from stepscope.explain.trace.compare import REST, align_module
from stepscope.explain.trace.names import cut_name, describe_kernel
from stepscope.explain.trace.profile import UNKNOWN, Profile
from stepscope.findings import Breakdown, Dimension

TITLE = "Where the time goes"
MOST_ROWS = 15_000
# What the smallest rows lose, one after the other until they are few enough. With its layer a module loses its number.
_GIVEN_UP = ("layer", "module", "kernel", "phase")
_KEYS = ["class", "phase", "layer", "module", "kernel"]


def break_down(profiles: Sequence[Profile], names: Sequence[str], steps_ns: Sequence[float] | None = None) -> Breakdown:
    """`names` are the runs', one a profile; `steps_ns` their steps' wall time, the profiles' own unless told."""
    assert len(profiles) == len(names), "a name a profile"
    walls = [profile.step_ns for profile in profiles] if steps_ns is None else steps_ns
    assert len(walls) == len(profiles), "a step a profile"
    steps = [profile.steps_in_window for profile in profiles]
    rows, notes = _fit(_join([_rows(profile) for profile in profiles], steps), steps, MOST_ROWS)
    on_cpu = all(profile.on_cpu for profile in profiles)
    dimensions = [_dimension(rows, key) for key in _KEYS]
    places = [
        rows[key].replace_strict(order, list(range(len(order))), return_dtype=pl.Int64).to_list()
        for key, (order, _) in zip(_KEYS, dimensions, strict=True)
    ]
    runs = range(len(profiles))
    return Breakdown(
        title=TITLE,
        runs=tuple(names),
        dimensions=tuple(dimension for _, dimension in dimensions),
        places=tuple(zip(*places, strict=True)),
        times_ns=tuple(tuple((rows[f"time_{run}"] / steps[run]).to_list()) for run in runs),
        counts=tuple(tuple((rows[f"count_{run}"] / steps[run]).to_list()) for run in runs),
        shortest_ns=tuple(tuple(rows[f"shortest_{run}"].cast(pl.Float64).to_list()) for run in runs),
        longest_ns=tuple(tuple(rows[f"longest_{run}"].cast(pl.Float64).to_list()) for run in runs),
        walls_ns=tuple(float(wall) for wall in walls),
        idles_ns=tuple(max(0.0, wall - profile.busy_step_ns) for wall, profile in zip(walls, profiles, strict=True)),
        what="operators" if on_cpu else "kernels",
        notes=(*_say_scopes(profiles, names), *notes),
    )


def _rows(profile: Profile) -> pl.DataFrame:
    time = pl.col("time_ns")
    kernels = profile.kernels.select(
        "class",
        pl.col("phase").fill_null(UNKNOWN),
        name_layers(profile.kernels).alias("layer"),
        pl.col("module").fill_null(UNKNOWN),
        "time_ns",
        "short",
        kernel="name",
        on_host=pl.col("kind") == "cpu",
    )
    return kernels.group_by(_KEYS).agg(
        pl.col("short", "on_host").first(),
        time=time.sum(),
        count=pl.len().cast(pl.Int64),
        shortest=time.min(),
        longest=time.max(),
    )


def _join(frames: Sequence[pl.DataFrame], steps: Sequence[float]) -> pl.DataFrame:
    """The keys of all runs with columns a run: time and count 0, shortest and longest null where it has no such row.
    The largest first."""
    spread = []
    for mine, frame in enumerate(frames):
        columns = [
            (pl.col(name) if run == mine else pl.lit(nothing, pl.Int64)).alias(f"{name}_{run}")
            for run in range(len(frames))
            for name, nothing in (("time", 0), ("count", 0), ("shortest", None), ("longest", None))
        ]
        spread.append(frame.select(*_KEYS, "short", "on_host", *columns))
    joined = spread[0] if len(spread) == 1 else _regroup(pl.concat(spread), len(frames))
    return _sort(joined, steps)


def _total(steps: Sequence[float]) -> pl.Expr:
    """A row's time a step, of all runs together."""
    return pl.sum_horizontal(pl.col(f"time_{run}") / num_steps for run, num_steps in enumerate(steps))


def _sort(rows: pl.DataFrame, steps: Sequence[float]) -> pl.DataFrame:
    return rows.sort(_total(steps), *_KEYS, descending=[True, *([False] * len(_KEYS))])


def _fit(rows: pl.DataFrame, steps: Sequence[float], most: int) -> tuple[pl.DataFrame, list[str]]:
    """The largest rows as they are, and the rest without what there is too much of, a third of the room for them."""
    if rows.height <= most:
        return rows, []
    head, tail = rows.head(most - most // 3), rows.tail(rows.height - (most - most // 3))
    merged = tail
    for place, key in enumerate(_GIVEN_UP):
        given_up = _GIVEN_UP[: place + 1]
        merged = _regroup(_give_up(merged, key), len(steps))
        if merged.height <= most // 3:
            break
    total = _total(steps).sum()
    share = tail.select(total).item() / max(1.0, rows.select(total).item())
    said = " and ".join(given_up) if len(given_up) < 3 else f"{', '.join(given_up[:-1])} and {given_up[-1]}"
    note = (
        f"of {rows.height:,} combinations the smallest {tail.height:,}, {share:.2%} of the time, have {said} `{REST}`"
    )
    return _sort(_regroup(pl.concat([head, merged]), len(steps)), steps), [note]


def _give_up(rows: pl.DataFrame, key: str) -> pl.DataFrame:
    lost = rows.with_columns(pl.lit(REST).alias(key))
    if key != "layer":
        return lost
    paths = {path: align_module(path) for path in rows["module"].unique()}
    return lost.with_columns(pl.col("module").replace_strict(paths, return_dtype=pl.String))


def _regroup(rows: pl.DataFrame, runs: int) -> pl.DataFrame:
    columns = []
    for run in range(runs):
        columns += [pl.col(f"time_{run}", f"count_{run}").sum()]
        columns += [pl.col(f"shortest_{run}").min(), pl.col(f"longest_{run}").max()]
    short = pl.when(pl.col("kernel").first() == REST).then(pl.lit(REST)).otherwise(pl.col("short").first())
    return rows.group_by(_KEYS).agg(short.alias("short"), pl.col("on_host").first(), *columns)


def _dimension(rows: pl.DataFrame, key: str) -> tuple[list[str], Dimension]:
    """The values as the rows have them, in the order of their places, and as they are shown. By first appearance, so
    about the largest first."""
    order = rows[key].unique(maintain_order=True).to_list()
    if key != "kernel":
        return order, Dimension(key=key, label=key, values=tuple(cut_name(value) for value in order))
    known = {row[0]: row for row in rows.select("kernel", "short", "on_host").unique("kernel").iter_rows()}
    values = tuple(cut_name(known[name][1]) for name in order)
    described = [name for name in order if name != REST][:MOST_DESCRIBED]
    texts = {name: describe_kernel(name, on_host=known[name][2]) for name in described}
    details = tuple(texts.get(name, "") for name in order)
    return order, Dimension(key=key, label=key, values=values, details=details)


def _say_scopes(profiles: Sequence[Profile], names: Sequence[str]) -> list[str]:
    notes = []
    for profile, name in zip(profiles, names, strict=True):
        prefix = f"{name}: " if name else ""
        notes.append(prefix + scope(profile))
        if len(profile.devices) > 1:
            notes.append(f"{prefix}{len(profile.devices)} devices: times are their sum, wall and idle time their mean")
    return list(dict.fromkeys(notes))
