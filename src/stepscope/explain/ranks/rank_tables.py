"""Several ranks as tables: each rank's step, which rank the others wait for, and the collectives that it delays."""

from collections.abc import Sequence

import polars as pl

from stepscope.explain.ranks.collectives import computing, exposed_ns, find_collectives
from stepscope.explain.ranks.lateness import RankTimes, rank_numbers
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.units import count_noun

_MS = 1e6


def label_ranks(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """Return `rank 3` if all ranks are known and distinct, else `recording 1`."""
    numbers = rank_numbers(profiles)
    if numbers is None:
        return tuple(f"recording {place + 1}" for place in range(len(profiles)))
    return tuple(f"rank {number}" for number in numbers)


def unit_of_ranks(profiles: Sequence[Profile]) -> str:
    """Return `step`, or `trace` if a rank has no marked steps: its trace then counts as one."""
    return "step" if all(one.clock.has_steps for one in profiles) else "trace"


def ranks_headline(profiles: Sequence[Profile], times: RankTimes | None) -> str:
    """Return a run of several ranks in a few lines: mean and range of step time, idle time and communication."""
    labels, world = label_ranks(profiles), profiles[0].recording.manifest.world_size
    is_run = rank_numbers(profiles) is not None
    noun, of = (
        "ranks" if is_run else "recordings",
        f" of {world}" if is_run and world not in (None, len(profiles)) else "",
    )
    steps, exposed = [one.step_ns / _MS for one in profiles], [exposed_step_ns(one) / _MS for one in profiles]
    lines = [
        f"{len(profiles)}{of} {noun}: {unit_of_ranks(profiles)} {_say_range(steps, labels, has_mean=is_run)}",
    ]
    if any(exposed):
        lines.append(f"exposed communication {_say_range(exposed, labels, has_mean=is_run)}")
    if all(one.has_gaps for one in profiles):
        idle = [one.idle_share for one in profiles]
        low, high = min(idle), max(idle)
        lines.append(f"GPU idle {low:.1%} ({labels[idle.index(low)]}) to {high:.1%} ({labels[idle.index(high)]})")
    if times is None:
        unmatched = "no collective could be matched across these ranks, so it is unknown which one is late"
        lines.append(unmatched if is_run else "the files do not contain their rank, so they are not matched")
    elif times.straggler is not None and times.straggler.share > 0.5:
        late = times.straggler.lateness
        others = f"{late.late_ns / _MS:,.2f} ms in the recording"
        lines.append(f"the others wait for {_label(times, profiles, late.rank)}: {others}")
    return "\n".join(lines)


def _say_range(values: Sequence[float], labels: Sequence[str], *, has_mean: bool) -> str:
    """Recordings that may be of different runs have no mean."""
    low, high = min(values), max(values)
    mean = f"{sum(values) / len(values):,.2f} ms on average, " if has_mean else ""
    return f"{mean}{low:,.2f} ms ({labels[values.index(low)]}) to {high:,.2f} ms ({labels[values.index(high)]})"


def _label(times: RankTimes, profiles: Sequence[Profile], rank: int) -> str:
    place = next(place for place, one in enumerate(times.ranks) if one.number == rank)
    return label_ranks(profiles)[place]


def exposed_step_ns(profile: Profile) -> float:
    """Return exposed communication per step, mean over devices."""
    exposed = sum(one.whole.communication_exposed_ns for one in profile.devices)
    return profile.clock.per_step(exposed) / len(profile.devices)


def ranks_table(profiles: Sequence[Profile], times: RankTimes | None) -> Table:
    """Return the ranks of one run next to each other, in order."""
    rows = [_rank_row(profile, place, times) for place, profile in enumerate(profiles)]
    unit = unit_of_ranks(profiles)
    notes = [
        f"times {'per step' if unit == 'step' else 'in the trace'}; a rank that comes last makes the others wait, and "
        "has the shortest communication itself"
    ]
    if times is not None:
        notes.append("late: time that all other ranks wait for this one alone; waits: for any later rank")
        if any(one.on_cpu for one in profiles):
            notes.append("on a CPU, communication is the operators that queue it, and waits are on the threads of Gloo")
    elif len(profiles) > 1:
        notes.append("no collective could be matched across these ranks")
    return Table(
        title="Ranks",
        columns=(
            Column(key="rank", label="rank", kind="count"),
            Column(key="file", label="file"),
            Column(key="step_ms", label=f"{unit} ms", kind="ms"),
            Column(key="compute_ms", label="compute ms", kind="ms"),
            Column(key="hidden_ms", label="comm. hidden ms", kind="ms"),
            Column(key="exposed_ms", label="comm. exposed ms", kind="ms"),
            Column(key="idle", label="idle", kind="share"),
            Column(key="last", label="comes last", kind="number"),
            Column(key="late_ms", label="late ms", kind="ms"),
            Column(key="most_late_ms", label="at most ms", kind="ms"),
            Column(key="waits_ms", label="waits ms", kind="ms"),
        ),
        rows=tuple(rows),
        notes=(*notes, *_doubt(profiles)),
    )


def _rank_row(profile: Profile, place: int, times: RankTimes | None) -> tuple[Cell, ...]:
    manifest, clock = profile.recording.manifest, profile.clock
    whole = [device.whole for device in profile.devices]
    hidden = sum(one.communication_hidden_ns for one in whole) / len(whole)
    compute = int(profile.kernels.filter(pl.col("class") != "communication")["time_ns"].sum()) / len(whole)
    late: tuple[Cell, ...] = (None, None, None, None)
    if times is not None:
        own = times.lateness[place]
        late = (
            own.per_step(own.last),
            own.per_step(own.late_ns) / _MS,
            own.most_ns / _MS,
            own.per_step(own.waited_ns) / _MS,
        )
    return (
        manifest.rank,
        manifest.file,
        clock.step_ns / _MS,
        clock.per_step(compute) / _MS,
        clock.per_step(hidden) / _MS,
        exposed_step_ns(profile) / _MS,
        clock.idle_share if profile.has_gaps else None,
        *late,
    )


def _doubt(profiles: Sequence[Profile]) -> tuple[str, ...]:
    devices = {profile.recording.manifest.device for profile in profiles}
    return ("these may not be the ranks of one run: their devices differ",) if len(devices) > 1 else ()


def late_table(times: RankTimes, *, top: int | None = None) -> Table:
    """Return the collectives that kept the other ranks waiting longest."""
    late = times.late_collectives(top or len(times.margin_ns))
    rest = len(times.margin_ns) - late.height
    rows = tuple(
        (
            row["rank"],
            row["late_ns"] / _MS,
            row["kind"],
            row["message_bytes"],
            row["step"],
            row["phase"],
            row["moment_ns"] / _MS,
        )
        for row in late.iter_rows(named=True)
    )
    notes = [f"of {count_noun(len(times.margin_ns), 'matched collective')}; clocks aligned by the ends of collectives"]
    if rest:
        notes.append(f"{count_noun(rest, 'more row')}: --table collectives --top {len(times.margin_ns)}")
    return Table(
        title="Collectives by how late the last rank came",
        columns=(
            Column(key="rank", label="last rank", kind="count"),
            Column(key="late_ms", label="late ms", kind="ms"),
            Column(key="kind", label="collective"),
            Column(key="message_bytes", label="message", kind="bytes"),
            Column(key="step", label="step", kind="count"),
            Column(key="phase", label="phase"),
            Column(key="moment_ms", label="at ms", kind="ms"),
        ),
        rows=rows,
        notes=tuple(notes),
    )


def collectives_table(profile: Profile, *, top: int | None = None) -> Table:
    """Return the collectives of one rank by kind and size, with their bus bandwidth and how much of them is exposed."""
    found = find_collectives(profile)
    told = found.with_columns(exposed=pl.Series(exposed_ns(found, computing(profile.kernels))))
    keys = ["kind", "message_bytes", "group_size", "phase"]
    grouped = told.group_by(keys).agg(
        pl.len().alias("count"),
        pl.col("time_ns", "exposed", "bus_bytes").sum(),
        shortest=pl.col("time_ns").min(),
        longest=pl.col("time_ns").max(),
    )
    ordered = grouped.sort("time_ns", *keys, descending=[True] + [False] * len(keys), nulls_last=True)
    clock = profile.clock
    rows = tuple(
        (
            row["kind"] or "unknown",
            row["message_bytes"],
            row["group_size"],
            row["phase"],
            clock.per_step(row["count"]),
            clock.per_step(row["time_ns"]) / _MS,
            clock.per_step(row["exposed"]) / _MS,
            row["shortest"] / _MS,
            row["longest"] / _MS,
            row["bus_bytes"] / max(1, row["time_ns"]) if row["message_bytes"] is not None else None,
        )
        for row in ordered.head(top or ordered.height).iter_rows(named=True)
    )
    notes = [f"times and counts {clock.say_per_step}; bus bandwidth as in nccl-tests, with the time spent waiting"]
    if not rows:
        notes = ["this recording has no collectives"]
    return Table(
        title="Collectives",
        columns=(
            Column(key="kind", label="collective"),
            Column(key="message_bytes", label="message", kind="bytes"),
            Column(key="group_size", label="ranks", kind="count"),
            Column(key="phase", label="phase"),
            Column(key="count", label="count", kind="number"),
            Column(key="time_ms", label="ms", kind="ms"),
            Column(key="exposed_ms", label="exposed ms", kind="ms"),
            Column(key="min_ms", label="shortest ms", kind="ms"),
            Column(key="max_ms", label="longest ms", kind="ms"),
            Column(key="bus_gb_per_s", label="bus GB/s", kind="number"),
        ),
        rows=rows,
        notes=tuple(notes),
    )
