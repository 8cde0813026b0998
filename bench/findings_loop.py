"""A training loop with a mistake in it, and the same loop without: for findings about the loop rather than the model.

    python bench/findings_loop.py DIR [--device cuda] [--steps 20]

For each model and each mistake, the loop is timed without the mistake and with it, in turns, and three steps with the
mistake are recorded with PyTorch's profiler, as a user would. `bench/findings_check.py` runs this and compares the
saving that `stepscope explain` estimates from the trace with the measured one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, Dataset

from stepscope.nn import TransformerLM

BATCH, CONTEXT = 4, 512
FEATURES = 16 * 2**20  # fp32 values that each sample brings along, as an image or audio model's would: 64 MiB
PREPARE_S = 0.03  # per batch, to decode and collate it
STALL_S = 0.02  # per step, as writing a log or a checkpoint would take
# The finding of each mistake.
MISTAKES = {
    "checks": "SS002",
    "slow_loader": "SS012",
    "pageable": "SS017",
    "item": "SS018",
    "stall": "SS019",
}


class _Transformers(nn.Module):
    """A model of `transformers` that returns its logits."""

    def __init__(self, config: Path) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))  # type: ignore[no-untyped-call]
        self.vocab = self.model.config.vocab_size
        self.blocks = self.model.model.layers

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


def _build(name: str) -> tuple[nn.Module, nn.ModuleList, int]:
    """Return a model, its blocks and the size of its vocabulary."""
    if name == "llama":
        made = _Transformers(Path(__file__).parent / "llama.json")
        return made, made.blocks, made.vocab
    width, layers = {"small": (768, 12), "medium": (1024, 24)}[name]
    model = TransformerLM(
        vocab=10_000, d_model=width, d_ff=4 * width, num_layers=layers, num_heads=width // 64, max_context=CONTEXT
    )
    return model, model.blocks, 10_000


class _Batches(Dataset[Tensor]):
    """Whole batches of tokens; preparing one takes `prepare_s`."""

    def __init__(self, vocab: int, prepare_s: float) -> None:
        self.vocab, self.prepare_s = vocab, prepare_s

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        until = time.perf_counter() + self.prepare_s
        while time.perf_counter() < until:
            pass
        return torch.randint(self.vocab, (BATCH, CONTEXT + 1))


def _check(_module: nn.Module, _inputs: object, output: Any) -> None:
    """What leftover debugging code does: read a block's output on the CPU."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not hidden.detach().abs().amax().item() < float("inf"):
        raise FloatingPointError("an activation is not finite")


def _loop(name: str, mistake: str, device: str) -> Generator[float, None, None]:
    """Train, and yield the loss if the loop reads it in every step, else 0."""
    torch.manual_seed(0)
    model, blocks, vocab = _build(name)
    model.to(device)
    if mistake == "checks":
        for block in blocks:
            block.register_forward_hook(_check)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    workers = 0 if mistake == "slow_loader" else 4
    needs_loader = mistake in {"slow_loader", "fast_loader"}
    data = _Batches(vocab, PREPARE_S if needs_loader else 0.0)
    loader = DataLoader(data, batch_size=None, num_workers=workers if needs_loader else 0, pin_memory=device == "cuda")
    features = torch.rand(FEATURES if mistake in {"pageable", "pinned"} else 0)
    if mistake == "pinned" and device == "cuda":
        features = features.pin_memory()
    for tokens in loader:
        ids = tokens.to(device, non_blocking=True)
        on_device = features.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        if on_device.numel():
            loss = loss + on_device[:1024].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if mistake == "stall":
            time.sleep(STALL_S)
        yield loss.item() if mistake == "item" else 0.0


# What the loop does instead.
_INSTEAD = {"slow_loader": "fast_loader", "pageable": "pinned"}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _step_ms(name: str, mistake: str, device: str, steps: int) -> float:
    """The mean time of a step in a loop that nothing interrupts."""
    loop = _loop(name, mistake, device)
    for _ in range(5):
        next(loop)
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        next(loop)
    _wait(device)
    taken = time.perf_counter() - begin
    loop.close()
    return taken / steps * 1e3


def _record(name: str, mistake: str, device: str, path: Path) -> None:
    loop = _loop(name, mistake, device)
    with profile(schedule=schedule(wait=3, warmup=2, active=3), record_shapes=True) as profiler:
        for _ in range(8):
            next(loop)
            profiler.step()
    loop.close()
    profiler.export_chrome_trace(str(path))


def measure(folder: Path, device: str, steps: int, models: list[str]) -> None:
    for name in models:
        for mistake, code in MISTAKES.items():
            times: dict[str, list[float]] = {"before": [], "after": []}
            for _ in range(3):
                times["before"].append(_step_ms(name, mistake, device, steps))
                times["after"].append(_step_ms(name, _INSTEAD.get(mistake, "none"), device, steps))
            place = folder / f"{name}-{mistake}"
            place.mkdir(parents=True, exist_ok=True)
            _record(name, mistake, device, place / "trace.json.gz")
            medians = {key: statistics.median(values) for key, values in times.items()}
            (place / "measured.json").write_text(json.dumps({"code": code, **medians, "all": times}))
            print(f"{name} {mistake}: {medians['before']:.2f} -> {medians['after']:.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=["small", "medium", "llama"])
    options = parser.parse_args()
    measure(options.folder, options.device, options.steps, options.models)


if __name__ == "__main__":
    main()
