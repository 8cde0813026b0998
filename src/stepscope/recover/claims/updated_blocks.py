"""The blocks of an optimizer's kernels, which show how many parameters it updates more exactly than any other kernel.

A block updates one chunk of one tensor, and the last chunk of a tensor has a block of its own. So the blocks of a step
are those of the claimed matrices, and one for each bias and norm. More of them belong to tensors that the claim does
not have, such as those of a layer that was left out of the file.
"""

from collections.abc import Iterator
from math import ceil

from stepscope.cost import DecoderShape, decoder_matrices
from stepscope.recover.claims.claim import Claim
from stepscope.recover.claims.claimed_run import ClaimedRun
from stepscope.recover.claims.refutation import RUNS_ONCE, split_steps
from stepscope.recover.claims.tying import ROTARY_MODELS, has_one_lookup
from stepscope.recover.families.optimizers import CHUNK_ELEMENTS, join_launches, split_calls

_VECTORS = 12  # biases and norms of a layer, at most: four norms with two vectors each, or two and a bias per matrix
_VECTORS_OUTSIDE = 6  # norms of the embedding and before the LM head, and its bias
_MOST_POSITIONS = 4096  # of a learned table


def _count_weights(shape: DecoderShape, positions: int) -> range:
    """The possible numbers of blocks of a model."""
    fewest, most = (sum(map(_count_chunks, decoder_matrices(shape, are_joined=joined))) for joined in (True, False))
    vectors = _VECTORS * _count_chunks(max(shape.d_model, shape.d_ff))
    outside = (1 if shape.is_tied else 2) * _count_chunks(shape.vocab_size * shape.d_model)
    more = _VECTORS_OUTSIDE + _count_chunks(positions * shape.d_model)
    return range(outside + shape.num_layers * fewest, outside + shape.num_layers * (most + vectors) + more + 1)


def _count_chunks(elements: int) -> int:
    return ceil(elements / CHUNK_ELEMENTS)


def doubt_blocks(file: ClaimedRun, claim: Claim) -> Iterator[str]:
    """Yield why the blocks fit no model of the claimed sizes. Fewer than any has are not looked at here."""
    seen = _count_blocks(file)
    if seen is None or file.evidence.exchanges:
        return
    ties = (False, True) if claim.tied is None else (claim.tied,)
    is_gated = _is_gated(file) if claim.gated is None else claim.gated
    shapes = [claim.describe(is_tied=is_tied, is_gated=is_gated) for is_tied in ties]
    is_rotary = claim.model_type in ROTARY_MODELS or has_one_lookup(file)
    counts = [_count_weights(one, 0 if is_rotary else _MOST_POSITIONS) for one in shapes if one is not None]
    below = [one[-1] for one in counts if one[-1] < seen]
    if below and not any(seen in one for one in counts):
        yield (
            f"the optimizer updates {seen:,} blocks of up to {CHUNK_ELEMENTS:,} parameters, and the claimed weights "
            f"have at most {max(below):,}: weights that are not claimed are trained, or a layer is missing in the file"
        )


def _is_gated(file: ClaimedRun) -> bool:
    return any(one.role in ("gate", "gate_up") for one in file.placement.products)


def _count_blocks(file: ClaimedRun) -> int | None:
    """The blocks of a kernel that runs once per parameter, in the step that has most; None without such a kernel."""
    counts = []
    for step in split_steps(file.run.sightings):
        once = [call for call in split_calls(step) if RUNS_ONCE.search(call[0].name.name) and join_launches(call)]
        counts.append(sum(launch.grid[0] for call in once for launch in call))
    return max(counts, default=0) or None
