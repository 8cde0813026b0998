"""Memory tables over many cases, from rows like those of a sweep."""

import re

import pytest

from stepscope import cost
from stepscope.explain.memory.grid import (
    grid_figure,
    grid_table,
    outcome_of,
    precision_table,
    study_table,
    study_values,
)
from stepscope.findings import Cell, Table
from stepscope.recording.memory.labels import MemoryRun
from stepscope.recording.rows.bench import Status, case_key
from stepscope.recording.rows.memory_summary import CategoryBytes, MemoryRow, MemorySummary, StepBytes
from stepscope.spec import Scalar, build_case
from tests.unit.rows import ENVIRONMENT, row

GIB = 2**30
MS = 1_000_000


def weigh(
    status: Status = "ok",
    *,
    parameters: int = 0,
    activations: int = 0,
    copies: int = 0,
    step_ms: int = 100,
    saved_bytes: int = 7,
    **settings: Scalar,
) -> MemoryRow:
    held = {"parameters": parameters, "activations": activations, "autocast copies": copies}
    case = build_case({"device": "cuda:0", "steps": 4, **settings})
    peak = sum(held.values())
    summary = MemorySummary(
        file="",
        source="memory snapshot",
        device="Test GPU",
        peak_bytes=peak,
        peak_step=1,
        peak_phase="backward",
        peak_module=None,
        before_bytes=1,
        categories=tuple(CategoryBytes(category=name, bytes=size) for name, size in held.items()),
        modules=(),
        largest=(),
        phases=(),
        steps=tuple(
            StepBytes(step=step, peak_bytes=peak - 1 + step, end_bytes=9, end_reserved_bytes=10) for step in (0, 1)
        ),
        reserved_bytes=peak + 5,
        peak_reserved_bytes=peak + 6,
        saved_bytes=saved_bytes,
        allocator_peak_bytes=peak,
        estimated_bytes=0,
        num_allocations=3,
        notes=(),
    )
    run = MemoryRun(step_ns=(step_ms * MS,) * 3, recorded_step_ns=(), watched_step_ns=(), parameters=1000)
    done = status == "ok"
    return MemoryRow(
        key=case_key(case, ENVIRONMENT, None),
        case=case,
        environment=ENVIRONMENT,
        status=status,
        reason="" if done else f"the reason for {status}",
        started="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
        command="stepscope memory",
        summary=summary if done else None,
        run=run if done else None,
    )


def cells(table: Table, key: str) -> list[Cell]:
    index = [column.key for column in table.columns].index(key)
    return [one[index] for one in table.rows]


def keys(table: Table, *, shown: bool = False) -> list[str]:
    return [column.key for column in table.columns if not (shown and column.detail)]


# --- Peaks ------------------------------------------------------------------------------------------------------------


def test_failed_case_is_a_row_without_numbers() -> None:
    rows = [
        weigh(context=128, parameters=5 * GIB, activations=GIB),
        weigh("oom", context=2048),
        weigh("timeout", context=4096),
    ]
    table = grid_table(rows)
    assert cells(table, "context") == [128, 2048, 4096]
    assert cells(table, "peak_bytes") == [6 * GIB, None, None]
    assert cells(table, "parameters_bytes") == [5 * GIB, None, None]
    assert cells(table, "remarks") == [None, "oom", "timeout"]
    assert set(table.notes) == {"oom: the reason for oom", "timeout: the reason for timeout"}


def test_row_has_every_number_of_its_case() -> None:
    table = grid_table([weigh(parameters=100, activations=20, step_ms=7)])
    (only,) = table.rows
    found = dict(zip(keys(table), only, strict=True))
    assert (found["peak_bytes"], found["peak_phase"], found["reserved_bytes"]) == (120, "backward", 126)
    assert (found["first_peak_bytes"], found["after_bytes"], found["step_ms"]) == (119, 9, 7.0)


def test_only_categories_that_a_case_has_are_columns() -> None:
    table = grid_table([weigh(precision="fp32", parameters=100), weigh(precision="bf16", copies=50)])
    assert cells(table, "autocast_copies_bytes") == [0, 50]
    assert "activations_bytes" not in keys(table)
    assert "remarks" not in keys(table)


def test_varying_settings_are_columns_and_the_rest_is_in_the_title() -> None:
    table = grid_table([weigh(checkpoint="none", batch=8, parameters=1), weigh(checkpoint="2", batch=8, parameters=1)])
    assert "checkpoint" in keys(table, shown=True)
    assert "batch" not in keys(table, shown=True)
    assert "batch 8" in table.title
    assert "warm-up" not in table.title
    assert "warmup" not in keys(table)


def test_grid_without_successful_cases_is_still_a_table() -> None:
    table = grid_table([weigh("oom", context=128), weigh("oom", context=256)])
    assert cells(table, "remarks") == ["oom", "oom"]
    assert "peak_bytes" not in keys(table, shown=True)
    assert precision_table([weigh("oom", precision="fp32"), weigh("oom", precision="bf16")]) is None


def test_outcome_of_a_case() -> None:
    assert outcome_of(weigh(parameters=3 * GIB)) == "peak 3 GiB"
    assert outcome_of(weigh("oom")) == "oom"
    assert outcome_of(row()) == "ok"


# --- Precision --------------------------------------------------------------------------------------------------------


def test_precision_is_compared_with_fp32_of_the_same_case() -> None:
    table = precision_table(
        [
            weigh(context=128, precision="fp32", parameters=100, activations=80 * GIB),
            weigh(context=128, precision="bf16", parameters=100, activations=40 * GIB, copies=GIB),
            weigh("oom", context=256, precision="fp32"),
            weigh(context=256, precision="bf16", parameters=100),
            weigh(context=512, precision="bf16", parameters=100),
        ]
    )
    assert table is not None
    (only,) = table.rows
    found = dict(zip(keys(table), only, strict=True))
    assert (found["context"], found["precision"]) == (128, "bf16")
    assert found["fp32_peak_bytes"] == 100 + 80 * GIB
    assert found["peak_bytes"] == 100 + 41 * GIB
    assert found["ratio"] == (100 + 41 * GIB) / (100 + 80 * GIB)
    assert found["activations_bytes"] == -40 * GIB
    assert found["autocast_copies_bytes"] == GIB
    assert "parameters_bytes" not in found
    assert found["why"] == "activations −40 GiB, autocast copies +1 GiB"


def test_equal_peaks_have_no_changes() -> None:
    table = precision_table([weigh(precision="fp32", parameters=100), weigh(precision="bf16", parameters=100)])
    assert table is not None
    assert cells(table, "why") == ["none"]
    assert cells(table, "ratio") == [1.0]


@pytest.mark.parametrize("only", ["fp32", "bf16"])
def test_single_precision_has_no_comparison(only: str) -> None:
    assert precision_table([weigh(precision=only, parameters=100)]) is None


# --- Chart ------------------------------------------------------------------------------------------------------------


def test_peaks_are_plotted_against_a_varying_context() -> None:
    figure = grid_figure(
        [
            weigh(context=128, mode="train", parameters=2 * GIB),
            weigh(context=256, mode="train", parameters=4 * GIB),
            weigh(context=128, mode="inference", parameters=GIB),
            weigh("oom", context=512, mode="train"),
        ]
    )
    assert [(one.panel, one.x, one.y) for one in figure.points] == [
        ("train", 128, 2.0),
        ("train", 256, 4.0),
        ("inference", 128, 1.0),
    ]
    assert figure.x.label == "context"
    assert figure.y.unit == "GiB"
    assert len({one.series for one in figure.points}) == 1


def test_peaks_are_plotted_against_parameters_otherwise() -> None:
    figure = grid_figure(
        [
            weigh(size="small", precision="fp32", parameters=GIB),
            weigh(size="medium", precision="fp32", parameters=2 * GIB),
            weigh(size="small", precision="bf16", parameters=GIB),
        ]
    )
    assert figure.x.label == "parameters"
    assert [one.x for one in figure.points] == [1000, 1000, 1000]
    assert [one.series for one in figure.points] == ["fp32", "fp32", "bf16"]


def test_chart_of_failures_has_no_points() -> None:
    assert grid_figure([weigh("oom", context=128), weigh("error", context=256)]).points == ()


# --- Activation checkpointing -----------------------------------------------------------------------------------------


def test_study_compares_every_checkpoint_setting_with_none() -> None:
    rows = [
        weigh(checkpoint="none", size="nano", parameters=8 * GIB, step_ms=100, saved_bytes=500),
        weigh(checkpoint="1", size="nano", parameters=4 * GIB, step_ms=130, saved_bytes=50),
        weigh("oom", checkpoint="2", size="nano"),
    ]
    table = study_table(rows)
    assert cells(table, "checkpoint") == [row.case.workload.checkpoint for row in rows]
    assert cells(table, "ratio") == [1.0, 0.5, None]
    assert cells(table, "slower") == [1.0, 1.3, None]
    assert cells(table, "saved_bytes") == [500, 50, None]
    assert cells(table, "remarks") == [None, None, "oom"]
    assert cells(table, "predicted_bytes") == [cost.step_peak(one.case.workload).bytes for one in rows]
    assert table.notes[0] == f"lowest peak: checkpoint {rows[1].case.workload.checkpoint}, 4 GiB"
    assert table.notes[1].startswith(
        f"lowest predicted peak: checkpoint {cost.best_checkpoint(rows[0].case.workload).checkpoint}, "
    )


def test_faster_setting_wins_at_equal_peaks() -> None:
    rows = [
        weigh(checkpoint="nested:2", size="nano", parameters=GIB, step_ms=90),
        weigh(checkpoint="2", size="nano", parameters=GIB, step_ms=80),
    ]
    assert study_table(rows).notes[0].startswith("lowest peak: checkpoint 2, ")


def test_study_of_a_custom_model_has_no_prediction() -> None:
    rows = [weigh(model="mine:build", checkpoint=way, parameters=GIB) for way in ("none", "1")]
    table = study_table(rows)
    assert cells(table, "predicted_bytes") == [None, None]
    assert not any("predicted" in note for note in table.notes)


def test_study_without_successful_cases_recommends_nothing() -> None:
    table = study_table([weigh("oom", checkpoint="none", size="nano"), weigh("oom", checkpoint="1", size="nano")])
    assert cells(table, "ratio") == [None, None]
    assert not any(re.search("lowest peak", note) for note in table.notes)


@pytest.mark.parametrize(
    ("layers", "values"),
    [
        (1, ("none", "1")),
        (2, ("none", "1", "2")),
        (6, ("none", "1", "2", "3", "6", "nested:2", "nested:3")),
        (7, ("none", "1", "7")),
    ],
)
def test_study_tries_every_divisor_of_num_layers(layers: int, values: tuple[str, ...]) -> None:
    workload = build_case({"size": "nano", "num_layers": layers}).workload
    assert study_values(workload) == values
    for value in values:
        build_case({"size": "nano", "num_layers": layers, "checkpoint": value})


def test_study_values_of_a_custom_model() -> None:
    workload = build_case({"model": "mine:build"}).workload
    assert study_values(workload) == ("none", "1", "2", "4", "nested:2", "nested:4")
