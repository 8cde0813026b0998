"""One step of several ranks on one clock."""

import pytest

from stepscope.explain.ranks.lateness import RankTimes
from stepscope.explain.ranks.matching import match_ranks
from stepscope.explain.ranks.rank_tables import label_ranks
from stepscope.explain.story.run import tell
from stepscope.explain.story.sections.lanes import draw_step
from stepscope.explain.story.sections.rank_lanes import MOST_RANKS, choose_ranks, draw_ranks
from stepscope.explain.story.sources import Materials
from stepscope.findings import Bars, Lanes, Table
from tests.unit.rank_recordings import Rank, record_ranks, reduce_ranks

STEADY = [100.0] * 8


def match(ranks: list[Rank]) -> RankTimes:
    times = match_ranks(reduce_ranks(record_ranks(ranks)))
    assert times is not None
    return times


def draw(ranks: list[Rank]) -> Lanes:
    times = match(ranks)
    lanes = draw_ranks(times, label_ranks(times.ranks), 0)
    assert lanes is not None
    return lanes


def spans_of(lanes: Lanes, label: str) -> list[tuple[str, float, float]]:
    """Name, start and length in microseconds."""
    (track,) = (one for one in lanes.tracks if one.label == label)
    spans = track.spans
    return [
        (lanes.names[name], start / 1000, length / 1000)
        for name, start, length in zip(spans.names, spans.starts_ns, spans.lengths_ns, strict=True)
    ]


def test_ranks_with_different_clocks_are_on_one() -> None:
    late = [302.0, 2.0, 2.0, 2.0] * 2
    lanes = draw([Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=late, skew_us=5e6)])
    assert [track.label for track in lanes.tracks] == ["rank 0", "rank 1"]
    assert lanes.span_ns == pytest.approx((300 + 4 * 152) * 1000)
    first, second = (spans_of(lanes, label) for label in ("rank 0", "rank 1"))
    assert [name for name, *_ in first[:3]] == ["other", "waits for rank 1", "communication"]
    assert [times for _, *times in first[:3]] == [pytest.approx(one) for one in ([2, 100], [102, 300], [402, 50])]
    # Idle before it computes: nothing is drawn.
    assert [name for name, *_ in second[:2]] == ["other", "communication"]
    assert [times for _, *times in second[:2]] == [pytest.approx(one) for one in ([302, 100], [402, 50])]


def test_input_and_host_ranges_show_where_nothing_runs() -> None:
    late = [302.0] * 8
    for rank, name in (
        (Rank(compute_us=STEADY, idle_us=late, is_loading=True), "input"),
        (Rank(compute_us=STEADY, idle_us=late, host="phase:checkpoint"), "checkpoint"),
    ):
        spans = spans_of(draw([Rank(compute_us=STEADY), rank]), "rank 1")
        assert spans[0][0] == name
        assert spans[0][1] == pytest.approx(0, abs=2)
        assert spans[0][2] >= 299  # a kernel launched inside a loader's range is input as well


def test_spans_of_a_rank_do_not_overlap() -> None:
    lanes = draw([Rank(compute_us=STEADY), Rank(compute_us=[150.0] * 8, skew_us=3e5)])
    for track in lanes.tracks:
        ends = [start + length for start, length in zip(track.spans.starts_ns, track.spans.lengths_ns, strict=True)]
        assert all(end <= start for end, start in zip(ends, track.spans.starts_ns[1:], strict=False))
        assert ends[-1] <= lanes.span_ns


def test_of_many_ranks_the_telling_ones_are_drawn() -> None:
    ranks = [Rank(compute_us=[100.0 + 0.1 * number] * 8) for number in range(40)]
    ranks[17] = Rank(compute_us=STEADY, idle_us=[302.0] * 8)
    ranks[29] = Rank(compute_us=[50.0] * 8)
    times = match(ranks)
    chosen = choose_ranks(times.ranks, times, 5)
    assert len(chosen) == MOST_RANKS
    assert chosen == sorted(set(chosen))
    assert {5, 17, 29} <= set(chosen)
    # Late to two collectives each, and otherwise like the others.
    for number, place in ((29, 2), (17, 0), (22, 1)):
        idle = [700.0 - 100 * place if at % 4 == place else 2.0 for at in range(8)]
        ranks[number] = Rank(compute_us=STEADY, idle_us=[2 * us if number == 29 else us for us in idle])
    times = match(ranks)
    assert {17, 22, 29} <= set(choose_ranks(times.ranks, times, 5))
    profiles = record_ranks(ranks)
    report = tell(Materials(name="run", profile=profiles[0], ranks=reduce_ranks(profiles)))
    (section,) = (one for one in report.sections if one.key == "ranks")
    parts = {one.key: one.part for one in section.exhibits}
    lanes, bars, table = (parts[key] for key in ("ranks-timeline", "ranks-time", "ranks-table"))
    assert isinstance(lanes, Lanes)
    assert isinstance(bars, Bars)
    assert isinstance(table, Table)
    assert [track.label for track in lanes.tracks] == list(bars.labels)
    assert any(note.startswith("16 of 40 ranks: ") for note in lanes.notes)
    assert len(table.rows) == 40


def test_the_step_is_that_of_the_timeline_of_the_shown_rank() -> None:
    """Of an even number of steps, two are equally close to the median."""
    ranks = [Rank(compute_us=[100.0, 100.0, 400.0, 400.0, 300.0, 300.0, 200.0, 200.0])] * 2
    recordings = record_ranks(ranks)
    assert draw(ranks).title == f"{draw_step(recordings[0]).title} on each rank"
