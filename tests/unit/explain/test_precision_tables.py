"""Precision tables: reasons agree with the observed dtypes, and small numbers are not rounded away."""

import json
import math
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.precision.autocast import LISTS, explain_dtype, find_policy
from stepscope.explain.precision.precision_tables import (
    answer,
    explain_sum,
    find_spacing,
    find_speeds,
    make_page,
    make_table,
)
from stepscope.findings import Cell, Table
from stepscope.recording.rows.precision_report import (
    GradientError,
    LowDtype,
    NormPart,
    Output,
    PrecisionComparison,
    PrecisionReport,
    PrecisionRun,
    ScaledBackward,
    Sum,
    Truth,
    Underflow,
    encode_report,
    read_report,
    write_report,
)
from stepscope.render.formats import Format
from stepscope.render.tables import render
from stepscope.render.terminal import render_page
from stepscope.spec import Precision, build_case
from tests.unit.rows import ENVIRONMENT, row


def output(name: str, dtype: str, operation: str | None, *inputs: str, kind: str = "torch.nn.Module") -> Output:
    return Output(name=name, kind=kind, dtype=dtype, gradient_dtype=dtype, operation=operation, input_dtypes=inputs)


def run(precision: Precision, *, error: float | None = 0.01, outputs: tuple[Output, ...] = ()) -> PrecisionRun:
    low = precision if precision in ("bf16", "fp16") else "fp32"
    layers = [output(f"blocks.{layer}.up", low, "linear", "fp32") for layer in range(3)]
    scales = (1.0, 2.0**16, 2.0**24) if precision == "fp16" else (1.0,)
    return PrecisionRun(
        precision=precision,
        parameter_dtypes=("fp32",),
        gradient_dtypes=("fp32",),
        outputs=outputs or (*layers, output("norm", low, "relu", low)),
        logits=output("logits", low, "linear", "fp32"),
        loss=output("loss", "fp32", "cross_entropy", low),
        loss_value=1.0,
        loss_error=1e-5,
        loss_scale=scales[-1] if precision != "fp16" else 2.0**16,
        gradient_error=error,
        gradient_one_minus_cosine=1e-6,
        gradients=tuple(
            GradientError(module=f"blocks.{layer}.up", relative=error and error * (layer + 1), one_minus_cosine=0.0)
            for layer in range(3)
        ),
        backwards=tuple(
            ScaledBackward(
                scale=scale,
                gradient_error=None if scale == 2.0**24 else 0.01,
                modules=(
                    Underflow(module="a", parameters=1000, parameters_zero=int(scale == 1), outputs=10),
                    Underflow(module="b", parameters=1000, parameters_not_finite=int(scale == 2.0**24)),
                ),
            )
            for scale in scales
        ),
    )


def report(*runs: PrecisionRun, device: str = "cuda:0") -> PrecisionReport:
    sums = (
        Sum(accumulator="fp16", term_dtype="fp16", upcast=False, count=1000, term=0.01, stored_term=0.01, result=9.9),
    )
    low: tuple[tuple[LowDtype, float | None], ...] = (("bf16", 0.01), ("fp16", None))
    parts = tuple(
        NormPart(norm="RMSNorm", part="rsqrt", dtype=dtype, input_scale=scale, width=8, error=error)
        for dtype, error in low
        for scale in (1.0, 300.0)
    )
    return PrecisionReport(
        case=build_case({"device": device, "context": 64}),
        environment=msgspec.structs.replace(ENVIRONMENT, device=device),
        command="stepscope precision",
        started="2026-01-01T00:00:00+00:00",
        comparison=PrecisionComparison(truth=Truth(loss=1.0, parameters=10), runs=runs, sums=sums, norm_parts=parts),
    )


def column(table: Table, key: str) -> dict[Cell, Cell]:
    """A column, keyed by the first column."""
    index = [one.key for one in table.columns].index(key)
    return {cells[0]: cells[index] for cells in table.rows}


@pytest.mark.parametrize(
    ("found", "device", "reason"),
    [
        (output("", "bf16", "linear", "fp32"), "cpu", "`linear` is on autocast's lower-precision list"),
        (output("", "fp32", "layer_norm", "bf16", "fp32"), "cuda", "fp32 list on CUDA, but not on a CPU"),
        (output("", "bf16", "layer_norm", "bf16", "fp32"), "cpu", "on CUDA's fp32 list, but on no list on a CPU"),
        (output("", "fp32", "cross_entropy", "bf16"), "cpu", "`cross_entropy` is on autocast's fp32 list"),
        (output("", "fp32", "cross_entropy", "bf16"), "cuda", "made of `log_softmax` and `nll_loss`, which are on"),
        (output("", "bf16", "mean", "bf16"), "cuda", "`mean` is on no list, so it keeps its input's dtype, bf16"),
        (output("", "fp32", "add", "fp32", "bf16"), "cuda", "type promotion of fp32 and bf16 gives fp32"),
        (output("", "bf16", "to", "fp32"), "cpu", "the model casts it explicitly"),
        (output("", "fp32", "cat", "fp32", "bf16"), "cpu", "widest-input list"),
        (output("", "bf16", "my_kernel", "fp32"), "cuda", "`my_kernel` is on no list, so it follows its inputs"),
        (output("", "bf16", None), "cuda", "no recorded operation"),
        (output("", "fp32", "mul", "fp32", kind="stepscope.nn.model.RMSNorm"), "cpu", "converts to fp32"),
    ],
)
def test_dtype_is_explained_by_the_list_of_the_device(found: Output, device: str, reason: str) -> None:
    assert reason in explain_dtype(found, device=device, precision="bf16")


def test_list_does_not_explain_a_dtype_it_did_not_cause() -> None:
    """A list may change between versions of PyTorch."""
    reason = explain_dtype(output("", "bf16", "rms_norm", "bf16"), device="cuda", precision="bf16")
    assert "different list" in reason
    # Autocast does not apply to in-place operations.
    assert find_policy("exp", "cuda") == "fp32"
    assert find_policy("exp_", "cuda") is None


def test_lists_are_no_reason_without_autocast() -> None:
    for precision in ("fp32", "tf32"):
        assert "no autocast" in explain_dtype(output("", "fp32", "linear"), device="cuda", precision=precision)


def test_no_operation_is_on_two_lists() -> None:
    for device, lists in LISTS.items():
        assert {"linear", "matmul", "nll_loss"} <= set(lists), device
    assert find_policy("layer_norm", "cpu") is None


def test_identical_layers_share_a_row() -> None:
    outputs = (output("blocks.0.up", "bf16", "linear", "fp32"), output("blocks.1.up", "bf16", "linear", "fp32"))
    odd = output("blocks.2.up", "fp32", "add", "fp32", "bf16")
    table = make_table(report(run("bf16", outputs=(*outputs, odd))), "dtypes")
    rows = [cells[:2] for cells in table.rows if str(cells[0]).startswith("blocks")]
    assert rows == [("blocks.*.up", "bf16"), ("blocks.*.up", "fp32")]
    detailed = make_table(report(run("bf16", outputs=(*outputs, odd))), "dtypes", detail=True)
    assert {"blocks.0.up", "blocks.1.up", "blocks.2.up"} <= {cells[0] for cells in detailed.rows}


def test_dtypes_table_names_its_device_and_every_kind_of_tensor() -> None:
    table = make_table(report(run("fp32"), run("bf16")), "dtypes")
    assert "cuda:0 (Test GPU)" in table.title
    assert column(table, "bf16") == {
        "parameters": "fp32",
        "blocks.*.up": "bf16",
        "norm": "bf16",
        "logits": "bf16",
        "loss": "fp32",
        "gradients of outputs": "as output",
        "gradients of parameters": "fp32",
    }


def test_parts_of_a_sequential_are_not_layers() -> None:
    outputs = (
        output("0", "fp32", "embedding", kind="torch.nn.Embedding"),
        output("1", "bf16", "add", kind="torch.nn.TransformerEncoderLayer"),
        output("1.linear1", "bf16", "linear", kind="torch.nn.Linear"),
        output("2", "bf16", "linear", kind="torch.nn.Linear"),
    )
    dtypes = column(make_table(report(run("bf16", outputs=outputs)), "dtypes"), "bf16")
    assert list(dtypes)[1:5] == ["0 (Embedding)", "1 (TransformerEncoderLayer)", "1.linear1", "2 (Linear)"]


def test_norm_in_the_sentence_is_the_model_s_own() -> None:
    told = report(run("fp16", outputs=(output("norm", "fp32", "layer_norm", kind="torch.nn.modules.LayerNorm"),)))
    layer_norm = tuple(msgspec.structs.replace(one, norm="LayerNorm", error=1e-6) for one in told.comparison.norm_parts)
    both = msgspec.structs.replace(told.comparison, norm_parts=(*told.comparison.norm_parts, *layer_norm))
    said = answer(msgspec.structs.replace(told, comparison=both))[-1]
    assert "LayerNorm" in said
    assert "RMSNorm" not in said


def test_role_shows_median_and_largest_error() -> None:
    table = make_table(report(run("fp32", error=1e-7), run("bf16", error=0.01)), "errors")
    assert column(table, "bf16_median")["blocks.*.up"] == pytest.approx(0.02)
    assert column(table, "bf16_max")["blocks.*.up"] == pytest.approx(0.03)
    assert column(table, "fp32_max")["all gradients"] == 1e-7
    assert column(table, "modules")["blocks.*.up"] == 3
    assert "blocks.1.up" in column(make_table(report(run("bf16")), "errors", detail=True), "bf16_max")


def test_infinite_error_is_shown_and_survives_the_file(tmp_path: Path) -> None:
    kept = report(run("fp16", error=None))
    assert column(make_table(kept, "errors"), "fp16_max")["all gradients"] == math.inf
    write_report(kept, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == kept
    assert json.loads(encode_report(kept))["schema"] == "stepscope.precision/1"


def test_reference_below_float64_is_noted() -> None:
    plain = report(run("bf16"))
    truth = Truth(loss=1.0, parameters=10, narrowed=("blocks.0.odd",))
    narrowed = msgspec.structs.replace(plain, comparison=msgspec.structs.replace(plain.comparison, truth=truth))
    assert not any("blocks.0.odd" in note for note in make_table(plain, "errors").notes)
    assert any("blocks.0.odd" in note for note in make_table(narrowed, "errors").notes)


def test_underflow_adds_up_over_modules_for_each_loss_scale() -> None:
    table = make_table(report(run("fp16"), run("fp32")), "underflow")
    keys = [one.key for one in table.columns]
    rows = [dict(zip(keys, cells, strict=True)) for cells in table.rows]
    assert [(one["scale"], one["parameters_lost"], one["parameters_not_finite"]) for one in rows] == [
        (1, 1 / 2000, 0),
        (2**16, 0.0, 0),
        (2**24, 0.0, 1),
    ]
    detailed = make_table(report(run("fp16")), "underflow", detail=True)
    assert len(detailed.rows) == 9
    said = " ".join(answer(report(run("fp16"))))
    assert "0.05% of parameter gradients" in said
    assert "overflow at 2²⁴ and above" in said


def test_sum_is_explained_by_the_rounding_that_caused_the_error() -> None:
    def added(accumulator: str, term_dtype: str, stored: float, result: float, stopped: int | None = None) -> str:
        return explain_sum(
            Sum(
                accumulator=accumulator,
                term_dtype=term_dtype,
                upcast=False,
                count=1000,
                term=0.01,
                stored_term=stored,
                result=result,
                stopped_at=stopped,
            )
        )

    assert "rounds to a multiple of 2⁻²⁰" in added("fp32", "fp32", 0.00999999978, 10.000134)
    assert "2⁻⁷ = 0.00781, so 0.01 counts as 0.00781" in added("fp16", "fp16", 0.010002136, 9.953125)
    assert "1000 × 0.010002136 = 10.0021" in added("fp32", "fp16", 0.010002136, 10.002136)
    assert "stops at 4 after 350 additions" in added("bf16", "bf16", 0.010009766, 4.0, 350)
    assert find_spacing("bf16", 4.0) == 2**-5


def test_speeds_match_the_model_and_errors_match_the_case() -> None:
    rows = [
        row(context=64, precision="fp32", step_ns=(300,) * 3),
        row(context=64, precision="bf16", step_ns=(100,) * 3),
        row(context=128, precision="fp32", step_ns=(800,) * 3),
        row(context=128, precision="bf16", step_ns=(200,) * 3),
        row(context=64, precision="fp16", compile=True, step_ns=(50,) * 3),
        row("oom", context=256, precision="bf16"),
        row(size="small", precision="fp32"),
        row(size="small", precision="bf16"),
    ]
    plain = report(run("bf16", error=0.5))
    with_speeds = msgspec.structs.replace(plain, speeds=find_speeds(rows, plain.case))
    table = make_table(with_speeds, "speed")
    keys = [one.key for one in table.columns]
    found = [dict(zip(keys, cells, strict=True)) for cells in table.rows]
    assert [(one["context"], one["speedup"], one["gradient_error"]) for one in found] == [
        (64, 3.0, 0.5),
        (128, 4.0, None),
    ]
    assert len(make_page(with_speeds).tables) == len(make_page(plain).tables) + 1
    with pytest.raises(StepscopeError, match="no case of `nano`"):
        find_speeds(rows[-2:], plain.case)
    with pytest.raises(StepscopeError, match="has no speeds"):
        make_table(plain, "speed")


def test_speeds_show_the_setting_they_differ_in() -> None:
    plain = report(run("bf16"))
    rows = [row(precision=precision, checkpoint=one) for one in ("none", "block") for precision in ("fp32", "bf16")]
    tables = [
        make_table(msgspec.structs.replace(plain, speeds=find_speeds(some, plain.case)), "speed")
        for some in (rows, rows[:2])
    ]
    told, same = ([column.key for column in table.columns] for table in tables)
    assert [cells[told.index("checkpoint")] for cells in tables[0].rows] == ["none", "block"]
    assert "checkpoint" not in same


def test_every_table_comes_in_every_format() -> None:
    full = report(run("fp32"), run("bf16"), run("fp16"))
    for name in ("dtypes", "errors", "underflow", "accumulation", "norm"):
        for format_ in Format:
            assert render(make_table(full, name), format_)


def test_foreign_file_is_rejected(tmp_path: Path) -> None:
    newer = encode_report(report(run("bf16"))).decode().replace("stepscope.precision/1", "stepscope.precision/9")
    for content in (newer, "{}", '{"schema": "stepscope.explain/1"}', "no json", '{"schema": "stepscope.precision/1"}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(StepscopeError, match="not a `stepscope precision` result"):
            read_report(tmp_path / "a.json")
    with pytest.raises(StepscopeError, match="cannot read"):
        read_report(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"precision": "fp16"', '"precision": "fp32"'),
        ('"scale": 65536.0', '"scale": 0.0'),
        ('"part": "rsqrt"', '"part": "of tomorrow"'),
        ('"accumulator": "fp16"', '"accumulator": "fp8"'),
        ('"result": 9.9', '"result": 0.0'),
        ('"scale": 65536.0', '"scale": 3.0'),
        ('"device": "cuda:0"', '"device": "npu:0"'),
    ],
)
def test_edited_file_is_shown_or_rejected(tmp_path: Path, old: str, new: str) -> None:
    text = encode_report(report(run("fp32"), run("fp16"))).decode()
    assert old in text
    (tmp_path / "edited.json").write_text(text.replace(old, new, 1))
    with suppress(StepscopeError):
        assert render_page(make_page(read_report(tmp_path / "edited.json"), detail=True), width=100)
