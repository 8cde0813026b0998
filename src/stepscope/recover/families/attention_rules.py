"""Attention as its kernels see it, and facts put together from rules on it."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from stepscope.recover.facts import Attention, Window


class AttentionProblem(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def sequences(self) -> int:
        """Heads of all sequences: each is a problem of its own."""
        return self.batch * self.heads


Rule = Callable[[AttentionProblem], bool]


def build_fact(
    direction: Literal["forward", "backward"],
    *rules: Rule,
    batch: Window | None = None,
    heads: Window | None = None,
    length: Window | None = None,
    head_dim: Window | None = None,
) -> Attention:
    """The windows hold besides the rules: they are looked at here, too."""
    return Attention(
        direction=direction,
        admits=partial(_admits, rules, (batch, heads, length, head_dim)),
        batch=batch,
        heads=heads,
        length=length,
        head_dim=head_dim,
    )


def _admits(
    rules: tuple[Rule, ...],
    windows: tuple[Window | None, ...],
    batch: int,
    heads: int,
    kv_heads: int,
    query_length: int,
    key_length: int,
    head_dim: int,
    causal: bool,
) -> bool:
    seen = (batch, heads, query_length, head_dim)
    if any(window is not None and size not in window for window, size in zip(windows, seen, strict=True)):
        return False
    problem = AttentionProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=query_length,
        keys=key_length,
        head_dim=head_dim,
        causal=causal,
    )
    return all(rule(problem) for rule in rules)


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def within_tiles(tiles: int, size: int) -> Window:
    """The lengths that take this many tiles."""
    return Window((tiles - 1) * size + 1, tiles * size)


def count_tile_pairs(problem: AttentionProblem, query_tile: int, key_tile: int, *, skips: bool) -> int:
    """Pairs of tiles that a head computes. Under a causal mask that is aligned at the last query and key, a tile of
    queries goes as far as its last query sees."""
    across = ceil_div(problem.keys, key_tile)
    down = ceil_div(problem.queries, query_tile)
    if not skips:
        return down * across
    ahead = problem.keys - problem.queries
    seen = (ceil_div(max(0, (tile + 1) * query_tile + ahead), key_tile) for tile in range(down))
    return sum(min(across, count) for count in seen)


def fits_pairs(problem: AttentionProblem, pairs: int, query_tile: int, key_tile: int) -> bool:
    """Whether so many pairs are those of a head. A mask may have been skipped along or handed over as a tensor."""
    choices = (False, True) if problem.causal else (False,)
    return any(pairs == count_tile_pairs(problem, query_tile, key_tile, skips=skips) for skips in choices)
