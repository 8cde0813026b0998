"""Whether the LM head shares the embedding's weights.

A forward pass does not show it. A training step does: a tied model has one matrix of vocab_size · d_model less to
update, and adds the two gradients of the one that it has. So does a memory snapshot, by the number of such matrices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepscope.recover.claims.allocations import count_embeddings
from stepscope.recover.claims.claim import Claim
from stepscope.recover.claims.claimed_run import ClaimedRun
from stepscope.recover.claims.refutation import find_updated
from stepscope.recover.evidence.observation import Seen, see
from stepscope.recover.evidence.order import is_lookup
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from stepscope.recover.families import Platform, find_platform
from stepscope.recover.shape import ClaimedShape, Size, times

_MOST_POSITIONS = 1 << 15  # of a learned table
ROTARY_MODELS = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")


@dataclass(frozen=True, slots=True, kw_only=True)
class TyingEvidence:
    """What the evidence shows. `is_certain`: no other explanation is known. `sighting`: where it shows. `doubt`: what
    does not fit a tied LM head of the claimed model, nor one with weights of its own."""

    is_tied: bool
    why: str
    is_certain: bool = False
    doubt: str = ""
    file: ClaimedRun | None = None
    sighting: Sighting | None = None


def find_tying(
    files: Sequence[ClaimedRun], snapshots: Sequence[KernelEvidence], claim: Claim, shape: ClaimedShape
) -> TyingEvidence | None:
    """Return the strongest evidence, or None if there is none."""
    found = [one for file in files for one in read_step(file, claim, shape)]
    matrices = count_embeddings(snapshots, claim)
    if matrices is not None:
        word = "one matrix" if matrices == 1 else "two matrices"
        found.append(TyingEvidence(is_tied=matrices == 1, why=f"the snapshot holds {word} of vocab_size · d_model"))
    if len({one.is_tied for one in found}) != 1:
        return None
    return max(found, key=lambda one: one.is_certain)


def read_step(file: ClaimedRun, claim: Claim, shape: ClaimedShape) -> Iterator[TyingEvidence]:
    """Compare the number of updated parameters with both kinds of model. Other ranks may update the rest."""
    updated = find_updated(file.run.sightings)
    addition, accumulation = _find_sums(file, shape) if file.run.is_training else (None, None)
    if accumulation is not None:
        addition = None
    if updated is not None and not file.evidence.exchanges:
        first, low, high = updated
        positions = 0 if claim.model_type in ROTARY_MODELS or has_one_lookup(file) else _MOST_POSITIONS
        most_tied = claim.count_most(is_tied=True, positions=positions)
        fewest_apart = claim.count_matrices(is_tied=False)
        if most_tied is not None and low > most_tied:
            why = f"updates to at least {low:,} parameters, but at most {most_tied:,} if the LM head is tied"
            doubt = ""
            if fewest_apart is not None and high < fewest_apart:
                doubt = f"the optimizer makes {why}, and to at most {high:,}, but at least {fewest_apart:,} otherwise"
            yield TyingEvidence(is_tied=False, why=why, is_certain=True, doubt=doubt, file=file, sighting=first)
        elif fewest_apart is not None and high < fewest_apart:
            # Without the sum of two gradients, the embedding or the LM head may be frozen.
            why = f"updates to at most {high:,} parameters, but at least {fewest_apart:,} if the LM head is not tied"
            doubt = f"the optimizer makes {why}, and no gradients of a tied one are added"
            is_compiled = any(one.name.library == "Inductor" for one in file.run.sightings)  # adds in other kernels
            yield TyingEvidence(
                is_tied=True,
                why=why,
                is_certain=addition is not None,
                doubt="" if addition or accumulation or is_compiled else doubt,
                file=file,
                sighting=addition or first,
            )
    elif addition is not None:
        why = "an addition of two gradients of vocab_size · d_model elements"
        yield TyingEvidence(is_tied=True, why=why, file=file, sighting=addition)


def has_one_lookup(file: ClaimedRun) -> bool:
    """Whether a pass looks up only tokens. A learned position has to be looked up, too."""
    before = [one.sighting for one in file.placement.others if one.zone == "before" and one.pass_number == 1]
    is_compiled = any(one.name.library == "Inductor" for one in before)
    return not file.placement.starts_late and not is_compiled and sum(map(is_lookup, before)) == 1


def _find_sums(file: ClaimedRun, shape: ClaimedShape) -> tuple[Sighting | None, Sighting | None]:
    """Return an addition over as many elements as the embedding has, and one over those of a feed-forward matrix: then
    the gradients of all weights are added to those of earlier steps."""
    platform = find_platform(file.run.sightings, file.evidence.device_sms)
    embedding, weight = times(shape.vocab_size, shape.d_model), times(shape.d_model, shape.d_ff)
    others = (
        times(shape.tokens, shape.vocab_size),
        times(shape.tokens, shape.d_model),
        times(shape.tokens, shape.d_ff),
        times(2, shape.tokens, shape.d_ff),
    )
    sums = list(_see_sums(file.run.sightings, platform))
    if None in (embedding, weight, *others):
        return None, None
    return _find_only(sums, embedding, others), _find_only(sums, weight, others)


def _see_sums(sightings: Sequence[Sighting], platform: Platform) -> Iterator[Seen]:
    for one in sightings:
        if one.name.kernel_class == "elementwise" and one.name.operation == "add" and one.name.library == "ATen":
            seen = see(one, platform)
            if seen is not None:
                yield seen


def _find_only(sums: Sequence[Seen], size: Size, others: Sequence[Size]) -> Sighting | None:
    """Return the first kernel over this many elements whose grid does not fit another tensor as well."""
    for seen in sums:
        fits = size is not None and seen.explained_by([size])
        if fits and not seen.explained_by(one for one in others if one is not None):
            return seen.sighting
    return None
