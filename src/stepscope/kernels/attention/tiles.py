"""The tiles of the Triton kernels: a small table, by the properties that matter.

These are the pass, the arithmetic of the matmuls, the padded head dimension, whether the mask is causal, and the
architecture. Lengths are not: a kernel is compiled once for all of them, and nothing is autotuned at first use, which
would cost minutes in the first step and choose differently from run to run. `tune.py` measures the candidates here on
the current GPU on request, and its results are kept next to this table (`triton_launch.py`), not in it.

A tile must not spill registers in its loop, and on Hopper must not make ptxas serialize the matmuls (four warps with
128×128 do); `make aot` checks both for the first of each. Of those that pass, several small programs per multiprocessor
hide each other's softmax, which is why four warps often beat eight. In fp32 every operand is a high and a low part
(`triton_kernels.py`), so tiles are small, and mostly smaller than Hopper's wgmma, which starts at 64 rows.
"""

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward_queries", "backward_keys"]
Arithmetic = Literal["half", "tf32", "tf32x3"]
Architecture = Literal["hopper", "ampere"]

PASSES: tuple[Pass, ...] = ("forward", "backward_queries", "backward_keys")
ARITHMETICS: tuple[Arithmetic, ...] = ("half", "tf32", "tf32x3")
WIDTHS = (16, 32, 64, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileKey:
    """What the choice of tiles depends on. `width` is the padded head dimension of q and k, and `v_width` that of v if
    it differs, otherwise zero.
    """

    stage: Pass
    arithmetic: Arithmetic
    width: int
    causal: bool
    architecture: Architecture
    v_width: int = 0

    @property
    def widest(self) -> int:
        return max(self.width, self.v_width)


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys per tile, warps per program, and the number of tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_width(head_dim: int) -> int:
    """Return the columns that kernels compute with: the next power of two, because tiles have no other sizes and the
    tensor cores take at least 16. The exception is 192, as two tiles of 128 + 64: with 256, a third more work. The same
    for 96 spilled up to 1600 bytes of registers with the tiles of 128.
    """
    return 192 if 128 < head_dim <= 192 else max(16, 1 << (head_dim - 1).bit_length())


def main_width(width: int) -> int:
    """Return the columns of the first tile: all of a padded width, or two thirds, and the tail has the rest."""
    return 1 << (width.bit_length() - 1)


def architecture(capability: tuple[int, int]) -> Architecture:
    """Return a GPU's class by its compute capability.

    Hopper has asynchronous matmuls and 227 KiB of shared memory, as does the first Blackwell. All others get tiles that
    fit into 99 KiB, which every GPU since Ampere has.
    """
    return "hopper" if capability[0] in (9, 10) else "ampere"


def candidates(key: TileKey) -> tuple[Tile, ...]:
    """The candidates worth measuring, the default first: those of the width, or of the next that is listed."""
    table = (_HOPPER if key.architecture == "hopper" else _AMPERE)[key.stage, key.arithmetic]
    return table[min(width for width in table if width >= key.widest)]


def choose(key: TileKey) -> Tile:
    """The default: the first candidate."""
    return candidates(key)[0]


def choose_for_extras(key: TileKey) -> Tile | None:
    """The tile for changed scores or documents, where the default leaves too few registers or too little memory."""
    return _FOR_EXTRAS.get((key.architecture, key.stage, key.arithmetic, key.widest))


_Table = dict[tuple[Pass, Arithmetic], dict[int, tuple[Tile, ...]]]

# Compiled, but not measured. With documents, twice as many threads as rows: Triton then keeps a row's bounds with its
# scores, and does not move them through shared memory in the loop, which would serialize the matmuls.
_FOR_EXTRAS: dict[tuple[Architecture, Pass, Arithmetic, int], Tile] = {
    ("hopper", "forward", "half", 16): Tile(128, 64, 8, 3),
    ("hopper", "forward", "half", 32): Tile(128, 64, 8, 3),
    ("hopper", "forward", "half", 64): Tile(128, 64, 8, 3),
    ("hopper", "forward", "half", 128): Tile(128, 64, 8, 3),
    ("hopper", "forward", "half", 256): Tile(64, 64, 4, 2),
    ("hopper", "backward_queries", "half", 128): Tile(64, 64, 4, 2),
    ("hopper", "backward_queries", "half", 192): Tile(64, 32, 4, 3),
    ("hopper", "backward_keys", "half", 64): Tile(64, 64, 8, 3),
    ("hopper", "backward_keys", "half", 128): Tile(64, 64, 8, 2),
    ("hopper", "backward_keys", "half", 192): Tile(32, 64, 8, 2),
}

# Measured on an H200, but for 192, which was only compiled. fp32 is fastest with fewer than 64 rows or fewer than four
# warps, where Triton uses Ampere's mma: Hopper's wgmma needs both parts of every operand written back to shared memory.
_HOPPER: _Table = {
    ("forward", "half"): {
        16: (Tile(128, 64, 4, 3), Tile(128, 128, 8, 2)),
        32: (Tile(128, 64, 4, 3), Tile(128, 128, 8, 2)),
        64: (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)),
        128: (Tile(128, 64, 4, 2), Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)),
        192: (Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
        256: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    },
    ("backward_queries", "half"): {
        16: (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        32: (Tile(64, 64, 4, 2), Tile(128, 64, 4, 2)),
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        192: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3)),
        256: (Tile(64, 32, 4, 3), Tile(64, 64, 4, 2)),
    },
    ("backward_keys", "half"): {
        16: (Tile(64, 64, 4, 2), Tile(64, 128, 4, 2)),
        32: (Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 128, 8, 3)),
        128: (Tile(64, 64, 4, 2), Tile(64, 128, 8, 3)),
        192: (Tile(64, 64, 8, 2), Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
        256: (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    },
    ("forward", "tf32"): {
        16: (Tile(64, 64, 4, 2), Tile(128, 64, 4, 2)),
        32: (Tile(64, 64, 4, 2), Tile(128, 64, 4, 2)),
        64: (Tile(128, 64, 4, 2), Tile(32, 64, 2, 2), Tile(64, 64, 4, 2)),
        128: (Tile(64, 32, 2, 2), Tile(32, 64, 2, 2), Tile(128, 64, 8, 2)),
        256: (Tile(32, 32, 4, 1),),
    },
    ("backward_queries", "tf32"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2),),
        64: (Tile(32, 64, 2, 2), Tile(64, 64, 4, 2)),
        128: (Tile(32, 64, 4, 2), Tile(128, 32, 8, 2)),
        256: (Tile(16, 32, 4, 1),),
    },
    ("backward_keys", "tf32"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        64: (Tile(64, 128, 8, 2), Tile(64, 32, 4, 2), Tile(64, 64, 4, 2)),
        128: (Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
        256: (Tile(16, 16, 4, 1),),
    },
    ("forward", "tf32x3"): {
        16: (Tile(64, 64, 4, 2), Tile(128, 64, 4, 2)),
        32: (Tile(64, 64, 4, 2), Tile(32, 64, 2, 2)),
        64: (Tile(32, 32, 2, 2), Tile(32, 64, 2, 2), Tile(64, 64, 4, 2)),
        128: (Tile(32, 64, 4, 2), Tile(32, 64, 4, 1), Tile(32, 32, 2, 2)),
        256: (Tile(16, 16, 2, 1), Tile(32, 16, 4, 1)),
    },
    ("backward_queries", "tf32x3"): {
        16: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        32: (Tile(64, 64, 4, 2), Tile(32, 64, 2, 2)),
        64: (Tile(32, 64, 4, 2), Tile(32, 64, 4, 1), Tile(128, 64, 8, 2)),
        128: (Tile(32, 64, 4, 1), Tile(32, 64, 4, 2), Tile(32, 32, 4, 2)),
        256: (Tile(16, 32, 4, 1), Tile(16, 16, 2, 1)),
    },
    ("backward_keys", "tf32x3"): {
        16: (Tile(32, 64, 4, 2),),
        32: (Tile(32, 64, 4, 2), Tile(64, 32, 2, 2)),
        64: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 32, 4, 2)),
        128: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
        256: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
    },
}

_AMPERE: _Table = {
    ("forward", "half"): {
        16: (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        32: (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        64: (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        128: (Tile(64, 64, 4, 2), Tile(128, 32, 4, 3), Tile(128, 64, 8, 2)),
        256: (Tile(64, 32, 4, 2),),
    },
    ("backward_queries", "half"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2),),
        64: (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
        128: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        192: (Tile(32, 32, 4, 2), Tile(64, 16, 8, 1)),
        256: (Tile(64, 32, 8, 1),),
    },
    ("backward_keys", "half"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2),),
        64: (Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
        128: (Tile(64, 64, 8, 2), Tile(32, 64, 4, 2)),
        256: (Tile(32, 32, 8, 2),),
    },
    ("forward", "tf32"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2),),
        64: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        128: (Tile(64, 32, 4, 2),),
        192: (Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
        256: (Tile(32, 32, 4, 1),),
    },
    ("backward_queries", "tf32"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2),),
        64: (Tile(64, 32, 4, 2), Tile(64, 64, 4, 2)),
        128: (Tile(32, 32, 4, 2),),
        256: (Tile(16, 32, 4, 1),),
    },
    ("backward_keys", "tf32"): {
        16: (Tile(32, 64, 4, 2),),
        32: (Tile(32, 64, 4, 2),),
        64: (Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)),
        128: (Tile(32, 32, 4, 2),),
        256: (Tile(16, 16, 4, 1),),
    },
    ("forward", "tf32x3"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2),),
        64: (Tile(64, 32, 4, 2),),
        128: (Tile(64, 16, 4, 2), Tile(32, 32, 4, 2)),
        256: (Tile(16, 32, 4, 1),),
    },
    ("backward_queries", "tf32x3"): {
        16: (Tile(64, 32, 4, 2),),
        32: (Tile(64, 32, 4, 2),),
        64: (Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
        128: (Tile(32, 16, 4, 2),),
        256: (Tile(16, 32, 4, 1),),
    },
    ("backward_keys", "tf32x3"): {
        16: (Tile(32, 64, 4, 2),),
        32: (Tile(32, 64, 8, 2), Tile(32, 64, 4, 2)),
        64: (Tile(32, 32, 4, 2), Tile(16, 64, 4, 2)),
        128: (Tile(16, 32, 4, 2),),
        256: (Tile(16, 16, 4, 1),),
    },
}
