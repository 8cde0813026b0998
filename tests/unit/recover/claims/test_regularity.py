"""Kernels that were left out or added where the rest still fits the claim."""

from dataclasses import replace

import msgspec
import pytest

from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import is_product
from stepscope.recover.facts import Sighting
from tests.unit.recover.claimed_runs import find, spoil, true_claim, verified
from tests.unit.recover.evidence_runs import read_evidence, with_kernels

TRACE = "gpt2_fp32_efficient.forward.json.gz"  # three layers of 17 kernels; attention is #15, #32 and #49
TRAIN = "gpt2_fp32_efficient.train.json.gz"
COMPILED = "held_qwen2.forward.json.gz"
FILES = {  # and the GEMMs of a layer, with those before the first one
    TRACE: 4,
    "llama_fp32.csv.gz": 8,
    "held_neox.csv.gz": 7,
    "neox_fp16.train.json.gz": 4,
    COMPILED: 10,
}


@pytest.mark.parametrize("file", FILES)
def test_a_kernel_less_in_one_layer_cannot_tell(file: str) -> None:
    assert verified(file).verdict is not ClaimVerdict.REFUTED
    sightings = read_evidence(file).sightings
    gemms = find(read_evidence(file), "GEMM")
    start, end = gemms[FILES[file]], gemms[FILES[file] + 4]  # of the second layer
    gone = next(one.index for one in sightings[start:end] if one.name.kernel_class == "elementwise")
    answer = spoil(file, lambda kernels: [one for one in kernels if one.index != gone])
    assert answer.verdict is not ClaimVerdict.CONSISTENT
    assert "layers differ" in " ".join(answer.missing) or answer.verdict is ClaimVerdict.REFUTED


def test_compiled_layers_may_differ_in_what_they_fuse() -> None:
    sightings = read_evidence(COMPILED).sightings
    names = {one.name.name for one in sightings if one.name.kernel_class == "norm"}
    assert len(names) > 4, "the norms of the layers have different names"
    assert not any("layers differ" in text for text in verified(COMPILED).missing)


def test_a_layer_less_leaves_a_gap_in_the_numbers() -> None:
    evidence = read_evidence(TRACE)
    kernels = [*evidence.sightings[:40], *evidence.sightings[57:]]
    numbered = tuple(msgspec.structs.replace(one, index=index) for index, one in enumerate(kernels))
    answer = verify([replace(evidence, sightings=numbered)], true_claim(TRACE, num_layers=2))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "as many launches are missing" in answer.why
    # Nothing shows it without numbers.
    assert verify([with_kernels(evidence, kernels)], true_claim(TRACE, num_layers=2)).verdict is ClaimVerdict.CONSISTENT


@pytest.mark.parametrize(
    ("kept", "changes"),
    [
        (slice(24, None), {"num_layers": 2}),
        (slice(None, 48), {"num_layers": 2, "vocab_size": None}),
    ],
    ids=["start", "end"],
)
def test_a_part_of_a_pass_does_not_test_num_layers(kept: slice, changes: dict[str, object]) -> None:
    answer = spoil(TRACE, lambda kernels: kernels[kept], **changes)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert answer.fields["num_layers"].verdict == "not tested"
    assert "has only part of pass 1" in answer.why


@pytest.mark.parametrize("name", ["up", "gradient"])
def test_a_gemm_less_in_one_step_cannot_tell(name: str) -> None:
    products = [one.index for one in read_evidence(TRAIN).sightings if is_product(one)]
    gone = products[12 if name == "up" else 15]  # the LM head of the first step, and a gradient of it
    answer = spoil(TRAIN, lambda kernels: [one for one in kernels if one.index != gone])
    assert answer.verdict is not ClaimVerdict.CONSISTENT


def test_a_gradient_less_in_every_step_cannot_tell() -> None:
    products = [one.index for one in read_evidence(TRAIN).sightings if is_product(one)]
    gone = {products[15], products[15 + len(products) // 2]}
    answer = spoil(TRAIN, lambda kernels: [one for one in kernels if one.index not in gone])
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "2 GEMMs less than two gradients of every GEMM" in answer.why


@pytest.mark.parametrize("steps", [1, 2])
def test_more_gemms_than_gradients_cannot_tell(steps: int) -> None:
    products = [one.index for one in read_evidence(TRAIN).sightings if is_product(one)]
    heads = [products[12], products[12 + len(products) // 2]][:steps]

    def busy(kernels: list[Sighting]) -> list[Sighting]:
        dummies = [msgspec.structs.replace(kernels[products[3]], duration_ns=20_001 + 37 * n) for n in range(4)]
        return [one for kernel in kernels for one in ((kernel, *dummies) if kernel.index in heads else (kernel,))]

    answer = spoil(TRAIN, busy)
    assert answer.verdict is not ClaimVerdict.CONSISTENT


def test_collectives_do_not_excuse_gemms_without_a_role() -> None:
    evidence = read_evidence(TRACE)
    head = evidence.sightings[find(evidence, "GEMM")[-1]]
    busy = [*evidence.sightings, *(msgspec.structs.replace(head, duration_ns=50_001 + 41 * n) for n in range(4))]
    exchanged = replace(with_kernels(evidence, busy), exchanges=(20,))
    answer = verify([exchanged], true_claim(TRACE))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "GEMMs that the claim does not explain" in answer.why


@pytest.mark.parametrize(
    ("file", "other"), [("neox_fp16.train.json.gz", "bf16"), ("llama_compiled.train.json.gz", "fp16")]
)
def test_kernels_in_the_other_half_precision_dispute_the_dtype(file: str, other: str) -> None:
    """In compiled models, only those outside the layers show a dtype: the optimizer, for example."""

    def rename(kernels: list[Sighting]) -> list[Sighting]:
        return [
            msgspec.structs.replace(one, name=msgspec.structs.replace(one.name, dtype=other))
            if is_product(one)
            else one
            for one in kernels
        ]

    answer = spoil(file, rename, dtype=other)
    assert (answer.verdict, answer.fields["dtype"].verdict) == (ClaimVerdict.UNDECIDED, "not tested")
