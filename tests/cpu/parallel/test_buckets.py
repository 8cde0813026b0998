"""Which gradients share a message."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stepscope.parallel.buckets import SEPARATE, TOGETHER, BucketLimits, plan_buckets

GRADIENTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=40)


@given(GRADIENTS, st.integers(1, 20), st.integers(1, 60))
def test_buckets_hold_every_gradient_once_and_one_kind(sizes: list[tuple[str, int]], edge: int, usual: int) -> None:
    plan = plan_buckets(sizes, BucketLimits(edge, usual))
    assert sorted(position for bucket in plan for position in bucket) == list(range(len(sizes)))
    for bucket in plan:
        assert bucket == sorted(bucket)
        assert len({sizes[position][0] for position in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[position][1] for position in bucket) <= usual
    assert all(earlier[-1] < later[-1] for earlier, later in pairwise(plan)), "in the order in which they are complete"


@given(GRADIENTS)
def test_extreme_sizes_give_one_bucket_each_or_one_for_all(sizes: list[tuple[str, int]]) -> None:
    counted = [(kind, size + 1) for kind, size in sizes]
    assert len(plan_buckets(counted, SEPARATE)) == len(sizes)
    assert len(plan_buckets(counted, TOGETHER)) == len({kind for kind, _ in sizes})


def test_buckets_grow_from_the_start_and_shrink_towards_the_end() -> None:
    plan = plan_buckets([("a", 1)] * 64, BucketLimits(2, 16))
    assert [len(bucket) for bucket in plan] == [2, 2, 4, 8, 16, 16, 8, 4, 2, 2]
    assert [len(bucket) for bucket in plan_buckets([("a", 1)] * 4, BucketLimits(8, 3))] == [3, 1]
