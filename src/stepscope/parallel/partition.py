"""Who keeps the optimizer's state of which parameter.

Parameters stay whole: optimizers may do what they like with one (take its norm, factor it), and a state can be saved
and loaded on another number of ranks. Each goes to the rank that has least so far, the largest first. Whatever the
order, no rank then has more than an even share plus the largest parameter; taking the largest first makes it far less.
"""

import heapq
from collections.abc import Sequence


def assign_owners(sizes_bytes: Sequence[int], loads_bytes: Sequence[int]) -> list[int]:
    """A rank for each size, given what ranks have already. Ties go to the lower rank: all ranks decide alike."""
    if not loads_bytes:
        raise ValueError("`loads_bytes` has one entry for each rank, and there is none")
    ranks = [(load_bytes, rank) for rank, load_bytes in enumerate(loads_bytes)]
    heapq.heapify(ranks)
    owners = [0] * len(sizes_bytes)
    # A stable sort: equal sizes stay in order.
    for position in sorted(range(len(sizes_bytes)), key=sizes_bytes.__getitem__, reverse=True):
        load_bytes, rank = ranks[0]
        owners[position] = rank
        heapq.heapreplace(ranks, (load_bytes + sizes_bytes[position], rank))
    return owners
