"""The time of a training loop: what the thread of the loop does in a step, from loading a batch to saving a checkpoint.

Every moment of that thread belongs to one part. A wait for the GPU counts as synchronization wherever it happens, and a
copy to the GPU as a copy. Then the innermost range that names a part decides, then loss operators, module calls and
operators that could need a gradient, as in `attribution.phases`. The rest is `other`: Python between the parts.

The parts add up to the step of `Profile.clock`. A profiler slows Python down much more than it slows a wait, so if the
clock is that of unprofiled steps, timed by phase, each phase has its unprofiled time, and the parts inside share it as
they did while profiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.explain.trace.attribution.modules import is_module_call
from stepscope.explain.trace.attribution.phases import LOSS_OPS, named_ranges, step_ranges
from stepscope.explain.trace.loop.waits import waiting_calls
from stepscope.explain.trace.profile import Profile
from stepscope.recording import EVALUATE
from stepscope.recording.nesting import around, innermost
from stepscope.recording.store import Recording

# The ranges that PyTorch records around `next()` of a DataLoader.
IN_PROCESS, FROM_WORKERS = r"_SingleProcessDataLoaderIter", r"_MultiProcessingDataLoaderIter"
# Operators count as collating only inside a loader: `default_collate` stacks the samples of a batch.
COLLATE = r"(?i)\bcollate_fn$|default_collate$|^aten::stack$"
_PIN = r"^aten::_?pin_memory$"
_COPY_OPS = r"^aten::(?:to|_to_copy|copy_)$"
_TO_DEVICE = r"(?i)HtoD|host to device"
_OURS = "phase:"
# The phases of unprofiled steps that a training loop has, and what each is if nothing inside it says more.
OTHER = "other"
_TIMED = {"input": "input", "backward": "backward", "optimizer": "optimizer", OTHER: OTHER}
WORKERS, PROCESS, SYNCHRONISATION, COPIES = "input: workers", "input: process", "synchronization", "copies"
# In the order of a step, as tables and charts name them.
LABELS = {
    "warm-up": "warm-up",
    WORKERS: "waiting for DataLoader workers",
    PROCESS: "loading in the main process",
    "input": "loading input",
    "collate": "collating samples",
    "pin": "pinning memory",
    COPIES: "copies to the GPU",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "clipping": "gradient clipping",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "logging": "logging",
    "checkpoint": "checkpoint",
    SYNCHRONISATION: "waiting for the GPU",
    OTHER: "other",
}
INPUT_PARTS = (WORKERS, PROCESS, "input", "collate", "pin")
_KEYS = ("process", "thread")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPart:
    """Times and calls per step. `device_ns` is the kernel time that belongs to the part, whenever it ran."""

    key: str
    cpu_ns: float
    calls: float | None  # None for what is not called, such as the rest
    device_ns: float

    @property
    def label(self) -> str:
        return LABELS.get(self.key, self.key)


@dataclass(frozen=True, kw_only=True)
class LoopTime:
    """`parts` are in the order of a step and add up to `step_ns`, that of the clock."""

    parts: tuple[LoopPart, ...]
    step_ns: float
    scales: dict[str, float]  # by phase of the unprofiled steps: its time as a multiple of the profiled one
    timed: dict[str, float] | None  # the time of each of these phases, if unprofiled steps gave it

    def scale_of(self, phase: str | None) -> float:
        """Return the clock's time in a phase as a multiple of the profiled one."""
        return self.scales.get(phase or OTHER, self.scales[OTHER])

    def time_of(self, *keys: str) -> float:
        return sum(part.cpu_ns for part in self.parts if part.key in keys)


def measure_loop(profile: Profile) -> LoopTime | None:
    """Return None if no steps are marked, or if nothing on their thread names a part of a step."""
    marks = step_ranges(profile.recording).join(profile.steps, on=["step", "start_ns", "end_ns"], how="semi")
    if not profile.has_steps or not marks.height:
        return None
    events = _LoopEvents.of(profile, marks)
    if not events.named.height:
        return None
    segments = events.cut(marks, profile.recording)
    profiled = dict(segments.group_by("phase").agg(pl.col("ns").sum() / marks.height).iter_rows())
    timed = _find_timed(profile)
    step_ns = profile.clock.step_ns
    whole_ns = sum(profiled.values())
    missing_ns = 0.0
    if timed is not None:
        timed = {phase: ns * step_ns / sum(timed.values()) for phase, ns in timed.items()}
        wanted = timed
    else:
        # A CPU that runs ahead of the GPU is done with its steps earlier.
        scale = min(1.0, step_ns / max(1.0, whole_ns)) if profile.clock.kind == "profiled" else step_ns / whole_ns
        wanted = {phase: ns * scale for phase, ns in profiled.items()}
        missing_ns = step_ns - sum(wanted.values())
    scales = {phase: wanted.get(phase, 0.0) / ns for phase, ns in profiled.items() if ns}
    scales.setdefault(OTHER, step_ns / max(1.0, whole_ns))
    cpu: dict[str, float] = {}
    for phase, part, ns in segments.group_by("phase", "part").agg(pl.col("ns").sum() / marks.height).iter_rows():
        cpu[part] = cpu.get(part, 0.0) + ns * scales.get(phase, 0.0)
    for phase, ns in wanted.items():  # phases that only unprofiled steps have
        if not profiled.get(phase):
            cpu[_TIMED.get(phase, phase)] = cpu.get(_TIMED.get(phase, phase), 0.0) + ns
    if missing_ns > 0:
        cpu[OTHER] = cpu.get(OTHER, 0.0) + missing_ns
    device, calls = _device_times(profile, cpu), events.count(marks)
    parts = tuple(
        LoopPart(key=key, cpu_ns=cpu.get(key, 0.0), calls=calls.get(key), device_ns=device.get(key, 0.0))
        for key in _order({*cpu, *device})
        if cpu.get(key) or device.get(key)
    )
    return LoopTime(parts=parts, step_ns=step_ns, scales=scales, timed=timed)


def _order(keys: set[str]) -> list[str]:
    """Return parts in the order of a step; others by name before the last two."""
    known = list(LABELS)
    return sorted(
        keys, key=lambda key: (known.index(key) if key in LABELS else known.index(SYNCHRONISATION) - 0.5, key)
    )


def _find_timed(profile: Profile) -> dict[str, float] | None:
    """Return the mean time of each phase of the unprofiled steps, if they are the clock and those of a loop. If
    profiled steps are the clock, everything else on a page is about these."""
    steps = profile.recording.steps
    if profile.clock.kind != "unprofiled":
        return None
    if not (steps["phase"] == OTHER).any() or not steps["phase"].is_in(list(_TIMED)).all():
        return None
    sums = steps.group_by("phase", maintain_order=True).agg(pl.col("duration_ns").sum())
    times = {phase: ns / max(1, steps["step"].n_unique()) for phase, ns in sums.iter_rows()}
    return times if sum(times.values()) > 0 else None


def _device_times(profile: Profile, cpu: dict[str, float]) -> dict[str, float]:
    """Return kernel time per step by part. Kernels of input belong to the part of input that takes most CPU time."""
    of_input = max((key for key in INPUT_PARTS), key=lambda key: cpu.get(key, 0.0))
    part = (
        pl.when((pl.col("kind") == "memcpy") & pl.col("name").str.contains(_TO_DEVICE))
        .then(pl.lit(COPIES))
        .when(pl.col("phase") == "input")
        .then(pl.lit(of_input))
        .otherwise(pl.col("phase").fill_null(OTHER))
    )
    sums = profile.kernels.group_by(part=part).agg(pl.col("time_ns").sum())
    return {key: profile.clock.per_step(time) for key, time in sums.iter_rows()}


@dataclass(frozen=True, kw_only=True)
class _LoopEvents:
    """What happens on the thread of the loop, as intervals. `engine` has the evaluations of autograd nodes on any
    thread, if no range says when backward runs."""

    named: pl.DataFrame
    loaders: pl.DataFrame
    collating: pl.DataFrame
    pinning: pl.DataFrame
    copying: pl.DataFrame
    waiting: pl.DataFrame
    ops: pl.DataFrame
    losses: pl.DataFrame
    modules: pl.DataFrame
    traced: pl.DataFrame  # operators that could need a gradient
    engine: pl.DataFrame
    default_input: str

    @classmethod
    def of(cls, profile: Profile, marks: pl.DataFrame) -> "_LoopEvents":
        recording = profile.recording
        process, thread = marks.select(_KEYS).row(0)
        window = int(marks["start_ns"][0]), int(marks["end_ns"][-1])
        inside = (pl.col("end_ns") > window[0]) & (pl.col("start_ns") < window[1])
        here = pl.col("process").eq_missing(process) & (pl.col("thread") == thread) & inside
        ranges, ops = recording.ranges.filter(here), recording.ops.filter(here)
        both = pl.concat([frame.select("name", *_KEYS, "start_ns", "end_ns") for frame in (ranges, ops)])
        named = named_ranges(ranges)
        is_node = pl.col("name").str.starts_with(EVALUATE)
        says_backward = bool((named["phase"] == "backward").any())
        calls = pl.DataFrame(schema=recording.launches.schema)
        if not profile.on_cpu:
            calls = waiting_calls(recording, profile.kernels, window).filter(here)
        loading = named.filter(pl.col("phase") == "input")
        in_loader = innermost(loading, both.select(*_KEYS, ns="start_ns")).is_not_null()
        of_loaders = both.filter(in_loader)
        return cls(
            named=named,
            loaders=both.filter(pl.col("name").str.contains(f"{IN_PROCESS}|{FROM_WORKERS}")),
            collating=of_loaders.filter(pl.col("name").str.contains(COLLATE)),
            pinning=of_loaders.filter(pl.col("name").str.contains(_PIN)),
            copying=_find_copies(profile, ops),
            waiting=calls,
            ops=ops,
            losses=ops.filter(pl.col("name").str.contains(LOSS_OPS)),
            modules=ranges.filter(is_module_call()),
            traced=ops.filter(pl.col("sequence").is_not_null() & ~is_node),
            engine=recording.ops.filter(inside & is_node & pl.lit(not says_backward)),
            default_input=_kind_of_loaders(profile),
        )

    def cut(self, marks: pl.DataFrame, recording: Recording) -> pl.DataFrame:
        """Return the steps in segments with `ns`, their `part`, and the `phase` whose unprofiled time they share. What
        lies between two steps is part of the first."""
        process, thread = marks.select(_KEYS).row(0)
        begin, end = int(marks["start_ns"][0]), int(marks["end_ns"][-1])
        borders = [frame[column].to_numpy() for frame in (*self._all(), marks) for column in ("start_ns", "end_ns")]
        moments = np.unique(np.clip(np.concatenate(borders), begin, end))
        points = pl.DataFrame({"ns": moments[:-1]}).with_columns(
            process=pl.lit(process, pl.Int64), thread=pl.lit(thread, pl.Int64)
        )
        frame = pl.DataFrame(
            {
                "ns": np.diff(moments),
                "part": self._find_parts(points),
                "phase": find_timed_phases(recording, points),
            }
        )
        return frame.with_columns(part=self._bridge(frame["part"]).fill_null(OTHER))

    def _all(self) -> Iterator[pl.DataFrame]:
        yield from (self.named, self.loaders, self.collating, self.pinning, self.copying, self.waiting)
        yield from (self.losses, self.modules, self.traced, self.engine)

    def _find_parts(self, points: pl.DataFrame) -> pl.Series:
        def is_in(frame: pl.DataFrame, *, by_thread: bool = True) -> pl.Series:
            return innermost(frame, points, by_thread=by_thread).is_not_null()

        row = innermost(self.named, points)
        here = self.named["phase"].gather(row) if self.named.height else row.cast(pl.String)
        loader = around(self.loaders, "name", points)
        frame = pl.DataFrame({"here": here, "row": row, "loader": loader}).with_columns(
            waits=is_in(self.waiting),
            copies=is_in(self.copying),
            collates=is_in(self.collating),
            pins=is_in(self.pinning),
            in_loss=is_in(self.losses),
            in_module=is_in(self.modules),
            traced=is_in(self.traced),
            engine=is_in(self.engine, by_thread=False),
        )
        # The whole of a range around `next()` belongs to the loader inside it.
        kind = (
            pl.when(pl.col("loader").str.contains(FROM_WORKERS))
            .then(pl.lit(WORKERS))
            .when(pl.col("loader").str.contains(IN_PROCESS))
            .then(pl.lit(PROCESS))
        )
        frame = frame.with_columns(kind=kind).with_columns(
            kind=pl.coalesce("kind", pl.col("kind").drop_nulls().first().over("row"), pl.lit(self.default_input))
        )
        loads = (pl.col("here") == "input").fill_null(value=False)
        outside = pl.col("here").is_null() | (pl.col("here") == "forward")
        # An optimizer that calls modules runs a closure.
        calls_model = outside | (pl.col("here") == "optimizer")
        part = (
            pl.when("waits")
            .then(pl.lit(SYNCHRONISATION))
            .when("copies")
            .then(pl.lit(COPIES))
            .when(loads & pl.col("collates"))
            .then(pl.lit("collate"))
            .when(loads & pl.col("pins"))
            .then(pl.lit("pin"))
            .when(loads)
            .then("kind")
            .when(outside & pl.col("in_loss"))
            .then(pl.lit("loss"))
            .when(calls_model & pl.col("in_module"))
            .then(pl.lit("forward"))
            .when(pl.col("here").is_not_null())
            .then("here")
            .when("engine")
            .then(pl.lit("backward"))
            .when("traced")
            .then(pl.lit("forward"))
        )
        return frame.select(part.alias("part"))["part"]

    def _bridge(self, part: pl.Series) -> pl.Series:
        """Return the parts with gaps filled: without ranges around forward or backward, Python between two of their
        operators belongs to them."""
        before, after = part.forward_fill(), part.backward_fill()
        bridged = [
            key for key, frame in (("forward", self.modules), ("backward", self.named)) if not self._says(key, frame)
        ]
        same = (before == after) & before.is_in(bridged)
        return pl.select(pl.when(part.is_null() & same).then(before).otherwise(part)).to_series()

    def _says(self, key: str, frame: pl.DataFrame) -> bool:
        return bool((frame["phase"] == key).any()) if "phase" in frame.columns else bool(frame.height)

    def count(self, marks: pl.DataFrame) -> dict[str, float]:
        """Return the calls of each part per step."""
        counts = {
            COPIES: self.copying.height,
            SYNCHRONISATION: _count_calls(self.waiting, self.ops),
            "forward": _count_outermost(self.modules),
            "collate": _count_outermost(self.collating),
            "pin": _count_outermost(self.pinning),
            WORKERS: self.loaders.filter(pl.col("name").str.contains(FROM_WORKERS)).height,
            PROCESS: self.loaders.filter(pl.col("name").str.contains(IN_PROCESS)).height,
        }
        for (phase,), ranges in self.named.partition_by("phase", as_dict=True).items():
            ours = ranges.filter(pl.col("name") == f"{_OURS}{phase}")
            key = self.default_input if phase == "input" else str(phase)
            counts[key] = counts.get(key) or _count_outermost(ours if ours.height else ranges)
        return {key: count / marks.height for key, count in counts.items() if count}


def find_timed_phases(recording: Recording, points: pl.DataFrame) -> pl.Series:
    """Return the phase of unprofiled steps that each moment belongs to, on any thread of its process."""
    ours = recording.ranges.filter(pl.col("name").is_in([f"{_OURS}{phase}" for phase in _TIMED]))
    return around(ours, "name", points, by_thread=False).str.strip_prefix(_OURS).fill_null(OTHER)


def scale_to_clock(profile: Profile, loop: LoopTime | None, points: pl.DataFrame) -> pl.Series:
    """Return the clock's time at each moment as a multiple of the recorded one."""
    phases = find_timed_phases(profile.recording, points)
    return pl.Series([loop.scale_of(phase) if loop else 1.0 for phase in phases.to_list()], dtype=pl.Float64)


def _kind_of_loaders(profile: Profile) -> str:
    """Return the part of input if PyTorch's own ranges do not say it: by how the loaders are configured."""
    loop = profile.recording.manifest.loop
    kinds = {WORKERS if one.num_workers else PROCESS for one in loop.loaders} if loop else set()
    return kinds.pop() if len(kinds) == 1 else "input"


def _find_copies(profile: Profile, ops: pl.DataFrame) -> pl.DataFrame:
    """Return the outermost operators around the launches of copies to the GPU."""
    copies = profile.kernels.filter(pl.col("name").str.contains(_TO_DEVICE) & pl.col("launch_ns").is_not_null())
    candidates = ops.filter(pl.col("name").str.contains(_COPY_OPS)).sort("start_ns", -pl.col("end_ns"))
    outer = candidates.filter(_is_outermost(candidates))
    points = copies.select("process", "thread", ns="launch_ns")
    used = innermost(outer, points).drop_nulls().unique().sort()
    return outer[used.to_list()] if used.len() else outer.clear()


def _is_outermost(ordered: pl.DataFrame) -> pl.Series:
    """Return which intervals of one thread, sorted by start, do not lie inside an earlier one."""
    reached = ordered["end_ns"].cum_max().shift(1)
    return (ordered["start_ns"] >= reached).fill_null(value=True)


def _count_calls(waits: pl.DataFrame, ops: pl.DataFrame) -> int:
    """Return the number of waits; those inside one operator, such as a copy and the wait for it, are one."""
    rows = innermost(ops, waits.select(*_KEYS, ns="start_ns"))
    return rows.drop_nulls().n_unique() + rows.null_count()


def _count_outermost(intervals: pl.DataFrame) -> int:
    ordered = intervals.sort("start_ns", -pl.col("end_ns"))
    return int(_is_outermost(ordered).sum())
