"""CPU time of an attention call: ours and SDPA's in turns, and the compile time of our first one.

The work on the device is short, so that the calls are CPU-bound. First calls start with an empty Triton cache. A call
inside `torch.compile` is timed as the difference between a compiled function with nine of them and one with one.

    python bench/attention_host_time.py --out bench/results/attention_host_time_h200.json
    python bench/attention_host_time.py --device cpu --backend tiled    # only to see that it runs

`TARGETS` holds the limits; the exit status is 1 if one is missed.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, CALLS = 9, 200
SHAPE = (1, 2, 128, 64)  # batch, heads, length, head dim
FEW, MANY = 1, 9
# Ours over SDPA's; and µs per call in compiled code.
TARGETS = {"forward": 1.25, "forward with autograd": 1.25, "backward": 1.25}
MOST_COMPILED_US = 40


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time of an attention call.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        row = measure(arguments.device, arguments.backend)
    text = json.dumps(row, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return report(row)


def report(row: dict[str, Any]) -> int:
    missed = 0
    print("\n| call | ours, µs | SDPA, µs | ratio | limit |\n| --- | --- | --- | --- | --- |")
    for name, limit in TARGETS.items():
        ours, sdpa = row["us"][name], row["us"][f"SDPA {name}"]
        missed += ours / sdpa > limit
        print(f"| {name} | {ours:.1f} | {sdpa:.1f} | {ours / sdpa:.2f} | {limit:g} |")
    ours = row["us"]["compiled"]
    missed += ours > MOST_COMPILED_US
    print(f"| in compiled code | {ours:.1f} | {row['us']['SDPA compiled']:.1f} | | {MOST_COMPILED_US} µs |")
    return 1 if missed else 0


def measure(device: str, backend: str) -> dict[str, Any]:
    import msgspec
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from stepscope.kernels import flash_attention
    from stepscope.measure.environment import describe

    if device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA GPU found", file=sys.stderr)
        raise SystemExit(2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    plain = [x.detach() for x in leaves]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def ours(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, causal=True, backend=backend)

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    first_forward_s = time_s(lambda: ours(*plain), wait)
    calls: dict[str, Callable[[], object]] = {}
    first_backward_s = 0.0
    for prefix, attend in (("", ours), ("SDPA ", sdpa)):
        out = attend(*leaves)
        do = torch.randn_like(out)
        backward = backward_of(out, leaves, do)
        if not prefix:
            first_backward_s = time_s(backward, wait)
        calls[f"{prefix}forward"] = bound(attend, plain)
        calls[f"{prefix}forward with autograd"] = bound(attend, leaves)
        calls[f"{prefix}backward"] = backward
        for count in (FEW, MANY):
            calls[f"{prefix}compiled {count}"] = bound(torch.compile(repeated(attend, count), fullgraph=True), plain)
    rounds = in_turns(calls, wait)
    us = {name: statistics.median(times) for name, times in rounds.items() if "compiled" not in name}
    for prefix in ("", "SDPA "):
        few, many = (rounds[f"{prefix}compiled {count}"] for count in (FEW, MANY))
        us[f"{prefix}compiled"] = statistics.median((m - f) / (MANY - FEW) for f, m in zip(few, many, strict=True))
    return {
        "benchmark": "attention_host_time",
        "command": shlex.join(["python", *sys.argv]),
        "environment": msgspec.to_builtins(describe(torch.device(device), set())),
        "backend": backend,
        "shape": SHAPE,
        "first_forward_s": round(first_forward_s, 2),
        "first_backward_s": round(first_backward_s, 2),
        "us": {name: round(value, 1) for name, value in us.items()},
        "rounds_us": {name: [round(one, 1) for one in times] for name, times in rounds.items()},
    }


def bound(call: Callable[..., object], tensors: list[Any]) -> Callable[[], object]:
    return lambda: call(*tensors)


def backward_of(out: Any, leaves: list[Any], do: Any) -> Callable[[], object]:
    import torch

    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)


def repeated(attend: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Calls that depend on each other, so that the compiler keeps all of them."""

    def run(q: Any, k: Any, v: Any) -> Any:
        for _ in range(count):
            q = attend(q, k, v)
        return q

    return run


def time_s(call: Callable[[], object], wait: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def in_turns(calls: dict[str, Callable[[], object]], wait: Callable[[], object]) -> dict[str, list[float]]:
    """µs per call, by round. Within one, the CPU does not wait for the device."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            wait()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            rounds[name].append((time.perf_counter() - started) / CALLS * 1e6)
    return rounds


if __name__ == "__main__":
    sys.exit(main())
