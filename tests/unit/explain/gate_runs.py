"""Runs of a simulated machine: steps vary within a run, and runs vary as a whole."""

from itertools import count as numbers
from typing import Any

import numpy as np

from stepscope.recording.baseline import Baseline, BaselineRun, RunConditions

_NUMBERS = numbers(1)
H200 = RunConditions(device="NVIDIA H200", torch="2.13.0", settings={"model": "small", "batch": "4"})


def simulate(
    generator: np.random.Generator, count: int, *, step_ms: float = 10.0, run_sd: float = 0.0, step_sd: float = 0.0
) -> tuple[BaselineRun, ...]:
    """`count` runs of 20 steps. `run_sd` and `step_sd` are relative standard deviations between and within runs."""
    runs = []
    for _ in range(count):
        level = step_ms * 1e6 * (1 + run_sd * generator.standard_normal())
        steps = level * (1 + step_sd * generator.standard_normal(20))
        runs.append(make_run(*(max(1, round(one)) for one in steps)))
    return tuple(runs)


def make_run(*step_ns: int, **fields: Any) -> BaselineRun:
    """A run with an identity of its own."""
    number = next(_NUMBERS)
    return BaselineRun(file=f"run{number}", identity=f"{number:016x}", step_ns=step_ns, **fields)


def baseline_of(*runs: BaselineRun, conditions: RunConditions = H200) -> Baseline:
    return Baseline(conditions=conditions, runs=runs)
