"""Recordings of a training loop as `stepscope run` makes them, of a simulated GPU or CPU.

A step loads a batch, copies it, runs `micro_batches` forward and backward passes, clips gradients, updates the weights,
advances the scheduler and logs the loss. `LoopPlan` says how long each part takes, in microseconds.
"""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import polars as pl

from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording import tables
from stepscope.recording.rows.loop_run import LoaderFacts, LoopFacts
from stepscope.recording.store import Overhead, Recording
from tests.unit.explain.story.story_materials import HERE
from tests.unit.recordings import ADD, BF16, FOREACH, GEMM_BF16, TO_DEVICE, TO_HOST, Timeline

SINGLE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    on_cpu: bool = False
    steps: int = 3
    micro_batches: int = 2
    loading_us: float = 400
    collating_us: float = 0
    num_workers: int = 0
    num_kernels: int = 10  # of a forward pass; backward has twice as many
    kernel_us: float = 20
    host_us: float = 5
    logging_us: float = 30
    checkpoint_us: float = 0
    reads_loss: bool = True  # `.item()` in logging
    waits: bool = False  # torch.cuda.synchronize() at the end of a step
    # Unprofiled times of the phases as multiples of the profiled ones; None: not timed.
    unprofiled: float | None = 0.8
    loader: dict[str, Any] | None = None


def record_loop(plan: LoopPlan, **facts: Any) -> Recording:
    timeline = Timeline(host_us=plan.host_us, device="AMD EPYC" if plan.on_cpu else "NVIDIA H200")
    for _ in range(plan.steps):
        with timeline.step():
            _run_step(timeline, plan)
    loader = LoaderFacts(
        dataset="TokenDataset",
        **{"batch_size": 8, "num_workers": plan.num_workers, "batches_per_step": plan.micro_batches}
        | (plan.loader or {}),
    )
    found: dict[str, Any] = {
        "backwards_per_step": plan.micro_batches,
        "optimizers": ("AdamW",),
        "loaders": (loader,),
        "steps_seen": 13,
    }
    loop = LoopFacts(script="train.py", found_by="optimizer steps", **(found | facts))
    here = HERE if not plan.on_cpu else None
    return _with_unprofiled(timeline.record(loop=loop, environment=here, command="stepscope run train.py"), plan)


def profile_loop(plan: LoopPlan, **facts: Any) -> Profile:
    return make_profile(record_loop(plan, **facts))


def _run_step(timeline: Timeline, plan: LoopPlan) -> None:
    for _ in range(plan.micro_batches):
        with timeline.phase("input"), timeline.range(WORKERS if plan.num_workers else SINGLE):
            timeline.host(plan.loading_us)
            if plan.collating_us:
                with timeline.range("train.py(30): collate_fn"):
                    timeline.host(plan.collating_us)
        with timeline.line("train.py:40"):
            if not plan.on_cpu:
                timeline.launch(TO_DEVICE, 15, op="aten::copy_", call="cudaMemcpyAsync", bytes=1 << 16)
        with timeline.module("(GPT)"), timeline.line("model.py:12"):
            for number in range(plan.num_kernels):
                with timeline.module(f"blocks.{number % 2}.ffn"):
                    _work(timeline, plan, GEMM_BF16, "aten::mm")
        with timeline.line("train.py:42"):
            _work(timeline, plan, ADD, "aten::nll_loss_forward")
        timeline.host(7)
        with timeline.phase("backward"), timeline.line("model.py:12"):
            for _ in range(2 * plan.num_kernels):
                _work(timeline, plan, GEMM_BF16, "aten::mm")
    with timeline.phase("clipping"), timeline.line("train.py:45"):
        _work(timeline, plan, ADD, "aten::_foreach_norm")
    with timeline.phase("optimizer"), timeline.line("train.py:46"):
        _work(timeline, plan, FOREACH, "aten::_foreach_addcdiv_")
    with timeline.phase("scheduler"):
        timeline.host(3)
    with timeline.phase("logging"):
        timeline.host(plan.logging_us)
        if plan.reads_loss and not plan.on_cpu:
            with timeline.line("train.py:50"):
                timeline.launch(TO_HOST, 2, op="aten::_local_scalar_dense", call="cudaMemcpyAsync")
                timeline.wait(op="aten::_local_scalar_dense")
    if plan.checkpoint_us:
        with timeline.phase("checkpoint"):
            timeline.host(plan.checkpoint_us)
    if plan.waits and not plan.on_cpu:
        with timeline.synchronisation("torch.cuda.synchronize", "train.py:52"):
            timeline.wait(call="cudaDeviceSynchronize")


def _work(timeline: Timeline, plan: LoopPlan, kernel: str, op: str) -> None:
    shapes = {"shapes": [[1024, 1024]] * 2, "dtypes": [BF16] * 2} if op == "aten::mm" else {}
    if plan.on_cpu:
        timeline.compute(op, plan.kernel_us, **shapes)  # type: ignore[arg-type]
    else:
        timeline.launch(kernel, plan.kernel_us, op=op, **shapes)  # type: ignore[arg-type]


def _with_unprofiled(recording: Recording, plan: LoopPlan) -> Recording:
    """Add unprofiled steps: loading takes as long as while profiled, everything else `unprofiled` times that."""
    if plan.unprofiled is None:
        return recording
    marks = recording.ranges.filter(pl.col("name").str.starts_with("step:"))
    profiled = (marks["end_ns"] - marks["start_ns"]).to_list()
    phases = {
        phase: int(
            recording.ranges.filter(pl.col("name") == f"phase:{phase}")
            .select((pl.col("end_ns") - pl.col("start_ns")).sum())
            .item()
            / plan.steps
        )
        for phase in ("input", "backward", "optimizer")
    }
    phases["other"] = round(median(profiled)) - sum(phases.values())
    times = {phase: round(ns * (1.0 if phase == "input" else plan.unprofiled)) for phase, ns in phases.items()}
    rows = [
        {"phase": phase, "step": step, "duration_ns": ns, "clock": "host"}
        for step in range(10)
        for phase, ns in times.items()
    ]
    with_steps = replace(recording, steps=tables.conform("steps", pl.DataFrame(rows)))
    overhead = Overhead(plain_ns=sum(times.values()), recorded_ns=round(median(profiled)))
    return with_steps.with_manifest(overhead=overhead)
