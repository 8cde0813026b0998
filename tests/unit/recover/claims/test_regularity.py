"""Kernels that were left out or added where the rest still fits the claim."""

from dataclasses import replace

import msgspec
import pytest

from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import is_product
from stepscope.recover.facts import Sighting
from stepscope.recover.solve.recovery import recover
from tests.unit.recover.claimed_runs import claim_fields, find, rename, spoil, true_claim, verified
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


def test_norms_that_every_layer_lacks_cannot_tell() -> None:
    answer = spoil(TRACE, lambda kernels: [one for one in kernels if one.name.kernel_class != "norm"])
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any("no norm" in text for text in answer.missing)


def test_an_activation_that_every_layer_lacks_cannot_tell() -> None:
    gemms = find(read_evidence(TRACE), "GEMM")
    between = {index for up, down in zip(gemms[2:12:4], gemms[3:12:4], strict=True) for index in range(up + 1, down)}
    answer = spoil(TRACE, lambda kernels: [one for one in kernels if one.index not in between])
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any("no activation" in text for text in answer.missing)


@pytest.mark.parametrize(
    "name", ["Memset (Device)", "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)"]
)
@pytest.mark.parametrize("layer", [slice(0, 5), slice(10, 15)])  # the first and the last, with their attention
def test_a_layer_under_other_names_is_not_left_out(name: str, layer: slice) -> None:
    evidence = read_evidence(TRACE)
    heavy = [one.index for one in evidence.sightings if one.name.kernel_class in ("GEMM", "attention")]
    hidden = with_kernels(
        evidence, (rename(one, name) if one.index in heavy[layer] else one for one in evidence.sightings)
    )
    answer = verify([hidden], true_claim(TRACE, num_layers=2))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any("in pass 1, kernels" in text for text in answer.missing)
    assert not recover([hidden]).fields["num_layers"].certain


def test_a_layer_inside_a_compiled_layer_is_not_left_out() -> None:
    """A compiler fuses other operations in some layers, so only their times can be compared."""
    file = "neox_compiled.forward.json.gz"
    evidence = read_evidence(file)
    heavy = [one.index for one in evidence.sightings if one.name.kernel_class in ("GEMM", "attention")]
    hidden = heavy[next(place for place, index in enumerate(heavy) if index == 17) :][:7]
    kernels = [rename(one, "Memset (Device)") if one.index in hidden else one for one in evidence.sightings]
    answer = spoil(file, lambda _: kernels, num_layers=2)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any("× as long as another" in text for text in answer.missing)


def test_a_key_projection_that_every_layer_lacks_cannot_tell() -> None:
    """Half of the key-value heads, in one projection, would look the same."""
    file = "llama_bf16.csv.gz"
    evidence = read_evidence(file)
    keys = find(evidence, "GEMM")[2:15:7]  # the first GEMM computes rotary angles
    lacking = with_kernels(evidence, (one for one in evidence.sightings if one.index not in keys))
    answer = verify([lacking], true_claim(file, num_kv_heads=2))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any(text.startswith("num_kv_heads: keys and values share one projection") for text in answer.missing)
    found = recover([lacking]).fields["num_kv_heads"]
    assert found.value == 2
    assert not found.certain


def test_a_gemm_that_the_first_layer_has_left_over_cannot_tell() -> None:
    """Without num_heads, a joint projection of keys and values would fit the second layer."""
    file = "llama_compiled.csv.gz"
    claimed = ("num_layers", "d_model", "num_kv_heads", "d_ff", "vocab_size", "dtype", "gated")
    value = find(read_evidence(file), "GEMM")[9]
    open_fields = {name: None for name in claim_fields(file) if name not in claimed}
    answer = spoil(file, lambda kernels: [one for one in kernels if one.index != value], **open_fields)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert any("before the first layer: 1 GEMM" in text for text in answer.missing)


def test_no_size_is_certain_if_many_counts_are_unexplained() -> None:
    """Without the last GEMM of every layer, the widths of what follows fit no model."""
    evidence = read_evidence("held_llama.forward.json.gz")
    last = find(evidence, "GEMM")[7:22:7]  # the first GEMM computes rotary angles
    lacking = with_kernels(evidence, (one for one in evidence.sightings if one.index not in last))
    fields = recover([lacking]).fields
    assert not [name for name, one in fields.items() if one.certain and name not in ("num_layers", "dtype")]


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
