"""Ranks side by side: the parts of each add up to its step."""

import re
from dataclasses import replace

import msgspec
import pytest

from stepscope.explain.ranks.matching import match_ranks
from stepscope.explain.ranks.rank_tables import ranks_headline, ranks_table
from stepscope.explain.story.run import tell
from stepscope.explain.story.sections.ranks import show_ranks, tell_ranks
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Bars, Table
from stepscope.hardware import Hardware
from tests.unit.rank_recordings import Rank, record_ranks, reduce_ranks
from tests.unit.recordings import ALL_REDUCE, GEMM_BF16, STREAM, Timeline
from tests.unit.rows import ENVIRONMENT


def rank_of(compute_us: int, *, rank: int | None = None, steps: int = 2) -> Profile:
    """A GEMM, an all-reduce that overlaps with the next one, and its exposed rest."""
    timeline = Timeline()
    for _ in range(steps):
        with timeline.step(), timeline.phase("backward"):
            timeline.launch(GEMM_BF16, compute_us)
            timeline.launch(GEMM_BF16, compute_us)
            timeline.launch(ALL_REDUCE, 2 * compute_us, stream=20)
            timeline.launch(GEMM_BF16, compute_us, stream=STREAM, after=20)
            timeline.wait()
            timeline.host(50)
    return timeline.profile(rank=rank, world_size=2)


def bars_of(*profiles: Profile) -> Bars:
    ranks = reduce_ranks(profiles)
    (first, second, *_) = tell_ranks(ranks, match_ranks(ranks))
    assert isinstance(first.part, Bars)
    assert isinstance(second.part, Table)
    assert (first.key, second.key) == ("ranks-time", "ranks-table")
    return first.part


def test_parts_of_a_rank_add_up_to_its_step() -> None:
    ranks = rank_of(100, rank=0), rank_of(160, rank=1, steps=3)
    bars = bars_of(*ranks)
    assert bars.labels == ("rank 0", "rank 1")
    assert bars.is_stacked
    for place, profile in enumerate(ranks):
        parts = [column[place] for column in bars.values]
        assert sum(part or 0 for part in parts) == pytest.approx(profile.clock.profiled_ns / 1e6, rel=1e-12)
        assert all(part and part > 0 for part in parts)


def test_hidden_and_exposed_communication() -> None:
    bars = bars_of(rank_of(100), rank_of(100))
    alone, hidden, exposed, idle = (column[0] for column in bars.values)
    # The all-reduce starts 10 µs after the first GEMM: 190 µs of it overlap with the two, 10 do not.
    assert (alone, hidden, exposed) == pytest.approx((0.110, 0.190, 0.010))
    assert idle
    assert idle > 0


def test_ranks_without_a_number_are_named_by_position() -> None:
    assert bars_of(rank_of(100), rank_of(100)).labels == ("recording 1", "recording 2")
    assert bars_of(rank_of(100, rank=3), rank_of(100, rank=3)).labels == ("recording 1", "recording 2")
    assert bars_of(rank_of(100, rank=3), rank_of(100, rank=0)).labels == ("rank 3", "rank 0")


def test_unknown_rank_has_no_number() -> None:
    profiles = rank_of(100), rank_of(100)
    assert [row[0] for row in ranks_table(reduce_ranks(profiles), None).rows] == [None, None]


def test_traces_without_marked_steps_are_not_called_steps() -> None:
    profiles = record_ranks([Rank(compute_us=[100.0] * 12)] * 2, marked=False)
    reduced = reduce_ranks(profiles)
    times = match_ranks(reduced)
    said = [ranks_headline(reduced, times), *ranks_table(reduced, times).notes, *bars_of(*profiles).notes]
    assert said[0].startswith("2 ranks: trace ")
    section = show_ranks(Materials(name="run", profile=profiles[0], ranks=reduce_ranks(profiles)))
    said += [section.lead, ranks_table(reduced, times).columns[2].label, bars_of(*profiles).title]
    assert not [one for one in said if "step" in one.lower()]


def test_single_rank_has_no_comparison() -> None:
    assert tell_ranks(reduce_ranks([rank_of(100, rank=0)]), None) == ()
    assert tell_ranks([], None) == ()


def test_page_names_the_rank_it_shows_and_the_late_one() -> None:
    ranks = [Rank(compute_us=[100.0] * 12), Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)]
    profiles = tuple(record_ranks(ranks))
    report = tell(Materials(name="run", profile=profiles[0], ranks=reduce_ranks(profiles)))
    assert "rank 0 of 2 recorded ranks" in report.subtitle
    assert "; rank 0 waits 1.2 ms for rank 1" in report.sentence
    assert report.title == "train.py: training step, 2 ranks"
    assert re.match(r"train\.py, 2 ranks: [\d.]+ ms per step on rank 0; ", report.sentence)
    assert all(fact.note.endswith("; rank 0") for fact in report.facts)
    assert report.picture is not None
    assert report.picture.runs == ("rank 0",)
    assert tell(Materials(name="run", profile=profiles[0])).title == "train.py: training step"
    assert report.advice is not None
    assert report.advice[0].finding.code == "SS030"
    (section,) = [one for one in report.sections if one.key == "ranks"]
    assert " Rank 0 waits for rank 1 (late CPU): 1.2 ms per step." in section.lead
    (table,) = [one.part for one in section.exhibits if one.key == "ranks-table"]
    assert isinstance(table, Table)
    late = [column.key for column in table.columns].index("late_ms")
    assert [row[late] for row in table.rows] == pytest.approx([0, 1.2], rel=0.01)


def test_page_of_ranks_with_different_measured_peaks_names_the_rank_it_shows() -> None:
    profiles = []
    for tflops, one in enumerate(record_ranks([Rank(compute_us=[100.0] * 12)] * 2), start=1):
        hardware = Hardware(name="Some CPU", peak_flops={"fp32": tflops * 1e12}, source="measured")
        environment = msgspec.structs.replace(ENVIRONMENT, hardware=hardware)
        profiles.append(replace(one, recording=one.recording.with_manifest(environment=environment)))
    report = tell(Materials(name="run", profile=profiles[1], ranks=reduce_ranks(profiles), shown=1))
    assert "rank 1 of 2 recorded ranks" in report.subtitle


def test_page_of_one_rank_does_not_name_it() -> None:
    (alone,) = record_ranks([Rank(compute_us=[100.0] * 12)])
    assert "rank" not in tell(Materials(name="run", profile=alone)).subtitle


def test_ranks_without_a_recording_are_counted() -> None:
    profiles = tuple(
        replace(one, recording=one.recording.with_manifest(world_size=8))
        for one in record_ranks([Rank(compute_us=[100.0] * 12)] * 2)
    )
    report = tell(Materials(name="rank0.json.gz", profile=profiles[0], ranks=reduce_ranks(profiles)))
    assert report.title == "train.py: training step, 2 of 8 ranks"
    assert report.sentence.startswith("train.py, 2 of 8 ranks: ")
