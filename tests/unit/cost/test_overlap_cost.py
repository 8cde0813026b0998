"""Predicted data-parallel steps: by hand on a link of 1 byte per nanosecond, and properties of any link."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.cost import (
    DDP_STRATEGIES,
    Compute,
    DdpStrategy,
    Gradient,
    Layer,
    StepTime,
    fill_buckets,
    model_gradients,
    parameters,
    predict_ddp,
    predict_fsdp,
    predict_sharded_optimizer,
    ready_in_order,
)
from stepscope.recording.rows.links import COLLECTIVES, Link, LinkPlace, Links
from stepscope.spec import ModelShape

COMPUTE = Compute(forward_ns=50, backward_ns=100, optimizer_ns=20)


def make_links(latency_ns: float = 0, bytes_per_ns: float = 1, ranks: int = 2) -> Links:
    link = Link(latency_ns=latency_ns, bytes_per_s=bytes_per_ns * 1e9)
    place = LinkPlace(backend="gloo", device_name="Test CPU", ranks=ranks)
    return Links(place=place, links=dict.fromkeys(COLLECTIVES, link))


THREE = (
    Gradient(num_bytes=10, ready_ns=40),
    Gradient(num_bytes=30, ready_ns=70),
    Gradient(num_bytes=60, ready_ns=100),
)


@pytest.mark.parametrize(
    ("strategy", "communication_ns", "exposed_ns", "collectives"),
    [
        ("naive", 10 + 30 + 60 + 3 * 5, 115, 3),
        ("flat", 100 + 5, 105, 1),
        # 15 from 40 on, 35 from 70 on, ends at 105; the last waits for that and takes 65.
        ("overlap", 115, 105 + 65 - 100, 3),
        # 10 and 30 together from 70 on, to 115; then 65.
        ("bucketed", 45 + 65, 115 + 65 - 100, 2),
    ],
)
def test_three_gradients_match_a_count_by_hand(
    strategy: DdpStrategy, communication_ns: float, exposed_ns: float, collectives: int
) -> None:
    step = predict_ddp(strategy, THREE, COMPUTE, make_links(latency_ns=5), bucket_bytes=40)
    assert step.communication_ns == pytest.approx(communication_ns)
    assert step.exposed_ns == pytest.approx(exposed_ns)
    assert step.step_ns == pytest.approx(170 + exposed_ns)
    assert step.exposed_share == pytest.approx(exposed_ns / (170 + exposed_ns))
    assert step.collectives == collectives


def test_communication_that_needs_the_processor_slows_backward_down() -> None:
    # 40 of backward, then 40 under way at half speed, then the last 40 alone: ends 20 late, with nothing to wait for.
    early = (Gradient(num_bytes=40, ready_ns=40),)
    step = predict_ddp("overlap", early, COMPUTE, make_links(), processor_share=0.5)
    assert step.exposed_ns == pytest.approx(20)
    alone = predict_ddp("overlap", early, COMPUTE, make_links(), processor_share=1.0)
    assert alone.exposed_ns == pytest.approx(40)  # as much as is communicated: overlapping gains nothing


def test_gradients_are_ready_in_proportion_to_their_operations() -> None:
    by_size = ready_in_order([10, 30, 60], 200)
    assert [one.ready_ns for one in by_size] == pytest.approx([20, 80, 200])
    weighted = ready_in_order([10, 30, 60], 200, weights=[1, 1, 0])
    assert [one.ready_ns for one in weighted] == pytest.approx([100, 200, 200])
    with pytest.raises(ValueError, match="`weights`"):
        ready_in_order([1, 2], 10, weights=[1])


def test_built_in_model_gradients_run_from_head_to_embedding() -> None:
    shape = ModelShape(d_model=4, d_ff=6, num_layers=1, num_heads=2, num_kv_heads=2, vocab=10)
    gradients = model_gradients(shape, 304 + 12)
    sizes = [one.num_bytes for one in gradients]
    assert sizes == [160, 16, 96, 96, 96, 64, 64, 64, 64, 16, 16, 160]
    assert sum(sizes) == 4 * parameters(shape).total
    # 40 elements of the head, 4 of a vector, 24 of each matrix of the feed-forward layer, ...
    total = sum(sizes[:-1]) / 4
    assert [one.ready_ns for one in gradients[:3]] == pytest.approx([316 * part / total for part in (40, 44, 68)])
    assert gradients[-1].ready_ns == gradients[-2].ready_ns == pytest.approx(316)


def test_buckets_group_neighbors_and_a_large_gradient_gets_its_own() -> None:
    assert cut([5, 5, 50, 4, 4], 10) == [[5, 5], [50], [4, 4]]


def test_buckets_grow_at_first_and_halve_the_rest_at_the_end() -> None:
    mb = 1 << 20
    assert [len(bucket) for bucket in cut([mb] * 20, 6 * mb)] == [1, 1, 2, 4, 6, 3, 1, 1, 1]
    assert cut([3 * mb], 2 * mb) == [[3 * mb]]
    assert cut([], 10) == []


def cut(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    return [[one.num_bytes for one in bucket] for bucket in fill_buckets(ready_in_order(sizes, 1), bucket_bytes)]


def test_the_sharded_optimizer_trades_its_update_for_an_all_gather() -> None:
    links = make_links(latency_ns=5, ranks=4)
    ddp = predict_ddp("flat", THREE, COMPUTE, links)
    step = predict_sharded_optimizer(ddp, COMPUTE, links, 100)
    assert step.step_ns == pytest.approx(ddp.step_ns + 105 - 15)
    assert step.exposed_ns == pytest.approx(ddp.exposed_ns + 105)
    assert step.communication_ns == pytest.approx(210)
    assert step.collectives == 2


def test_fsdp_matches_a_count_by_hand() -> None:
    # Two layers of 10 bytes, forward 20 and 30, backward 40 and 60. Gathered: 10; the next one's is hidden behind 20.
    layers = [
        Layer(parameter_bytes=10, gradient_bytes=10, forward_ns=20, backward_ns=40),
        Layer(parameter_bytes=10, gradient_bytes=10, forward_ns=30, backward_ns=60),
    ]
    # Forward: 10 + 20 + 30 = 60. Backward: 10 for the last layer's, 60 (the first one's hidden), its gradients hidden
    # behind 40, the first layer's gradients at the end.
    step = predict_fsdp(layers, make_links(), optimizer_ns=20)
    assert step.step_ns == pytest.approx(60 + 10 + 60 + 40 + 10 + 10)
    assert step.exposed_ns == pytest.approx(10 + 10 + 10)
    assert step.communication_ns == pytest.approx(6 * 10)
    assert step.collectives == 6


def test_fsdp_waits_for_the_next_layer() -> None:
    layers = [Layer(parameter_bytes=50, gradient_bytes=0, forward_ns=20, backward_ns=0)] * 2
    step = predict_fsdp(layers, make_links())
    assert step.exposed_ns == pytest.approx(50 + 30 + 2 * 50)


# --- Properties of any model and link --------------------------------------------------------------------------------

sizes_bytes = st.lists(st.integers(1, 10**9), min_size=1, max_size=20)
spans_ns = st.floats(0, 1e9)
shares = st.floats(0, 1)


@given(
    sizes=sizes_bytes, backward_ns=spans_ns, latency_ns=st.floats(0, 1e6), bucket=st.integers(1, 10**9), share=shares
)
def test_exposed_time_is_at_most_the_communication_time(
    sizes: list[int], backward_ns: float, latency_ns: float, bucket: int, share: float
) -> None:
    gradients = ready_in_order(sizes, backward_ns)
    for strategy in DDP_STRATEGIES:
        step = predict(strategy, gradients, backward_ns, latency_ns, bucket, share)
        assert step.exposed_ns <= step.communication_ns * (1 + 1e-9) + 1e-3
        assert step.step_ns >= max(backward_ns, step.communication_ns) * (1 - 1e-9)


@given(sizes=sizes_bytes, backward_ns=spans_ns, bucket=st.integers(1, 10**9), share=shares)
def test_without_latency_overlap_is_never_slower_than_waiting(
    sizes: list[int], backward_ns: float, bucket: int, share: float
) -> None:
    gradients = ready_in_order(sizes, backward_ns)
    naive, flat, overlap, bucketed = (
        predict(strategy, gradients, backward_ns, 0, bucket, share).step_ns for strategy in DDP_STRATEGIES
    )
    assert naive == pytest.approx(flat)
    assert overlap <= bucketed * (1 + 1e-9) + 1e-3
    assert bucketed <= flat * (1 + 1e-9) + 1e-3


@given(sizes=sizes_bytes, backward_ns=spans_ns, latency_ns=st.floats(0, 1e6))
def test_more_latency_takes_longer(sizes: list[int], backward_ns: float, latency_ns: float) -> None:
    gradients = ready_in_order(sizes, backward_ns)
    for strategy in DDP_STRATEGIES:
        some = predict(strategy, gradients, backward_ns, latency_ns, 10**7, 0).step_ns
        more = predict(strategy, gradients, backward_ns, 2 * latency_ns, 10**7, 0).step_ns
        assert more >= some * (1 - 1e-9)


@given(sizes=sizes_bytes, work_ns=spans_ns, latency_ns=st.floats(0, 1e6), share=shares)
def test_fsdp_exposes_no_more_than_it_communicates(
    sizes: list[int], work_ns: float, latency_ns: float, share: float
) -> None:
    layers = [Layer(parameter_bytes=one, gradient_bytes=one, forward_ns=work_ns, backward_ns=work_ns) for one in sizes]
    step = predict_fsdp(layers, make_links(latency_ns), replicated_bytes=100, processor_share=share)
    assert step.exposed_ns <= step.communication_ns * (1 + 1e-9) + 1e-3
    assert step.collectives == 3 * len(sizes) + 1


def predict(
    strategy: DdpStrategy,
    gradients: Sequence[Gradient],
    backward_ns: float,
    latency_ns: float,
    bucket_bytes: int,
    processor_share: float,
) -> StepTime:
    compute = Compute(forward_ns=0, backward_ns=backward_ns)
    links = make_links(latency_ns)
    return predict_ddp(strategy, gradients, compute, links, bucket_bytes=bucket_bytes, processor_share=processor_share)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_processor_share_must_be_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="processor_share"):
        predict_ddp("overlap", THREE, COMPUTE, make_links(), processor_share=share)


def test_unmeasured_collective_is_not_guessed() -> None:
    links = Links(place=make_links().place, links={"broadcast": Link(latency_ns=0, bytes_per_s=1e9)})
    with pytest.raises(ValueError, match="`all-reduce`"):
        predict_ddp("naive", THREE, COMPUTE, links)
