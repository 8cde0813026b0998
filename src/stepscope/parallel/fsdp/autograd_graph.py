"""What a module's output reveals about its backward pass: when it begins, and whether it needs the weights.

That of an embedding does not, and need not be gathered for it. The answer is read from the autograd graph behind the
module's output: which tensors its nodes saved. Only small graphs are read. If the answer is unclear, it is yes: an
unnecessary gather costs time, a missing one gives wrong gradients.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

MAX_NODES = 32
# What a node saved, without unpacking it: under activation checkpointing, unpacking recomputes.
PREFIX = "_raw_saved_"


# Leaves of an output that cannot contain a tensor.
PLAIN = (Tensor, bool, int, float, str, bytes, type(None))


def differentiable_leaves(output: object) -> list[Tensor]:
    """Return the tensors of an output that receive gradients. Missing one would mean computing with freed weights."""
    leaves = list(_leaves(output))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    opaque = [leaf for leaf in leaves if not isinstance(leaf, PLAIN)]
    if opaque and not found and torch.is_grad_enabled():
        raise TypeError(
            f"FSDP found no tensor in the {type(opaque[0]).__name__} returned by a module: expected "
            "tensors, or tuples, lists, dicts or dataclasses of tensors"
        )
    return found


def _leaves(output: object) -> Iterator[object]:
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def keeps_weights(outputs: Iterable[Tensor], storages: set[int]) -> bool:
    """Whether a node behind `outputs` saved, or may have saved, a tensor in one of `storages` (their `_cdata`)."""
    waiting = deque(output.grad_fn for output in outputs)
    seen: set[Any] = set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MAX_NODES or _may_keep(node, storages):
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


def _may_keep(node: Any, storages: set[int]) -> bool:
    if hasattr(node, "saved_tensors"):
        # Written in Python, which may keep a tensor in any attribute.
        return True
    return any(_is_hooked_or_in(saved, storages) for saved in _saved_by(node))


def _is_hooked_or_in(saved: Any, storages: set[int]) -> bool:
    if saved.unpack_hook is not None:
        return True
    return isinstance(saved.data, Tensor) and saved.data.untyped_storage()._cdata in storages


def _saved_by(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith(PREFIX):
            saved = getattr(node, name)
            yield from saved if isinstance(saved, tuple) else (saved,)
