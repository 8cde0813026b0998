"""Measure the candidate tiles of the Triton kernels on this GPU and keep the best: the explicit counterpart of
autotuning.

Each candidate's result is compared with the default's before its time counts: a tile that miscompiles is not fast.
Outputs differ in their last bits between tiles, so the comparison is by the size of the difference.
"""

# B batch, H heads, L length, D head dim.

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from stepscope.kernels.attention import tiles, triton_backward, triton_forward, tuned
from stepscope.kernels.attention import triton_launch as launch
from stepscope.kernels.attention.tiles import Arithmetic, Pass, Tile, TileKey

# Relative to the size of the default's result: the rounding of the inputs' dtype, and room for another order of
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
    """Try every candidate of every pass, and keep the fastest of each for this GPU. Returns all trials."""
    if device.type != "cuda":
        raise ValueError(f"`device` must be a CUDA GPU, not `{device}`")
    trials: list[Trial] = []
    for trial in _trials(problem, device):
        trials.append(trial)
        if report is not None:
            report(trial)
    tuned.keep(torch.cuda.get_device_name(device), _fastest(trials))
    launch.tile_for.cache_clear()
    return trials


def _trials(problem: TuneProblem, device: torch.device) -> Iterator[Trial]:
    kind = launch.arithmetic(problem.dtype, tf32=problem.tf32)
    inputs = _Inputs(problem, device)
    for stage in tiles.PASSES:
        key = launch.tile_key(stage, kind, problem.head_dim, problem.causal, device)
        expected = tuple(x.clone() for x in inputs.run(stage, tiles.choose(key)))
        for tile in tiles.candidates(key):
            yield _try(inputs, key, tile, expected)


def _try(inputs: "_Inputs", key: TileKey, tile: Tile, expected: tuple[Tensor, ...]) -> Trial:
    try:
        results = inputs.run(key.stage, tile)
    except OutOfResources as problem:
        return Trial(key=key, tile=tile, milliseconds=None, problem=str(problem))
    off = max(_difference(a, b) for a, b in zip(results, expected, strict=True))
    if not off <= TOLERANCES[key.arithmetic]:
        return Trial(key=key, tile=tile, milliseconds=None, problem=f"its result is off by {off:.1e}")
    median = do_bench(lambda: inputs.run(key.stage, tile), return_mode="median")
    return Trial(key=key, tile=tile, milliseconds=median)


def _fastest(trials: list[Trial]) -> dict[TileKey, Tile]:
    best: dict[TileKey, Trial] = {}
    for trial in trials:
        if trial.milliseconds is None:
            continue
        leader = best.get(trial.key)
        if leader is None or leader.milliseconds is None or trial.milliseconds < leader.milliseconds:
            best[trial.key] = trial
    return {key: trial.tile for key, trial in best.items()}


def _difference(actual: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())


class _Inputs:
    """Tensors of a problem, and one pass at a time over them with a given tile."""

    def __init__(self, problem: TuneProblem, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (problem.batch, problem.num_heads, problem.length, problem.head_dim)
        self.q, self.k, self.v, self.do = (
            torch.randn(shape, device=device, generator=generator).to(problem.dtype) for _ in range(4)
        )
        self.settings = launch.Settings(causal=problem.causal, scale=problem.head_dim**-0.5, tf32=problem.tf32)
        self.o, self.lse = triton_forward.forward(
            self.q, self.k, self.v, causal=problem.causal, scale=self.settings.scale, tf32=problem.tf32
        )
        self.rows = triton_backward.row_values(self.lse)
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (self.q, self.k, self.v))
        # The second backward kernel reads what the first leaves in `rows`.
        self.run("backward_queries", self._default("backward_queries"))

    def run(self, stage: Pass, tile: Tile) -> tuple[Tensor, ...]:
        """The results of one pass, overwritten by the next run of it."""
        inputs = (self.q, self.k, self.v)
        if stage == "forward":
            triton_forward.launch_forward(*inputs, self.o, self.lse, tile, self.settings)
            return (self.o,)
        if stage == "backward_queries":
            triton_backward.launch_queries(self.do, *inputs, self.o, self.lse, self.dq, self.rows, tile, self.settings)
            return (self.dq,)
        triton_backward.launch_keys(self.do, *inputs, self.dk, self.dv, self.rows, tile, self.settings)
        return self.dk, self.dv

    def _default(self, stage: Pass) -> Tile:
        kind = launch.arithmetic(self.q.dtype, tf32=self.settings.tf32)
        return launch.tile_for(stage, kind, self.q.shape[-1], self.settings.causal, self.q.device)
