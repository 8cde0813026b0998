"""Collects evidence with known truth: what `recover` is developed and tested on.

    python bench/collect_evidence.py traces --out OUT [NAME ...]                 on a GPU: traces, snapshots, truth.json
    $(python bench/collect_evidence.py counters --print --csv CSV [NAME ...])    one forward pass each, under ncu
    python bench/collect_evidence.py split --csv CSV --out OUT [NAME ...]        the CSV, split at spin kernels

All runs have random weights and random tokens. ncu writes its CSV when it ends: give it a few runs at a time.
"""

import argparse
import gzip
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.recording.readers.counter_metrics import FEW

COUNTED_LAYERS = 2
WITH_SHAPES = "llama_bf16"  # whose traces keep everything that the profiler wrote


@dataclass(frozen=True, kw_only=True)
class Run:
    family: str  # gpt2, llama, neox, qwen2, qwen3, builtin
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    batch: int
    context: int
    dtype: str = "bf16"  # fp32, tf32, fp16, bf16, or autocast: bf16 GEMMs with fp32 weights
    attention: str = "sdpa"  # naive, sdpa, efficient, flash, cudnn, ours
    compile: bool = False
    modes: tuple[str, ...] = ("forward",)  # forward, train: the modes that are traced
    snapshot: bool = False
    held_out: bool = False


def _load(name: str) -> Any:
    """Runs on the measuring machine; untyped, like most of these libraries."""
    return importlib.import_module(name)


def _run(family: str, shape: str, batch: int, context: int, **more: Any) -> Run:
    """`shape`: num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff, vocab_size."""
    layers, width, heads, kv, head, ff, vocabulary = map(int, shape.split())
    return Run(
        family=family, num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv, d_head=head, d_ff=ff,
        vocab_size=vocabulary, batch=batch, context=context, **more,
    )  # fmt: skip


BOTH = ("forward", "train")
RUNS = {
    "gpt2_fp32_efficient": _run("gpt2", "3 768 12 12 64 3072 50257", 1, 128, dtype="fp32", modes=BOTH, snapshot=True),
    "gpt2_bf16_odd": _run("gpt2", "4 640 10 10 64 2560 32003", 3, 200, modes=BOTH),
    "gpt2_fp16_naive": _run("gpt2", "3 384 6 6 64 1536 50304", 2, 256, dtype="fp16", attention="naive"),
    "gpt2_tf32": _run("gpt2", "2 1024 16 16 64 4096 50257", 2, 512, dtype="tf32", attention="efficient"),
    "gpt2_compiled": _run("gpt2", "4 768 12 12 64 3072 50257", 4, 256, compile=True, modes=BOTH),
    "gpt2_head80": _run("gpt2", "3 1200 15 15 80 4800 20011", 2, 384, attention="flash"),
    "llama_bf16": _run("llama", "3 1024 16 4 64 2816 32000", 2, 512, modes=BOTH, snapshot=True),
    "llama_fp16_naive": _run("llama", "2 768 12 4 64 2048 32000", 2, 192, dtype="fp16", attention="naive"),
    "llama_compiled": _run("llama", "4 2048 32 8 64 5632 32000", 2, 1024, compile=True, modes=BOTH),
    "llama_fp32": _run("llama", "2 512 8 2 64 1408 16001", 3, 160, dtype="fp32", modes=BOTH),
    "llama_ours": _run("llama", "2 1280 10 5 128 3456 32064", 1, 768, attention="ours"),
    "qwen2_bf16": _run("qwen2", "2 896 14 2 64 4864 151936", 1, 384),
    "qwen3_cudnn": _run("qwen3", "2 1024 16 8 128 3072 151936", 2, 256, attention="cudnn"),
    "neox_fp16": _run("neox", "3 512 8 8 64 2048 50304", 4, 128, dtype="fp16", modes=BOTH),
    "neox_compiled": _run("neox", "3 1024 8 8 128 4096 50304", 2, 256, dtype="fp32", compile=True),
    "builtin_autocast": _run(
        "builtin", "3 768 12 12 64 3072 10000", 4, 256, dtype="autocast", attention="naive", modes=BOTH
    ),
    "builtin_fp32": _run("builtin", "4 512 16 16 32 1344 10000", 8, 64, dtype="fp32", attention="naive", modes=BOTH),
    "builtin_hopper": _run("builtin", "2 1024 8 8 128 2752 32000", 2, 1024, attention="ours", dtype="autocast"),
    # Held out: not looked at while the kernel models were made.
    "held_gpt2": _run("gpt2", "5 1280 20 20 64 5120 40478", 2, 320, attention="flash", modes=BOTH, held_out=True),
    "held_llama": _run("llama", "3 1536 12 3 128 4224 49152", 3, 448, dtype="fp16", held_out=True),
    "held_qwen2": _run("qwen2", "4 1152 9 3 128 3008 60001", 2, 300, compile=True, held_out=True),
    "held_neox": _run(
        "neox", "3 640 10 10 64 2400 33001", 2, 224, dtype="fp32", attention="naive", modes=BOTH, held_out=True
    ),
    # Held out later: collected after the first four had been looked at.
    "held_smol": _run("llama", "2 960 15 5 64 2560 49152", 1, 1000, held_out=True),
    "held_gpt2_fp16": _run("gpt2", "3 512 8 8 64 2048 12345", 5, 96, dtype="fp16", modes=BOTH, held_out=True),
}  # fmt: skip


def build(run: Run) -> Any:
    torch = _load("torch")

    if run.family == "builtin":
        return _build_builtin(run).cuda()
    hf = _load("transformers")

    # What the config's names mean is not derived twice: each family has its own.
    if run.family == "gpt2":
        config = hf.GPT2Config(
            n_layer=run.num_layers, n_embd=run.d_model, n_head=run.num_heads, n_inner=run.d_ff,
            vocab_size=run.vocab_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        common = {
            "num_hidden_layers": run.num_layers, "hidden_size": run.d_model, "num_attention_heads": run.num_heads,
            "intermediate_size": run.d_ff, "vocab_size": run.vocab_size, "max_position_embeddings": 2048,
        }  # fmt: skip
        grouped = {**common, "num_key_value_heads": run.num_kv_heads, "head_dim": run.d_head}
        makers: dict[str, Callable[[], Any]] = {
            "neox": lambda: hf.GPTNeoXConfig(**common),
            "llama": lambda: hf.LlamaConfig(**grouped),
            "qwen2": lambda: hf.Qwen2Config(**grouped),
            "qwen3": lambda: hf.Qwen3Config(**grouped),
        }
        config = makers[run.family]()
    implementation = {"naive": "eager"}.get(run.attention, "sdpa")
    if run.attention == "ours":
        from stepscope.kernels.attention.transformers import register

        implementation = register("auto")
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return model.to(device="cuda", dtype=kinds.get(run.dtype, torch.float32))


def _build_builtin(run: Run) -> Any:
    from stepscope.spec import ModelShape, Workload
    from stepscope.step.builtin import build_model, choose_operations

    shape = ModelShape(
        num_layers=run.num_layers, d_model=run.d_model, num_heads=run.num_heads, num_kv_heads=run.num_kv_heads,
        d_ff=run.d_ff, vocab=run.vocab_size,
    )  # fmt: skip
    attention = {"ours": "flash"}.get(run.attention, run.attention)
    workload = Workload(model=shape, batch=run.batch, context=run.context, attention=attention)  # type: ignore[arg-type]
    return build_model(workload, shape, choose_operations(workload))


@contextmanager
def arithmetic(run: Run) -> Iterator[None]:
    torch = _load("torch")
    attention = _load("torch.nn.attention")

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

    def __init__(self, run: Run) -> None:
        torch = _load("torch")

        torch.manual_seed(0)
        self.run = run
        self.model = build(run)
        self.called = torch.compile(self.model) if run.compile else self.model
        self.tokens = torch.randint(run.vocab_size, (run.batch, run.context), device="cuda")
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer: Any = None

    def forward(self) -> None:
        torch = _load("torch")

        self.model.eval()
        with torch.no_grad(), arithmetic(self.run):
            self._logits()

    def train(self) -> None:
        torch = _load("torch")

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
        return self.called(input_ids=self.tokens, use_cache=False).logits


def collect_traces(names: list[str], out: Path) -> None:
    torch = _load("torch")
    transformers = _load("transformers")

    truths = {}
    for name in names:
        run = RUNS[name]
        sys.stderr.write(f"{name}\n")
        subject = Subject(run)
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
            "gpu": torch.cuda.get_device_name(),
        }
        (out / "truth.json").write_text(json.dumps(truths, indent=1) + "\n")
        del subject
        torch.cuda.empty_cache()


def _trace(subject: Subject, mode: str, path: Path) -> None:
    torch = _load("torch")
    profiler = _load("torch.profiler")

    work = getattr(subject, mode)
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA], record_shapes=True
    ) as recorder:
        for _ in range(2 if mode == "train" else 1):
            work()
        torch.cuda.synchronize()
    recorder.export_chrome_trace(str(path))


def _snapshot(subject: Subject, path: Path) -> None:
    torch = _load("torch")

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
    torch = _load("torch")

    for name in names:
        subject = Subject(_counted(RUNS[name]))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("traces", "counters", "split"))
    parser.add_argument("--print", action="store_true", help="print the ncu command line without running it")
    parser.add_argument("--csv", type=Path, default=Path("counters.csv"))
    parser.add_argument("--out", type=Path, default=Path("evidence"))
    parser.add_argument("names", nargs="*", default=[])
    asked = parser.parse_intermixed_args()
    names = asked.names or list(RUNS)
    if asked.what == "counters":
        if asked.print:
            print(shlex.join(ncu_command(names, str(asked.csv))))
        else:
            collect_counters(names)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "traces":
        collect_traces(names, asked.out)
    else:
        split(asked.csv, asked.out, names)


if __name__ == "__main__":
    main()
