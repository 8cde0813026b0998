"""Run out of CUDA memory for real, and measure what watching for it costs.

    python bench/oom_page.py grow [--out runs/oom] [--limit-gib 20]    # a GPT whose batch doubles until it does not fit
    python bench/oom_page.py leak [--out runs/oom] [--limit-gib 20]    # losses that keep their graphs
    python bench/oom_page.py fragment [--out runs/oom] [--limit-gib 20]
    python bench/oom_page.py cost [--steps 200]                        # step times with and without explain_oom

The first three end with `torch.OutOfMemoryError`, exit status 1 and the path of a page. `cost` prints one JSON line per
batch: median step times, alternating in blocks of steps, of the steps in between and of those that record stacks.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepscope
from stepscope.loop.oom import OomWatch

VOCABULARY, CONTEXT = 50304, 1024
GIB = 1 << 30
# Tensor shapes: B batch, T tokens, D width, H heads.


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        split = self.qkv(self.norm_attention(x_BTD)).view(B, T, 3, self.num_heads, D // self.num_heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.project(attended.transpose(1, 2).reshape(B, T, D))
        changed_BTD: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x_BTD))))
        return x_BTD + changed_BTD


class GPT(nn.Module):
    def __init__(self, num_layers: int = 12, width: int = 768, num_heads: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT().cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def draw(batch: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, CONTEXT), device="cuda")


def train(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def grow() -> None:
    model, optimizer = make()
    batch = 1
    while True:
        for _ in range(2):
            train(model, optimizer, draw(batch))
        print(f"batch {batch}: {torch.cuda.max_memory_allocated() / GIB:.1f} GiB", flush=True)
        batch *= 2


def leak() -> None:
    model, _ = make()
    losses = []
    while True:
        losses.append(model(draw(2)))


def fragment() -> None:
    """Free every second part of each segment: half of the memory is free, in pieces that are too small."""
    free, _ = torch.cuda.mem_get_info()
    whole, part = 512 << 20, 256 << 20
    cached = [torch.empty(whole, dtype=torch.uint8, device="cuda") for _ in range(int(0.9 * _limit(free) / whole))]
    count = len(cached)
    del cached  # the segments stay, and each has room for two parts
    parts = [torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(2 * count)]
    parts.sort(key=Tensor.data_ptr)
    del parts[::2]
    print(f"{len(parts)} tensors of {part >> 20} MiB are left", flush=True)
    torch.empty(count * part, dtype=torch.uint8, device="cuda")


def _limit(free: int) -> float:
    total = torch.cuda.get_device_properties(0).total_memory
    return min(free, torch.cuda.get_per_process_memory_fraction() * total)


def cost(steps: int) -> None:
    for batch in (1, 8):
        model, optimizer = make()
        tokens = draw(batch)
        for _ in range(10):
            train(model, optimizer, tokens)
        times: dict[str, list[float]] = {"without": [], "watched": [], "stacks": []}
        for _ in range(5):
            times["without"] += measure(model, optimizer, tokens, steps // 5)
            with stepscope.explain_oom() as watch:
                times["stacks"] += measure(model, optimizer, tokens, 3)
                times["watched"] += measure(model, optimizer, tokens, steps // 5)
        row = {"batch": batch, "steps": steps, "gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
        medians = {f"{name}_ms": round(statistics.median(some), 3) for name, some in times.items()}
        means = {f"{name}_mean_ms": round(statistics.fmean(some), 3) for name, some in times.items()}
        print(json.dumps({**row, **medians, **means, "active": not watch.reason}), flush=True)


def measure(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: int) -> list[float]:
    """The times of single steps in milliseconds, each with its wait for the device."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        train(model, optimizer, tokens)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("grow", "leak", "fragment", "cost"))
    parser.add_argument("--out", type=Path, default=Path("runs/oom"))
    parser.add_argument("--limit-gib", type=float, help="of the memory that this process may use")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    if given.what == "cost":
        cost(given.steps)
        return
    watch: OomWatch = stepscope.explain_oom(given.out)
    assert not watch.reason, watch.reason
    if given.limit_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit_gib * GIB / total)
    {"grow": grow, "leak": leak, "fragment": fragment}[given.what]()


if __name__ == "__main__":
    main()
