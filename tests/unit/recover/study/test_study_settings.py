"""The settings of a study's runs, and the fields that it cannot separate."""

from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.errors import StepscopeError
from stepscope.recording import tables
from stepscope.recording.store import Recording
from stepscope.recover.study import read_truths, study
from stepscope.spec import Case, HuggingFace, Scalar, Timing, Workload
from tests.unit.recover.counted_runs import (
    GRID,
    LAWS,
    QKV,
    TENSOR_OPS,
    Counters,
    Laws,
    case,
    find,
    follow,
    notes_of,
    record,
    run_all,
)


def test_fields_with_a_constant_ratio_share_one_exponent() -> None:
    cases = [case(d_model=width, d_ff=4 * width) for width in (256, 512, 1024)]
    found = run_all(cases)
    row = follow(found, QKV, "tensor ops")
    assert row["d_model_and_d_ff"] == pytest.approx(2)
    assert not {"d_model", "d_ff"} & row.keys()
    assert "d_model and d_ff have a constant ratio" in notes_of(found)


def test_fields_that_change_together_have_no_exponent() -> None:
    found = run_all([case(num_layers=2, d_model=256, context=64), case(num_layers=4, d_model=768, context=64)])
    assert find(found, "Sensitivity") == []
    assert "num_layers, d_model changed together and cannot be separated" in notes_of(found)
    assert {row["part"] for row in find(found, "Counters that reveal")} == {None}
    assert "d_model" not in find(found, "Principal")[0]


def test_more_runs_do_not_separate_fields_that_always_change_together() -> None:
    pairs = ((1, 64), (2, 128), (4, 512), (8, 1024))  # num_layers and d_model, not proportional
    cases = [
        case(num_layers=layers, d_model=width, context=context)
        for layers, width in pairs[::3]
        for context in (64, 128, 256)
    ]
    found = run_all(cases)
    assert "num_layers, d_model changed together" in notes_of(found)
    assert follow(found, QKV, "tensor ops").keys() & {"num_layers", "d_model", "context"} == {"context"}


def test_a_field_that_some_runs_lack_is_ignored() -> None:
    runs = [strip(record(one, LAWS), name) for one, name in zip(GRID[:2], "ab", strict=True)]
    found = study(runs, truths={"a": {"context": 128, "d_ff": 1024}, "b": {"context": 256}})
    assert "ignored because not every run has them: d_ff" in notes_of(found)
    assert follow(found, QKV, "ffma")["context"] == pytest.approx(1)


def test_a_field_that_changes_only_with_the_device_has_no_exponent() -> None:
    runs = [record(case(context=128), LAWS), record(case(context=256), LAWS).with_manifest(device="another")]
    assert "context changed only together with device: no exponent" in notes_of(study(runs))


def test_a_field_that_changes_only_with_the_precision_has_no_exponent() -> None:
    found = run_all([case(context=128), case(context=256, precision="bf16")])
    assert find(found, "Sensitivity") == []
    assert "context changed only together with precision: no exponent" in notes_of(found)


def test_runs_with_different_precision_are_never_paired() -> None:
    def law(workload: Workload) -> Counters:
        return {TENSOR_OPS: workload.context * (1 if workload.precision == "fp32" else 7)}

    cases = [case(context=128), case(context=256), case(context=512, precision="bf16")]
    row = follow(run_all(cases, {"query_key_value": law}), QKV, "tensor ops")
    assert (row["context"], row["context_low"], row["context_high"]) == pytest.approx((1, 1, 1))


def strip(recording: Recording, file: str) -> Recording:
    return recording.with_manifest(case=None, file=file)


def test_settings_can_be_given_by_run_name() -> None:
    runs = [strip(record(one, LAWS), f"{name}.csv.gz") for one, name in zip(GRID[:3], "abc", strict=True)]
    truths = {name: {"context": 128 * 2**i, "dtype": "bf16", "mood": "good"} for i, name in enumerate("abc")}
    found = study(runs, truths=truths)
    assert follow(found, QKV, "tensor ops")["context"] == pytest.approx(1)
    assert "a, b, c: ignored settings: mood" in notes_of(found)
    assert follow(study(runs, names=["x/a", "x/b", "x/c/"], truths=truths), QKV, "ffma")["context"] == pytest.approx(1)


def test_arguments_of_a_custom_model_are_fields() -> None:
    def counted(arguments: dict[str, Scalar]) -> Recording:
        model = HuggingFace(config="gpt2", arguments=tuple(arguments.items()))
        workload = Workload(model=model, context=128, mode="inference")
        width = arguments["n_embd"]
        laws: Laws = {"query_key_value": lambda _: {TENSOR_OPS: 100 * int(width) ** 2}}
        return record(case(), laws).with_manifest(case=Case(workload=workload, timing=Timing(steps=1)))

    runs = [counted({"n_embd": width, "use_cache": False, "d_ff": 4, "num_kv_heads": 0}) for width in (256, 512)]
    found = study(runs)
    assert follow(found, QKV, "tensor ops")["set_n_embd"] == pytest.approx(2)
    assert "the same in all runs: d_ff 4, batch 4, context 128" in notes_of(found)


def test_a_settings_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "truth.json"
    path.write_text('{"a": {"context": 128, "versions": {"torch": "2.11"}}}')
    assert read_truths(path) == {"a": {"context": 128, "versions": {"torch": "2.11"}}}


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 3}', b'{"a": ', b'{"\xff": {}}'])
def test_an_invalid_settings_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "truth.json"
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match="not a settings file") as error:
        read_truths(path)
    assert "d_model" in error.value.detail


def test_settings_that_contradict_the_kernels_are_reported() -> None:
    runs = [strip(record(one, LAWS), name) for one, name in zip(GRID[:2], "ab", strict=True)]
    found = study(runs, truths={"a": {"context": 128, "num_layers": 3}, "b": {"context": 256, "num_layers": 2}})
    assert "a: num_layers is 3 in the settings, but the kernels show 2" in notes_of(found)


@pytest.mark.parametrize("value", [0, -1, "128", 1.5, True, None])
def test_settings_must_be_positive_integers(value: object) -> None:
    runs = [strip(record(one, LAWS), name) for one, name in zip(GRID[:2], "ab", strict=True)]
    with pytest.raises(StepscopeError, match="invalid context for `b`: `"):
        study(runs, truths={"a": {"context": 128}, "b": {"context": value}})


def test_a_study_requires_two_runs() -> None:
    with pytest.raises(StepscopeError, match="at least two runs, got 1") as error:
        run_all(GRID[:1])
    assert "--counters" in error.value.hint
    with pytest.raises(StepscopeError, match="at least two runs, got 0"):
        study([])


def test_a_study_requires_different_settings() -> None:
    with pytest.raises(StepscopeError, match="do not differ") as error:
        run_all([case(), case(precision="bf16")])
    assert "context 128" in error.value.detail


def test_a_run_without_counters_or_settings_is_rejected() -> None:
    runs = [record(one, LAWS) for one in GRID[:2]]
    with pytest.raises(StepscopeError, match="no counters in `b`"):
        study([runs[0], replace(runs[1], counters=tables.empty("counters"))], names=["a", "b"])
    with pytest.raises(StepscopeError, match=r"the settings of `b\.csv` are unknown"):
        study([runs[0], strip(runs[1], "b.csv")])
