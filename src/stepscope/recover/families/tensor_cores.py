"""Operations on tensor cores from instructions, where a file counts only those.

An instruction multiplies a tile whose size the kernel's name tells. Ampere's `mma` does 16×8×8 or 16×8×16; Hopper's
`wgmma` 64×N×16 (×8 in tf32), and counts once for each of the four warps that issue it together. N is the side of the
tile that the layout leaves for it, halved where two groups of warps share it, or where it would be more than an
instruction takes.
"""

import re

from stepscope.recover.facts import Sighting

_WARPS = 4
_LONGEST = 256
_NVJET = re.compile(r"nvjet_sm90_\w+_[NT]{2}(?P<layout>[NT])$")
_HOPPER_XMMA = re.compile(r"sm90_xmma_gemm_\w*tf32")
_MMA = re.compile(r"_(?:s|h|bf16_s|f16_s)?(?P<shape>1688|16816)gemm")
_CUDNN = re.compile(r"_flash_fprop_wgmma_\w+?_(?P<rows>\d+)x(?P<keys>\d+)x(?P<width>\d+)_")
_FLASH = "flash_fwd_kernel"
_MMA_OPS = {"1688": 2 * 16 * 8 * 8, "16816": 2 * 16 * 8 * 16}


def operations_each(sighting: Sighting) -> float | None:
    """How many operations an instruction of a warp does there, on average; None where the name does not tell."""
    text, tile = sighting.name.name.partition("(")[0], sighting.name.tile
    if (found := _NVJET.match(text)) and tile:
        side = tile[0] if found["layout"] == "N" else tile[1]
        is_shared = "_coopB_" in text or side > _LONGEST
        return _wgmma(side // 2 if is_shared else side, 16)
    if _HOPPER_XMMA.match(text) and tile:
        return _wgmma(tile[1], 8)
    if found := _CUDNN.search(text):
        return _attention(int(found["keys"]), int(found["width"]))
    if found := _MMA.search(text):
        return _MMA_OPS[found["shape"]]
    return _MMA_OPS["16816"] if _FLASH in text else None


def _wgmma(side: int, depth: int) -> float:
    return 2 * 64 * side * depth / _WARPS


def _attention(keys: int, width: int) -> float:
    """Scores take width / 16 instructions of that many keys, values keys / 16 of that width."""
    instructions = width // 16 + keys // 16
    return (width // 16 * _wgmma(keys, 16) + keys // 16 * _wgmma(width, 16)) / instructions


def count_operations(sighting: Sighting) -> int | None:
    """None where they were counted anyway, or cannot be told."""
    instructions = sighting.counters.get("tensor_instructions")
    if instructions is None or "tensor_ops" in sighting.counters:
        return None
    each = operations_each(sighting) if instructions else 0.0
    return None if each is None else round(instructions * each)
