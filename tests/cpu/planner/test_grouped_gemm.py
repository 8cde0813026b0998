"""Grouped products: their results, what CUDA rejects, and what the kernel takes."""

import pytest
import torch
from torch import Tensor

from stepscope.planner.assumptions import Accelerator
from stepscope.planner.grouped_gemm import is_one_kernel, multiply_groups, workspace_bytes

H200 = Accelerator(name="H200 SXM", capability=(9, 0), multiprocessors=132, memory_bytes=2**37)
A100 = Accelerator(name="A100 SXM 80GB", capability=(8, 0), multiprocessors=108, memory_bytes=2**36)


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OFFSETS = matrix(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("left", "right", "offsets", "shape"),
    [
        (matrix(96, 64), matrix(4, 64, 32), OFFSETS, (96, 32)),
        (matrix(64, 96), matrix(96, 32), OFFSETS, (4, 64, 32)),
        (matrix(4, 64, 32), matrix(32, 96), OFFSETS, (64, 96)),
        (matrix(4, 64, 32), matrix(4, 32, 96), None, (4, 64, 96)),
    ],
)
def test_which_dimension_is_split_follows_from_the_shapes(
    left: Tensor, right: Tensor, offsets: Tensor | None, shape: tuple[int, ...]
) -> None:
    found = multiply_groups(left, right, offsets)
    assert found.shape == shape
    assert found.dtype == torch.bfloat16


def test_rows_of_results_start_at_multiples_of_16_bytes() -> None:
    found = multiply_groups(matrix(96, 64), matrix(4, 60, 64).transpose(-2, -1), OFFSETS)
    assert found.shape == (96, 60)
    assert found.stride() == (64, 1)


@pytest.mark.parametrize(
    ("left", "right", "offsets"),
    [
        (matrix(96, 60), matrix(4, 60, 32), OFFSETS),  # rows of 120 bytes
        (matrix(96, 1).expand(96, 64), matrix(4, 64, 32), OFFSETS),
        (matrix(96, 64), matrix(4, 64, 32), None),
        (matrix(96, 64), matrix(4, 32, 64), OFFSETS),
        (matrix(96, 64), matrix(4, 64, 32, dtype=torch.float32), OFFSETS),
    ],
)
def test_what_cuda_rejects_is_rejected(left: Tensor, right: Tensor, offsets: Tensor | None) -> None:
    with pytest.raises(RuntimeError, match="_grouped_mm"):
        multiply_groups(left, right, offsets)


def test_only_bf16_on_hopper_is_one_kernel() -> None:
    assert is_one_kernel(matrix(96, 64), H200)
    assert not is_one_kernel(matrix(96, 64), A100)
    assert not is_one_kernel(matrix(96, 64, dtype=torch.float32), H200)


def test_small_groups_have_one_descriptor_more() -> None:
    small = workspace_bytes(matrix(96, 64), matrix(4, 64, 512), OFFSETS, H200)
    large = workspace_bytes(matrix(4096, 64), matrix(4, 64, 512), OFFSETS, H200)
    assert small[0] == large[0] == 4 * 60
    assert small[1] - large[1] == 128 * 132
