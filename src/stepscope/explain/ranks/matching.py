"""The collectives of several ranks matched with each other, and the ranks' clocks aligned by their ends.

Collectives are matched by process group, order, kind and size. Steps repeat, so two recordings that begin at different
times agree in many ways: the right one has the same step numbers, and ends that differ by a constant.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.collectives import Bools, Floats, Ints
from stepscope.explain.ranks.lateness import NEVER, RankTimes

_MOST_SHIFTED = 2000  # collectives by which one recording may begin later than another
_ALIKE = 0.95  # of the collectives that two recordings share
_UNKNOWN = -1
_FEW_NS = 50_000  # within this, two ways to match are equally good
_SAME_STEP = 0.25  # of a step: the same for ways that match steps of the same number


def rank_numbers(ranks: Sequence[RankActivity]) -> tuple[int, ...] | None:
    """Return the number of each rank, None if one has no number or two have the same."""
    known = [one.rank for one in ranks if one.rank is not None]
    return tuple(known) if len(set(known)) == len(ranks) else None


def match_ranks(ranks: Sequence[RankActivity]) -> RankTimes | None:
    """Return the collectives that the ranks have in common. None if there are none, or if these are not the ranks of
    one run: steps of two runs have the same collectives as well."""
    if rank_numbers(ranks) is None or len({one.manifest.world_size for one in ranks}) > 1:
        return None
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
        ranks=tuple(ranks),
        offsets_ns=tuple(np.nan_to_num(offsets).tolist()),
        arrival_ns=arrival[shared],
        duration_ns=(ends - starts)[shared],
        places=np.where(aligned, places, NEVER)[shared],
    )


def _match_group(ranks: Sequence[RankActivity], group: str) -> Ints:
    """Return the places of the collectives of a process group, one column per rank."""
    frames = [rank.collectives.filter(pl.col("group") == group) for rank in ranks]
    base = max(range(len(frames)), key=lambda column: (frames[column].height, -column))
    places = np.full((frames[base].height, len(ranks)), NEVER, np.int64)
    places[:, base] = frames[base]["place"].to_numpy()
    longest = _Sequence(frames[base])
    for column, frame in enumerate(frames):
        if column == base or not frame.height:
            continue
        other = _Sequence(frame)
        shift = _find_shift(longest, other)
        if shift is not None:
            ours, theirs, equal = _overlap(longest, other, shift)
            places[ours, column] = np.where(equal, frame["place"].to_numpy()[theirs], NEVER)
    return places


class _Sequence:
    """The collectives of one rank in one group, as arrays."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.names = frame.select(pl.concat_str("kind", "name").hash()).to_series().to_numpy()
        self.bytes = frame["message_bytes"].fill_null(_UNKNOWN).to_numpy()
        self.steps = frame["step"].cast(pl.Int64).fill_null(_UNKNOWN).to_numpy()
        self.ends = frame["end_ns"].to_numpy()
        steps = len(np.unique(self.steps))
        self.step_ns = float(self.ends[-1] - self.ends[0]) / steps if len(self.ends) else 0.0


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
    # On a busy CPU, the ends of a collective are milliseconds apart: where step numbers agree, that does not matter.
    good = [one for one in possible if one[0] <= 2 * closest + (_FEW_NS if one[1] else _SAME_STEP * a.step_ns)]
    return min(good, key=lambda one: (one[1], one[0], one[2], one[3]))[3]


def _look_up_times(ranks: Sequence[RankActivity], places: Ints, name: str) -> Floats:
    """Return times since each rank's own origin; NaN for ranks that took no part."""
    times = np.full(places.shape, np.nan)
    for column, rank in enumerate(ranks):
        ours = places[:, column] != NEVER
        times[ours, column] = rank.collectives[name].to_numpy()[places[ours, column]] - rank.origin_ns
    return times


def _align(ends_ns: Floats) -> Floats:
    """Return by how much each rank's clock is ahead of that of the rank with the most matches. Ranks that share no
    collective are compared through other ranks; NaN if that is impossible."""
    offsets = np.full(ends_ns.shape[1], np.nan)
    known = ~np.isnan(ends_ns)
    offsets[int(known.sum(axis=0).argmax())] = 0.0
    # In double precision, which is exact here: a product of integers does not use the fast library.
    in_common = known.T.astype(np.float64) @ known.astype(np.float64)
    while True:
        done = ~np.isnan(offsets)
        common = np.where(done[:, None] & ~done, in_common, 0.0)
        if not common.any():
            return offsets
        near, far = np.unravel_index(int(common.argmax()), common.shape)
        both = known[:, near] & known[:, far]
        offsets[far] = offsets[near] + np.median(ends_ns[both, far] - ends_ns[both, near])
