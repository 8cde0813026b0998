"""Several ranks: matched collectives, aligned clocks, and the rank that the others wait for."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.explain.ranks.lateness import RankTimes
from stepscope.explain.ranks.matching import match_ranks
from stepscope.explain.ranks.rank_tables import ranks_table
from stepscope.explain.ranks.reasons import Reason
from stepscope.explain.story.sections.ranks import tell_ranks
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Bars
from stepscope.recording import tables
from tests.unit.rank_recordings import Rank, record_ranks, reduce_ranks
from tests.unit.recordings import GEMM_FP32, Timeline

US = 1000
STEADY = [100.0] * 12


def matched(profiles: list[Profile]) -> RankTimes:
    times = match_ranks(reduce_ranks(profiles))
    assert times is not None
    return times


def test_late_rank_is_found_although_it_waits_least() -> None:
    late = [2.0, 302.0, 2.0] * 4
    ranks = [Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=late), Rank(compute_us=STEADY)]
    times = matched(record_ranks(ranks))
    assert times.straggler is not None
    assert times.straggler.lateness.rank == 1
    assert times.straggler.lateness.late_ns == pytest.approx(4 * 300 * US)
    assert times.straggler.lateness.caused_ns == pytest.approx(4 * 300 * US)
    assert times.straggler.lateness.most_ns == pytest.approx(300 * US)
    assert times.straggler.reason == "host"
    assert [one.waited_ns for one in times.lateness] == pytest.approx([4 * 300 * US, 0, 4 * 300 * US])


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (Rank(compute_us=[400.0] * 12), "clock"),
        (Rank(compute_us=[400.0] * 12, kernel=GEMM_FP32), "work"),
        (Rank(compute_us=STEADY, idle_us=[302.0] * 12), "host"),
        (Rank(compute_us=STEADY, idle_us=[302.0] * 12, is_loading=True), "input"),
    ],
)
def test_reason_of_a_late_rank(rank: Rank, reason: Reason) -> None:
    straggler = matched(record_ranks([Rank(compute_us=STEADY), Rank(compute_us=STEADY), rank])).straggler
    assert straggler is not None
    assert (straggler.lateness.rank, straggler.reason) == (2, reason)
    # The first collective has none before it that the ranks left together.
    assert straggler.reasons[reason] >= 11 * 300 * US


def test_kernels_that_others_run_while_they_wait_are_not_more_compute() -> None:
    """After a collective to which it is late, a rank still runs the kernels that the others ran while they waited."""
    punctual = Rank(compute_us=STEADY, idle_us=[52.0] * 12)
    late = Rank(compute_us=STEADY, idle_us=[352.0, 102.0] * 6, is_loading=True)
    straggler = matched(record_ranks([punctual, late, punctual], overlap=True)).straggler
    assert straggler is not None
    assert straggler.reasons["work"] + straggler.reasons["clock"] == pytest.approx(0, abs=10)
    assert straggler.reason == "input"
    assert sum(straggler.reasons.values()) == pytest.approx(straggler.lateness.late_ns)


def test_waiting_behind_other_kernels_costs_nothing() -> None:
    ranks = [Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=[82.0] * 12)]
    straggler = matched(record_ranks(ranks, overlap=True)).straggler
    assert straggler is not None
    assert straggler.lateness.late_ns == pytest.approx(12 * 80 * US)
    assert straggler.lateness.caused_ns == pytest.approx(0, abs=1)


def test_only_the_time_after_the_last_but_one_is_blamed_on_the_last() -> None:
    ranks = [Rank(compute_us=[work] * 12) for work in (100.0, 250.0, 300.0)]
    times = matched(record_ranks(ranks))
    assert [one.late_ns for one in times.lateness] == pytest.approx([0, 0, 12 * 50 * US])
    assert [one.waited_ns for one in times.lateness] == pytest.approx([12 * 200 * US, 12 * 50 * US, 0])


def test_recording_that_begins_later_is_matched_by_its_step_numbers() -> None:
    # Every step is the same, so only step numbers tell which collective is which.
    ranks = [Rank(compute_us=STEADY), Rank(compute_us=STEADY, missing=4, skew_us=900_000)]
    times = matched(record_ranks(ranks))
    assert times.places.tolist() == [[place + 4, place] for place in range(8)]


def test_recording_that_begins_later_is_matched_by_times() -> None:
    varying = [100.0 + 7 * (place * place % 11) for place in range(24)]
    ranks = [Rank(compute_us=varying), Rank(compute_us=varying, missing=5, skew_us=3_000_000)]
    times = matched(record_ranks(ranks, marked=False))
    assert times.places.tolist() == [[place + 5, place] for place in range(19)]


def test_messages_that_differ_are_not_matched() -> None:
    profiles = [
        record_ranks([Rank(compute_us=STEADY), Rank(compute_us=STEADY)], message_bytes=(bytes_,))[0]
        for bytes_ in (1 << 20, 1 << 21)
    ]
    assert match_ranks(reduce_ranks(profiles)) is None


def test_ranks_without_a_common_group_are_not_compared() -> None:
    profiles = [record_ranks([Rank(compute_us=STEADY)] * 2, group=group)[0] for group in ("1", "2")]
    assert match_ranks(reduce_ranks(profiles)) is None


def test_run_without_communication_has_nothing_to_match() -> None:
    profiles = record_ranks([Rank(compute_us=STEADY)] * 2, kernels=("some_kernel",), collective=None)
    assert match_ranks(reduce_ranks(profiles)) is None


# --- CPU


def on_cpu(rank: int, arrives_us: int, *, threads: int = 1) -> Profile:
    """Three steps of 1 ms with an all-reduce on each thread of Gloo's, which ends 550 µs after the step began. The
    operators that queue it take 5 µs."""
    timeline = Timeline(host_us=0)
    for _ in range(3):
        with timeline.step():
            timeline.compute("aten::mm", 100)
            timeline.host(arrives_us - 100)
            timeline.compute("c10d::allreduce_", 5)
            timeline.host(1000 - arrives_us - 5)
    recording = timeline.record(rank=rank, world_size=2, file=f"rank{rank}.json.gz")
    steps = recording.ranges["start_ns"].to_list()
    rows = [
        {
            "name": "gloo:all_reduce",
            "start_ns": step + (arrives_us + thread) * US,
            "end_ns": step + 550 * US,
            "process": 100,
            "thread": 90 + thread,
            "source": "user",
        }
        for step in steps
        for thread in range(threads)
    ]
    gloo = tables.conform("ranges", pl.DataFrame(rows))
    return make_profile(replace(recording, ranges=pl.concat([recording.ranges, gloo])))


def test_time_outside_operators_is_not_called_idle() -> None:
    ranks = reduce_ranks([on_cpu(0, 200), on_cpu(1, 500)])
    table = ranks_table(ranks, None)
    (place,) = [at for at, column in enumerate(table.columns) if column.key == "idle"]
    assert table.columns[place].label == "outside operators"
    # Of each step of 1 ms, operators take 105 µs.
    assert [row[place] for row in table.rows] == pytest.approx([0.895, 0.895])
    (bars,) = [one.part for one in tell_ranks(ranks, None) if isinstance(one.part, Bars)]
    assert bars.series[-1] == "outside operators"


def test_collectives_of_a_cpu_are_those_of_gloo() -> None:
    times = matched([on_cpu(0, 200), on_cpu(1, 500)])
    assert [one.waited_ns for one in times.lateness] == pytest.approx([3 * 300 * US, 0], abs=10)
    assert times.straggler is not None
    assert (times.straggler.lateness.rank, times.straggler.reason) == (1, "host")


def test_waiting_for_two_collectives_at_once_counts_once() -> None:
    times = matched([on_cpu(0, 200, threads=2), on_cpu(1, 500, threads=2)])
    assert times.lateness[0].waited_ns == pytest.approx(3 * 301 * US, abs=10)
    assert times.lateness[1].late_ns == pytest.approx(3 * 301 * US, abs=10)


def test_operators_that_queue_collectives_are_not_matched() -> None:
    profiles = [on_cpu(0, 200, threads=0), on_cpu(1, 500, threads=0)]
    assert match_ranks(reduce_ranks(profiles)) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(8, 24))
def test_planted_lateness_is_found(seed: int, num_ranks: int, count: int) -> None:
    random = np.random.default_rng(seed)
    compute = random.uniform(50, 150, count)
    idle = random.uniform(1, 40, (num_ranks, count))
    late = int(random.integers(num_ranks))
    idle[late] += random.uniform(60, 400, count)
    skews, missing = random.uniform(-5e6, 5e6, num_ranks), random.integers(0, 4, num_ranks)
    ranks = [
        Rank(compute_us=compute.tolist(), idle_us=own.tolist(), skew_us=float(skew), missing=int(first))
        for own, skew, first in zip(idle, skews, missing, strict=True)
    ]
    times = matched(record_ranks(ranks))
    first_step = -(-missing // 4) * 4  # what was recorded before the first marked step does not count
    seen = np.where(np.arange(count)[None, :] >= first_step[:, None], idle, -np.inf)
    seen = seen[:, np.isfinite(seen).sum(axis=0) >= 2]  # two ranks recorded it
    ordered = np.sort(seen, axis=0)
    expected = np.where(seen.argmax(axis=0) == late, ordered[-1] - ordered[-2], 0).sum()
    assert times.straggler is not None
    assert times.straggler.lateness.rank == late
    assert times.straggler.lateness.late_ns == pytest.approx(expected * US, abs=10 * count)
    assert times.straggler.reason == "host"
    waits = np.where(np.isfinite(seen), ordered[-1] - seen, 0).sum(axis=1)
    assert [one.waited_ns for one in times.lateness] == pytest.approx(list(waits * US), abs=10 * count)


def test_step_numbers_decide_where_ends_are_noisy() -> None:
    """Ends that fit better one step off are a coincidence of a few steps: on a busy CPU they differ by milliseconds."""
    ranks = reduce_ranks(record_ranks([Rank(compute_us=[100.0] * 6)] * 2, per_step=2))
    ends_us = ([0, 1000, 60_000, 61_000, 125_000, 126_000], [0, 1000, 65_000, 66_000, 120_000, 121_000])
    noisy = [
        replace(
            rank,
            collectives=rank.collectives.with_columns(
                start_ns=pl.Series(ends) * US + rank.origin_ns, end_ns=pl.Series(ends) * US + rank.origin_ns + 500 * US
            ),
        )
        for rank, ends in zip(ranks, ends_us, strict=True)
    ]
    times = match_ranks(noisy)
    assert times is not None
    assert times.places.tolist() == [[place, place] for place in range(6)]
