"""Fused attention: what names, grids and counters say of batch, heads, lengths and head size.

Where a grid has a place for each, batch and heads are exact and the length is known to a tile. Persistent kernels
(cuDNN's, our own for Hopper) launch one number: the tiles of all heads together, or as many blocks as the GPU has SMs.

A model with a causal mask may run a kernel that skips what the mask hides, or one that is handed the mask as a tensor
and computes everything. So work fits a causal model if either fits; without a mask nothing is skipped.

Grids of our own kernels follow their launchers; cuDNN's and the memory-efficient ones were found on problems of known
sizes. FlashAttention is in `flash`.
"""

import re
from collections.abc import Callable
from typing import Literal

from stepscope.recover.facts import Attention, Sighting, Window, exactly
from stepscope.recover.families import flash_attention as flash
from stepscope.recover.families.attention_rules import (
    AttentionProblem,
    Rule,
    build_fact,
    ceil_div,
    count_tile_pairs,
)
from stepscope.recover.families.efficient_attention import read as read_memory_efficient
from stepscope.recover.families.tilings import PROCESSORS

_CUDNN = re.compile(r"_flash_(fprop|bprop)_wgmma_\w+?_(\d+)x(\d+)x(\d+)_\d+x\d+x1_cga1x1x1")
# Of queries or keys, of the other and of the head: those whose blocks are understood.
_CUDNN_SEEN = {"fprop": ((64, 128, 64), (64, 128, 128)), "bprop": ((64, 64, 64),)}
# With rows of a block in the grid's first place, for heads of 64; for others the rows are not known.
_CUDNN_AROUND = re.compile(r"cudnn::fusion::(compute_dot_do_o|convert_dq|fmha_reduce_head)")
_CUDNN_AROUND_ROWS = {"compute_dot_do_o": 16, "convert_dq": 32, "fmha_reduce_head": 16}
_CUDNN_AROUND_HEAD = 64
_WARPGROUP_THREADS = 128
_TRITON_TILES = (16, 32, 64, 128)
_HOPPER_ROWS = 64  # of a warpgroup
_HOPPER_KEYS = 128
_HOPPER_PREPARED = (128,)
_HOPPER_FINISHED = (64,)
_LSE_BYTES = 4


def read(sighting: Sighting, processors: int = PROCESSORS) -> Attention | None:
    """`processors`: how many SMs the GPU has."""
    name = sighting.name.name
    if not sighting.has_geometry:
        return None
    if found := _CUDNN_AROUND.search(name):
        return _read_around_cudnn(sighting, found[1])
    if sighting.name.kernel_class != "attention":
        return None
    if "fmha_cutlass" in name:
        return read_memory_efficient(sighting)
    if found := _CUDNN.search(name):
        tile = (int(found[2]), int(found[3]), int(found[4]))
        return _read_cudnn(sighting, found[1], tile, processors)
    if sighting.name.library == "stepscope":
        return _read_own(sighting, processors)
    if sighting.name.library == "FlashAttention":
        return flash.read(sighting, processors)
    return None


def _read_cudnn(sighting: Sighting, way: str, tile: tuple[int, int, int], processors: int) -> Attention:
    """Of a block's warpgroups one copies; each of the others takes a tile's rows, of queries forward, keys backward."""
    direction: Literal["forward", "backward"] = "forward" if way == "fprop" else "backward"
    head_dim = Window(1, tile[2])
    rows = tile[0] * (sighting.block[0] // _WARPGROUP_THREADS - 1)
    if tile not in _CUDNN_SEEN[way] or rows <= 0:
        return build_fact(direction, _evenly(sighting, processors), head_dim=head_dim)

    def launched(problem: AttentionProblem) -> int:
        return problem.sequences * ceil_div(problem.queries if way == "fprop" else problem.keys, rows)

    rules: list[Rule] = [_persistent(sighting, launched, processors)]
    if way == "fprop" and (operations := sighting.counters.get("tensor_ops")):
        rules.append(lambda problem: _fits_cudnn_work(operations, rows, tile, problem))
    return build_fact(direction, *rules, head_dim=head_dim)


def _evenly(sighting: Sighting, processors: int) -> Rule:
    """Every head has as many blocks as the others, unless the GPU is full."""
    blocks = sighting.grid[0] * sighting.grid[1] * sighting.grid[2]
    return lambda problem: blocks >= processors or blocks % problem.sequences == 0


def _fits_cudnn_work(operations: int, rows: int, tile: tuple[int, int, int], problem: AttentionProblem) -> bool:
    """Both products take whole tiles of queries and keys. How narrow heads are padded within a tile was not seen."""
    _, keys, widest = tile
    masks = (False, True) if problem.causal else (False,)
    for skips in masks:
        scores = count_tile_pairs(problem, rows, keys, skips=skips) * rows * keys * problem.sequences
        if 4 * scores * problem.head_dim <= operations <= 4 * scores * widest:
            return True
    # Where queries and keys differ in number, it was not seen at which end the mask is aligned.
    return problem.causal and problem.queries != problem.keys and operations <= 4 * scores * widest


def _read_around_cudnn(sighting: Sighting, which: str) -> Attention:
    """What cuDNN's backward does before and after its main kernel, on a grid of (tiles of rows, batch, heads)."""
    tiles, batch, heads = sighting.grid
    rows = _CUDNN_AROUND_ROWS[which]
    grouped = which == "fmha_reduce_head"

    def rule(problem: AttentionProblem) -> bool:
        if grouped and heads != problem.kv_heads:
            return False
        length = problem.keys if grouped else problem.queries
        return problem.head_dim != _CUDNN_AROUND_HEAD or tiles == ceil_div(length, rows)

    return build_fact("backward", rule, batch=exactly(batch), heads=None if grouped else exactly(heads))


def _read_own(sighting: Sighting, processors: int) -> Attention | None:
    match sighting.name.name.partition("(")[0]:
        case "attention_hopper_forward":
            return _read_hopper_forward(sighting, processors)
        case "attention_hopper_prepare":
            return build_fact("backward", _on_grid(sighting, _HOPPER_PREPARED))
        case "attention_hopper_finish":
            return build_fact("backward", _on_grid(sighting, _HOPPER_FINISHED))
        case "attention_hopper_backward":
            return build_fact("backward", _on_grid(sighting, (_HOPPER_KEYS,), of_keys=True))
        case "attention_forward":
            return build_fact("forward", _on_grid(sighting, _TRITON_TILES))
        case "attention_backward_queries":
            return build_fact("backward", _on_grid(sighting, _TRITON_TILES))
        case "attention_backward_keys":
            return build_fact("backward", _on_grid(sighting, _TRITON_TILES, of_keys=True))
    return None


def _on_grid(sighting: Sighting, tiles: tuple[int, ...], *, of_keys: bool = False) -> Rule:
    """One of these tiles gives the grid: of queries for every head, or of keys for every key-value head."""

    def rule(problem: AttentionProblem) -> bool:
        sequences = problem.batch * (problem.kv_heads if of_keys else problem.heads)
        length = problem.keys if of_keys else problem.queries
        return any(sighting.grid[0] == sequences * ceil_div(length, tile) for tile in tiles)

    return rule


def _read_hopper_forward(sighting: Sighting, processors: int) -> Attention:
    def launched(problem: AttentionProblem) -> int:
        tiles = ceil_div(problem.queries, _hopper_rows(problem))
        # Under a causal mask a long tile and a short one make an item.
        return problem.sequences * (ceil_div(tiles, 2) if problem.causal else tiles)

    rules: list[Rule] = [_persistent(sighting, launched, processors)]
    # The result goes out through the copy engine, which does not count; a sum of exponentials a row does.
    if stored := sighting.counters.get("store_bytes"):
        rules.append(lambda problem: stored == _LSE_BYTES * problem.sequences * problem.queries)
    if operations := sighting.counters.get("tensor_ops"):
        rules.append(lambda problem: _fits_hopper_work(operations, problem))
    return build_fact("forward", *rules, head_dim=Window(1, 128))


def _hopper_width(problem: AttentionProblem) -> int:
    return 64 if problem.head_dim <= 64 else 128


def _hopper_rows(problem: AttentionProblem) -> int:
    return _HOPPER_ROWS * (3 if _hopper_width(problem) == 64 and not problem.causal else 2)


def _fits_hopper_work(operations: int, problem: AttentionProblem) -> bool:
    rows = _hopper_rows(problem)
    pairs, rest = divmod(operations, 4 * rows * _HOPPER_KEYS * _hopper_width(problem) * problem.sequences)
    if problem.queries % rows or problem.keys % _HOPPER_KEYS:
        # A warpgroup may have had nothing to do in the last tile.
        return pairs <= count_tile_pairs(problem, rows, _HOPPER_KEYS, skips=False)
    return not rest and pairs == count_tile_pairs(problem, rows, _HOPPER_KEYS, skips=problem.causal)


def _persistent(sighting: Sighting, launched: Callable[[AttentionProblem], int], processors: int) -> Rule:
    blocks = sighting.grid[0] * sighting.grid[1] * sighting.grid[2]

    def rule(problem: AttentionProblem) -> bool:
        wanted = launched(problem)
        return wanted == blocks or (blocks >= processors and wanted > blocks)

    return rule
