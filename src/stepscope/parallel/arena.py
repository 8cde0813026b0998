"""Parameters of one owner, end to end in one buffer, which is one message.

A parameter moves into the buffer for good when nothing but itself can notice: it has a memory of its own, and nobody
else holds that memory. Then it is sent and received without a copy. One that does not move, or that somebody moves out
again later (`module.to`, an assignment to `.data`), is copied into its place before it is sent, and out of it
afterwards. So the messages are the same on all ranks, whatever lies where on each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Vector instructions are fastest on addresses that are multiples of this.
ALIGNMENT_BYTES = 64


class Arena:
    """`params`, on one device, and the buffer that they are sent in."""

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor]) -> None:
        aligned = [-(-param.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for param in params]
        self.message = torch.empty(sum(aligned), dtype=torch.uint8, device=params[0].device)
        self._places = []
        for param, piece in zip(params, torch.split(self.message, aligned), strict=True):
            place = piece[: param.nbytes].view(param.dtype).view(param.shape)
            self._places.append((param, place))
            if _may_move(param):
                place.copy_(param)
                param.data = place

    @torch.no_grad()
    def collect(self) -> None:
        """Before it is sent: what lies elsewhere comes in."""
        for param, place in self._places:
            if param.data_ptr() != place.data_ptr():
                place.copy_(param)

    @torch.no_grad()
    def distribute(self) -> None:
        """After it was received: what lies elsewhere gets its values."""
        for param, place in self._places:
            if param.data_ptr() != place.data_ptr():
                param.copy_(place)


def _may_move(param: Tensor) -> bool:
    """Plain and in one piece, with memory of its own that no other tensor, array or process can look at."""
    if type(param.data) is not Tensor or not param.is_contiguous():
        return False
    memory = param.untyped_storage()
    if not memory.is_cuda and (memory.is_shared() or not memory.resizable()):  # other processes, and numpy
        return False
    # Two hold it: the parameter, and `memory` itself.
    return memory.nbytes() == param.nbytes and torch._C._storage_Use_Count(memory._cdata) == 2
