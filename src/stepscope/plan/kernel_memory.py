"""Memory that CUDA kernels take for themselves: temporaries that an operator's results do not show."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.plan.assumptions import Accelerator

aten = torch.ops.aten
# Constants of PyTorch's reductions: elements per vector load, the least elements for one, threads per block, elements
# that make a thread worth its while, and the most that one takes before the work is split over blocks.
_VECTOR, _VECTOR_LEAST, _MOST_THREADS, _PER_ROW, _PER_THREAD, _WARP = 4, 128, 512, 16, 256, 32
MULTIPLIES = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
        aten._scaled_mm.default,
    }
)


_ATTENTION_TAIL = (2, 3, 4, 5)  # random state and debug outputs, which are on the CPU or empty


def on_cpu(func: Any) -> tuple[int, ...]:
    """The results of an operator that are on the CPU, although their fakes are not: random seeds and offsets."""
    return (2, 3) if func is aten._scaled_dot_product_efficient_attention.default else ()


def temporary_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], gpu: Accelerator
) -> list[int]:
    """The sizes of what the kernel of an operator takes at once."""
    estimate = _ESTIMATES.get(func)
    return [] if estimate is None else [size for size in estimate(args, kwargs, outputs, gpu) if size > 0]


# --- Reductions -------------------------------------------------------------------------------------------------------


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], gpu: Accelerator) -> list[int]:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dtype = kwargs.get("dtype") or args[0].dtype
    return reduction_bytes(args[0], dims, max(4, dtype.itemsize), gpu)


def reduction_bytes(x: Tensor, dims: Any, sum_bytes: int, gpu: Accelerator) -> list[int]:
    """What a reduction across thread blocks takes: partial results, and a counter per output tile. None if each output
    is reduced within a block. It follows `setReduceConfig` in PyTorch's Reduce.cuh: `sum_bytes` is the size of a
    partial result."""
    dims = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    reduced = {dim % x.dim() for dim in dims} if x.dim() else set()
    inner = _coalesce(x, reduced)
    outer = _coalesce(x, set(range(x.dim())) - reduced)
    if not x.numel() or not inner:
        return []
    num_inputs = math.prod(size for _, size in inner)
    num_outputs = math.prod(size for _, size in outer)
    return _blocks(x, inner, outer, num_inputs, num_outputs, sum_bytes, gpu)


def _coalesce(x: Tensor, dims: set[int]) -> list[tuple[int, int]]:
    """Strides in elements and sizes of these dimensions, from the smallest stride, neighbors merged."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted((x.stride(dim), x.size(dim)) for dim in dims if x.size(dim) != 1):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _blocks(
    x: Tensor,
    inner: list[tuple[int, int]],
    outer: list[tuple[int, int]],
    num_inputs: int,
    num_outputs: int,
    sum_bytes: int,
    gpu: Accelerator,
) -> list[int]:
    along_rows = not outer or inner[0][0] < outer[0][0]  # threads of a warp reduce neighbors
    width, height = (num_inputs, num_outputs) if along_rows else (num_outputs, num_inputs)
    vector = 1
    if (inner if along_rows else outer)[0][0] == 1:
        if along_rows and width >= _VECTOR_LEAST and len(inner) == 1:
            width //= _VECTOR
        elif not along_rows:
            vector = _output_vector(x, inner, outer)
            width //= vector
    most = _MOST_THREADS // vector
    columns, rows = _block_shape(width, height, most)
    per_step, outputs_per_block = (columns, 1) if along_rows else (1, columns)
    if -(-num_inputs // per_step) >= min(rows * _PER_ROW, _PER_THREAD):
        per_step *= rows
        in_columns = True
    else:
        outputs_per_block *= rows
        in_columns = False
    values = -(-num_inputs // per_step)
    grid = -(-(num_outputs // vector) // outputs_per_block)
    target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (columns * rows))
    if not in_columns or values < _PER_THREAD or grid > target:
        return []
    across = max(min(-(-target // grid), -(-values // _PER_ROW)), -(-values // _PER_THREAD))
    if across <= 1:
        return []
    partial = sum_bytes * num_outputs * across * (1 if along_rows else columns * vector)
    return [partial, 4 * grid]


def _output_vector(x: Tensor, inner: list[tuple[int, int]], outer: list[tuple[int, int]]) -> int:
    """How many neighboring outputs a thread reduces at once."""
    vector = _VECTOR
    steps = [outer[0][1], x.storage_offset(), *(stride for stride, _ in (*inner, *outer[1:]))]
    while any(step % vector for step in steps):
        vector //= 2
    return vector


def _block_shape(width: int, height: int, most: int) -> tuple[int, int]:
    columns, rows = (_power_of_two(size) if size < most else most for size in (width, height))
    across = min(columns, _WARP)
    rows = min(rows, most // across)
    return min(columns, most // rows), rows


def _power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1) if size > 0 else 1


_ESTIMATES: dict[Any, Callable[..., list[int]]] = {
    **dict.fromkeys(
        (
            aten.sum.dim_IntList,
            aten.sum.default,
            aten.mean.dim,
            aten.mean.default,
            aten.amax.default,
            aten.linalg_vector_norm.default,
        ),
        _reduction,
    ),
}
