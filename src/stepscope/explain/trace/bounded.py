"""Explain a PyTorch profiler trace that is larger than memory.

The file is read once, and its tables go to disk (`recording.windows`). `attribution` works on one window at a time (in
memory there is a single one), kernels are summed here by what they belong to, and `accounting` sweeps each device's
time in windows too.

The numbers equal those of the normal mode to the nanosecond. Memory grows with the number of distinct names, modules,
threads and steps, not with the number of events. Findings and questions need single kernels and are not available.
A truncated file is read to its end, with a note, and not only up to its last kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.trace import profile_tables
from stepscope.explain.trace.accounting import DeviceAccount, DeviceSweep
from stepscope.explain.trace.attribution import Attribution
from stepscope.explain.trace.attribution.names import classify
from stepscope.explain.trace.extent import StepExtent, StepRuns, find_extent, without_steps
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
PARTS = ("classes", "phases", "kernels", "modules", "tree", "layers", "ops", "ranges", "streams")
_ON_A_PAGE = 6
_GROUPED = ("name", "kind", "launched", "matched", "op", "module", "phase", "user_range", "forward_range")
_ON_DEVICE = ("start_ns", "end_ns", "process", "device", "stream", "step", "launch_ns")
_MOST_GROUPS = 100_000


@dataclass(frozen=True, kw_only=True)
class BoundedProfile(Profile):
    """A profile whose `kernels` have one row per name and owner. Its recording has only the manifest, so what a profile
    derives from single kernels is a field here."""

    accounts: tuple[DeviceAccount, ...]

    @cached_property
    def devices(self) -> tuple[DeviceAccount, ...]:
        return self.accounts


def make_bounded_profile(path: Path, parent: Path | None = None) -> BoundedProfile:
    """Return the profile of a trace. Uses a temporary directory in `parent`, or in the cache, and removes it. Raises
    StepscopeError if the file cannot be read or the disk is full."""
    with spilling(parent or cache_folder()) as disk:
        return _explain(path, disk)


def _explain(path: Path, disk: Disk) -> BoundedProfile:
    attribution = Attribution(disk)
    recording = _take_in(path, disk, attribution)
    if not attribution.kernels.num_rows:
        raise no_kernels(recording, attribution.ops.num_rows)
    attributed, runs = _attribute(attribution, disk)
    extent = find_extent(attribution.steps, runs)
    kernels, accounts, total_ns = _add_up_steps(attributed, extent)
    if not kernels.height:
        extent = without_steps(runs)
        kernels, accounts, total_ns = _add_up_steps(attributed, extent)
    if not total_ns:
        raise no_time(recording)
    manifest = recording.manifest
    extent = extent.without(total_ns - int(kernels["time_ns"].sum()), total_ns)
    notes = (CUT_NOTE, NOTE) if ends_early(manifest.notes) else (NOTE,)
    return BoundedProfile(
        recording=recording,
        kernels=attribution.finish(kernels, modules_recorded=manifest.modules_recorded),
        extent=replace(extent, notes=(*extent.notes, *notes)),
        accounts=accounts,
    )


def _take_in(path: Path, disk: Disk, attribution: Attribution) -> Recording:
    """Read the file once and return a recording with only its manifest."""
    reader = TraceReader(path, is_bounded=True)
    flow = ("id", "kind", "process", "thread", "ns")
    starts, ends = (make_table(disk, f"flow {end}", pl.col("id"), flow) for end in ("starts", "ends"))
    for block, flows in reader:
        known = flows.filter(pl.col("id").is_not_null())
        starts.add(known.filter(pl.col("kind") == "flow s"))
        ends.add(known.filter(pl.col("kind") == "flow f"))
        attribution.add(block)
    manifest = reader.finish()
    for begun, ended in in_windows(starts, ends):
        attribution.links.add(join_flows(begun, ended))
    starts.delete()
    ends.delete()
    if reader.is_on_host:
        for kernels in _host_kernels(attribution.ops):
            attribution.kernels.add(kernels)
    else:
        attribution.kernels.change = reader.place_kernels
    return Recording(manifest=manifest)


def _host_kernels(ops: EventTable) -> Iterator[pl.DataFrame]:
    found, borders = HostKernels(), choose_borders((ops,), WINDOW_ROWS)
    for window in ops.windows(borders):
        found.learn(window)
    for window in ops.windows(borders):
        yield found.take(window)


def _attribute(attribution: Attribution, disk: Disk) -> tuple[EventTable, pl.DataFrame]:
    """Return all kernels with what they belong to, and when those of each step ran."""
    attributed = make_table(disk, "attributed", pl.col("start_ns"), (*_GROUPED, *_ON_DEVICE))
    runs = StepRuns(attribution.steps)
    for window in attribution.kernel_windows():
        kernels = window.with_columns(launch_ns="ns")
        attributed.add(kernels)
        runs.add(kernels)
    return attributed, runs.total()


def _add_up_steps(attributed: EventTable, extent: StepExtent) -> tuple[pl.DataFrame, tuple[DeviceAccount, ...], int]:
    """Return the kernels of the steps summed by name and owner, the account of each device, and the time of all
    recorded kernels."""
    sweep, total_ns = DeviceSweep(), 0
    parts: list[pl.DataFrame] = []
    time = pl.col("end_ns") - pl.col("start_ns")
    borders = choose_borders((attributed,), WINDOW_ROWS)
    for border, kernels in zip((*borders, None), attributed.windows(borders), strict=True):
        kept = extent.keep(kernels)
        total_ns += int(kernels.select(time.sum()).item())
        sweep.add(classify(kept), border)
        one = kept.select(*_GROUPED, time_ns=time, min_ns=time, max_ns=time, count=pl.lit(1, pl.Int64))
        parts.append(_add_up(one))
        if len(parts) > 1 and sum(part.height for part in parts) > _MOST_GROUPS:
            parts = [_add_up(pl.concat(parts))]
    start, end = extent.window
    return _add_up(pl.concat(parts)), sweep.accounts(end - start), total_ns


def _add_up(kernels: pl.DataFrame) -> pl.DataFrame:
    sums = pl.col("time_ns", "count").sum()
    return kernels.group_by(_GROUPED).agg(sums, pl.col("min_ns").min(), pl.col("max_ns").max())


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
