"""Stretches of time on one track, as arrays, and how too many of them become few enough to draw.

A page can hold some ten thousand stretches, and a step may have a million kernels. Those too short to be seen are put
together: time is cut into cells, and neighbours that begin in one cell, all of them shorter than a cell, are drawn as
one block. The block is as long as its kernels together, from where the first begins, so that what is drawn adds up to
the time that was busy, to the nanosecond, and nothing is further than a cell from where it was. A block has one name
where all its members have that name, and otherwise only says what most of its time was.

Tried and lost: blocks from the first kernel's beginning to the last one's end. A step of launch-bound kernels, idle for
half its time, was drawn as a solid bar.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NONE = -1  # a name or group that does not exist
_ROUNDS = 6  # of looking for the shortest cell that is long enough


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """In order, without overlap. `names` and `groups` are numbers of the maker's own; in `names`, NONE stands for a
    block of several names."""

    starts: Ints
    lengths: Ints
    names: Ints
    groups: Ints
    counts: Ints

    def __len__(self) -> int:
        return len(self.starts)


def lay_out(starts: Ints, ends: Ints, names: Ints, groups: Ints) -> tuple[Stretches, int]:
    """Kernels of one stream, sorted by their beginning. Where one begins before the one before it has ended, it is
    drawn from there; one that lies inside of others is not drawn. Also says how many those are."""
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    begins = starts.copy()
    begins[1:] = np.maximum(starts[1:], ends[:-1])
    # One without length is a mark of its own, unless it lies inside of another.
    hidden = (begins >= ends) & (begins > starts)
    kept = ~hidden
    laid = Stretches(
        starts=begins[kept],
        lengths=(ends - begins)[kept],
        names=names[kept],
        groups=groups[kept],
        counts=np.ones(int(kept.sum()), np.int64),
    )
    return laid, int(hidden.sum())


def join_runs(starts: Ints, ends: Ints, names: Ints, groups: Ints) -> Stretches:
    """Neighbours of one name as one, from the first one's beginning to the last one's end. What has no name is left
    out, and parts what is on its two sides."""
    if not len(starts):
        return Stretches(starts=starts, lengths=starts, names=names, groups=groups, counts=starts)
    ends = np.maximum.accumulate(ends)
    first = np.flatnonzero(np.concatenate(([True], names[1:] != names[:-1])))
    last = np.append(first[1:], len(names)) - 1
    begins = starts[first]
    begins[1:] = np.maximum(begins[1:], ends[last[:-1]])
    lengths = np.maximum(ends[last] - begins, 0)
    kept = names[first] != NONE
    return Stretches(
        starts=begins[kept],
        lengths=lengths[kept],
        names=names[first][kept],
        groups=groups[first][kept],
        counts=(last - first + 1)[kept],
    )


def fit(tracks: Sequence[Stretches], most: int) -> tuple[list[Stretches], int]:
    """The tracks with at most `most` stretches in all (one each is always left), and the length of a cell: 0 where
    nothing had to be put together."""
    if sum(map(len, tracks)) <= most:
        return list(tracks), 0
    cell = _find_cell(tracks, most)
    return [_merge(track, cell) for track in tracks], cell


def _find_cell(tracks: Sequence[Stretches], most: int) -> int:
    end = max(int(track.starts[-1] + track.lengths[-1]) for track in tracks if len(track)) + 1
    low, high = 0, 1
    while high < end and _count_blocks(tracks, high) > most:
        low, high = high, high * 2
    for _ in range(_ROUNDS):
        middle = (low + high) // 2
        if low < middle < high:
            low, high = (middle, high) if _count_blocks(tracks, middle) > most else (low, middle)
    return high


def _count_blocks(tracks: Sequence[Stretches], cell: int) -> int:
    return sum(int(_begins_block(track, cell).sum()) for track in tracks)


def _begins_block(track: Stretches, cell: int) -> NDArray[np.bool_]:
    if not len(track):
        return np.empty(0, bool)
    place, long = track.starts // cell, track.lengths >= cell
    return np.concatenate(([True], (place[1:] != place[:-1]) | long[1:] | long[:-1]))


def _merge(track: Stretches, cell: int) -> Stretches:
    if not len(track):
        return track
    begins = _begins_block(track, cell)
    first = np.flatnonzero(begins)
    block = np.cumsum(begins) - 1
    same = np.minimum.reduceat(track.names, first) == np.maximum.reduceat(track.names, first)
    return Stretches(
        starts=track.starts[first],
        lengths=np.add.reduceat(track.lengths, first),
        names=np.where(same, track.names[first], NONE),
        groups=_longest_groups(track, block, len(first)),
        counts=np.add.reduceat(track.counts, first),
    )


def _longest_groups(track: Stretches, block: Ints, num_blocks: int) -> Ints:
    """The group of most of each block's time; the smallest number where several have the same."""
    lowest = int(track.groups.min())
    num_groups = int(track.groups.max()) - lowest + 1
    # One more each, so that a block of marks without length has the group of one of them.
    time = np.bincount(
        block * num_groups + (track.groups - lowest), weights=track.lengths + 1, minlength=num_blocks * num_groups
    )
    return np.asarray(time.reshape(num_blocks, num_groups).argmax(axis=1) + lowest, np.int64)
