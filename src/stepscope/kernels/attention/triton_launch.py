"""Launches the Triton kernels. `triton_kernels.py` contains and documents them.

CPU time counts: at short lengths a kernel runs for a few microseconds. So what only depends on the kind of problem is
looked up once and cached.

Tiles that `tune` found on the user's own GPU are kept in `tiles.json` in the user's cache directory, by GPU name, and
take precedence over the table in `tiles.py`. Nothing is measured when a kernel first runs: a missing file is the usual
case, and one that cannot be read is an error, because ignoring it would run other tiles than the user chose.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.errors import StepscopeError
from stepscope.files import cache_folder, decode, read_plain, write_atomically, writing
from stepscope.kernels.attention import tiles
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras, empty_output, is_tma_able, tma_strides
from stepscope.kernels.attention.tiles import (
    Architecture,
    Arithmetic,
    Pass,
    Tile,
    TileKey,
    main_width,
    padded_width,
)
from stepscope.kernels.attention.triton_kernels import (
    KernelExtras,
    attention_backward_keys,
    attention_backward_queries,
    attention_forward,
)

# The interpreter has no architecture; it runs any tile.
INTERPRETED_AS: Architecture = "hopper"
ROW_ALIGNMENT = 16  # elements: the divisibility that Triton checks in a stride
_PLAIN = KernelExtras()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """A pass, without its tensors."""

    causal: bool
    scale: float
    tf32: bool
    extras: KernelExtras = _PLAIN

    @property
    def is_heavy(self) -> bool:
        """Whether the extras need more registers than the usual tile leaves. The others need none or a few."""
        extras = self.extras
        return extras is not _PLAIN and any(
            x is not None for x in (extras.softcap, extras.bias, extras.slopes, extras.document_starts)
        )


def arithmetic(dtype: torch.dtype, *, tf32: bool) -> Arithmetic:
    """Return how matmuls of this dtype are computed."""
    if dtype == torch.float32:
        return "tf32" if tf32 else "tf32x3"
    return "half"


def input_precision(kind: Arithmetic) -> str:
    """Return the precision for `tl.dot`. It only applies to fp32, where Triton's own default is tf32."""
    return "tf32" if kind == "half" else kind


def constants(q_BHLD: Tensor, v_BGKD: Tensor, tile: Tile, settings: PassSettings) -> dict[str, Any]:
    """What all three kernels are compiled for."""
    return {
        "HEAD_DIM": q_BHLD.shape[-1],
        "V_HEAD_DIM": v_BGKD.shape[-1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": settings.causal,
        "PRECISION": input_precision(arithmetic(q_BHLD.dtype, tf32=settings.tf32)),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    causal: bool,
    scale: float,
    tf32: bool,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tensor, Tensor]:
    """Return o, in the memory layout of q, and the log-sum-exp of the scores (natural logarithm, fp32)."""
    o_BHLD = empty_output(q_BHLD, v_BGKD)
    lse_BHL = torch.empty(q_BHLD.shape[:-1], dtype=torch.float32, device=q_BHLD.device)
    if k_BGKD.shape[2] == 0:
        lse_BHL.fill_(math.inf) if extras.sinks is None else lse_BHL.copy_(extras.sinks[:, None])
        return o_BHLD.zero_(), lse_BHL
    if q_BHLD.numel() == 0:
        return o_BHLD, lse_BHL
    settings = PassSettings(causal=causal, scale=scale, tf32=tf32, extras=kernel_extras(extras, q_BHLD, k_BGKD))
    tile = _tile_of("forward", q_BHLD, v_BGKD, settings)
    launch_forward(q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, tile, settings)
    return o_BHLD, lse_BHL


def launch_forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    tile: Tile,
    settings: PassSettings,
) -> None:
    """Fill o and lse using the given tile."""
    batch, num_heads, num_queries, _ = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    kind = arithmetic(q_BHLD.dtype, tf32=settings.tf32)
    attention_forward[(batch * num_heads * -(-num_queries // tile.block_m),)](
        # In fp32, q is split into two parts, which stay in shared memory only if it was loaded by pointer.
        *sources(q_BHLD, tile.block_m, by_descriptor=kind == "half"),
        *sources(k_BGKD, tile.block_n),
        *sources(v_BGKD, tile.block_n),
        o_BHLD,
        lse_BHL,
        q_BHLD.stride(),
        k_BGKD.stride(),
        v_BGKD.stride(),
        o_BHLD.stride(),
        settings.scale,
        num_heads,
        num_heads // num_groups,
        num_queries,
        num_keys,
        settings.extras,
        WHOLE_KEYS=num_keys % tile.block_n == 0,
        **constants(q_BHLD, v_BGKD, tile, settings),
    )


def backward(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    *,
    causal: bool,
    scale: float,
    tf32: bool,
    extras: Extras = NO_EXTRAS,
    wants_dbias: bool = False,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk and dv, each in the memory layout of its input, and dbias if it is wanted. The same input gives the
    same bits: each gradient is written by the one program that computes it.
    """
    del deterministic  # it always is
    dq_BHLD, dk_BGKD, dv_BGKD = torch.empty_like(q_BHLD), torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)
    bias = extras.bias if wants_dbias else None
    if q_BHLD.numel() == 0 or k_BGKD.numel() == 0:
        return dq_BHLD.zero_(), dk_BGKD.zero_(), dv_BGKD.zero_(), None if bias is None else torch.zeros_like(bias)
    settings = PassSettings(causal=causal, scale=scale, tf32=tf32, extras=kernel_extras(extras, q_BHLD, k_BGKD))
    queries_tile = _tile_of("backward_queries", q_BHLD, v_BGKD, settings)
    keys_tile = _tile_of("backward_keys", q_BHLD, v_BGKD, settings)
    rows = row_values(lse_BHL)
    # Zeros, because tiles that no query sees are never written.
    dbias_BHLK = None if bias is None else torch.zeros(*lse_BHL.shape, k_BGKD.shape[2], device=q_BHLD.device)
    launch_queries(do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL, dq_BHLD, rows, queries_tile, settings, dbias_BHLK)
    launch_keys(do_BHLD, q_BHLD, k_BGKD, v_BGKD, dk_BGKD, dv_BGKD, rows, keys_tile, settings)
    if bias is None or dbias_BHLK is None:
        return dq_BHLD, dk_BGKD, dv_BGKD, None
    return dq_BHLD, dk_BGKD, dv_BGKD, torch.empty_like(bias).copy_(dbias_BHLK.sum_to_size(bias.shape))


def row_values(lse_BHL: Tensor) -> Tensor:
    """Allocate what the first kernel writes for the second: (B·H, 2, queries padded so that each row is aligned)."""
    batch, num_heads, num_queries = lse_BHL.shape
    padded = -(-num_queries // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return torch.empty(batch * num_heads, 2, padded, dtype=torch.float32, device=lse_BHL.device)


def launch_queries(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    dq_BHLD: Tensor,
    rows: Tensor,
    tile: Tile,
    settings: PassSettings,
    dbias_BHLK: Tensor | None = None,
) -> None:
    """Fill dq, rows and dbias, where some query of a tile sees some key, using the given tile."""
    batch, num_heads, num_queries, _ = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    attention_backward_queries[(batch * num_heads * -(-num_queries // tile.block_m),)](
        q_BHLD,
        *sources(k_BGKD, tile.block_n),
        *sources(v_BGKD, tile.block_n),
        o_BHLD,
        do_BHLD,
        dq_BHLD,
        dbias_BHLK,
        lse_BHL,
        rows,
        q_BHLD.stride(),
        k_BGKD.stride(),
        v_BGKD.stride(),
        o_BHLD.stride(),
        do_BHLD.stride(),
        dq_BHLD.stride(),
        settings.scale,
        num_heads,
        num_heads // num_groups,
        num_queries,
        num_keys,
        rows.shape[-1],
        settings.extras,
        WHOLE_KEYS=num_keys % tile.block_n == 0,
        **constants(q_BHLD, v_BGKD, tile, settings),
    )


def launch_keys(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    dk_BGKD: Tensor,
    dv_BGKD: Tensor,
    rows: Tensor,
    tile: Tile,
    settings: PassSettings,
) -> None:
    """Fill dk and dv using the given tile, from the rows that `launch_queries` wrote."""
    batch, num_heads, num_queries, _ = q_BHLD.shape
    num_groups, num_keys = k_BGKD.shape[1:3]
    attention_backward_keys[(batch * num_groups * -(-num_keys // tile.block_n),)](
        *sources(q_BHLD, tile.block_m),
        k_BGKD,
        v_BGKD,
        *sources(do_BHLD, tile.block_m),
        dk_BGKD,
        dv_BGKD,
        row_source(rows, num_queries, tile.block_m),
        q_BHLD.stride(),
        k_BGKD.stride(),
        v_BGKD.stride(),
        do_BHLD.stride(),
        dk_BGKD.stride(),
        dv_BGKD.stride(),
        settings.scale,
        num_groups,
        num_heads // num_groups,
        num_queries,
        num_keys,
        rows.shape[-1],
        settings.extras,
        WHOLE_QUERIES=num_queries % tile.block_m == 0,
        **constants(q_BHLD, v_BGKD, tile, settings),
    )


# --- Kernel arguments ---


def kernel_extras(extras: Extras, q_BHLD: Tensor, k_BGKD: Tensor) -> KernelExtras:
    """`extras` as kernels take them. A window that hides nothing is none: the kernel is the one without."""
    if extras is NO_EXTRAS:
        return _PLAIN
    batch, num_heads, num_queries, _ = q_BHLD.shape
    num_keys = k_BGKD.shape[2]
    found: dict[str, Any] = {}
    if 0 <= extras.left < num_keys - 1:
        found["left"] = extras.left
    if 0 <= extras.right < num_queries - 1:
        found["right"] = extras.right
    if extras.softcap:
        found["softcap"] = extras.softcap
    if extras.bias is not None:
        strides = extras.bias.expand(batch, num_heads, num_queries, num_keys).stride()
        found["bias"], found["bias_keys"] = extras.bias, num_keys
        found["bias_batch_stride"], found["bias_head_stride"] = strides[:2]
        found["bias_query_stride"] = None if extras.bias.shape[2] == 1 else strides[2]
        found["bias_key_stride"] = strides[3]
    if extras.slopes is not None:
        found["slopes"] = extras.slopes
        strides = extras.slopes.expand(batch, num_heads).stride()
        found["slopes_batch_stride"], found["slopes_head_stride"] = strides
    if extras.sinks is not None:
        found["sinks"] = extras.sinks.contiguous()
    if extras.documents is not None:
        found["document_starts"], found["document_ends"] = extras.documents.contiguous().unbind()
    return KernelExtras(**found)


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether the GPU copies tiles by descriptor (TMA): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def sources(
    x_BHLD: Tensor, rows: int, *, by_descriptor: bool = True
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor | None]:
    """x as a kernel reads it, and its tail if the head dim has one: by descriptor if the GPU and the strides allow it,
    otherwise by pointer.
    """
    width = padded_width(x_BHLD.shape[-1])
    tail = width - main_width(width)
    if not by_descriptor or not has_copy_engine(x_BHLD.device) or not is_tma_able(x_BHLD):
        return x_BHLD, x_BHLD if tail else None
    shape, strides = list(x_BHLD.shape), tma_strides(x_BHLD)
    main = TensorDescriptor(x_BHLD, shape, strides, [1, 1, rows, width - tail])
    return main, TensorDescriptor(x_BHLD, shape, strides, [1, 1, rows, tail]) if tail else None


def row_source(rows: Tensor, length: int, block: int) -> Tensor | TensorDescriptor:
    """A table of padded rows of this length, of which a kernel reads `block` numbers at a time."""
    if not has_copy_engine(rows.device):
        return rows
    padded = rows.shape[-1]
    return TensorDescriptor(rows, [rows.numel() // padded, length], [padded, 1], [1, block])


# --- Tiles ---


def _tile_of(stage: Pass, q_BHLD: Tensor, v_BGKD: Tensor, settings: PassSettings) -> Tile:
    kind, head_dims = arithmetic(q_BHLD.dtype, tf32=settings.tf32), (q_BHLD.shape[-1], v_BGKD.shape[-1])
    return tile_for(stage, kind, head_dims, q_BHLD.device, causal=settings.causal, is_heavy=settings.is_heavy)


@cache
def tile_for(
    stage: Pass,
    kind: Arithmetic,
    head_dims: tuple[int, int],
    device: torch.device,
    *,
    causal: bool,
    is_heavy: bool = False,
) -> Tile:
    """Return the tile for heavy extras if there is one, else the one that was tuned on this GPU, else the table's. The
    head dims are those of q and of v.
    """
    key = tile_key(stage, kind, head_dims, device, causal=causal)
    heavy = tiles.choose_for_extras(key) if is_heavy else None
    if heavy is not None:
        return heavy
    chosen = tuned_tiles(torch.cuda.get_device_name(device)).get(key) if device.type == "cuda" else None
    return chosen or tiles.choose(key)


def tile_key(
    stage: Pass, kind: Arithmetic, head_dims: tuple[int, int], device: torch.device, *, causal: bool
) -> TileKey:
    width, v_width = map(padded_width, head_dims)
    return TileKey(
        stage=stage,
        arithmetic=kind,
        width=width,
        v_width=0 if v_width == width else v_width,
        causal=causal,
        architecture=_architecture(device),
    )


def _architecture(device: torch.device) -> Architecture:
    if device.type == "cuda":
        return tiles.architecture(torch.cuda.get_device_capability(device))
    return INTERPRETED_AS


class _TunedTile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file."""

    gpu: str
    key: TileKey
    tile: Tile


def tiles_path() -> Path:
    return cache_folder() / "tiles.json"


@cache
def tuned_tiles(gpu: str) -> Mapping[TileKey, Tile]:
    """Return the tuned tiles for this GPU, read once per process."""
    return {entry.key: entry.tile for entry in _read_tuned(tiles_path()) if entry.gpu == gpu}


def keep_tuned(gpu: str, found: Mapping[TileKey, Tile]) -> Path:
    """Save the tiles found for this GPU, replacing earlier ones with the same key; return the file."""
    path = tiles_path()
    known = {(entry.gpu, entry.key): entry for entry in _read_tuned(path)}
    known |= {(gpu, key): _TunedTile(gpu=gpu, key=key, tile=tile) for key, tile in found.items()}
    with writing(path, if_full="the tiles were not saved", hint="STEPSCOPE_CACHE=DIR stepscope tune"):
        write_atomically(path, msgspec.json.format(msgspec.json.encode(list(known.values())), indent=1))
    tuned_tiles.cache_clear()
    tile_for.cache_clear()
    return path


def _read_tuned(path: Path) -> list[_TunedTile]:
    try:
        return decode(read_plain(path), list[_TunedTile])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.DecodeError) as problem:
        raise StepscopeError(
            f"cannot read the tuned tiles: `{path}`",
            detail=str(problem),
            hint=f"rm {path}    # the built-in tiles are used again",
        ) from problem
