"""`torch._grouped_mm` on fake CUDA tensors: the products of a mixture of experts, one per expert, in one call.

Which rows belong to which expert is a tensor of offsets, so no shape depends on a value. PyTorch's own fake takes bf16
only, and pads results only in a build with CUDA. What a GPU does is in PyTorch's GroupedBlas.cpp, versions 2.11 to
2.13: bf16 on Hopper and data center Blackwell is one CUTLASS kernel, everything else a loop that reads the offsets,
which waits for the GPU, and calls cuBLAS for every group.
"""

import torch
from torch import Tensor

from stepscope.planner.assumptions import Accelerator

_ALIGNMENT_BYTES = 16  # of rows
_DESCRIPTOR_BYTES = 128  # of a matrix, for the copy engine; each multiprocessor has its own
_SMALL = 128  # rows or columns per group: then two groups of warps take turns, and each has a descriptor to write with


def multiply_groups(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result without values. Rows start at multiples of 16 bytes. Raise RuntimeError for what CUDA rejects."""
    for one in (left, right):
        _check_rows(one)
    if left.dtype != right.dtype or bias is not None:
        raise RuntimeError(f"_grouped_mm takes two matrices of one dtype, got {left.dtype} and {right.dtype}")
    is_ragged = left.dim() == 2 or right.dim() == 2
    if is_ragged != (offs is not None) or (left.dim() + right.dim() > 4 and left.shape[-1] != right.shape[-2]):
        raise RuntimeError(f"_grouped_mm cannot multiply {tuple(left.shape)} by {tuple(right.shape)}")
    rows, columns = left.shape[-2], right.shape[-1]
    shape = (rows, columns) if left.dim() != right.dim() else (count_groups(left, right, offs), rows, columns)
    dtype = out_dtype or left.dtype
    step = _ALIGNMENT_BYTES // dtype.itemsize
    padded = -(-columns // step) * step
    stride = (padded, 1) if len(shape) == 2 else (rows * padded, padded, 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=left.device)


def is_one_kernel(left: Tensor, gpu: Accelerator) -> bool:
    """Whether the GPU multiplies all groups in one kernel."""
    return left.dtype == torch.bfloat16 and gpu.capability[0] in (9, 10)


def count_groups(left: Tensor, right: Tensor, offs: Tensor | None) -> int:
    return len(offs) if offs is not None else (left if left.dim() == 3 else right).shape[0]


def workspace_bytes(left: Tensor, right: Tensor, offs: Tensor | None, gpu: Accelerator) -> list[int]:
    """What the kernel takes: a pointer, strides and sizes of each group's matrices, and descriptors of matrices."""
    groups = count_groups(left, right, offs)
    rows = left.shape[-2] // (groups if left.dim() == 2 != right.dim() else 1)
    columns = right.shape[-1] // (groups if right.dim() == 2 != left.dim() else 1)
    takes_turns = gpu.capability[0] == 9 and (rows <= _SMALL or columns <= _SMALL)
    descriptors = 2 + 2 + takes_turns  # operands, what is added and what is written
    return [24 * (groups + groups % 2) + 36 * groups, descriptors * _DESCRIPTOR_BYTES * gpu.multiprocessors]


def _check_rows(x: Tensor) -> None:
    rows, columns = x.shape[-2:]
    row, column = x.stride()[-2:]
    step = column if row == 1 and column >= max(1, rows) else row if column == 1 and row >= max(1, columns) else 0
    if x.dim() not in (2, 3) or not step or step * x.element_size() % _ALIGNMENT_BYTES:
        raise RuntimeError(
            f"_grouped_mm takes rows that start at multiples of {_ALIGNMENT_BYTES} bytes, got shape {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
