"""Tiny models, the loop that people write for them, and programs of the same step."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from stepscope.fast import tracing
from stepscope.fast.accuracy import GradientAccuracy, compare, make_reference
from stepscope.fast.ladder import OptimiseJob
from stepscope.fast.program import Changes, Program
from stepscope.fast.rewrites import Rewrites, rewrite

CPU = torch.device("cpu")
BF16 = torch.bfloat16
WEIGHTS = Changes(rewrites=Rewrites(working_weights=True), one_launch=True)
MERGED = Changes(rewrites=Rewrites(working_weights=True, merge=True), one_launch=True)
ALL = Changes(
    rewrites=Rewrites(attention=True, norms=True, working_weights=True, merge=True, packed=True, loss=True),
    one_launch=True,
)

Loss = Callable[[nn.Module, Any], Tensor]


def mean_square(module: nn.Module, batch: Any) -> Tensor:
    output: Tensor = module(batch)
    return output.float().square().mean()


def own_loss(module: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of `transformers` returns."""
    loss: Tensor = module(input_ids=batch, labels=batch).loss
    return loss


def next_tokens(module: nn.Module, batch: Tensor) -> Tensor:
    logits: Tensor = module(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def tokens(seed: int = 0, batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_job(
    module: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss = mean_square,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: torch.dtype | None = BF16,
    max_norm: float | None = None,
) -> OptimiseJob:
    return OptimiseJob(
        module=module,
        optimizer=optimizer,
        loss_of=loss,
        batches=tuple(batches),
        autocast=autocast,
        device=CPU,
        max_norm=max_norm,
    )


def make_program(module: nn.Module, batch: Any, changes: Changes = ALL, **settings: Any) -> Program:
    """A program of one pass. Without an optimizer, it has one that does not change anything."""
    optimizer = settings.pop("optimizer", None) or torch.optim.AdamW(module.parameters(), lr=0.0)
    return make_job(module, (batch,), optimizer=optimizer, **settings).build(changes)


def check_gradients(
    module: nn.Module, batch: Any, changes: Changes = ALL, *, loss: Loss = mean_square, autocast: Any = BF16
) -> tuple[list[str], GradientAccuracy]:
    """Compare loss and gradients of the rewritten model with the original, and return what was rewritten."""
    reference = make_reference(module, loss, batch, autocast=autocast, device=CPU)
    program = make_program(module, batch, changes, loss=loss, autocast=autocast)
    gradients = {program.weights.names[one]: found for one, found in program.differentiate().items()}
    accuracy = compare(reference, gradients, float(program.losses[0]), autocast=autocast)
    assert accuracy.passes, accuracy
    return program.backend.done, accuracy


def rewritten_nodes(program: Program, monkeypatch: pytest.MonkeyPatch) -> list[fx.Node]:
    """Run a program's first pass, and return what its graph has become."""
    nodes: list[fx.Node] = []

    def remember(module: fx.GraphModule, *others: Any) -> Any:
        result = rewrite(module, *others)
        nodes.extend(module.graph.nodes)
        return result

    monkeypatch.setattr(tracing, "rewrite", remember)
    program.differentiate()
    return nodes


def train_plainly(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    *,
    loss: Loss = mean_square,
    autocast: torch.dtype | None = BF16,
    max_norm: float | None = None,
) -> Tensor:
    """Train as people do, one step per batch, and return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            value = loss(module, batch)
        value.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def train_program(program: Program, fixed: Tensor, batches: Sequence[Tensor]) -> Tensor:
    losses = []
    for batch in batches:
        fixed.copy_(batch)
        program.run()
        losses.append(program.losses[0].clone())
    return torch.stack(losses)


def twins(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    return module, copy.deepcopy(module)


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of their parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


class TwoLinears(nn.Module):
    """Two products of the same input, which can be merged."""

    def __init__(self, *, bias: bool = False, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=bias)
        self.second = nn.Linear(width, 2 * width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x), self.second(x).tanh()), dim=-1)


class Function(nn.Module):
    """A model that is one function of its parameters."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for number, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nn.Parameter(0.3 * normal(*shape, seed=number + 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))
