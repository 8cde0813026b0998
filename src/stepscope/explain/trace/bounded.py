"""Explain a PyTorch profiler trace that is larger than memory.

The file is read once, and its tables go to disk (`recording.windows`). `attribution` works on one window at a time (in
memory there is a single one), kernels are summed here by what they belong to, and `accounting` sweeps each device's
time in windows too.

The numbers equal those of the normal mode to the nanosecond. Memory grows with the number of distinct names, modules,
threads and steps, not with the number of events. Findings and questions need single kernels and are not available.
A truncated file is read to its end, with a note, and not only up to its last kernel.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.trace import profile_tables
from stepscope.explain.trace.accounting import DeviceAccount, DeviceSweep
from stepscope.explain.trace.attribution import Attribution
from stepscope.explain.trace.attribution.names import classify
from stepscope.explain.trace.profile import Profile, no_kernels, no_time
from stepscope.explain.trace.ranges_table import short_ranges
from stepscope.files import cache_folder
from stepscope.findings import Page, Table
from stepscope.recording.readers.kineto import HostKernels, TraceReader, ends_early, join_flows
from stepscope.recording.store import Recording
from stepscope.recording.windows import (
    WINDOW_ROWS,
    Disk,
    EventTable,
    choose_borders,
    in_windows,
    make_table,
    spilling,
)

NOTE = "read in bounded memory: the breakdown is complete; findings, questions and single kernels are not available"
CUT_NOTE = "the kernels of the last operators are missing, so idle time is too high"
# The tables that are available in this mode.
PARTS = ("classes", "phases", "kernels", "modules", "layers", "ops", "ranges", "streams")
_ON_A_PAGE = 6
_GROUPED = ("name", "kind", "launched", "op", "module", "phase", "user_range", "forward_range")
_MOST_GROUPS = 100_000


@dataclass(frozen=True, kw_only=True)
class BoundedProfile(Profile):
    """A profile whose `kernels` have one row per name and owner. Its recording has only the manifest, so values that a
    profile derives from single kernels are fields here."""

    bounds: tuple[int, int]
    accounts: tuple[DeviceAccount, ...]
    marked_steps: pl.DataFrame

    @cached_property
    def window(self) -> tuple[int, int]:
        return self.bounds

    @cached_property
    def devices(self) -> tuple[DeviceAccount, ...]:
        return self.accounts

    @cached_property
    def steps(self) -> pl.DataFrame:
        return self.marked_steps


def make_bounded_profile(path: Path, parent: Path | None = None) -> BoundedProfile:
    """Return the profile of a trace. Uses a temporary directory in `parent`, or in the cache, and removes it. Raises
    StepscopeError if the file cannot be read or the disk is full."""
    with spilling(parent or cache_folder()) as disk:
        return _explain(path, disk)


def _explain(path: Path, disk: Disk) -> BoundedProfile:
    attribution = Attribution(disk)
    columns = ("start_ns", "end_ns", "name", "kind", "process", "device", "stream")
    swept = make_table(disk, "swept", pl.col("start_ns"), columns)
    recording = _take_in(path, disk, attribution, swept)
    if not attribution.kernels.num_rows:
        raise no_kernels(recording, attribution.ops.num_rows)
    kernels = _group(attribution.kernel_windows())
    steps = attribution.steps.select("step", "start_ns", "end_ns")
    accounts, bounds = _sweep(swept, steps)
    if not any(account.whole.busy_ns for account in accounts):
        raise no_time(recording)
    manifest = recording.manifest
    notes = (CUT_NOTE, NOTE) if ends_early(manifest.notes) else (NOTE,)
    return BoundedProfile(
        recording=recording.with_manifest(notes=(*manifest.notes, *notes)),
        kernels=attribution.finish(kernels, modules_recorded=manifest.modules_recorded),
        bounds=bounds,
        accounts=accounts,
        marked_steps=steps,
    )


def _take_in(path: Path, disk: Disk, attribution: Attribution, swept: EventTable) -> Recording:
    """Read the file once and return a recording with only its manifest."""
    reader = TraceReader(path, is_bounded=True)
    flow = ("id", "kind", "process", "thread", "ns")
    starts, ends = (make_table(disk, f"flow {end}", pl.col("id"), flow) for end in ("starts", "ends"))
    for block, flows in reader:
        known = flows.filter(pl.col("id").is_not_null())
        starts.add(known.filter(pl.col("kind") == "flow s"))
        ends.add(known.filter(pl.col("kind") == "flow f"))
        attribution.add(block)
        swept.add(block.kernels)
    manifest = reader.finish()
    for begun, ended in in_windows(starts, ends):
        attribution.links.add(join_flows(begun, ended))
    starts.delete()
    ends.delete()
    if reader.is_on_host:
        for kernels in _host_kernels(attribution.ops):
            attribution.kernels.add(kernels)
            swept.add(kernels)
    else:
        attribution.kernels.change = swept.change = reader.place_kernels
    return Recording(manifest=manifest)


def _host_kernels(ops: EventTable) -> Iterator[pl.DataFrame]:
    found, borders = HostKernels(), choose_borders((ops,), WINDOW_ROWS)
    for window in ops.windows(borders):
        found.learn(window)
    for window in ops.windows(borders):
        yield found.take(window)


def _group(windows: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Return kernels summed by name and owner."""
    parts: list[pl.DataFrame] = []
    time = pl.col("end_ns") - pl.col("start_ns")
    for kernels in windows:
        one = kernels.select(*_GROUPED, time_ns=time, min_ns=time, max_ns=time, count=pl.lit(1, pl.Int64))
        parts.append(_add_up(one))
        if len(parts) > 1 and sum(part.height for part in parts) > _MOST_GROUPS:
            parts = [_add_up(pl.concat(parts))]
    return _add_up(pl.concat(parts))


def _add_up(kernels: pl.DataFrame) -> pl.DataFrame:
    sums = pl.col("time_ns", "count").sum()
    return kernels.group_by(_GROUPED).agg(sums, pl.col("min_ns").min(), pl.col("max_ns").max())


def _sweep(swept: EventTable, steps: pl.DataFrame) -> tuple[tuple[DeviceAccount, ...], tuple[int, int]]:
    """Return the account of each device, and the window from the first event to the last."""
    sweep = DeviceSweep()
    borders = choose_borders((swept,), WINDOW_ROWS)
    first, last = [steps["start_ns"].min()], [steps["end_ns"].max()]
    for border, kernels in zip((*borders, None), swept.windows(borders), strict=True):
        sweep.add(classify(kernels), border)
        first.append(kernels["start_ns"].min())
        last.append(kernels["end_ns"].max())
    start = min(one for one in first if isinstance(one, int))
    end = max(one for one in last if isinstance(one, int))
    return sweep.accounts(end - start), (start, end)


def make_part(profile: BoundedProfile, name: str, *, top: int | None = None) -> Table:
    """Return one of `PARTS`. Raises StepscopeError for a table that needs single kernels."""
    if name not in PARTS:
        raise StepscopeError(
            f"`{name}` is not available for a trace read in bounded memory",
            detail=f"expected one of {', '.join(PARTS)}",
            hint=f"stepscope explain FILE --table {name}",
        )
    return profile_tables.make_part(profile, name, top=top)


def make_page(profile: BoundedProfile) -> Page:
    tables = [make_part(profile, name, top=_ON_A_PAGE) for name in ("classes", "phases", "kernels")]
    tables += short_ranges(profile)
    return Page(headline=profile_tables.headline(profile), tables=tuple(tables), findings=None)
