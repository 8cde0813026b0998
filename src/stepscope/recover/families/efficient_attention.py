"""PyTorch's memory-efficient attention (`fmha_cutlassF_…`, `fmha_cutlassB_…`), on a grid of (tiles, heads, batch).

The forward kernel's name has its tile of queries and keys, and where it keeps its result says how wide heads are. In
fp32 its counters are understood to the last tile: see `fmha`. Other data types were not measured.
"""

import re

from stepscope.recover.facts import Attention, Sighting, Window, exactly
from stepscope.recover.families import fmha
from stepscope.recover.families.attention_rules import (
    AttentionProblem,
    Rule,
    build_fact,
    ceil_div,
    within_tiles,
)

_NAME = re.compile(
    r"fmha_cutlass(?P<way>[FB])_(?P<type>\w+?)_(?:not)?aligned_(?P<rows>\d+)x(?P<keys>\d+)_(?P<rest>\w+)"
)
_WIDEST_HEAD = 1 << 16
# Where the result is kept, and the tile of keys: from which head size to which.
_HEADS = {("rf", 64): (1, 64), ("rf", 128): (65, 128), ("gmem", 128): (129, _WIDEST_HEAD)}
_LSE_BYTES, _LSE_STEP = 4, 32
_FP32_BYTES = 4
_DEPTH = 32
# The logarithm of a row's sum, which training keeps, in additions and products: more than it takes.
_LSE_PLAIN = 16


def read(sighting: Sighting) -> Attention | None:
    found = _NAME.search(sighting.name.name)
    if found is None:
        return None
    if found["way"] == "B":
        return _read_backward(sighting, int(found["keys"]), found["rest"])
    least, most = _HEADS.get((found["rest"].partition("_")[0], int(found["keys"])), (1, _WIDEST_HEAD))
    tiles, heads, batch = sighting.grid
    rules = _fp32_rules(sighting) if found["type"] == "f32" and "_rf_" in found[0] else ()
    return build_fact(
        "forward",
        *rules,
        batch=exactly(batch),
        heads=exactly(heads),
        length=within_tiles(tiles, int(found["rows"])),
        head_dim=Window(least, most),
    )


def _read_backward(sighting: Sighting, keys: int, rest: str) -> Attention:
    """A block takes some of the tiles of keys: there are no more blocks than tiles."""
    blocks, heads, batch = sighting.grid
    widest = re.search(r"(?:^|_)k(\d+)(?:_|$)", rest)
    return build_fact(
        "backward",
        lambda problem: blocks <= ceil_div(problem.keys, keys),
        batch=exactly(batch),
        heads=exactly(heads),
        head_dim=Window(1, int(widest[1])) if widest else None,
    )


def _fp32_rules(sighting: Sighting) -> tuple[Rule, ...]:
    counters, rules = sighting.counters, list[Rule]()
    if stored := counters.get("store_bytes"):
        rules.append(lambda problem: _fits_stores(stored, problem))
    plain = counters.get("fadd", 0) + counters.get("fmul", 0) if {"fadd", "fmul"} <= counters.keys() else 0
    operations = counters.get("tensor_ops") or fmha.TENSOR_OPS * counters.get("tensor_instructions", 0)
    if plain or operations:
        rules.append(lambda problem: _fits_work(plain, operations, problem))
    return tuple(rules)


def _fits_stores(stored: int, problem: AttentionProblem) -> bool:
    """The result; and in training the logarithm of each row's sum, of rows that are padded."""
    result = _FP32_BYTES * problem.sequences * problem.queries * problem.head_dim
    kept = _LSE_BYTES * problem.sequences * ceil_div(problem.queries, _LSE_STEP) * _LSE_STEP
    return result <= stored <= result + kept


def _fits_work(plain: int, operations: int, problem: AttentionProblem) -> bool:
    """By a mask that is skipped along, one that is a tensor, or none; with dropout or without."""
    masks: tuple[fmha.Mask, ...] = ("causal", "tensor", "none") if problem.causal else ("tensor", "none")
    for mask in masks:
        for dropout in (False, True):
            low = _count(problem, mask, dropout=dropout, up=False)
            high = _count(problem, mask, dropout=dropout, up=True)
            rows = problem.sequences * problem.queries
            if plain and not low.plain <= plain <= high.plain + _LSE_PLAIN * rows:
                continue
            if operations and not low.tensor_operations <= operations <= high.tensor_operations:
                continue
            return True
    return False


def _count(problem: AttentionProblem, mask: fmha.Mask, *, dropout: bool, up: bool) -> fmha.Counts:
    """The least and the most for any scores. Lengths that are no whole tiles lie between those that are."""
    variant = fmha.choose_variant(problem.head_dim)

    def whole(length: int, tile: int) -> int:
        return (ceil_div(length, tile) if up else length // tile) * tile

    one = fmha.count_head(
        whole(problem.queries, variant.queries),
        whole(problem.keys, variant.keys),
        # All that counts of it, and fewer problems to count.
        ceil_div(problem.head_dim, _DEPTH) * _DEPTH,
        mask=mask,
        dropout=dropout,
        share=1.0 if up else 0.0,
    )
    return one.times(problem.sequences)
