"""A minimal model for studying autocast: two linear layers with a ReLU and a LayerNorm between them.

    stepscope precision --model stepscope.step.toy:build --set loss=mean

Each tensor is subject to a different autocast rule: fc1 and fc2 are GEMMs, ReLU is in no list, LayerNorm only in the
CUDA list, cross entropy is in a list and a mean in none. Nothing else can explain a dtype.
"""

# B batch, I inputs, W width, O outputs.

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import StepscopeError, nearest

LOSSES = ("cross_entropy", "mean")
WIDTH = 10


class ToyModel(nn.Module):
    """fc2(ln(relu(fc1(x)))), without biases except in the LayerNorm."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, WIDTH, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(WIDTH)
        self.fc2 = nn.Linear(WIDTH, out_features, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden_BW = self.ln(self.relu(self.fc1(x_BI)))
        logits_BO: Tensor = self.fc2(hidden_BW)
        return logits_BO


def build(
    batch: int, loss: str = "cross_entropy", in_features: int = 20, out_features: int = 5
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A factory for `--model`: normally distributed inputs, random classes, and the loss given by `--set loss=`."""
    x_BI = torch.randn(batch, in_features)
    targets_B = torch.randint(out_features, (batch,))
    match loss:
        case "cross_entropy":
            measure: Callable[[Tensor], Tensor] = partial(functional.cross_entropy, target=targets_B)
        case "mean":
            measure = Tensor.mean
        case _:
            raise StepscopeError(
                f"unknown loss: `{loss}`",
                detail=f"expected one of {', '.join(LOSSES)}",
                hint=f"--set loss={nearest(loss, LOSSES) or LOSSES[0]}",
            )
    return ToyModel(in_features, out_features), x_BI, measure
