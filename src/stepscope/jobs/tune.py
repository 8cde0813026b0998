"""Measure the tiles of the Triton attention kernels on this machine's GPU, and save the fastest.

Unlike a sweep, this runs in the current process: there is one GPU, no custom model, and nothing to resume.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.findings import Cell, Column, Table
from stepscope.jobs.workers.cpu_limits import limit_instructions
from stepscope.jobs.workers.process import require_torch
from stepscope.spec import Precision

if TYPE_CHECKING:
    from stepscope.kernels.attention.tune import Trial


def tune_tiles(
    *, head_dim: int, precision: Precision, causal: bool, length: int, on_trial: Callable[[str], None]
) -> tuple[Table, Path]:
    """Return every candidate of every pass with its time, and the file that holds the choice."""
    require_torch()
    limit_instructions()
    import torch

    if not torch.cuda.is_available():
        raise StepscopeError(
            "no CUDA GPU found",
            detail="tiles are measured on the GPU that will use them",
            hint="stepscope doctor",
        )
    from stepscope.kernels.attention.backends import has_kernel
    from stepscope.kernels.attention.triton_launch import tiles_path
    from stepscope.kernels.attention.tune import TuneProblem, tune

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if not has_kernel(torch.device("cuda"), dtype):
        raise StepscopeError(
            f"the Triton kernels do not run on this GPU: `{torch.cuda.get_device_name()}`",
            detail="they require triton and compute capability 8.0 or later",
            hint="stepscope doctor",
        )
    problem = TuneProblem(head_dim=head_dim, dtype=dtype, causal=causal, length=length, tf32=precision == "tf32")
    trials = tune(problem, device=torch.device("cuda"), report=lambda trial: on_trial(_name(trial)))
    mask = "causal" if causal else "no mask"
    title = f"tiles for head dim {head_dim}, {precision}, {mask}, length {length}, {torch.cuda.get_device_name()}"
    return make_table(trials, title), tiles_path()


def _name(trial: "Trial") -> str:
    tile = trial.tile
    return (
        f"{trial.key.stage.replace('_', ', ')}: {tile.block_m} queries × {tile.block_n} keys, {tile.num_warps} warps, "
        f"{tile.num_stages} stages"
    )


def make_table(trials: Iterable["Trial"], title: str) -> Table:
    """One row per trial, grouped by pass, fastest first; the first one tried is the default."""
    rows: list[tuple[Cell, ...]] = []
    by_pass: dict[str, list[Trial]] = {}
    for trial in trials:
        by_pass.setdefault(trial.key.stage, []).append(trial)
    for stage, tried in by_pass.items():
        default = tried[0].milliseconds
        for trial in sorted(tried, key=lambda trial: (trial.milliseconds is None, trial.milliseconds or 0.0)):
            gain = default / trial.milliseconds if default and trial.milliseconds else None
            tile = trial.tile
            sizes = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages)
            rows.append((stage.replace("_", ", "), *sizes, trial.milliseconds, gain, trial.problem or None))
    return Table(
        title=title,
        columns=(
            Column(key="pass", label="pass"),
            Column(key="queries", label="queries", kind="count"),
            Column(key="keys", label="keys", kind="count"),
            Column(key="warps", label="warps", kind="count"),
            Column(key="stages", label="stages", kind="count"),
            Column(key="ms", label="time", kind="ms"),
            Column(key="gain", label="vs default", kind="ratio"),
            Column(key="problem", label="problem"),
        ),
        rows=tuple(rows),
        notes=(
            "The fastest tile of each pass is saved, and used from now on for this precision and mask, and "
            "for all head dims that round up to the same power of two.",
        ),
    )
