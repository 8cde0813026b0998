"""Our attention against PyTorch's own and FlashAttention-4, forward and backward, on one GPU in one run.

Each output is checked against float64 first (gradients are checked in tests/gpu). Then the implementations alternate
over several rounds, so that clocks and heat affect all alike; a number is the median of its rounds, each of them a
median of `triton.testing.do_bench`, which flushes L2 before every call. TFLOP/s count a causal mask as half, and
backward as two and a half times forward, if all head dims are equal.

    python bench/attention_speed.py --out bench/results/attention_speed_h200.jsonl
    python bench/attention_speed.py --from bench/results/attention_speed_h200.jsonl --plot attention_speed.png

`TARGETS` holds the ratios to reach; the exit status is 1 if one is missed. Most are for `auto`, which is
`flash_attention` as it is called by default. `--table` writes the order in which it tries the backends:

    python bench/attention_speed.py --from bench/results/attention_speed_h200.jsonl --table \\
        src/stepscope/kernels/attention/rankings.json
"""

import argparse
import contextlib
import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from stepscope.cost.operators import attention_flops

Row = dict[str, Any]

ROUNDS = 5
WARMUP_MS, MEASURED_MS = 5, 20
CHECKED_ROWS = 128
DIRECTIONS = ("forward", "backward")
MASKS = ("causal", "full")
# batch, heads, length
LONG_SHAPES = ((8, 16, 2048), (4, 16, 4096), (2, 16, 8192), (1, 16, 16384), (1, 16, 32768))
SHORT_SHAPES = tuple(itertools.product((4, 16), (16,), (512, 1024, 2048)))
OTHER_SHAPES = (("causal", 4, 16, 2048), ("causal", 1, 16, 8192), ("full", 1, 16, 8192))
FP16_SHAPES = (("causal", 2, 16, 8192, 128), ("causal", 2, 16, 8192, 64), ("full", 4, 16, 4096, 128))
FP32_SHAPES = ((8, 1, 1024), (8, 1, 4096), (8, 1, 16384))
DETERMINISTIC_LENGTH = 8192
# What `auto` may run, in the order of its preference where nothing was measured. Another one comes first only if it is
# faster by this factor, because differences below it are noise.
CANDIDATES = ("hopper", "triton", "fa4", "sdpa-cudnn")
MARGIN = 1.03
# Below this, a call is bound by the CPU as much as by the GPU, and a call of ours takes less of it than one of a peer.
SHORTEST_MS = 0.3
PEERS = ("fa4", "sdpa-cudnn", "sdpa-flash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, and the implementations that run it: backends of `flash_attention`, with `+deterministic` and
    `+tf32` for settings. `groups` is the number of key/value heads.
    """

    dtype: str
    causal: bool
    batch: int
    heads: int
    groups: int
    length: int
    head_dim: int
    value_dim: int
    implementations: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.dtype} {'causal' if self.causal else 'full'} {describe_shape(asdict(self))}"

    def tflop(self, direction: str) -> float:
        flops = attention_flops(
            batch=self.batch,
            heads=self.heads,
            queries=self.length,
            keys=self.length,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            causal=self.causal,
            backward=direction == "backward",
        )
        return flops / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """At least `ratio` times as fast as the fastest of the peers, in one pass or in both together."""

    peers: tuple[str, ...]
    ratio: float
    applies: Callable[[Row], bool]
    ours: str = "auto"
    together: bool = False


def is_standard(row: Row) -> bool:
    is_half = row["dtype"] in ("bf16", "fp16")
    return is_half and row["head_dim"] in (64, 128) and row["value_dim"] == row["head_dim"] and not is_grouped(row)


def is_long(row: Row) -> bool:
    return is_standard(row) and row["length"] >= 4096


def is_grouped(row: Row) -> bool:
    return bool(row["groups"] != row["heads"])


TARGETS = (
    Target(peers=("fa4",), ratio=1.0, applies=is_long),
    Target(peers=("sdpa-cudnn",), ratio=1.05, applies=lambda row: is_long(row) and row["direction"] == "forward"),
    Target(peers=PEERS, ratio=1.0, together=True, applies=lambda row: is_standard(row) and row["length"] <= 2048),
    Target(peers=PEERS, ratio=1.0, applies=is_grouped),
    Target(
        peers=PEERS,
        ratio=0.9,
        applies=lambda row: row["dtype"] == "bf16" and not is_standard(row) and not is_grouped(row),
    ),
    Target(
        ours="hopper+deterministic", peers=("hopper",), ratio=0.85, applies=lambda row: row["direction"] == "backward"
    ),
    Target(ours="triton", peers=("sdpa-efficient",), ratio=1.5, applies=lambda row: row["dtype"] == "fp32"),
)


def cases() -> Iterator[Case]:
    every = ("auto", "hopper", *PEERS)
    for head_dim, mask, (batch, heads, length) in itertools.product((128, 64), MASKS, LONG_SHAPES):
        more = ("hopper+deterministic",) if length == DETERMINISTIC_LENGTH else ()
        yield make_case("bf16", mask, batch, heads, length, head_dim, (*every, *more))
    for head_dim, (batch, heads, length) in itertools.product((128, 64), SHORT_SHAPES):
        yield make_case("bf16", "causal", batch, heads, length, head_dim, every)
    for heads, length in itertools.product((32, 64), (2048, 4096, 8192, 16384)):
        yield make_case("bf16", "causal", max(1, 8192 // length), heads, length, 128, every, groups=8)
    for (head_dim, value_dim), shape in itertools.product(((256, 256), (96, 96), (192, 128)), OTHER_SHAPES):
        mask, batch, heads, length = shape
        yield make_case("bf16", mask, batch, heads, length, head_dim, (*every, "triton"), value_dim=value_dim)
    for mask, batch, heads, length, head_dim in FP16_SHAPES:
        yield make_case("fp16", mask, batch, heads, length, head_dim, every)
    for head_dim, (batch, heads, length) in itertools.product((64, 128), FP32_SHAPES):
        yield make_case("fp32", "causal", batch, heads, length, head_dim, ("triton", "triton+tf32", "sdpa-efficient"))


def make_case(
    dtype: str,
    mask: str,
    batch: int,
    heads: int,
    length: int,
    head_dim: int,
    implementations: tuple[str, ...],
    *,
    groups: int | None = None,
    value_dim: int | None = None,
) -> Case:
    return Case(
        dtype=dtype,
        causal=mask == "causal",
        batch=batch,
        heads=heads,
        groups=groups or heads,
        length=length,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        implementations=implementations,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our attention with PyTorch's and FlashAttention-4.")
    parser.add_argument("--out", type=Path, help="append one JSON line per case and direction")
    parser.add_argument("--from", dest="source", type=Path, help="print the table from such a file without measuring")
    parser.add_argument("--only", default="", help="only cases whose name contains this, such as `bf16 causal`")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), metavar="N", default=ROUNDS)
    parser.add_argument("--plot", type=Path, help="plot the bf16 throughput as .png, .svg, .pdf or .html")
    parser.add_argument("--table", type=Path, help="write the order in which `auto` tries backends, as JSON")
    arguments = parser.parse_args()
    source = read(arguments.source) if arguments.source else measure(arguments.only, arguments.rounds, arguments.out)
    rows = list(source)
    if not rows:
        fail("no rows" if arguments.source else f"no case name contains `{arguments.only}`")
    if arguments.plot:
        draw(rows, arguments.plot)
    if arguments.table:
        write_rankings(rows, arguments.table)
    return print_table(rows)


def read(path: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if all(row["benchmark"] == "attention_speed" for row in rows):
            return [complete(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        fail(f"cannot read `{path}`: {problem!r}")
    return fail(f"not a results file of this benchmark: `{path}`")


def complete(row: Row) -> Row:
    """Add what older rows lack. They were measured on an H200, with one head dim for keys and values."""
    return {"groups": row["heads"], "value_dim": row["head_dim"], "architecture": "sm_90"} | row


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# --- Measuring ---


def measure(only: str, rounds: int, out: Path | None) -> Iterator[Row]:
    """One row per case and direction, written as soon as it is measured."""
    import msgspec
    import torch

    from stepscope.measure.environment import describe

    if not torch.cuda.is_available():
        fail("no CUDA GPU found; `--from bench/results/attention_speed_h200.jsonl` shows stored results")
    fa4 = fa4_version()
    print(f"FlashAttention-4 {fa4}" if fa4 else "FlashAttention-4 is NOT INSTALLED, so `fa4` is left out", flush=True)
    major, minor = torch.cuda.get_device_capability()
    common = {
        "benchmark": "attention_speed",
        "command": shlex.join(["python", *sys.argv]),
        "environment": msgspec.to_builtins(describe(torch.device("cuda"), {"fp32", "bf16"})),
        "architecture": f"sm_{major}{minor}",
        "fa4": fa4,
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


def fa4_version() -> str | None:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


def measure_case(case: Case, rounds: int) -> Iterator[Row]:
    import torch

    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
    shapes = [
        (case.batch, heads, case.length, head_dim)
        for heads, head_dim in (
            (case.heads, case.head_dim),
            (case.groups, case.head_dim),
            (case.groups, case.value_dim),
            (case.heads, case.value_dim),
        )
    ]
    tensors = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    errors, left_out = check_all(case, tensors)
    shared = {name: value for name, value in asdict(case).items() if name != "implementations"}
    for direction in DIRECTIONS:
        calls = {name: prepare(name, case, direction, tensors) for name in errors}
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
            "left_out": left_out,
        }


def check_all(case: Case, tensors: list[Any]) -> tuple[dict[str, float], dict[str, str]]:
    """The error of each implementation that runs both passes, and why others do not, which is also printed."""
    errors, left_out = {}, {}
    for name in case.implementations:
        if name == "fa4" and fa4_version() is None:
            continue
        # Without a kernel, ours raises a ValueError, PyTorch a RuntimeError, and FlashAttention-4 any of them.
        refusals = (ValueError, RuntimeError, AssertionError) if name in PEERS else (ValueError,)
        try:
            errors[name] = check(name, case, tensors)
            prepare(name, case, "backward", tensors)()
        except refusals as reason:
            left_out[name] = str(reason)
            print(f"{case.name}: {name} is left out: {reason}", flush=True)
    return errors, left_out


def run(name: str, case: Case, q: Any, k: Any, v: Any) -> Any:
    """Ours through our function; a peer through its own, without our code around it."""
    import torch

    from stepscope.kernels import flash_attention

    backend, _, setting = name.partition("+")
    if backend == "fa4":
        out = import_module("flash_attn.cute").flash_attn_func(q, k, v, causal=case.causal)
        return out[0] if isinstance(out, tuple) else out
    if backend.startswith("sdpa-"):
        grouped = case.groups != case.heads
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
    return flash_attention(q, k, v, causal=case.causal, backend=backend, deterministic=setting == "deterministic")


def arrange(name: str, tensors: list[Any]) -> list[Any]:
    """The tensors in the layout that the implementation is made for: FlashAttention-4's is (B, L, H, D)."""
    if name != "fa4":
        return tensors
    return [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]


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


def prepare(name: str, case: Case, direction: str, tensors: list[Any]) -> Callable[[], object]:
    """The call to time. Backward runs on a retained graph, as is usual."""
    import torch

    *inputs, do = arrange(name, tensors)
    if direction == "forward":
        detached = [x.detach() for x in inputs]
        return lambda: run(name, case, *detached)
    with settings(name):
        output = run(name, case, *inputs)
    return lambda: torch.autograd.grad(output, inputs, do.detach(), retain_graph=True)


def check(name: str, case: Case, tensors: list[Any]) -> float:
    """The relative error of the last rows of the last head, which see the most keys, against float64."""
    import torch

    rows = slice(case.length - CHECKED_ROWS, case.length)
    q, k, v, _ = tensors
    with torch.no_grad(), settings(name):
        out = run(name, case, *arrange(name, tensors[:3]))
        ours = (out[-1, rows, -1] if name == "fa4" else out[-1, -1, rows]).double()
        scores = q[-1, -1, rows].double() @ k[-1, -1].double().T / math.sqrt(case.head_dim)
        if case.causal:
            unseen = torch.ones_like(scores, dtype=torch.bool).triu(1 + case.length - CHECKED_ROWS)
            scores = scores.masked_fill(unseen, -math.inf)
        truth = scores.softmax(-1) @ v[-1, -1].double()
    error = ((ours - truth).norm() / truth.norm()).item()
    limit = 1e-2 if case.dtype in ("bf16", "fp16") else 2e-3 if name.endswith("+tf32") else 1e-5
    if not error <= limit:
        raise SystemExit(f"{name} is wrong for {case.name}: relative error {error:.2g}, limit {limit:g}")
    return float(error)


def time_ms(name: str, call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    with settings(name):
        return float(do_bench(call, warmup=WARMUP_MS, rep=MEASURED_MS, return_mode="median"))


# --- Results ---


def ratio(rows: Sequence[Row], ours: str, peer: str) -> float | None:
    """The speedup over these passes together, as the median over rounds of the ratio within a round."""
    if any(name not in row["ms"] for name in (ours, peer) for row in rows):
        return None
    ours_ms, peer_ms = (
        [sum(times) for times in zip(*(row["ms"][name] for row in rows), strict=True)] for name in (ours, peer)
    )
    return float(statistics.median(p / o for o, p in zip(ours_ms, peer_ms, strict=True)))


def slowest_ratio(rows: Sequence[Row], ours: str, peers: Iterable[str]) -> tuple[float, str] | None:
    """The speedup over the fastest peer, and its name."""
    found = [(value, peer) for peer in peers if (value := ratio(rows, ours, peer)) is not None]
    return min(found, default=None)


def describe_row(row: Row) -> str:
    return ", ".join(f"{name} {tflops:.0f}" for name, tflops in row["tflops"].items())


def describe_shape(row: Row) -> str:
    heads = f"{row['heads']}" if not is_grouped(row) else f"{row['heads']}/{row['groups']}"
    dims = f"{row['head_dim']}" if row["value_dim"] == row["head_dim"] else f"{row['head_dim']}/{row['value_dim']}"
    return f"{row['batch']},{heads},{row['length']},{dims}"


def judge(row: Row, forward: Row | None) -> Iterator[tuple[str, bool]]:
    """The verdicts about a row, and whether each is a miss. Targets for both passes together come with the backward
    row, if `forward` is the other one. For `auto`, the ratio of `hopper` is shown too.
    """
    for target in TARGETS:
        if not target.applies(row) or (target.together and (forward is None or row["direction"] == "forward")):
            continue
        if target.ours in row.get("left_out", ()):
            yield f"{target.ours} does not run **missed**", True
            continue
        rows = [forward, row] if target.together and forward is not None else [row]
        found = slowest_ratio(rows, target.ours, target.peers)
        if found is None:
            continue
        value, peer = found
        is_missed = round(value, 2) < target.ratio
        words = f"{target.ours} / {peer} {value:.2f}, {target.ratio:g}{' **missed**' if is_missed else ''}"
        alone = slowest_ratio(rows, "hopper", target.peers) if target.ours == "auto" else None
        yield (
            f"{'both passes: ' if target.together else ''}{words}{f' (hopper {alone[0]:.2f})' if alone else ''}",
            is_missed,
        )


def print_table(rows: list[Row]) -> int:
    forwards = {key_of(row): row for row in rows if row["direction"] == "forward"}
    missed = checked = 0
    print("\n| direction | dtype | mask | B,H,L,D | TFLOP/s | ratio, target |\n| --- | --- | --- | --- | --- | --- |")
    for row in sorted(rows, key=lambda row: row["direction"], reverse=True):
        verdicts = list(judge(row, forwards.get(key_of(row))))
        checked += len(verdicts)
        missed += sum(is_missed for _, is_missed in verdicts)
        mask = "causal" if row["causal"] else "full"
        words = "; ".join(verdict for verdict, _ in verdicts)
        line = (row["direction"], row["dtype"], mask, describe_shape(row), describe_row(row), words)
        print("| " + " | ".join(line) + " |")
    print(f"\n{missed} of {checked} target ratios missed")
    return 1 if missed else 0


def key_of(row: Row) -> tuple[str, bool, str]:
    return row["dtype"], row["causal"], describe_shape(row)


def rank(row: Row) -> tuple[str, ...]:
    """The backends of a row, best first."""
    measured = [name for name in CANDIDATES if name in row["ms"]]
    if statistics.median(row["ms"][measured[0]]) < SHORTEST_MS:
        return tuple(measured)
    speedups = {name: ratio([row], name, measured[0]) or 0.0 for name in measured}
    return tuple(sorted(measured, key=lambda name: MARGIN if name == measured[0] else speedups[name], reverse=True))


def write_rankings(rows: list[Row], path: Path) -> None:
    """Write `rankings.json`, one shape per line. Of two rows for a shape, the later one counts."""
    import msgspec

    from stepscope.kernels.attention.rankings import MeasuredShape, Ranking

    found: dict[str, dict[MeasuredShape, Ranking]] = {}
    for row in rows:
        if row["dtype"] != "bf16":
            continue
        shape = MeasuredShape(
            direction=row["direction"],
            causal=row["causal"],
            head_dim=row["head_dim"],
            value_dim=row["value_dim"],
            length=row["length"],
            programs=row["batch"] * row["heads"],
            group=row["heads"] // row["groups"],
        )
        found.setdefault(row["architecture"], {})[shape] = Ranking(shape=shape, backends=rank(row))
    tables = [
        f'"{architecture}": [\n' + ",\n".join(msgspec.json.encode(one).decode() for one in rankings.values()) + "\n]"
        for architecture, rankings in found.items()
    ]
    path.write_text("{\n" + ",\n".join(tables) + "\n}\n")


def draw(rows: list[Row], path: Path) -> None:
    from stepscope.findings import Axis, Figure, Point
    from stepscope.render.figures import save

    shown = ("auto", "hopper", "fa4", "sdpa-cudnn", "sdpa-flash")
    points = [
        Point(
            panel=f"{row['direction']}, D {row['head_dim']}, {'causal' if row['causal'] else 'full'}",
            series=name,
            x=row["length"],
            y=row["tflops"][name],
        )
        for row in sorted(rows, key=lambda row: (row["direction"] == "backward", -row["head_dim"], row["causal"]))
        for name in shown
        if name in row["tflops"]
        and row["dtype"] == "bf16"
        and is_standard(row)
        and (row["batch"], row["heads"], row["length"]) in LONG_SHAPES
    ]
    figure = Figure(
        title="Attention in bf16: throughput",
        subtitle=f"{rows[0]['environment']['driver_name']}, 16 heads, at least 16384 tokens; causal counted as half",
        x=Axis(label="length", log=True),
        y=Axis(label="rate", unit="TFLOP/s"),
        points=tuple(points),
        series=tuple(name for name in shown if any(point.series == name for point in points)),
        series_label="implementation",
    )
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
