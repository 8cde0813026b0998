"""Why a rank is late: it does more work, runs the same work slower, waits for input, or its CPU is late.

The first two take time on the device, and the work itself tells them apart: kernels of the same name and shape that
take longer, or kernels that other ranks do not run. The last two leave the device idle, and the ranges and operators of
the CPU say what it did meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.collectives import CoveredTime, Ints

Reason = Literal["work", "clock", "input", "host"]
_MOST = 0.5
_UNIFORM = 0.7  # of the time of equal kernels that is slower: all of them, not some
_SLOWER_CLOCK = 0.97  # of another rank's


@dataclass(frozen=True, kw_only=True)
class WorkDifference:
    """The kernels of a rank compared with those of a usual one, per step. `slower_ns` is how much longer kernels of the
    same name and shape take, `more_ns` the time of kernels that only this rank runs, less that of those it lacks."""

    slower_ns: float
    more_ns: float
    slowdown: float  # of equal kernels: 1.2 takes 20% longer
    is_uniform: bool  # whether most equal kernels are slower
    clock_mhz: int | None = None
    usual_mhz: int | None = None

    @property
    def clock_share(self) -> float:
        """The part of its longer computing that is not more work."""
        slower, more = max(0.0, self.slower_ns), max(0.0, self.more_ns)
        return slower / (slower + more) if slower + more else 0.0

    @property
    def has_slower_clock(self) -> bool:
        """Whether the recorded clocks say so."""
        if self.clock_mhz is None or self.usual_mhz is None:
            return False
        return self.clock_mhz < _SLOWER_CLOCK * self.usual_mhz


def compare_work(rank: RankActivity, others: Sequence[RankActivity]) -> WorkDifference:
    """Compare a rank with the one of median compute time among the others."""
    ordered = sorted(others, key=lambda one: (one.computed_ns, one.rank or 0))
    usual = ordered[(len(ordered) - 1) // 2]
    clocks = [one.manifest.loop.clock_mhz for one in others if one.manifest.loop and one.manifest.loop.clock_mhz]
    ours, theirs = (
        one.work.with_columns(count=pl.col("count") / one.clock.num_steps, ns=pl.col("time_ns") / one.clock.num_steps)
        for one in (rank, usual)
    )
    joined = ours.join(theirs, on=["name", "shape"], how="full", coalesce=True, suffix="_usual").fill_null(0)
    common = pl.min_horizontal("count", "count_usual")
    each, each_usual = (
        pl.when(pl.col(f"count{of}") > 0).then(pl.col(f"ns{of}") / pl.col(f"count{of}")).otherwise(0.0)
        for of in ("", "_usual")
    )
    table = joined.with_columns(same=common * each, same_usual=common * each_usual)
    same, same_usual, total, total_usual = (
        float(table[name].sum()) for name in ("same", "same_usual", "ns", "ns_usual")
    )
    slowdown = same / same_usual if same_usual else 1.0
    half = pl.col("same") > (1 + slowdown) / 2 * pl.col("same_usual")
    slow = float(table.filter(half)["same"].sum())
    return WorkDifference(
        slower_ns=same - same_usual,
        more_ns=(total - same) - (total_usual - same_usual),
        slowdown=slowdown,
        is_uniform=slowdown > 1 and slow > _UNIFORM * same,
        clock_mhz=rank.manifest.loop.clock_mhz if rank.manifest.loop else None,
        usual_mhz=round(float(np.median(clocks))) if clocks else None,
    )


@dataclass(frozen=True, kw_only=True)
class HostCause:
    """What the CPU did while it was late: inside a range (`during`), or without an operator after one (`after`)."""

    during: str = ""
    after: str = ""
    line: str | None = None  # of the user's code
    longest_ns: int = 0  # at once


def find_host_cause(rank: RankActivity, since: Ints, until: Ints) -> HostCause | None:
    """Return what the CPU did in most of the idle time between these moments, as far as the recording says."""
    ran = CoveredTime(pl.concat([rank.running, rank.loading]))
    idle_ns = float(((until - since) - ran.between(since, until)).sum())
    host, pauses = (_cut(frame, since, until) for frame in (rank.host, rank.pauses))
    if not idle_ns:
        return None
    lengths = host["end_ns"] - host["start_ns"]
    busy = pl.Series(ran.between(host["start_ns"].to_numpy(), host["end_ns"].to_numpy()), dtype=pl.Float64)
    by_name = host.with_columns(length=lengths, idle=lengths - busy).group_by("name", maintain_order=True)
    covering = by_name.agg(
        pl.col("length", "idle").sum(), longest=pl.col("length").max(), line=pl.col("source_line").first()
    )
    covering = covering.filter(pl.col("idle") > _MOST * idle_ns)
    if covering.height:
        # Ranges are nested: the shortest that covers the time says most.
        inner = covering.sort("length", "name").row(0, named=True)
        return HostCause(during=inner["name"], line=inner["line"], longest_ns=inner["longest"])
    lasting = pauses.with_columns(length=pl.col("end_ns") - pl.col("start_ns")).group_by("after", "source")
    ranked = lasting.agg(total=pl.col("length").sum(), longest=pl.col("length").max())
    if not ranked.height:
        return None
    most = ranked.sort("total", "after", descending=[True, False]).row(0, named=True)
    return HostCause(after=most["after"], line=most["source"], longest_ns=most["longest"])


def _cut(frame: pl.DataFrame, since: Ints, until: Ints) -> pl.DataFrame:
    """The parts of ranges inside the intervals, which are in order and do not overlap."""
    starts, ends = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    rows, begins, stops = [], [], []
    for begin, stop in zip(since.tolist(), until.tolist(), strict=True):
        inside = np.flatnonzero((starts < stop) & (ends > begin))
        rows.append(inside)
        begins.append(np.maximum(starts[inside], begin))
        stops.append(np.minimum(ends[inside], stop))
    if not rows:
        return frame.clear()
    cut: pl.DataFrame = frame[np.concatenate(rows).tolist()]
    return cut.with_columns(start_ns=pl.Series(np.concatenate(begins)), end_ns=pl.Series(np.concatenate(stops)))
