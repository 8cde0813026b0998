"""Which items of two sequences belong together: a longest common subsequence.

The rows of the usual table are kept as bits of one integer each (Hyyrö 2004), so that sequences of thousands of kernels
take milliseconds. Tried and lost: `difflib`, which prefers long runs of equal items. If only the classes of products
are known, it joins fewer of them, and takes hundreds of times as long.
"""

from collections.abc import Hashable, Sequence
from itertools import takewhile

MOST_ITEMS = 20_000  # of a sequence: the bits of the table take 50 MB


def align(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of equal items, in order, as many as possible. Empty for sequences that are too long."""
    if max(len(a), len(b)) > MOST_ITEMS:
        return []
    head = _count_equal(a, b)
    tail = _count_equal(a[head:][::-1], b[head:][::-1])
    inner = _align_inner(a[head : len(a) - tail], b[head : len(b) - tail])
    return [
        *((place, place) for place in range(head)),
        *((head + one, head + other) for one, other in inner),
        *((len(a) - place, len(b) - place) for place in range(tail, 0, -1)),
    ]


def _count_equal(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return how many items at the start are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _align_inner(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """A zero in bit `i` of row `j` says that the first `j` items of B have one more item in common with the first
    `i + 1` items of A than with the first `i`."""
    places: dict[Hashable, int] = {}
    for place, item in enumerate(a):
        places[item] = places.get(item, 0) | 1 << place
    whole = (1 << len(a)) - 1
    row, rows = whole, []
    for item in b:
        common = row & places.get(item, 0)
        row = ((row + common) | (row - common)) & whole
        rows.append(row)
    pairs = []
    one, other = len(a), len(b)
    while one and other:
        if rows[other - 1] >> (one - 1) & 1:
            one -= 1
            continue
        other -= 1
        if not other or rows[other - 1] >> (one - 1) & 1:
            one -= 1
            pairs.append((one, other))
    return pairs[::-1]
