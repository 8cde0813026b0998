"""What the launchers of the Triton kernels share: tiles for a problem, and tensors as a kernel takes them.

Host time counts: at short lengths a kernel runs for a few microseconds. So what depends on the problem's kind alone is
looked up once and kept.
"""

# B batch, H heads, L length, D head dim.

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.kernels.attention import tiles
from stepscope.kernels.attention.tiles import Arithmetic, Pass, Tile, TileKey
from stepscope.kernels.attention.tma import is_tma_able, tma_strides
from stepscope.kernels.attention.tuned import tuned_tiles

# The interpreter has no architecture; it runs any tile.
INTERPRETED_AS: tiles.Architecture = "hopper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a problem is besides its tensors."""

    causal: bool
    scale: float
    tf32: bool


def arithmetic(dtype: torch.dtype, *, tf32: bool) -> Arithmetic:
    """How matrix products of this dtype are computed."""
    if dtype == torch.float32:
        return "tf32" if tf32 else "tf32x3"
    return "half"


def input_precision(kind: Arithmetic) -> str:
    """What `tl.dot` is told. It looks at this for fp32 alone, where its own default is tf32."""
    return "tf32" if kind == "half" else kind


def constants(q_BHLD: Tensor, tile: Tile, settings: Settings) -> dict[str, Any]:
    """What all three kernels are compiled for."""
    head_dim = q_BHLD.shape[-1]
    return {
        "HEAD_DIM": head_dim,
        "WIDTH": tiles.padded_width(head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": settings.causal,
        "PRECISION": input_precision(arithmetic(q_BHLD.dtype, tf32=settings.tf32)),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@cache
def tile_for(stage: Pass, kind: Arithmetic, head_dim: int, device: torch.device, *, causal: bool) -> Tile:
    """The tile that was tuned on this GPU if there is one, and the table's otherwise."""
    key = tile_key(stage, kind, head_dim, device, causal=causal)
    chosen = tuned_tiles(torch.cuda.get_device_name(device)).get(key) if device.type == "cuda" else None
    return chosen or tiles.choose(key)


def tile_key(stage: Pass, kind: Arithmetic, head_dim: int, device: torch.device, *, causal: bool) -> TileKey:
    return TileKey(
        stage=stage,
        arithmetic=kind,
        width=tiles.padded_width(head_dim),
        causal=causal,
        architecture=_architecture(device),
    )


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether the GPU copies tiles by descriptor (TMA): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def source(x_BHLD: Tensor, rows: int, width: int) -> Tensor | TensorDescriptor:
    """x as a kernel reads it: by descriptor where the GPU and the strides allow it, otherwise by pointer."""
    if not has_copy_engine(x_BHLD.device) or not is_tma_able(x_BHLD):
        return x_BHLD
    return TensorDescriptor(x_BHLD, list(x_BHLD.shape), tma_strides(x_BHLD), [1, 1, rows, width])


def row_source(rows: Tensor, length: int, block: int) -> Tensor | TensorDescriptor:
    """A table of rows of this length, padded, as a kernel reads `block` numbers of one."""
    if not has_copy_engine(rows.device):
        return rows
    padded = rows.shape[-1]
    return TensorDescriptor(rows, [rows.numel() // padded, length], [padded, 1], [1, block])


def _architecture(device: torch.device) -> tiles.Architecture:
    if device.type == "cuda":
        return tiles.architecture(torch.cuda.get_device_capability(device))
    return INTERPRETED_AS
