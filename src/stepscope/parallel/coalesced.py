"""Sends many tensors in few messages.

A message costs a latency in addition to its bytes, and a model has many small tensors. Those are packed together as
bytes, so that one message takes any mixture of dtypes. A large one is sent in place: copying it would cost more than
the latency that it saves.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest

import torch
from torch import Tensor

from stepscope.parallel.communicator import Communicator, Pending

MESSAGE_BYTES = 32 << 20
# Copying 256 KiB twice takes as long as setting up one gloo message.
IN_PLACE_BYTES = 256 << 10
# Alignment of each tensor in a message: a view as another dtype must start at a multiple of that dtype's size.
ALIGNMENT_BYTES = 16


@torch.no_grad()
def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], sources: Sequence[int], name: str) -> None:
    """Overwrite each tensor in place with the values of its source rank. Shapes, dtypes, strides, `tensors` and
    `sources` must be the same on all ranks.
    """
    messages = _plan(tensors, sources)
    # First send what needs no packing, then pack the rest while the others are being sent.
    messages.sort(key=lambda message: len(message[1]) > 1 or not message[1][0].is_contiguous())
    under_way = [_send(communicator, source, members, name) for source, members in messages]
    for (source, members), (buffer, pending) in zip(messages, under_way, strict=True):
        pending.wait()
        if source != communicator.rank and buffer is not None:
            _unpack(buffer, members)


def _plan(tensors: Sequence[Tensor], sources: Sequence[int]) -> list[tuple[int, list[Tensor]]]:
    """Group tensors into messages, alternating between sources: links carry both directions at once."""
    by_source: dict[int, list[list[Tensor]]] = {}
    unfilled: dict[tuple[int, torch.device], tuple[list[Tensor], int]] = {}
    for tensor, source in zip(tensors, sources, strict=True):
        messages = by_source.setdefault(source, [])
        if tensor.nbytes >= IN_PLACE_BYTES and tensor.is_contiguous():
            messages.append([tensor])
        elif tensor.numel():
            message, filled_bytes = unfilled.get((source, tensor.device), ([], 0))
            filled_bytes += _aligned_bytes(tensor)
            if not message or filled_bytes > MESSAGE_BYTES:
                message, filled_bytes = [], _aligned_bytes(tensor)
                messages.append(message)
            message.append(tensor)
            unfilled[source, tensor.device] = message, filled_bytes
    turns = zip_longest(*([(source, message) for message in messages] for source, messages in by_source.items()))
    return [message for message in chain.from_iterable(turns) if message is not None]


def _send(communicator: Communicator, source: int, members: list[Tensor], name: str) -> tuple[Tensor | None, Pending]:
    """The message being sent, and its buffer unless it is the tensor itself."""
    if len(members) == 1 and members[0].is_contiguous():
        return None, communicator.broadcast(_as_bytes(members[0]), source, name)
    buffer = torch.empty(_packed_bytes(members), dtype=torch.uint8, device=members[0].device)
    if source == communicator.rank:
        for part, tensor in zip(_parts(buffer, members), members, strict=True):
            part.copy_(tensor)
    return buffer, communicator.broadcast(buffer, source, name)


def _unpack(buffer: Tensor, members: list[Tensor]) -> None:
    for part, tensor in zip(_parts(buffer, members), members, strict=True):
        tensor.copy_(part)


def _parts(buffer: Tensor, members: list[Tensor]) -> list[Tensor]:
    """View the message as tensors of the members' dtypes and shapes."""
    pieces = torch.split(buffer, [_aligned_bytes(tensor) for tensor in members])
    return [
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, members, strict=True)
    ]


def _packed_bytes(members: list[Tensor]) -> int:
    return sum(map(_aligned_bytes, members))


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
