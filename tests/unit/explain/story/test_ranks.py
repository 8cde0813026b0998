"""Ranks side by side: the parts of each add up to its step."""

import pytest

from stepscope.explain.story.sections.step_time import tell_ranks
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Bars, Table
from tests.unit.recordings import ALL_REDUCE, GEMM_BF16, STREAM, Timeline


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
    (first, second) = tell_ranks(profiles)
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
        assert sum(part or 0 for part in parts) == pytest.approx(profile.recorded_step_ns / 1e6, rel=1e-12)
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


def test_single_rank_has_no_comparison() -> None:
    assert tell_ranks([rank_of(100, rank=0)]) == ()
    assert tell_ranks([]) == ()
