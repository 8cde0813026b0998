"""Recordings of a simulated GPU, written as a sequence of launches.

    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"), timeline.module("blocks.0.ffn"):
        timeline.launch(GEMM_BF16, 100, op="aten::mm", shapes=[[4096, 1024], [1024, 4096]], dtypes=[BF16, BF16])
    recording = timeline.record()

Times are in microseconds. The CPU needs `host_us` per launch. A kernel starts `LATENCY_US` after its launch or right
after the previous one on its stream, whichever is later, as on a real device. With `queue` pending launches, a launch
waits.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import polars as pl

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording import EVALUATE, tables
from stepscope.recording.store import Manifest, Overhead, Recording

PROCESS, MAIN, AUTOGRAD, STREAM = 100, 1, 2, 7
LATENCY_US = 4
CALL_US = 2
BF16, FP32, HALF = "c10::BFloat16", "float", "c10::Half"

GEMM_BF16 = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
GEMM_FP32 = "ampere_sgemm_128x64_tn"
GEMM_TF32 = "cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>(int)"
)
MULTIPLY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>, std::array<char*, 3ul> >(int)"
)
SOFTMAX = "void (anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(float*, float const*, int)"
COPY = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}> >(int)"
)
FOREACH = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, PointwiseOpListFunctor<float, 4> >(int)"
FUSED_ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
TO_DEVICE, TO_DEVICE_PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
TO_HOST = "Memcpy DtoH (Device -> Pageable)"
INDUCTOR = "triton_poi_fused_add_mul_3"


class Timeline:
    def __init__(
        self, *, host_us: float = 5, device: str = "NVIDIA H200", multiprocessors: int = 132, queue: int = 1024
    ) -> None:
        self.host_us = host_us
        self._queue = queue
        self._ends: list[int] = []
        self._manifest: dict[str, Any] = {
            "source": "pytorch profiler",
            "device": device,
            "device_sms": multiprocessors,
            "shapes_recorded": True,
            "modules_recorded": True,
        }
        self._now = 1_000_000
        self._thread = MAIN
        self._line: str | None = None
        self._free: dict[int, int] = {}
        self._correlation = 0
        self._steps = 0
        self._rows: dict[str, list[dict[str, object]]] = {name: [] for name in tables.SCHEMAS}

    def host(self, us: float) -> None:
        """The CPU does something else."""
        self._now += round(us * 1000)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self._now
        yield
        self._now += 1
        self._add("ranges", name=name, start_ns=start, end_ns=self._now, source="user", **self._place())

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps += 1
        with self.range(f"step:{self._steps - 1}"):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.range(f"phase:{name}"):
            yield

    @contextmanager
    def module(self, path: str) -> Iterator[None]:
        with self.range(f"module:{path}"):
            yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with self.range(f"part:{name}"):
            yield

    @contextmanager
    def line(self, source: str) -> Iterator[None]:
        """The line of the user's code that calls operators."""
        before, self._line = self._line, source
        yield
        self._line = before

    @contextmanager
    def synchronisation(self, name: str, line: str) -> Iterator[None]:
        start = self._now
        yield
        self._now += 1
        times = {"start_ns": start, "end_ns": self._now}
        self._add("ranges", name=f"sync:{name}", source="user", source_line=line, **times, **self._place())

    @contextmanager
    def node(self, name: str = "MmBackward0") -> Iterator[None]:
        """The evaluation of an autograd node, on the thread of the backward pass."""
        start, self._thread = self._now, AUTOGRAD
        self._now += 1
        yield
        self._add("ops", name=EVALUATE + name, start_ns=start, end_ns=self._now + 1, **self._place())
        self._now += 2
        self._thread = MAIN

    def launch(
        self,
        kernel: str,
        us: float,
        *,
        op: str | None = "aten::add",
        shapes: Sequence[object] | None = None,
        dtypes: Sequence[str] = (),
        arguments: Sequence[str] = (),
        stream: int = STREAM,
        after: int | None = None,
        device: int = 0,
        call: str = "cudaLaunchKernel",
        **columns: object,
    ) -> None:
        """One operator, its launch and its kernel, which waits for its stream and for the kernel `after` which it
        runs."""
        start = self._now
        self._now += round(self.host_us * 1000 / 2)
        called, ended = self._now, self._now + CALL_US * 1000
        if len(self._ends) >= self._queue:
            ended = max(ended, self._ends[-self._queue])
        self._now = max(ended, start + round(self.host_us * 1000))
        begin = max(called + LATENCY_US * 1000, self._free.get(stream, 0))
        if after is not None:
            begin = max(begin, self._free[after])
        self._free[stream] = begin + round(us * 1000)
        self._ends.append(self._free[stream])
        self._correlation += 1
        shared = {"correlation": self._correlation, "process": PROCESS}
        self._add("launches", name=call, start_ns=called, end_ns=ended, thread=self._thread, **shared)
        kind = "memcpy" if kernel.startswith("Memcpy") else "kernel"
        self._add(
            "kernels",
            name=kernel,
            start_ns=begin,
            end_ns=self._free[stream],
            kind=kind,
            device=device,
            stream=stream,
            graph=False,
            **shared,
            **columns,
        )
        if op is not None:
            described = {"shapes": shapes, "dtypes": dtypes, "arguments": arguments} if shapes is not None else {}
            texts = {key: json.dumps(value) for key, value in described.items()}
            self._add("ops", name=op, start_ns=start, end_ns=self._now, source=self._line, **texts, **self._place())

    def replay(self, kernels: Sequence[str], **columns: Sequence[int]) -> None:
        """The launch of a CUDA graph, and its kernels one after the other, of 10 µs each. `columns` have a value per
        kernel."""
        called = self._now
        self._now += round(self.host_us * 1000)
        self._correlation += 1
        shared = {"correlation": self._correlation, "process": PROCESS}
        times = {"start_ns": called, "end_ns": called + CALL_US * 1000}
        self._add("launches", name="cudaGraphLaunch", thread=self._thread, **times, **shared)
        for place, kernel in enumerate(kernels):
            begin = max(called + LATENCY_US * 1000, *self._free.values(), 0)
            self._free[STREAM] = begin + 10_000
            kind = "memcpy" if kernel.startswith("Memcpy") else "memset" if kernel.startswith("Memset") else "kernel"
            own = {name: values[place] for name, values in columns.items()}
            times = {"start_ns": begin, "end_ns": self._free[STREAM]}
            self._add("kernels", name=kernel, kind=kind, device=0, stream=STREAM, graph=True, **times, **shared, **own)

    def capture(self, operators: Sequence[tuple[str, str]]) -> None:
        """A capture of operators, each with the call that it makes: nothing runs."""
        calls = [(None, "cudaStreamBeginCapture"), *operators, (None, "cudaStreamEndCapture")]
        for op, call in calls:
            self._correlation += 1
            start, self._now = self._now, self._now + round(self.host_us * 1000)
            times = {"start_ns": start + 1, "end_ns": start + CALL_US * 1000}
            self._add("launches", name=call, correlation=self._correlation, **times, **self._place())
            if op is not None:
                self._add("ops", name=op, start_ns=start, end_ns=self._now, **self._place())

    def compute(
        self, op: str, us: float, *, shapes: Sequence[object] | None = None, dtypes: Sequence[str] = ()
    ) -> None:
        """One operator that runs on the CPU, which is its own kernel there."""
        self.host(self.host_us / 2)
        start = self._now
        self._now += round(us * 1000)
        texts = {"shapes": json.dumps(shapes), "dtypes": json.dumps(dtypes)} if shapes is not None else {}
        times = {"name": op, "start_ns": start, "end_ns": self._now}
        self._add("ops", **times, source=self._line, **texts, **self._place())
        self._add("kernels", **times, kind="cpu", device=-1, stream=self._thread, graph=False, process=PROCESS)

    def forget_launches(self) -> None:
        """What was launched so far was launched before the recording began: only its kernels are known."""
        self._rows["launches"].clear()
        self._rows["ops"].clear()

    def wait(self, *, op: str | None = None, call: str = "cudaStreamSynchronize") -> None:
        """The CPU waits until the device is done."""
        start = self._now
        self._now = max(self._now, *self._free.values()) + 1000
        self._add("launches", name=call, start_ns=start, end_ns=self._now, correlation=None, **self._place())
        if op is not None:
            self._add("ops", name=op, start_ns=start - 1, end_ns=self._now + 1, source=self._line, **self._place())

    def record(self, **manifest: object) -> Recording:
        frames = {
            name: tables.conform(name, pl.DataFrame(rows, infer_schema_length=None))
            for name, rows in self._rows.items()
        }
        return Recording(manifest=Manifest(**{**self._manifest, **manifest}), **frames)

    def profile(self, **manifest: object) -> Profile:
        return make_profile(self.record(**manifest))

    def _place(self) -> dict[str, int]:
        return {"process": PROCESS, "thread": self._thread}

    def _add(self, table: str, **row: object) -> None:
        self._rows[table].append(row)


def add_unprofiled_steps(profile: Profile, *durations_ns: int) -> Profile:
    """The profile with unprofiled steps of these times, as in a recording of stepscope."""
    rows = [{"phase": "forward", "step": n, "duration_ns": ns, "clock": "host"} for n, ns in enumerate(durations_ns)]
    recording = profile.recording.with_manifest(overhead=Overhead(plain_ns=round(statistics.median(durations_ns))))
    return make_profile(replace(recording, steps=tables.conform("steps", pl.DataFrame(rows))))


def as_replays(recording: Recording) -> tuple[Recording, pl.DataFrame]:
    """The second step of a recording, launched as one graph per phase, with the first one as the same step without
    graphs; and the kernels as they were attributed."""
    numbers = {"forward": 1, "loss": 1, "backward": 2, "optimizer": 3}
    kernels = attribute_kernels(recording)
    first, second = (kernels.with_row_index("row").filter(step=step) for step in (0, 1))
    (begin,) = recording.ranges.filter(name="step:1")["start_ns"]
    ranges = recording.ranges.filter(pl.col("start_ns") >= begin, pl.col("name").str.contains("^(?:step|phase):"))
    phases = ranges.with_columns(
        correlation=pl.col("name").str.strip_prefix("phase:").replace_strict(numbers, default=None)
    )
    calls = phases.filter(pl.col("correlation").is_not_null(), pl.col("name") != "phase:loss")
    calls = calls.with_columns(pl.lit("cudaGraphLaunch").alias("name"), end_ns=pl.col("start_ns") + 1)
    replayed = Recording(
        manifest=recording.manifest,
        kernels=recording.kernels[second["row"]].with_columns(
            correlation=second["phase"].replace_strict(numbers).cast(pl.Int64), graph=pl.lit(value=True)
        ),
        launches=tables.conform("launches", calls.drop("source", "source_line")),
        ranges=ranges.filter(pl.col("name") != "phase:loss"),
        captured=tables.conform("captured", first.sort("launch_ns").select(tables.SCHEMAS["captured"].keys())),
    )
    return replayed, second
