"""Parameters in one flat buffer, of which each rank owns a slice.

    whole   | a a a a a a | b b b . | c c c c c c . . |      . is padding
    slices  | rank 0      | rank 1        | ...

A gathered buffer *is* the parameters: each is a view of it, so nothing is copied after an all-gather. Between uses the
buffer's storage is empty, while the views, and whatever autograd has saved of them, stay: gathering fills the same
storage again. It is written through a tensor with its own version counter, because for autograd these are not new
values.

Optimizers see shards: the part of each parameter in this rank's slice, as a vector, which may be empty.
"""

import torch
from torch import Tensor, nn

from stepscope.parallel.agreement import mark_piece
from stepscope.parallel.communicator import Communicator, Pending
from stepscope.parallel.fsdp.plan import Member, Site

# Alignment of parameters and slices in elements: at least 64 bytes in every trainable dtype. The rounding of a GEMM
# depends on the alignment of its operands, and it should match that of an ordinary tensor.
ALIGNMENT = 32


class GatheredBytes:
    """Bytes of gathered parameters on this rank, current and peak."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def remove(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


class ParameterPlace:
    """One parameter in the buffer: its offset, its shard on this rank, and the parameter itself while it is
    gathered.
    """

    def __init__(self, member: Member, start: int) -> None:
        self.name = member.name
        self.sites: list[Site] = member.sites
        self.shape = member.parameter.shape
        self.start = start
        self.stop = start + member.parameter.numel()
        # Offset of the shard from the start of the slice.
        self.piece_start = self.piece_stop = 0
        self.piece: nn.Parameter
        self.full: nn.Parameter
        self.is_hooked = False
        # Whether a gradient arrived: since the buffer was last sent, in this backward pass, since gradients were
        # delivered.
        self.is_filled = self.has_arrived = self.was_used = False


class Flat:
    """One buffer: parameters of one dtype, all trained or all frozen at construction."""

    def __init__(
        self, name: str, members: list[Member], compute_dtype: torch.dtype | None, communicator: Communicator
    ) -> None:
        first = members[0].parameter
        self.name = name
        self.device = first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32) if compute_dtype else first.dtype
        self.reduce_dtype = torch.promote_types(self.dtype, torch.float32)
        self._communicator = communicator
        self.places = _lay_out(members)
        self.slice_numel = _round_up(-(-self.places[-1].stop // communicator.world))
        self.whole_numel = self.slice_numel * communicator.world
        self.shard = self._cut(members)
        self._make_pieces(members)
        self._make_fulls(compute_dtype or self.dtype)
        self._gathering: Pending | None = None
        self._gradient: Tensor | None = None
        self._reducing: tuple[Tensor, Pending] | None = None
        self._reduced: Tensor | None = None

    @property
    def gathered_bytes(self) -> int:
        """The size of the buffer while it is gathered."""
        return self.whole_numel * self._writer.element_size()

    @property
    def storage_bytes(self) -> int:
        """The current size."""
        num_bytes: int = self._writer.untyped_storage().nbytes()
        return num_bytes

    @property
    def storage_key(self) -> int:
        """The identity of the storage, even while it is empty."""
        key: int = self._writer.untyped_storage()._cdata
        return key

    @property
    def is_trained(self) -> bool:
        return any(place.piece.requires_grad for place in self.places)

    def start_gather(self) -> None:
        """Allocate the buffer and start gathering the other ranks' slices."""
        self._writer.untyped_storage().resize_(self.gathered_bytes)
        own = self._own_slice(self._writer)
        own.copy_(self.shard)
        self._gathering = self._communicator.all_gather(self._writer, own, f"parameters of {self.name}")

    def wait_gathered(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        self.wait_gathered()
        self._writer.untyped_storage().resize_(0)

    def require_grad_as_pieces(self) -> list[ParameterPlace]:
        """Freezing or unfreezing a model applies to the shards. Returns places that need their first hook."""
        unhooked = []
        for place in self.places:
            place.full.requires_grad_(place.piece.requires_grad)
            if place.piece.requires_grad and not place.is_hooked:
                place.is_hooked = True
                unhooked.append(place)
        return unhooked

    @torch.no_grad()
    def take_gradient(self, place: ParameterPlace) -> None:
        """Move a gradient from autograd into the buffer, widening it in the same pass."""
        gradient, place.full.grad = place.full.grad, None
        assert gradient is not None, "called with a gradient"
        if self._gradient is None:
            self._gradient = torch.empty(self.whole_numel, dtype=self.reduce_dtype, device=self.device)
        part = self._gradient[place.start : place.stop].view(place.shape)
        if place.is_filled:
            part.add_(gradient)
        else:
            part.copy_(gradient)
        place.is_filled = place.has_arrived = place.was_used = True

    def has_all_gradients(self) -> bool:
        """The gradients of this backward pass."""
        return all(place.has_arrived for place in self.places if place.piece.requires_grad)

    def has_unsent_gradients(self) -> bool:
        return self._gradient is not None

    def forget_arrivals(self) -> None:
        for place in self.places:
            place.has_arrived = False

    def send_gradient(self) -> None:
        """Reduce-scatter the gradients that arrived, with zeros for the others."""
        self.forget_arrivals()
        self.collect()
        whole = self._gradient
        if whole is None:
            whole = torch.zeros(self.whole_numel, dtype=self.reduce_dtype, device=self.device)
        for place in self.places:
            if not place.is_filled:
                whole[place.start : place.stop].zero_()
            place.is_filled = False
        self._gradient = None
        shard = torch.empty(self.slice_numel, dtype=self.reduce_dtype, device=self.device)
        self._reducing = shard, self._communicator.reduce_scatter(shard, whole, f"gradients of {self.name}")

    def collect(self) -> None:
        """Wait for the message that was sent, which releases its buffer."""
        if self._reducing is None:
            return
        shard, pending = self._reducing
        self._reducing = None
        pending.wait()
        self._reduced = shard if self._reduced is None else self._reduced.add_(shard)

    def deliver(self, was_used: list[bool]) -> None:
        """Give the shards their gradients, where any rank had one. Empty shards get none."""
        self.collect()
        reduced, self._reduced = self._reduced, None
        for place, used in zip(self.places, was_used, strict=True):
            place.was_used = False
            if used and reduced is not None and place.piece.requires_grad and place.piece.numel():
                gradient = reduced[place.piece_start : place.piece_stop].to(self.dtype)
                _accumulate(place.piece, gradient)

    def gather_values(self, shard: Tensor, name: str) -> Tensor:
        """Return a new full buffer, from every rank's values for its slice."""
        whole = torch.empty(self.whole_numel, dtype=shard.dtype, device=shard.device)
        self._communicator.all_gather(whole, shard, f"{name} of {self.name}").wait()
        return whole

    def own_part(self, place: ParameterPlace, full: Tensor) -> Tensor:
        """Return the part of a tensor of the parameter's shape that belongs to this rank's shard."""
        begin = self._communicator.rank * self.slice_numel + place.piece_start - place.start
        return full.reshape(-1)[begin : begin + place.piece.numel()]

    def _own_slice(self, whole: Tensor) -> Tensor:
        begin = self._communicator.rank * self.slice_numel
        return whole[begin : begin + self.slice_numel]

    def _cut(self, members: list[Member]) -> Tensor:
        shard = torch.zeros(self.slice_numel, dtype=self.dtype, device=self.device)
        begin = self._communicator.rank * self.slice_numel
        for member, place in zip(members, self.places, strict=True):
            start, stop = (min(max(edge - begin, 0), self.slice_numel) for edge in (place.start, place.stop))
            place.piece_start, place.piece_stop = start, max(start, stop)
            begin_in_full = begin + start - place.start
            values = member.parameter.detach().reshape(-1)[begin_in_full : begin_in_full + stop - start]
            shard[start:stop].copy_(values)
        return shard

    def _make_pieces(self, members: list[Member]) -> None:
        for member, place in zip(members, self.places, strict=True):
            values = self.shard[place.piece_start : place.piece_stop]
            place.piece = nn.Parameter(values, requires_grad=member.parameter.requires_grad)
            mark_piece(place.piece)

    def _make_fulls(self, dtype: torch.dtype) -> None:
        whole = torch.empty(self.whole_numel, dtype=dtype, device=self.device)
        storage = whole.untyped_storage()
        self._writer = torch.empty(0, dtype=dtype, device=self.device).set_(storage)
        for place in self.places:
            view = whole[place.start : place.stop].view(place.shape)
            place.full = nn.Parameter(view, requires_grad=place.piece.requires_grad)
        storage.resize_(0)


def _lay_out(members: list[Member]) -> list[ParameterPlace]:
    places: list[ParameterPlace] = []
    start = 0
    for member in members:
        places.append(ParameterPlace(member, start))
        start = _round_up(places[-1].stop)
    return places


def _round_up(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
