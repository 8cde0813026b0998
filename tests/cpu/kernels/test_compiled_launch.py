"""Repeated launches with a stand-in for Triton: what reaches its launchers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.experimental.gluon import language as gl

from stepscope.kernels.attention.hopper import compiled_launch
from stepscope.kernels.attention.hopper.compiled_launch import Launch, Tiles

DEVICE = torch.device("cuda", 0)
STREAM = 77
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
TILES = Tiles([4, 8], [8, 1], [1, 8], LAYOUT)
META = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 8], "fp4_padded": False}


@dataclass
class Kernel:
    """A kernel with a descriptor, a pointer, two numbers and a constant."""

    has_tiles: bool = True
    compiled: list[tuple[Any, ...]] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def arg_names(self) -> list[str]:
        return [*(["x_desc"] if self.has_tiles else []), "pointer", "scale", "length", "D"]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append((grid, arguments, constants))
            return SimpleNamespace(run=self._make_launcher(), function=5, packed_metadata=(4, 1, 0))

        return run

    def _make_launcher(self) -> Any:
        def launcher(*arguments: Any) -> None:
            self.launched.append(("c", *arguments))

        tensordesc_meta = [META]

        def wrapper(*arguments: Any) -> Any:
            return launcher, tensordesc_meta, arguments

        kernel = self

        class Run:
            global_scratch_size = profile_scratch_size = 0
            launch_cooperative_grid, launch_pdl = False, True
            launch = staticmethod(wrapper if kernel.has_tiles else launcher)

            def __call__(self, *arguments: Any) -> None:
                kernel.launched.append(("python", *arguments))

        return Run()


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: STREAM + number, raising=False)


def make_launch(kernel: Kernel, tiles: Sequence[Tiles] = (TILES,)) -> Launch:
    return Launch(kernel, 12, DEVICE, tiles=tiles, numbers=(0.5, 100), constants={"D": 64, "num_warps": 4})


def use_c_launcher(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    filled: list[tuple[Any, ...]] = []

    def fill(*arguments: Any) -> str:
        filled.append(arguments)
        return f"map {len(filled)}"

    monkeypatch.setattr(compiled_launch, "_HAS_C_LAUNCHER", True)
    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=fill))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return filled


def tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8), torch.zeros(3)


def test_the_first_call_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_launch, "_HAS_C_LAUNCHER", False)
    kernel = Kernel()
    x, pointer = tensors()
    launch = make_launch(kernel)
    launch((x,), (pointer,))
    ((grid, (descriptor, *rest), constants),) = kernel.compiled
    assert grid == (12,)
    assert (descriptor.base is x, descriptor.shape, descriptor.strides) == (True, [4, 8], [8, 1])
    assert (descriptor.block_shape, descriptor.layout) == ([1, 8], LAYOUT)
    assert rest == [pointer, 0.5, 100]
    assert constants == {"D": 64, "num_warps": 4}
    assert kernel.launched == []


def test_later_calls_give_the_kernel_new_tensors_and_the_old_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_launch, "_HAS_C_LAUNCHER", False)
    kernel = Kernel()
    launch = make_launch(kernel)
    launch(tensors()[:1], tensors()[1:])
    x, pointer = tensors()
    launch((x,), (pointer,))
    ((way, *started, descriptor, address, scale, length, constant),) = kernel.launched
    assert way == "python"
    assert started == [12, 1, 1, STREAM, 5, (4, 1, 0), None, None, None]
    assert descriptor.base is x
    assert (address is pointer, scale, length, constant) == (True, 0.5, 100, 64)
    assert len(kernel.compiled) == 1


def test_the_launcher_in_c_gets_addresses_and_keeps_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = use_c_launcher(monkeypatch)
    kernel = Kernel()
    launch = make_launch(kernel)
    x, pointer = tensors()
    other = torch.zeros(4, 8)
    launch((x,), (pointer,))
    for one, given in ((x, pointer), (x, None), (other, pointer), (x, pointer)):
        launch((one,), (given,))
    maps = [arguments[14] for arguments in kernel.launched]
    assert maps == ["map 1", "map 1", "map 2", "map 1"]
    way, *started, first_map, rows, columns, row_stride, column_stride, address, scale, length, constant = (
        kernel.launched[0]
    )
    assert way == "c"
    assert started == [12, 1, 1, STREAM, 5, False, True, None, None, (4, 1, 0), None, None, None]
    assert (first_map, rows, columns, row_stride, column_stride) == ("map 1", 4, 8, 8, 1)
    assert (address, scale, length, constant) == (pointer.data_ptr(), 0.5, 100, 64)
    assert kernel.launched[1][19] is None
    assert [one[0] for one in filled] == [x.data_ptr(), other.data_ptr()]
    assert filled[0][1:] == (3, 4, 7, [1, 8], [4, 8], [8, 1], 0)


def test_a_kernel_without_descriptors_has_no_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    use_c_launcher(monkeypatch)
    kernel = Kernel(has_tiles=False)
    launch = make_launch(kernel, tiles=())
    pointer = torch.zeros(3)
    launch((), (pointer,))
    launch((), (pointer,))
    assert kernel.launched[0][14:] == (pointer.data_ptr(), 0.5, 100, 64)


def test_descriptors_of_many_addresses_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = use_c_launcher(monkeypatch)
    monkeypatch.setattr(compiled_launch, "_MOST_ADDRESSES", 2)
    launch = make_launch(Kernel())
    kept = [torch.zeros(4, 8) for _ in range(4)]
    for x in (kept[0], *kept, *kept):
        launch((x,), (None,))
    assert len(filled) == 8
    assert len(launch._known[0]) <= 2
