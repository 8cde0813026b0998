"""The innermost interval around a moment, compared with a search over all intervals."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from stepscope.recording.nesting import NOWHERE, enclosing, innermost


@st.composite
def nested_calls(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Calls of one thread: nested, or one after the other."""
    calls: list[tuple[int, int]] = []

    def call(start: int, end: int, depth: int) -> None:
        calls.append((start, end))
        moment = start
        while depth and draw(st.booleans()):
            begin = draw(st.integers(moment, end))
            stop = draw(st.integers(begin, end))
            call(begin, stop, depth - 1)
            moment = stop

    call(0, 100, 4)
    return draw(st.permutations(calls))


def look_at_all(calls: list[tuple[int, int]], moment: int) -> set[tuple[int, int]]:
    around = [(end - start, start, end) for start, end in calls if start <= moment < end]
    return {(start, end) for length, start, end in around if length == min(around)[0]}


@given(nested_calls(), st.lists(st.integers(-5, 105), max_size=30))
def test_the_innermost_call_is_found(calls: list[tuple[int, int]], moments: list[int]) -> None:
    starts, ends = (np.array(side, dtype=np.int64) for side in zip(*calls, strict=True))
    found = enclosing(starts, ends, np.array(moments, dtype=np.int64))
    for moment, row in zip(moments, found, strict=True):
        expected = look_at_all(calls, moment)
        assert (not expected) if row == NOWHERE else (calls[row] in expected)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12), st.integers(0, 110))
def test_crossing_intervals_give_an_open_one(pairs: list[tuple[int, int]], moment: int) -> None:
    """Clocks of two sources can cross by nanoseconds; the result is never an interval that has ended."""
    calls = [(start, start + length) for start, length in pairs]
    starts, ends = (np.array(side, dtype=np.int64) for side in zip(*calls, strict=True))
    row = enclosing(starts, ends, np.array([moment]))[0]
    is_open = [index for index, (start, end) in enumerate(calls) if start <= moment < end]
    assert (row in is_open) if is_open else row == NOWHERE


def test_threads_and_processes_are_separate() -> None:
    intervals = pl.DataFrame({"process": [1, 1, 2], "thread": [7, 8, 7], "start_ns": [0, 0, 0], "end_ns": [9, 5, 9]})
    points = pl.DataFrame({"process": [1, 1, 2, 2, 1], "thread": [7, 8, 7, 8, 7], "ns": [4, 4, 4, 4, None]})
    assert innermost(intervals, points).to_list() == [0, 1, 2, None, None]
    assert innermost(intervals, points, by_thread=False).to_list() == [1, 1, 2, 2, None]
