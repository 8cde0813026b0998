"""Our attention against PyTorch's own, forward and backward, on one GPU in one run.

Each output is checked against float64 first (gradients are checked in tests/gpu). Then the implementations alternate
over several rounds, so that clocks and heat affect all alike; a number is the median of its rounds, each of them a
median of `triton.testing.do_bench`, which flushes L2 before every call. TFLOP/s count a causal mask as half, and
backward as two and a half times forward.

    python bench/attention_speed.py --out bench/results/attention_speed_h200.jsonl
    python bench/attention_speed.py --from bench/results/attention_speed_h200.jsonl --plot attention_speed.png

`TARGETS` holds the ratios that the kernels must reach; the exit status is 1 if one is missed.
"""

import argparse
import contextlib
import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stepscope.cost.operators import attention_flops
from stepscope.cost.products import BACKWARD_PRODUCTS

ROUNDS = 5
WARMUP_MS, MEASURED_MS = 10, 30
CHECKED_ROWS = 128
DIRECTIONS = ("forward", "backward")
SHAPES = ((8, 16, 2048), (4, 16, 4096), (2, 16, 8192), (1, 16, 16384))  # batch, heads, length
SHORT_SHAPES = ((16, 16, 512), (8, 16, 1024), (4, 16, 2048))
GROUPED_SHAPES = ((4, 32, 8, 2048), (1, 32, 8, 8192), (1, 64, 8, 4096))  # batch, heads, key/value heads, length
FP32_SHAPES = ((8, 1, 1024), (8, 1, 4096), (8, 1, 16384))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, and the implementations that run it: backends of `flash_attention`, with `+deterministic` and
    `+tf32` for settings.
    """

    dtype: str
    causal: bool
    batch: int
    heads: int
    length: int
    head_dim: int
    implementations: tuple[str, ...]
    groups: int  # key/value heads

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.groups == self.heads else f"{self.heads}/{self.groups}"
        shape = f"{self.batch},{heads},{self.length},{self.head_dim}"
        return f"{self.dtype} {'causal' if self.causal else 'full'} {shape}"

    def tflop(self, direction: str) -> float:
        forward = attention_flops(
            batch=self.batch,
            heads=self.heads,
            queries=self.length,
            keys=self.length,
            head_dim=self.head_dim,
            causal=self.causal,
        )
        return forward * (1 if direction == "forward" else BACKWARD_PRODUCTS) / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """At least `ratio` times as fast as the peer."""

    ours: str
    peer: str
    ratio: float
    applies: Callable[[dict[str, Any]], bool]


def _is_long_128(row: dict[str, Any]) -> bool:
    return bool(row["head_dim"] == 128 and row["length"] >= 8192)


TARGETS = (
    Target(
        ours="hopper",
        peer="sdpa-cudnn",
        ratio=1.0,
        applies=lambda row: row["direction"] == "forward" and row["dtype"] == "bf16" and _is_long_128(row),
    ),
    Target(
        ours="hopper",
        peer="sdpa-cudnn",
        ratio=0.95,
        applies=lambda row: row["direction"] == "forward" and row["dtype"] == "bf16" and not _is_long_128(row),
    ),
    Target(
        ours="hopper",
        peer="sdpa-cudnn",
        ratio=0.9,
        applies=lambda row: row["direction"] == "backward" and row["dtype"] == "bf16",
    ),
    Target(ours="hopper", peer="sdpa-flash", ratio=1.3, applies=lambda row: row["dtype"] == "bf16"),
    Target(ours="triton", peer="sdpa-efficient", ratio=1.5, applies=lambda row: row["dtype"] == "fp32"),
)


def cases() -> Iterator[Case]:
    half = ("hopper", "hopper+deterministic", "triton", "sdpa-cudnn", "sdpa-flash")
    for head_dim, mask, (batch, heads, length) in itertools.product((128, 64), ("causal", "full"), SHAPES):
        yield make_case("bf16", mask, batch, heads, heads, length, head_dim, half)
    peers = ("hopper", "sdpa-cudnn", "sdpa-flash")
    for head_dim, (batch, heads, length) in itertools.product((128, 64), SHORT_SHAPES):
        yield make_case("bf16", "causal", batch, heads, heads, length, head_dim, peers)
    for batch, heads, groups, length in GROUPED_SHAPES:
        yield make_case("bf16", "causal", batch, heads, groups, length, 128, peers)
    full = ("triton", "triton+tf32", "sdpa-efficient")
    for head_dim, (batch, heads, length) in itertools.product((64, 128), FP32_SHAPES):
        yield make_case("fp32", "causal", batch, heads, heads, length, head_dim, full)


def make_case(
    dtype: str,
    mask: str,
    batch: int,
    heads: int,
    groups: int,
    length: int,
    head_dim: int,
    implementations: tuple[str, ...],
) -> Case:
    return Case(
        dtype=dtype,
        causal=mask == "causal",
        batch=batch,
        heads=heads,
        groups=groups,
        length=length,
        head_dim=head_dim,
        implementations=implementations,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our attention with PyTorch's.")
    parser.add_argument("--out", type=Path, help="append one JSON line per case and direction")
    parser.add_argument("--from", dest="source", type=Path, help="print the table from such a file without measuring")
    parser.add_argument("--only", default="", help="only cases whose name contains this, such as `bf16 causal`")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), metavar="N", default=ROUNDS)
    parser.add_argument("--plot", type=Path, help="plot the bf16 throughput as .png, .svg, .pdf or .html")
    arguments = parser.parse_args()
    source = read(arguments.source) if arguments.source else measure(arguments.only, arguments.rounds, arguments.out)
    rows = list(source)
    if not rows:
        fail("no rows" if arguments.source else f"no case name contains `{arguments.only}`")
    if arguments.plot:
        draw(rows, arguments.plot)
    return print_table(rows)


def read(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if all(row["benchmark"] == "attention_speed" for row in rows):
            return rows
    except (OSError, ValueError, KeyError, TypeError) as problem:
        fail(f"cannot read `{path}`: {problem!r}")
    return fail(f"not a results file of this benchmark: `{path}`")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def measure(only: str, rounds: int, out: Path | None) -> Iterator[dict[str, Any]]:
    """One row per case and direction, written as soon as it is measured."""
    import msgspec
    import torch

    from stepscope.measure.environment import describe

    if not torch.cuda.is_available():
        fail("no CUDA GPU found; `--from bench/results/attention_speed_h200.jsonl` shows stored results")
    common = {
        "benchmark": "attention_speed",
        "command": shlex.join(["python", *sys.argv]),
        "environment": msgspec.to_builtins(describe(torch.device("cuda"), {"fp32", "bf16"})),
    }
    for case in cases():
        if only not in case.name:
            continue
        for figures in measure_case(case, rounds):
            row = common | figures
            print(f"{case.name} {row['direction']}: {describe_row(row)}", flush=True)
            if out is not None:
                with out.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
            yield row


def measure_case(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    import torch

    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    shapes = [(case.batch, heads, case.length, case.head_dim) for heads in (case.heads, case.groups, case.groups)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    do = torch.randn(shapes[0], device="cuda", dtype=dtype)
    errors = {name: check(name, case, q, k, v) for name in case.implementations}
    shared = {
        name: getattr(case, name) for name in ("dtype", "causal", "batch", "heads", "groups", "length", "head_dim")
    }
    for direction in DIRECTIONS:
        calls = {name: prepare(name, case, direction, q, k, v, do) for name in case.implementations}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds):
            # A different one starts each time: an implementation that follows a slow kernel finds a cooler GPU with
            # higher clocks.
            names = list(calls)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(time_ms(name, calls[name]))
        yield shared | {
            "direction": direction,
            "ms": times,
            "tflops": {name: case.tflop(direction) / statistics.median(ms) * 1e3 for name, ms in times.items()},
            "errors": errors,
        }


def run(name: str, case: Case, q: Any, k: Any, v: Any) -> Any:
    """Ours through our function; the peer through its own, without our code around it."""
    import torch

    from stepscope.kernels import flash_attention

    backend, _, setting = name.partition("+")
    if backend.startswith("sdpa-"):
        grouped = case.groups != case.heads
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
    return flash_attention(q, k, v, causal=case.causal, backend=backend, deterministic=setting == "deterministic")


@contextlib.contextmanager
def settings(name: str) -> Iterator[None]:
    """The context in which an implementation runs, set outside the timing."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
        "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    torch.set_float32_matmul_precision("high" if name.endswith("+tf32") else "highest")
    with sdpa_kernel(backends[name]) if name in backends else contextlib.nullcontext():
        yield


def prepare(name: str, case: Case, direction: str, q: Any, k: Any, v: Any, do: Any) -> Callable[[], object]:
    """The call to time. Backward runs on a retained graph, as is usual."""
    import torch

    if direction == "forward":
        detached = [x.detach() for x in (q, k, v)]
        return lambda: run(name, case, *detached)
    with settings(name):
        output = run(name, case, q, k, v)
    return lambda: torch.autograd.grad(output, (q, k, v), do, retain_graph=True)


def check(name: str, case: Case, q: Any, k: Any, v: Any) -> float:
    """The relative error of the last rows of the last head, which see the most keys, against float64."""
    import torch

    rows = slice(case.length - CHECKED_ROWS, case.length)
    with torch.no_grad(), settings(name):
        ours = run(name, case, q, k, v)[-1, -1, rows].double()
        scores = q[-1, -1, rows].double() @ k[-1, -1].double().T / math.sqrt(case.head_dim)
        if case.causal:
            unseen = torch.ones_like(scores, dtype=torch.bool).triu(1 + case.length - CHECKED_ROWS)
            scores = scores.masked_fill(unseen, -math.inf)
        truth = scores.softmax(-1) @ v[-1, -1].double()
    error = ((ours - truth).norm() / truth.norm()).item()
    limit = 1e-2 if case.dtype == "bf16" else 2e-3 if name.endswith("+tf32") else 1e-5
    if not error <= limit:
        raise SystemExit(f"{name} is wrong for {case.name}: relative error {error:.2g}, limit {limit:g}")
    return float(error)


def time_ms(name: str, call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    with settings(name):
        return float(do_bench(call, warmup=WARMUP_MS, rep=MEASURED_MS, return_mode="median"))


def ratio(row: dict[str, Any], ours: str, peer: str) -> float | None:
    """The speedup, as the median over rounds of the ratio within a round."""
    if ours not in row["ms"] or peer not in row["ms"]:
        return None
    return float(statistics.median(p / o for o, p in zip(row["ms"][ours], row["ms"][peer], strict=True)))


def describe_row(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {tflops:.0f}" for name, tflops in row["tflops"].items())


def print_table(rows: list[dict[str, Any]]) -> int:
    missed = 0
    print("\n| direction | dtype | mask | B,H,L,D | TFLOP/s | ratio, target |\n| --- | --- | --- | --- | --- | --- |")
    for row in sorted(rows, key=lambda row: row["direction"], reverse=True):
        verdicts = []
        for target in TARGETS:
            value = ratio(row, target.ours, target.peer) if target.applies(row) else None
            if value is None:
                continue
            missed += value < target.ratio
            mark = "" if value >= target.ratio else " **missed**"
            verdicts.append(f"{target.ours} / {target.peer} {value:.2f}, {target.ratio:g}{mark}")
        groups = row.get("groups", row["heads"])
        heads = row["heads"] if groups == row["heads"] else f"{row['heads']}/{groups}"
        shape = f"{row['batch']},{heads},{row['length']},{row['head_dim']}"
        mask = "causal" if row["causal"] else "full"
        line = (row["direction"], row["dtype"], mask, shape, describe_row(row), "; ".join(verdicts))
        print("| " + " | ".join(line) + " |")
    print(f"\n{missed} target ratios missed")
    return 1 if missed else 0


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from stepscope.findings import Axis, Figure, Point
    from stepscope.render.figures import save

    shown = ("hopper", "sdpa-cudnn", "triton", "sdpa-flash")
    points = [
        Point(
            panel=f"{row['direction']}, D {row['head_dim']}, {'causal' if row['causal'] else 'full'}",
            series=name,
            x=row["length"],
            y=row["tflops"][name],
        )
        for row in sorted(rows, key=lambda row: (row["direction"] == "backward", -row["head_dim"], row["causal"]))
        for name in shown
        if name in row["tflops"] and row["dtype"] == "bf16" and "triton" in row["tflops"]
    ]
    figure = Figure(
        title="Attention in bf16: throughput",
        subtitle=f"{rows[0]['environment']['driver_name']}, 16 heads, 16384 tokens per batch; causal counted as half",
        x=Axis(label="length", log=True),
        y=Axis(label="rate", unit="TFLOP/s"),
        points=tuple(points),
        series=shown,
        series_label="implementation",
    )
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
