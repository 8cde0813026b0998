"""Train a text classifier on documents that are tokenized on the fly, with gradient accumulation.

python slow_loader.py
python slow_loader.py --workers 2
python slow_loader.py --device cuda --d-model 512 --layers 8 --max-length 512 --batch-size 32
"""

import argparse
import random
import re
import time
import zlib

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SYLLABLES = ["ka", "lo", "mi", "ne", "ru", "sa", "to", "ve", "xi", "yu", "zo", "pha", "dre", "gli", "stu"]


class Documents(Dataset[tuple[list[int], int]]):
    """Documents that are read and tokenized one at a time."""

    def __init__(self, num_documents: int, max_length: int, vocab: int, read_ms: float) -> None:
        self.num_documents = num_documents
        self.max_length = max_length
        self.vocab = vocab
        self.read_ms = read_ms

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        text, label = self.read(index)
        return self.tokenize(text), label

    def read(self, index: int) -> tuple[str, int]:
        """A document from storage, which takes a moment to answer."""
        time.sleep(self.read_ms / 1000)
        rng = random.Random(index)
        label = index % 4
        words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(2 * self.max_length)]
        return " ".join([f"topic{label}", *words]), label

    def tokenize(self, text: str) -> list[int]:
        """Lower-case, split into words, and cut each into pieces of at most three letters."""
        ids = []
        for word in re.findall(r"\w+", text.lower()):
            for start in range(0, len(word), 3):
                piece = word[start : start + 3] if start == 0 else "##" + word[start : start + 3]
                ids.append(1 + zlib.crc32(piece.encode()) % (self.vocab - 1))
        return ids[: self.max_length]


def collate(batch: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    longest = max(len(ids) for ids, _ in batch)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
    return tokens, torch.tensor([label for _, label in batch])


class Classifier(nn.Module):
    def __init__(self, vocab: int, d_model: int, layers: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model, padding_idx=0)
        self.positions = nn.Embedding(max_length, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, heads, 4 * d_model, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.output = nn.Linear(d_model, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        logits: Tensor = self.output(x.masked_fill(padding[..., None], 0).mean(dim=1))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--documents", type=int, default=640)
    parser.add_argument("--max-length", type=int, default=96)
    parser.add_argument("--vocab", type=int, default=5000)
    parser.add_argument("--read-ms", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--d-model", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    dataset = Documents(args.documents, args.max_length, args.vocab, args.read_ms)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, collate_fn=collate, num_workers=args.workers)
    model = Classifier(args.vocab, args.d_model, args.layers, args.heads, args.max_length).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=max(2, args.epochs * len(loader) // args.accumulation)
    )
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        running_loss, correct, seen = 0.0, 0, 0
        for i, (tokens, labels) in enumerate(loader):
            tokens, labels = tokens.to(args.device), labels.to(args.device)
            logits = model(tokens)
            loss = criterion(logits, labels) / args.accumulation
            loss.backward()
            running_loss += loss.item() * args.accumulation
            correct += int((logits.argmax(dim=-1) == labels).sum())
            seen += len(labels)
            if (i + 1) % args.accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if (i + 1) % 20 == 0:
                print(f"epoch {epoch}, batch {i + 1}: loss {running_loss / (i + 1):.4f}, accuracy {correct / seen:.2%}")


if __name__ == "__main__":
    main()
