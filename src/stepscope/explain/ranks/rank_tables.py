"""Several ranks as tables: each rank's step, which rank the others wait for, and the collectives that it delays."""

from collections.abc import Sequence

import polars as pl

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.collectives import computing, exposed_ns, find_collectives
from stepscope.explain.ranks.lateness import LateCollective, RankLateness, RankTimes, Straggler
from stepscope.explain.ranks.matching import rank_numbers
from stepscope.explain.ranks.reasons import Reason
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.units import count_noun, say_time

_MS = 1e6
_MOST_NAMED = 3  # ranks that waited for one collective
_LEAST_IMBALANCE = 0.02  # of the step
REASONS: dict[Reason, str] = {
    "work": "more work",
    "clock": "slower at the same work",
    "input": "slow input",
    "host": "late CPU",
}


def label_ranks(ranks: Sequence[RankActivity]) -> tuple[str, ...]:
    """Return `rank 3` if all ranks are known and distinct, else `recording 1`."""
    numbers = rank_numbers(ranks)
    if numbers is None:
        return tuple(f"recording {place + 1}" for place in range(len(ranks)))
    return tuple(f"rank {number}" for number in numbers)


def unit_of_ranks(ranks: Sequence[RankActivity]) -> str:
    """Return `step`, or `trace` if a rank has no marked steps: its trace then counts as one."""
    return "step" if all(one.clock.has_steps for one in ranks) else "trace"


def ranks_headline(ranks: Sequence[RankActivity], times: RankTimes | None) -> str:
    """Return a run of several ranks in a few lines: mean and range of step time, idle time and communication."""
    labels, world = label_ranks(ranks), ranks[0].manifest.world_size
    is_run = rank_numbers(ranks) is not None
    noun, of = (
        "ranks" if is_run else "recordings",
        f" of {world}" if is_run and world not in (None, len(ranks)) else "",
    )
    steps, exposed = [one.step_ns / _MS for one in ranks], [one.exposed_ns / _MS for one in ranks]
    lines = [
        f"{len(ranks)}{of} {noun}: {unit_of_ranks(ranks)} {_say_range(steps, labels, has_mean=is_run)}",
    ]
    if any(exposed):
        lines.append(f"exposed communication {_say_range(exposed, labels, has_mean=is_run)}")
    if is_run and (uneven := say_imbalance(ranks)):
        lines.append(uneven)
    if all(one.has_gaps for one in ranks):
        idle = [one.idle_share for one in ranks]
        low, high = min(idle), max(idle)
        lines.append(f"GPU idle {low:.1%} ({labels[idle.index(low)]}) to {high:.1%} ({labels[idle.index(high)]})")
    if times is None:
        unmatched = "no collective could be matched across these ranks, so it is unknown which one is late"
        lines.append(unmatched if is_run else "the files do not contain their rank, so they are not matched")
    elif times.straggler is not None and times.straggler.share > 0.5:
        lines.append(say_straggler(times, times.straggler))
    return "\n".join(lines)


def name_others(times: RankTimes, late: RankLateness) -> str:
    """Return `the other ranks`, or `rank 0` if there is only one other."""
    only = _find_only_other(times, late)
    return "the other ranks" if only is None else f"rank {only.rank}"


def say_others(times: RankTimes, late: RankLateness, verb: str) -> str:
    """Return `the other ranks wait`, or `rank 0 waits`."""
    ending = "" if _find_only_other(times, late) is None else "s"
    return f"{name_others(times, late)} {verb}{ending}"


def _find_only_other(times: RankTimes, late: RankLateness) -> RankLateness | None:
    """The other rank of a run of two; None in a run of more, even if only two were recorded."""
    others = [one for one in times.lateness if one is not late]
    return others[0] if len(others) == 1 and times.ranks[0].manifest.world_size in (None, 2) else None


def say_straggler(times: RankTimes, straggler: Straggler) -> str:
    """Return which rank the others wait for, why, and how long they have nothing else to do."""
    late, why = straggler.lateness, REASONS[straggler.reason]
    caused, per_step = say_time(late.per_step(late.caused_ns)), times.ranks[0].clock.say_per_step
    return f"{say_others(times, late, 'wait')} for rank {late.rank} ({why}): {caused} {per_step}"


def _say_range(values: Sequence[float], labels: Sequence[str], *, has_mean: bool) -> str:
    """Recordings that may be of different runs have no mean."""
    low, high = min(values), max(values)
    mean = f"{sum(values) / len(values):,.2f} ms on average, " if has_mean else ""
    return f"{mean}{low:,.2f} ms ({labels[values.index(low)]}) to {high:,.2f} ms ({labels[values.index(high)]})"


def compute_ratios(ranks: Sequence[RankActivity]) -> tuple[float, ...]:
    """Return the compute time of each rank as a multiple of the mean. The largest is the imbalance of the run."""
    computed = [one.computed_ns for one in ranks]
    mean = max(1.0, sum(computed) / len(computed))
    return tuple(one / mean for one in computed)


def say_imbalance(ranks: Sequence[RankActivity]) -> str:
    """Return which rank computes longest; empty if that hardly matters for the step."""
    ratios = compute_ratios(ranks)
    most = max(ratios)
    place = ratios.index(most)
    longer_ns = ranks[place].computed_ns * (1 - 1 / max(1.0, most))
    matters = longer_ns > _LEAST_IMBALANCE * ranks[place].step_ns
    return f"{label_ranks(ranks)[place]} computes {most:.2f}× the mean" if matters else ""


def ranks_table(ranks: Sequence[RankActivity], times: RankTimes | None, shown: Sequence[int] | None = None) -> Table:
    """Return the ranks of one run next to each other, in order; `shown` are the places of some of them."""
    ratios = compute_ratios(ranks)
    rows = [_rank_row(ranks[place], place, ratios[place], times) for place in shown or range(len(ranks))]
    unit = unit_of_ranks(ranks)
    notes = [
        f"times {'per step' if unit == 'step' else 'in the trace'}; a rank that comes last makes the others wait, and "
        "has the shortest communication itself"
    ]
    if times is not None:
        notes.append(
            "late: time after all other ranks have arrived, even if they still compute; waits: time spent waiting for "
            "later ranks"
        )
        if any(one.on_cpu for one in ranks):
            notes.append("on a CPU, communication is the operators that queue it, and waits are on the threads of Gloo")
    elif len(ranks) > 1:
        notes.append("no collective could be matched across these ranks")
    return Table(
        title="Ranks",
        columns=(
            Column(key="rank", label="rank", kind="count"),
            Column(key="file", label="file"),
            Column(key="step_ms", label=f"{unit} ms", kind="ms"),
            Column(key="compute_ms", label="compute ms", kind="ms"),
            Column(key="compute_ratio", label="compute / mean", kind="number"),
            Column(key="hidden_ms", label="comm. hidden ms", kind="ms"),
            Column(key="exposed_ms", label="comm. exposed ms", kind="ms"),
            Column(key="idle", label=name_idle(ranks), kind="share"),
            Column(key="last", label="comes last", kind="number"),
            Column(key="late_ms", label="late ms", kind="ms"),
            Column(key="most_late_ms", label="at most ms", kind="ms"),
            Column(key="waits_ms", label="waits ms", kind="ms"),
        ),
        rows=tuple(rows),
        notes=(*notes, *_doubt(ranks)),
    )


def name_idle(ranks: Sequence[RankActivity]) -> str:
    """Return what the time without kernels is called: a CPU is not idle between its operators."""
    return "outside operators" if all(one.on_cpu for one in ranks) else "idle"


def _rank_row(rank: RankActivity, place: int, ratio: float, times: RankTimes | None) -> tuple[Cell, ...]:
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
        rank.manifest.rank,
        rank.manifest.file,
        rank.step_ns / _MS,
        rank.computed_ns / _MS,
        ratio,
        rank.hidden_ns / _MS,
        rank.exposed_ns / _MS,
        rank.idle_share if rank.has_gaps or rank.on_cpu else None,
        *late,
    )


def _doubt(ranks: Sequence[RankActivity]) -> tuple[str, ...]:
    devices = {one.manifest.device for one in ranks}
    return ("these may not be the ranks of one run: their devices differ",) if len(devices) > 1 else ()


def late_table(times: RankTimes, *, top: int | None = None) -> Table:
    """Return the collectives that kept the other ranks waiting longest."""
    late = times.late_collectives(top or len(times.margin_ns))
    rest = len(times.margin_ns) - len(late)
    rows = tuple(
        (
            one.rank,
            one.late_ns / _MS,
            "late before" if one.reason is None else REASONS[one.reason],
            _say_waits(one),
            one.kind,
            one.message_bytes,
            f"{one.bucket} of {one.buckets}",
            one.step,
            one.phase,
            one.moment_ns / _MS,
        )
        for one in late
    )
    notes = [
        f"of {count_noun(len(times.margin_ns), 'matched collective')}; clocks aligned by the ends of collectives",
        "late: after the last but one, counted once if it is late to several; bucket: its place among the collectives "
        "of its kind in the step",
    ]
    if any(one.reason is None for one in late):
        notes.append(
            "late before: since the previous collective, or since the recording began, it did nothing longer than the "
            "others"
        )
    if rest:
        notes.append(f"{count_noun(rest, 'more row')}: --table collectives --top {len(times.margin_ns)}")
    return Table(
        title="Collectives by how late the last rank came",
        columns=(
            Column(key="rank", label="last rank", kind="count"),
            Column(key="late_ms", label="late ms", kind="ms"),
            Column(key="reason", label="why"),
            Column(key="waits", label="who waits"),
            Column(key="kind", label="collective"),
            Column(key="message_bytes", label="message", kind="bytes"),
            Column(key="bucket", label="bucket"),
            Column(key="step", label="step", kind="count"),
            Column(key="phase", label="phase"),
            Column(key="moment_ms", label="at ms", kind="ms"),
        ),
        rows=rows,
        notes=tuple(notes),
    )


def _say_waits(one: LateCollective) -> str:
    """Which ranks wait how long; of many, how many and the longest."""
    if len(one.waits) <= _MOST_NAMED:
        return ", ".join(f"rank {rank} {wait / _MS:,.2f} ms" for rank, wait in one.waits.items())
    mean = sum(one.waits.values()) / len(one.waits)
    longest = max(one.waits, key=lambda rank: (one.waits[rank], -rank))
    return f"{len(one.waits)} ranks {mean / _MS:,.2f} ms on average, rank {longest} {one.waits[longest] / _MS:,.2f} ms"


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
