"""PyTorch's memory-efficient attention (`fmha_cutlassF_…`, `fmha_cutlassB_…`), on a grid of (tiles, heads, batch).

The forward kernel's name has its tile of queries and keys, and where it keeps its result shows how wide heads are. In
fp32 its counters are understood exactly: `count_head` computes them. Other data types were not measured.
"""

import re
from functools import cache
from typing import Literal

import msgspec

from stepscope.recover.facts import (
    Attention,
    AttentionSizes,
    Rule,
    Sighting,
    Window,
    ceil_div,
    exactly,
    within_tiles,
)

# --- Instruction counts in fp32, from the sizes alone
#
# `fmha_cutlassF_f32_aligned_*_sm80` computes GEMMs on the tensor cores, as three TF32 GEMMs. The floating-point
# counters do not include those, only everything else: splitting each factor into a high and a low part, the softmax,
# dropout. So the counters depend on the tiles, and textbook formulas of attention are off by factors of 25 to 239.
#
# A block processes a tile of queries of one head and loops over the keys, one tile at a time; with a causal mask it
# stops at its last query. Each constant below is the number of instructions of one thread in such a step. The numbers
# come from the disassembled kernel, combined along the control flow of its source; none is fitted. The comments next to
# them say what the instructions are probably for. One quantity depends on the data: how often the largest score of a
# row is in a later tile, so that the sums so far are rescaled. For randomly ordered scores its expectation is known;
# from never to always is the range for any scores.
#
# Verified for: lengths of whole tiles, with dropout (the tables of `bench/notes_tables.py`) and without, with a causal
# mask that is skipped or passed as a tensor; the widest kernel with a single tile of keys.


# A causal mask skips tiles. As a tensor that is added to every score it masks the same and saves nothing.
Mask = Literal["none", "causal", "tensor"]

WARP_THREADS = 32
# A thread's share of a tile GEMM: a warp computes 32 × 32 of it in all three kernels.
_RESULTS = 32
# Per 32 elements of the summed dimension: 64 differences for the low parts of the factors (8 of each in each of four
# instruction depths), and one addition per result, which is accumulated outside the tensor cores for accuracy.
_SPLIT_DEPTH = 32
_SPLIT = 96
_SPLIT_INSTRUCTIONS = 96  # on the tensor cores, per warp: 4 depths × 2 × 4 pieces of the tile × 3 GEMMs
TENSOR_OPS = 2 * 16 * 8 * 8  # per instruction
# The softmax: scaling scores by log2(e), the row sum with its exchange between lanes, the difference to the maximum.
_TO_BASE_2 = 32
_ROW_SUM = 40
_MINUS_MAXIMUM = 32
# Four random numbers at a time: one fma each to map them to [0, 1), and as many comparisons and multiplications.
_DROPPED_AT_A_TIME = 4
_DROPOUT_PLAIN = 8
# `1.0 / (1.0 - p)` in double precision, by every thread for every tile: a division is five fused operations.
_DROPOUT_DOUBLE_FMA = 5
_DROPOUT_DOUBLE_ADD = 1
# Per row at the end: a reciprocal of the sum, two fused operations and one multiplication.
_ROW_FMA = 2
_ROW_PLAIN = 1


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One of the three kernels. The head size determines which is used."""

    queries: int
    keys: int
    threads: int
    # The first GEMM splits fragments ahead of its loop: this many more instructions per thread.
    ahead: int
    rows_of_thread: int
    # Whether the result stays in registers ("rf"). If not, it is finished in memory after each tile of keys ("gmem").
    in_registers: bool

    @property
    def name(self) -> str:
        return f"{self.queries}x{self.keys}_{'rf' if self.in_registers else 'gmem'}"

    @property
    def warps_beside(self) -> int:
        """The warps that share a row of scores."""
        return self.keys // WARP_THREADS


NARROW = Variant(queries=64, keys=64, threads=128, ahead=32, rows_of_thread=8, in_registers=True)
MIDDLE = Variant(queries=64, keys=128, threads=256, ahead=48, rows_of_thread=4, in_registers=True)
WIDE = Variant(queries=32, keys=128, threads=128, ahead=48, rows_of_thread=4, in_registers=False)


def choose_variant(head_dim: int) -> Variant:
    return NARROW if head_dim <= NARROW.keys else MIDDLE if head_dim <= MIDDLE.keys else WIDE


class InstructionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Thread instructions, except `tensor`, which counts warp instructions. `plain` are additions and
    multiplications."""

    plain: float = 0
    fma: float = 0
    double_fma: int = 0
    double_plain: int = 0
    tensor: int = 0

    @property
    def fp32_operations(self) -> float:
        return self.plain + 2 * self.fma

    @property
    def fp64_operations(self) -> int:
        return self.double_plain + 2 * self.double_fma

    @property
    def tensor_operations(self) -> int:
        return self.tensor * TENSOR_OPS

    def __add__(self, other: "InstructionCounts") -> "InstructionCounts":
        return InstructionCounts(
            plain=self.plain + other.plain,
            fma=self.fma + other.fma,
            double_fma=self.double_fma + other.double_fma,
            double_plain=self.double_plain + other.double_plain,
            tensor=self.tensor + other.tensor,
        )

    def times(self, factor: int) -> "InstructionCounts":
        return InstructionCounts(
            plain=self.plain * factor,
            fma=self.fma * factor,
            double_fma=self.double_fma * factor,
            double_plain=self.double_plain * factor,
            tensor=self.tensor * factor,
        )


@cache
def count_head(
    query_length: int,
    key_length: int,
    head_dim: int,
    *,
    mask: Mask,
    dropout: bool = False,
    share: float | None = None,
) -> InstructionCounts:
    """Return the instructions of one head of one sequence. `share` scales everything that depends on the data: 0 and 1
    are the minimum and maximum for any data; None is the expectation for randomly ordered scores, and for a causal mask
    passed as a tensor."""
    variant = choose_variant(head_dim)
    total = InstructionCounts()
    for first_query in range(0, query_length, variant.queries):
        end = min(first_query + variant.queries, key_length) if mask == "causal" else key_length
        for first_key in range(0, end, variant.keys):
            keys = min(variant.keys, end - first_key)
            total += _score(variant, head_dim)
            total += _normalise(variant, keys)
            total += _hide(variant, first_query, first_key, keys, mask, share)
            total += _follow_maximum(variant, first_query, first_key, keys, mask, share)
            total += _drop(variant, keys) if dropout else InstructionCounts()
            total += _sum_values(variant, head_dim, keys)
        total += _finish_rows(variant) if variant.in_registers else InstructionCounts()
    return total


def _score(variant: Variant, head_dim: int) -> InstructionCounts:
    """Queries times keys, and the scale."""
    depths = -(-head_dim // _SPLIT_DEPTH)
    return InstructionCounts(
        plain=variant.threads * (_SPLIT * depths + variant.ahead + _RESULTS),
        tensor=variant.threads // WARP_THREADS * _SPLIT_INSTRUCTIONS * depths,
    )


def _normalise(variant: Variant, keys: int) -> InstructionCounts:
    """The softmax. Differences are computed for existing keys; every additional warp sums each row once more."""
    each = _TO_BASE_2 + _ROW_SUM + _MINUS_MAXIMUM * keys / variant.keys
    return InstructionCounts(plain=variant.threads * each + variant.queries * variant.warps_beside)


def _hide(
    variant: Variant, first_query: int, first_key: int, keys: int, mask: Mask, share: float | None
) -> InstructionCounts:
    """exp2 takes two more instructions if its argument is out of range, such as minus infinity. A mask that is a tensor
    is added to the existing scores."""
    if mask == "none":
        return InstructionCounts()
    last = first_key + keys - 1
    hidden: float = sum(max(0, last - max(first_query + row, first_key - 1)) for row in range(variant.queries))
    if mask == "causal":
        return InstructionCounts(plain=2 * hidden)
    scores = variant.queries * keys
    return InstructionCounts(plain=scores + 2 * (hidden if share is None else share * scores))


def _follow_maximum(
    variant: Variant, first_query: int, first_key: int, keys: int, mask: Mask, share: float | None
) -> InstructionCounts:
    """In the first tile every maximum changes from minus infinity; later, the sums so far are rescaled."""
    if first_key == 0:
        return InstructionCounts(plain=4 * variant.queries)
    assert variant.in_registers, "the widest kernel was only observed with a single key tile"
    moved = 0.0
    for row in range(variant.queries):
        seen = keys if mask == "none" else min(keys, max(0, first_query + row + 1 - first_key))
        moved += seen / (first_key + seen) if share is None else share
    return InstructionCounts(plain=2 * moved + variant.threads * _RESULTS)


def _drop(variant: Variant, keys: int) -> InstructionCounts:
    """The threads of a row share its keys and draw random numbers for four of them at a time."""
    share = -(-keys // (variant.threads // variant.queries))
    draws = -(-share // _DROPPED_AT_A_TIME)
    return InstructionCounts(
        plain=variant.threads * _DROPOUT_PLAIN * draws,
        fma=variant.threads * _DROPPED_AT_A_TIME * draws,
        double_fma=variant.threads * _DROPOUT_DOUBLE_FMA,
        double_plain=variant.threads * _DROPOUT_DOUBLE_ADD,
    )


def _sum_values(variant: Variant, head_dim: int, keys: int) -> InstructionCounts:
    """Weights times values. A result in memory is computed in pieces, each finished at once."""
    pieces = 1 if variant.in_registers else -(-head_dim // variant.keys)
    depths = -(-keys // _SPLIT_DEPTH)
    product = InstructionCounts(
        plain=variant.threads * (_SPLIT * depths + _RESULTS),
        tensor=variant.threads // WARP_THREADS * _SPLIT_INSTRUCTIONS * depths,
    )
    return (product if variant.in_registers else product + _finish_rows(variant)).times(pieces)


def _finish_rows(variant: Variant) -> InstructionCounts:
    """The output divided by the sums of its rows."""
    return InstructionCounts(
        plain=variant.threads * (variant.rows_of_thread * _ROW_PLAIN + _RESULTS),
        fma=variant.threads * variant.rows_of_thread * _ROW_FMA,
    )


# --- Facts

_NAME = re.compile(
    r"fmha_cutlass(?P<way>[FB])_(?P<type>\w+?)_(?:not)?aligned_(?P<rows>[1-9]\d{0,3})x(?P<keys>[1-9]\d{0,3})_(?P<rest>\w+)"
)
_WIDEST_HEAD = 1 << 16
# Where the result is kept, and the tile of keys: the range of head sizes.
_HEADS = {("rf", 64): (1, 64), ("rf", 128): (65, 128), ("gmem", 128): (129, _WIDEST_HEAD)}
_LSE_BYTES, _LSE_STEP = 4, 32
_FP32_BYTES = 4
_DEPTH = 32
# An upper bound for the additions and multiplications of the logarithm of a row's sum, which training stores.
_LSE_PLAIN = 16


def read_efficient(sighting: Sighting) -> Attention | None:
    found = _NAME.search(sighting.name.name)
    if found is None:
        return None
    if found["way"] == "B":
        return _read_backward(sighting, int(found["keys"]), found["rest"])
    least, most = _HEADS.get((found["rest"].partition("_")[0], int(found["keys"])), (1, _WIDEST_HEAD))
    tiles, heads, batch = sighting.grid
    rules = _fp32_rules(sighting) if found["type"] == "f32" and "_rf_" in found[0] else ()
    return Attention(
        "forward",
        rules,
        batch=exactly(batch),
        heads=exactly(heads),
        length=within_tiles(tiles, int(found["rows"])),
        head_dim=Window(least, most),
    )


def _read_backward(sighting: Sighting, keys: int, rest: str) -> Attention:
    """A block processes some of the tiles of keys: there are no more blocks than tiles."""
    blocks, heads, batch = sighting.grid
    widest = re.search(r"(?:^|_)k([1-9]\d{0,5})(?:_|$)", rest)
    return Attention(
        "backward",
        (lambda problem: blocks <= ceil_div(problem.keys, keys),),
        batch=exactly(batch),
        heads=exactly(heads),
        head_dim=Window(1, int(widest[1])) if widest else None,
    )


def _fp32_rules(sighting: Sighting) -> tuple[Rule, ...]:
    counters, rules = sighting.counters, list[Rule]()
    if stored := counters.get("store_bytes"):
        rules.append(lambda problem: _fits_stores(stored, problem))
    plain = counters.get("fadd", 0) + counters.get("fmul", 0) if {"fadd", "fmul"} <= counters.keys() else 0
    operations = counters.get("tensor_ops") or TENSOR_OPS * counters.get("tensor_instructions", 0)
    if plain or operations:
        rules.append(lambda problem: _fits_work(plain, operations, problem))
    return tuple(rules)


def _fits_stores(stored: int, problem: AttentionSizes) -> bool:
    """Whether the stored bytes fit: the result, and in training the logarithm of each row's sum, for padded rows."""
    result = _FP32_BYTES * problem.sequences * problem.queries * problem.head_dim
    kept = _LSE_BYTES * problem.sequences * ceil_div(problem.queries, _LSE_STEP) * _LSE_STEP
    return result <= stored <= result + kept


def _fits_work(plain: int, operations: int, problem: AttentionSizes) -> bool:
    """Whether the work fits with a mask that skips tiles, a mask that is a tensor, or none; with or without dropout."""
    masks: tuple[Mask, ...] = ("causal", "tensor", "none") if problem.causal else ("tensor", "none")
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


def _count(problem: AttentionSizes, mask: Mask, *, dropout: bool, up: bool) -> InstructionCounts:
    """Return the minimum for any scores, or with `up` the maximum, from the lengths rounded to whole tiles."""
    variant = choose_variant(problem.head_dim)

    def whole(length: int, tile: int) -> int:
        return (ceil_div(length, tile) if up else length // tile) * tile

    one = count_head(
        whole(problem.queries, variant.queries),
        whole(problem.keys, variant.keys),
        # Everything that the counters depend on, so that fewer problems need counting.
        ceil_div(problem.head_dim, _DEPTH) * _DEPTH,
        mask=mask,
        dropout=dropout,
        share=1.0 if up else 0.0,
    )
    return one.times(problem.sequences)
