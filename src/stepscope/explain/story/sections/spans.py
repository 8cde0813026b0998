"""Spans of time on one track, as arrays, and how to merge them until there are few enough to draw.

A page can hold about ten thousand spans, but a step may have a million kernels. Kernels too short to see are merged:
time is cut into cells, and neighbors that start in the same cell and are shorter than it become one block. A block
starts with its first kernel and is as long as all its kernels together, so the blocks add up to the busy time to the
nanosecond and nothing moves by more than a cell. A block has a name if all its kernels share it, and otherwise only the
group that takes most of its time.

Tried and lost: blocks from the start of the first kernel to the end of the last. A launch-bound step that was idle half
of the time became a solid bar.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NONE = -1  # no name or group
_ROUNDS = 6  # of bisection for the shortest cell that is long enough


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Spans in order, without overlap. `names`, `groups` and `origins` are the caller's numbers; in `names` and
    `origins`, NONE marks a block with several."""

    starts: Ints
    lengths: Ints
    names: Ints
    groups: Ints
    counts: Ints
    origins: Ints

    def __len__(self) -> int:
        return len(self.starts)


def lay_out(starts: Ints, ends: Ints, names: Ints, groups: Ints, origins: Ints) -> tuple[Stretches, int]:
    """Lay out the kernels of one stream, sorted by start. A kernel that overlaps the previous one starts at its end;
    one that lies inside others is left out. Return the spans and the number left out."""
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    begins = starts.copy()
    begins[1:] = np.maximum(starts[1:], ends[:-1])
    # A kernel without duration is kept as a mark unless it lies inside another.
    hidden = (begins >= ends) & (begins > starts)
    kept = ~hidden
    laid = Stretches(
        starts=begins[kept],
        lengths=(ends - begins)[kept],
        names=names[kept],
        groups=groups[kept],
        counts=np.ones(int(kept.sum()), np.int64),
        origins=origins[kept],
    )
    return laid, int(hidden.sum())


def join_runs(starts: Ints, ends: Ints, names: Ints, groups: Ints) -> Stretches:
    """Merge neighbors with the same name, from the start of the first to the end of the last. Spans without a name are
    left out, and separate their neighbors."""
    if not len(starts):
        return Stretches(starts=starts, lengths=starts, names=names, groups=groups, counts=starts, origins=starts)
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
        origins=np.full(int(kept.sum()), NONE),
    )


def fit(tracks: Sequence[Stretches], most: int) -> tuple[list[Stretches], int]:
    """Return the tracks with at most `most` spans in total (at least one each) and the cell length, 0 if nothing was
    merged."""
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

    def shared(numbers: Ints) -> Ints:
        same = np.minimum.reduceat(numbers, first) == np.maximum.reduceat(numbers, first)
        return np.where(same, numbers[first], NONE)

    return Stretches(
        starts=track.starts[first],
        lengths=np.add.reduceat(track.lengths, first),
        names=shared(track.names),
        groups=_longest_groups(track, block, len(first)),
        counts=np.add.reduceat(track.counts, first),
        origins=shared(track.origins),
    )


def _longest_groups(track: Stretches, block: Ints, num_blocks: int) -> Ints:
    """The group that takes most of each block's time; on ties the smallest number."""
    lowest = int(track.groups.min())
    num_groups = int(track.groups.max()) - lowest + 1
    # One nanosecond more each, so that a block of marks without duration has a group.
    time = np.bincount(
        block * num_groups + (track.groups - lowest), weights=track.lengths + 1, minlength=num_blocks * num_groups
    )
    return np.asarray(time.reshape(num_blocks, num_groups).argmax(axis=1) + lowest, np.int64)
