"""Train a language model with DistributedDataParallel.

torchrun --nproc-per-node 2 ddp.py                      # gloo on the CPU, NCCL on GPUs
torchrun --nproc-per-node 8 ddp.py --d-model 1024 --num-layers 12 --context 1024 --batch-size 16
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class TokenDataset(Dataset[Tensor]):
    def __init__(self, num_sequences: int, context: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab, (num_sequences, context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class LanguageModel(nn.Module):
    def __init__(self, vocab: int, context: int, d_model: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.position = nn.Embedding(context, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, num_heads, 4 * d_model, batch_first=True, norm_first=True, dropout=0.0)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = LanguageModel(args.vocab, args.context, args.d_model, args.num_layers, args.num_heads).to(device)
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=args.lr)

    dataset = TokenDataset(args.num_sequences, args.context, args.vocab)
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, pin_memory=device.type == "cuda")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, tokens in enumerate(loader):
            tokens = tokens.to(device, non_blocking=True)
            logits = ddp_model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0 and rank == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")

    mean_loss = loss.detach()
    dist.all_reduce(mean_loss)
    if rank == 0:
        print(f"last loss, mean over ranks: {mean_loss.item() / dist.get_world_size():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-sequences", type=int, default=640)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
