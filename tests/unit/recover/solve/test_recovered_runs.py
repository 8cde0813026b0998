"""The sizes of real runs from their traces and counters. Runs named `held_` were held out while the kernel readers were
developed."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.recording.readers.formats import open_recording
from stepscope.recover.evidence.recording import gather
from stepscope.recover.solve.recovery import FIELDS, Field, recover
from tests.unit.recover.evidence_runs import COUNTERS, FOLDER, TRACES, read_evidence, recovered, truth_of

COMPILED = [file for file in TRACES if "compiled" in file or "held_qwen2" in file]
EXACT = ("num_layers", "d_model", "num_heads", "num_kv_heads", "batch", "context", "dtype", "d_head")


def _holds(field: Field, truth: object) -> bool:
    if field.value == truth or truth in field.alternatives:
        return True
    return (
        isinstance(truth, int) and field.low is not None and field.high is not None and field.low <= truth <= field.high
    )


@pytest.mark.parametrize("file", COUNTERS)
def test_counters_determine_the_model(file: str) -> None:
    answer, truth = recovered(file), truth_of(file)
    assert {name: answer.fields[name].value for name in EXACT} == {name: truth[name] for name in EXACT}
    assert _holds(answer.fields["d_ff"], truth["d_ff"])
    assert _holds(answer.fields["vocab_size"], truth["vocab_size"])
    if truth["parameters"]:
        assert answer.candidates[0].parameters == pytest.approx(truth["parameters"], rel=0.005)


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_no_certain_value_is_wrong(file: str) -> None:
    answer, truth = recovered(file), truth_of(file)
    certain = {name: field.value for name, field in answer.fields.items() if field.certain}
    assert certain == {name: truth[name] for name in certain}
    assert {"num_layers", "dtype"} <= set(certain)


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_the_truth_is_among_the_alternatives(file: str) -> None:
    answer, truth = recovered(file), truth_of(file)
    told = [name for name in FIELDS if name != "parameters" and answer.fields[name].value is not None]
    assert [name for name in told if not _holds(answer.fields[name], truth[name])] == []


# Runs in which no kernel depends on the sequence, and one in which the heads cannot be distinguished.
_GUESSED_OTHERWISE = ("builtin_hopper.forward.json.gz", "held_llama.forward.json.gz")


@pytest.mark.parametrize("file", [file for file in TRACES if file not in COMPILED])
def test_a_trace_ranks_the_truth_first(file: str) -> None:
    answer, truth = recovered(file), truth_of(file)
    found = {name: answer.fields[name].value for name in EXACT}
    assert (found == {name: truth[name] for name in EXACT}) == (file not in _GUESSED_OTHERWISE)


def test_a_compiled_vocabulary_may_be_padded() -> None:
    field = recovered("neox_compiled.csv.gz").fields["vocab_size"]
    assert (field.value, field.certain, field.alternatives) == (50304, False, tuple(range(50297, 50304)))


@pytest.mark.parametrize("file", COMPILED)
def test_a_compiled_trace_shows_likely_sizes(file: str) -> None:
    """Batch and context can be exchanged if no kernel depends on positions."""
    answer, truth = recovered(file), truth_of(file)
    left_open = ("batch", "context") if file == "gpt2_compiled.forward.json.gz" else ()
    names = [name for name in (*EXACT, "d_ff") if name not in left_open]
    assert {name: answer.fields[name].value for name in names} == {name: truth[name] for name in names}
    assert any("counters" in one for one in answer.would_decide)


@pytest.mark.parametrize("file", COMPILED)
def test_only_the_grid_of_attention_makes_a_size_of_a_compiled_trace_certain(file: str) -> None:
    certain = {name for name, field in recovered(file).fields.items() if field.certain}
    has_grid = "train" in file or "neox" in file  # other attention kernels are persistent
    assert certain == {"num_layers", "dtype", *(("num_heads", "batch") if has_grid else ())}


def test_a_snapshot_determines_the_vocabulary() -> None:
    alone = recovered("llama_bf16.train.json.gz")
    assert not alone.fields["vocab_size"].certain
    files = ("llama_bf16.train.json.gz", "llama_bf16.snapshot.pickle.gz")
    together = recover([read_evidence(file) for file in files])
    assert (together.fields["vocab_size"].value, together.fields["vocab_size"].certain) == (32000, True)


@pytest.mark.parametrize("file", ["held_neox.forward.json.gz", "held_gpt2_fp16.forward.json.gz", "held_llama.csv.gz"])
def test_the_same_file_twice_gives_the_same_result(file: str) -> None:
    assert recover([read_evidence(file)] * 2).fields == recovered(file).fields


def test_other_tensors_of_a_snapshot_are_not_logits() -> None:
    """The logits were freed: the activations and weights of the feed-forward layer remain."""
    evidence = read_evidence("held_llama.forward.json.gz")
    tokens, d_model, d_ff = 3 * 448, 1536, 4224
    field = recover([replace(evidence, allocations=(tokens * d_ff * 2, d_model * d_ff * 2))]).fields["vocab_size"]
    assert field.value is None
    assert not field.certain


def test_counters_with_a_trace_leave_no_more_open_than_either() -> None:
    files = ("held_smol.forward.json.gz", "held_smol.csv.gz")
    together = recover([read_evidence(file) for file in files])
    for name in FIELDS:
        if any(recovered(file).fields[name].certain for file in files):
            assert together.fields[name].certain, name
    assert together.candidates[0].context == 1000


def test_items_add_up_to_the_parameters() -> None:
    answer = recovered("gpt2_tf32.csv.gz")
    assert sum(item.count for item in answer.items) == answer.candidates[0].parameters == 77_706_240


def test_an_overflow_in_a_file_is_not_a_count(tmp_path: Path) -> None:
    text = gzip.decompress((FOLDER / "gpt2_bf16_odd.csv.gz").read_bytes()).decode()
    (tmp_path / "inf.csv").write_text(text.replace('"1,536,000"', '"1e400"'))
    assert recover([gather(open_recording(tmp_path / "inf.csv"))]).fields["d_model"].value == 640
