"""What one rank did, reduced: the same figures as from whole profiles, and why a rank is late."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stepscope.api.run import load
from stepscope.explain.ranks.activity import RankActivity, reduce_rank
from stepscope.explain.ranks.activity_file import DamagedActivityError, decode, encode, read_activity, save_rank
from stepscope.explain.ranks.lateness import Straggler
from stepscope.explain.ranks.matching import match_ranks
from stepscope.explain.ranks.rank_tables import compute_ratios, late_table, ranks_table, say_imbalance
from stepscope.explain.rules import find
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording import tables
from stepscope.recording.store import Overhead
from tests.unit.rank_recordings import PROCESS, THREAD, Rank, record_ranks, reduce_ranks
from tests.unit.recordings import GEMM_FP32

STEADY = [100.0] * 12
LATE = [302.0] * 12


def straggler_of(*ranks: Rank) -> Straggler:
    times = match_ranks(reduce_ranks(record_ranks(ranks)))
    assert times is not None
    assert times.straggler is not None
    return times.straggler


def finding_of(*ranks: Rank) -> str:
    profiles = record_ranks(ranks)
    (found,) = (one for one in find(profiles[0], match_ranks(reduce_ranks(profiles))) if one.code == "SS030")
    return f"{found.evidence}\n{found.action}\n{found.fix}"


# --- Bytes


def test_encoded_ranks_give_the_same_figures() -> None:
    ranks = [Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=LATE, skew_us=7e5), Rank(compute_us=STEADY)]
    profiles = record_ranks(ranks, overlap=True)
    timed = profiles[1].recording.with_manifest(overhead=Overhead(plain_ns=round(0.8 * profiles[1].step_ns)))
    whole = reduce_ranks([profiles[0], make_profile(timed), profiles[2]])
    assert whole[1].clock.kind == "unprofiled"
    read = tuple(decode(encode(one)) for one in whole)
    first, second = match_ranks(whole), match_ranks(read)
    assert first is not None
    assert second is not None
    assert first.lateness == second.lateness
    assert first.straggler == second.straggler
    assert np.array_equal(first.arrival_ns, second.arrival_ns)
    assert ranks_table(whole, first) == ranks_table(read, second)
    assert late_table(first) == late_table(second)
    for one, other in zip(whole, read, strict=True):
        for name in ("collectives", "running", "computes", "loading", "phases", "host", "pauses", "work"):
            assert getattr(one, name).equals(getattr(other, name)), name


def test_stretches_hold_the_time_of_all_kernels() -> None:
    """Any part of a rank's time is the same from its stretches as from its kernels."""
    (profile,) = record_ranks([Rank(compute_us=STEADY)], overlap=True)
    rank, kernels = reduce_rank(profile), profile.kernels
    assert rank.running.height < kernels.height
    starts, ends = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    begin, end = profile.window
    at = np.linspace(begin, end, 50).astype(np.int64)
    for first, last in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
        moments = np.arange(first, last, 100)
        runs = ((moments[:, None] >= starts) & (moments[:, None] < ends)).any(axis=1).sum() * 100
        covered = rank.busy.between(np.array([first]), np.array([last]))[0]
        assert covered == pytest.approx(runs, abs=600)


def test_damaged_bytes_are_refused() -> None:
    packed = bytearray(encode(reduce_rank(record_ranks([Rank(compute_us=STEADY)])[0])))
    packed[-1] ^= 1
    with pytest.raises(DamagedActivityError):
        decode(bytes(packed))


def test_many_ranks_are_read_without_their_recordings(tmp_path: Path) -> None:
    ranks = [Rank(compute_us=STEADY, skew_us=100.0 * number) for number in range(9)]
    ranks.append(Rank(compute_us=STEADY, idle_us=LATE))
    profiles = record_ranks(ranks)
    for number, profile in enumerate(profiles):
        save_rank(profile.recording, tmp_path / f"rank-{number}")
    run = load(tmp_path)
    assert [one.rank for one in run.ranks] == list(range(10))
    whole = tuple(reduce_rank(one).named(f"rank-{number}") for number, one in enumerate(profiles))
    times = match_ranks(whole)
    assert times is not None
    assert run.table("ranks").rows == ranks_table(whole, times).rows
    assert run.table("collectives").rows == late_table(times).rows
    assert not any("_content" in vars(one) for one in run.opened)
    assert "rank 9" in run.findings[0].title  # of rank 0, whose recording is read for it
    assert ["_content" in vars(one) for one in run.opened] == [True] + 9 * [False]


def test_activity_of_other_code_is_computed_again(tmp_path: Path) -> None:
    folder = tmp_path / "rank-0"
    kept = save_rank(record_ranks([Rank(compute_us=STEADY)])[0].recording, folder)
    assert read_activity(folder) is not None
    (file,) = folder.glob("activity-*.bin")
    file.rename(folder / "activity-000000000000.bin")
    assert read_activity(folder) is None
    assert reduce_rank(load(folder).profile).totals == kept.totals


# --- Reasons


def test_same_kernels_that_take_longer_mean_a_slower_clock() -> None:
    slow = Rank(compute_us=[120.0] * 12, clock_mhz=1410)
    usual = Rank(compute_us=STEADY, clock_mhz=1980)
    straggler = straggler_of(usual, slow, usual)
    assert (straggler.lateness.rank, straggler.reason) == (1, "clock")
    assert straggler.work.slowdown == pytest.approx(1.2)
    assert straggler.work.is_uniform
    said = finding_of(usual, slow, usual)
    assert "the same kernels take 20% longer, and its clock is slower, 1,410 MHz where 1,980 MHz is usual" in said
    assert "nvidia-smi" in said


def test_slower_kernels_without_a_recorded_clock_are_not_called_a_slower_clock() -> None:
    said = finding_of(Rank(compute_us=STEADY), Rank(compute_us=[120.0] * 12), Rank(compute_us=STEADY))
    assert "20% longer, most of them alike, as with a slower clock" in said
    assert "MHz" not in said


def test_other_kernels_mean_more_work() -> None:
    more = Rank(compute_us=[160.0] * 12, kernel=GEMM_FP32)
    assert straggler_of(Rank(compute_us=STEADY), more).reason == "work"
    assert "the same number of tokens on every rank" in finding_of(Rank(compute_us=STEADY), more)


def test_late_host_is_in_the_range_that_it_is_in() -> None:
    said = finding_of(Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=LATE, host="phase:logging"))
    assert "its CPU launches late: it is in `logging`" in said
    assert "Shorten `logging` on rank 1" in said


def test_late_host_without_a_range_is_after_the_last_operator() -> None:
    late = [2.0, 2.0, 3_002.0] * 4
    profiles = record_ranks([Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=late)])
    profiles[1] = with_operators(profiles[1], source="train.py:31")
    times = match_ranks(reduce_ranks(profiles))
    assert times is not None
    assert times.straggler is not None
    assert times.straggler.cause is not None
    assert (times.straggler.cause.after, times.straggler.cause.line) == ("aten::mm", "train.py:31")
    assert times.straggler.cause.longest_ns == pytest.approx(3_000_000, rel=0.1)
    (found,) = (one for one in find(profiles[0], times) if one.code == "SS030")
    assert "no operator follows `aten::mm` at `train.py:31` for up to 3.05 ms" in found.evidence


def with_operators(profile: Profile, source: str) -> Profile:
    """An operator around each launch."""
    launches = profile.recording.launches
    ops = launches.select(
        "start_ns",
        "end_ns",
        name=pl.lit("aten::mm"),
        process=pl.lit(PROCESS),
        thread=pl.lit(THREAD),
        source=pl.lit(source),
    )
    return make_profile(replace(profile.recording, ops=tables.conform("ops", ops)))


# --- Figures


def test_imbalance_is_the_longest_compute_time_over_the_mean() -> None:
    ranks: tuple[RankActivity, ...] = reduce_ranks(
        record_ranks([Rank(compute_us=[work] * 12) for work in (100.0, 100.0, 100.0, 180.0)])
    )
    assert compute_ratios(ranks) == pytest.approx([100 / 120] * 3 + [1.5])
    assert say_imbalance(ranks) == "rank 3 computes 1.50× the mean"
    assert say_imbalance(ranks[:3]) == ""


def test_late_collectives_say_who_waits_and_why() -> None:
    late = [2.0, 302.0, 2.0, 2.0] * 3
    ranks = [Rank(compute_us=STEADY), Rank(compute_us=[120.0] * 12), Rank(compute_us=STEADY, idle_us=late)]
    times = match_ranks(reduce_ranks(record_ranks(ranks, per_step=4)))
    assert times is not None
    worst = times.late_collectives(3)
    assert [(one.rank, one.reason, one.bucket, one.buckets) for one in worst] == [(2, "host", 2, 4)] * 3
    assert worst[0].late_ns == pytest.approx(280_000)
    assert worst[0].waits == pytest.approx({0: 300_000, 1: 280_000})
    table = late_table(times, top=1)
    assert table.rows[0][2:7] == (
        "late CPU",
        "rank 0 0.30 ms, rank 1 0.28 ms",
        "all-reduce",
        1 << 24,
        "2 of 4",
    )


def test_two_late_ranks_are_both_named() -> None:
    late = [1_002.0, 2.0, 2.0, 2.0] * 3
    slow = Rank(compute_us=[200.0] * 12)
    said = finding_of(Rank(compute_us=STEADY), Rank(compute_us=STEADY, idle_us=late), slow)
    assert said.startswith("rank 1 comes last to 3 of 12")
    assert "the others also wait for rank 2 for 0.3 ms (slower at the same work)" in said
