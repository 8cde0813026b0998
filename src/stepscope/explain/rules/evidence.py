"""The input of the rules: the kernels of one device in the recorded steps, the CPU's waits, and what a change would
save.

In a recording of several devices, the rules use the busiest one: all devices do the same work, so a finding about one
applies to all.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import CoveredTime, computing
from stepscope.explain.ranks.lateness import RankTimes
from stepscope.explain.rules.replay import LONG_GAP_NS, Bools, Change, Floats, Replay
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.loop.loop_time import LoopTime, measure_loop, scale_to_clock
from stepscope.explain.trace.loop.waits import LEAST_WAIT_NS, find_lines, waiting_calls
from stepscope.explain.trace.profile import Profile
from stepscope.explain.trace.roofline import operator_calls
from stepscope.hardware import Hardware
from stepscope.recording import EVALUATE
from stepscope.recording.nesting import innermost, look_up
from stepscope.spec import Case, ModelShape

# The share of the data sheet's peak that good kernels reach. On an H200: copies 4.28 of 4.8 TB/s, large GEMMs 700 to
# 790 of 989 TFLOP/s in bf16, 50 of 67 in fp32, 350 to 400 of 495 in tf32.
BANDWIDTH_SHARE = 0.89
PRODUCT_SHARE = 0.75
# The share of CPU time in forward and backward that is left after compiling. Training: from 42.3 to 20.6 ms in one pair
# and from 51 to 19 ms in another, 0.49 and 0.37: a third of the launches, each as slow as before, because guards and
# autograd remain. Inference: from 15.9 to 3.6 ms. (The small model in bf16 on an H200.)
COMPILED_TRAINING_HOST_SHARE, COMPILED_INFERENCE_HOST_SHARE = 0.45, 0.25
WORTH_SAYING = 0.01  # of a step
WORTH_EXPLAINING = 0.02  # of a saving: more than rounding
# Kernels: a replay takes 0.4 µs each, and there are about 20 replays. This is three steps of 24 layers. With one step,
# the CPU's speed was off by 40% in GPU-bound steps; with 32 steps instead of 16, no saving changed by 1%.
MOST_REPLAYED = 20_000
# The driver queues up to 1024 launches; after that, each launch waits for a kernel to end.
_FULL_QUEUE = 500
# What PyTorch's profiler records around compiled code.
_COMPILED = rf"^(?:{EVALUATE})?CompiledFunction|^Torch-Compiled Region|^## Call CompiledFxGraph"
POINTWISE = ("elementwise", "copy", "reduction", "softmax", "norm", "random", "index", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change saves per step: GPU time and step time."""

    gpu_ns: float
    step_ns: float
    change: Change


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    profile: Profile
    rank_times: RankTimes | None = None  # of all ranks, if there are several

    @property
    def hardware(self) -> Hardware | None:
        return self.profile.hardware

    @property
    def case(self) -> Case | None:
        return self.profile.recording.manifest.case

    @property
    def is_builtin(self) -> bool:
        return self.case is not None and isinstance(self.case.workload.model, ModelShape)

    @property
    def clock(self) -> Clock:
        """The clock of the whole recording, so that findings agree with its tables."""
        return self.profile.clock

    @property
    def step_ns(self) -> float:
        return max(1.0, self.clock.step_ns)

    @property
    def idle_share(self) -> float:
        return self.clock.idle_share

    @cached_property
    def window(self) -> tuple[int, int]:
        """From the first start to the last end of the kernels and steps that the rules use."""
        times = pl.concat([frame.select("start_ns", "end_ns") for frame in (self.kernels, self.steps)])
        first, last = times["start_ns"].min(), times["end_ns"].max()
        assert isinstance(first, int)
        assert isinstance(last, int)
        return first, last

    @cached_property
    def num_steps(self) -> float:
        """The number of steps to divide by. If the rules use some of the steps, these count as much as their share of
        the kernel time, so that a total per step is that of the tables."""
        if self.steps.height == self.profile.steps.height:
            return self.clock.num_steps
        time_ns = int(self._in_steps(self.profile.steps)["time_ns"].sum())
        return self.clock.num_steps * int(self.kernels["time_ns"].sum()) / max(1, time_ns)

    @property
    def device_window(self) -> tuple[int, int]:
        """When the steps that the rules use begin and end on the device."""
        windows = self.profile.step_windows[: max(1, self.steps.height)]
        return windows[0][0], windows[-1][1]

    @property
    def num_marked(self) -> int:
        """The number of steps to divide by if something happens on the CPU, such as a wait."""
        return max(1, self.steps["step"].n_unique())

    @cached_property
    def steps(self) -> pl.DataFrame:
        """The steps that the rules use: all of them, or the first ones of a long recording."""
        steps = self.profile.steps
        if not steps.height or self._on_device.height <= MOST_REPLAYED:
            return steps
        return steps.head(max(1, steps.height * MOST_REPLAYED // self._on_device.height))

    @cached_property
    def _on_device(self) -> pl.DataFrame:
        kernels = self.profile.kernels
        times = kernels.group_by("process", "device").agg(pl.col("time_ns").sum())
        busiest = times.sort("time_ns", "process", "device", descending=[True, False, False])
        if busiest.height == 1:
            return kernels
        chosen = busiest.head(1).select("process", "device")
        return kernels.join(chosen, on=["process", "device"], how="semi", nulls_equal=True)

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """The kernels sorted by start, with `row` and the cost of their operator (flops and bytes, split among its
        kernels by time); `dtype` is the operator's if the name has none. Without warm-up steps."""
        kernels = self._with_costs(self._in_steps(self.steps))
        return kernels.sort("start_ns", "end_ns", maintain_order=True).with_row_index("row")

    def _in_steps(self, steps: pl.DataFrame) -> pl.DataFrame:
        kernels = self._on_device.filter(pl.col("phase").fill_null("") != "warm-up")
        if steps.height == self.profile.steps.height:
            return kernels
        return kernels.filter(pl.col("end_ns") <= self.profile.step_windows[steps.height - 1][1])

    def _with_costs(self, kernels: pl.DataFrame) -> pl.DataFrame:
        calls = operator_calls(replace(self.profile, kernels=kernels)).select(
            "op_row", "shapes", "dtypes", "op_dtype", "flops", "bytes", call_ns="time_ns", call_kernels="kernels"
        )
        share = pl.col("time_ns") / pl.col("call_ns").clip(1)
        return (
            kernels.rename({"bytes": "moved_bytes"})  # by a copy or a collective
            .join(calls, on="op_row", how="left", maintain_order="left")
            .with_columns(
                flops=pl.col("flops") * share,
                bytes=pl.col("bytes") * share,
                dtype=pl.when(pl.col("kind") != "cpu").then(pl.coalesce("dtype", "op_dtype")),
            )
        )

    @cached_property
    def waits(self) -> pl.DataFrame:
        """The CPU's waits for the device, sorted by end: `wait` (their row), start_ns, end_ns, op_row, op, `line` of
        code, step, kind, `clock_ns` (the time by the clock) and `last`: whether nothing more was launched in its step.
        The kind is `call` for a call that waits, and `queue` for a launch that waited for a free slot in the queue.
        Short calls do not count as waits."""
        start, end = self.window
        inside = (pl.col("end_ns") > start) & (pl.col("start_ns") < end)
        ops = self.profile.ops.with_row_index("op_row").filter(inside)
        calls = waiting_calls(self.profile.recording, self._on_device, self.window)
        points = calls.select("process", "thread", ns="start_ns")
        row = innermost(ops, points)
        around = {
            "op_row": look_up(ops, "op_row", row),
            "op": look_up(ops, "name", row),
            "line": find_lines(self.profile.recording, points),
            "clock_ns": (calls["end_ns"] - calls["start_ns"]) * scale_to_clock(self.profile, self.loop, points),
        }
        calls = calls.select("start_ns", "end_ns", kind=pl.lit("call"), **around)
        queued = self._queued_launches().with_columns(kind=pl.lit("queue"))
        waits = pl.concat([calls, queued], how="diagonal").sort("end_ns")
        return _with_steps(waits, self.steps, self.kernels).with_row_index("wait")

    def _queued_launches(self) -> pl.DataFrame:
        launched = self.kernels.filter(pl.col("launch_ns").is_not_null() & (pl.col("launched") == "op"))
        if not launched.height:
            return launched.select(start_ns="launch_ns", end_ns="launch_end_ns")
        called = launched["launch_ns"].to_numpy()
        ahead = np.searchsorted(np.sort(called), called) - np.searchsorted(
            np.sort(launched["end_ns"].to_numpy()), called
        )
        lasting = launched["launch_end_ns"] - launched["launch_ns"] >= LEAST_WAIT_NS
        return launched.filter(pl.Series(ahead >= _FULL_QUEUE) & lasting).select(
            start_ns="launch_ns", end_ns="launch_end_ns"
        )

    @cached_property
    def replay(self) -> Replay:
        return Replay(kernels=self.kernels, waits=self.waits, begin_ns=self.device_window[0])

    @cached_property
    def host_scale(self) -> float:
        if self.clock.kind == "profiled":
            return 1.0
        return self.replay.calibrate(self.clock.step_ns * self.num_steps)

    @cached_property
    def replayed_ns(self) -> float:
        return self.replay.run(self.replay.unchanged(), host_scale=self.host_scale)

    @cached_property
    def is_stall(self) -> Bools:
        """The kernels before which the GPU was idle for long, waiting for a late launch."""
        result: Bools = self.replay.starved & (self.replay.idle_before > LONG_GAP_NS)
        return result

    @cached_property
    def loop(self) -> LoopTime | None:
        """The time of the training loop, if the recording shows it."""
        return measure_loop(self.profile)

    @property
    def timed_input_ns(self) -> float | None:
        """How long unprofiled steps load input, if they say so: a profiler does not slow a wait for workers down."""
        return self.loop.timed.get("input") if self.loop is not None and self.loop.timed is not None else None

    @cached_property
    def computing_ns(self) -> float:
        """The time per step in which anything but communication runs."""
        return computing(self.kernels).total_ns / self.num_steps

    @cached_property
    def model_ns(self) -> float:
        """The same without input, as far as it is part of the step: on a CPU, operators load input too, and a profiler
        slows all of them down, so they take at most what unprofiled steps leave for them."""
        if not self.profile.on_cpu:
            return self.computing_ns
        model = self.kernels.filter(pl.col("phase").fill_null("") != "input")
        return min(computing(model).total_ns / self.num_steps, self.step_ns - (self.timed_input_ns or 0.0))

    def idle_ns(self, before: Bools) -> float:
        """Return the idle time per step before these kernels, by the clock."""
        return float(self.replay.idle_before[before].sum()) / self.num_steps * self.idle_scale

    @cached_property
    def idle_scale(self) -> float:
        """The clock's idle time as a share of the recorded one: a profiler lengthens idle time."""
        after = max(0, self.device_window[1] - int(self.replay.end.max()))
        recorded_ns = (float(self.replay.idle_before.sum()) + after) / self.num_steps
        return min(1.0, self.clock.idle_ns / max(1.0, recorded_ns))

    def gain(self, change: Change) -> Gain:
        """Return what a change saves per step: at most the GPU time that it saves, and the idle time that the launches
        it concerns cause by being late. A faster CPU also reaches its stalls and waits earlier, and other launches, but
        those are not what the change is about."""
        gpu = float((self.durations - change.time_ns).sum()) / self.num_steps
        after = self.replay.run(change, host_scale=self.host_scale)
        step = (self.replayed_ns - after) / self.num_steps
        waited = bool(change.skipped_waits)
        step = min(step, gpu + (self.clock.idle_ns if waited else self.idle_ns(self.is_concerned(change))))
        return Gain(gpu_ns=gpu, step_ns=min(max(0.0, step), self.step_ns), change=change)

    def is_concerned(self, change: Change) -> Bools:
        """Return which kernels started late because of a launch that a change makes cheaper, or because of the launch
        after it. A stall counts only if the change is about the CPU time of the stall itself."""
        cheaper = (change.host_share < 1) | change.removed
        order = np.argsort(self.replay.launch, kind="stable")
        follows = np.zeros_like(cheaper)
        follows[order[1:]] = cheaper[order[:-1]]
        shorter_stall = self.is_stall & (change.host_share < 1) & ~change.removed
        result: Bools = self.replay.starved & np.where(self.is_stall, shorter_stall, cheaper | follows)
        return result

    def gain_without(self, waits: pl.DataFrame) -> Gain | None:
        """Return the gain without these waits, None if it is too small."""
        change = self.replay.unchanged()
        change.skipped_waits = set(waits["wait"].to_list())
        gain = self.gain(change)
        return gain if gain.step_ns >= WORTH_SAYING * self.step_ns else None

    def mark(self, kernels: pl.DataFrame) -> Bools:
        """Return a mask of these kernels among all kernels."""
        marked = np.zeros(self.kernels.height, dtype=np.bool_)
        marked[kernels["row"].to_numpy()] = True
        return marked

    def gain_of(self, new_ns: Floats, removed: Bools | None = None, *, host_share: Floats | None = None) -> Gain:
        """Return the gain if kernels take `new_ns` (by row), `removed` ones disappear together with their CPU time, and
        `host_share` of the CPU time of the others remains."""
        change = self.replay.unchanged()
        change.time_ns = np.minimum(new_ns, change.time_ns)
        if host_share is not None:
            change.host_share = host_share
        if removed is not None:
            change.removed = removed
            change.time_ns[removed] = 0.0
            change.host_share[removed] = 0.0
        return self.gain(change)

    def merged(self, groups: pl.DataFrame, *, host_share: Floats, after_all: bool = False) -> Gain:
        """Return the gain if each group of kernels in `groups` (row, group, fused_ns: the group's new time) becomes one
        kernel, at the position of the group's first or, with `after_all`, last kernel. `host_share` of the CPU time
        remains."""
        change = self.replay.unchanged()
        position = pl.col("row").max() if after_all else pl.col("row").min()
        members = groups.select("row", carrier=position.over("group"))
        rows, carriers = (members[name].to_numpy().astype(np.int64) for name in ("row", "carrier"))
        change.carrier[rows] = carriers
        change.removed[rows] = rows != carriers
        total = np.bincount(carriers, weights=change.time_ns[rows], minlength=len(change.time_ns))[carriers]
        change.time_ns[rows] *= groups["fused_ns"].to_numpy() / np.maximum(1.0, total)
        change.host_share = host_share
        return self.gain(change)

    @cached_property
    def compiled_host_share(self) -> Floats:
        """The share of CPU time before each launch that remains after compiling. The optimizer is not compiled with the
        model, and long stalls are not launch overhead."""
        phase = self.kernels["phase"].fill_null("")
        share = COMPILED_TRAINING_HOST_SHARE if self.has_backward else COMPILED_INFERENCE_HOST_SHARE
        kept = (phase == "optimizer").to_numpy() | ~self.replay.is_launching | self.is_stall
        return np.where(kept, 1.0, share)

    @cached_property
    def has_backward(self) -> bool:
        return bool((self.profile.kernels["phase"] == "backward").any())

    @cached_property
    def is_compiled(self) -> bool:
        """Whether `torch.compile` made some of the code that ran, by the case, by its kernels or by its operators."""
        recording = self.profile.recording
        if recording.manifest.compiled or (self.case is not None and self.case.workload.compile):
            return True
        named = any(frame["name"].str.contains(_COMPILED).any() for frame in (recording.ops, recording.ranges))
        return named or bool(self.profile.kernels["is_fused"].any())

    @cached_property
    def uses_graphs(self) -> bool:
        """Whether CUDA graphs launched some of the kernels."""
        return bool((self.profile.kernels["launched"] == "graph").any())

    def share_outside(self, ranges: pl.DataFrame) -> Floats:
        """Return the share of the CPU time before each launch outside `ranges` (start_ns, end_ns)."""
        since, launch = self.replay.cpu_since, self.replay.launch
        result: Floats = 1 - CoveredTime(ranges).between(since, launch) / np.maximum(1, launch - since)
        return result

    def per_step(self, kernels: pl.DataFrame) -> float:
        """Return the time of these kernels per step."""
        return float(kernels["time_ns"].sum()) / self.num_steps

    @property
    def durations(self) -> Floats:
        return self.kernels["time_ns"].to_numpy().astype(np.float64)


def _with_steps(waits: pl.DataFrame, steps: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Add step and last."""
    launches = kernels.filter(pl.col("launch_ns").is_not_null())
    if steps.height:
        ranges = steps.with_columns(process=pl.lit(0), thread=pl.lit(0))
        points = waits.select(process=pl.lit(0), thread=pl.lit(0), ns="start_ns")
        waits = waits.with_columns(step=steps["step"].gather(innermost(ranges, points)))
        final = launches.group_by("step").agg(final_ns=pl.col("launch_ns").max())
        waits = waits.join(final, on="step", how="left", maintain_order="left", nulls_equal=True)
    else:
        waits = waits.with_columns(
            step=pl.lit(0, pl.Int32),
            final_ns=pl.lit(launches["launch_ns"].max() if launches.height else None, pl.Int64),
        )
    return waits.with_columns(last=(pl.col("end_ns") >= pl.col("final_ns")).fill_null(value=True)).drop("final_ns")


def ms(time_ns: float) -> str:
    """Return a readable time: `12.3 ms`, `45 µs`."""
    if time_ns >= 999.5e6:
        return f"{time_ns / 1e6:,.0f} ms"
    return f"{time_ns / 1e6:.3g} ms" if time_ns >= 1e5 else f"{time_ns / 1e3:.3g} µs"


def often(count: float) -> str:
    """Return how often something happens: `once`, `2.5 times`."""
    return "once" if count == 1 else f"{count:,.0f} times" if count >= 1000 else f"{count:.3g} times"
