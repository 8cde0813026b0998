"""Sums of gradients over micro-batches, in fp32, of all tensors in one launch.

bf16 gradients that are added in bf16 lose what is below a 256th of the sum; fp32 sums keep it. The first micro-batch
overwrites the sums, so nothing has to be set to zero: 6 bytes per element for a bf16 gradient, then 10 for each that
is added.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepscope.kernels.tensor_lists import (
    ALIGNMENT,
    BLOCK,
    CHUNK,
    NUM_WARPS,
    TensorList,
    kernel_type,
    load_kernels,
)


class Accumulator:
    """fp32 `sums` of these shapes, parts of one tensor. `add` gradients of any floating-point dtype to them.

    In a CUDA graph, gradients at other addresses need an accumulator of their own, which `shares` the sums.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], *, device: torch.device | str, shares: "Accumulator | None" = None
    ) -> None:
        self.sums: tuple[Tensor, ...] = _make_sums(shapes, device) if shares is None else shares.sums
        self._list = TensorList([(part, None, None, None) for part in self.sums], [0] * len(self.sums))

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Prepare `add` of these gradients. `add` does it too, but not while a CUDA graph is captured."""
        self._list.bind(gradients)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], *, overwrite: bool) -> None:
        """Add one gradient per sum. With `overwrite`, as for the first micro-batch, the sums become the gradients.

        Can be captured in a CUDA graph if the gradients were bound before, at the same addresses.
        """
        self.bind(gradients)
        if self._list.device.type == "cpu":
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.copy_(gradient) if overwrite else total.add_(gradient)
        else:
            with torch.cuda.device(self._list.device):
                self.launch_kernels(overwrite=overwrite)

    def launch_kernels(self, *, overwrite: bool) -> None:
        """`add` of what is bound, in Triton, which tests also run in its interpreter, on a CPU."""
        kernels = load_kernels()
        for launch in self._list.launches:
            kernels.accumulate_chunks[(launch.num_chunks,)](
                self._list.table,
                launch.chunks,
                GRADIENT_TYPE=kernel_type(launch.kind.dtypes[-1]),
                OVERWRITE=overwrite,
                ALIGNED=launch.kind.is_aligned,
                BLOCK=BLOCK,
                CHUNK=CHUNK,
                num_warps=NUM_WARPS,
            )


def _make_sums(shapes: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, ...]:
    """Parts of one tensor, each aligned."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    per_part = ALIGNMENT // torch.float32.itemsize
    padded = [-(-count // per_part) * per_part for count in counts]
    parts = torch.split(torch.zeros(sum(padded), dtype=torch.float32, device=device), padded)
    return tuple(part[:count].view(torch.Size(shape)) for part, count, shape in zip(parts, counts, shapes, strict=True))
