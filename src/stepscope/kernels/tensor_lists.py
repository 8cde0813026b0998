"""Lists of tensors that one kernel launch reads and writes: a table of addresses and tables of chunks on the device.

`adamw_kernels.py` says what is in them. Tensors are grouped by what a kernel has to know when it is compiled: their
dtypes, and whether 16 bytes can be moved at once. Each such kind is a launch. A model in bf16 has two of them, matrices
with working copies and fp32 vectors without, and the second takes microseconds: one launch with a branch in every
program would have the registers of both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

COLUMNS = 8  # as in `adamw_kernels.py`, which is imported only to launch something: without a GPU Triton may be missing
NUM_ADDRESSES = 5  # they come first; then the number of elements and the group
GRADIENT = 4
ALIGNMENT = 16
# Four elements per thread, and four blocks per program: reading the tables takes about as long as a block.
BLOCK = 1024
NUM_WARPS = 8
CHUNK = 4 * BLOCK
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKind:
    """What the tensors of a launch have in common. A dtype is None if the tensors are absent."""

    dtypes: tuple[torch.dtype | None, ...]  # in the order of the columns
    is_aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLaunch:
    """The chunks of all tensors of one kind: int32 (N, 2), the tensor and which of its chunks."""

    kind: ListKind
    chunks: Tensor
    num_chunks: int


class TensorList:
    """The tables of a list of rows, each of up to five tensors with the same number of elements. One of them, the
    gradient, is bound later and may move.
    """

    def __init__(self, rows: Sequence[Sequence[Tensor | None]], groups: Sequence[int]) -> None:
        self.device = _only_device(tensor for row in rows for tensor in row if tensor is not None)
        self._rows = [tuple(row) for row in rows]
        self._counts = [next(tensor.numel() for tensor in row if tensor is not None) for row in rows]
        self._host = torch.zeros(len(rows), COLUMNS, dtype=torch.int64)
        for index, row in enumerate(rows):
            self._check_row(index, row)
            for column, tensor in enumerate(row):
                self._host[index, column] = 0 if tensor is None else tensor.data_ptr()
            self._host[index, NUM_ADDRESSES] = self._counts[index]
            self._host[index, NUM_ADDRESSES + 1] = groups[index]
        self.table = torch.zeros_like(self._host, device=self.device)
        self.launches: tuple[ListLaunch, ...] = ()
        self.gradients: tuple[Tensor, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self._kinds: list[ListKind] = []

    def bind(self, gradients: Sequence[Tensor]) -> bool:
        """Write the addresses of the gradients, one per row, into the table, unless they are there already. Return
        whether the launches changed. A CUDA graph captured before sees new addresses, but not new launches.
        """
        if len(gradients) != len(self._rows):
            raise ValueError(f"expected {len(self._rows)} gradients, but got {len(gradients)}")
        addresses = tuple(gradient.data_ptr() for gradient in gradients)
        dtypes_are_known = self._kinds and all(
            kind.dtypes[GRADIENT] is gradient.dtype for kind, gradient in zip(self._kinds, gradients, strict=True)
        )
        is_new = addresses != self._addresses or not dtypes_are_known
        changed = is_new and self._write(gradients, addresses)
        self.gradients = tuple(gradients)
        return changed

    def release(self) -> None:
        """Let go of the gradients, whose memory may be freed. Their addresses stay in the table."""
        self.gradients = ()

    def _write(self, gradients: Sequence[Tensor], addresses: tuple[int, ...]) -> bool:
        refuse_capture("bind gradients at new addresses")
        for index, gradient in enumerate(gradients):
            self._check(index, gradient)
        kinds = [self._kind(index, gradient) for index, gradient in enumerate(gradients)]
        changed = kinds != self._kinds
        if changed:
            launches = (self._chunks_of(kind, kinds) for kind in dict.fromkeys(kinds))
            self.launches = tuple(launch for launch in launches if launch.num_chunks)
            self._kinds = kinds
        self._host[:, GRADIENT] = torch.tensor(addresses, dtype=torch.int64)
        upload(self._host, self.table)
        self._addresses = addresses
        return changed

    def _kind(self, index: int, gradient: Tensor) -> ListKind:
        row = [*self._rows[index], gradient]
        return ListKind(
            dtypes=tuple(None if tensor is None else tensor.dtype for tensor in row),
            is_aligned=all(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in row),
        )

    def _chunks_of(self, kind: ListKind, kinds: Sequence[ListKind]) -> ListLaunch:
        members = [index for index, other in enumerate(kinds) if other == kind]
        parts = [torch.arange(-(-self._counts[index] // CHUNK), dtype=torch.int32) for index in members]
        owners = torch.tensor(members, dtype=torch.int32).repeat_interleave(torch.tensor([len(part) for part in parts]))
        chunks = torch.stack((owners, torch.cat(parts)), dim=1).contiguous()
        return ListLaunch(kind=kind, chunks=chunks.to(self.device), num_chunks=len(chunks))

    def _check_row(self, index: int, row: Sequence[Tensor | None]) -> None:
        for tensor in row:
            if tensor is not None:
                self._check(index, tensor)

    def _check(self, index: int, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {index} must be contiguous, but has strides {tensor.stride()}")
        if tensor.numel() != self._counts[index]:
            raise ValueError(f"tensor {index} has {self._counts[index]} elements, but got one with {tensor.numel()}")
        if tensor.device != self.device:
            raise ValueError(f"tensor {index} must be on {self.device}, but is on {tensor.device}")
        if self.device.type == "cuda" and tensor.dtype not in LOW_DTYPES:
            raise ValueError(f"tensor {index} must be float32, bfloat16 or float16 on a GPU, but is {tensor.dtype}")


def _only_device(tensors: Iterable[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(f"expected tensors on one device, but got {sorted(map(str, devices)) or 'no tensors'}")
    return devices.pop()


@cache
def load_kernels() -> Any:
    """The module `adamw_kernels`."""
    from stepscope.kernels import adamw_kernels

    return adamw_kernels


@cache
def kernel_type(dtype: torch.dtype | None) -> Any:
    """Triton's name of a dtype, None for None."""
    import triton.language as tl

    names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return None if dtype is None else names[dtype]


def upload(values: Tensor, target: Tensor) -> None:
    """Copy from the CPU without waiting for the GPU. The allocator of pinned memory keeps the copy until it is done."""
    if target.is_cuda:
        target.copy_(values.pin_memory(), non_blocking=True)
    else:
        target.copy_(values)


def refuse_capture(what: str) -> None:
    """Raise if a CUDA graph is being captured: it would replay the copy from memory of the CPU that is gone."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"cannot {what} while a CUDA graph is captured; do it before")
