"""Memory snapshots: whether their sizes are those of the claimed run, and what they say about its weights.

A snapshot has no kernels, so nothing in it refutes a claim. But if the sizes of the claimed weights and activations are
not in it, it is a snapshot of another run, and it must not support the claim.
"""

from collections.abc import Iterable, Iterator, Sequence

from stepscope.recover.claims.claim import Claim
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.shape import HEAD_ROWS, ClaimedShape, Size, count_head_rows, times

_BYTES = (2, 4)  # of an element
_FULL_PRECISION = ("fp32", "tf32")


def count_feed_forward(evidence: Sequence[KernelEvidence], claim: Claim) -> tuple[int, int] | None:
    """Return the number of allocations with the size of a feed-forward matrix, and how many the claim has."""
    sizes = [size for one in evidence for size in one.allocations]
    matrix, layers = times(claim.d_model, claim.d_ff), claim.num_layers
    if not sizes or matrix is None or layers is None:
        return None
    return max(sizes.count(matrix * size) for size in _BYTES), layers * (3 if claim.gated else 2)


def count_embeddings(evidence: Sequence[KernelEvidence], claim: Claim) -> int | None:
    """Return how many matrices of vocab_size · d_model the model holds: one if the LM head is tied to the embedding.
    Optimizers keep the same number of copies of every matrix."""
    for one in evidence:
        copies, found = _count_copies(one, claim), _count_held(one, times(claim.vocab_size, claim.d_model))
        if copies and found in (copies, 2 * copies):
            return found // copies
    return None


def find_misfits(one: KernelEvidence, claim: Claim, shape: ClaimedShape) -> Iterator[str]:
    """Yield why a snapshot may be of another run than the one that is claimed."""
    matrix, embedding = times(shape.d_model, shape.d_ff), times(shape.vocab_size, shape.d_model)
    needed = {"feed-forward": (matrix, times(2, matrix)), "embedding": (embedding,)}
    weights = set(one.held or one.allocations)
    sizes = (4,) if claim.dtype in _FULL_PRECISION else _BYTES
    for name, elements in needed.items():
        if None not in elements and not _has(weights, elements, sizes):
            yield f"it holds no {name} matrix of the claimed size and dtype"
            return
    if _count_copies(one, claim) == 0:
        yield "the number of feed-forward matrices that it holds is not a multiple of the claimed number"
    if not one.has_history:
        return
    everything = set(one.allocations)
    activations = (times(shape.tokens, shape.d_model),)
    if None not in activations and not _has(everything, activations):
        yield "it has no allocation for the hidden states of the claimed batch and context"
    logits = [times(count_head_rows(shape, way), shape.vocab_size) for way in HEAD_ROWS]
    if None not in logits and not _has(everything, logits) and (rows := _find_rows(everything, shape, sizes)):
        yield f"it has logits for {rows:,} positions, but not for the claimed ones"


def _has(present: set[int], elements: Iterable[Size], sizes: Sequence[int] = _BYTES) -> bool:
    return any(number is not None and number * size in present for number in elements for size in sizes)


def _count_held(one: KernelEvidence, elements: Size) -> int:
    return sum(one.held.count(elements * size) for size in _BYTES) if elements is not None else 0


def _count_copies(one: KernelEvidence, claim: Claim) -> int | None:
    """Return how many copies of every feed-forward matrix are held: its values, and what the optimizer keeps for each.
    0 if they do not add up to the claimed number of matrices; None if it cannot be told."""
    matrix = times(claim.d_model, claim.d_ff)
    needed = times(claim.num_layers, None if claim.gated is None else 3 if claim.gated else 2)
    widths = (claim.query_width, claim.key_width, claim.vocab_size, times(3, claim.query_width))
    found = _count_held(one, matrix)
    # A matrix of the attention half, or two of them, may have the same size.
    if matrix is None or needed is None or not found or claim.d_ff in widths:
        return None
    return found // needed if found % needed == 0 else 0


def _find_rows(present: set[int], shape: ClaimedShape, sizes: Sequence[int]) -> int | None:
    """Return the most positions that an allocation can be logits of. Weights have this width, too."""
    vocabulary = shape.vocab_size or 1
    rows = {size // (vocabulary * each) for size in present for each in sizes if size % (vocabulary * each) == 0}
    weights = {shape.d_model, 2 * (shape.d_model or 0), 1, 2}
    return max(rows - weights, default=None)
