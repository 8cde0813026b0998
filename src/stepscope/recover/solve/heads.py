"""The batch, num_heads and d_head that the attention kernels allow for a number of tokens.

If the grid has a dimension for each, few remain. A persistent kernel fills the GPU whatever the sizes and allows nearly
all of them: then only the most common ones are tried, and the result says that the search was incomplete.
"""

import itertools
from collections.abc import Iterator
from heapq import nsmallest

import numpy as np

from stepscope.recover.evidence.observation import Observation, Seen
from stepscope.recover.facts import Attention, Product, Window, find_window
from stepscope.recover.shape import Cores, divisors
from stepscope.recover.solve.priors import Effort, surprise_of_heads

_MOST_HEADS = 256
_LARGEST_HEAD = 512
_MOST_TRIPLES = 6000
HALF = ("fp16", "bf16")
# Within each of these, the launches of attention kernels do not depend on d_head.
_BUCKETS = ((1, 64), (65, 128), (129, 256), (257, _LARGEST_HEAD))
_PADDING = ("fill", "pad")
# Units of effort: to ask a kernel what it allows, and to store the answer.
_ASKING = 60
_NOTING = 10

Triple = tuple[int, int, int]  # batch, num_heads, d_head


def find_heads(
    observation: Observation, tokens: int, queries: Window, effort: Effort, among: set[Triple] | None = None
) -> tuple[Cores | None, bool]:
    """Return candidates without d_model whose num_heads · d_head is in `queries`, and whether some were skipped. With
    `among`, only these are tried."""
    find = _find_fused if observation.structure.is_fused else _find_written
    with effort.share(2) as part:
        triples = (one for one in find(observation, tokens, queries, part) if among is None or one in among)
        found = list(itertools.islice(triples, _MOST_TRIPLES + 1))
        is_cut = len(found) > _MOST_TRIPLES
        if is_cut:
            every = itertools.chain(found, triples)
            found = nsmallest(
                _MOST_TRIPLES, every, key=lambda one: surprise_of_heads(one[0], one[1], one[2], tokens // one[0])
            )
    backward = [fact for fact in observation.attentions if fact.direction == "backward"]
    groups = {heads: divisors(heads) for heads in {triple[1] for triple in found}}
    asking = _NOTING + _ASKING * len(backward)
    rows = [
        (batch, tokens // batch, 0, heads, kv_heads, size)
        for batch, heads, size in found
        if effort.afford(asking * len(groups[heads]))
        for kv_heads in groups[heads]
        if all(admits(fact, batch, heads, kv_heads, tokens // batch, size) for fact in backward)
    ]
    is_cut = is_cut or effort.is_spent
    if not rows:
        return None, is_cut
    names = ("batch", "context", "d_model", "num_heads", "num_kv_heads", "d_head")
    return Cores(**dict(zip(names, np.array(rows, np.int64).T, strict=True))), is_cut


def admits(fact: Attention, batch: int, heads: int, kv_heads: int, context: int, head_dim: int) -> bool:
    """Whether the sizes fit with or without a causal mask."""
    return any(fact.admits(batch, heads, kv_heads, context, context, head_dim, causal) for causal in (True, False))


def _find_fused(observation: Observation, tokens: int, queries: Window, effort: Effort) -> Iterator[Triple]:
    facts = observation.attentions
    forward = [fact for fact in facts if fact.direction == "forward"]
    step = _head_step(observation)
    sizes = [
        size
        for size in range(step, _LARGEST_HEAD + 1, step)
        if all(fact.head_dim is None or size in fact.head_dim for fact in facts)
    ]
    is_counted = any(one.counters for one in observation.structure.attentions)
    for batch in divisors(tokens):
        if not effort.afford(_MOST_HEADS * (1 + len(facts))):
            return
        if any(fact.batch is not None and batch not in fact.batch for fact in facts):
            continue
        for heads in range(1, _MOST_HEADS + 1):
            if any(fact.heads is not None and heads not in fact.heads for fact in facts):
                continue
            possible = [size for size in sizes if queries.low <= heads * size <= queries.high]
            if not effort.afford(_NOTING * (1 + len(possible))):
                return
            for size in _admitted(forward, batch, heads, tokens // batch, possible, effort, each=is_counted):
                yield batch, heads, size


def _admitted(
    forward: list[Attention], batch: int, heads: int, context: int, sizes: list[int], effort: Effort, *, each: bool
) -> Iterator[int]:
    """Yield the sizes that fit. Without `each`, only the ends of a bucket are tried if both give the same answer."""

    def fits(size: int) -> bool:
        return all(admits(fact, batch, heads, heads, context, size) for fact in forward)

    for low, high in _BUCKETS:
        inside = [size for size in sizes if low <= size <= high]
        asked = [inside[0], inside[-1]] if inside and not each else inside
        if not effort.afford(_ASKING * len(forward) * len(asked)):
            return
        answers = [fits(size) for size in asked]
        if all(answers) or not any(answers):
            yield from inside if any(answers) else ()
        elif each:
            yield from itertools.compress(inside, answers)
        elif effort.afford(_ASKING * len(forward) * len(inside)):
            yield from (size for size in inside if fits(size))


def _head_step(observation: Observation) -> int:
    """Return what d_head is a multiple of. In half precision kernels need multiples of 8, and PyTorch pads other sizes,
    which shows as fill kernels. cuDNN is only called with multiples of 8. The names of memory-efficient kernels say."""
    names = [one.name.name for one in observation.structure.attentions]
    half = observation.structure.dtype in HALF
    if all("cudnn" in name for name in names):
        return 8
    if all("fmha_cutlass" in name for name in names):
        aligned = all("_aligned_" in name for name in names)
        return (8 if half else 4) if aligned else 1
    around = observation.reading.zones["heads"]
    padded = any(
        one.name.library == "Inductor" or any(word in one.name.operation for word in _PADDING) for one in around
    )
    return 8 if half and not padded else 1


def _find_written(observation: Observation, tokens: int, queries: Window, effort: Effort) -> Iterator[Triple]:
    """Unfused attention: scores are a batch of GEMMs, and softmax has a row for each head of each token."""
    scores, values = observation.products.get("scores"), observation.products.get("values")
    for heads in range(1, _MOST_HEADS + 1):
        if not effort.afford(_NOTING * (1 + len(observation.softmaxes))):
            return
        if not all(seen.explained_by((tokens * heads,)) for seen in observation.softmaxes if seen.is_rows):
            continue
        for batch in divisors(tokens):
            context = tokens // batch
            if not all(_fits_softmax(seen, tokens * heads, context) for seen in observation.softmaxes):
                continue
            if not effort.afford(_ASKING * _LARGEST_HEAD // 8):
                return
            for size in _written_sizes(scores, values, batch * heads, context):
                if queries.low <= heads * size <= queries.high:
                    yield batch, heads, size


def _fits_softmax(seen: Seen, rows: int, width: int) -> bool:
    """Whether one of the kernel's possibilities has this many rows of this width. Without widths, rows were checked."""
    return not seen.widths or any(
        width in widths and (rows in count or not seen.is_rows)
        for count, widths in zip(seen.counts, seen.widths, strict=True)
    )


def _written_sizes(scores: Product | None, values: Product | None, sequences: int, context: int) -> Iterator[int]:
    inner: Window | None = Window(1, _LARGEST_HEAD)
    window = find_window(scores, rows=context, columns=context, batch=sequences) if scores else inner
    columns = find_window(values, rows=context, inner=context, batch=sequences) if values else inner
    if window is None or columns is None:
        return
    for size in range(max(window.low, columns.low), min(_LARGEST_HEAD, window.high, columns.high) + 1):
        if (not scores or scores.admits(context, context, size, sequences)) and (
            not values or values.admits(context, size, context, sequences)
        ):
            yield size
