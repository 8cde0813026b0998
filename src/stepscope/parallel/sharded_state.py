"""Moves an optimizer's state between ranks: from its owners to the rank that saves it, and from the rank that loaded it
to its owners.

A parameter's state is a dict of tensors and other values. Its structure is exchanged first, as small objects without
the tensors' values; then every rank knows which messages follow, and the values are sent in few of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.parallel.coalesced import broadcast_tensors
from stepscope.parallel.communicator import Communicator

State = dict[str, Any]


class _TensorOutline(NamedTuple):
    """A placeholder for a tensor, until its values arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def exchange_states(
    communicator: Communicator,
    states: Mapping[int, State],
    sources: Mapping[int, int],
    is_wanted: Callable[[int], bool],
) -> dict[int, State]:
    """Return the states of all indices in `sources` that this rank wants, as copies in CPU memory.

    `sources` says which rank sends which, and is the same on all ranks; `states` holds at least what this rank sends.
    Indices are exchanged one after the other, so that a rank that wants none never holds more than one that is not its
    own.
    """
    mine = {index: _outline(states[index]) for index, source in sources.items() if source == communicator.rank}
    outlines: dict[int, State] = {}
    for theirs in communicator.share_objects(mine, "the layout of the optimizer's state"):
        outlines |= theirs
    received = {}
    for index in sorted(sources):
        state = states[index] if sources[index] == communicator.rank else outlines[index]
        values = _broadcast_state(communicator, state, sources[index])
        if is_wanted(index):
            received[index] = values
    return received


def _broadcast_state(communicator: Communicator, state: State, source: int) -> State:
    device = torch.device("cuda" if communicator.backend == "nccl" else "cpu")
    values = {key: _prepare(value, device) for key, value in state.items()}
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    broadcast_tensors(communicator, tensors, [source] * len(tensors), "the optimizer's state")
    return {key: _keep(value, state[key]) for key, value in values.items()}


def _prepare(value: Any, device: torch.device) -> Any:
    """Return the tensor to send, or an empty one to receive it in."""
    if isinstance(value, _TensorOutline):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    return value.detach().to(device).contiguous() if isinstance(value, Tensor) else value


def _keep(value: Any, origin: Any) -> Any:
    """Copy to CPU memory, separate from the optimizer's own, which the next step changes."""
    if not isinstance(value, Tensor):
        return value
    kept = value.cpu()
    is_own = isinstance(origin, Tensor) and origin.data_ptr() == kept.data_ptr()
    return kept.clone() if is_own else kept


def _outline(state: State) -> State:
    return {
        key: _TensorOutline(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def choose_sources(present: Sequence[set[int]], owners: Sequence[int]) -> dict[int, int]:
    """For each index that its owner is missing and another rank has: the lowest rank that has it."""
    lacking = {index for indices in present for index in indices if index not in present[owners[index]]}
    return {index: next(rank for rank, indices in enumerate(present) if index in indices) for index in sorted(lacking)}
