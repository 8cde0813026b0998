"""Whole train steps of the built-in models: our attention, PyTorch's, and ours of an earlier commit, in one run.

A step is forward, loss, backward and optimizer, as `stepscope bench` runs it: batch 4, bf16, `adamw-fused`. SDPA is
called directly, without our code around it, and chooses its backend. Each implementation runs in a process of its own
per model and context, because two commits cannot share one. All processes compile at the same time, and are idle while
another one is measured. Rounds rotate the order, so that clocks and heat affect all alike.

    git archive COMMIT src | tar -x -C /tmp/before
    python bench/attention_train_step.py --before /tmp/before/src --before-commit COMMIT --out steps.jsonl
    python bench/attention_train_step.py --from steps.jsonl
    python bench/attention_train_step.py --device cpu --size nano --context 32 --rounds 2    # only to see that it runs

Before anything is timed, the gradients of the query projections are compared with SDPA's. The exit status is 1 if an
implementation failed or differs.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from result_rows import fail, read_rows

WARMUP, ROUNDS, STEPS = 3, 6, 6
MODES = ("eager", "compiled")
MOST_APART = 0.05  # of the norm of the gradients; each implementation rounds differently, but trains the same model
SETTINGS = {"batch": 4, "precision": "bf16", "optimizer": "adamw-fused"}
ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare train steps with our attention and PyTorch's.")
    parser.add_argument("--before", type=Path, help="the `src` directory of an earlier commit, measured as `before`")
    parser.add_argument("--before-commit", help="its commit; needed if the directory has no history")
    parser.add_argument("--size", default="small,medium")
    parser.add_argument("--context", default="512,1024")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), metavar="N", default=ROUNDS)
    parser.add_argument("--steps", type=int, choices=range(1, 101), metavar="N", default=STEPS, help="steps per round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append one JSON line per case")
    parser.add_argument("--from", dest="source", type=Path, help="print the table from such a file without measuring")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    if arguments.before is not None and not (arguments.before / "stepscope").is_dir():
        fail(f"`{arguments.before}` has no package `stepscope`; expected the `src` directory of a checkout")
    rows = read_rows(arguments.source, "attention_train_step") if arguments.source else list(measure(arguments))
    print(table(rows))
    return 1 if any(row["failures"] for row in rows) else 0


# --- The process that measures ---


class Worker:
    """One implementation of one model and context, in a process that answers a line with a line."""

    def __init__(self, name: str, source: Path, commit: str | None, case: dict[str, Any], cache: Path) -> None:
        self.name = name
        environment = os.environ | {
            "PYTHONPATH": str(source),
            # The compiler finds equal graphs by the names of their operators, which both commits share.
            "TORCHINDUCTOR_CACHE_DIR": str(cache / name / "inductor"),
            "TRITON_CACHE_DIR": str(cache / name / "triton"),
        }
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # per process, and a dozen compile at once
        if name == "before":
            environment.pop("STEPSCOPE_COMMIT", None)
            environment |= {"STEPSCOPE_COMMIT": commit} if commit else {}
        what = case | {"attention": "sdpa" if name == "sdpa" else "flash"}
        command = [sys.executable, __file__, "--worker", json.dumps(what)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` reports that the process has ended

    def answer(self) -> Any:
        """The next answer, or None if the process has ended; its standard error says why."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per case, written as soon as it is measured."""
    sources = {"sdpa": ROOT / "src", "flash": ROOT / "src"}
    if arguments.before is not None:
        sources["before"] = arguments.before.resolve()
    common = {"benchmark": "attention_train_step", "command": shlex.join(["python", *sys.argv]), **SETTINGS}
    workers: dict[tuple[str, int], list[Worker]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        try:
            for size, context in itertools.product(arguments.size.split(","), map(int, arguments.context.split(","))):
                case = {"size": size, "context": context, "device": arguments.device}
                workers[size, context] = [
                    Worker(name, source, arguments.before_commit, case, Path(cache)) for name, source in sources.items()
                ]
            ready = {key: {one.name: one.answer() for one in several} for key, several in workers.items()}
            print(f"all processes are ready after {time.monotonic() - started:.0f} s", flush=True)
            for (size, context), mode in itertools.product(workers, MODES):
                started_as = ready[size, context]
                failures = check(started_as, mode)
                times = time_in_turns(
                    [one for one in workers[size, context] if one.name not in failures], mode, arguments
                )
                failures |= {name: "ended while it was measured" for name, rounds in times.items() if None in rounds}
                times = {name: rounds for name, rounds in times.items() if name not in failures}
                row = common | {
                    "environment": next((one["environment"] for one in started_as.values() if one), None),
                    "commits": {name: one["environment"]["commit"] for name, one in started_as.items() if one},
                    "size": size,
                    "context": context,
                    "mode": mode,
                    "ready_s": {name: one["ready_s"][mode] for name, one in started_as.items() if one},
                    "gradient_norms": {name: one["norms"][mode] for name, one in started_as.items() if one},
                    "rounds_ms": times,
                    "step_ms": {name: statistics.median(itertools.chain(*rounds)) for name, rounds in times.items()},
                    "failures": failures,
                }
                print(f"{size} {context} {mode}: {row['step_ms']} {failures or ''}", flush=True)
                if arguments.out is not None:
                    with arguments.out.open("a") as lines:
                        lines.write(json.dumps(row) + "\n")
                yield row
        finally:
            for worker in itertools.chain(*workers.values()):
                worker.close()


def check(ready: dict[str, Any], mode: str) -> dict[str, str]:
    """What is wrong with the implementations, by name."""
    failures = {name: "ended before it was measured" for name, one in ready.items() if one is None}
    if "sdpa" in failures:
        return failures
    truth = ready["sdpa"]["norms"][mode]
    for name, one in ready.items():
        if one is not None and not abs(one["norms"][mode] / truth - 1) <= MOST_APART:
            failures[name] = f"gradients differ: norm {one['norms'][mode]:.4g}, SDPA's {truth:.4g}"
    return failures


def time_in_turns(workers: list[Worker], mode: str, arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Milliseconds of the steps by implementation and round; None for a round in which the process ended."""
    times: dict[str, list[Any]] = {one.name: [] for one in workers}
    for turn in range(arguments.rounds):
        first = turn % max(len(workers), 1)
        for worker in workers[first:] + workers[:first]:
            worker.ask({"mode": mode, "steps": arguments.steps})
            times[worker.name].append(worker.answer())
    return times


def ratio(row: dict[str, Any], peer: str) -> float | None:
    """How many times faster `flash` is, as the median over rounds of the ratio within a round."""
    times = row["rounds_ms"]
    if "flash" not in times or peer not in times:
        return None
    rounds = zip(times[peer], times["flash"], strict=True)
    return float(statistics.median(statistics.median(theirs) / statistics.median(ours) for theirs, ours in rounds))


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["", "| model | context | mode | SDPA, ms | before, ms | flash, ms | SDPA / flash | before / flash |"]
    lines.append("| --- " * 8 + "|")
    for row in rows:
        shown = [row["step_ms"].get(name) for name in ("sdpa", "before", "flash")]
        ratios = [ratio(row, peer) for peer in ("sdpa", "before")]
        cells = [row["size"], row["context"], row["mode"]]
        cells += ["" if value is None else f"{value:.2f}" for value in shown + ratios]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        f"\n{row['size']} {row['context']} {row['mode']}, {name}: {why}"
        for row in rows
        for name, why in row["failures"].items()
    ]
    return "\n".join(lines)


# --- The process that is measured; its code must work with both commits ---


def work(case: dict[str, Any]) -> int:
    """Build the step, compile it, say so, and run steps for every line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    import msgspec
    import torch

    from stepscope.measure.environment import describe_unmeasured, resolve_device
    from stepscope.measure.timing import settle_heap, time_steps
    from stepscope.spec import SIZES, Workload
    from stepscope.step import build

    device = resolve_device(case["device"])
    workload = msgspec.convert(
        {**SETTINGS, "context": case["context"], "attention": case["attention"], "device": str(device)}
        | {"model": SIZES[case["size"]]},
        Workload,
    )
    step = build(workload, device)
    if case["attention"] == "sdpa":
        call_sdpa_directly(step.module)
    ways: dict[str, Callable[..., object]] = {
        "eager": step.module,
        "compiled": torch.compile(step.module, dynamic=False),
    }
    norms, ready_s = {}, {}
    for mode, way in ways.items():
        step.run_module = way
        started = time.monotonic()
        norms[mode] = gradient_norm(step)
        ready_s[mode] = round(time.monotonic() - started, 1)
    for way in ways.values():
        step.run_module = way
        time_steps(step, WARMUP)
    settle_heap()
    environment = msgspec.to_builtins(describe_unmeasured(device))
    print(json.dumps({"environment": environment, "norms": norms, "ready_s": ready_s}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        step.run_module = ways[question["mode"]]
        samples = time_steps(step, 2 + question["steps"])  # the GPU was idle before the first ones
        print(json.dumps([ns / 1e6 for ns in samples.step_ns[2:]]), file=answers, flush=True)
    return 0


def gradient_norm(step: Any) -> float:
    """Of the query projections, which attention alone decides. No update follows, so all implementations have the same
    weights.
    """
    import torch

    for name, phase in step.phases:
        if name != "optimizer":
            phase()
    gradients = [p.grad for name, p in step.module.named_parameters() if name.endswith("q_proj.weight")]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    step.module.zero_grad(set_to_none=True)
    return float(norm)


def call_sdpa_directly(module: Any) -> None:
    from dataclasses import replace

    from torch.nn.functional import scaled_dot_product_attention

    from stepscope.nn.model import CausalAttention

    def attend(q: Any, k: Any, v: Any, *, causal: bool, scale: float | None = None) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    for layer in module.modules():
        if isinstance(layer, CausalAttention):
            layer.ops = replace(layer.ops, attention=attend)


if __name__ == "__main__":
    sys.exit(main())
