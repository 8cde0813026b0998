"""True claims about the recorded runs, and cheating runs made from them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from stepscope.explain.kernel_names import decode
from stepscope.recover.claims.claim import Claim, make_claim
from stepscope.recover.claims.verdict import Verification
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from tests.unit.recover.evidence_runs import read_evidence, truth_of, with_kernels

_CLAIMED = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff", "vocab_size", "batch", "context")
_GATED = ("llama", "qwen2", "qwen3", "builtin")


def claim_fields(file: str, **changes: object) -> dict[str, Any]:
    truth = truth_of(file)
    fields = {name: truth[name] for name in (*_CLAIMED, "dtype")}
    return {**fields, "gated": truth["family"] in _GATED, **changes}


def true_claim(file: str, **changes: object) -> Claim:
    """Return a true claim about the run with changes; None removes a field."""
    return make_claim({name: value for name, value in claim_fields(file, **changes).items() if value is not None})


@cache
def verified(file: str) -> Verification:
    return verify([read_evidence(file)], true_claim(file))


def spoil(file: str, change: Callable[[list[Sighting]], list[Sighting]], **changes: object) -> Verification:
    """Verify a run with changed kernels, for a true claim or one with changes."""
    evidence = read_evidence(file)
    return verify([with_kernels(evidence, change(list(evidence.sightings)))], true_claim(file, **changes))


def edit(sighting: Sighting, **counters: int) -> Sighting:
    return msgspec.structs.replace(sighting, counters={**sighting.counters, **counters})


def rename(sighting: Sighting, name: str) -> Sighting:
    return msgspec.structs.replace(sighting, name=decode(name))


def time(sighting: Sighting, share: float) -> Sighting:
    return msgspec.structs.replace(sighting, duration_ns=round(sighting.duration_ns * share))


def run_again(sighting: Sighting) -> Sighting:
    """Return the same work in another launch: what a GPU measures is never the same."""
    noise = {name: value * 1.01 + 32 * sighting.index for name, value in sighting.noise.items()}
    duration_ns = round(sighting.duration_ns * 1.01) + 7 * sighting.index
    return msgspec.structs.replace(sighting, duration_ns=duration_ns, noise=noise)


def find(evidence: KernelEvidence, kernel_class: str) -> list[int]:
    return [one.index for one in evidence.sightings if one.name.kernel_class == kernel_class]
