"""The last message of a step: the gradients of the replicated vectors, and what ranks must know about the rest.

Vectors are a thousandth of a model: one message for all of them costs a latency. The same message carries, as numbers
that are summed over ranks, who had a gradient for which parameter, and which units have gradients that were not sent in
turn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepscope.parallel.communicator import Communicator
from stepscope.parallel.fsdp.flat_buffer import Flat
from stepscope.parallel.fsdp.unit import ShardedUnit


class LastMessage:
    """The same layout on every rank: gradients of vectors, a flag per vector, a flag per place of each flat buffer, and
    a flag per flat buffer.
    """

    def __init__(
        self, vectors: Sequence[nn.Parameter], units: Sequence[ShardedUnit], communicator: Communicator
    ) -> None:
        self._vectors = [vector for vector in vectors if vector.requires_grad]
        self._flats: list[Flat] = [flat for unit in units for flat in unit.trained_flats]
        self._communicator = communicator

    def exchange(self) -> None:
        """Send the message, then whatever it says is left, and deliver all gradients."""
        flags = [float(vector.grad is not None) for vector in self._vectors]
        flags += [float(place.was_used) for flat in self._flats for place in flat.places]
        flags += [float(flat.has_unsent_gradients()) for flat in self._flats]
        if not flags:
            return
        message = self._pack(flags)
        self._communicator.all_reduce(message, "gradients of vectors").wait()
        raised = [flag > 0 for flag in message[message.numel() - len(flags) :].tolist()]
        self._deliver_vectors(message, raised)
        self._deliver_flats(raised[len(self._vectors) :])

    def _pack(self, flags: list[float]) -> Tensor:
        gradients = [_flat_gradient(vector) for vector in self._vectors]
        device = gradients[0].device if gradients else self._flats[0].device
        return torch.cat([*gradients, torch.tensor(flags, device=device)])

    def _deliver_vectors(self, message: Tensor, used: list[bool]) -> None:
        start = 0
        for vector, is_used in zip(self._vectors, used, strict=False):
            averaged = message[start : start + vector.numel()].view(vector.shape)
            start += vector.numel()
            if not is_used:
                continue
            if vector.grad is None:
                vector.grad = averaged.to(vector.dtype, copy=True)
            else:
                vector.grad.copy_(averaged)

    def _deliver_flats(self, raised: list[bool]) -> None:
        flags = iter(raised)
        used = [[next(flags) for _ in flat.places] for flat in self._flats]
        for flat, is_left in zip(self._flats, flags, strict=True):
            if is_left:
                flat.send_gradient()
        for flat, was_used in zip(self._flats, used, strict=True):
            flat.deliver(was_used)


def _flat_gradient(vector: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(vector) if vector.grad is None else vector.grad
    return gradient.detach().reshape(-1).to(torch.promote_types(vector.dtype, torch.float32))
