"""Pre-train a small GPT on a file of tokens, on one device.

    python pretrain.py                                     # tiny, on the CPU
    python pretrain.py --device cuda --compile --num-layers 12 --d-model 768 --num-heads 12 --context 1024 \
        --batch-size 12 --vocab 50304 --max-iters 200

The tokens are random unless `--data-dir` already has `train.bin` and `val.bin` (uint16).
"""

import argparse
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data-dir", type=Path, default=None, help="where train.bin and val.bin are, or will be")
parser.add_argument("--out-dir", type=Path, default=Path(tempfile.gettempdir()) / "pretrain-out")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-mode", help="such as reduce-overhead")
parser.add_argument("--vocab", type=int, default=1024)
parser.add_argument("--num-layers", type=int, default=4)
parser.add_argument("--num-heads", type=int, default=4)
parser.add_argument("--d-model", type=int, default=128)
parser.add_argument("--context", type=int, default=128)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=4)
parser.add_argument("--max-iters", type=int, default=60)
parser.add_argument("--warmup-iters", type=int, default=10)
parser.add_argument("--lr", type=float, default=6e-4)
parser.add_argument("--min-lr", type=float, default=6e-5)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--grad-clip", type=float, default=1.0)
parser.add_argument("--eval-interval", type=int, default=30)
parser.add_argument("--eval-iters", type=int, default=5)
parser.add_argument("--log-interval", type=int, default=5)
args = parser.parse_args()

device_type = "cuda" if "cuda" in args.device else "cpu"
dtype_name = args.dtype or ("float16" if device_type == "cuda" else "bfloat16")
autocast = torch.autocast(device_type, dtype=getattr(torch, dtype_name), enabled=dtype_name != "float32")
data_dir = args.data_dir or Path(tempfile.gettempdir()) / f"pretrain-{args.vocab}"

torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True


# --- data -------------------------------------------------------------------------------------------------------------


def prepare_data() -> None:
    """Write a training and a validation file if they are not there yet."""
    data_dir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, num_tokens in (("train", 2_000_000), ("val", 200_000)):
        path = data_dir / f"{split}.bin"
        if not path.exists():
            # A Zipf law, so that there is something to learn: some tokens are far more frequent than others.
            tokens = np.minimum(rng.zipf(1.2, num_tokens), args.vocab) - 1
            tokens.astype(np.uint16).tofile(path)


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    # A new memmap per batch: numpy leaks memory if one is kept open.
    data = np.memmap(data_dir / f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - args.context, (args.batch_size,)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + args.context].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + args.context].astype(np.int64)) for i in starts])
    if device_type == "cuda":
        x = x.pin_memory().to(args.device, non_blocking=True)
        y = y.pin_memory().to(args.device, non_blocking=True)
    return x, y


# --- model ------------------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(args.d_model, 3 * args.d_model, bias=False)
        self.proj = nn.Linear(args.d_model, args.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, args.num_heads, C // args.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=args.dropout if self.training else 0.0)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(args.d_model)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(args.d_model)
        self.mlp = nn.Sequential(
            nn.Linear(args.d_model, 4 * args.d_model),
            nn.GELU(),
            nn.Linear(4 * args.d_model, args.d_model),
            nn.Dropout(args.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(args.vocab, args.d_model)
        self.wpe = nn.Embedding(args.context, args.d_model)
        self.blocks = nn.ModuleList(Block() for _ in range(args.num_layers))
        self.ln_f = nn.LayerNorm(args.d_model)
        self.lm_head = nn.Linear(args.d_model, args.vocab, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.wte.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- training ---------------------------------------------------------------------------------------------------------


def get_lr(it: int) -> float:
    """Linear warm-up, then a cosine down to the minimum."""
    if it < args.warmup_iters:
        return float(args.lr * (it + 1) / args.warmup_iters)
    progress = (it - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return float(args.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (args.lr - args.min_lr))


prepare_data()
args.out_dir.mkdir(parents=True, exist_ok=True)

raw_model = GPT().to(args.device)
print(f"{sum(p.numel() for p in raw_model.parameters()) / 1e6:.2f}M parameters on {args.device}")
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
no_decay = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
    lr=args.lr,
    betas=(0.9, 0.95),
    fused=device_type == "cuda",
)
scaler = torch.amp.GradScaler(device_type)
model = torch.compile(raw_model, mode=args.compile_mode) if args.compile else raw_model


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            x, y = get_batch(split)
            with autocast:
                _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


best_val_loss = float("inf")
x, y = get_batch("train")
t0 = time.time()
for it in range(args.max_iters + 1):
    lr = get_lr(it)
    for group in optimizer.param_groups:
        group["lr"] = lr

    if it % args.eval_interval == 0:
        losses = estimate_loss()
        print(f"step {it}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if it > 0:
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter": it}
                torch.save(checkpoint, args.out_dir / "ckpt.pt")
    if it == args.max_iters:
        break

    for _ in range(args.accumulation):
        with autocast:
            _, loss = model(x, y)
            loss = loss / args.accumulation
        x, y = get_batch("train")  # the next batch, while the GPU is busy with this one
        scaler.scale(loss).backward()
    if args.grad_clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(raw_model.parameters(), args.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if it % args.log_interval == 0:
        print(f"iter {it}: loss {loss.item() * args.accumulation:.4f}, time {dt * 1000:.2f} ms, lr {lr:.2e}")
