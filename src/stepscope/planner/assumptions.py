"""What a simulation assumes about the GPU and PyTorch: facts that fake tensors cannot know, in one place.

| fact | from |
| --- | --- |
| compute capability and multiprocessors of a GPU | NVIDIA's data sheets |
| which kernel `scaled_dot_product_attention` takes | PyTorch's `sdp_utils.cpp`, versions 2.11 to 2.13 |
| workspaces of cuBLAS and cuBLASLt | PyTorch's `CublasHandlePool.cpp`; for each thread, kept until the process ends |
| CUDA context | measured: what the driver and PyTorch's kernels take before the first tensor |
"""

from typing import Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.hardware import Hardware, chip_of, known
from stepscope.units import MIB

CONTEXT_BYTES = 770 * MIB  # 751 to 769 MiB on an H200 with PyTorch 2.11, once cuBLAS and cuDNN are loaded
SdpaKernel = Literal["cudnn", "flash", "efficient", "math"]
SDPA_WORDS: dict[SdpaKernel, str] = {
    "cudnn": "cuDNN's kernel",
    "flash": "the flash kernel",
    "efficient": "the memory-efficient kernel",
    "math": "no fused kernel, so the scores are kept",
}
HALF = ("float16", "bfloat16")
SHARES_WORKSPACES = (2, 12)  # from this version of PyTorch on, cuBLASLt takes the workspace of cuBLAS
DROPOUT_CHECKED = (2, 13)  # from this version of PyTorch on, cuDNN gets dropout only in sixteenths; 2.11 gave it any


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU to predict for. `memory_bytes` is all of it, including what the CUDA context takes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    threads_per_multiprocessor: int = 2048
    torch: tuple[int, int] = (2, 13)  # version whose choice of kernels is assumed

    @property
    def prefers_cudnn(self) -> bool:
        """Whether SDPA asks cuDNN first. PyTorch prefers it on Hopper and on data center Blackwell."""
        return self.capability[0] in (9, 10)

    @property
    def cublas_workspace_bytes(self) -> int:
        return 32 * MIB if self.capability[0] == 9 else 8320 * 1024

    @property
    def cublaslt_workspace_bytes(self) -> int:
        """What cuBLASLt, which adds a bias to a product, keeps besides. Steps measured with 2.11 have exactly that."""
        return 0 if self.torch >= SHARES_WORKSPACES else MIB

    @property
    def context_bytes(self) -> int:
        return CONTEXT_BYTES


_HALF_OCCUPANCY = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}  # threads per multiprocessor, where not 2048


def accelerator_of(card: Hardware) -> Accelerator:
    """The GPU of a line in `hardware`. StepscopeError for one whose allocator and kernels are not modelled."""
    chip = chip_of(card)
    if chip is None or card.memory_bytes is None:
        raise StepscopeError(
            f"memory on `{card.name}` cannot be predicted",
            detail=f"expected one of {', '.join(one.name for one in known() if chip_of(one))}",
            hint="--gpu H200",
        )
    return Accelerator(
        name=card.name,
        capability=chip.capability,
        multiprocessors=chip.multiprocessors,
        memory_bytes=card.memory_bytes,
        threads_per_multiprocessor=_HALF_OCCUPANCY.get(chip.capability, 2048),
    )


class AttentionCall(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which kernel a call of `scaled_dot_product_attention` takes. Lengths and dimensions are those of
    queries, keys and values, in this order."""

    dtype: str
    same_dtype: bool
    num_dims: int
    batches: tuple[int, int, int]
    heads: tuple[int, int, int]
    lengths: tuple[int, int]
    dims: tuple[int, int, int]
    packed: bool  # whether the elements of a head are next to each other
    has_mask: bool
    mask_fits: bool  # whether cuDNN takes the shape of the mask
    mask_learns: bool  # whether the mask has a gradient, such as a learned position bias
    is_causal: bool
    dropout: float
    enable_gqa: bool
    needs_grad: bool


def choose_sdpa(call: AttentionCall, gpu: Accelerator, enabled: frozenset[SdpaKernel]) -> SdpaKernel:
    """The kernel that PyTorch takes: the first in its order that is enabled and supports the call."""
    supports = {"cudnn": _cudnn_takes, "flash": _flash_takes, "efficient": _efficient_takes}
    order: tuple[SdpaKernel, ...] = ("flash", "efficient", "math", "cudnn")
    if gpu.prefers_cudnn:
        order = ("cudnn", "flash", "efficient", "math")
    for kernel in order:
        if kernel in enabled and (kernel == "math" or supports[kernel](call, gpu)):
            return kernel
    return "math"


def _is_dense(call: AttentionCall, *, grouped: bool) -> bool:
    if call.num_dims != 4 or len(set(call.batches)) > 1 or 0 in call.lengths or not call.packed or not call.same_dtype:
        return False
    queries, keys, values = call.heads
    if call.enable_gqa and grouped:
        return keys == values and queries % keys == 0
    return queries == keys == values


def _cudnn_takes(call: AttentionCall, gpu: Accelerator) -> bool:
    query_dim, _, value_dim = call.dims
    limit = 192 if (query_dim, value_dim) == (192, 128) and gpu.capability[0] in (9, 10) else 128
    return (
        _is_dense(call, grouped=True)
        and gpu.capability >= (8, 0)
        and call.dtype in HALF
        and call.mask_fits
        and not call.mask_learns
        and (gpu.torch < DROPOUT_CHECKED or (call.dropout * 16).is_integer())
        and max(query_dim, value_dim) <= limit
        and query_dim % 8 == value_dim % 8 == 0
        and 1 not in call.lengths
    )


def _flash_takes(call: AttentionCall, gpu: Accelerator) -> bool:
    dim = call.dims[0]
    trains_wide = call.needs_grad and dim > 192 and gpu.capability in ((8, 6), (8, 9), (12, 0))
    return (
        _is_dense(call, grouped=True)
        and gpu.capability >= (8, 0)
        and call.dtype in HALF
        and not call.has_mask
        and len(set(call.dims)) == 1
        and dim <= 256
        and not (trains_wide and (dim <= 224 or call.dropout > 0))
        and not (call.is_causal and call.lengths[0] != call.lengths[1])
    )


def _efficient_takes(call: AttentionCall, gpu: Accelerator) -> bool:
    is_half = call.dtype in HALF
    alignment = (8 if is_half else 4) if gpu.capability >= (8, 0) else 8 if is_half else 1
    return (
        _is_dense(call, grouped=False)
        and not call.mask_learns  # seen on an H200 with PyTorch 2.11: T5 takes no fused kernel
        and (is_half or call.dtype == "float32")
        and not (call.dtype == "bfloat16" and gpu.capability < (8, 0))
        and call.dims[0] == call.dims[1]
        and call.dims[0] % alignment == call.dims[2] % alignment == 0
    )
