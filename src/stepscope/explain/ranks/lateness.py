"""Several ranks of one run: their collectives matched, their clocks aligned, and which rank the others wait for.

Each rank records on its own clock. A collective ends at about the same time on every rank, so the ends of matched
collectives align the clocks. Its start on a rank is when that rank arrives. The last rank to arrive makes the others
wait, from the arrival of the last but one on: before that, they would have waited anyway. So the rank to fix is the one
with the most such time, which usually has the *least* exposed communication, because it never waits.

Why a rank is late follows from its device since it arrived at the previous collective: if it computed longer than the
other ranks, it has more work; if it was idle, its CPU launched late, or waited for input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.explain.ranks.collectives import (
    SYNCHRONOUS,
    CoveredTime,
    Floats,
    Ints,
    computing,
    find_collectives,
    find_gloo,
)
from stepscope.explain.trace.profile import Profile

Reason = Literal["compute", "input", "CPU"]
INPUT_RANGES = r"(?i)enumerate\(DataLoader\)|\bdata ?load(?:er|ing)?\b|\bnext_batch\b|^phase:input$"
_MOST_SHIFTED = 2000  # collectives by which one recording may begin later than another
_ALIKE = 0.95  # of the collectives that two recordings share
_UNKNOWN = -1
_FEW_NS = 50_000  # within this, two ways to match are equally good
_NEVER = -1
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RankLateness:
    """How late one rank is. Times are over the `steps` in which its collectives were matched, which are fewer than it
    recorded if another trace is shorter. `late_ns` is how long all other ranks wait for this one alone, and `caused_ns`
    how long they have nothing else to do meanwhile, on average."""

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
    """The rank that the others wait for most; times over the whole recording. `reasons` says how much of `late_ns` it
    computed longer than the others, waited for input, or was idle otherwise."""

    lateness: RankLateness
    reasons: dict[Reason, float]
    share: float  # of all waiting for single ranks

    @property
    def reason(self) -> Reason:
        return max(self.reasons, key=lambda one: (self.reasons[one], one))


@dataclass(frozen=True, kw_only=True)
class _RankTrace:
    number: int
    profile: Profile

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Of the busiest device: a rank uses one."""
        kernels = self.profile.kernels
        busiest = kernels.group_by("process", "device").agg(pl.col("time_ns").sum())
        chosen = busiest.sort("time_ns", "process", "device", descending=[True, False, False]).head(1)
        return kernels.join(chosen.select("process", "device"), on=["process", "device"], how="semi", nulls_equal=True)

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """Those that no rank can end before all have begun. Without a known group, all are in one."""
        found = find_gloo(self.profile) if self.profile.on_cpu else find_collectives(self.profile, self.kernels)
        found = found.filter(pl.col("kind").is_in(SYNCHRONOUS))
        groups = found["process_group"].drop_nulls().unique().to_list()
        only = groups[0] if len(groups) == 1 else None if groups else ""
        return (
            found.with_columns(group=pl.col("process_group").fill_null(pl.lit(only, pl.String)))
            .filter(pl.col("group").is_not_null())
            .with_row_index("place")
        )

    @property
    def origin_ns(self) -> int:
        """A moment near the recording: nanoseconds since the epoch do not fit a double."""
        return self.profile.window[0]

    @cached_property
    def compute(self) -> CoveredTime:
        return computing(self.kernels)

    @cached_property
    def busy(self) -> CoveredTime:
        return CoveredTime(self.kernels)

    @cached_property
    def input(self) -> CoveredTime:
        return CoveredTime(self.profile.recording.ranges.filter(pl.col("name").str.contains(INPUT_RANGES)))


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Matched collectives, one row each, with one column per rank: when it arrived, on a common clock (NaN if it
    took no part), and the collective's place among those of the rank (`_NEVER`)."""

    ranks: tuple[_RankTrace, ...]
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
            ours = self.places[:, column] != _NEVER
            result[ours, column] = _count_once(self.arrival_ns[ours, column], ends[ours, column])
        return result

    @cached_property
    def _waiting_ns(self) -> Floats:
        """How long each rank other than the last had nothing to do but wait for the last one alone."""
        arrived = np.nanmax(self.arrival_ns, axis=1)
        waits = np.full(self.arrival_ns.shape, np.nan)
        for column, rank in enumerate(self.ranks):
            ours = (self.places[:, column] != _NEVER) & (self.last != column)
            ends = self._own_clock(arrived[ours], column)
            starts = self._own_clock((arrived - self._alone_ns)[ours], column)
            waits[ours, column] = (ends - starts) - rank.compute.between(starts, ends)
        return waits

    def exposed_wait_ns(self, profile: Profile) -> float:
        """Return how long a rank had nothing to do but wait for any later rank, per step."""
        column = next(place for place, rank in enumerate(self.ranks) if rank.profile is profile)
        ours = self.places[:, column] != _NEVER
        arrived = np.minimum(np.nanmax(self.arrival_ns, axis=1), (self.arrival_ns + self.duration_ns)[:, column])
        starts = self._own_clock((arrived - self.waited_ns[:, column])[ours], column)
        ends = self._own_clock(arrived[ours], column)
        waits = (ends - starts) - self.ranks[column].compute.between(starts, ends)
        return self.lateness[column].per_step(float(waits.sum()))

    def _own_clock(self, moments_ns: Floats, column: int) -> Ints:
        return np.round(moments_ns + self.offsets_ns[column]).astype(np.int64) + self.ranks[column].origin_ns

    @cached_property
    def lateness(self) -> tuple[RankLateness, ...]:
        """One per rank, in order."""
        together = np.nansum(np.nan_to_num(self._waiting_ns), axis=1) / np.maximum(
            1, (~np.isnan(self._waiting_ns)).sum(axis=1)
        )
        made = []
        for column, rank in enumerate(self.ranks):
            came_last = self.last == column
            made.append(
                RankLateness(
                    rank=rank.number,
                    collectives=int((self.places[:, column] != _NEVER).sum()),
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
        matched = rank.collectives["step"].gather(places[places != _NEVER])
        share = matched.n_unique() / max(1, rank.collectives["step"].n_unique())
        return rank.profile.clock.num_steps * share

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for most, None if no rank is ever late."""
        worst = max(self.lateness, key=lambda one: (one.late_ns, -one.rank), default=None)
        if worst is None or worst.late_ns <= 0:
            return None
        total = sum(one.late_ns for one in self.lateness)
        column = self.lateness.index(worst)
        return Straggler(lateness=worst, reasons=self._reasons(column), share=worst.late_ns / total)

    def _reasons(self, column: int) -> dict[Reason, float]:
        rows = np.flatnonzero(self.last == column)
        margin, rank = self._alone_ns[rows], self.ranks[column]
        since, until = self._since_previous(rows, column)
        computed = rank.compute.between(since, until)
        others = np.full((len(rows), len(self.ranks)), np.nan)
        for other in range(len(self.ranks)):
            ours = self.places[rows, other] != _NEVER
            if other != column:
                others[ours, other] = self.ranks[other].compute.between(*self._since_previous(rows[ours], other))
        usual = np.nanmedian(others, axis=1) if len(rows) else np.empty(0)
        more = np.clip(computed - usual, 0.0, margin)
        idle = np.clip((until - since) - rank.busy.between(since, until), 0.0, margin - more)
        loading = np.minimum(rank.input.between(since, until), idle)
        reasons: dict[Reason, float] = {
            "compute": float(more.sum()),
            "input": float(loading.sum()),
            "CPU": float((idle - loading).sum()),
        }
        # What is left was late before: the others went on computing meanwhile, and this rank does so now.
        explained = sum(reasons.values())
        if not explained:
            return {**reasons, "CPU": float(margin.sum())}
        return {name: part * float(margin.sum()) / explained for name, part in reasons.items()}

    def _since_previous(self, rows: Ints, column: int) -> tuple[Ints, Ints]:
        """From the arrival at the collective before to that at these, on the rank's own clock."""
        starts = self.ranks[column].collectives["start_ns"].to_numpy()
        places = self.places[rows, column]
        return starts[np.maximum(0, places - 1)], starts[places]

    def late_collectives(self, top: int) -> pl.DataFrame:
        """Return the collectives that kept the others waiting longest: rank, late_ns, kind, message_bytes, step, phase
        and moment_ns since the first collective."""
        chosen = np.argsort(-self.margin_ns, kind="stable")[:top]
        first = float(np.nanmin(self.arrival_ns)) if len(chosen) else 0.0
        rows = []
        for row in chosen.tolist():
            column = int(self.last[row])
            one = self.ranks[column].collectives.row(int(self.places[row, column]), named=True)
            told = {name: one[name] for name in ("kind", "message_bytes", "step", "phase")}
            moment = float(self.arrival_ns[row, column]) - first
            rows.append(
                {"rank": self.ranks[column].number, "late_ns": float(self.margin_ns[row]), **told, "moment_ns": moment}
            )
        schema = {
            "rank": pl.Int64,
            "late_ns": pl.Float64,
            "kind": pl.String,
            "message_bytes": pl.Int64,
            "step": pl.Int64,
            "phase": pl.String,
            "moment_ns": pl.Float64,
        }
        return pl.DataFrame(rows, schema=schema)


def _count_once(starts_ns: Floats, ends_ns: Floats) -> Floats:
    """Return the lengths of intervals, each without the time before the end of those that start earlier."""
    order = np.argsort(starts_ns, kind="stable")
    reached = np.maximum.accumulate(np.concatenate(([-np.inf], ends_ns[order])))[:-1]
    lengths = np.empty(len(order))
    lengths[order] = np.maximum(0.0, ends_ns[order] - np.maximum(starts_ns[order], reached))
    return lengths


def rank_numbers(profiles: Sequence[Profile]) -> tuple[int, ...] | None:
    """Return the rank of each profile, None if one has no rank or two have the same."""
    ranks = [profile.recording.manifest.rank for profile in profiles]
    known = [rank for rank in ranks if rank is not None]
    return tuple(known) if len(set(known)) == len(ranks) else None


def match_ranks(profiles: Sequence[Profile]) -> RankTimes | None:
    """Return the collectives that the ranks have in common. None if there are none, or if these are not the ranks of
    one run: steps of two runs have the same collectives as well."""
    numbers = rank_numbers(profiles)
    if numbers is None or len({profile.recording.manifest.world_size for profile in profiles}) > 1:
        return None
    ranks = tuple(_RankTrace(number=number, profile=one) for number, one in zip(numbers, profiles, strict=True))
    groups = sorted({group for rank in ranks for group in rank.collectives["group"].unique().to_list()})
    places = np.concatenate([np.empty((0, len(ranks)), np.int64), *(_match_group(ranks, group) for group in groups)])
    starts, ends = (_look_up_times(ranks, places, name) for name in ("start_ns", "end_ns"))
    offsets = _align(ends)
    aligned = ~np.isnan(offsets)
    arrival = np.where(aligned, starts - np.nan_to_num(offsets), np.nan)
    shared = (~np.isnan(arrival)).sum(axis=1) >= 2
    if not shared.any():
        return None
    return RankTimes(
        ranks=ranks,
        offsets_ns=tuple(np.nan_to_num(offsets).tolist()),
        arrival_ns=arrival[shared],
        duration_ns=(ends - starts)[shared],
        places=np.where(aligned, places, _NEVER)[shared],
    )


def _match_group(ranks: Sequence[_RankTrace], group: str) -> Ints:
    """Return the places of the collectives of a process group, one column per rank."""
    frames = [rank.collectives.filter(pl.col("group") == group) for rank in ranks]
    base = max(range(len(frames)), key=lambda column: (frames[column].height, -column))
    places = np.full((frames[base].height, len(ranks)), _NEVER, np.int64)
    places[:, base] = frames[base]["place"].to_numpy()
    for column, frame in enumerate(frames):
        if column == base or not frame.height:
            continue
        shift = _find_shift(_Sequence(frames[base]), _Sequence(frame))
        if shift is not None:
            ours, theirs, equal = _overlap(_Sequence(frames[base]), _Sequence(frame), shift)
            places[ours, column] = np.where(equal, frame["place"].to_numpy()[theirs], _NEVER)
    return places


class _Sequence:
    """The collectives of one rank in one group, as arrays."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.names = frame.select(pl.concat_str("kind", "name").hash()).to_series().to_numpy()
        self.bytes = frame["message_bytes"].fill_null(_UNKNOWN).to_numpy()
        self.steps = frame["step"].cast(pl.Int64).fill_null(_UNKNOWN).to_numpy()
        self.ends = frame["end_ns"].to_numpy()


def _overlap(a: _Sequence, b: _Sequence, shift: int) -> tuple[slice, slice, Bools]:
    """Return the parts of both that overlap if `a` begins `shift` collectives earlier, and which of them agree. A
    message of unknown size agrees with any."""
    length = min(len(a.ends) - max(0, shift), len(b.ends) - max(0, -shift))
    ours, theirs = slice(max(0, shift), max(0, shift) + length), slice(max(0, -shift), max(0, -shift) + length)
    x, y = a.bytes[ours], b.bytes[theirs]
    return ours, theirs, (a.names[ours] == b.names[theirs]) & ((x == y) | (x == _UNKNOWN) | (y == _UNKNOWN))


def _find_shift(a: _Sequence, b: _Sequence) -> int | None:
    """Return by how many collectives `a` begins earlier than `b`; None if they never agree. Steps repeat, so many
    shifts agree: the right one has the same step numbers, and ends that differ by a constant."""
    possible = []
    least = (min(len(a.ends), len(b.ends)) + 1) // 2
    for shift in range(max(least - len(b.ends), -_MOST_SHIFTED), min(len(a.ends) - least, _MOST_SHIFTED) + 1):
        ours, theirs, equal = _overlap(a, b, shift)
        if equal.mean() < _ALIKE:
            continue
        apart = b.ends[theirs] - a.ends[ours]
        offset = int(np.median(apart))
        both = (a.steps[ours] != _UNKNOWN) & (b.steps[theirs] != _UNKNOWN)
        other_step = float((a.steps[ours] != b.steps[theirs])[both].mean()) if both.any() else 0.0
        possible.append((float(np.median(np.abs(apart - offset))), round(other_step, 1), abs(offset), shift))
    if not possible:
        return None
    closest = min(possible)[0]
    good = [one for one in possible if one[0] <= 2 * closest + _FEW_NS]
    return min(good, key=lambda one: (one[1], one[0], one[2], one[3]))[3]


def _look_up_times(ranks: Sequence[_RankTrace], places: Ints, name: str) -> Floats:
    """Return times since each rank's own origin; NaN for ranks that took no part."""
    times = np.full(places.shape, np.nan)
    for column, rank in enumerate(ranks):
        ours = places[:, column] != _NEVER
        times[ours, column] = rank.collectives[name].to_numpy()[places[ours, column]] - rank.origin_ns
    return times


def _align(ends_ns: Floats) -> Floats:
    """Return by how much each rank's clock is ahead of that of the rank with the most matches. Ranks that share no
    collective are compared through other ranks; NaN if that is impossible."""
    offsets = np.full(ends_ns.shape[1], np.nan)
    known = ~np.isnan(ends_ns)
    offsets[int(known.sum(axis=0).argmax())] = 0.0
    while True:
        done = ~np.isnan(offsets)
        common = known.T.astype(np.int64) @ known.astype(np.int64)
        common[~done, :] = 0
        common[:, done] = 0
        if not common.any():
            return offsets
        near, far = np.unravel_index(int(common.argmax()), common.shape)
        both = known[:, near] & known[:, far]
        offsets[far] = offsets[near] + np.median(ends_ns[both, far] - ends_ns[both, near])
