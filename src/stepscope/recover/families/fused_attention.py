"""Fused attention: what names, grids and counters say about batch, heads, lengths and head size.

If the grid has a dimension for each, batch and heads are exact and the length is known to within a tile. Persistent
kernels (cuDNN's, and ours for Hopper) launch a single number: the tiles of all heads together, or one block per SM.

A model with a causal mask may run a kernel that skips masked tiles, or one that gets the mask as a tensor and computes
all tiles. So the work fits a causal model if either fits; without a mask nothing is skipped.

The grids of our own kernels follow their launchers, those of FlashAttention its source. Those of cuDNN and
memory-efficient attention were measured on problems of known sizes.
"""

import re
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from stepscope.recover.facts import (
    Attention,
    AttentionSizes,
    Rule,
    Sighting,
    Window,
    ceil_div,
    count_tile_pairs,
    exactly,
    fits_pairs,
    within_tiles,
)
from stepscope.recover.families.efficient_attention import read_efficient
from stepscope.recover.families.grids import UNKNOWN

_CUDNN = re.compile(r"_flash_(fprop|bprop)_wgmma_\w+?_([1-9]\d{0,3})x([1-9]\d{0,3})x([1-9]\d{0,3})_\d+x\d+x1_cga1x1x1")
# Tiles of (queries or keys, the other of the two, the head) with a known assignment to blocks.
_CUDNN_SEEN = {"fprop": ((64, 128, 64), (64, 128, 128)), "bprop": ((64, 64, 64),)}
# The rows per block, in the grid's first dimension, for heads of 64; unknown for others.
_CUDNN_AROUND = re.compile(r"cudnn::fusion::(compute_dot_do_o|convert_dq|fmha_reduce_head)")
_CUDNN_AROUND_ROWS = {"compute_dot_do_o": 16, "convert_dq": 32, "fmha_reduce_head": 16}
_CUDNN_AROUND_HEAD = 64
_WARPGROUP_THREADS = 128
_TRITON_TILES = (16, 32, 64, 128)
_HOPPER_ROWS = 64  # of a warpgroup
_HOPPER_KEYS = 128
_HOPPER_LONG = 4096  # queries
# For kernels whose grid is only tiles: the possible tiles, and whether they are tiles of keys.
_OWN_GRIDS: dict[str, tuple[Literal["forward", "backward"], tuple[int, ...], bool]] = {
    "attention_hopper_bound": ("backward", (_HOPPER_KEYS,), True),
    "attention_hopper_prepare": ("backward", (128,), False),
    "attention_hopper_finish": ("backward", (64,), False),
    "attention_hopper_backward": ("backward", (_HOPPER_KEYS,), True),
    "attention_forward": ("forward", _TRITON_TILES, False),
    "attention_backward_queries": ("backward", _TRITON_TILES, False),
    "attention_backward_keys": ("backward", _TRITON_TILES, True),
}
_LSE_BYTES = 4


def read_attention(sighting: Sighting, processors: int, *, portable: bool = False) -> Attention | None:
    """Return what a fused attention kernel allows. `processors` is the number of SMs. `portable`: whatever the GPU."""
    name = sighting.name.name
    if (found := _CUDNN_AROUND.search(name)) and not portable:
        return _read_around_cudnn(sighting, found[1])
    if sighting.name.kernel_class != "attention":
        return None
    if "fmha_cutlass" in name:
        return read_efficient(sighting)
    if (found := _CUDNN.search(name)) and not portable:
        tile = (int(found[2]), int(found[3]), int(found[4]))
        return _read_cudnn(sighting, found[1], tile, processors)
    if sighting.name.library == "stepscope":
        return _read_own(sighting, processors)
    if sighting.name.library == "FlashAttention":
        return read_flash(sighting, processors)
    return None


def _read_cudnn(sighting: Sighting, way: str, tile: tuple[int, int, int], processors: int) -> Attention:
    """One warpgroup of a block copies; each of the others processes a tile of rows: queries forward, keys backward."""
    direction: Literal["forward", "backward"] = "forward" if way == "fprop" else "backward"
    head_dim = Window(1, tile[2])
    rows = tile[0] * (sighting.block[0] // _WARPGROUP_THREADS - 1)
    if tile not in _CUDNN_SEEN[way] or rows <= 0:
        return Attention(direction, (_evenly(sighting, processors),), head_dim=head_dim)

    def launched(problem: AttentionSizes) -> int:
        return problem.sequences * ceil_div(problem.queries if way == "fprop" else problem.keys, rows)

    rules: list[Rule] = [_persistent(sighting, launched, processors)]
    if way == "fprop" and (operations := sighting.counters.get("tensor_ops")):
        rules.append(lambda problem: _fits_cudnn_work(operations, rows, tile, problem))
    return Attention(direction, tuple(rules), head_dim=head_dim)


def _evenly(sighting: Sighting, processors: int) -> Rule:
    """All heads have the same number of blocks, unless the GPU is full."""
    blocks = sighting.grid[0] * sighting.grid[1] * sighting.grid[2]
    return lambda problem: blocks >= processors or blocks % problem.sequences == 0


def _fits_cudnn_work(operations: int, rows: int, tile: tuple[int, int, int], problem: AttentionSizes) -> bool:
    """Both GEMMs process whole tiles of queries and keys. How narrow heads are padded within a tile was not
    measured."""
    _, keys, widest = tile
    masks = (False, True) if problem.causal else (False,)
    for skips in masks:
        scores = count_tile_pairs(problem, rows, keys, skips=skips) * rows * keys * problem.sequences
        if 4 * scores * problem.head_dim <= operations <= 4 * scores * widest:
            return True
    # With different numbers of queries and keys, the alignment of the mask was not measured.
    return problem.causal and problem.queries != problem.keys and operations <= 4 * scores * widest


def _read_around_cudnn(sighting: Sighting, which: str) -> Attention:
    """The kernels before and after cuDNN's main backward kernel, on a grid of (tiles of rows, batch, heads)."""
    tiles, batch, heads = sighting.grid
    rows = _CUDNN_AROUND_ROWS[which]
    grouped = which == "fmha_reduce_head"

    def rule(problem: AttentionSizes) -> bool:
        if grouped and heads != problem.kv_heads:
            return False
        length = problem.keys if grouped else problem.queries
        return problem.head_dim != _CUDNN_AROUND_HEAD or tiles == ceil_div(length, rows)

    return Attention("backward", (rule,), batch=exactly(batch), heads=None if grouped else exactly(heads))


def _read_own(sighting: Sighting, processors: int) -> Attention | None:
    name = sighting.name.name.partition("(")[0]
    if name == "attention_hopper_forward":
        return _read_hopper_forward(sighting, processors)
    if name not in _OWN_GRIDS:
        return None
    direction, tiles, of_keys = _OWN_GRIDS[name]
    return Attention(direction, (_on_grid(sighting, tiles, of_keys=of_keys),))


def _on_grid(sighting: Sighting, tiles: tuple[int, ...], *, of_keys: bool = False) -> Rule:
    """One of these tiles gives the grid: tiles of queries for every head, or of keys for every key-value head."""

    def rule(problem: AttentionSizes) -> bool:
        sequences = problem.batch * (problem.kv_heads if of_keys else problem.heads)
        length = problem.keys if of_keys else problem.queries
        return any(sighting.grid[0] == sequences * ceil_div(length, tile) for tile in tiles)

    return rule


def _read_hopper_forward(sighting: Sighting, processors: int) -> Attention:
    def fits_grid(problem: AttentionSizes) -> bool:
        return any(
            _persistent(sighting, _count_hopper_items(rows), processors)(problem) for rows in _hopper_rows(problem)
        )

    rules: list[Rule] = [fits_grid]
    # The result is stored by TMA, which is not counted; one sum of exponentials per row is.
    if stored := sighting.counters.get("store_bytes"):
        rules.append(lambda problem: stored == _LSE_BYTES * problem.sequences * problem.queries)
    if operations := sighting.counters.get("tensor_ops"):
        rules.append(lambda problem: _fits_hopper_work(operations, problem))
    return Attention("forward", tuple(rules), head_dim=Window(1, 128))


def _hopper_width(problem: AttentionSizes) -> int:
    return 64 if problem.head_dim <= 64 else 128


def _hopper_rows(problem: AttentionSizes) -> tuple[int, ...]:
    """The rows of a tile. Long sequences under a causal mask have had three warpgroups since the second version."""
    two, three = 2 * _HOPPER_ROWS, 3 * _HOPPER_ROWS
    if _hopper_width(problem) != 64:
        return (two,)
    if not problem.causal:
        return (three,)
    return (two, three) if problem.queries >= _HOPPER_LONG else (two,)


def _count_hopper_items(rows: int) -> Callable[[AttentionSizes], int]:
    def count(problem: AttentionSizes) -> int:
        tiles = ceil_div(problem.queries, rows)
        # With a causal mask, a long tile and a short one form a work item.
        return problem.sequences * (ceil_div(tiles, 2) if problem.causal else tiles)

    return count


def _fits_hopper_work(operations: int, problem: AttentionSizes) -> bool:
    return any(_fits_hopper_rows(operations, problem, rows) for rows in _hopper_rows(problem))


def _fits_hopper_rows(operations: int, problem: AttentionSizes, rows: int) -> bool:
    pairs, rest = divmod(operations, 4 * rows * _HOPPER_KEYS * _hopper_width(problem) * problem.sequences)
    skips_own = problem.causal and rows > _HOPPER_KEYS
    if problem.queries % rows or problem.keys % _HOPPER_KEYS or skips_own:
        # A warpgroup may be idle in the last tile, or skip tiles that only the others see.
        return pairs <= count_tile_pairs(problem, rows, _HOPPER_KEYS, skips=False)
    return not rest and pairs == count_tile_pairs(problem, rows, _HOPPER_KEYS, skips=problem.causal)


def _persistent(sighting: Sighting, launched: Callable[[AttentionSizes], int], processors: int) -> Rule:
    blocks = sighting.grid[0] * sighting.grid[1] * sighting.grid[2]

    def rule(problem: AttentionSizes) -> bool:
        wanted = launched(problem)
        return wanted == blocks or (blocks >= processors and wanted > blocks)

    return rule


# --- FlashAttention-2 in PyTorch
#
# Forward: `flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128, 64, …>, dropout, causal, local, alibi, even lengths, even
# head, …>` is for heads of up to 96, and processes 128 queries per block and 64 keys at a time, on a grid of (tiles of
# queries, batch, heads). Backward: the main kernel has tiles of keys in the grid's first dimension, the two around it
# tiles of queries. A single query with grouped heads runs as one group of queries: the heads of a group become its
# rows.

_TRAITS = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits<" + 3 * r"(?:\(int\))?([1-9]\d{0,3}), ")
_FLAGS = re.compile(r">\s*((?:, *(?:true|false|\(bool\)[01]|[01])){7,8})>")
# The compiled head sizes, and the smallest head that each is used for. Some builds leave out 160 and 224.
_BUCKETS = {32: 1, 64: 33, 96: 65, 128: 97, 160: 129, 192: 129, 224: 193, 256: 193}
_HEAD_STEP = 8  # PyTorch pads heads to a multiple of this
_ELEMENT_BYTES = 2  # only fp16 and bf16 are supported


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel was compiled for. A flag is None if the name does not show it."""

    head_dim: int
    queries: int
    keys: int
    causal: bool | None = None
    local: bool = False  # a window of keys around each query: the number of pairs is unknown
    even_lengths: bool | None = None
    even_head: bool | None = None


def read_flash(sighting: Sighting, processors: int) -> Attention | None:
    name = sighting.name.name
    build = parse(name)
    if build is None or "combine" in name:
        return None
    if "flash_fwd_splitkv" in name:
        return _read_split(sighting, build)
    if "flash_fwd_kernel" in name:
        return _read_forward(sighting, build)
    if "flash_bwd_dot_do_o" in name or "flash_bwd_convert_dq" in name:
        return _read_around_backward(sighting, build)
    if "flash_bwd_dq_dk_dv" in name:
        return _read_backward(sighting, build, processors)
    return None


def parse(name: str) -> Build | None:
    traits = _TRAITS.search(name)
    if traits is None or int(traits[1]) not in _BUCKETS:
        return None
    build = Build(head_dim=int(traits[1]), queries=int(traits[2]), keys=int(traits[3]))
    found = _FLAGS.search(name)
    if found is None:
        return build
    flags = [word.strip().removeprefix("(bool)") in ("true", "1") for word in found[1].split(",")[1:]]
    return msgspec.structs.replace(build, causal=flags[1], local=flags[2], even_lengths=flags[4], even_head=flags[5])


def _head_dims(build: Build) -> Window:
    """`even_head`: the padded head is as wide as the kernel was compiled for."""
    least, most = _BUCKETS[build.head_dim], build.head_dim
    if build.even_head is None:
        return Window(least, most)
    return Window(most - _HEAD_STEP + 1, most) if build.even_head else Window(least, most - _HEAD_STEP)


def _read_forward(sighting: Sighting, build: Build) -> Attention:
    tiles, batch, heads = sighting.grid

    def rule(problem: AttentionSizes) -> bool:
        return any(_fits_forward(sighting, build, shaped) for shaped in _shapes(problem))

    # A group of heads may have become rows, so a single query leaves the windows open.
    whole = tiles > 1
    return Attention(
        "forward",
        (rule,),
        batch=exactly(batch),
        heads=exactly(heads) if whole else None,
        length=within_tiles(tiles, build.queries) if whole else Window(1, build.queries),
        head_dim=_head_dims(build),
    )


def _shapes(problem: AttentionSizes) -> Iterator[AttentionSizes]:
    yield problem
    if problem.queries == 1 and problem.heads > problem.kv_heads:
        group = problem.heads // problem.kv_heads
        yield msgspec.structs.replace(problem, queries=group, heads=problem.kv_heads, causal=False)


def _fits_forward(sighting: Sighting, build: Build, problem: AttentionSizes) -> bool:
    tiles, _, heads = sighting.grid
    if heads != problem.heads or tiles != ceil_div(problem.queries, build.queries):
        return False
    return _fits_flags(build, problem) and _fits_counters(sighting, build, problem)


def _fits_flags(build: Build, problem: AttentionSizes) -> bool:
    # A single query sees everything and needs no mask. A sliding window is another kind of mask.
    if build.causal is not None and not build.local and build.causal != problem.causal and problem.queries > 1:
        return False
    even = problem.queries % build.queries == 0 and problem.keys % build.keys == 0
    return even or not build.even_lengths


def _fits_counters(sighting: Sighting, build: Build, problem: AttentionSizes) -> bool:
    """The work is that of whole tiles of the compiled head size. The result is stored unpadded, with one sum of
    exponentials per row."""
    if (operations := sighting.counters.get("tensor_ops")) and not build.local:
        pair = 4 * build.queries * build.keys * build.head_dim
        pairs, rest = divmod(operations, pair * problem.sequences)
        if rest or not fits_pairs(problem, pairs, build.queries, build.keys):
            return False
    if stored := sighting.counters.get("store_bytes"):
        row = _ELEMENT_BYTES * ceil_div(problem.head_dim, _HEAD_STEP) * _HEAD_STEP + _LSE_BYTES
        return stored == problem.sequences * problem.queries * row
    return True


def _read_split(sighting: Sighting, build: Build) -> Attention:
    """The keys are split, with a block for each split: (tiles of queries, splits, batch × heads)."""
    tiles, parts, sequences = sighting.grid

    def fits(problem: AttentionSizes) -> bool:
        if tiles != ceil_div(problem.queries, build.queries):
            return False
        return sequences == problem.sequences or (parts, sequences) == (problem.batch, problem.heads)

    return Attention(
        "forward", (lambda problem: any(fits(shaped) for shaped in _shapes(problem)),), head_dim=_head_dims(build)
    )


def _read_around_backward(sighting: Sighting, build: Build) -> Attention:
    tiles, batch, heads = sighting.grid
    return Attention(
        "backward",
        batch=exactly(batch),
        heads=exactly(heads),
        length=within_tiles(tiles, build.queries),
        head_dim=_head_dims(build),
    )


def _read_backward(sighting: Sighting, build: Build, processors: int) -> Attention:
    """In deterministic mode, the blocks of the GPU are divided among the heads instead."""
    tiles, batch, heads = sighting.grid
    shared_out = processors == UNKNOWN or tiles == ceil_div(processors, batch * heads)
    return Attention(
        "backward",
        (
            lambda problem: _fits_flags(build, problem),
            lambda problem: shared_out or tiles == ceil_div(problem.keys, build.keys),
        ),
        batch=exactly(batch),
        heads=exactly(heads),
        head_dim=_head_dims(build),
    )
