"""Our AdamW, cross entropy and linear + cross entropy against PyTorch, `torch.compile`, Liger and quack, on one GPU.

Each result is checked against float64 first. Then all contenders of a case are captured as CUDA graphs, so that only
the GPU's time counts, and alternate over several rounds, so that clocks and heat affect all alike. A number is the
median over the replays of all rounds. `plain` is a call without a graph, where CPU time counts if it is the longer
one. The L2 cache is flushed before each. `copy` is a copy on the device. Memory is the peak of one call above what was
there before it.

    python bench/loss_kernels.py --out bench/results/loss_kernels_h200.jsonl
    python bench/loss_kernels.py --only "adamw medium"
    python bench/loss_kernels.py --cpu-dry-run    # runs everything on tiny tensors, without times

The exit status is 1 if one of our results is not as accurate as it must be.
"""

import argparse
import contextlib
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loss_cases import Call, Case, Contender, cases

Row = dict[str, Any]
ROUNDS, REPLAYS, PLAIN_CALLS, WARMUP_CALLS = 3, 10, 5, 3
FLUSHED_BYTES = 256 * 2**20
# What a peer may raise on a problem that it does not support.
REFUSALS = (AssertionError, AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)


def main() -> int:
    arguments = parse()
    device = torch.device("cpu" if arguments.cpu_dry_run else "cuda")
    words = arguments.only.split()
    chosen = [case for case in cases(tiny=arguments.cpu_dry_run) if all(word in case.name for word in words)]
    if not chosen:
        print(f"error: no case contains all of `{arguments.only}`", file=sys.stderr)
        return 2
    common = describe_run(device)
    wrong = 0
    for case in chosen:
        rows = measure(case, device, arguments.rounds, arguments.without.split(","))
        wrong += any(not row["accurate"] for row in rows if row["contender"] in case.ours)
        print_case(case, rows)
        if arguments.out is not None:
            with arguments.out.open("a") as lines:
                lines.writelines(json.dumps(common | row) + "\n" for row in rows)
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare AdamW and the losses with PyTorch's, Liger's and quack's.")
    parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose names contain all of these words")
    parser.add_argument("--without", default="", metavar="NAMES", help="contenders to leave out, separated by commas")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), metavar="N", default=ROUNDS)
    parser.add_argument("--out", type=Path, help="append one JSON line per result")
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny tensors on the CPU, without times")
    return parser.parse_args()


def describe_run(device: torch.device) -> Row:
    triton_version = None
    with contextlib.suppress(ImportError):
        import triton

        triton_version = triton.__version__
    return {
        "benchmark": "loss_kernels",
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": os.environ.get("STEPSCOPE_COMMIT") or git_commit(),
    }


def git_commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


# --- Measuring ---


def measure(case: Case, device: torch.device, rounds: int, without: Sequence[str]) -> list[Row]:
    """One row per contender. A peer that refuses has its reason instead of times."""
    torch._dynamo.reset()
    rows: list[Row] = []
    timers: list[tuple[Row, Timer]] = []
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    for contender in case.contenders(device):
        row = {"case": case.name, **case.facts, "contender": contender.name}
        row |= {"bytes": contender.num_bytes, "flops": contender.flops}
        if contender.name in without:
            continue
        try:
            timers.append((row, prepare(contender, row, flush)))
        except REFUSALS as refusal:
            if contender.name in case.ours:
                raise
            row["refused"] = " ".join(f"{type(refusal).__name__}: {refusal}".split())[:200]
            row["accurate"] = False
        rows.append(row)
    for _ in range(rounds):
        for _, timer in timers:
            timer.run_round()
    for row, timer in timers:
        row |= timer.summarize()
    timers.clear()
    gc.collect()
    return rows


def prepare(contender: Contender, row: Row, flush: Tensor | None) -> "Timer":
    """Check the result of the first call, measure the memory of the second, and capture the call."""
    call = contender.build()
    result = call()
    error, limit = contender.check(result) if contender.check is not None else (0.0, 1.0)
    row |= {"error": error, "accurate": error <= limit}
    del result
    if flush is not None:
        row["peak_bytes"] = peak_of(call)
    return Timer(call, flush)


def peak_of(call: Call) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


class Timer:
    """One call, as a CUDA graph and as it is. Without a GPU it is not timed."""

    def __init__(self, call: Call, flush: Tensor | None) -> None:
        self.call, self.flush = call, flush
        self.graph_us: list[float] = []
        self.plain_us: list[float] = []
        if flush is None:
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            call()

    def run_round(self) -> None:
        if self.flush is None:
            return
        self.graph.replay()
        self.graph_us += [self._time(self.graph.replay, self.flush) for _ in range(REPLAYS)]
        self.plain_us += [self._time(self.call, self.flush) for _ in range(PLAIN_CALLS)]

    @staticmethod
    def _time(call: Callable[[], object], flush: Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def summarize(self) -> Row:
        if self.flush is None:
            return {"us": None}
        p20, median, p80 = (statistics.quantiles(self.graph_us, n=10)[place] for place in (1, 4, 7))
        return {"us": median, "us_p20": p20, "us_p80": p80, "plain_us": statistics.median(self.plain_us)}


# --- Output ---


def print_case(case: Case, rows: Sequence[Row]) -> None:
    print(f"\n{case.name}")
    print(f"  {'':34} {'us':>9} {'p20':>9} {'p80':>9} {'plain us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'MiB':>8}  error")
    for row in rows:
        mark = "" if row["accurate"] or "refused" in row else "  INACCURATE"
        print(f"  {row['contender']:34} {describe_row(row)}{mark}")
    ours = next((row for row in rows if row["contender"] == "ours"), None)
    peers = [row for row in rows if row["contender"] not in (*case.ours, "copy") and row.get("us")]
    if ours is not None and ours.get("us") and peers:
        best = min(peers, key=lambda row: float(row["us"]))
        print(f"  ours is {best['us'] / ours['us']:.2f} times as fast as the best peer, {best['contender']}")
    sys.stdout.flush()


def describe_row(row: Row) -> str:
    if "refused" in row:
        return f"refused: {row['refused']}"
    if row["us"] is None:
        return f"{'-':>9} {'-':>9} {'-':>9} {'-':>9} {'-':>6} {'-':>8} {'-':>8}  {row['error']:.1e}"
    times = " ".join(f"{row[name]:9.1f}" for name in ("us", "us_p20", "us_p80", "plain_us"))
    speeds = f"{row['bytes'] / row['us'] / 1e6:6.2f} {row['flops'] / row['us'] / 1e6:8.0f}"
    return f"{times} {speeds} {row['peak_bytes'] / 2**20:8.0f}  {row['error']:.1e}"


if __name__ == "__main__":
    sys.exit(main())
