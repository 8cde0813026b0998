"""Random but valid recordings: a `Plan` says what ran, `build` simulates it, and `plans` draws them.

A plan is a small value, so a failing one prints in a few lines and can be pasted into a test.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import polars as pl
from hypothesis import strategies as st

from stepscope.api.rank_files import Opened
from stepscope.api.run import Run
from stepscope.explain.story import Materials
from stepscope.recording import tables
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.store import Overhead, Recording
from stepscope.spec import build_case
from tests.unit.explain.story.story_materials import CASE, HERE, small_row
from tests.unit.loop_recordings import LoopPlan, record_loop
from tests.unit.rank_recordings import reduce_ranks
from tests.unit.recordings import (
    ADD,
    ALL_REDUCE,
    BF16,
    COPY,
    FOREACH,
    FP32,
    GEMM_BF16,
    GEMM_FP32,
    SOFTMAX,
    STREAM,
    TO_DEVICE,
    Timeline,
)

Kind = Literal["gemm", "gemm fp32", "add", "softmax", "copy", "update", "all-reduce", "input"]
Source = Literal["trace", "stepscope", "nsight compute", "cpu"]
COMMUNICATION_STREAM = 20
_OTHER_DEVICE = 100  # its streams are numbered from here
_PHASES = {"update": "optimizer", "all-reduce": "backward", "input": "forward"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kernel of a step."""

    kind: Kind
    us: int
    in_backward: bool = False
    layer: int = 0
    pause_us: int = 0  # the CPU does something else before the launch
    waits: bool = False  # the CPU waits for the device after it


@dataclass(frozen=True, kw_only=True)
class Unprofiled:
    """Unprofiled steps: their time as a multiple of the profiled one, and how far single steps are from it."""

    factor: float
    spread: float = 0.0
    count: int = 5


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A row of `bench`: its step as a multiple of the profiled one."""

    factor: float
    is_same_run: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `steps` is 0 if none are marked, as in every file of Nsight Compute. `early` kernels were launched
    before the recording began."""

    work: tuple[Work, ...]
    steps: int = 3
    source: Source = "trace"
    host_us: int = 5
    between_us: int = 0
    waits_at_end: bool = True
    early: int = 0
    is_graph: bool = False
    devices: int = 1
    ranks: int = 1
    unprofiled: Unprofiled | None = None
    timed: Timed | None = None

    @property
    def marked(self) -> int:
        return 0 if self.source == "nsight compute" else self.steps


# --- Strategies -------------------------------------------------------------------------------------------------------


def _works() -> st.SearchStrategy[Work]:
    return st.builds(
        Work,
        kind=st.sampled_from(("gemm", "gemm fp32", "add", "softmax", "copy", "update", "all-reduce", "input")),
        us=st.sampled_from((2, 5, 13, 40, 111, 300, 900)),
        in_backward=st.booleans(),
        layer=st.integers(0, 2),
        pause_us=st.sampled_from((0, 0, 0, 17, 250, 2_300)),
        waits=st.sampled_from((False, False, False, True)),
    )


def plans() -> st.SearchStrategy[Plan]:
    factors = st.sampled_from((0.2, 0.5, 0.8, 0.97, 1.0, 1.03, 1.4, 5.0))
    return st.builds(
        Plan,
        work=st.lists(_works(), min_size=2, max_size=9).map(tuple),
        steps=st.sampled_from((0, 1, 2, 3, 4)),
        source=st.sampled_from(("trace", "stepscope", "stepscope", "stepscope", "nsight compute", "cpu")),
        host_us=st.sampled_from((5, 5, 30)),
        between_us=st.sampled_from((0, 0, 40, 700)),
        waits_at_end=st.booleans(),
        early=st.sampled_from((0, 0, 0, 1, 3)),
        is_graph=st.sampled_from((False, False, False, True)),
        devices=st.sampled_from((1, 1, 1, 2)),
        ranks=st.sampled_from((1, 1, 1, 2, 3)),
        unprofiled=st.none() | st.builds(Unprofiled, factor=factors, spread=st.sampled_from((0.0, 0.01, 0.4))),
        timed=st.none() | st.builds(Timed, factor=factors, is_same_run=st.sampled_from((True, True, False))),
    )


def loop_plans() -> st.SearchStrategy[LoopPlan]:
    times = st.sampled_from((0, 13, 250, 2_300))
    return st.builds(
        LoopPlan,
        on_cpu=st.booleans(),
        steps=st.sampled_from((1, 2, 3)),
        micro_batches=st.sampled_from((1, 2, 4)),
        loading_us=times,
        collating_us=st.sampled_from((0, 0, 40)),
        num_workers=st.sampled_from((0, 2)),
        kernel_us=st.sampled_from((2, 20, 300)),
        host_us=st.sampled_from((5, 30)),
        logging_us=times,
        checkpoint_us=st.sampled_from((0, 0, 700)),
        reads_loss=st.booleans(),
        waits=st.booleans(),
        unprofiled=st.sampled_from((None, 0.3, 0.8, 1.0, 1.4)),
    )


# --- Building ---------------------------------------------------------------------------------------------------------


def build_loop(plan: LoopPlan) -> tuple[Run, Materials]:
    """The same for a script that `stepscope run` recorded."""
    run = Run([Opened.of(Path("loop"), record_loop(plan))])
    return run, Materials(name="loop", profile=run.profile)


def build(plan: Plan, name: str = "run") -> tuple[Run, Materials]:
    """The run as `explain` reads it, and everything that its page knows."""
    recordings = [_record(plan, name, rank) for rank in range(plan.ranks)]
    run = Run([Opened.of(Path(f"{name}-{rank}"), one) for rank, one in enumerate(recordings)])
    profiles = tuple(rank.profile for rank in run.ranks)
    materials = Materials(
        name=name,
        profile=profiles[0],
        ranks=reduce_ranks(profiles) if len(profiles) > 1 else (),
        bench=_time(plan, run) if plan.timed is not None else (),
    )
    return run, materials


def _time(plan: Plan, run: Run) -> tuple[BenchRow, ...]:
    assert plan.timed is not None
    ns = max(1, round(plan.timed.factor * run.profile.clock.profiled_ns))
    context = 256 if plan.timed.is_same_run else 512
    return (small_row(step_ns=(ns - ns // 50, ns, ns + ns // 50), context=context),)


def _record(plan: Plan, name: str, rank: int) -> Recording:
    on_cpu = plan.source == "cpu"
    timeline = Timeline(host_us=plan.host_us, device="AMD EPYC" if on_cpu else "NVIDIA H200")
    if not on_cpu:
        _launch_early(timeline, plan)
    for number in range(max(1, plan.steps)):
        if plan.marked:
            with timeline.step():
                _run_step(timeline, plan, rank)
        else:
            _run_step(timeline, plan, rank)
        timeline.host(plan.between_us + 3 * number)
    manifest: dict[str, Any] = {"file": f"{name}-{rank}.json"}
    if plan.ranks > 1:
        manifest |= {"rank": rank, "world_size": plan.ranks}
    if plan.source == "nsight compute":
        manifest["source"] = plan.source
    if plan.source in ("stepscope", "cpu"):
        manifest |= {"case": _case(plan), "environment": HERE, "command": "stepscope profile --size small"}
    return _with_unprofiled(timeline.record(**manifest), plan)


def _case(plan: Plan) -> Any:
    return (
        CASE
        if plan.source != "cpu"
        else build_case({"size": "small", "context": 256, "precision": "bf16", "device": "cpu"})
    )


def _launch_early(timeline: Timeline, plan: Plan) -> None:
    for _ in range(plan.early):
        timeline.launch(GEMM_BF16, 60)
    timeline.forget_launches()


def _run_step(timeline: Timeline, plan: Plan, rank: int) -> None:
    """The kernels of one phase after the other, each on every device."""
    for phase in ("forward", "backward", "optimizer"):
        mine = [one for one in plan.work if _phase_of(one) == phase]
        if not mine:
            continue
        with timeline.phase(phase):
            for one in mine:
                with timeline.module(f"blocks.{one.layer}.ffn"):
                    timeline.host(one.pause_us * (1 + rank))
                    for device in range(plan.devices):
                        _launch(timeline, plan, one, device)
                if one.waits and plan.source != "cpu":
                    timeline.wait()
    if plan.waits_at_end and plan.source != "cpu":
        timeline.wait()


def _phase_of(one: Work) -> str:
    return _PHASES.get(one.kind, "backward" if one.in_backward else "forward")


def _launch(timeline: Timeline, plan: Plan, one: Work, device: int) -> None:
    kernel, op, described = _DESCRIBED[one.kind]
    if plan.source == "cpu":
        timeline.compute(op, one.us, **described)
        return
    stream = COMMUNICATION_STREAM if one.kind == "all-reduce" else STREAM
    call = "cudaGraphLaunch" if plan.is_graph else "cudaLaunchKernel"
    timeline.launch(
        kernel, one.us, op=op, stream=stream + device * _OTHER_DEVICE, device=device, call=call, **described
    )


def _shapes(size: int, dtype: str) -> dict[str, Any]:
    return {"shapes": [[size, size]] * 2, "dtypes": [dtype] * 2}


_DESCRIBED: dict[Kind, tuple[str, str, dict[str, Any]]] = {
    "gemm": (GEMM_BF16, "aten::mm", _shapes(1024, BF16)),
    "gemm fp32": (GEMM_FP32, "aten::mm", _shapes(1023, FP32)),
    "add": (ADD, "aten::add", _shapes(1024, FP32)),
    "softmax": (SOFTMAX, "aten::_softmax", _shapes(1024, FP32)),
    "copy": (COPY, "aten::copy_", _shapes(1024, FP32)),
    "update": (FOREACH, "aten::_foreach_addcdiv_", {}),
    "all-reduce": (ALL_REDUCE, "c10d::allreduce_", {}),
    "input": (TO_DEVICE, "aten::copy_", {}),
}


def _with_unprofiled(recording: Recording, plan: Plan) -> Recording:
    """Add unprofiled steps, which only recordings of stepscope have."""
    if plan.unprofiled is None or plan.source not in ("stepscope", "cpu") or not plan.steps:
        return recording
    marked = recording.ranges.filter(pl.col("name").str.starts_with("step:"))
    profiled = (marked["end_ns"] - marked["start_ns"]).to_list()
    base = plan.unprofiled.factor * median(profiled)
    away = [plan.unprofiled.spread * (place / max(1, plan.unprofiled.count - 1) - 0.5) for place in _places(plan)]
    steps = [max(2, round(base * (1 + one))) for one in away]
    rows = [
        {"phase": phase, "step": number, "duration_ns": part, "clock": "cuda events"}
        for number, ns in enumerate(steps)
        for phase, part in (("forward", ns // 3), ("backward", ns - ns // 3))
    ]
    overhead = Overhead(plain_ns=round(median(steps)), recorded_ns=round(median(profiled)))
    with_steps = replace(recording, steps=tables.conform("steps", pl.DataFrame(rows)))
    return with_steps.with_manifest(overhead=overhead)


def _places(plan: Plan) -> range:
    return range(plan.unprofiled.count if plan.unprofiled else 0)
