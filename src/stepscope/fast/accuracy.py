"""Compares the loss and the gradients of a changed step with those of the original, both against float64.

A limit that is measured can fail: each gradient may be twice as far from the truth as that of the original step in the
same precision, plus half a unit in the last place. Where float64 does not fit into memory, or the model insists on
fp32, the truth is fp32, which is still four digits better than bf16, and the result says so.
"""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Gradients = dict[str, Tensor]
HALF_UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, None: 2.0**-22}


class GradientAccuracy(NamedTuple):
    """The gradient that is closest to its limit, or furthest beyond it."""

    parameter: str
    error: float  # relative to the norm of the true gradient
    plain_error: float
    share_of_limit: float
    truth: str
    loss: float
    plain_loss: float
    true_loss: float
    is_low_precision: bool = True

    @property
    def passes(self) -> bool:
        return self.share_of_limit <= 1.0 and self.has_right_loss

    @property
    def has_right_loss(self) -> bool:
        """A single number can be right by luck, so the limit is wider than that of gradients."""
        unit = max(HALF_UNIT.values()) if self.is_low_precision else HALF_UNIT[None]
        limit = 4 * abs(self.plain_loss - self.true_loss) + 16 * unit * abs(self.true_loss)
        return abs(self.loss - self.true_loss) <= limit


class Reference(NamedTuple):
    """The loss and the distance of the original gradients from the truth."""

    truth: Gradients  # fp32
    true_loss: float
    plain_loss: float
    plain_errors: dict[str, float]
    dtype: torch.dtype


LossOf = Callable[[nn.Module, Any], Tensor]


def make_reference(
    module: nn.Module, loss_of: LossOf, batch: Any, *, autocast: torch.dtype | None, device: torch.device
) -> Reference:
    """Run the original model once in float64 and once as it is."""
    truth, true_loss, dtype = _compute_truth(module, loss_of, batch)
    plain, plain_loss = _gradients(module, loss_of, batch, _autocast(device, autocast))
    errors = {name: _distance(plain[name], exact) for name, exact in truth.items()}
    return Reference(truth, true_loss, plain_loss, errors, dtype)


def compare(
    reference: Reference, gradients: Mapping[str, Tensor], loss: float, *, autocast: torch.dtype | None
) -> GradientAccuracy:
    worst: GradientAccuracy | None = None
    for name, exact in reference.truth.items():
        scale = float(exact.norm()) or 1.0
        error = _distance(gradients[name].view(exact.shape), exact) if name in gradients else math.inf
        limit = 2 * reference.plain_errors[name] + HALF_UNIT[autocast] * scale
        found = GradientAccuracy(
            parameter=name,
            error=error / scale,
            plain_error=reference.plain_errors[name] / scale,
            share_of_limit=error / limit if math.isfinite(error) and math.isfinite(limit) else math.inf,
            truth="float64" if reference.dtype == torch.float64 else "fp32",
            loss=loss,
            plain_loss=reference.plain_loss,
            true_loss=reference.true_loss,
            is_low_precision=autocast is not None,
        )
        if worst is None or found.share_of_limit > worst.share_of_limit:
            worst = found
    assert worst is not None, "a model that trains has gradients"
    return worst


def _compute_truth(module: nn.Module, loss_of: LossOf, batch: Any) -> tuple[Gradients, float, torch.dtype]:
    try:
        return *_gradients_in(torch.float64, module, loss_of, batch), torch.float64
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # the model creates fp32 tensors, which cannot be multiplied with its own
        if "double" not in str(error).lower():
            raise
    return *_gradients_in(torch.float32, module, loss_of, batch), torch.float32


def _gradients_in(dtype: torch.dtype, module: nn.Module, loss_of: LossOf, batch: Any) -> tuple[Gradients, float]:
    def cast(one: Tensor) -> Tensor:
        return one.to(dtype) if one.is_floating_point() else one

    exact = copy.deepcopy(module).to(dtype)
    return _gradients(exact, loss_of, pytree.tree_map_only(Tensor, cast, batch), nullcontext())


def _gradients(
    module: nn.Module, loss_of: LossOf, batch: Any, precision: AbstractContextManager[object]
) -> tuple[Gradients, float]:
    """The gradients in fp32, and the loss. The module's own gradients are untouched."""
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    with precision:
        loss = loss_of(module, batch)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradients = {name: one.float() for name, one in zip(parameters, found, strict=True) if one is not None}
    return gradients, float(loss.detach())


def _distance(gradient: Tensor, exact: Tensor) -> float:
    return float((gradient.float() - exact).norm())


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
