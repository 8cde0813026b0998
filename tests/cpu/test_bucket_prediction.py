"""Predictions split gradients into the same buckets as DDP."""

from hypothesis import given
from hypothesis import strategies as st

from stepscope.cost import fill_buckets, ready_in_order
from stepscope.parallel.buckets import EDGE_BYTES, BucketLimits, plan_buckets

MIB = 1 << 20


@given(sizes=st.lists(st.integers(1, 40 * MIB), max_size=30), bucket_bytes=st.integers(1, 50 * MIB))
def test_predicted_buckets_match_ddp(sizes: list[int], bucket_bytes: int) -> None:
    gradients = ready_in_order(sizes, 1.0)
    predicted = [[one.num_bytes for one in bucket] for bucket in fill_buckets(gradients, bucket_bytes)]
    planned = plan_buckets([("fp32", size) for size in sizes], BucketLimits(EDGE_BYTES, bucket_bytes))
    assert predicted == [[sizes[at] for at in bucket] for bucket in planned]
