"""Measure the candidate tiles of the Triton kernels on this GPU and save the best: explicit autotuning.

Each candidate's result is compared with the default's before its time counts: a miscompiled tile is not fast. Outputs
differ in their last bits between tiles, so the comparison has a tolerance.
"""

# B batch, H heads, L length, D head dim.

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from stepscope.kernels.attention import tiles
from stepscope.kernels.attention import triton_launch as launch
from stepscope.kernels.attention.tiles import Arithmetic, Pass, Tile, TileKey

# Relative to the magnitude of the default's result: the rounding of the inputs' dtype, and room for another order of
# summation.
TOLERANCES: dict[Arithmetic, float] = {"half": 2e-2, "tf32": 1e-2, "tf32x3": 1e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate: its median time, or why it has none."""

    key: TileKey
    tile: Tile
    milliseconds: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneProblem:
    """The shape to measure at. Heads and batch fill the GPU; they do not change which tile is best."""

    head_dim: int
    dtype: torch.dtype
    causal: bool
    length: int = 4096
    batch: int = 2
    num_heads: int = 16
    tf32: bool = False


def tune(problem: TuneProblem, *, device: torch.device, report: Callable[[Trial], None] | None = None) -> list[Trial]:
    """Try every candidate of every pass, and save the fastest of each for this GPU. Return all trials."""
    if device.type != "cuda":
        raise ValueError(f"`device` must be a CUDA GPU, but got `{device}`")
    trials: list[Trial] = []
    with torch.cuda.device(device):
        for trial in _trials(problem, device):
            trials.append(trial)
            if report is not None:
                report(trial)
    launch.keep_tuned(torch.cuda.get_device_name(device), fastest(trials))
    return trials


def _trials(problem: TuneProblem, device: torch.device) -> Iterator[Trial]:
    kind = launch.arithmetic(problem.dtype, tf32=problem.tf32)
    run = _TunedPass(problem, device)
    for stage in tiles.PASSES:
        key = launch.tile_key(stage, kind, (problem.head_dim, problem.head_dim), device, causal=problem.causal)
        run.launch(stage, tiles.choose(key))
        expected = [result.clone() for result in run.results(stage)]
        for tile in tiles.candidates(key):
            yield _try(run, key, tile, expected)
        run.launch(stage, tiles.choose(key))  # whatever the last candidate wrote: the next pass reads it


def _try(run: "_TunedPass", key: TileKey, tile: Tile, expected: list[Tensor]) -> Trial:
    results = run.results(key.stage)
    for result in results:
        result.zero_()
    try:
        run.launch(key.stage, tile)
    except OutOfResources as problem:
        return Trial(key=key, tile=tile, milliseconds=None, problem=str(problem))
    differences = [_difference(a, b) for a, b in zip(results, expected, strict=True)]
    if not all(difference <= TOLERANCES[key.arithmetic] for difference in differences):
        return Trial(key=key, tile=tile, milliseconds=None, problem=f"wrong result: {differences}")
    median = do_bench(lambda: run.launch(key.stage, tile), return_mode="median")
    return Trial(key=key, tile=tile, milliseconds=median)


def fastest(trials: Iterable[Trial]) -> dict[TileKey, Tile]:
    """Return the best tile of each key with a candidate that ran."""
    timed = [(trial.milliseconds, trial) for trial in trials if trial.milliseconds is not None]
    # From slowest to fastest: the last one inserted stays.
    return {trial.key: trial.tile for _, trial in sorted(timed, key=lambda pair: pair[0], reverse=True)}


def _difference(actual: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())


class _TunedPass:
    """Tensors of a problem, and one pass at a time on them with a given tile."""

    def __init__(self, problem: TuneProblem, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (problem.batch, problem.num_heads, problem.length, problem.head_dim)
        q, k, v, do = (torch.randn(shape, device=device, generator=generator).to(problem.dtype) for _ in range(4))
        self.inputs, self.do = (q, k, v), do
        self.settings = launch.PassSettings(causal=problem.causal, scale=problem.head_dim**-0.5, tf32=problem.tf32)
        self.o, self.lse = torch.empty_like(q), torch.empty(shape[:-1], device=device)
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in self.inputs)
        self.rows = launch.row_values(self.lse)

    def results(self, stage: Pass) -> list[Tensor]:
        return {"forward": [self.o], "backward_queries": [self.dq], "backward_keys": [self.dk, self.dv]}[stage]

    def launch(self, stage: Pass, tile: Tile) -> None:
        """Fill the results of a pass. Each pass needs the results of the one before it in `PASSES`."""
        if stage == "forward":
            launch.launch_forward(*self.inputs, self.o, self.lse, tile, self.settings)
        elif stage == "backward_queries":
            launch.launch_queries(self.do, *self.inputs, self.o, self.lse, self.dq, self.rows, tile, self.settings)
        else:
            launch.launch_keys(self.do, *self.inputs, self.dk, self.dv, self.rows, tile, self.settings)
