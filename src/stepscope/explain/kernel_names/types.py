"""What a decoded kernel name says."""

from typing import Literal, get_args

import msgspec

KernelClass = Literal[
    "gemm",
    "attention",
    "softmax",
    "norm",
    "elementwise",
    "reduction",
    "copy",
    "index",
    "embedding",
    "loss",
    "optimizer",
    "random",
    "sort",
    "convolution",
    "communication",
    "memcpy",
    "memset",
    "other",
]
CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
Direction = Literal["forward", "backward"]


class NamePart(msgspec.Struct, frozen=True):
    """A piece of the name as it stands there, and what it says in plain words."""

    text: str
    meaning: str


class KernelName(msgspec.Struct, frozen=True, kw_only=True):
    """What a name tells, and nothing that it does not: a field it is silent on is None."""

    name: str  # as recorded
    short: str  # for tables and charts: one line, printable, bounded
    library: str
    kernel_class: KernelClass
    operation: str  # in plain words
    direction: Direction | None = None
    architecture: str | None = None  # `sm_80`, `gfx942`: what the kernel was written for, not what it ran on
    dtype: str | None = None  # of the arithmetic: fp64 fp32 tf32 bf16 fp16 fp8 int8 ...
    tile: tuple[int, ...] | None = None  # (M, N) or (M, N, K)
    stages: int | None = None
    layout: str | None = None  # of the two factors, in BLAS's column-major terms: nn, nt, tn, tt
    tensor_cores: bool | None = None
    split_k: bool = False
    is_cast: bool = False  # a copy that changes the data type, as far as the name says
    fused: tuple[str, ...] = ()  # the operations Inductor put into one kernel
    parts: tuple[NamePart, ...] = ()
