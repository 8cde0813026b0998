"""Merging spans: nothing overlaps, no time is lost, and no span gets a wrong name."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.explain.story.sections.spans import NONE, Stretches, fit, join_runs, lay_out

KERNELS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=60
)


def laid_out(kernels: list[tuple[int, int, int, int]]) -> Stretches:
    """The gap before each span, its length, name and group, in order."""
    gaps, lengths, names, groups = (np.array(column, np.int64) for column in zip(*kernels, strict=True))
    ends = np.cumsum(gaps + lengths)
    laid, hidden = lay_out(ends - lengths, ends, names, groups, names)
    assert hidden == 0
    return laid


def assert_in_order(track: Stretches) -> None:
    assert (track.lengths >= 0).all()
    assert (track.starts[1:] >= (track.starts + track.lengths)[:-1]).all()


@given(kernels=KERNELS, most=st.integers(1, 40))
def test_blocks_keep_time_and_count(kernels: list[tuple[int, int, int, int]], most: int) -> None:
    track = laid_out(kernels)
    (merged,), cell = fit([track], most)
    assert len(merged) <= most
    assert merged.lengths.sum() == track.lengths.sum()
    assert merged.counts.sum() == len(kernels)
    assert (merged.origins == merged.names).all()  # the same numbers, merged by the same rule
    assert (cell == 0) == (len(track) <= most)
    assert_in_order(merged)


@given(kernels=KERNELS, most=st.integers(1, 40))
def test_blocks_are_named_after_their_members(kernels: list[tuple[int, int, int, int]], most: int) -> None:
    track = laid_out(kernels)
    (merged,), cell = fit([track], most)
    first = 0
    for start, length, name, group, count in zip(
        merged.starts, merged.lengths, merged.names, merged.groups, merged.counts, strict=True
    ):
        members = slice(first, first + count)
        first += count
        names = set(track.names[members].tolist())
        assert name == (names.pop() if len(names) == 1 else NONE)
        times = {g: int(track.lengths[members][track.groups[members] == g].sum()) for g in track.groups[members]}
        assert group in times
        assert start == track.starts[members][0]
        if count > 1:
            assert (track.lengths[members] < cell).all()
            assert (track.starts[members] // cell == start // cell).all(), "nothing is moved by more than a cell"
            most_time = max(times.values())
            # Every member counts one more, so that marks without duration have a group too.
            assert times[group] >= most_time - count
        else:
            assert length == track.lengths[members][0]


def test_group_takes_most_of_the_time() -> None:
    track = laid_out([(0, 5, 0, 0), (0, 5, 1, 0), (0, 500, 2, 1)])
    (merged,), _ = fit([track], 1)
    assert merged.groups.tolist() == [1]


def test_marks_without_duration_have_a_group() -> None:
    track = laid_out([(10, 0, 0, 1), (1, 0, 1, 1), (1, 0, 1, 1), (200, 300, 2, 0)])
    (merged,), _ = fit([track], 2)
    assert merged.groups.tolist() == [1, 0]
    assert merged.counts.tolist() == [3, 1]


@given(tracks=st.lists(KERNELS, min_size=1, max_size=4), room=st.integers(0, 30))
def test_limit_applies_to_all_tracks_together(tracks: list[list[tuple[int, int, int, int]]], room: int) -> None:
    laid = [laid_out(kernels) for kernels in tracks]
    merged, _ = fit(laid, len(tracks) + room)
    assert sum(map(len, merged)) <= len(tracks) + room
    for before, after in zip(laid, merged, strict=True):
        assert before.lengths.sum() == after.lengths.sum()


def test_long_kernel_is_unchanged() -> None:
    track = laid_out([(1, 1, 0, 0)] * 50 + [(10, 1000, 1, 1)] + [(1, 1, 0, 0)] * 50)
    (merged,), _ = fit([track], 12)
    place = merged.starts.tolist().index(110)
    assert (merged.lengths[place], merged.names[place], merged.counts[place]) == (1000, 1, 1)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50), st.integers(-1, 2)), min_size=1, max_size=40),
)
def test_overlapping_kernels_are_clipped_and_cover_the_same_time(kernels: list[tuple[int, int, int]]) -> None:
    kernels.sort()
    starts, lengths, names = (np.array(column, np.int64) for column in zip(*kernels, strict=True))
    covered = np.zeros(200, bool)
    for start, length in zip(starts, lengths, strict=True):
        covered[start : start + length] = True
    laid, hidden = lay_out(starts, starts + lengths, names, names, names)
    assert len(laid) + hidden == len(kernels)
    assert laid.lengths.sum() == covered.sum()
    assert_in_order(laid)
    assert_in_order(join_runs(starts, starts + lengths, names, names))


@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(1, 9), st.integers(-1, 2)), min_size=1, max_size=40),
)
def test_merged_run_covers_only_its_own_kernels(kernels: list[tuple[int, int, int]]) -> None:
    gaps, lengths, names = (np.array(column, np.int64) for column in zip(*kernels, strict=True))
    ends = np.cumsum(gaps + lengths)
    runs = join_runs(ends - lengths, ends, names, names)
    assert_in_order(runs)
    assert runs.counts.sum() == (names != NONE).sum()
    assert not (runs.names == NONE).any()
    for start, end, name in zip(ends - lengths, ends, names, strict=True):
        over = (runs.starts < end) & (runs.starts + runs.lengths > start)
        assert over.sum() == (name != NONE), "a kernel lies in one run, and without a name in none"
        assert (runs.names[over] == name).all()
        assert (runs.starts[over] <= start).all()
        assert (runs.starts + runs.lengths >= end)[over].all()
