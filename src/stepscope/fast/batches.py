"""Batches as users write them: a tensor, a tuple of arguments, or a dict of keyword arguments."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def call_with(module: Callable[..., Any], batch: Any) -> Any:
    """Call a module with a batch."""
    match batch:
        case Mapping():
            return module(**batch)
        case tuple() | list():
            return module(*batch)
        case _:
            return module(batch)


def loss_in(output: Any) -> Tensor:
    """The loss in a module's output: the output itself, its `loss`, or its entry of that name."""
    found = output
    if isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            "expected the model to return its loss, as a scalar or as `.loss`, but got a "
            f"{type(found).__name__}{shape}; pass loss=lambda model, batch: ..."
        )
    return found


def as_plain(batch: Any) -> Any:
    """A batch whose tensors can be found: a `BatchEncoding` of `transformers`, or another mapping, as a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def copy_batch(batch: Any, device: torch.device) -> Any:
    """A batch in memory of its own, which later batches are copied into."""
    return pytree.tree_map_only(Tensor, lambda one: one.detach().to(device, copy=True), as_plain(batch))


def fill_batch(fixed: Any, batch: Any) -> None:
    """Copy the tensors of a batch into those of `fixed`."""
    for old, new in zip(pytree.tree_leaves(fixed), pytree.tree_leaves(as_plain(batch)), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new, non_blocking=True)


def signature_of(batch: Any) -> tuple[Any, ...]:
    """What must be the same for a captured step: structure, shapes, dtypes, and everything that is not a tensor."""
    leaves, structure = pytree.tree_flatten(as_plain(batch))
    for one in leaves:
        if not isinstance(one, Hashable):
            raise ValueError(f"expected tensors, numbers and strings in a batch, but got a {type(one).__name__}")
    described = [(tuple(one.shape), one.dtype) if isinstance(one, Tensor) else (type(one), one) for one in leaves]
    return (structure, *described)


def has_dropout(module: nn.Module) -> bool:
    """Whether a module draws random numbers while it trains, as far as its submodules and config show."""
    if any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 and one.training for one in module.modules()):
        return True
    config: Any = getattr(module, "config", None)
    fields = config.to_dict() if module.training and hasattr(config, "to_dict") else {}
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items())
