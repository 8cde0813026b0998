"""Which keys a query sees, and what follows from it for tiles: the one place that a new kind of mask has to change.

A causal mask is aligned at the end: query i of L sees key j of K iff j <= i + K - L. Tiles that nobody sees are
skipped. Tiles in which every query sees every key need no mask, and kernels branch around it: a comparison and a
select for every score.
"""

import triton
import triton.language as tl


@triton.jit
def sees(query, key, num_queries, num_keys, CAUSAL: tl.constexpr):
    """Whether each query sees each key; the two broadcast. Of a query beyond the last it may say anything."""
    if CAUSAL:
        visible = key <= query + (num_keys - num_queries)
    else:
        visible = key < num_keys
    return visible


@triton.jit
def keys_of_queries(first_query, num_queries, num_keys, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """For BLOCK_M queries: every one of them sees the keys before `all_see`, and none a key from `end` on."""
    all_see = num_keys
    end = num_keys
    if CAUSAL:
        seen_by_first = first_query + 1 + num_keys - num_queries
        all_see = tl.minimum(num_keys, tl.maximum(0, seen_by_first))
        end = tl.minimum(num_keys, tl.maximum(0, seen_by_first + BLOCK_M - 1))
    return all_see, end


@triton.jit
def queries_of_keys(first_key, num_queries, num_keys, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """For BLOCK_N keys: no query before `first` sees one of them, and every query from `all_see` on sees them all."""
    first = 0
    all_see = 0
    if CAUSAL:
        first = tl.maximum(0, first_key + num_queries - num_keys)
        all_see = tl.maximum(0, first_key + BLOCK_N - 1 + num_queries - num_keys)
    return first, all_see
