"""Layers and roles, and evidence that shows none."""

import pytest

from stepscope.recover.answer import recover
from stepscope.recover.structure import NoTransformerError, find_structure, is_product
from tests.unit.recover.evidence_runs import read_evidence, recovered, with_kernels


def test_roles_of_a_gated_layer() -> None:
    structure = find_structure(read_evidence("llama_bf16.forward.json.gz").sightings)
    (reading,) = structure.readings
    order = sorted(reading.products, key=lambda role: reading.products[role].index)
    assert order == ["output", "gate", "up", "down", "query", "key", "value", "head"]
    assert (structure.num_layers, structure.num_passes, structure.is_fused) == (3, 1, True)


def test_roles_of_attention_that_is_written_out() -> None:
    structure = find_structure(read_evidence("builtin_autocast.train.json.gz").sightings)
    (reading,) = structure.readings
    assert {"scores", "values", "gate", "query"} <= set(reading.products)
    assert (structure.num_layers, structure.num_passes) == (3, 2)
    assert structure.is_training
    assert not structure.is_fused


def test_the_second_kernel_of_a_split_product_is_no_product() -> None:
    structure = find_structure(read_evidence("builtin_fp32.forward.json.gz").sightings)
    assert len(structure.readings[0].products) == 10


def test_a_compiler_may_put_the_feed_forward_half_first() -> None:
    structure = find_structure(read_evidence("neox_compiled.csv.gz").sightings)
    orders = [tuple(sorted(one.products, key=lambda role: one.products[role].index)) for one in structure.readings]
    assert ("up", "down", "output", "query_key_value", "head") in orders


@pytest.mark.parametrize(("first", "second"), [("gpt2_bf16_odd", "llama_bf16"), ("llama_bf16", "neox_fp16")])
@pytest.mark.parametrize("ending", ["csv.gz", "forward.json.gz"])
def test_two_models_after_one_another_are_refused(first: str, second: str, ending: str) -> None:
    one, other = read_evidence(f"{first}.{ending}"), read_evidence(f"{second}.{ending}")
    with pytest.raises(NoTransformerError):
        recover([with_kernels(one, [*one.sightings, *other.sightings])])


@pytest.mark.parametrize("size", [1, 5, 11])
def test_two_models_at_once_are_refused(size: int) -> None:
    one, other = (list(read_evidence(f"{name}.csv.gz").sightings) for name in ("gpt2_bf16_odd", "llama_bf16"))
    mixed = []
    while one or other:
        mixed += [*one[:size], *other[:size]]
        one, other = one[size:], other[size:]
    with pytest.raises(NoTransformerError):
        recover([with_kernels(read_evidence("gpt2_bf16_odd.csv.gz"), mixed)])


def test_files_of_different_runs_are_refused() -> None:
    with pytest.raises(NoTransformerError, match="layers"):
        recover([read_evidence("gpt2_bf16_odd.csv.gz"), read_evidence("gpt2_bf16_odd.forward.json.gz")])
    with pytest.raises(NoTransformerError, match="different runs"):
        recover([read_evidence("gpt2_bf16_odd.csv.gz"), read_evidence("gpt2_head80.csv.gz")])


@pytest.mark.parametrize(
    "name", ["gpt2_bf16_odd.forward.json.gz", "held_llama.csv.gz", "builtin_autocast.train.json.gz"]
)
@pytest.mark.parametrize("part", ["start", "end"])
def test_a_cut_file_never_makes_a_wrong_number_of_layers_certain(name: str, part: str) -> None:
    whole = read_evidence(name)
    truth = recovered(name).fields["num_layers"].value
    for share in range(1, 12):
        at = len(whole.sightings) * share // 12
        kept = whole.sightings[at:] if part == "start" else whole.sightings[:at]
        try:
            field = recover([with_kernels(whole, kept)]).fields["num_layers"]
        except NoTransformerError:
            continue
        assert field.value == truth or not field.certain, at


@pytest.mark.parametrize("wanted", ["products", "no products", "nothing"])
def test_what_is_no_transformer_is_refused(wanted: str) -> None:
    evidence = read_evidence("gpt2_bf16_odd.csv.gz")
    kept = [one for one in evidence.sightings if wanted != "nothing" and is_product(one) == (wanted == "products")]
    with pytest.raises(NoTransformerError):
        find_structure(with_kernels(evidence, kept).sightings)


def test_the_same_pass_twice_is_two_passes() -> None:
    evidence = read_evidence("gpt2_bf16_odd.csv.gz")
    structure = find_structure(with_kernels(evidence, evidence.sightings * 2).sightings)
    assert (structure.num_layers, structure.num_passes) == (2, 2)
