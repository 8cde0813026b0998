"""Cost of collectives: a latency and a bandwidth each, from the ring formula or fitted to measurements.

Message sizes follow NVIDIA's nccl-tests: the whole tensor for an all-reduce or a broadcast, the parts of all ranks
together for an all-gather or a reduce-scatter. Algorithm bandwidth is message size over time. Bus bandwidth is what a
link carries in an optimal collective, so it can be compared with the link's own bandwidth and across numbers of ranks.

In a ring of n ranks, with a delay and a bandwidth between neighbors, an all-gather and a reduce-scatter take n − 1 hops
with 1/n of the message each. An all-reduce is one after the other. A broadcast sends the message in pieces, so it costs
its bytes once and the delay n − 1 times. All four are linear in the message size, as is a fitted link, so predictions
work with either.
"""

from collections.abc import Sequence

from stepscope.recording.rows.links import COLLECTIVES, Collective, Link, LinkPlace, Links


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth: the messages that the busiest link must carry."""
    match collective:
        case "all-reduce":
            return 2 * (ranks - 1) / ranks
        case "all-gather" | "reduce-scatter":
            return (ranks - 1) / ranks
        case "broadcast":
            return 1.0


def ring_links(place: LinkPlace, *, delay_ns: float, wire_bytes_per_s: float) -> Links:
    """Return the links of a ring from the delay and bandwidth between neighbors, for a network that cannot be
    measured."""
    links = {
        collective: Link(
            latency_ns=ring_steps(collective, place.ranks) * delay_ns,
            bytes_per_s=wire_bytes_per_s / bus_factor(collective, place.ranks),
        )
        for collective in COLLECTIVES
        if place.ranks > 1
    }
    return Links(place=place, links=links)


def ring_steps(collective: Collective, ranks: int) -> int:
    """Return how often a rank waits for its neighbor."""
    return (2 if collective == "all-reduce" else 1) * (ranks - 1)


def fit_link(points: Sequence[tuple[int, float]]) -> Link | None:
    """Fit a line through (bytes, nanoseconds) by least squares of the relative error; None with fewer than two sizes.

    Relative, because times span three orders of magnitude, and the absolute error of the largest would hide the
    latency. A negative latency, which occurs if large messages do not fit into a cache, becomes zero, and the line goes
    through the origin.
    """
    if len({size for size, _ in points}) < 2:
        return None
    latency_ns, ns_per_byte = _weighted_line(points)
    if latency_ns < 0 or ns_per_byte <= 0:
        latency_ns, ns_per_byte = 0.0, _weighted_slope(points)
    errors = [(latency_ns + ns_per_byte * size) / time_ns - 1 for size, time_ns in points]
    return Link(
        latency_ns=latency_ns,
        bytes_per_s=1e9 / ns_per_byte,
        residual=(sum(error * error for error in errors) / len(errors)) ** 0.5,
        sizes=len(points),
        smallest_bytes=min(size for size, _ in points),
        largest_bytes=max(size for size, _ in points),
    )


def _weighted_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return intercept and slope. Errors are divided by the time, so weights are one over its square."""
    weights = [time_ns**-2 for _, time_ns in points]
    total = sum(weights)
    mean_x = sum(weight * size for weight, (size, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(weight * time_ns for weight, (_, time_ns) in zip(weights, points, strict=True)) / total
    both = zip(weights, points, strict=True)
    covariance = sum(weight * (size - mean_x) * (time_ns - mean_y) for weight, (size, time_ns) in both)
    variance = sum(weight * (size - mean_x) ** 2 for weight, (size, _) in zip(weights, points, strict=True))
    slope = covariance / variance
    return mean_y - slope * mean_x, slope


def _weighted_slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the line through the origin."""
    return sum(size / time_ns for size, time_ns in points) / sum((size / time_ns) ** 2 for size, time_ns in points)
