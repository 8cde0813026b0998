"""Our fused kernels against eager PyTorch, `torch.compile`, Liger, quack and a plain copy, on one GPU in one run.

Results and gradients are checked against float64 first. Then all implementations of a case are captured as CUDA graphs,
so that only the GPU's time counts, and alternate over several rounds, so that clocks and heat affect all alike. A graph
calls the operation on several sets of tensors, together larger than the L2 cache, as in a training step. A number is
the median over the replays of all rounds; p20 and p80 are in the file. `plain` is a call without a graph, where CPU
time counts if it is the longer one. Bandwidth counts each tensor once, whatever a kernel moves; `copy` moves as many
bytes with a device-to-device copy.

    python bench/fused_kernels.py --out bench/results/fused_kernels_h200.jsonl
    python bench/fused_kernels.py --only "add_rms_norm mixed"
    python bench/fused_kernels.py --sweep --only "add_rms_norm mixed 4096x1024"    # other tiles than the shipped ones
    python bench/fused_kernels.py --cpu-dry-run    # runs everything on tiny tensors, without times

The exit status is 1 if one of our results is not as accurate as it must be.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from fused_cases import Case, Operation, cases
from stepscope.kernels import gated_kernels, norms_launch, rotary_kernels
from stepscope.kernels.norms_kernels import NormTile

Row = dict[str, Any]
Call = Callable[[], object]
DIRECTIONS = ("forward", "backward", "both")
ROUNDS, REPLAYS, PLAIN_CALLS, WARMUP_CALLS = 3, 20, 10, 3
CYCLED_BYTES, MOST_SETS = 400e6, 16  # several times an L2 cache
# What a peer may raise on a shape or dtype that it does not support.
REFUSALS = (AssertionError, AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)


def main() -> int:
    arguments = _parse()
    device = torch.device("cpu" if arguments.cpu_dry_run else "cuda")
    torch._functorch.config.donated_buffer = False  # backward of compiled functions runs more than once
    words = arguments.only.split()
    chosen = [case for case in cases(tiny=arguments.cpu_dry_run) if all(word in case.name for word in words)]
    if not chosen:
        print(f"error: no case contains all of `{arguments.only}`", file=sys.stderr)
        return 2
    if arguments.sweep:
        for case in chosen:
            _sweep(case, device)
        return 0
    wrong = 0
    for case in chosen:
        rows = measure(case, device, peers=arguments.peers.split(","))
        wrong += any(row["implementation"] == "ours" and not row["accurate"] for row in rows)
        _print_case(case, rows)
        _append(arguments.out, [row | describe_run(device) for row in rows])
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fused kernels against eager, compiled, Liger, quack and a copy.")
    parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose names contain all of these words")
    parser.add_argument("--peers", default="eager,compiled,liger,quack,copy", help="what to compare with")
    parser.add_argument("--out", type=Path, help="append one JSON line per result")
    parser.add_argument("--sweep", action="store_true", help="time our kernels with other tiles")
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny tensors on the CPU, without times")
    return parser.parse_args()


def describe_run(device: torch.device) -> Row:
    commit = os.environ.get("STEPSCOPE_COMMIT") or _git_commit()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    command = shlex.join(["python", "bench/fused_kernels.py", *sys.argv[1:]])
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "commit": commit, "command": command}


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


# --- One case ---


def measure(case: Case, device: torch.device, *, peers: Sequence[str]) -> list[Row]:
    """One row per implementation and direction; a peer that refuses has one row with its reason."""
    torch._dynamo.reset()
    rows: list[Row] = []
    runs: dict[str, dict[str, Timer]] = {}
    truth = _run_once(case.eager, [x.detach().double().requires_grad_() for x in case.make_inputs(device)])
    plain = _run_once(case.eager, case.make_inputs(device))
    accurate: dict[str, bool] = {}
    for name, operation in _implementations(case, device, peers).items():
        try:
            accurate[name] = _is_accurate(_run_once(operation, case.make_inputs(device)), plain, truth)
            runs[name] = {direction: time_case(case, operation, direction, device) for direction in DIRECTIONS}
        except REFUSALS as refusal:
            if name == "ours":
                raise
            reason = " ".join(f"{type(refusal).__name__}: {refusal}".split())[:200]
            rows.append(_identify(case, name) | {"refused": reason, "accurate": False})
    moved = count_bytes(case, device)
    if "copy" in peers:
        runs["copy"] = {direction: time_copy(moved[direction], device) for direction in DIRECTIONS}
    for _, timers, direction in itertools.product(range(ROUNDS), list(runs.values()), DIRECTIONS):
        timers[direction].run_round()
    for name, timers in runs.items():
        for direction, timer in timers.items():
            row = _identify(case, name) | {"direction": direction, "bytes": moved[direction]}
            rows.append(row | timer.summarize() | {"accurate": accurate.get(name, True)})
    del runs
    gc.collect()
    return rows


def _identify(case: Case, name: str) -> Row:
    return {"op": case.op, "dtype": case.dtype, "size": case.size, "implementation": name}


def _implementations(case: Case, device: torch.device, peers: Sequence[str]) -> dict[str, Operation]:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(case.eager, fullgraph=True, dynamic=False, backend=backend)
    every = {"eager": case.eager, "compiled": compiled, **case.peers}
    return {"ours": case.ours} | {name: operation for name, operation in every.items() if name in peers}


def _upstream(results: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the results, the same for each implementation."""
    generator = torch.Generator(results[0].device).manual_seed(99)
    found = []
    for result in results:
        # In the layout of the result, as the next operation would write it.
        values = torch.randn(result.shape, generator=generator, device=result.device)
        found.append(torch.empty_like(result).copy_(values))
    return found


def _run_once(operation: Operation, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients, as copies: Liger writes gradients to its inputs."""
    results = operation(*inputs)
    upstream = [x.to(torch.bfloat16).to(x.dtype) for x in _upstream(results)]
    gradients = torch.autograd.grad(list(results), list(inputs), upstream)
    return [x.detach().clone() for x in (*results, *gradients)]


def _is_accurate(ours: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
    """At most twice as far from float64 as eager PyTorch, plus one unit in the last place of the largest value."""
    for a, b, c in zip(ours, plain, truth, strict=True):
        limit = 2 * (b.double() - c).abs().max() + torch.finfo(b.dtype).eps * c.abs().max()
        if not bool((a.double() - c).abs().max() <= limit + 1e-6 * c.abs().max()):
            return False
    return True


def count_bytes(case: Case, device: torch.device) -> dict[str, int]:
    """Each tensor once: forward reads the inputs and writes the results; backward reads the gradients of the results
    and what it must save, and writes the gradients of the inputs.
    """
    inputs = case.make_inputs(device)
    results = case.eager(*inputs)
    read, written = (sum(x.nbytes for x in tensors) for tensors in (inputs, results))
    saved = sum(x.nbytes for x in case.saved(inputs, results))
    return {"forward": read + written, "backward": written + saved + read, "both": 2 * (read + written) + saved}


# --- Timing ---


class Timer:
    """Calls of one implementation, each on tensors of its own, as a CUDA graph and as plain calls.

    Without a GPU they run once. `bind` makes the calls: it must run on the stream that is captured, because backward
    runs on the stream of its forward.
    """

    def __init__(self, bind: Callable[[], list[Call]], device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.graph_us: list[float] = []
        self.plain_us: list[float] = []
        with self._on_stream():
            self.calls = bind()
            for _ in range(WARMUP_CALLS if self.on_gpu else 1):
                self._call_all()
        if self.on_gpu:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._call_all()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.on_gpu else contextlib.nullcontext()

    def _call_all(self) -> None:
        for call in self.calls:
            call()

    def run_round(self) -> None:
        if not self.on_gpu:
            return
        with self._on_stream():
            self.graph.replay()
            self.graph_us += [self._time(self.graph.replay) for _ in range(REPLAYS)]
            self.plain_us += [self._time(self._call_all) for _ in range(PLAIN_CALLS)]

    def _time(self, call: Call) -> float:
        """Microseconds per call of the operation."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(self.calls)

    def summarize(self) -> Row:
        if not self.on_gpu:
            return {"us": None}
        p20, median, p80 = (statistics.quantiles(self.graph_us, n=10)[place] for place in (1, 4, 7))
        return {"us": median, "us_p20": p20, "us_p80": p80, "plain_us": statistics.median(self.plain_us)}


def time_case(case: Case, operation: Operation, direction: str, device: torch.device) -> Timer:
    num_sets = _count_sets(count_bytes(case, device)[direction], device)

    def bind() -> list[Call]:
        return [_bind(operation, case.make_inputs(device, seed), direction) for seed in range(num_sets)]

    return Timer(bind, device)


def time_copy(num_bytes: int, device: torch.device) -> Timer:
    """A copy on the device that reads and writes this many bytes in all."""

    def bind() -> list[Call]:
        half, num_sets = num_bytes // 2, _count_sets(num_bytes, device)
        pairs = (torch.zeros((2, half), dtype=torch.uint8, device=device) for _ in range(num_sets))
        return [partial(pair[1].copy_, pair[0]) for pair in pairs]

    return Timer(bind, device)


def _count_sets(num_bytes: int, device: torch.device) -> int:
    return max(2, min(MOST_SETS, round(CYCLED_BYTES / num_bytes))) if device.type == "cuda" else 1


def _bind(operation: Operation, inputs: list[Tensor], direction: str) -> Call:
    """A call without arguments. For backward alone, forward runs now."""
    results = operation(*inputs)
    upstream = _upstream(results)
    if direction == "forward":
        return lambda: operation(*inputs)
    if direction == "backward":
        return lambda: torch.autograd.grad(list(results), inputs, upstream, retain_graph=True)
    return lambda: torch.autograd.grad(list(operation(*inputs)), inputs, upstream)


# --- Output ---


def _print_case(case: Case, rows: Sequence[Row]) -> None:
    print(f"\n{case.name}")
    print(f"  {'':10} {'':10} {'us':>8} {'GB/s':>7} {'of copy':>8} {'ours is':>8} {'plain us':>9}")
    for row in rows:
        if "refused" in row:
            print(f"  {row['implementation']:10} refused: {row['refused']}")
    for direction in DIRECTIONS:
        timed = {row["implementation"]: row for row in rows if row.get("direction") == direction}
        for name, row in timed.items():
            print(f"  {direction:10} {name:10} {_describe(row, timed)}{'' if row['accurate'] else '  INACCURATE'}")
    peers = [name for name in ("eager", "compiled", "liger", "quack") if any(r["implementation"] == name for r in rows)]
    for direction in DIRECTIONS:
        times = {row["implementation"]: row["us"] for row in rows if row.get("direction") == direction}
        best = min((times[name], name) for name in peers if times.get(name)) if any(times.values()) else None
        if best:
            print(f"  {direction:10} ours is {best[0] / times['ours']:.2f} times as fast as the best peer, {best[1]}")
    sys.stdout.flush()


def _describe(row: Row, timed: dict[str, Row]) -> str:
    if row["us"] is None:
        return f"{'-':>8} {'-':>7} {'-':>8} {'-':>8} {'-':>9}"
    copy = timed["copy"]["us"] / row["us"] if "copy" in timed else float("nan")
    ratio = row["us"] / timed["ours"]["us"]
    speed = row["bytes"] / row["us"] / 1e3
    return f"{row['us']:8.2f} {speed:7.0f} {copy:8.2f} {ratio:7.2f}x {row['plain_us']:9.2f}"


def _append(path: Path | None, rows: Sequence[Row]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


# --- Other tiles ---


def _sweep(case: Case, device: torch.device) -> None:
    """Print the time of our kernel with each tile, fastest first."""
    for direction in ("forward", "backward"):
        timers: dict[str, Timer] = {}
        for label, patched in _other_tiles(case, direction):
            with patched:
                try:
                    timers[label] = time_case(case, case.ours, direction, device)
                except (RuntimeError, triton.runtime.errors.OutOfResources) as refusal:
                    print(f"  {label}: {type(refusal).__name__}", file=sys.stderr)
        for _, timer in itertools.product(range(ROUNDS), timers.values()):
            timer.run_round()
        print(f"\n{case.name} {direction}")
        found = sorted((timer.summarize()["us"] or 0.0, label) for label, timer in timers.items())
        for us, label in found[:12] + [entry for entry in found[12:] if entry[1].startswith("shipped")]:
            print(f"  {us:8.2f} us  {label}")
        sys.stdout.flush()


def _other_tiles(case: Case, direction: str) -> Iterator[tuple[str, contextlib.AbstractContextManager[object]]]:
    yield "shipped", contextlib.nullcontext()
    if "norm" in case.op:
        for norm_tile in _norm_tiles(case.shapes[0][-1], direction):
            yield str(norm_tile), _replaced(norms_launch, f"{direction}_tile", partial(_choose, norm_tile))
    elif "glu" in case.op:
        for block, num_warps in itertools.product((512, 1024, 2048, 4096), (2, 4, 8)):
            gated_tile = gated_kernels.GatedTile(block=block, num_warps=num_warps)
            yield str(gated_tile), _replaced(gated_kernels, "TILE", gated_tile)
    else:
        block = triton.next_power_of_2(int(case.size.rpartition("x")[2]))
        for elements, num_warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)):
            tile = rotary_kernels.RotaryTile(block=block, rows=max(1, elements // block), num_warps=num_warps)
            yield str(tile), _replaced(rotary_kernels, "choose_tile", partial(_choose, tile))


def _choose(tile: object, _width: int) -> object:
    return tile


def _norm_tiles(width: int, direction: str) -> Iterator[NormTile]:
    """Those with 4 to 64 elements per thread; in backward, those that fit on a multiprocessor at once."""
    block = triton.next_power_of_2(width)
    for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        per_thread = rows * block // (32 * warps)
        if direction == "forward" and 4 <= per_thread <= 64:
            yield NormTile(block=block, rows=rows, num_warps=warps)
        elif direction == "backward" and 8 <= per_thread <= 32 and warps >= 4:
            for stages, programs in itertools.product((1, 2, 3), (1, 2, 4)):
                if programs * warps <= 16:
                    yield NormTile(block, rows, warps, stages, programs)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


if __name__ == "__main__":
    sys.exit(main())
