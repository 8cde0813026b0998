"""The collectives of a recording: what each does, how many bytes it carries, and how much of it is exposed.

What a collective does comes from the profiler's metadata, otherwise from the range around its launch
(`nccl:all_to_all`), otherwise from the kernel's name, which says least: an all-to-all runs as a kernel that sends and
receives.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.cost.communication import bus_factor
from stepscope.explain.trace.profile import Profile
from stepscope.recording.nesting import around
from stepscope.recording.rows.links import COLLECTIVES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# In this order: the first that matches. A barrier is an all-reduce of one element.
_KINDS = (
    ("all-reduce", r"(?i)all[-_ ]?reduce|barrier"),
    ("reduce-scatter", r"(?i)reduce[-_ ]?scatter"),
    ("all-gather", r"(?i)all[-_ ]?gather"),
    ("all-to-all", r"(?i)all[-_ ]?to[-_ ]?all|deep_?ep"),
    ("broadcast", r"(?i)broadcast"),
    ("send and receive", r"(?i)send|recv|receive"),
)
# No rank can end these before the last rank has begun.
SYNCHRONOUS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
_LARGE_BYTES = 1 << 20  # smaller messages are bound by latency, not by bandwidth


def find_collectives(profile: Profile, kernels: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the communication kernels by start, with `kind` (null if unknown), `message_bytes` and `bus_bytes`, which
    the busiest link carries. `kernels` default to all of the profile."""
    source = profile.kernels if kernels is None else kernels
    found = source.filter(pl.col("class") == "communication").sort("start_ns", "end_ns", maintain_order=True)
    bytes_ = pl.col("moved_bytes" if "moved_bytes" in found.columns else "bytes")
    ranges = profile.recording.ranges.filter(pl.col("name").str.starts_with("nccl:"))
    named = around(ranges, "name", found.select("process", "thread", ns="launch_ns"))
    kinds = [_kind_of(pl.col(column)) for column in ("collective", "range", "op", "short", "name")]
    told = found.with_columns(range=named).with_columns(kind=pl.coalesce(kinds), message_bytes=bytes_).drop("range")
    return told.with_columns(bus_bytes=pl.col("message_bytes") * _bus_factors(told))


def find_gloo(profile: Profile) -> pl.DataFrame:
    """Return the collectives of a CPU like `find_collectives`. Its operators only queue them: they run on threads of
    Gloo's, which the profiler records as ranges such as `gloo:all_reduce`."""
    ranges = profile.recording.ranges.filter(pl.col("name").str.starts_with("gloo:")).sort("start_ns", "end_ns")
    steps = profile.steps.select("start_ns", "step").sort("start_ns")
    nothing = {"message_bytes": pl.Int64, "process_group": pl.String, "phase": pl.String}
    found = ranges.join_asof(steps, on="start_ns").with_columns(
        *(pl.lit(None, dtype).alias(name) for name, dtype in nothing.items()),
        kind=_kind_of(pl.col("name")),
        time_ns=pl.col("end_ns") - pl.col("start_ns"),
    )
    return _as_queued(found, profile)


def _as_queued(ran: pl.DataFrame, profile: Profile) -> pl.DataFrame:
    """What Gloo ran, with kind and phase of the operators that queued it, if they are as many: it runs them in order.
    Gloo runs a reduce-scatter as an all-reduce."""
    queued = profile.kernels.filter(pl.col("name").str.starts_with("c10d::")).sort("start_ns", "end_ns")
    told = queued.select("phase", kind=_kind_of(pl.col("name"))).filter(pl.col("kind").is_not_null())
    inside = ran.filter(ran["start_ns"].is_between(*profile.window))
    return inside.with_columns(told) if told.height == inside.height else ran


def _kind_of(text: pl.Expr) -> pl.Expr:
    return pl.coalesce(pl.when(text.str.contains(pattern)).then(pl.lit(name)) for name, pattern in _KINDS)


def _bus_factors(collectives: pl.DataFrame) -> pl.Series:
    """The bytes that the busiest link must carry, per byte of the message; 1 if the number of ranks is unknown."""
    pairs = collectives.select("kind", "group_size").unique()
    factors = [
        bus_factor(kind, ranks) if kind in COLLECTIVES and ranks is not None and ranks > 1 else 1.0
        for kind, ranks in pairs.iter_rows()
    ]
    known = pairs.with_columns(factor=pl.Series(factors, dtype=pl.Float64))
    return collectives.join(known, on=["kind", "group_size"], how="left", nulls_equal=True, maintain_order="left")[
        "factor"
    ]


def best_bandwidth(collectives: pl.DataFrame) -> float | None:
    """Return the highest bus bandwidth that a large message reached, in bytes per second; None without one."""
    large = collectives.filter((pl.col("message_bytes") >= _LARGE_BYTES) & (pl.col("time_ns") > 0))
    best = large.select((pl.col("bus_bytes") / pl.col("time_ns") * 1e9).max()).item() if large.height else None
    return None if best is None else float(best)


def needed_ns(collectives: pl.DataFrame) -> Floats:
    """Return how long each collective takes if no rank is late, as far as the recording shows: the shortest time of the
    same message, or its bytes at the bandwidth that another message reached, plus the shortest collective. Without a
    comparison, the time it took."""
    same = ["kind", "name", "message_bytes", "process_group"]
    repeated = pl.col("message_bytes").is_not_null()
    shortest = pl.when(repeated).then(pl.col("time_ns").min().over(same)).otherwise("time_ns").cast(pl.Float64)
    best = best_bandwidth(collectives)
    if best is not None:
        latency = pl.col("time_ns").filter(pl.col("kind").is_in(SYNCHRONOUS)).min()
        carried = pl.when(pl.col("kind").is_in(SYNCHRONOUS)).then(latency + pl.col("bus_bytes") / best * 1e9)
        shortest = pl.min_horizontal(shortest, carried)
    result: Floats = collectives.select(shortest.fill_null(pl.col("time_ns"))).to_series().to_numpy()
    return result


@dataclass(frozen=True)
class CoveredTime:
    """The time inside kernels or ranges, which may overlap."""

    kernels: pl.DataFrame  # start_ns, end_ns

    @cached_property
    def _curve(self) -> tuple[Ints, Ints]:
        """Moments, and the covered time up to each."""
        ordered = self.kernels.filter(pl.col("end_ns") > pl.col("start_ns")).sort("start_ns")
        starts, ends = ordered["start_ns"].to_numpy(), ordered["end_ns"].to_numpy()
        if not len(starts):
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        reached = np.maximum.accumulate(ends)
        first = np.flatnonzero(np.concatenate(([True], starts[1:] > reached[:-1])))
        last = np.concatenate((first[1:] - 1, [len(starts) - 1]))
        begin, end = starts[first], reached[last]
        done = np.cumsum(end - begin)
        moments = np.stack((begin, end), axis=1).ravel()
        covered = np.stack((done - (end - begin), done), axis=1).ravel()
        return moments, covered

    @property
    def total_ns(self) -> int:
        return int(self._curve[1][-1])

    @property
    def stretches(self) -> pl.DataFrame:
        """The same time without overlaps: start_ns and end_ns, in order."""
        moments = self._curve[0].reshape(-1, 2) if self.total_ns else np.empty((0, 2), np.int64)
        return pl.DataFrame({"start_ns": moments[:, 0], "end_ns": moments[:, 1]})

    def between(self, starts: Ints, ends: Ints) -> Floats:
        """Return how much of each time from start to end is covered."""
        # Relative times: nanoseconds since the epoch do not fit into a float.
        moments, covered = self._curve
        begin, end = (np.interp(at - moments[0], moments - moments[0], covered) for at in (starts, ends))
        result: Floats = np.maximum(0.0, end - begin)
        return result


def computing(kernels: pl.DataFrame) -> CoveredTime:
    """Return the time covered by everything but communication."""
    return CoveredTime(kernels.filter(pl.col("class") != "communication"))


def exposed_ns(collectives: pl.DataFrame, compute: CoveredTime) -> Floats:
    """Return how long nothing else runs during each collective."""
    starts, ends = collectives["start_ns"].to_numpy(), collectives["end_ns"].to_numpy()
    result: Floats = (ends - starts) - compute.between(starts, ends)
    return result
