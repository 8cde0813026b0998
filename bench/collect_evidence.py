"""Collects evidence with known truth: what `recover` is developed and tested on.

    python bench/collect_evidence.py traces --out OUT [NAME ...]                 on a GPU: traces, snapshots, truth.json
    $(python bench/collect_evidence.py counters --print --csv CSV [NAME ...])    one forward pass each, under ncu
    python bench/collect_evidence.py split --csv CSV --out OUT [NAME ...]        the CSV, split at spin kernels
    python bench/collect_evidence.py variants --out OUT [--seconds 400]          all of it, for models of other kinds
    python bench/collect_evidence.py variants --out OUT --device cpu             a rehearsal without a GPU: no kernels

The models are in `evidence_runs.py`. All have random weights and random tokens. ncu writes its CSV when it ends: give
it a few runs at a time. `variants` runs ncu once for each model, which takes about a minute, and starts none after the
given time: with 400 s it ends within eight minutes.
"""

import argparse
import gzip
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evidence_runs import RUNS, VARIANTS, Run, build, load
from stepscope.recording.readers.counter_metrics import FEW

COUNTED_LAYERS = 2
WITH_SHAPES = "llama_bf16"  # whose traces keep everything that the profiler wrote
ALL = {**RUNS, **VARIANTS}


@contextmanager
def arithmetic(run: Run) -> Iterator[None]:
    torch = load("torch")
    attention = load("torch.nn.attention")

    torch.set_float32_matmul_precision("high" if run.dtype == "tf32" else "highest")
    backends = {
        "efficient": attention.SDPBackend.EFFICIENT_ATTENTION,
        "flash": attention.SDPBackend.FLASH_ATTENTION,
        "cudnn": attention.SDPBackend.CUDNN_ATTENTION,
    }
    with ExitStack() as stack:
        if run.attention in backends:
            stack.enter_context(attention.sdpa_kernel(backends[run.attention]))
        if run.dtype == "autocast":
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        yield


class Subject:
    """One model with its batch, ready for a pass or a step."""

    def __init__(self, run: Run, device: str = "cuda") -> None:
        torch = load("torch")

        torch.manual_seed(0)
        self.run = run
        self.model = build(run, device)
        self.called = torch.compile(self.model) if run.compile else self.model
        self.tokens = torch.randint(run.vocab_size, (run.batch, run.context), device=device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer: Any = None

    def forward(self) -> None:
        torch = load("torch")

        self.model.eval()
        with torch.no_grad(), arithmetic(self.run):
            self._logits()

    def train(self) -> None:
        torch = load("torch")

        self.model.train()
        self.optimizer = self.optimizer or torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        with arithmetic(self.run):
            if self.run.family == "builtin":
                loss = torch.nn.functional.cross_entropy(self._logits().flatten(0, 1).float(), self.tokens.flatten())
            else:
                loss = self.called(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _logits(self) -> Any:
        if self.run.family == "builtin":
            return self.called(self.tokens)
        given = {"input_ids": self.tokens, "use_cache": False}
        if self.run.decoder_layers:
            given["decoder_input_ids"] = self.tokens[:, : self.run.decoder_context]
        return self.called(**given).logits


def collect_traces(names: list[str], out: Path, device: str = "cuda") -> None:
    torch = load("torch")
    transformers = load("transformers")

    truths = {}
    for name in names:
        run = ALL[name]
        sys.stderr.write(f"{name}\n")
        subject = Subject(run, device)
        for mode in run.modes:
            _trace(subject, mode, out / f"{name}.{mode}.json.gz")
            if name != WITH_SHAPES:
                slim(out / f"{name}.{mode}.json.gz")
        if run.snapshot:
            _snapshot(subject, out / f"{name}.snapshot.pickle")
        truths[name] = {
            **asdict(run),
            "counted_layers": _counted(run).num_layers,
            "parameters": subject.parameters,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
        }
        (out / "truth.json").write_text(json.dumps(truths, indent=1) + "\n")
        del subject
        torch.cuda.empty_cache()


def _trace(subject: Subject, mode: str, path: Path) -> None:
    torch = load("torch")
    profiler = load("torch.profiler")

    work = getattr(subject, mode)
    on_gpu = subject.tokens.is_cuda
    for _ in range(3 if on_gpu else 1):
        work()
    if on_gpu:
        torch.cuda.synchronize()
    activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler.profile(activities=activities, record_shapes=True) as recorder:
        for _ in range(2 if mode == "train" else 1):
            work()
        if on_gpu:
            torch.cuda.synchronize()
    recorder.export_chrome_trace(str(path))


def _snapshot(subject: Subject, path: Path) -> None:
    torch = load("torch")

    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python", context=None)
    subject.train()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def _counted(run: Run) -> Run:
    """ncu takes a third of a second per kernel, and further layers add nothing new."""
    return run if run.held_out else replace(run, num_layers=min(run.num_layers, COUNTED_LAYERS))


def slim(path: Path) -> None:
    """Keep only device events, which are all that is read: a tenth of the file."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    kept = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    text = json.dumps({**trace, "traceEvents": kept}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def collect_counters(names: list[str]) -> None:
    """Run this under ncu, with `--profile-from-start off`."""
    torch = load("torch")

    for name in names:
        subject = Subject(_counted(ALL[name]))
        subject.forward()
        subject.forward()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1000)
        subject.forward()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        sys.stderr.write(f"{name}\n")
        del subject
        torch.cuda.empty_cache()


def split(csv_path: Path, out: Path, names: list[str]) -> None:
    """Every part gets the header and the units, as if ncu had written it separately."""
    content = csv_path.read_bytes()
    text = (gzip.decompress(content) if csv_path.suffix == ".gz" else content).decode()
    lines = [line for line in text.splitlines(keepends=True) if line.startswith('"')]
    head, rows = lines[:2], lines[2:]
    parts: list[list[str]] = []
    for row in rows:
        if "::spin_kernel(" in row:
            parts.append([])
        else:
            parts[-1].append(row)
    assert len(parts) <= len(names), (len(parts), len(names))
    for name, part in zip(names, parts, strict=False):
        with gzip.GzipFile(out / f"{name}.csv.gz", "wb", mtime=0) as target:
            target.write("".join(head + part).encode())


def ncu_command(names: list[str], log: str) -> list[str]:
    return [
        "ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        "--csv", "--page", "raw", "--log-file", log, "--metrics", ",".join(FEW),
        sys.executable, "bench/collect_evidence.py", "counters", *names,
    ]  # fmt: skip


def collect_variants(names: list[str], out: Path, device: str, seconds: float) -> None:
    """Collect traces of all models, then counters of one model after the other while there is time."""
    began = time.monotonic()
    collect_traces(names, out, device)
    sys.stderr.write(f"traces after {time.monotonic() - began:.0f} s\n")
    for name in names:
        log = out / f"{name}.log.csv"
        command = ncu_command([name], str(log))
        if device != "cuda":
            sys.stderr.write(f"{shlex.join(command)}\n")
            continue
        if time.monotonic() - began > seconds:
            sys.stderr.write(f"no time for {name}\n")
            continue
        done = subprocess.run(command, check=False)
        if done.returncode == 0:
            split(log, out, [name])
            log.unlink()
        sys.stderr.write(f"{name}: ncu exited with {done.returncode} after {time.monotonic() - began:.0f} s\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("traces", "counters", "split", "variants"))
    parser.add_argument("--print", action="store_true", help="print the ncu command line without running it")
    parser.add_argument("--csv", type=Path, default=Path("counters.csv"))
    parser.add_argument("--out", type=Path, default=Path("evidence"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="for variants")
    parser.add_argument("--seconds", type=float, default=400, help="for variants: start no ncu after this time")
    parser.add_argument("names", nargs="*", default=[])
    asked = parser.parse_intermixed_args()
    names = asked.names or list(VARIANTS if asked.what == "variants" else RUNS)
    if asked.what == "counters":
        if asked.print:
            print(shlex.join(ncu_command(names, str(asked.csv))))
        else:
            collect_counters(names)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "traces":
        collect_traces(names, asked.out)
    elif asked.what == "variants":
        collect_variants(names, asked.out, asked.device, asked.seconds)
    else:
        split(asked.csv, asked.out, names)


if __name__ == "__main__":
    main()
