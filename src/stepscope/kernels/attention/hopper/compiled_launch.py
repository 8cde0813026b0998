"""Launches a compiled Triton kernel again, without the analysis of its arguments that Triton repeats each time.

That analysis takes 20 µs or more of CPU time, as long as a whole call of PyTorch's attention. A `Launch` is made for
arguments of fixed shapes, strides, dtypes and alignment. So one analysis is enough: the first call goes through Triton,
and later calls go to the kernel that it compiled. Triton's launch hooks, which only its own profiler uses, see the
first call only.

With Triton 3.6, later calls go to its launcher in C. They keep the descriptors for the copy engine by address, because
PyTorch's allocator returns the same addresses again and again. Other versions have other launchers: there, calls go
through the function that all versions have, which fills in the descriptors each time.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_HAS_C_LAUNCHER = triton.__version__.startswith("3.6.")
_MOST_ADDRESSES = 128


class Tiles(NamedTuple):
    """How the copy engine reads a tensor: in tiles of the shape `block`."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: NVMMASharedLayout

    def describe(self, base: Tensor) -> TensorDescriptor:
        return TensorDescriptor(base, self.shape, self.strides, self.block, self.layout)


class Launch:
    """One kernel with its grid, numbers and constants, on one device. A call gives it its tensors: those that it reads
    in tiles come first among the kernel's arguments, then pointers, then the numbers.
    """

    def __init__(
        self,
        kernel: Any,
        num_programs: int,
        device: torch.device,
        *,
        tiles: Sequence[Tiles] = (),
        numbers: Sequence[float] = (),
        constants: dict[str, Any],
    ) -> None:
        self._kernel, self._grid, self._device = kernel, num_programs, device.index
        self._tiles, self._numbers, self._constants = tuple(tiles), tuple(numbers), constants
        self._start: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None] = self._compile

    def __call__(self, described: Sequence[Tensor], pointers: Sequence[Tensor | None]) -> None:
        self._start(described, pointers)

    def _compile(self, described: Sequence[Tensor], pointers: Sequence[Tensor | None]) -> None:
        descriptors = self._describe(described)
        compiled = self._kernel[(self._grid,)](*descriptors, *pointers, *self._numbers, **self._constants)
        given = len(descriptors) + len(pointers) + len(self._numbers)
        names = self._kernel.arg_names[given:]
        self._rest = (*self._numbers, *(self._constants[name] for name in names))
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._start = self._run_compiled
        if _HAS_C_LAUNCHER and not compiled.run.global_scratch_size and not compiled.run.profile_scratch_size:
            self._prepare_c_launcher(compiled)

    def _describe(self, described: Sequence[Tensor]) -> list[TensorDescriptor]:
        return [tiles.describe(one) for tiles, one in zip(self._tiles, described, strict=True)]

    def _run_compiled(self, described: Sequence[Tensor], pointers: Sequence[Tensor | None]) -> None:
        self._run(
            self._grid, 1, 1, torch._C._cuda_getCurrentRawStream(self._device), self._function, self._metadata,
            None, None, None, *self._describe(described), *pointers, *self._rest,
        )  # fmt: skip

    # --- Triton 3.6 ---

    def _prepare_c_launcher(self, compiled: Any) -> None:
        launcher = compiled.run
        self._launch = launcher.launch
        self._fills: list[Callable[[int], tuple[Any, ...]]] = []
        if self._tiles:
            closure = inspect.getclosurevars(launcher.launch)
            self._launch = closure.nonlocals["launcher"]
            self._fills = [
                _make_fill(tiles, meta)
                for tiles, meta in zip(self._tiles, closure.nonlocals["tensordesc_meta"], strict=True)
            ]
        self._known: list[dict[int, tuple[Any, ...]]] = [{} for _ in self._fills]
        self._modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        self._start = self._run_c_launcher

    def _run_c_launcher(self, described: Sequence[Tensor], pointers: Sequence[Tensor | None]) -> None:
        arguments: list[Any] = []
        for known, fill, tensor in zip(self._known, self._fills, described, strict=True):
            address = tensor.data_ptr()
            filled = known.get(address)
            if filled is None:
                if len(known) >= _MOST_ADDRESSES:
                    known.clear()
                filled = known[address] = fill(address)
            arguments += filled
        # Addresses rather than tensors: the launcher does not ask the driver about them.
        arguments += [None if one is None else one.data_ptr() for one in pointers]
        self._launch(
            self._grid, 1, 1, torch._C._cuda_getCurrentRawStream(self._device), self._function, *self._modes,
            None, None, self._metadata, None, None, None, *arguments, *self._rest,
        )  # fmt: skip


def _make_fill(tiles: Tiles, meta: dict[str, Any]) -> Callable[[int], tuple[Any, ...]]:
    """A function from an address to the arguments that stand for a descriptor: it, the shape and the strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    kind = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
    shape, strides = tiles.shape, tiles.strides
    return lambda address: (fill(address, *kind, shape, strides, 0), *shape, *strides)
