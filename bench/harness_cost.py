"""The overhead of the harness: `time_steps` against a bare loop over the same step.

Single steps alternate between the two, so that other load on the machine affects both alike, and each pair of neighbors
gives one difference. There are two results: how far the step time that the harness reports is from the bare loop's, and
how much longer the loop takes in wall-clock time, including the checks of the machine between steps.

    python bench/harness_cost.py [--device cuda] [--pairs 2000] [--batch 1] [--context 32]
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from stepscope.explain.statistics import quantile
from stepscope.measure.environment import describe, resolve_device
from stepscope.measure.soundness import MachineWatch
from stepscope.measure.timing import settle_heap, time_steps
from stepscope.spec import SIZES, Workload
from stepscope.step import Step, build

WARMUP = 10
RESAMPLES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the overhead of the harness against a bare loop.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1, help="batch size; overhead is easier to measure on short steps")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="number of threads; one gives the steadiest times")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    workload = Workload(model=SIZES["nano"], device=str(device), batch=arguments.batch, context=arguments.context)
    step = build(workload, device)
    settle_heap()
    time_steps(step, WARMUP)
    bare, reported, wall = measure_pairs(step, arguments.pairs)
    base_us = statistics.median(bare)
    result = {
        "benchmark": "harness_cost",
        "command": shlex.join(["python", *sys.argv]),
        "environment": msgspec.to_builtins(describe(device, {"fp32"})),
        "batch": arguments.batch,
        "context": arguments.context,
        "pairs": arguments.pairs,
        "bare_step_us": round(base_us, 2),
        "reported_minus_bare": difference(bare, reported),
        "wall_minus_bare": difference(bare, wall),
    }
    print(f"bare loop: {base_us:,.1f} µs per step (median of {arguments.pairs}), {device}")
    for name, key in (("reported", "reported_minus_bare"), ("wall clock", "wall_minus_bare")):
        found = result[key]
        assert isinstance(found, dict)
        low, high = found["ci95_us"]
        share = [100 * value / base_us for value in (found["us"], low, high)]
        print(f"{name:12} {found['us']:+8.2f} µs per step, 95% CI [{low:+.2f}, {high:+.2f}]", end="")
        print(f" = {share[0]:+.3f}% [{share[1]:+.3f}, {share[2]:+.3f}]")
    print(json.dumps(result))


def measure_pairs(step: Step, pairs: int) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of each step. Which of the two goes first alternates, against clock drift."""
    bare, reported, wall = [], [], []
    watch = MachineWatch(step.device)

    def run_bare() -> None:
        bare.append(_timed(lambda: _bare_step(step)))

    def run_harness() -> None:
        found = []
        wall.append(_timed(lambda: found.append(time_steps(step, 1, after_step=watch.look))))
        reported.append(found[0].host_step_ns[0] / 1e3)

    for pair in range(pairs):
        for run in (run_bare, run_harness) if pair % 2 else (run_harness, run_bare):
            run()
    return bare, reported, wall


def _bare_step(step: Step) -> None:
    step.run()
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e3


def difference(bare: Sequence[float], other: Sequence[float]) -> dict[str, object]:
    """The median of the paired differences, with a bootstrap confidence interval."""
    deltas = [b - a for a, b in zip(bare, other, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(deltas, k=len(deltas))) for _ in range(RESAMPLES))
    low, high = quantile(medians, 0.025), quantile(medians, 0.975)
    return {"us": round(statistics.median(deltas), 3), "ci95_us": (round(low, 3), round(high, 3))}


if __name__ == "__main__":
    main()
