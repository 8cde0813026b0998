"""Layers and roles, and evidence that does not show any."""

from dataclasses import replace

import msgspec
import polars as pl
import pytest

from stepscope.recording.readers.formats import open_recording
from stepscope.recover.evidence.order import NoTransformerError, is_product
from stepscope.recover.evidence.recording import gather
from stepscope.recover.evidence.structure import find_structure
from stepscope.recover.facts import Sighting
from stepscope.recover.solve.recovery import recover
from tests.unit.recover.evidence_runs import FOLDER, read_evidence, recovered, with_kernels


def test_roles_of_a_gated_layer() -> None:
    structure = find_structure(read_evidence("llama_bf16.forward.json.gz").sightings)
    (reading,) = structure.readings
    order = sorted(reading.products, key=lambda role: reading.products[role].index)
    assert order == ["output", "gate", "up", "down", "query", "key", "value", "head"]
    assert (structure.num_layers, structure.num_passes, structure.is_fused) == (3, 1, True)


def test_roles_of_unfused_attention() -> None:
    structure = find_structure(read_evidence("builtin_autocast.train.json.gz").sightings)
    (reading,) = structure.readings
    assert {"scores", "values", "gate", "query"} <= set(reading.products)
    assert (structure.num_layers, structure.num_passes) == (3, 2)
    assert structure.is_training
    assert not structure.is_fused


def test_the_sum_of_a_split_gemm_is_not_a_gemm() -> None:
    structure = find_structure(read_evidence("builtin_fp32.forward.json.gz").sightings)
    assert len(structure.readings[0].products) == 10


def test_a_compiler_can_run_the_feed_forward_half_first() -> None:
    structure = find_structure(read_evidence("neox_compiled.csv.gz").sightings)
    orders = [tuple(sorted(one.products, key=lambda role: one.products[role].index)) for one in structure.readings]
    assert ("up", "down", "output", "query_key_value", "head") in orders


@pytest.mark.parametrize(("first", "second"), [("gpt2_bf16_odd", "llama_bf16"), ("llama_bf16", "neox_fp16")])
@pytest.mark.parametrize("ending", ["csv.gz", "forward.json.gz"])
def test_two_consecutive_models_are_rejected(first: str, second: str, ending: str) -> None:
    one, other = read_evidence(f"{first}.{ending}"), read_evidence(f"{second}.{ending}")
    with pytest.raises(NoTransformerError):
        recover([with_kernels(one, [*one.sightings, *other.sightings])])


@pytest.mark.parametrize("size", [1, 5, 11])
def test_two_interleaved_models_are_rejected(size: int) -> None:
    one, other = (list(read_evidence(f"{name}.csv.gz").sightings) for name in ("gpt2_bf16_odd", "llama_bf16"))
    mixed = []
    while one or other:
        mixed += [*one[:size], *other[:size]]
        one, other = one[size:], other[size:]
    with pytest.raises(NoTransformerError):
        recover([with_kernels(read_evidence("gpt2_bf16_odd.csv.gz"), mixed)])


def test_files_of_different_runs_are_rejected() -> None:
    with pytest.raises(NoTransformerError, match="num_layers is"):
        recover([read_evidence("gpt2_bf16_odd.csv.gz"), read_evidence("gpt2_bf16_odd.forward.json.gz")])
    with pytest.raises(NoTransformerError, match="different runs"):
        recover([read_evidence("gpt2_bf16_odd.csv.gz"), read_evidence("gpt2_head80.csv.gz")])


@pytest.mark.parametrize(
    "name", ["gpt2_bf16_odd.forward.json.gz", "held_llama.csv.gz", "builtin_autocast.train.json.gz"]
)
@pytest.mark.parametrize("part", ["start", "end"])
def test_a_truncated_file_never_makes_a_wrong_num_layers_certain(name: str, part: str) -> None:
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
def test_other_models_are_rejected(wanted: str) -> None:
    evidence = read_evidence("gpt2_bf16_odd.csv.gz")
    kept = [one for one in evidence.sightings if wanted != "nothing" and is_product(one) == (wanted == "products")]
    with pytest.raises(NoTransformerError):
        find_structure(with_kernels(evidence, kept).sightings)


def test_a_repeated_pass_is_two_passes() -> None:
    evidence = read_evidence("gpt2_bf16_odd.csv.gz")
    structure = find_structure(with_kernels(evidence, evidence.sightings * 2).sightings)
    assert (structure.num_layers, structure.num_passes) == (2, 2)


def _layer_between(name: str) -> tuple[list[Sighting], slice]:
    """Append the kernels from the first attention to the second: a rotated layer."""
    sightings = list(read_evidence(name).sightings)
    (attentions,) = find_structure(sightings).layer_indices
    return sightings, slice(attentions[0], attentions[1])


def test_a_pass_with_a_missing_layer_is_rejected() -> None:
    whole, layer = _layer_between("held_gpt2.csv.gz")
    shorter = whole[: layer.start] + whole[layer.stop :]
    with pytest.raises(NoTransformerError, match="4 and 5 layers"):
        find_structure(with_kernels(read_evidence("held_gpt2.csv.gz"), [*whole, *shorter, *whole]).sightings)


@pytest.mark.parametrize(
    "name", ["gpt2_bf16_odd.forward.json.gz", "llama_bf16.forward.json.gz", "gpt2_bf16_odd.csv.gz"]
)
@pytest.mark.parametrize("with_lookups", [True, False])
def test_a_repeated_layer_leaves_num_layers_open(name: str, with_lookups: bool) -> None:
    sightings = list(read_evidence(name).sightings)
    (attentions,) = find_structure(sightings).layer_indices
    alone = sightings[: attentions[0]] + sightings[attentions[-1] :]
    first = (
        0 if with_lookups else next(i for i, one in enumerate(alone) if one.name.kernel_class in ("norm", "reduction"))
    )
    try:
        field = recover([with_kernels(read_evidence(name), alone[first:] * 3)]).fields["num_layers"]
    except NoTransformerError:
        return
    assert field.value == 1 or not field.certain


def test_an_lm_head_like_a_projection_leaves_num_layers_open() -> None:
    """Persistent kernels show no sizes: one layer that is run repeatedly looks like many."""
    evidence = read_evidence("gpt2_bf16_odd.forward.json.gz")
    (first, *_) = find_structure(evidence.sightings).readings
    head, joint = first.products["head"], first.products["query_key_value"]
    alike = [joint if one is head else one for one in evidence.sightings]
    field = recover([with_kernels(evidence, alike)]).fields["num_layers"]
    assert (field.value, field.certain, field.low) == (4, False, 1)


def test_a_start_and_an_lm_head_of_different_passes_are_not_combined() -> None:
    """A recording begins and ends within a pass: each of two passes has three layers left."""
    evidence = read_evidence("gpt2_bf16_odd.forward.json.gz")
    (attentions,) = find_structure(evidence.sightings).layer_indices
    twice = (evidence.sightings * 2)[attentions[0] + 1 : len(evidence.sightings) + attentions[3]]
    assert not recover([with_kernels(evidence, twice)]).fields["num_layers"].certain


def test_sizes_of_a_sharded_model_are_not_certain() -> None:
    evidence = read_evidence("llama_bf16.csv.gz")
    (attentions,) = find_structure(evidence.sightings).layer_indices
    answer = recover([replace(evidence, exchanges=(attentions[0] + 2,))])
    assert answer.fields["num_heads"].value == 16
    assert [name for name, field in answer.fields.items() if field.certain] == ["num_layers", "d_head", "dtype"]
    assert any("one rank's shard" in note for note in answer.notes)
    # Gradients are reduced after the layers.
    assert recover([replace(evidence, exchanges=(attentions[-1] + 9,))]).fields["num_heads"].certain


def test_collectives_are_found_on_any_stream() -> None:
    recording = open_recording(FOLDER / "gpt2_bf16_odd.forward.json.gz")
    other = recording.kernels.filter(pl.col("kind") == "kernel")[40].with_columns(
        name=pl.lit("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        stream=pl.lit(20, pl.Int64),
        start_ns=pl.col("start_ns") - 1,
    )
    assert gather(recording).exchanges == ()
    assert gather(replace(recording, kernels=pl.concat([recording.kernels, other]))).exchanges == (40,)


def test_layers_with_different_kernels_make_no_size_certain() -> None:
    """In one layer, the rotary kernel of the queries has fewer elements."""
    evidence = read_evidence("held_smol.csv.gz")
    (attentions,) = find_structure(evidence.sightings).layer_indices
    changed = [
        msgspec.structs.replace(one, grid=(one.grid[0] // 2, 1, 1)) if one.index == attentions[0] + 4 else one
        for one in evidence.sightings
    ]
    assert find_structure(evidence.sightings).doubts == ()
    twice = with_kernels(evidence, [*evidence.sightings, *changed])
    (doubt,) = find_structure(twice.sightings).doubts
    assert "kernels other than GEMMs" in doubt.text
    assert not recover([twice]).fields["num_heads"].certain
