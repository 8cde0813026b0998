"""Several ranks of one run: their collectives matched, their clocks aligned, and which rank the others wait for.

Each rank records on its own clock. A collective ends at about the same time on every rank, so the ends of matched
collectives align the clocks. Its start on a rank is when that rank arrives. The last rank to arrive makes the others
wait, from the arrival of the last but one on: before that, they would have waited anyway. So the rank to fix is the one
with the most such time, which usually has the *least* exposed communication, because it never waits.

Why a rank is late follows from its device since it arrived at the previous collective: if it computed longer than the
other ranks, it has more work or a slower clock; if it was idle, its CPU launched late, or waited for input.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.collectives import Floats, Ints
from stepscope.explain.ranks.reasons import HostCause, Reason, WorkDifference, compare_work, find_host_cause

_NOTABLE = 0.1  # of all waiting for single ranks
_MOST_OTHERS = 3
NEVER = -1  # the place of a collective on a rank that took no part


@dataclass(frozen=True, kw_only=True)
class RankLateness:
    """How late one rank is. Times are over the `steps` in which its collectives were matched, which are fewer than it
    recorded if another trace is shorter. `late_ns` is how long all other ranks have arrived and this one has not, and
    `caused_ns` how long they have nothing else to do meanwhile, on average."""

    rank: int
    collectives: int  # matched
    last: int  # collectives to which it came last
    late_ns: float
    most_ns: float
    waited_ns: float  # for any other rank
    caused_ns: float
    steps: float

    def per_step(self, time_ns: float) -> float:
        return time_ns / self.steps if self.steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that the others wait for; times over the whole recording. `reasons` says how much of `late_ns` it
    did more work than the others, ran the same work slower, waited for input, or was idle otherwise."""

    lateness: RankLateness
    reasons: dict[Reason, float]
    share: float  # of all waiting for single ranks
    work: WorkDifference
    cause: HostCause | None  # what its CPU did while the device was idle

    @property
    def reason(self) -> Reason:
        return max(self.reasons, key=lambda one: (self.reasons[one], one))


@dataclass(frozen=True, kw_only=True)
class LateCollective:
    """A collective, the rank that came to it last, and how long each of the others waited for that rank."""

    rank: int
    late_ns: float
    waits: dict[int, float]  # by rank
    reason: Reason | None  # None if it was late before
    moment_ns: float  # since the first collective
    kind: str
    message_bytes: int | None
    bucket: int  # its number among the `buckets` of its kind in the step
    buckets: int
    step: int | None
    phase: str | None


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Matched collectives, one row each, with one column per rank: when it arrived, on a common clock (NaN if it
    took no part), and the collective's place among those of the rank (`NEVER`)."""

    ranks: tuple[RankActivity, ...]
    offsets_ns: tuple[float, ...]  # of each rank's clock, after its own origin
    arrival_ns: Floats
    duration_ns: Floats  # of the collective on each rank: no wait is longer
    places: Ints

    @cached_property
    def last(self) -> Ints:
        result: Ints = np.nanargmax(self.arrival_ns, axis=1) if len(self.arrival_ns) else np.empty(0, np.int64)
        return result

    @cached_property
    def margin_ns(self) -> Floats:
        """How long after the last but one the last rank arrived."""
        ordered = np.sort(np.where(np.isnan(self.arrival_ns), -np.inf, self.arrival_ns), axis=1)
        longest = np.nanmax(np.minimum(ordered[:, -1:] - self.arrival_ns, self.duration_ns), axis=1)
        result: Floats = np.minimum(ordered[:, -1] - ordered[:, -2], longest)
        return result

    @cached_property
    def _alone_ns(self) -> Floats:
        """The part of `margin_ns` in which the last rank is not yet late to another collective."""
        arrived = np.nanmax(self.arrival_ns, axis=1)
        result = np.zeros(len(arrived))
        for column in range(len(self.ranks)):
            ours = self.last == column
            result[ours] = _count_once((arrived - self.margin_ns)[ours], arrived[ours])
        return result

    @cached_property
    def waited_ns(self) -> Floats:
        """How long each rank waited for the last one, per collective. If it waits for several at once, the time counts
        once, for the first."""
        ends = np.nanmax(self.arrival_ns, axis=1, keepdims=True)
        ends = np.minimum(ends, self.arrival_ns + self.duration_ns)
        result = np.full(ends.shape, np.nan)
        for column in range(len(self.ranks)):
            ours = self.places[:, column] != NEVER
            result[ours, column] = _count_once(self.arrival_ns[ours, column], ends[ours, column])
        return result

    @cached_property
    def _waiting_ns(self) -> Floats:
        """How long each rank other than the last had nothing to do but wait for the last one alone."""
        arrived = np.nanmax(self.arrival_ns, axis=1)
        waits = np.full(self.arrival_ns.shape, np.nan)
        for column, rank in enumerate(self.ranks):
            ours = (self.places[:, column] != NEVER) & (self.last != column)
            ends = self.own_clock(arrived[ours], column)
            starts = self.own_clock((arrived - self._alone_ns)[ours], column)
            waits[ours, column] = (ends - starts) - rank.compute.between(starts, ends)
        return waits

    def exposed_wait_ns(self, rank: int | None) -> float:
        """Return how long a rank had nothing to do but wait for any later rank, per step."""
        column = next(place for place, one in enumerate(self.ranks) if one.rank == rank)
        ours = self.places[:, column] != NEVER
        arrived = np.minimum(np.nanmax(self.arrival_ns, axis=1), (self.arrival_ns + self.duration_ns)[:, column])
        starts = self.own_clock((arrived - self.waited_ns[:, column])[ours], column)
        ends = self.own_clock(arrived[ours], column)
        waits = (ends - starts) - self.ranks[column].compute.between(starts, ends)
        return self.lateness[column].per_step(float(waits.sum()))

    def own_clock(self, moments_ns: Floats, column: int) -> Ints:
        """Return moments of the common clock on that of a rank."""
        return np.round(moments_ns + self.offsets_ns[column]).astype(np.int64) + self.ranks[column].origin_ns

    def common_clock(self, moments_ns: Ints, column: int) -> Floats:
        """Return moments on a rank's clock on the common one, on which `arrival_ns` is."""
        since_origin = (moments_ns - self.ranks[column].origin_ns).astype(np.float64)
        result: Floats = since_origin - self.offsets_ns[column]
        return result

    def waits_of(self, column: int) -> pl.DataFrame:
        """Return when a rank waited for which other, on its own clock: start_ns, end_ns and `name`, in order."""
        waited = np.nan_to_num(self.waited_ns[:, column])
        rows = np.flatnonzero(waited > 0)
        ends = np.minimum(np.nanmax(self.arrival_ns, axis=1), (self.arrival_ns + self.duration_ns)[:, column])[rows]
        names = [f"waits for rank {self.ranks[last].rank}" for last in self.last[rows].tolist()]
        starts_ns, ends_ns = (self.own_clock(moments, column) for moments in (ends - waited[rows], ends))
        schema = {"start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String}
        return pl.DataFrame({"start_ns": starts_ns, "end_ns": ends_ns, "name": names}, schema=schema).sort("start_ns")

    @cached_property
    def lateness(self) -> tuple[RankLateness, ...]:
        """One per rank, in order."""
        together = np.nansum(np.nan_to_num(self._waiting_ns), axis=1) / np.maximum(
            1, (~np.isnan(self._waiting_ns)).sum(axis=1)
        )
        made = []
        for column, rank in enumerate(self.ranks):
            assert rank.rank is not None, "ranks without a number are not matched"
            came_last = self.last == column
            made.append(
                RankLateness(
                    rank=rank.rank,
                    collectives=int((self.places[:, column] != NEVER).sum()),
                    last=int(came_last.sum()),
                    late_ns=float(self._alone_ns[came_last].sum()),
                    most_ns=float(self.margin_ns[came_last].max(initial=0.0)),
                    waited_ns=float(np.nansum(self.waited_ns[:, column])),
                    caused_ns=float(together[came_last].sum()),
                    steps=self._matched_steps(column),
                )
            )
        return tuple(made)

    def _matched_steps(self, column: int) -> float:
        """The steps of a rank, as far as they have matched collectives."""
        rank, places = self.ranks[column], self.places[:, column]
        matched = rank.collectives["step"].gather(places[places != NEVER])
        share = matched.n_unique() / max(1, rank.collectives["step"].n_unique())
        return rank.clock.num_steps * share

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for most, None if no rank is ever late."""
        worst = max(self.lateness, key=lambda one: (one.late_ns, -one.rank), default=None)
        if worst is None or worst.late_ns <= 0:
            return None
        return self._explain(self.lateness.index(worst))

    @cached_property
    def others_late(self) -> tuple[Straggler, ...]:
        """The ranks other than `straggler` for which the others wait notably long, the latest first."""
        total = sum(one.late_ns for one in self.lateness)
        worst = self.straggler.lateness if self.straggler is not None else None
        late = [one for one in self.lateness if one is not worst and one.late_ns > _NOTABLE * total]
        latest = sorted(late, key=lambda one: (-one.late_ns, one.rank))[:_MOST_OTHERS]
        return tuple(self._explain(self.lateness.index(one)) for one in latest)

    def _explain(self, column: int) -> Straggler:
        late = self.lateness[column]
        return Straggler(
            lateness=late,
            reasons=self._total_reasons(column),
            share=late.late_ns / sum(one.late_ns for one in self.lateness),
            work=self._compare_work(column),
            cause=find_host_cause(self.ranks[column], *self._since_previous(self._late_rows(column), column)),
        )

    def _late_rows(self, column: int) -> Ints:
        """The collectives to which a rank came last, in the order in which it arrived."""
        rows = np.flatnonzero(self.last == column)
        result: Ints = rows[np.argsort(self.places[rows, column], kind="stable")]
        return result

    def _total_reasons(self, column: int) -> dict[Reason, float]:
        rows = self._late_rows(column)
        reasons = {name: float(part.sum()) for name, part in self._reasons(rows, column).items()}
        # What is left was late before: the others went on computing meanwhile, and this rank does so now.
        margin, explained = float(self._alone_ns[rows].sum()), sum(reasons.values())
        if not explained:
            return {**reasons, "host": margin}
        return {name: part * margin / explained for name, part in reasons.items()}

    def _reasons(self, rows: Ints, column: int) -> dict[Reason, Floats]:
        """How much of its lateness to each of these collectives, to which a rank came last, has which reason."""
        margin, rank = self._alone_ns[rows], self.ranks[column]
        since, until = self._since_previous(rows, column)
        computed = rank.compute.between(since, until)
        others = np.full((len(rows), len(self.ranks)), np.nan)
        for other in range(len(self.ranks)):
            ours = self.places[rows, other] != NEVER
            if other != column:
                others[ours, other] = self.ranks[other].compute.between(*self._since_previous(rows[ours], other))
        usual = np.nanmedian(others, axis=1) if len(rows) else np.empty(0)
        more = np.clip(computed - usual, 0.0, margin)
        idle = np.clip((until - since) - rank.busy.between(since, until), 0.0, margin - more)
        loading = np.minimum(rank.input.between(since, until), idle)
        slower = self._compare_work(column).clock_share * more
        return {"work": more - slower, "clock": slower, "input": loading, "host": idle - loading}

    def _compare_work(self, column: int) -> WorkDifference:
        if column not in self._compared:
            others = [rank for place, rank in enumerate(self.ranks) if place != column]
            self._compared[column] = compare_work(self.ranks[column], others)
        return self._compared[column]

    @cached_property
    def _compared(self) -> dict[int, WorkDifference]:
        return {}

    def _since_previous(self, rows: Ints, column: int) -> tuple[Ints, Ints]:
        """From the arrival at the collective before to that at these, on the rank's own clock."""
        starts = self.ranks[column].collectives["start_ns"].to_numpy()
        places = self.places[rows, column]
        return starts[np.maximum(0, places - 1)], starts[places]

    def late_collectives(self, top: int) -> "tuple[LateCollective, ...]":
        """Return the collectives that kept the others waiting longest, the worst first. If a rank is late to several at
        once, that time counts for the first."""
        chosen = np.argsort(-self._alone_ns, kind="stable")[:top]
        first = float(np.nanmin(self.arrival_ns)) if len(chosen) else 0.0
        return tuple(self._tell_late(row, first) for row in chosen.tolist())

    def _tell_late(self, row: int, first_ns: float) -> "LateCollective":
        column = int(self.last[row])
        rank = self.ranks[column]
        assert rank.rank is not None, "ranks without a number are not matched"
        one = rank.collectives.row(int(self.places[row, column]), named=True)
        parts = self._reasons(np.array([row]), column)
        reason = max(parts, key=lambda name: (float(parts[name][0]), name))
        waited = self.waited_ns[row]
        others = [place for place in range(len(self.ranks)) if place != column and not np.isnan(waited[place])]
        return LateCollective(
            rank=rank.rank,
            late_ns=float(self._alone_ns[row]),
            waits={number: float(waited[place]) for place in others if (number := self.ranks[place].rank) is not None},
            reason=reason if float(parts[reason][0]) else None,
            moment_ns=float(self.arrival_ns[row, column]) - first_ns,
            **{name: one[name] for name in ("kind", "message_bytes", "bucket", "buckets", "step", "phase")},
        )


def _count_once(starts_ns: Floats, ends_ns: Floats) -> Floats:
    """Return the lengths of intervals, each without the time before the end of those that start earlier."""
    order = np.argsort(starts_ns, kind="stable")
    reached = np.maximum.accumulate(np.concatenate(([-np.inf], ends_ns[order])))[:-1]
    lengths = np.empty(len(order))
    lengths[order] = np.maximum(0.0, ends_ns[order] - np.maximum(starts_ns[order], reached))
    return lengths
