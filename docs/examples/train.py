"""Train a small language model on lines of text. Nothing here knows about stepscope.

python docs/examples/train.py --steps 40
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    """Lines of text, converted to tokens one character at a time."""

    def __init__(self, num_lines, context):
        self.num_lines = num_lines
        self.context = context

    def __len__(self):
        return self.num_lines

    def __getitem__(self, index):
        text = " ".join(str((index + 1) * number) for number in range(20 * self.context))
        tokens = [ord(character) % 64 for character in text.lower() if character.isprintable()]
        return torch.tensor(tokens[: self.context + 1])


class Model(nn.Module):
    def __init__(self, width=64, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batches", type=int, default=2)
    given = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    loader = DataLoader(Lines(8 * given.steps * given.micro_batches, context=64), batch_size=8)

    total = 0.0
    for number, tokens in enumerate(loader, start=1):
        tokens = tokens.to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / given.micro_batches).backward()
        total += loss.item()
        if number % given.micro_batches == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number % (10 * given.micro_batches) == 0:
                print(f"step {number // given.micro_batches}: loss {total / number:.3f}")


if __name__ == "__main__":
    main()
