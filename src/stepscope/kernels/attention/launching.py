"""Launches a compiled Triton kernel again, without the analysis of its arguments that Triton repeats each time.

That analysis takes 20 µs or more of CPU time, as long as a whole call of PyTorch's attention. A `Launch` is made for
arguments of fixed shapes, strides, dtypes and alignment. So one analysis is enough: the first call goes through Triton,
and later calls go to the kernel that it compiled. Triton's launch hooks, which only its own profiler uses, see the
first call only.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Tile:
    """A tensor as the copy engine reads it, in tiles. The classes that `tiles_of` makes fix everything but the tensor,
    which is all that a call changes, and all that it pays for.
    """

    __slots__ = ("base",)
    shape: ClassVar[list[int]]
    strides: ClassVar[list[int]]
    block_shape: ClassVar[list[int]]
    layout: ClassVar[NVMMASharedLayout]
    padding: ClassVar[str] = "zero"
    round_f32_to_tf32: ClassVar[bool] = False

    def __init__(self, base: Tensor) -> None:
        self.base = base

    def describe(self) -> TensorDescriptor:
        """What Triton's own analysis expects."""
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


def tiles_of(shape: list[int], strides: list[int], block: list[int], layout: NVMMASharedLayout) -> type[Tile]:
    """The class of tensors with this shape and these strides, read in blocks of this shape."""
    return type(
        "Tile", (Tile,), {"__slots__": (), "shape": shape, "strides": strides, "block_shape": block, "layout": layout}
    )


class Launch:
    """One kernel with its grid and constants, on one device. Call it with the remaining arguments, in their order."""

    __slots__ = (
        "_arguments",
        "_compiled",
        "_constants",
        "_device",
        "_function",
        "_grid",
        "_kernel",
        "_metadata",
        "_run",
    )

    def __init__(self, kernel: Any, num_programs: int, device: torch.device, **constants: Any) -> None:
        self._kernel, self._grid, self._constants = kernel, num_programs, constants
        self._device = device.index
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        if self._compiled is None:
            self._compile(arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._run(
            self._grid, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments, *self._arguments
        )

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        described = [one.describe() if isinstance(one, Tile) else one for one in arguments]
        compiled = self._kernel[(self._grid,)](*described, **self._constants)
        self._arguments = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._compiled = compiled
