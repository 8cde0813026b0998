"""The blocks of an optimizer's kernels, which show how many parameters it updates more exactly than any other kernel.

A block updates one chunk of one tensor, and the last chunk of a tensor has a block of its own. So the blocks of a step
are those of the claimed matrices, and one for each bias and norm. More of them belong to tensors that the claim does
not have, such as those of a layer that was left out of the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil

from stepscope.recover.claims.claim import Claim
from stepscope.recover.claims.claimed_run import ClaimedRun
from stepscope.recover.claims.refutation import RUNS_ONCE, split_steps
from stepscope.recover.claims.tying import ROTARY_MODELS, has_one_lookup
from stepscope.recover.families.optimizers import CHUNK_ELEMENTS, join_launches, split_calls

_VECTORS = 12  # biases and norms of a layer, at most: four norms with two vectors each, or two and a bias per matrix
_VECTORS_OUTSIDE = 6  # norms of the embedding and before the LM head, and its bias
_MOST_POSITIONS = 4096  # of a learned table


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClaimedWeights:
    """The weights of a claim: matrices of a layer as they are most often stored, apart or joined."""

    claim: Claim
    is_tied: bool
    is_gated: bool

    def count(self, positions: int) -> range:
        """The possible numbers of blocks."""
        claim = self.claim
        sizes = (claim.num_layers, claim.d_model, claim.num_heads, claim.num_kv_heads, claim.d_head, claim.d_ff)
        layers, width, heads, kv_heads, head, hidden = (size or 0 for size in sizes)
        queries, keys = heads * head, kv_heads * head
        gates = 2 if self.is_gated else 1
        outside = (1 if self.is_tied else 2) * _count_chunks(width * (claim.vocab_size or 0))
        joined = (width * (queries + 2 * keys), width * queries, gates * width * hidden, width * hidden)
        apart = (width * queries, width * keys, width * keys, width * queries, *[width * hidden] * (gates + 1))
        fewest = outside + layers * sum(map(_count_chunks, joined))
        vectors = layers * _VECTORS * _count_chunks(max(width, hidden)) + _VECTORS_OUTSIDE
        most = outside + layers * sum(map(_count_chunks, apart)) + vectors + _count_chunks(positions * width)
        return range(fewest, most + 1)


def _count_chunks(elements: int) -> int:
    return ceil(elements / CHUNK_ELEMENTS)


def doubt_blocks(file: ClaimedRun, claim: Claim) -> Iterator[str]:
    """Yield why the blocks fit no model of the claimed sizes. Fewer than any has are not looked at here."""
    sizes = (claim.num_layers, claim.d_model, claim.num_heads, claim.num_kv_heads, claim.d_head, claim.d_ff)
    seen = _count_blocks(file)
    if seen is None or None in (*sizes, claim.vocab_size) or file.evidence.exchanges:
        return
    ties = (False, True) if claim.tied is None else (claim.tied,)
    gates = (_is_gated(file),) if claim.gated is None else (claim.gated,)
    is_rotary = claim.model_type in ROTARY_MODELS or has_one_lookup(file)
    models = [
        _ClaimedWeights(claim=claim, is_tied=is_tied, is_gated=is_gated) for is_tied, is_gated in product(ties, gates)
    ]
    counts = [one.count(0 if is_rotary else _MOST_POSITIONS) for one in models]
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
        by_kernel: dict[str, int] = {}
        for call in once:
            name = call[0].name.name
            by_kernel[name] = by_kernel.get(name, 0) + sum(launch.grid[0] for launch in call)
        counts += [sum(by_kernel.values())] if by_kernel else []
    return max(counts, default=None)
