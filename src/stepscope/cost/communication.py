"""What collectives cost: the line of each, by the ring's closed form or fitted to what was measured.

A message is counted as NVIDIA's nccl-tests count it: the whole tensor of an all-reduce and of a broadcast, all ranks'
parts together of an all-gather and of a reduce-scatter. Algorithm bandwidth is message over time. Bus bandwidth is what
a wire carries for it if the collective is done in the best way there is, so that it can be compared with the wire's own
and between numbers of ranks.

Around a ring of n ranks, with a delay and a bandwidth from each to the next, an all-gather and a reduce-scatter take
n − 1 steps of an n-th of the message each, an all-reduce is the one after the other, and a broadcast sends the message
in pieces, so that it costs its bytes once and the delay n − 1 times. All four are lines in the size of the message, as
a fitted link is: whoever predicts need not know which of the two it was given.
"""

from collections.abc import Sequence

from stepscope.recording.rows.links import COLLECTIVES, Collective, Link, LinkPlace, Links


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the messages that the busiest wire must carry."""
    match collective:
        case "all-reduce":
            return 2 * (ranks - 1) / ranks
        case "all-gather" | "reduce-scatter":
            return (ranks - 1) / ranks
        case "broadcast":
            return 1.0


def ring_links(place: LinkPlace, *, delay_ns: float, wire_bytes_per_s: float) -> Links:
    """The links of a ring, from the delay and the bandwidth between neighbours: for a network that is not here."""
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
    """How often a rank waits for its neighbour."""
    return (2 if collective == "all-reduce" else 1) * (ranks - 1)


def fit_link(points: Sequence[tuple[int, float]]) -> Link | None:
    """The line through (bytes, nanoseconds) with the least squares of the relative error, or None below two sizes.

    Relative, because the times span three orders of magnitude, and the absolute error of the largest would leave
    nothing for a latency to be seen in. A latency below zero, which a cache that large messages fall out of can make,
    is none, and the line goes through the origin.
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
    """Intercept and slope. Errors are divided by the time, so weights are one over its square."""
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
    """Of the line through the origin."""
    return sum(size / time_ns for size, time_ns in points) / sum((size / time_ns) ** 2 for size, time_ns in points)
