"""Files that lost kernels: no field is certain and wrong, whatever one kernel, head or tail of a file is missing."""

import random
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import polars as pl
import pytest

from stepscope.explain.kernel_names import decode
from stepscope.recording.readers.formats import open_recording
from stepscope.recover.evidence.order import NoTransformerError, is_attention, is_product
from stepscope.recover.evidence.recording import KernelEvidence, gather
from stepscope.recover.evidence.structure import find_structure
from stepscope.recover.facts import Sighting
from stepscope.recover.solve.recovery import Field, recover
from tests.unit.recover.evidence_runs import (
    COUNTERS,
    FOLDER,
    TRACES,
    keep_kernels,
    read_evidence,
    recovered,
    truth_of,
)

# Runs that are recovered in less than 0.1 s.
_SLOW = ("gpt2_bf16_odd.", "gpt2_fp16_naive.", "held_gpt2_fp16.", "held_llama.", "held_qwen2.csv", "llama_ours.")
FAST = [file for file in (*COUNTERS, *TRACES) if not file.startswith(_SLOW)]


def find_wrong(file: str, kept: Iterable[Sighting]) -> list[str]:
    """Return the fields that are certain and wrong if the file has only these kernels."""
    try:
        answer = recover([keep_kernels(read_evidence(file), kept)])
    except NoTransformerError:
        return []
    truth = truth_of(file)
    return [name for name, field in answer.fields.items() if field.certain and field.value != truth[name]]


def without(file: str, *missing: int) -> KernelEvidence:
    evidence = read_evidence(file)
    return keep_kernels(evidence, [one for one in evidence.sightings if one.index not in missing])


def attentions_of(file: str) -> tuple[int, ...]:
    return find_structure(read_evidence(file).sightings).layer_indices[0]


def products_between(file: str, start: int, end: int) -> list[int]:
    return [one.index for one in read_evidence(file).sightings[start:end] if is_product(one)]


def says(field: Field, text: str) -> bool:
    return any(text in one for one in field.evidence)


# --- A sample of all losses


@pytest.mark.parametrize("file", FAST)
def test_no_single_loss_makes_a_wrong_value_certain(file: str) -> None:
    """An attention kernel and a GEMM, of which a layer has few, and one of the others."""
    kernels = read_evidence(file).sightings
    choice = random.Random(file)
    marks = [one.index for one in kernels if is_attention(one, backward=False)] or [*attentions_of(file)]
    products = [one.index for one in kernels if is_product(one)]
    for lost in (choice.choice(marks), choice.choice(products), choice.randrange(len(kernels))):
        assert find_wrong(file, [one for one in kernels if one.index != lost]) == [], lost


@pytest.mark.parametrize("file", FAST)
def test_no_lost_head_or_tail_makes_a_wrong_value_certain(file: str) -> None:
    """Cut within the layers, where a part of the pass may look like a pass."""
    kernels = read_evidence(file).sightings
    attentions = attentions_of(file)
    choice = random.Random(file)
    for at in (choice.randrange(attentions[0], attentions[-1]), choice.randrange(attentions[0], len(kernels))):
        assert find_wrong(file, kernels[at:]) == [], at
        assert find_wrong(file, kernels[:at]) == [], at


def test_no_repeated_kernel_makes_a_wrong_value_certain() -> None:
    file = "llama_fp32.csv.gz"
    kernels = read_evidence(file).sightings
    for one in random.Random(0).sample(kernels, 12):
        assert find_wrong(file, [*kernels[: one.index], one, *kernels[one.index :]]) == [], one.index


# --- Attention calls


@pytest.mark.parametrize("file", ["gpt2_bf16_odd.csv.gz", "llama_bf16.csv.gz", "builtin_autocast.csv.gz"])
def test_a_lost_first_attention_leaves_its_gemms(file: str) -> None:
    field = recover([without(file, attentions_of(file)[0])]).fields["num_layers"]
    assert (field.value, field.certain, field.low) == (1, False, 1)
    assert says(field, "more GEMMs of a layer come before")


def test_a_lost_attention_in_the_middle_is_not_the_end_of_a_pass() -> None:
    """Two layers before it and two after it look like two passes."""
    file = "held_gpt2.csv.gz"
    field = recover([without(file, attentions_of(file)[2])]).fields["num_layers"]
    assert (field.value, field.certain, field.low) == (2, False, 2)
    assert says(field, "without the start of a pass")


def one_step(file: str) -> list[Sighting]:
    """The first training step of a trace, with everything up to the next forward pass."""
    evidence = read_evidence(file)
    second = find_structure(evidence.sightings).layer_indices[1][0]
    lookups = [one.index for one in evidence.sightings[:second] if one.name.kernel_class == "embedding"]
    forward = [index for index in lookups if evidence.sightings[index].name.direction != "backward"]
    return list(evidence.sightings[: max(forward, default=second)])


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_lost_attention_of_a_training_step_leaves_num_layers_open(which: int) -> None:
    file = "llama_bf16.train.json.gz"
    kernels = one_step(file)
    assert recover([keep_kernels(read_evidence(file), kernels)]).fields["num_layers"].value == 3
    lost = attentions_of(file)[which]
    assert find_wrong(file, [one for one in kernels if one.index != lost]) == []


def test_the_backward_pass_shows_a_lost_layer() -> None:
    """The launch numbers are removed: with them, the gap shows it as well."""
    file = "gpt2_bf16_odd.train.json.gz"
    first, second, *_ = attentions_of(file)
    kernels = [msgspec.structs.replace(one, launch=None) for one in one_step(file)]
    whole = recover([keep_kernels(read_evidence(file), kernels)]).fields["num_layers"]
    assert (whole.value, whole.certain) == (4, True)
    assert says(whole, "assumes that the file has every kernel")
    kept = [one for one in kernels if not first <= one.index < second]
    field = recover([keep_kernels(read_evidence(file), kept)]).fields["num_layers"]
    assert (field.value, field.certain, field.low) == (3, False, 3)
    assert says(field, "the backward pass has 4 layers")


# --- GEMMs


@pytest.mark.parametrize(("file", "role"), [("llama_bf16.csv.gz", "value"), ("held_smol.csv.gz", "key")])
def test_a_lost_projection_leaves_the_heads_open(file: str, role: str) -> None:
    """One of three projections is missing in the second layer: the others look like queries, and keys with values."""
    (reading,) = find_structure(read_evidence(file).sightings).readings
    answer = recover([without(file, reading.products[role].index)])  # type: ignore[index]
    assert answer.fields["num_kv_heads"].value != truth_of(file)["num_kv_heads"]
    assert not answer.fields["num_kv_heads"].certain
    assert any("before the first attention" in note for note in answer.notes)


def test_a_lost_projection_of_the_last_layer_leaves_the_heads_open() -> None:
    """Three layers: the gaps between them differ, and the shorter one is used."""
    file = "builtin_autocast.forward.json.gz"
    _, second, third = attentions_of(file)
    lost = products_between(file, second, third)[5]
    answer = recover([without(file, lost)])
    assert answer.fields["num_kv_heads"].value != 12
    assert not answer.fields["num_kv_heads"].certain


def test_three_layers_confirm_each_other() -> None:
    """The first attention is missing, and its GEMMs are left. The other layers agree on the sizes."""
    file = "held_gpt2.csv.gz"
    fields = recover([without(file, attentions_of(file)[0])]).fields
    assert not fields["num_layers"].certain
    assert (fields["d_model"].value, fields["d_model"].certain) == (1280, True)


# --- Heads and tails


def test_a_compiled_lookup_in_a_layer_is_not_the_start() -> None:
    """The compiler looks embeddings up again in the second layer. Its first kernels, by number, are missing."""
    evidence = read_evidence("gpt2_compiled.forward.json.gz")
    (first, *_) = attentions_of("gpt2_compiled.forward.json.gz")
    kept = evidence.sightings[first + 1 :]
    assert any("embedding" in one.name.fused for one in kept)
    field = recover([keep_kernels(evidence, kept)]).fields["num_layers"]
    assert (field.value, field.certain, field.low) == (3, False, 3)


def test_a_compiled_start_may_come_after_other_compiled_kernels() -> None:
    evidence = read_evidence("gpt2_compiled.forward.json.gz")
    start = evidence.sightings[0]
    names = ("triton_poi_fused_arange_0", start.name.name.replace("_0", "_1"))
    made = [msgspec.structs.replace(start, name=decode(name)) for name in names]
    assert "embedding" in made[1].name.fused
    assert recover([keep_kernels(evidence, [*made, *evidence.sightings[1:]])]).fields["num_layers"].certain
    assert not recover([keep_kernels(evidence, [made[1], *evidence.sightings[1:]])]).fields["num_layers"].certain


@pytest.mark.parametrize("file", ["held_neox.csv.gz", "llama_bf16.csv.gz"])
def test_a_projection_at_the_end_of_a_file_is_not_an_lm_head(file: str) -> None:
    """One layer, and the first GEMM of the next: four GEMMs of either model follow its attention."""
    kernels = read_evidence(file).sightings
    first, second, *_ = attentions_of(file)
    end = products_between(file, first, second)[4]
    answer = recover([keep_kernels(read_evidence(file), kernels[: end + 1])])
    assert "head" in find_structure(kernels[: end + 1]).readings[0].products
    assert not answer.fields["num_layers"].certain
    assert says(answer.fields["num_layers"], "may be the start of another")


def test_a_single_layer_makes_no_size_certain() -> None:
    """The file begins with the second of three projections."""
    file = "builtin_hopper.forward.json.gz"
    first, _ = attentions_of(file)
    answer = recover([keep_kernels(read_evidence(file), read_evidence(file).sightings[first + 1 :])])
    assert answer.fields["num_kv_heads"].value != 8
    assert [name for name, field in answer.fields.items() if field.certain] == ["dtype"]


# --- Launch numbers


@pytest.mark.parametrize("file", [file for file in TRACES if "compiled" not in file and "forward" in file])
def test_launch_numbers_show_a_lost_layer(file: str) -> None:
    kernels = read_evidence(file).sightings
    first, second, *_ = attentions_of(file)
    kept = keep_kernels(read_evidence(file), [*kernels[:first], *kernels[second:]]).sightings
    structure = find_structure(kept)
    assert structure.num_layers == truth_of(file)["num_layers"] - 1
    assert any(doubt.of_layers and "launches are missing" in doubt.text for doubt in structure.doubts)


@pytest.mark.parametrize("file", TRACES)
def test_complete_files_raise_no_doubts(file: str) -> None:
    structure = find_structure(read_evidence(file).sightings)
    assert structure.doubts == ()
    assert recovered(file).fields["num_layers"].evidence[-1] == "no gap in the launch numbers"


def test_a_graph_is_one_launch() -> None:
    evidence = read_evidence("gpt2_bf16_odd.forward.json.gz")
    kernels = [msgspec.structs.replace(one, launch=1 if one.index < 4 else 900) for one in evidence.sightings]
    assert find_structure(kernels).doubts == ()


def test_a_launch_without_its_kernel_leaves_everything_open() -> None:
    recording = open_recording(FOLDER / "llama_bf16.forward.json.gz")
    assert not gather(recording).is_incomplete
    kernel = recording.kernels.with_row_index("place").filter(pl.col("kind") == "kernel")["place"][60]
    kept = recording.kernels.with_row_index("place").filter(pl.col("place") != kernel).drop("place")
    lost = gather(replace(recording, kernels=kept))
    assert lost.is_incomplete
    assert "1 kernel missing: launched, but not in the file" in lost.notes
    assert [name for name, field in recover([lost]).fields.items() if field.certain] == ["dtype"]
