"""The input of the rules: the kernels of one device in the recorded steps, the CPU's waits, and what a change would
save.

In a recording of several devices, the rules use the busiest one: all devices do the same work, so a finding about one
applies to all.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl

from stepscope.explain.rules.replay import Bools, Change, Floats, Replay
from stepscope.explain.trace.accounting import account
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.nesting import innermost, look_up
from stepscope.explain.trace.profile import Profile
from stepscope.explain.trace.roofline import operator_calls
from stepscope.hardware import Hardware
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
# Kernels: a replay takes 0.4 µs each, and there are about 20 replays. This is three steps of 24 layers. With one step,
# the CPU's speed was off by 40% in GPU-bound steps; with 32 steps instead of 16, no saving changed by 1%.
MOST_REPLAYED = 20_000
_SYNCHRONISE = r"(?i)(?:Stream|Device|Event|Ctx)Synchronize"
_COPY_CALL = r"(?i)^(?:cuda|hip|cu)Memcpy"
_LEAST_WAIT_NS = 10_000
# The driver queues up to 1024 launches; after that, each launch waits for a kernel to end.
_FULL_QUEUE = 500
POINTWISE = ("elementwise", "copy", "reduction", "softmax", "norm", "random", "index", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Savings per step: GPU time and step time."""

    gpu_ns: float
    step_ns: float


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    profile: Profile

    @property
    def hardware(self) -> Hardware | None:
        return self.profile.hardware

    @property
    def case(self) -> Case | None:
        return self.profile.recording.manifest.case

    @property
    def is_builtin(self) -> bool:
        return self.case is not None and isinstance(self.case.workload.model, ModelShape)

    @cached_property
    def clock(self) -> Clock:
        """The clock of the device and the steps that the rules use."""
        times = pl.concat([frame.select("start_ns", "end_ns") for frame in (self.kernels, self._steps)])
        first, last = times["start_ns"].min(), times["end_ns"].max()
        assert isinstance(first, int)
        assert isinstance(last, int)
        return Clock(
            steps=self._steps,
            window=(first, last),
            find_busy_ns=lambda: account(self.kernels, (first, last)).busy_ns,
            plain_ns=self.profile.clock.plain_ns,
        )

    @property
    def num_steps(self) -> int:
        return self.clock.num_steps

    @property
    def step_ns(self) -> float:
        return max(1.0, self.clock.plain_step_ns)

    @property
    def idle_share(self) -> float:
        return self.clock.idle_share_of(self.step_ns)

    @cached_property
    def _steps(self) -> pl.DataFrame:
        steps = self.profile.steps
        if not steps.height or self._on_device.height <= MOST_REPLAYED:
            return steps
        return steps.head(max(1, steps.height * MOST_REPLAYED // self._on_device.height))

    @cached_property
    def _on_device(self) -> pl.DataFrame:
        kernels = self.profile.kernels
        busiest = kernels.group_by("process", "device").agg(pl.col("time_ns").sum()).sort("time_ns", descending=True)
        chosen = busiest.head(1).select("process", "device")
        return kernels.join(chosen, on=["process", "device"], how="semi", nulls_equal=True)

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """The kernels sorted by start, with `row` and the cost of their operator (flops and bytes, split among its
        kernels by time); `dtype` is the operator's if the name has none. Without warm-up steps and without kernels
        launched between steps; kernels launched before the window are included."""
        kernels = self._on_device.filter(pl.col("phase").fill_null("") != "warm-up")
        if self._steps.height:
            kernels = kernels.filter(
                pl.col("step").is_in(self._steps["step"].to_list())
                | (pl.col("launch_ns").is_null() & (pl.col("start_ns") < self._steps["end_ns"].max()))
            )
        return self._with_costs(kernels).sort("start_ns", "end_ns", maintain_order=True).with_row_index("row")

    def _with_costs(self, kernels: pl.DataFrame) -> pl.DataFrame:
        calls = operator_calls(replace(self.profile, kernels=kernels)).select(
            "op_row", "shapes", "dtypes", "op_dtype", "flops", "bytes", call_ns="time_ns", call_kernels="kernels"
        )
        share = pl.col("time_ns") / pl.col("call_ns").clip(1)
        return (
            kernels.drop("bytes")
            .join(calls, on="op_row", how="left", maintain_order="left")
            .with_columns(
                flops=pl.col("flops") * share,
                bytes=pl.col("bytes") * share,
                dtype=pl.when(pl.col("kind") != "cpu").then(pl.coalesce("dtype", "op_dtype")),
            )
        )

    @cached_property
    def waits(self) -> pl.DataFrame:
        """The CPU's waits for the device, sorted by end: `wait` (their row), start_ns, end_ns, op, phase, step, `kind`,
        and `last`: whether nothing more was launched in its step. The kind is `call` for a call that waits, and `queue`
        for a launch that waited for a free slot in the queue. Short calls do not count as waits."""
        start, end = self.clock.window
        ops = self.profile.ops.filter((pl.col("end_ns") > start) & (pl.col("start_ns") < end))
        calls = self._waiting_calls()
        op_row = innermost(ops, calls.select("process", "thread", ns="start_ns"))
        calls = calls.select("start_ns", "end_ns").with_columns(
            op=look_up(ops, "name", op_row), phase=look_up(ops, "phase", op_row), kind=pl.lit("call")
        )
        queued = self._queued_launches().with_columns(kind=pl.lit("queue"))
        waits = pl.concat([calls, queued], how="diagonal").sort("end_ns")
        return _with_steps(waits, self._steps, self.kernels).with_row_index("wait")

    def _waiting_calls(self) -> pl.DataFrame:
        process = self.kernels["process"].drop_nulls().unique().to_list()
        copies = self._on_device.filter(pl.col("name").str.contains(r"(?i)DtoH|Pageable"))
        is_copy = pl.col("correlation").is_in(copies["correlation"].to_list()) | ~pl.col("name").str.contains("Async")
        blocking = pl.col("name").str.contains(_SYNCHRONISE) | (pl.col("name").str.contains(_COPY_CALL) & is_copy)
        start, end = self.clock.window
        lasting = pl.col("end_ns") - pl.col("start_ns") >= _LEAST_WAIT_NS
        inside = (pl.col("end_ns") > start) & (pl.col("start_ns") < end)
        ours = pl.col("process").is_in(process) | pl.lit(not process)
        # Match names last: a pattern over all calls of a long recording takes longer than everything else here.
        return self.profile.recording.launches.filter(lasting & inside & ours).filter(blocking)

    def _queued_launches(self) -> pl.DataFrame:
        launched = self.kernels.filter(pl.col("launch_ns").is_not_null() & (pl.col("launched") == "op"))
        if not launched.height:
            return launched.select(start_ns="launch_ns", end_ns="launch_end_ns")
        called = launched["launch_ns"].to_numpy()
        ahead = np.searchsorted(np.sort(called), called) - np.searchsorted(
            np.sort(launched["end_ns"].to_numpy()), called
        )
        lasting = launched["launch_end_ns"] - launched["launch_ns"] >= _LEAST_WAIT_NS
        return launched.filter(pl.Series(ahead >= _FULL_QUEUE) & lasting).select(
            start_ns="launch_ns", end_ns="launch_end_ns"
        )

    @cached_property
    def replay(self) -> Replay:
        return Replay(kernels=self.kernels, waits=self.waits, begin_ns=self.clock.window[0])

    @cached_property
    def host_scale(self) -> float:
        plain_ns = self.clock.plain_ns
        return 1.0 if plain_ns is None else self.replay.calibrate(plain_ns * self.num_steps)

    @cached_property
    def replayed_ns(self) -> float:
        return self.replay.run(self.replay.unchanged(), host_scale=self.host_scale)

    def gain(self, change: Change) -> Gain:
        """Return what a change of the whole recording saves per step."""
        before = self.replay.unchanged()
        gpu = float((before.duration_ns - np.where(change.removed, 0.0, change.duration_ns)).sum()) / self.num_steps
        after = self.replay.run(change, host_scale=self.host_scale)
        step = max(0.0, (self.replayed_ns - after) / self.num_steps)
        return Gain(gpu_ns=gpu, step_ns=min(step, self.step_ns))

    def gain_without(self, waits: pl.DataFrame, removed: pl.DataFrame | None = None) -> Gain | None:
        """Return the gain without these waits and with `removed` kernels taking no time, None if it is too small."""
        change = self.replay.unchanged()
        change.skipped_waits = set(waits["wait"].to_list())
        if removed is not None:
            change.duration_ns[removed["row"].to_numpy()] = 0.0
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
        change.duration_ns = np.minimum(new_ns, change.duration_ns)
        if host_share is not None:
            change.host_share = host_share
        if removed is not None:
            change.removed = removed
            change.host_share[removed] = 0.0
        return self.gain(change)

    def merged(self, groups: pl.DataFrame, *, host_share: Floats, after_all: bool = False) -> Gain:
        """Return the gain if each group of kernels in `groups` (row, group, fused_ns: the group's new time) becomes one
        kernel, at the position of the group's first or, with `after_all`, last kernel. `host_share` of the CPU time
        remains."""
        change = self.replay.unchanged()
        keep: Literal["first", "last"] = "last" if after_all else "first"
        kept = groups.sort("row").unique("group", keep=keep, maintain_order=True)
        change.removed[groups["row"].to_numpy()] = True
        change.removed[kept["row"].to_numpy()] = False
        change.duration_ns[kept["row"].to_numpy()] = kept["fused_ns"].to_numpy()
        change.host_share = host_share
        return self.gain(change)

    @cached_property
    def compiled_host_share(self) -> Floats:
        """The share of CPU time before each launch that remains after compiling. The optimizer is not compiled with the
        model, and long stalls are not launch overhead."""
        phase = self.kernels["phase"].fill_null("")
        share = COMPILED_TRAINING_HOST_SHARE if (phase == "backward").any() else COMPILED_INFERENCE_HOST_SHARE
        return np.where((phase == "optimizer").to_numpy() | ~self.replay.is_launching, 1.0, share)

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
    return f"{time_ns / 1e6:.3g} ms" if time_ns >= 1e5 else f"{time_ns / 1e3:.3g} µs"


def often(count: float) -> str:
    """Return how often something happens: `once`, `2.5 times`."""
    return "once" if count == 1 else f"{count:,.3g} times"
