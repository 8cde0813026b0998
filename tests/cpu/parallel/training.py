"""Small models and batches, trained by one process and by many."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stepscope.nn import TransformerLM
from tests.cpu.accuracy import normal

STEPS = 10
VOCAB, LENGTH, WIDTH = 32, 8, 8
ROWS_PER_RANK = 3


class Routed(nn.Module):
    """A custom model: each row goes to one of two experts, so a batch may leave one unused. No row goes to the
    third.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=number > 0) for number in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] > 0).long()
        hidden = torch.tanh(self.inner(x))
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if (choice == number).any():
                out = out.index_put((choice == number,), expert(hidden[choice == number]))
        return out * self.scale


def language_model(*, tied: bool = False) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(
        vocab=VOCAB, d_model=16, d_ff=24, num_layers=1, num_heads=2, max_context=LENGTH, tie_embeddings=tied
    )


def partly_frozen() -> TransformerLM:
    model = language_model()
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[0].get_submodule("ffn").requires_grad_(requires_grad=False)
    return model


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "built-in": language_model,
    "tied": lambda: language_model(tied=True),
    "frozen": partly_frozen,
    "own": routed,
}


def batch_of(model: nn.Module, step: int, rows: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step. In some, all rows of `Routed` go to one expert; in some, one expert is only used by
    rank 0.
    """
    if isinstance(model, TransformerLM):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    dtype = next(model.parameters()).dtype
    x = normal(rows, WIDTH, seed=2 * step)
    first = x[:, 0].abs()
    x[:, 0] = [first, -first, torch.where(torch.arange(rows) < ROWS_PER_RANK, first, -first)][step % 3]
    return x.to(dtype), normal(rows, WIDTH, seed=2 * step + 1).to(dtype)


def part_of(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    rows = slice(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK)
    return batch[0][rows], batch[1][rows]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return (output - target).square().mean()
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def differentiate(loss: Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
    loss.backward(retain_graph=retain_graph, create_graph=create_graph)  # type: ignore[no-untyped-call]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # eps is large, or Adam would turn rounding errors of gradients near zero into full-sized steps. Weight decay moves
    # a parameter whose gradient is zero, but not one without a gradient.
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05, eps=1e-2, weight_decay=0.1, fused=True)


def train_alone(model: nn.Module, world: int, *, parts: bool, steps: int = STEPS) -> nn.Module:
    """One process, with the batch of all ranks: at once, or accumulated over the ranks' parts."""
    optimizer = make_optimizer(model)
    for step in range(steps):
        batch = batch_of(model, step, world * ROWS_PER_RANK)
        pieces = [part_of(batch, rank) for rank in range(world)] if parts else [batch]
        for inputs, target in pieces:
            differentiate(loss_of(model(inputs), target) / len(pieces))
        finish_step(optimizer, step)
    return model


def finish_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gradients alternate between None and zero; only None leaves a parameter unchanged."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)


def values_of(model: nn.Module) -> Tensor:
    """All parameters, concatenated."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])
