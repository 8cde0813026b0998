"""Cost of collectives by formula, and fits to measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.cost import bus_factor, fit_link, ring_links
from stepscope.recording.rows.links import COLLECTIVES, Collective, Link, LinkPlace

FOUR = LinkPlace(backend="gloo", device_name="Test CPU", ranks=4)


@pytest.mark.parametrize(
    ("collective", "two", "six"),
    [("all-reduce", 1.0, 10 / 6), ("all-gather", 0.5, 5 / 6), ("reduce-scatter", 0.5, 5 / 6), ("broadcast", 1.0, 1.0)],
)
def test_bus_bandwidth_follows_the_convention_of_nccl_tests(collective: Collective, two: float, six: float) -> None:
    assert bus_factor(collective, 2) == pytest.approx(two)
    assert bus_factor(collective, 6) == pytest.approx(six)


def test_ring_times_match_a_count_by_hand() -> None:
    # Four ranks, 10 µs and 1 GB/s to the next one, 4 MB in all: a part is 1 MB and takes 1 ms.
    links = ring_links(FOUR, delay_ns=10_000, wire_bytes_per_s=1e9)
    assert links.time_ns("all-gather", 4_000_000) == pytest.approx(3 * 1_010_000)
    assert links.time_ns("reduce-scatter", 4_000_000) == pytest.approx(3 * 1_010_000)
    assert links.time_ns("all-reduce", 4_000_000) == pytest.approx(6 * 1_010_000)
    assert links.time_ns("broadcast", 4_000_000) == pytest.approx(4_000_000 + 30_000)


@given(size=st.integers(1, 10**10), ranks=st.integers(2, 512))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, ranks: int) -> None:
    place = LinkPlace(backend="nccl", device_name="Test GPU", ranks=ranks)
    links = ring_links(place, delay_ns=5_000, wire_bytes_per_s=2.5e10)
    parts_ns = links.time_ns("reduce-scatter", size) + links.time_ns("all-gather", size)
    assert links.time_ns("all-reduce", size) == pytest.approx(parts_ns)


def test_one_rank_has_no_links() -> None:
    alone = LinkPlace(backend="nccl", device_name="Test GPU", ranks=1)
    links = ring_links(alone, delay_ns=5_000, wire_bytes_per_s=1e9)
    assert all(links.time_ns(collective, 10**9) == 0 for collective in COLLECTIVES)


@given(
    latency_ns=st.floats(0, 1e7),
    bytes_per_s=st.floats(1e6, 1e12),
    sizes=st.lists(st.integers(1, 10**10), min_size=2, max_size=8, unique=True),
)
def test_fit_recovers_the_line(latency_ns: float, bytes_per_s: float, sizes: list[int]) -> None:
    truth = Link(latency_ns=latency_ns, bytes_per_s=bytes_per_s)
    found = fit_link([(size, truth.time_ns(size)) for size in sizes])
    assert found is not None
    assert found.residual == pytest.approx(0, abs=1e-6)
    for size in sizes:
        assert found.time_ns(size) == pytest.approx(truth.time_ns(size), rel=1e-6)


def test_fit_minimizes_the_relative_error() -> None:
    # The largest is 20% late. A fit of absolute errors would make the latency negative.
    truth = Link(latency_ns=100_000, bytes_per_s=1e9)
    points = [(size, truth.time_ns(size)) for size in (1_000, 10_000, 100_000)] + [(10**9, 1.2e9)]
    found = fit_link(points)
    assert found is not None
    assert found.latency_ns == pytest.approx(100_000, rel=0.05)
    assert 0.01 < (found.residual or 0) < 0.2
    assert (found.sizes, found.smallest_bytes, found.largest_bytes) == (4, 1_000, 10**9)


def test_negative_latency_becomes_zero() -> None:
    found = fit_link([(10**6, 1e6), (10**7, 2e7)])  # large messages are slower than small ones
    assert found is not None
    assert found.latency_ns == 0
    assert 5e8 <= found.bytes_per_s <= 1e9


def test_one_size_is_not_enough_for_a_fit() -> None:
    assert fit_link([(10**6, 1e6), (10**6, 1.1e6)]) is None


def test_empty_message_takes_no_time() -> None:
    assert Link(latency_ns=1e6, bytes_per_s=1e9).time_ns(0) == 0
