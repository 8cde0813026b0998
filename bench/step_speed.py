"""Whole train steps: the fast preset, the rungs that lead to it, and what people use instead, in one run.

    python bench/step_speed.py --out steps.jsonl                  # all groups; --group small,large for some
    python bench/step_speed.py --from bench/results/step_speed_h200.jsonl
    python bench/step_speed.py --group dry --device cpu           # only to see that it runs

Batch 4, vocabulary 10,000, bf16, forward to optimizer, timed on the CPU's clock around the step and one wait for the
GPU. The peer is `transformers`' Llama of the same shape with SDPA, `torch.compile` and fused AdamW. Every
implementation has a process of its own; all of a group compile at the same time and are idle while another one is
measured. Rounds rotate the order, so that clocks and heat affect all alike.

Before anything is timed, the first loss of every rung is compared with that of the naive model, which has the same
weights, and `stepscope.optimise` compares gradients with float64. The exit status is 1 if one failed or differs.
"""

import argparse
import faulthandler
import fcntl
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_rows import fail, read_rows
from worker_process import ROOT, WorkerProcess, open_answers

ROUNDS, STEPS, WARMUP = 5, 8, 3
LIMIT_S = 240
MOST_APART = 0.01  # of the first loss
VOCAB, BATCH = 10_000, 4
SHAPES = {  # width, feed-forward width, layers, heads
    "nano": (128, 512, 4, 4),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "2.7B": (2560, 10240, 32, 32),
}
# The rungs, each with what it adds to the settings of the one before.
LADDER: dict[str, dict[str, Any]] = {
    "naive fp32": {"precision": "fp32"},
    "naive": {"precision": "bf16"},
    "flash, fused AdamW": {"attention": "flash", "optimizer": "adamw-fused"},
    "compiled": {"compile": True},
    "graph": {"graph": True},
    "working weights": {"optimizer": "adamw-onelaunch", "working_weights": True},
    "merged": {"merge": True},
    "fast": {"fuse": True},
}
# What the rung was expected to gain for `small` 1024, in ms, before it was measured.
PREDICTED = {
    "naive": 30.0,
    "flash, fused AdamW": 60.0,
    "compiled": 16.0,
    "graph": 19.0,
    "working weights": 0.8,
    "merged": 0.2,
    "fast": 0.9,
}
PEER = "transformers"
THEIRS = "torch.compile"  # the peer of a model that `stepscope.optimise` was given
Case = tuple[str, int, str]  # size or model, context, implementation
GROUPS: dict[str, list[Case]] = {
    "small": [("small", 1024, name) for name in (PEER, *LADDER)] + [("small", 256, name) for name in (PEER, "fast")],
    "medium": [("medium", 1024, name) for name in (PEER, "naive fp32", "fast")],
    "large": [("large", 1024, PEER), ("large", 1024, "fast")],
    "2.7B": [("2.7B", 512, PEER), ("2.7B", 512, "fast")],
    "optimise": [(model, 1024, how) for model in ("llama", "qwen2", "gpt2") for how in (THEIRS, "optimised")],
    "dry": [("nano", 32, name) for name in (PEER, *LADDER)],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare train steps with the fast preset, its rungs and a peer.")
    groups = f"of {', '.join(GROUPS)}; a+b measures two together"
    parser.add_argument("--group", default="small,medium,large,2.7B,optimise", help=groups)
    parser.add_argument("--limit", type=int, metavar="S", default=LIMIT_S, help="how long a process may take to start")
    parser.add_argument("--rounds", type=int, choices=range(1, 101), metavar="N", default=ROUNDS)
    parser.add_argument("--steps", type=int, choices=range(1, 101), metavar="N", default=STEPS, help="steps per round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append one JSON line per implementation")
    parser.add_argument("--from", dest="source", type=Path, help="print the tables from such a file without measuring")
    parser.add_argument("--plot", type=Path, help="draw the ladder as .svg or .png")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    if unknown := set(arguments.group.replace("+", ",").split(",")) - set(GROUPS):
        fail(f"unknown group: {', '.join(unknown)}; expected {', '.join(GROUPS)}")
    rows = read_rows(arguments.source, "step_speed") if arguments.source else measure(arguments)
    print(tables(rows))
    if arguments.plot is not None:
        draw_ladder(rows, arguments.plot)
    return 1 if any(row["failure"] for row in rows) else 0


# --- The process that measures ---


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for group in arguments.group.split(","):
            rows += list(measure_group(group, arguments, Path(folder)))
    return rows


def measure_group(group: str, arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    cases = [case for name in group.split("+") for case in GROUPS[name]]
    common = {"device": arguments.device, "lock": str(folder / "lock"), "limit_s": arguments.limit}
    workers = [WorkerProcess(__file__, common | {"case": case}) for case in cases]
    try:
        ready = {}
        for worker in workers:
            ready[worker.case] = worker.answer(arguments.limit - (time.monotonic() - started))
            print(f"{worker.case}: ready after {time.monotonic() - started:.0f} s", flush=True)
        able = [worker for worker in workers if ready[worker.case] is not None]
        times: dict[Case, list[Any]] = {worker.case: [] for worker in workers}
        for turn in range(arguments.rounds):
            first = turn % max(len(able), 1)
            for worker in able[first:] + able[:first]:
                times[worker.case].append(worker.ask(arguments.steps, arguments.limit))
        for worker in workers:
            row = describe(worker.case, ready, times[worker.case])
            row["command"] = shlex.join(["python", *sys.argv])
            print(row["size"], row["context"], row["implementation"], row["step_ms"], row["failure"] or "", flush=True)
            if arguments.out is not None:
                with arguments.out.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
            yield row
    finally:
        for worker in workers:
            worker.close()


def describe(case: Case, ready: dict[Case, Any], rounds: list[Any]) -> dict[str, Any]:
    size, context, implementation = case
    about = ready[case] or {}
    failure = None if ready[case] and None not in rounds else "ended early; its messages are above"
    naive = (ready.get((size, context, "naive")) or {}).get("first_loss")
    if failure is None and implementation in LADDER and naive is not None:
        apart = abs(about["first_loss"] / naive - 1)
        failure = f"first loss {about['first_loss']:.4f}, naive {naive:.4f}" if apart > MOST_APART else None
    samples = sorted(itertools.chain(*(one for one in rounds if one)))
    return {
        "benchmark": "step_speed",
        "size": size,
        "context": context,
        "implementation": implementation,
        "step_ms": round(statistics.median(samples), 3) if samples else None,
        "rounds_ms": rounds,
        "failure": failure or about.get("failure"),
        **about,
    }


# --- The tables ---


def tables(rows: list[dict[str, Any]]) -> str:
    found = {(row["size"], row["context"], row["implementation"]): row for row in rows}
    return "\n".join([*peer_table(found), *ladder_table(found), *optimise_table(found), *failures(rows)])


def peer_table(found: dict[Case, dict[str, Any]]) -> Iterator[str]:
    yield "\n| size, context | transformers | --preset fast | ratio | peak of both | ready after |"
    yield "| --- | --: | --: | --: | --: | --: |"
    for (size, context, implementation), ours in found.items():
        peer = found.get((size, context, PEER))
        if implementation != "fast" or peer is None or not (ours["step_ms"] and peer["step_ms"]):
            continue
        yield (
            f"| {size} {context} | {peer['step_ms']:.1f} ms | {ours['step_ms']:.2f} ms | {ratio(peer, ours):.2f} |"
            f" {gib(peer)}, {gib(ours)} GiB | {ours['ready_s']:.0f} s |"
        )


def ladder_table(found: dict[Case, dict[str, Any]]) -> Iterator[str]:
    yield "\n| small 1024 | step | predicted gain | measured gain | peak | adds |"
    yield "| --- | --: | --: | --: | --: | --- |"
    before = None
    for rung, added in LADDER.items():
        row = found.get(("small", 1024, rung))
        if row is None or not row["step_ms"]:
            continue
        gain = "" if before is None else f"{before - row['step_ms']:.2f} ms"
        flags = " ".join(
            f"--{key.replace('_', '-')} {'yes' if value is True else value}" for key, value in added.items()
        )
        predicted = "" if before is None else f"{PREDICTED[rung]:.1f} ms"
        yield f"| {rung} | {row['step_ms']:.2f} ms | {predicted} | {gain} | {gib(row)} GiB | `{flags}` |"
        before = row["step_ms"]


def draw_ladder(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar per rung, and one for the peer."""
    sys.path.insert(0, str(ROOT / "src"))
    from stepscope.findings import Bars
    from stepscope.render.drawing.bars import chart_bars, draw_bars
    from stepscope.render.figures import convert_for_print

    found = {row["implementation"]: row["step_ms"] for row in rows if (row["size"], row["context"]) == ("small", 1024)}
    shown = [(name, found[name]) for name in (*LADDER, PEER) if found.get(name)]
    bars = Bars(
        title="Step time of small, context 1024, batch 4",
        kind="ms",
        labels=tuple(name for name, _ in shown),
        series=("step",),
        values=(tuple(ms for _, ms in shown),),
    )
    path.write_bytes(convert_for_print(draw_bars(chart_bars(bars)))[path.suffix])


def optimise_table(found: dict[Case, dict[str, Any]]) -> Iterator[str]:
    yield "\n| medium 1024 | torch.compile | stepscope.optimise | ratio | peak of both | worst gradient / limit |"
    yield "| --- | --: | --: | --: | --: | --: |"
    for (model, context, how), ours in found.items():
        peer = found.get((model, context, THEIRS))
        if how != "optimised" or peer is None or not (ours["step_ms"] and peer["step_ms"]):
            continue
        yield (
            f"| {model} | {peer['step_ms']:.1f} ms | {ours['step_ms']:.2f} ms | {ratio(peer, ours):.2f} |"
            f" {gib(peer)}, {gib(ours)} GiB | {ours['share_of_limit']:.2f} ({ours['truth']}) |"
        )


def failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["failure"]:
            yield f"\n{row['size']} {row['context']} {row['implementation']}: {row['failure']}"


def ratio(peer: dict[str, Any], ours: dict[str, Any]) -> float:
    """How many times faster ours is, as the median over rounds of the ratio within a round."""
    pairs = zip(peer["rounds_ms"], ours["rounds_ms"], strict=False)
    return float(statistics.median(statistics.median(theirs) / statistics.median(mine) for theirs, mine in pairs))


def gib(row: dict[str, Any]) -> str:
    return "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**30:.2f}"


# --- The process that is measured ---


def work(what: dict[str, Any]) -> int:
    """Build and compile a step, say so, and run steps for every line of standard input."""
    answers = open_answers()
    faulthandler.dump_traceback_later(0.9 * what["limit_s"], exit=False)  # where it hangs, if it does
    import torch

    from stepscope.measure.environment import describe_unmeasured, resolve_device
    from stepscope.measure.timing import settle_heap

    device = resolve_device(what["device"])
    size, context, implementation = what["case"]
    started = time.monotonic()
    if implementation in LADDER:
        run, about = build_rung(size, context, implementation, device)
    elif implementation == "optimised":
        with Path(what["lock"]).open("w") as lock:  # the truth in float64 takes much memory: one after another
            fcntl.flock(lock, fcntl.LOCK_EX)
            run, about = build_optimised(size, context, device)
    else:
        run, about = build_peer("llama" if implementation == PEER else size, size, context, device)
    for _ in range(WARMUP):
        run()
    wait(device)
    about["ready_s"] = round(time.monotonic() - started, 1)
    about["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    about["environment"] = json.loads(encode(describe_unmeasured(device)))
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(about), file=answers, flush=True)
    settle_heap()
    for line in sys.stdin:
        samples = []
        for number in range(2 + int(line)):  # the GPU was idle before the first ones
            begun = time.perf_counter()
            run()
            wait(device)
            if number >= 2:
                samples.append((time.perf_counter() - begun) * 1e3)
        print(json.dumps(samples), file=answers, flush=True)
    return 0


def encode(value: object) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_rung(size: str, context: int, rung: str, device: Any) -> tuple[Any, dict[str, Any]]:
    import msgspec

    from stepscope.spec import SIZES, Workload
    from stepscope.step import build

    settings: dict[str, Any] = {}
    for name, added in LADDER.items():
        settings |= added
        if name == rung:
            break
    fields = settings | {"model": SIZES[size], "batch": BATCH, "context": context, "device": str(device)}
    step = build(msgspec.convert(fields, Workload), device)
    step.run()
    assert step.loss is not None
    remarks = [one.text for one in step.remarks]
    about = {"first_loss": step.loss.item(), "remarks": remarks, "settings": settings}
    failed = [text for text in remarks if device.type == "cuda" and "not captured" in text]
    return step.run, about | {"failure": failed[0] if failed else None}


def build_model(kind: str, size: str, context: int, device: Any) -> Any:
    """A model of `transformers`, with its defaults except for the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width, inner, layers, heads = SHAPES[size if size in SHAPES else "medium"]
    if kind == "gpt2":
        shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": context}
        shape |= {"bos_token_id": 0, "eos_token_id": 0}
    else:
        shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": context}
        shape |= {"tie_word_embeddings": False}
    with device:
        config = AutoConfig.for_model(kind, vocab_size=VOCAB, **shape)
        model: Any = AutoModelForCausalLM
        return model.from_config(config, attn_implementation="sdpa").train()


def make_batch(context: int, device: Any) -> dict[str, Any]:
    import torch

    ids = torch.randint(VOCAB, (BATCH, context), device=device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def build_peer(kind: str, size: str, context: int, device: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    model = build_model(kind, size, context, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = make_batch(context, device)
    compiled: Any = torch.compile(model, dynamic=False)

    def run() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    return run, {"failure": None}


def build_optimised(kind: str, context: int, device: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    from stepscope.fast.optimised_step import optimise

    model = build_model(kind, kind, context, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = make_batch(context, device)
    step = optimise(model, optimizer, example=batch, measure=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the comparison with float64 is not part of a step
    step(batch)
    last = step.rungs[-1]
    assert last.accuracy is not None, last.notes
    about = {"share_of_limit": last.accuracy.share_of_limit, "truth": last.accuracy.truth, "notes": list(last.notes)}
    about |= {"worst": last.accuracy.parameter, "losses": [last.accuracy.loss, last.accuracy.true_loss]}
    return lambda: step(batch), about | {"failure": None if last.status == "kept" else str(last)}


if __name__ == "__main__":
    sys.exit(main())
