"""Train a causal language model with Accelerate and gradient accumulation.

    python accelerate_loop.py                # or: accelerate launch accelerate_loop.py
    python accelerate_loop.py --hidden 768 --layers 12 --heads 12 --context 512 --batch-size 16 \
        --mixed-precision bf16 --num-sequences 8000
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


class Sequences(Dataset[dict[str, Tensor]]):
    """Arithmetic sequences modulo the size of the vocabulary, which a language model can learn to continue."""

    def __init__(self, num_sequences: int, context: int, vocab: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(vocab, (num_sequences, 1), generator=generator)
        stride = torch.randint(1, 8, (num_sequences, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(context)) % vocab

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[dict[str, Tensor]]) -> float:
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-sequences", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output-dir", type=Path, default=None)
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        cpu=args.device == "cpu",
    )
    set_seed(11)
    config = GPT2Config(
        vocab_size=args.vocab,
        n_positions=args.context,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_set = Sequences(args.num_sequences, args.context, args.vocab, seed=0)
    eval_set = Sequences(32, args.context, args.vocab, seed=1)
    train_loader = DataLoader(train_set, shuffle=True, batch_size=args.batch_size)
    eval_loader = DataLoader(eval_set, batch_size=args.batch_size)
    steps_per_epoch = -(-len(train_loader) // args.gradient_accumulation_steps)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, args.epochs * steps_per_epoch)

    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    completed = 0
    for epoch in range(args.epochs):
        model.train()
        total_loss = 0.0
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float().item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
        eval_loss = evaluate(accelerator, model, eval_loader)
        mean_loss = total_loss / len(train_loader)
        accelerator.print(f"epoch {epoch}: {completed} steps, train loss {mean_loss:.4f}, eval loss {eval_loss:.4f}")

    accelerator.wait_for_everyone()
    output = args.output_dir or Path(tempfile.mkdtemp(prefix="accelerate-"))
    accelerator.unwrap_model(model).save_pretrained(output, save_function=accelerator.save)


if __name__ == "__main__":
    main()
