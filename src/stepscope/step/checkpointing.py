"""Activation checkpointing from outside: the repeated blocks of any model recompute their activations in backward.

Transformers usually keep their layers in an `nn.ModuleList`. Wrapping the `forward` of its modules needs no change to
the model and no knowledge about it.

A group of several blocks is run by its first block: when the model calls it, it runs the whole group under one
checkpoint. The other blocks, which the model calls afterwards, return the result that they are given. This is correct
only if the model passes the single result of each block directly to the next, with the same other arguments. Both are
checked at every call, and so is that every block of a group is called. A model that does anything else gets an error,
never a different computation. Inside a group, blocks are called as the model would call them, so that wrappers of
`forward` (`step.annotation`) see each block's own work.

Putting the blocks of a group into a module of their own does not work: it renames their parameters, and with them every
path in tables and ranges.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepscope.errors import StepscopeError

HINT = "--checkpoint 1"
Forward = Callable[..., Any]


def checkpoint_blocks(module: nn.Module, *, every: int = 1, nested: bool = False) -> int:
    """Checkpoint groups of `every` blocks, and return the number of groups. `nested` checkpoints the blocks of a group
    again while the group is recomputed."""
    lists = list(_block_lists(module))
    if not lists:
        raise StepscopeError(
            "this model has no repeated blocks to checkpoint",
            detail="expected an nn.ModuleList or nn.Sequential with two or more modules of the same class",
            hint="--checkpoint none",
        )
    if every == 1:
        blocks = [block for members in lists for block in members]
        for block in blocks:
            block.forward = _checkpointed(block.forward)
        return len(blocks)
    names = {member: name for name, member in module.named_modules()}
    groups = [
        Group(members[start : start + every], names, nested=nested)
        for members in lists
        for start in range(0, len(members), every)
    ]
    module.forward = partial(_run_whole, groups, module.forward)
    return len(groups)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of like modules: the layers, not the experts or heads inside them."""
    for members in _block_lists(module):
        yield from members


def _block_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    members = list(module.children())
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    if listed and len(members) > 1 and len({type(member) for member in members}) == 1:
        yield members
        return
    for child in members:
        yield from _block_lists(child)


def _checkpointed(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False)


class Group:
    """Consecutive blocks under one checkpoint. Between the calls of its first and last block, it remembers the
    arguments and the result of the first, to check the calls of the others."""

    def __init__(self, blocks: list[nn.Module], names: dict[nn.Module, str], *, nested: bool) -> None:
        self._names = [names[block] for block in blocks]
        for block, name in zip(blocks, self._names, strict=True):
            _refuse_hooks(block, name)
        self._blocks = blocks
        self._nested = nested and len(blocks) > 1
        self._forwards: list[Forward] = [block.forward for block in blocks]
        self._running = False
        self.forget()
        for place, block in enumerate(blocks):
            block.forward = partial(self._enter, place)

    def forget(self) -> None:
        self._next = 0
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._result: Tensor | None = None

    def require_complete(self) -> None:
        if self._next:
            raise _refuse(f"the model did not call `{self._names[self._next]}` after `{self._names[self._next - 1]}`")

    def _enter(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """The `forward` of a block. The model calls it, and `_run` calls it again inside the checkpoint."""
        if self._running:
            return self._run_block(place, *args, **kwargs)
        if place != self._next:
            raise _refuse(f"the model called `{self._names[place]}`; expected `{self._names[self._next]}`")
        if place == 0:
            self._begin(args, kwargs)
        else:
            self._check(self._names[place], args, kwargs)
        result = self._result
        self._next += 1
        if self._next == len(self._blocks):
            self.forget()
        return result

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise _refuse(f"`{self._names[0]}` does not get its input as the first positional argument")
        self._result = checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        self._given = (args[1:], kwargs)

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args or args[0] is not self._result:
            raise _refuse(f"the model does not pass the result of the previous block directly to `{name}`")
        if not _are_same((args[1:], kwargs), self._given):
            raise _refuse(f"`{name}` gets different arguments than `{self._names[0]}`")

    def _run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Under compilation, call the original forwards: nothing wraps them, and the compiler of torch 2.11 rejects a
        # flag that is set inside a checkpoint.
        if torch.compiler.is_compiling():
            for place in range(len(self._blocks)):
                x = self._run_block(place, x, *args, **kwargs)
            return x
        self._running = True
        try:
            for block in self._blocks:
                x = block(x, *args, **kwargs)
        finally:
            self._running = False
        return x

    def _run_block(self, place: int, *args: Any, **kwargs: Any) -> Tensor:
        forward = self._forwards[place]
        result = (_checkpointed(forward) if self._nested else forward)(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise _refuse(f"`{self._names[place]}` returns a {type(result).__name__} instead of a single tensor")
        return result


def _run_whole(groups: list[Group], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """The model's forward. Resets groups that a failed pass left incomplete, and checks that this pass completes
    them."""
    for group in groups:
        group.forget()
    result = forward(*args, **kwargs)
    for group in groups:
        group.require_complete()
    return result


def _are_same(left: Any, right: Any) -> bool:
    """Whether two arguments are identical or equal. A model may create the same slice again for every block."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        alike = left.dtype == right.dtype and left.device == right.device
        return left is right or (alike and torch.equal(left, right))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_are_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_are_same, left, right))
    if isinstance(left, bool | int | float | str):
        return bool(left == right)
    return left is right


def _refuse_hooks(block: nn.Module, name: str) -> None:
    if block._forward_hooks or block._forward_pre_hooks:
        raise _refuse(f"`{name}` has forward hooks, which would run twice")


def _refuse(why: str) -> StepscopeError:
    return StepscopeError(
        f"blocks cannot be checkpointed in groups: {why}",
        detail="each block must return one tensor, which the next block takes with the same other arguments",
        hint=HINT,
    )
