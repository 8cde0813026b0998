"""Tensors as the bulk copy engine (TMA) sees them. Which it can see at all, `tma.is_tma_able` says."""

# B batch, H heads, L length, D head dim.

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stepscope.kernels.attention.tma import tma_strides

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def describe(x_BHLD: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x in tiles of rows × columns of one head. What lies outside reads as zero and is not written."""
    layout = _tile_layout(rows, columns, x_BHLD.dtype)
    return _describe(x_BHLD, list(x_BHLD.shape), tma_strides(x_BHLD), [1, 1, rows, columns], layout)


def describe_rows(x_NL: Tensor, length: int) -> TensorDescriptor:
    """A matrix of numbers, one a row of a head, in pieces of a tile's length."""
    return _describe(x_NL, list(x_NL.shape), list(x_NL.stride()), [1, length], ROWS_LAYOUT)


def _describe(
    x: Tensor, sizes: list[int], strides: list[int], block: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """A descriptor without its constructor, whose checks were made already (`tma.is_tma_able`) and take six times
    as long as the rest. A backward pass has nine descriptors, and on short sequences the host is what one waits for."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, sizes, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor


ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@functools.cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _GLUON_TYPES[dtype])


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
