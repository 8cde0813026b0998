"""Memory that CUDA kernels take for themselves: temporaries that an operator's results do not show."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stepscope.planner.assumptions import Accelerator
from stepscope.planner.grouped_gemm import is_one_kernel, workspace_bytes

aten = torch.ops.aten
# Constants of PyTorch's reductions: elements per vector load, the least elements for one, threads per block, elements
# that make a thread worth its while, and the most that one takes before the work is split over blocks.
_VECTOR, _VECTOR_LEAST, _MOST_THREADS, _PER_ROW, _PER_THREAD, _WARP = 4, 128, 512, 16, 256, 32
_CHUNK = 1 << 16  # elements that a block of a kernel for many tensors takes
_MULTIPLIES = frozenset(
    {
        aten.mm.out,
        aten.bmm.out,
        aten.addmm.out,
        aten.baddbmm.out,
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
_ADDS_BIAS = frozenset({aten.addmm.default, aten.addmm.out})

# Libraries that take memory by rules of their own, by operator.
UNKNOWN_WORKSPACES = {
    **dict.fromkeys(("aten.convolution.default", "aten.convolution_backward.default"), "convolutions"),
    **dict.fromkeys(
        (
            "aten._linalg_svd.default",
            "aten._linalg_eigh.default",
            "aten.linalg_qr.default",
            "aten.linalg_inv_ex.default",
            "aten._linalg_solve_ex.default",
            "aten.linalg_cholesky_ex.default",
        ),
        "cuSOLVER",
    ),
    **dict.fromkeys(("aten._fft_r2c.default", "aten._fft_c2r.default", "aten._fft_c2c.default"), "cuFFT"),
}


def workspaces(func: Any, args: tuple[Any, ...], gpu: Accelerator) -> Iterator[tuple[str, int]]:
    """The libraries that the kernel of an operator needs, each with the bytes that it keeps for a thread."""
    if func in _MULTIPLIES or (func is aten._grouped_mm.default and not is_one_kernel(args[0], gpu)):
        yield "cuBLAS", gpu.cublas_workspace_bytes
    if func in _ADDS_BIAS and args[0].dim() == 1 and gpu.cublaslt_workspace_bytes:
        yield "cuBLASLt", gpu.cublaslt_workspace_bytes


def on_cpu(func: Any) -> tuple[int, ...]:
    """The results of an operator that are on the CPU, although their fakes are not: random seeds and offsets."""
    return (2, 3) if func is aten._scaled_dot_product_efficient_attention.default else ()


def temporary_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], gpu: Accelerator
) -> list[int]:
    """The sizes of what the kernel of an operator takes at once."""
    if func.namespace == "stepscope":
        return own_backward_bytes(args, gpu) if "attention_backward" in func.__name__ else []
    estimate = _ESTIMATES.get(func)
    return [] if estimate is None else [size for size in estimate(args, kwargs, outputs, gpu) if size > 0]


# --- Reductions -------------------------------------------------------------------------------------------------------


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any], _outputs: Any, gpu: Accelerator) -> list[int]:
    return _reduce(args[0], args[1] if len(args) > 1 else kwargs.get("dim"), kwargs, gpu)


def _norm(args: tuple[Any, ...], kwargs: dict[str, Any], _outputs: Any, gpu: Accelerator) -> list[int]:
    return _reduce(args[0], args[2] if len(args) > 2 else kwargs.get("dim"), kwargs, gpu)


def _norms(args: tuple[Any, ...], *_: Any) -> list[int]:
    """A partial norm per chunk. Every tensor gets as many as the largest one has chunks."""
    chunks = max(-(-one.numel() // _CHUNK) for one in args[0])
    return [len(args[0]) * chunks * max(4, args[0][0].element_size())]


def _reduce(x: Tensor, dims: Any, kwargs: dict[str, Any], gpu: Accelerator) -> list[int]:
    dtype = kwargs.get("dtype") or x.dtype
    return reduction_bytes(x, dims, max(4, dtype.itemsize), gpu)


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


def _safe_softmax(args: tuple[Any, ...], *_: Any) -> list[int]:
    """Which scores are hidden, and in which rows all are; those rows become zero."""
    scores, dim = args[:2]
    return [scores.numel(), scores.numel() // scores.shape[dim]]


def _softmax_backward(args: tuple[Any, ...], *_: Any) -> list[int]:
    """The product of gradient and output."""
    grad, output = args[:2]
    return [output.numel() * max(grad.element_size(), output.element_size())]


# --- Attention --------------------------------------------------------------------------------------------------------

# Measured on an H200 with PyTorch 2.11 and cuDNN 9.19, lengths 256 to 16384 and head dimensions 16 to 128: these
# formulas give every byte.


def _flash_forward(args: tuple[Any, ...], _kwargs: Any, _outputs: Any, gpu: Accelerator) -> list[int]:
    """Partial outputs and sums, if the keys are split over thread blocks because there are few queries."""
    query, key = args[:2]
    batch, heads, length, dim = query.shape
    if (args[3] if len(args) > 3 else 0.0) > 0:
        return []
    block = 256 if dim <= 64 else 128 if dim <= 128 else 64
    splits = _count_splits(batch * heads * -(-length // 64), 2 * gpu.multiprocessors, -(-key.shape[2] // block))
    if splits == 1:
        return []
    return [splits * batch * heads * length * 4, splits * batch * heads * length * _round_up(dim, 32) * 4]


def _count_splits(tiles: int, multiprocessors: int, num_blocks: int) -> int:
    """How many parts flash attention splits the keys into: the fewest that keep 85% of the best occupancy."""
    if tiles >= 0.8 * multiprocessors:
        return 1
    most = min(128, multiprocessors, num_blocks)
    counts = [one for one in range(1, most + 1) if one == 1 or -(-num_blocks // one) != -(-num_blocks // (one - 1))]
    waves = {one: tiles * one / multiprocessors for one in counts}
    efficiency = {one: wave / math.ceil(wave) for one, wave in waves.items()}
    best = max(efficiency.values())
    return next(one for one in counts if efficiency[one] >= 0.85 * best)


def _flash_backward(args: tuple[Any, ...], _kwargs: Any, _outputs: Any, _gpu: Accelerator) -> list[int]:
    """The gradient of the queries in fp32, a number per query, and gradients of keys and values for every query
    head."""
    grad, query, key, value = args[:4]
    batch, heads, length, dim = query.shape
    rows, columns = _round_up(length, 128), _round_up(dim, 32 if dim <= 128 else 64)
    copies = [_copy_bytes(grad.transpose(1, 2))]
    return [*copies, 4 * batch * heads * rows, 4 * batch * heads * rows * columns, *_expanded(query, key, value)]


def _cudnn_backward(args: tuple[Any, ...], _kwargs: Any, _outputs: Any, _gpu: Accelerator) -> list[int]:
    """The gradient of the queries in fp32, and a number per query, in one workspace."""
    _, query, key, value = args[:4]
    batch, heads, length, dim = query.shape
    return [4 * batch * heads * length * (dim + 1) + LEAST_WORKSPACE + sum(_expanded(query, key, value))]


def _efficient_backward(args: tuple[Any, ...], _kwargs: Any, _outputs: Any, _gpu: Accelerator) -> list[int]:
    """In half precision the gradient of the queries in fp32, block by block with a lock each; in fp32 the product of
    output and gradient. Both with a number per query."""
    grad, query = args[:2]
    batch, heads, length, dim = query.shape
    numbers = 4 * batch * heads * length
    copies = [_copy_bytes(grad.transpose(1, 2))]
    if query.dtype == torch.float32:
        return [*copies, numbers * dim, numbers]
    block = 64 if dim <= 64 else 128
    blocks = batch * heads * -(-length // block)
    columns = -(-dim // block)
    return [*copies, numbers, blocks * columns * (4 * block * block + 16)]


def own_backward_bytes(args: tuple[Any, ...], gpu: Accelerator) -> list[int]:
    """What our own attention takes in backward: two numbers per query, and on Hopper the gradient of the queries in
    fp32."""
    query = args[1]
    batch, heads, length, dim = query.shape
    sums = [4 * query.numel()] if gpu.capability[0] == 9 and query.dtype != torch.float32 and dim <= 128 else []
    return [8 * batch * heads * _round_up(length, 128), *sums]


def _expanded(query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    """Gradients of keys and values with as many heads as queries have, before they are added up."""
    if query.shape[1] == key.shape[1]:
        return []
    return [one.numel() // one.shape[1] * query.shape[1] * one.element_size() for one in (key, value)]


def _copy_bytes(x: Tensor) -> int:
    return 0 if x.is_contiguous() else x.numel() * x.element_size()


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


# --- Products ---------------------------------------------------------------------------------------------------------


def _product(first: int) -> Callable[..., list[int]]:
    """Copies of the two matrices that start at this argument, if cuBLAS cannot read them."""

    def estimate(args: tuple[Any, ...], *_: Any) -> list[int]:
        return [one.numel() * one.element_size() for one in args[first : first + 2] if not _is_readable(one)]

    return estimate


def _is_readable(x: Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or a batch of them: one dimension has neighbors next to each other, and rows do
    not overlap."""
    rows, columns = x.shape[-2:]
    row, column = x.stride()[-2:]
    return x.is_contiguous() or (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any], _outputs: Any, gpu: Accelerator) -> list[int]:
    offs = args[2] if len(args) > 2 else kwargs.get("offs")
    return workspace_bytes(args[0], args[1], offs, gpu) if is_one_kernel(args[0], gpu) else []


# --- Indices ----------------------------------------------------------------------------------------------------------


def _sort_bytes(count: int) -> list[int]:
    """What it takes to sort indices with their positions: the positions, sorted copies of both, and cub's storage,
    which is for 4096 of them about 71 KB."""
    return [8 * count, 8 * count, 8 * count, *([71167 * count // 4096] if count > 1024 else [])]


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> list[int]:
    indices = [one for one in args[1] if one is not None]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulates or not indices or indices[0].dtype in (torch.bool, torch.uint8):
        return []
    count = math.prod(torch.broadcast_shapes(*(one.shape for one in indices)))  # type: ignore[no-untyped-call]
    return [8 * count, *_sort_bytes(count)]


def _embedding_backward(args: tuple[Any, ...], *_: Any) -> list[int]:
    """Many tokens are sorted, and their gradients are added up in parts of ten rows, in fp32."""
    grad, indices, num_weights = args[:3]
    count = indices.numel()
    copies = [_copy_bytes(grad)]
    if count <= _FEW_TOKENS:
        return copies
    segments = min(count, num_weights)
    parts = count // _ROWS_PER_PART + segments
    partial_bytes = parts * grad.shape[-1] * max(4, grad.element_size())
    return [*copies, 8 * count, 8 * count, 8 * segments, 8 * segments, 8 * segments, 8 * parts, partial_bytes]


_FEW_TOKENS, _ROWS_PER_PART = 3072, 10  # of PyTorch's Embedding.cu and EmbeddingBackwardKernel.cu
LEAST_WORKSPACE = 512


_ESTIMATES: dict[Any, Callable[..., list[int]]] = {
    **dict.fromkeys(
        (
            aten.sum.dim_IntList,
            aten.sum.default,
            aten.mean.dim,
            aten.mean.default,
            aten.amax.default,
        ),
        _reduction,
    ),
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norms,
    **dict.fromkeys((aten.mm.default, aten.mm.out, aten.bmm.default, aten.bmm.out), _product(0)),
    **dict.fromkeys(
        (aten.addmm.default, aten.addmm.out, aten.baddbmm.default, aten.baddbmm.out),
        _product(1),
    ),
    aten._grouped_mm.default: _grouped,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.embedding_dense_backward.default: _embedding_backward,
}
