"""Models and training runs for FSDP tests, on all ranks and in one process."""

# B batch, L length, M model width.

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

from stepscope.nn import AdamW, TransformerLM
from stepscope.nn.functional import cross_entropy
from stepscope.parallel import FSDP
from stepscope.step.checkpointing import checkpoint_blocks, repeated_blocks

VOCAB, LENGTH, ROWS, STEPS = 48, 9, 8, 10
FROZEN = ("embedding", "blocks.1", "blocks.2.attention", "final_norm")
KINDS = ("built-in", "tied", "frozen", "own")
Params = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Expert(nn.Module):
    """One of several experts, chosen by the data. Its second matrix has an odd size, so slices cut through it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


class Own(nn.Module):
    """What users do: experts chosen by data, a layer called twice, an embedding whose weight the head reads, attention
    that passes its weights to a function, a convolution, two layers that share a matrix, a part that is never used and
    a gain that is sometimes used.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 12
        self.spare = nn.Linear(width, width)
        self.head_bias = nn.Parameter(torch.zeros(VOCAB))
        self.token = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH - 1, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mixer = nn.Conv1d(width, width, 3, padding=1)
        experts = [Expert(width) for _ in range(4)]
        experts[2].up.weight = experts[0].up.weight
        self.experts = nn.ModuleList(experts)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLM = self.token(ids_BL) + self.position
        x_BLM = x_BLM + self.attention(x_BLM, x_BLM, x_BLM, need_weights=False)[0]
        x_BLM = x_BLM + self.mixer(x_BLM.transpose(1, 2)).transpose(1, 2)
        chosen = int(ids_BL[0, 0]) % 3
        x_BLM = x_BLM + self.experts[chosen](x_BLM)
        if chosen == 1:
            x_BLM = self.gain * x_BLM + self.experts[3](self.experts[3](x_BLM))
        return F.linear(x_BLM, self.token.weight, self.head_bias)


def build(kind: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "own":
        return Own()
    model = TransformerLM(
        vocab=VOCAB,
        d_model=24,
        d_ff=40,
        num_layers=4,
        num_heads=2,
        max_context=LENGTH,
        tie_embeddings=kind == "tied",
    )
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith(FROZEN)
    return model


def make_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=1e-2)


def make_momentum(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batch(step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """This part of the step's batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids_BL = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator).chunk(parts)[part]
    return ids_BL[:, :-1], ids_BL[:, 1:]


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> Tensor:
    ids_BL, targets_BL = batch(step, part, parts)
    return cross_entropy(model(ids_BL), targets_BL)


def train_alone(
    model: nn.Module, parts: int, optimizer: Optimizer | None = None, *, first: int = 0, last: int = STEPS
) -> Params:
    """One process, which accumulates the gradients of the batch's parts."""
    optimizer = optimizer or make_adamw(model.parameters())
    for step in range(first, last):
        for part in range(parts):
            (loss_of(model, step, part, parts) / parts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


def params_of(model: nn.Module) -> Params:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def train_sharded(
    model: FSDP, optimizer: Optimizer, rank: int, world: int, *, first: int = 0, last: int = STEPS, micro: int = 1
) -> None:
    """Each rank trains on its part, in `micro` micro-batches."""
    for step in range(first, last):
        for piece in range(micro):
            with model.no_sync() if piece < micro - 1 else nullcontext():
                loss = loss_of(model, step, rank * micro + piece, world * micro) / micro
                loss.backward()  # type: ignore[no-untyped-call]
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()


def checkpoint_inside(model: nn.Module) -> nn.Module:
    """FSDP around the recomputed block: recomputing does not pass through FSDP."""
    checkpoint_blocks(model)
    return model


def checkpoint_outside(model: FSDP, how: str) -> None:
    """FSDP inside the recomputed block: recomputing gathers."""
    if how == "reentrant":
        for block in repeated_blocks(model.module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    elif how == "whole":
        model.module.forward = partial(checkpoint, model.module.forward, use_reentrant=False)
    else:
        checkpoint_blocks(model.module, every=int(how.split(":")[-1]), nested=how.startswith("nested"))


def differing(left: Params, right: Params) -> list[str]:
    """Names under which the two are not bitwise equal."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]
