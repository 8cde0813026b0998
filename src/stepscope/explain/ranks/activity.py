"""What one rank did, reduced to what a comparison of ranks needs: a few hundred kilobytes instead of a profile.

A page over hundreds of ranks cannot hold their kernels. It needs when each rank arrived at its collectives, when its
device ran, computed and waited for input, what its CPU did meanwhile, and which work it did how often. All times are
kept to the nanosecond, so a comparison of these gives the same figures as one of whole profiles. Kernels that follow
each other without a gap are one stretch.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import msgspec
import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import SYNCHRONOUS, CoveredTime, computing, find_collectives, find_gloo
from stepscope.explain.trace.attribution.phases import named_ranges, step_ranges
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.extent import StepExtent
from stepscope.explain.trace.profile import Profile
from stepscope.recording.nesting import look_up
from stepscope.recording.store import Manifest, Recording

INPUT_RANGES = r"(?i)enumerate\(DataLoader\)|\bdata ?load(?:er|ing)?\b|\bnext_batch\b|^phase:input$"
_LEAST_PAUSE_NS = 1_000_000  # a shorter time without operators is ordinary Python
_LEAST_RANGE_NS = 100_000
_MOST_KEPT = 2_000  # pauses, or ranges of the CPU: the longest
_PLACES = {
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "kind": pl.String,
    "name": pl.String,
    "message_bytes": pl.Int64,
    "group": pl.String,
    "step": pl.Int32,
    "phase": pl.String,
    "bucket": pl.Int32,  # its number among those of its step, kind and group
    "buckets": pl.Int32,
}
_OF_MODEL = ("input", "forward", "loss", "backward", "optimizer")  # phases
_WORK = ("name", "shape", "count", "time_ns")


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """Sums over the counted steps, in nanoseconds, and over `devices`."""

    devices: int
    busy: int
    computed: int  # kernels other than communication; overlapping ones each count
    hidden: int  # communication that overlaps with other kernels
    exposed: int


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """One rank of a run. Frames have `start_ns` and `end_ns` on the rank's own clock, without overlap where they are
    `stretches`."""

    manifest: Manifest
    extent: StepExtent
    totals: RankTotals
    on_cpu: bool
    has_gaps: bool  # whether idle time is meaningful
    unprofiled_ns: int | None
    unprofiled_steps: tuple[int, ...]
    collectives: pl.DataFrame  # those that no rank can end before all have begun
    running: pl.DataFrame  # stretches
    computes: pl.DataFrame  # stretches
    loading: pl.DataFrame  # stretches
    phases: pl.DataFrame  # of computing, with `phase`
    host: pl.DataFrame  # ranges of the CPU, with `name` and `source_line`
    pauses: pl.DataFrame  # without an operator, with the one before: `after` and its `source`
    work: pl.DataFrame  # kernels by name and shape: count, time_ns

    @property
    def rank(self) -> int | None:
        return self.manifest.rank

    @cached_property
    def clock(self) -> Clock:
        return Clock(
            extent=self.extent,
            find_busy_ns=lambda: self.per_device(self.totals.busy),
            unprofiled_ns=self.unprofiled_ns,
            unprofiled_steps=tuple(map(Fraction, self.unprofiled_steps)),
        )

    def per_device(self, total_ns: int) -> float:
        return total_ns / self.totals.devices

    @property
    def step_ns(self) -> float:
        return self.clock.step_ns

    @property
    def idle_share(self) -> float:
        return self.clock.idle_share

    @property
    def computed_ns(self) -> float:
        """The time of kernels other than communication per step, mean over devices."""
        return self.clock.per_step(self.per_device(self.totals.computed))

    @property
    def hidden_ns(self) -> float:
        """Communication per step that overlaps with other kernels, mean over devices."""
        return self.clock.per_step(self.per_device(self.totals.hidden))

    @property
    def exposed_ns(self) -> float:
        """Communication per step that overlaps with nothing, mean over devices."""
        return self.clock.per_step(self.per_device(self.totals.exposed))

    @property
    def origin_ns(self) -> int:
        """A moment near the recording: nanoseconds since the epoch do not fit a double."""
        return self.extent.window[0]

    @cached_property
    def compute(self) -> CoveredTime:
        return CoveredTime(self.computes)

    @cached_property
    def busy(self) -> CoveredTime:
        return CoveredTime(self.running)

    @cached_property
    def input(self) -> CoveredTime:
        return CoveredTime(self.loading)

    def named(self, file: str) -> "RankActivity":
        """Return the same rank, read from this file."""
        return replace(self, manifest=msgspec.structs.replace(self.manifest, file=file))


def reduce_rank(profile: Profile) -> RankActivity:
    """Return what one rank did. Of several devices, the busiest counts for what ran when: a rank uses one."""
    recording, kernels = profile.recording, _busiest(profile.kernels)
    found = find_gloo(profile) if profile.on_cpu else find_collectives(profile, kernels)
    overhead = recording.manifest.overhead
    whole = [device.whole for device in profile.devices]
    steps = recording.steps.group_by("step", maintain_order=True).agg(ns=pl.col("duration_ns").sum())
    # The operators of a CPU only queue its collectives.
    ran = [kernels, found] if profile.on_cpu else [kernels]
    return RankActivity(
        manifest=recording.manifest,
        extent=profile.extent,
        totals=RankTotals(
            devices=len(whole),
            busy=sum(one.busy_ns for one in whole),
            computed=int(profile.kernels.filter(pl.col("class") != "communication")["time_ns"].sum()),
            hidden=sum(one.communication_hidden_ns for one in whole),
            exposed=sum(one.communication_exposed_ns for one in whole),
        ),
        on_cpu=profile.on_cpu,
        has_gaps=profile.has_gaps,
        unprofiled_ns=overhead.plain_ns if overhead else None,
        unprofiled_steps=tuple(steps["ns"].to_list()),
        collectives=_place(found.filter(pl.col("kind").is_in(SYNCHRONOUS))),
        running=CoveredTime(pl.concat([one.select("start_ns", "end_ns") for one in ran])).stretches,
        computes=computing(kernels).stretches,
        loading=CoveredTime(recording.ranges.filter(pl.col("name").str.contains(INPUT_RANGES))).stretches,
        phases=_join_phases(kernels),
        host=_host_ranges(recording),
        pauses=_find_pauses(recording, profile.window),
        work=_count_work(profile, kernels),
    )


def _busiest(kernels: pl.DataFrame) -> pl.DataFrame:
    devices = kernels.group_by("process", "device").agg(pl.col("time_ns").sum())
    chosen = devices.sort("time_ns", "process", "device", descending=[True, False, False]).head(1)
    return kernels.join(chosen.select("process", "device"), on=["process", "device"], how="semi", nulls_equal=True)


def _place(found: pl.DataFrame) -> pl.DataFrame:
    """The collectives with `group`, their number in the step, and `place`, their row. Without a known group, all are in
    one."""
    groups = found["process_group"].drop_nulls().unique().to_list()
    only = groups[0] if len(groups) == 1 else None if groups else ""
    grouped = found.with_columns(group=pl.col("process_group").fill_null(pl.lit(only, pl.String)))
    same = ("step", "kind", "group")
    numbered = grouped.filter(pl.col("group").is_not_null()).with_columns(
        bucket=pl.int_range(1, pl.len() + 1).over(same), buckets=pl.len().over(same)
    )
    return numbered.select(pl.col(name).cast(kind) for name, kind in _PLACES.items()).with_row_index("place")


def _join_phases(kernels: pl.DataFrame) -> pl.DataFrame:
    """Runs of one phase, from the start of its first kernel to the end of the last. Communication has its own."""
    computed = kernels.filter(pl.col("class") != "communication").sort("start_ns", "end_ns")
    runs = computed.group_by(pl.col("phase").rle_id().alias("run"), maintain_order=True)
    joined = runs.agg(pl.col("phase", "start_ns").first(), pl.col("end_ns").max())
    return joined.select("start_ns", "end_ns", phase=pl.col("phase").fill_null("other"))


def _of_loop(recording: Recording, frame: pl.DataFrame) -> pl.DataFrame:
    """The rows on the thread that runs the loop: the one that marks steps, or the one with the most operators."""
    marked = step_ranges(recording).select("process", "thread").head(1)
    if not marked.height:
        busiest = recording.ops.group_by("process", "thread").len().sort("len", "process", "thread", descending=True)
        marked = busiest.select("process", "thread").head(1)
    return frame.join(marked, on=["process", "thread"], how="semi", nulls_equal=True)


def _host_ranges(recording: Recording) -> pl.DataFrame:
    """The longest ranges that say what the CPU does besides running the model: phases such as logging,
    synchronizations, and the user's own."""
    ranges = _of_loop(recording, recording.ranges.filter(pl.col("source") != "python"))
    about = r"^(?:module:|part:|step:|ProfilerStep#|Optimizer\.|nccl:|gloo:|DistributedDataParallel|FSDP|torch/)"
    lasting = pl.col("end_ns") - pl.col("start_ns")
    kept = ranges.filter(
        (lasting >= _LEAST_RANGE_NS) & (pl.col("source") != "module") & ~pl.col("name").str.contains(about)
    )
    phase = named_ranges(kept).select("name", "source", "phase").unique(["name", "source"])
    named = kept.join(phase, on=["name", "source"], how="left", maintain_order="left")
    named = named.filter(~pl.col("phase").is_in(_OF_MODEL).fill_null(value=False))
    told = pl.when(pl.col("name").str.starts_with("sync:")).then("name").otherwise(pl.coalesce("phase", "name"))
    longest = named.with_columns(name=told).sort(lasting, "start_ns", descending=[True, False]).head(_MOST_KEPT)
    return longest.sort("start_ns").select("start_ns", "end_ns", "name", "source_line")


def _find_pauses(recording: Recording, window: tuple[int, int]) -> pl.DataFrame:
    """The longest times in which the CPU neither runs an operator nor calls the driver, on any thread: backward has its
    own, and compiled code launches kernels without operators."""
    columns = ["name", "start_ns", "end_ns", "source"]
    calls = recording.launches.with_columns(name=pl.lit(None, pl.String), source=pl.lit(None, pl.String))
    events = pl.concat([recording.ops.select(columns), calls.select(columns)])
    ordered = events.filter((pl.col("end_ns") > window[0]) & (pl.col("start_ns") < window[1])).sort(
        "start_ns", "end_ns"
    )
    starts, ends = ordered["start_ns"].to_numpy(), ordered["end_ns"].to_numpy()
    empty = {"start_ns": pl.Int64, "end_ns": pl.Int64, "after": pl.String, "source": pl.String}
    if len(starts) < 2:
        return pl.DataFrame(schema=empty)
    reached = np.maximum.accumulate(ends)
    holes = np.flatnonzero(starts[1:] - reached[:-1] >= _LEAST_PAUSE_NS)
    # The operator that ended last. A call has no name here.
    named = np.where(ordered["name"].is_not_null().to_numpy(), ends, np.iinfo(np.int64).min)
    latest = np.maximum.accumulate(np.where(named == np.maximum.accumulate(named), np.arange(len(named)), 0))
    name, source = (ordered[column].gather(latest[holes].tolist()) for column in ("name", "source"))
    found = pl.DataFrame(
        {"start_ns": reached[holes], "end_ns": starts[holes + 1], "after": name, "source": source}, schema=empty
    )
    lasting = pl.col("end_ns") - pl.col("start_ns")
    known = found.filter(pl.col("after").is_not_null())
    return known.sort(lasting, "start_ns", descending=[True, False]).head(_MOST_KEPT).sort("start_ns")


def _count_work(profile: Profile, kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels by name and shape. The shape of a kernel is its launch; that of a CPU's operator, its inputs."""
    computed = kernels.filter(pl.col("class") != "communication")
    if profile.on_cpu:
        shapes = look_up(profile.recording.ops, "shapes", computed["op_row"])
        shape = pl.select(shapes.fill_null("").alias("shape")).to_series()
    else:
        sides = [f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz"]
        shape = computed.select(pl.concat_str(pl.col(sides).fill_null(0), separator=",")).to_series()
    grouped = computed.with_columns(shape=shape).group_by("name", "shape").agg(pl.col("count", "time_ns").sum())
    return grouped.sort("time_ns", "name", "shape", descending=[True, False, False]).select(_WORK)
