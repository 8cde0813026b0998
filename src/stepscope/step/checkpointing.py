"""Activation checkpointing from outside: the repeated blocks of any model forget their activations and redo them.

Transformers, ours and others', keep their layers in an `nn.ModuleList`. Wrapping the `forward` of each of its modules
needs no change to the model and no knowledge of it.
"""

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from stepscope.errors import StepscopeError


def checkpoint_blocks(module: nn.Module) -> int:
    """Makes every repeated block recompute itself in backward; returns how many there are."""
    blocks = list(repeated_blocks(nn.ModuleList([module])))
    if not blocks:
        raise StepscopeError(
            "no repeated blocks to checkpoint in this model",
            detail="expected an nn.ModuleList or nn.Sequential with two or more modules of one class",
            hint="--checkpoint none",
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of like modules: layers, not the experts or heads inside one."""
    for child in module.children():
        members = list(child.children())
        listed = isinstance(child, nn.ModuleList | nn.Sequential)
        if listed and len(members) > 1 and len({type(member) for member in members}) == 1:
            yield from members
        else:
            yield from repeated_blocks(child)
