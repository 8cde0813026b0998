"""The tiles of the Hopper kernels and what they are compiled with, in one place for the launchers and for `make aot`.

There is no table to tune: at each width one choice fills the registers and the shared memory of an SM.
"""

from functools import cache
from typing import Any

FORWARD_ROWS = 64  # of a consumer warpgroup
FORWARD_KEYS = 128
BACKWARD_ROWS = {64: 128, 128: 64}  # in a query tile, by the width of a head: what the registers hold
BACKWARD_KEYS = 128  # of a program, half of them for each consumer warpgroup
STAGES = 2


def padded_head(head_dim: int) -> int:
    """The width of a tile for this head size; the copy engine fills the rest with zeros."""
    return 64 if head_dim <= 64 else 128


def count_consumers(width: int, *, causal: bool) -> int:
    """Consumer warpgroups of a forward program; why, in the kernel's module."""
    return 3 if width == 64 and not causal else 2


@cache
def forward_settings(width: int, *, causal: bool, whole_keys: bool) -> dict[str, Any]:
    """The constants and options of the forward kernel. whole_keys: the length of the keys is a multiple of a tile's."""
    consumers = count_consumers(width, causal=causal)
    return {
        "CONSUMERS": consumers,
        "ROWS": FORWARD_ROWS,
        "KEYS": FORWARD_KEYS,
        "D": width,
        "STAGES": STAGES,
        "CAUSAL": causal,
        "MASK": causal or not whole_keys,
        "num_warps": 4,
        # At the start; then the warpgroups trade registers.
        "maxnreg": {2: 168, 3: 128}[consumers],
    }


@cache
def backward_settings(width: int, *, causal: bool, whole_keys: bool) -> dict[str, Any]:
    """The same for the backward kernel."""
    return {
        "ROWS": BACKWARD_ROWS[width],
        "D": width,
        "STAGES": STAGES,
        "CAUSAL": causal,
        "MASK": causal or not whole_keys,
        "num_warps": 4,
        "maxnreg": 168,
    }
