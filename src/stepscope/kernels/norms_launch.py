"""Launches the kernels of the norms. `norms_kernels.py` contains and documents them."""

# N rows, M the width of a row.

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stepscope.kernels.devices import num_multiprocessors, on_device_of
from stepscope.kernels.norms_kernels import norm_backward, norm_forward, norm_sum_partials

WIDEST = 65536  # a whole row is in registers
SUM_COLUMNS, SUM_PARTS = 16, 128


class NormTile(NamedTuple):
    """How a kernel divides its work; the last two are only of backward."""

    block: int
    rows: int
    num_warps: int
    stages: int = 1
    programs_per_multiprocessor: int = 0


@cache
def forward_tile(width: int) -> NormTile:
    """32 elements per thread: enough loads at once to use the bandwidth, and one warp for rows of up to 1024."""
    block = triton.next_power_of_2(width)
    return NormTile(block=block, rows=max(1, 1024 // block), num_warps=min(32, max(1, block // 1024)))


@cache
def backward_tile(width: int) -> NormTile:
    """16 elements per thread, while the next 16 are on their way to shared memory. Fewer, larger programs than in
    forward: each writes its own part of the gradient of the weight.
    """
    block = triton.next_power_of_2(width)
    num_warps = 8 if block <= 4096 else 16 if block <= 16384 else 32
    return NormTile(
        block=block,
        rows=max(1, 4096 // block),
        num_warps=num_warps,
        stages=2 if block <= 8192 else 1,  # wider tiles do not fit into shared memory
        programs_per_multiprocessor=2 if block <= 8192 else 1,
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
    x_NM, branch_NM = _as_rows(x), None if branch is None else _as_rows(branch)
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
            VECTOR=_vector(total, y),
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
    dy_NM, x_NM, d_total_NM = _as_rows(dy), _as_rows(x), None if d_total is None else _as_rows(d_total)
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
        VECTOR=_vector(dx, d_branch),
        CENTERED=statistics.shape[0] == 2,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
    )


def _sum_parts(parts: list[Tensor | None], weight_M: Tensor, num_programs: int) -> list[Tensor | None]:
    sums = [None if part is None else torch.empty_like(weight_M) for part in parts]
    if any(part is not None for part in parts):
        width = weight_M.shape[0]
        norm_sum_partials[triton.cdiv(width, SUM_COLUMNS),](
            *parts, *sums, num_programs, WIDTH=width, COLUMNS=SUM_COLUMNS, PARTS=SUM_PARTS, num_warps=4
        )
    return sums


def _count_programs(num_rows: int, tile: NormTile, device: torch.device) -> int:
    """As many as fit on the GPU at once, or fewer if they then have as many rows: the last would have had little to
    do, and each writes a part of the gradient.
    """
    num_tiles = triton.cdiv(num_rows, tile.rows)
    most = num_multiprocessors(device) * tile.programs_per_multiprocessor
    return triton.cdiv(num_tiles, triton.cdiv(num_tiles, most))


def _vector(*written: Tensor | None) -> int:
    """16 bytes of the widest dtype written."""
    return 16 // max(x.element_size() for x in written if x is not None)


def _as_rows(x: Tensor) -> Tensor:
    """x as (N, M) with neighboring elements of a row next to each other; in place if rows are equally far apart."""
    x_NM = x.reshape(-1, x.shape[-1])
    return x_NM if x_NM.stride(1) == 1 else x_NM.contiguous()
