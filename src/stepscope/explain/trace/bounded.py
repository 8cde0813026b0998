"""A trace of PyTorch's profiler that is larger than memory, explained all the same.

What `explain.profile` does on tables in memory is done here in passes over tables on disk (`recording.spill`), each a
window at a time:

1. `bounded_intake` reads the file once and spills its rows.
2. `bounded_joins` brings together what belongs together by number: kernels and launches, nodes and their makers.
3. `bounded_windows` brings together what belongs together by time, adds kernels up by what they belong to, and sweeps
   each device's time.

The figures are those of the normal mode to the nanosecond. What stays in memory grows with the number of distinct
names, modules, threads and steps, and not with the number of events. Findings and questions look at single kernels
beside each other and are not made.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.explain.trace import breakdown
from stepscope.explain.trace.accounting import DeviceAccount
from stepscope.explain.trace.attribution import name_what_is_no_module, set_communication_apart
from stepscope.explain.trace.bounded_intake import Facts, Spills, take_in
from stepscope.explain.trace.bounded_joins import (
    choose_forward_threads,
    join_flows,
    join_launches,
    join_makers,
    take_operators_for_kernels,
)
from stepscope.explain.trace.bounded_windows import (
    FirstCalls,
    Groups,
    attribute_windows,
    find_made_modules,
    survey_nodes,
    sweep_windows,
)
from stepscope.explain.trace.modules import number_layers
from stepscope.explain.trace.names import classify
from stepscope.explain.trace.profile import UNKNOWN, Profile, no_time
from stepscope.explain.trace.summary import KernelTime, Summary, summarise
from stepscope.findings import Page, Table
from stepscope.folders import cache_folder
from stepscope.recording.readers.kineto import device_is_cut_off
from stepscope.recording.readers.spill import spill_folder
from stepscope.recording.store import Recording

NOTE = "read in bounded memory: the breakdown is whole; findings, questions and single kernels are not available"
# The parts of the page that can be asked for alone in this mode.
PARTS = ("classes", "phases", "kernels", "modules", "layers", "ops", "streams")
_ON_A_PAGE = 6


@dataclass(frozen=True, kw_only=True)
class BoundedProfile(Profile):
    """A profile whose `kernels` are one row for all that share a name and what they belong to, with `count`, `min_ns`
    and `max_ns`; its recording holds the manifest alone."""

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

    def time_by(self, *columns: str, kernels: pl.DataFrame | None = None) -> pl.DataFrame:
        source = self.kernels if kernels is None else kernels
        named = [pl.col(c).fill_null(UNKNOWN) if source.schema[c] == pl.String else pl.col(c) for c in columns]
        grouped = source.group_by(*named).agg(pl.col("time_ns", "count").sum())
        share = pl.col("time_ns") / max(1, self.gpu_time_ns)
        ordered = grouped.sort("time_ns", *columns, descending=[True, *([False] * len(columns))])
        return ordered.with_columns(share=share).select(*columns, "time_ns", "count", "share")


def make_bounded_profile(path: Path, beside: Path | None = None) -> BoundedProfile:
    """Spills to a folder inside `beside`, else inside the cache, and removes it. Raises StepscopeError for what cannot
    be read and for a disk that is full."""
    with spill_folder(beside or cache_folder()) as folder:
        spills = Spills(folder)
        facts = take_in(path, spills)
        return _explain(facts, spills)


def summarise_bounded(path: Path, beside: Path | None = None) -> Summary:
    return summarise_profile(make_bounded_profile(path, beside))


def summarise_profile(profile: BoundedProfile) -> Summary:
    """`summary.summarise` for a profile of this mode."""
    return msgspec.structs.replace(summarise(profile, ()), kernels=kernel_times(profile))


def _explain(facts: Facts, spills: Spills) -> BoundedProfile:
    groups = Groups()
    on_host = not (spills.kernels.num_rows or facts.repairs.lost_rows["kernels"])
    if on_host and not device_is_cut_off(facts.manifest.device, facts.manifest.notes):
        take_operators_for_kernels(facts, spills)
    else:
        for alone in join_launches(facts, spills):
            nothing = pl.lit(None, pl.String)
            name = facts.names.spell(alone["name"])
            groups.add(alone.with_columns(name=name, op=nothing, module=nothing, phase=nothing))
    if not spills.swept.num_rows:
        raise StepscopeError(
            "the recording holds no kernel timeline",
            detail="; ".join(
                (f"`{facts.manifest.file}` has {facts.num_ops} operators and no kernels", *facts.manifest.notes)
            ),
            hint="record with CUDA activity: torch.profiler.profile(activities=[CPU, CUDA])",
        )
    join_flows(spills)
    survey = survey_nodes(facts, spills)
    has_links = bool(spills.links.num_rows)
    join_makers(spills, choose_forward_threads(facts, survey.numbers, survey.votes, has_links=has_links))
    find_made_modules(facts, spills)
    first_calls = attribute_windows(facts, spills, survey, groups)
    steps = _steps(facts)
    kind = "cpu" if on_host else "kernel"
    accounts, bounds = sweep_windows(facts, spills, kind, steps)
    if not any(account.whole.busy_ns for account in accounts):
        raise no_time(Recording(manifest=facts.manifest))
    recording = Recording(manifest=msgspec.structs.replace(facts.manifest, notes=(*facts.manifest.notes, NOTE)))
    return BoundedProfile(
        recording=recording,
        kernels=_finish(recording, groups, first_calls, kind),
        bounds=bounds,
        accounts=accounts,
        marked_steps=steps,
    )


def _steps(facts: Facts) -> pl.DataFrame:
    schema = {"step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64}
    return pl.concat([pl.DataFrame(schema=schema), *facts.steps]).sort("start_ns", maintain_order=True)


def _finish(recording: Recording, groups: Groups, first_calls: FirstCalls, kind: str) -> pl.DataFrame:
    """What depends on names alone is found once a group instead of once a kernel."""
    grouped = groups.together().with_columns(kind=pl.lit(kind))
    layered = number_layers(name_what_is_no_module(recording, grouped), first_calls.modules)
    return set_communication_apart(classify(layered))


def kernel_times(profile: BoundedProfile) -> tuple[KernelTime, ...]:
    """One row a kernel name, the largest time first."""
    grouped = profile.kernels.group_by("name", "short", "class").agg(
        pl.col("time_ns", "count").sum(), pl.col("min_ns").min(), pl.col("max_ns").max()
    )
    rows = grouped.sort("time_ns", "name", descending=[True, False]).iter_rows(named=True)
    return tuple(
        KernelTime(
            name=row["name"],
            short=row["short"],
            kernel_class=row["class"],
            count=row["count"],
            time_ns=row["time_ns"],
            share=row["time_ns"] / max(1, profile.gpu_time_ns),
            min_ns=row["min_ns"],
            mean_ns=row["time_ns"] / row["count"],
            max_ns=row["max_ns"],
        )
        for row in rows
    )


def make_part(profile: BoundedProfile, name: str, *, top: int | None = None) -> Table:
    """One of `PARTS`. Raises StepscopeError for a part that needs single kernels."""
    match name:
        case "classes":
            return breakdown.classes_table(profile)
        case "phases":
            return breakdown.phases_table(profile)
        case "streams":
            return breakdown.streams_table(profile)
        case "kernels":
            return _kernels_table(profile, top)
        case "modules":
            return breakdown.modules_table(profile, top=top)
        case "layers":
            return breakdown.layers_table(profile, top=top)
        case "ops":
            return breakdown.ops_table(profile, top=top)
        case _:
            raise StepscopeError(
                f"`{name}` is not available in bounded memory",
                detail=f"available: {', '.join(PARTS)}",
                hint=f"stepscope explain FILE --table {name}",
            )


def make_page(profile: BoundedProfile) -> Page:
    tables = tuple(make_part(profile, name, top=_ON_A_PAGE) for name in ("classes", "phases", "kernels"))
    return Page(headline=breakdown.headline(profile), tables=tables, findings=None)


def _kernels_table(profile: BoundedProfile, top: int | None) -> Table:
    kernels = kernel_times(profile)
    empty = breakdown.kernels_table(profile, top=0)
    rows = tuple(breakdown.kernel_row(profile, one) for one in kernels[:top])
    notes = (breakdown.scope(profile), *breakdown.left_out(kernels[:top], kernels))
    return Table(title=empty.title, columns=empty.columns, rows=rows, notes=notes)
