"""Launches the kernels of the norms. `norms_kernels.py` contains and documents them."""

# N rows, M the width of a row.

import torch
import triton
from torch import Tensor

from stepscope.kernels.launch import as_rows, num_multiprocessors, on_device_of, vector_elements
from stepscope.kernels.norms_kernels import (
    SUM_COLUMNS,
    SUM_PARTS,
    SUM_WARPS,
    WIDEST,
    NormTile,
    backward_tile,
    forward_tile,
    norm_backward,
    norm_forward,
    norm_sum_partials,
)


def forward(
    x: Tensor,
    branch: Tensor | None,
    weight_M: Tensor,
    bias_M: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return x + branch (None without a branch), y in `dtype` and the statistics of each row."""
    width = x.shape[-1]
    if width > WIDEST:
        raise ValueError(f"norms take rows of up to {WIDEST} elements, but got {width}")
    tile = forward_tile(width)
    x_NM, branch_NM = as_rows(x), None if branch is None else as_rows(branch)
    total = None if branch is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))
    y = x.new_empty(x.shape, dtype=dtype)
    statistics = x.new_empty((1 + centered, *x.shape[:-1]), dtype=torch.float32)
    if x.numel() == 0:
        return total, y, statistics
    num_rows = x_NM.shape[0]
    with on_device_of(x):
        norm_forward[triton.cdiv(num_rows, tile.rows),](
            x_NM,
            branch_NM,
            weight_M.contiguous(),
            None if bias_M is None else bias_M.contiguous(),
            total,
            y,
            statistics,
            num_rows,
            x_NM.stride(0),
            None if branch_NM is None else branch_NM.stride(0),
            eps,
            WIDTH=width,
            BLOCK=tile.block,
            ROWS=tile.rows,
            VECTOR=vector_elements(total, y),
            CENTERED=centered,
            num_warps=tile.num_warps,
        )
    return total, y, statistics


def backward(
    dy: Tensor,
    d_total: Tensor | None,
    x: Tensor,
    weight_M: Tensor,
    statistics: Tensor,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    """Return dx; dx again for the branch if the two dtypes differ; the gradients of weight and bias that are wanted,
    in the weight's dtype. `x` is the sum where forward added a branch.
    """
    width = x.shape[-1]
    dx = x.new_empty(x.shape, dtype=dtypes[0])
    d_branch = x.new_empty(x.shape, dtype=dtypes[1]) if dtypes[0] != dtypes[1] else None
    wants = (weight_grad, bias_grad)
    sums = [torch.zeros_like(weight_M) if want and x.numel() == 0 else None for want in wants]
    if x.numel():
        tile = backward_tile(width)
        num_programs = _count_programs(x.numel() // width, tile, x.device)
        parts = [x.new_empty((num_programs, width), dtype=torch.float32) if want else None for want in wants]
        with on_device_of(x):
            _launch_backward(dy, d_total, x, weight_M, statistics, dx, d_branch, parts, num_programs, tile)
            sums = _sum_parts(parts, weight_M, num_programs)
    return [result for result in (dx, d_branch, *sums) if result is not None]


def _launch_backward(
    dy: Tensor,
    d_total: Tensor | None,
    x: Tensor,
    weight_M: Tensor,
    statistics: Tensor,
    dx: Tensor,
    d_branch: Tensor | None,
    parts: list[Tensor | None],
    num_programs: int,
    tile: NormTile,
) -> None:
    dy_NM, x_NM, d_total_NM = as_rows(dy), as_rows(x), None if d_total is None else as_rows(d_total)
    norm_backward[num_programs,](
        dy_NM,
        d_total_NM,
        x_NM,
        weight_M.contiguous(),
        statistics,
        dx,
        d_branch,
        *parts,
        x_NM.shape[0],
        dy_NM.stride(0),
        None if d_total_NM is None else d_total_NM.stride(0),
        x_NM.stride(0),
        WIDTH=x.shape[-1],
        BLOCK=tile.block,
        ROWS=tile.rows,
        VECTOR=vector_elements(dx, d_branch),
        CENTERED=statistics.shape[0] == 2,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        maxnreg=tile.registers,
    )


def _sum_parts(parts: list[Tensor | None], weight_M: Tensor, num_programs: int) -> list[Tensor | None]:
    sums = [None if part is None else torch.empty_like(weight_M) for part in parts]
    if any(part is not None for part in parts):
        width = weight_M.shape[0]
        norm_sum_partials[triton.cdiv(width, SUM_COLUMNS),](
            *parts, *sums, num_programs, WIDTH=width, COLUMNS=SUM_COLUMNS, PARTS=SUM_PARTS, num_warps=SUM_WARPS
        )
    return sums


def _count_programs(num_rows: int, tile: NormTile, device: torch.device) -> int:
    """As many as fit on the GPU at once, or fewer if they then have as many rows: the last would have had little to
    do, and each writes a part of the gradient.
    """
    num_tiles = triton.cdiv(num_rows, tile.rows)
    most = num_multiprocessors(device) * tile.programs_per_multiprocessor
    count: int = triton.cdiv(num_tiles, triton.cdiv(num_tiles, most))
    return count
