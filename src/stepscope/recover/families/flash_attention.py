"""FlashAttention-2 as PyTorch carries it. Grids, tiles and flags follow its source.

Forward: `flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128, 64, …>, dropout, causal, local, alibi, even lengths, even
head, …>` is for heads of up to 96, takes 128 queries a block and 64 keys at a time, on a grid of (tiles of queries,
batch, heads). Backward: the main kernel has tiles of keys in the grid's first place, the two around it tiles of
queries. One query with grouped heads is run as one group of queries: the heads of a group become its rows.
"""

import re
from collections.abc import Iterator

import msgspec

from stepscope.recover.facts import (
    Attention,
    AttentionSizes,
    Sighting,
    Window,
    ceil_div,
    exactly,
    fits_pairs,
    within_tiles,
)
from stepscope.recover.families.tilings import UNKNOWN

_TRAITS = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits<(?:\(int\))?(\d+), (?:\(int\))?(\d+), (?:\(int\))?(\d+),")
_FLAGS = re.compile(r">\s*((?:, *(?:true|false|\(bool\)[01]|[01])){7,8})>")
# Head sizes that kernels are compiled for, and the least that each is used for. Some builds leave out 160 and 224.
_BUCKETS = {32: 1, 64: 33, 96: 65, 128: 97, 160: 129, 192: 129, 224: 193, 256: 193}
_HEAD_STEP = 8  # PyTorch pads heads to a multiple of this
_LSE_BYTES = 4
_ELEMENT_BYTES = 2  # there is no other than fp16 and bf16


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel was compiled for. A flag is None where the name does not tell."""

    head_dim: int
    queries: int
    keys: int
    causal: bool | None = None
    local: bool = False  # a window of keys around each query: how many pairs there are is not known
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
    """`even_head`: the head, padded, is as wide as the kernel was compiled for."""
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
    # A single query sees everything: it needs no mask. With a window there is one, but of another kind.
    if build.causal is not None and not build.local and build.causal != problem.causal and problem.queries > 1:
        return False
    even = problem.queries % build.queries == 0 and problem.keys % build.keys == 0
    return even or not build.even_lengths


def _fits_counters(sighting: Sighting, build: Build, problem: AttentionSizes) -> bool:
    """Work of whole tiles of the compiled head size. The result is stored as it is, and a sum of exponentials a row."""
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
    """The keys in parts, each a block of its own: (tiles of queries, parts, batch × heads)."""
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
    """Where results must not depend on the order of sums, the GPU's blocks are shared out among the heads instead."""
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
