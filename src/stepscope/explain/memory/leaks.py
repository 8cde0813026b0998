"""Memory that stays behind after every step: what one step takes and neither it nor a later one gives back.

A step may keep something once, as an optimizer does in the first. It is a leak when step after step does, so the first
steps do not count, and a stack is named only if at least half of the others left something behind there.
"""

from itertools import pairwise

import numpy as np
import polars as pl

from stepscope.explain.memory.profile import MemoryProfile
from stepscope.findings import Column, Table

_SETTLED = 2  # steps until everything that is made once is made
_FEWEST = 3
_COLUMNS = (
    Column(key="bytes_a_step", label="a step", kind="bytes"),
    Column(key="bytes", label="in all", kind="bytes"),
    Column(key="steps", label="steps", kind="count"),
    Column(key="where", label="where"),
    Column(key="stack", label="stack", detail=True),
)


def leaks_table(profile: MemoryProfile) -> Table:
    """No rows where nothing leaks, or where there are too few steps to tell."""
    title = "Left behind by every step"
    kept = _kept(profile)
    if kept is None:
        fewest = _SETTLED + _FEWEST + 1
        return Table(title=title, columns=_COLUMNS, rows=(), notes=(f"fewer than {fewest} steps tell nothing",))
    if not kept.height:
        return Table(title=title, columns=_COLUMNS, rows=())
    steps = int(kept["num_steps"][0])
    by_stack = (
        kept.group_by("stack", "module", "op")
        .agg(pl.col("bytes").sum(), hit=pl.col("leak_step").n_unique())
        .filter(pl.col("hit") * 2 >= steps)
        .sort("bytes", descending=True)
    )
    rows = []
    for row in by_stack.iter_rows(named=True):
        stack = profile.stack_text(row["stack"])
        where = row["module"] or row["op"] or stack.partition("\n")[0] or "unknown"
        rows.append((row["bytes"] // row["hit"], row["bytes"], row["hit"], where, stack.replace("\n", " < ") or None))
    note = f"of {steps} steps, the first {_SETTLED} and the last left out"
    return Table(title=title, columns=_COLUMNS, rows=tuple(rows), notes=(note,))


def _kept(profile: MemoryProfile) -> pl.DataFrame | None:
    """What is still there at the end and was taken after the first steps and before the last, with its step."""
    bounds = _step_bounds(profile)
    first, last = _SETTLED, len(bounds) - 1
    if last - first < _FEWEST:
        return None
    starts = np.array([start for start, _ in bounds], dtype=np.int64)
    staying = profile.allocations.filter(pl.col("end_event").is_null() & pl.col("start_event").is_not_null())
    step = np.searchsorted(starts, staying["start_event"].to_numpy(), side="right") - 1
    staying = staying.with_columns(leak_step=pl.Series(step, dtype=pl.Int64), num_steps=pl.lit(last - first))
    return staying.filter(pl.col("leak_step").is_between(first, last - 1))


def _step_bounds(profile: MemoryProfile) -> list[tuple[int, int]]:
    """Marked steps, or, by the stacks of a foreign snapshot, from one beginning of a forward pass to the next."""
    if profile.steps:
        return [span for step in profile.steps if (span := profile.span(step)) is not None]
    staged = profile.allocations.filter(pl.col("phase").is_not_null() & pl.col("start_event").is_not_null())
    staged = staged.sort("start_event").select("start_event", "phase")
    begins = staged.filter((pl.col("phase") == "forward") & (pl.col("phase").shift(1).fill_null("") != "forward"))
    # A forward pass inside of backward, as checkpointing has it, begins no step: a step ends with an optimizer if the
    # file has any.
    if (staged["phase"] == "optimizer").any():
        begins = staged.filter(
            (pl.col("phase") == "forward") & (pl.col("phase").shift(1).fill_null("optimizer") == "optimizer")
        )
    return list(pairwise([*begins["start_event"].to_list(), profile.num_events]))
