"""Hardware counters as tables: what each kernel did, and the counters of a grid compared with the formula."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.api.run import Run
from stepscope.errors import StepscopeError
from stepscope.explain.trace.counters import (
    CountedCase,
    cases_table,
    choose_classes,
    counted_kernels,
    has_counters,
    kernels_table,
)
from stepscope.findings import Table
from stepscope.recording import store, tables
from stepscope.recording.readers import ncu
from stepscope.recording.readers.counter_metrics import L2_HIT_RATE
from stepscope.recording.store import Recording
from stepscope.spec import Scalar, build_case
from tests.unit.ncu_files import COUNTED

OLD = Path(__file__).parents[3] / "bench/results/counters_h200/context-64"
ATTENTION = "mem-efficient attention fwd 64×64"


@pytest.fixture(scope="module")
def recording() -> Recording:
    return ncu.read(COUNTED)


def rows(table: Table) -> list[dict[str, Any]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def change(recording: Recording, metric: str, kernel: int, value: float | None) -> Recording:
    """Change or remove one counter of one kernel."""
    here = (pl.col("metric") == metric) & (pl.col("kernel") == kernel)
    counters = recording.counters.with_columns(
        pl.when(here).then(pl.lit(value, pl.Float64)).otherwise("value").alias("value")
    )
    return replace(recording, counters=tables.conform("counters", counters))


def add(recording: Recording, metric: str, value: float) -> Recording:
    """Add a metric with the same value for all kernels."""
    kernels = pl.int_range(recording.kernels.height, eager=True)
    more = pl.DataFrame({"kernel": kernels, "metric": [metric] * len(kernels), "value": [value] * len(kernels)})
    return replace(recording, counters=pl.concat([recording.counters, tables.conform("counters", more)]))


def test_kernel_shows_operations_per_unit(recording: Recording) -> None:
    (attention,) = (row for row in rows(kernels_table(recording)) if row["short"] == ATTENTION)
    assert (attention["class"], attention["count"], attention["grid"]) == ("attention", 2, "2×12×1")
    # fp32 attention is three tf32 GEMMs: over the 3 of 4 tiles of 64×64 that a causal mask leaves, of 12 heads.
    assert attention["tensor_ops"] == 3 * (3 * 64 * 64) * 12 * 4 * 64
    assert attention["fp32_flops"] == 3_069_450
    assert attention["tensor_share"] == pytest.approx(113_246_208 / (113_246_208 + 3_069_450))
    assert attention["time_us"] == pytest.approx(18.03, abs=0.01)
    assert attention["fp64_flops"] is None


def test_memory_traffic_is_a_rate_and_a_share_of_the_peak(recording: Recording) -> None:
    head = rows(kernels_table(recording))[-1]
    assert head["class"] == "GEMM"
    assert head["dram_gb_s"] == pytest.approx(head["dram_bytes"] / head["time_us"] / 1e3)
    assert head["dram_share"] == pytest.approx(head["dram_gb_s"] / 4800)
    unknown = kernels_table(recording.with_manifest(device="some card"))
    assert rows(unknown)[-1]["dram_share"] is None
    assert rows(unknown)[-1]["dram_gb_s"] == head["dram_gb_s"]


def test_hit_rates_are_missing_if_not_collected(recording: Recording) -> None:
    assert rows(kernels_table(recording))[0]["l1_hit"] is None
    counted = add(add(recording, "l1tex__t_sector_hit_rate.pct", 25.0), "lts__t_sector_hit_rate.pct", 62.5)
    assert {(row["l1_hit"], row["l2_hit"]) for row in rows(kernels_table(counted))} == {(0.25, 0.625)}


def test_rows_are_in_launch_order_and_count_every_kernel_once(recording: Recording) -> None:
    found = rows(kernels_table(recording))
    assert sum(row["count"] for row in found) == recording.kernels.height == 49
    launched = list(recording.kernels.select("name", grid=pl.format("{}×{}×{}", "grid_x", "grid_y", "grid_z")).rows())
    first = [launched.index((row["name"], row["grid"])) for row in found]
    assert first == sorted(first)


def test_gemms_of_other_sizes_are_separate_rows_and_data_makes_no_difference(recording: Recording) -> None:
    ffma = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum"
    names = recording.kernels["name"].to_list()
    before = len(kernels_table(recording).rows)
    product = next(n for n, name in enumerate(names) if "sgemm" in name)
    assert len(kernels_table(change(recording, ffma, product, 1.0)).rows) == before + 1
    attention = next(n for n, name in enumerate(names) if "fmha" in name)
    assert len(kernels_table(change(recording, ffma, attention, 1.0)).rows) == before


def test_sum_with_an_unmeasured_part_is_unknown(recording: Recording) -> None:
    names = recording.kernels["name"].to_list()
    head = len(names) - 1
    less = change(recording, "sm__sass_thread_inst_executed_op_fmul_pred_on.sum", head, None)
    assert rows(kernels_table(less))[-1]["fp32_flops"] is None
    less = change(recording, "dram__bytes_write.sum", head, None)
    assert rows(kernels_table(less))[-1]["dram_gb_s"] is None


def test_the_longest_rows_are_kept_in_launch_order(recording: Recording) -> None:
    every = rows(kernels_table(recording))
    for top in (3, 12):
        longest = sorted(every, key=lambda row: row["count"] * row["time_us"])[-top:]
        some = kernels_table(recording, top=top)
        assert rows(some) == [row for row in every if row in longest]
        assert some.notes[-1] == f"{len(every) - top} more rows: --table counters --top {len(every)}"


def test_the_notes_say_how_often_each_kernel_ran(recording: Recording) -> None:
    assert "replayed 7 times" in kernels_table(recording).notes[0]


# --- Grids


def case(recording: Recording | None, *, passes: int = 1, reason: str = "", **settings: Scalar) -> CountedCase:
    shape: dict[str, Scalar] = {"size": "small", "num_layers": 2, "batch": 1, "context": 128, "steps": passes}
    built = build_case(shape | {"mode": "inference", "attention": "sdpa"} | settings)
    return CountedCase(name=f"context-{built.workload.context}", case=built, recording=recording, reason=reason)


TEXTBOOK = {"attention": 2 * 12 * 4 * 128**2 * 64, "GEMM": 10**10}


def test_grid_has_counter_formula_and_ratio_per_case_and_class(recording: Recording) -> None:
    counted = recording.with_manifest(forward_flops=TEXTBOOK)
    table = cases_table([case(counted), case(counted, context=64)], ["attention", "GEMM"])
    first, second, third, _ = rows(table)
    assert [(row["context"], row["class"]) for row in rows(table)] == [
        (128, "attention"),
        (128, "GEMM"),
        (64, "attention"),
        (64, "GEMM"),
    ]
    assert (first["launches"], first["textbook_flops"]) == (2, 100_663_296)
    assert (first["tensor_ops"], first["fp32_flops"]) == (2 * 113_246_208, 2 * 3_069_450)
    assert first["tensor_ops_ratio"] == pytest.approx(2.25)
    assert first["fp32_flops_ratio"] == pytest.approx(2 * 3_069_450 / 100_663_296)
    assert first["notes_flops"] == 2 * 12 * (2 * 128**2 * 64 + 3 * 128**2)
    assert (second["launches"], second["tensor_ops_ratio"], second["notes_flops"]) == (9, 0.0, None)
    assert third["notes_flops"] == 2 * 12 * (2 * 64**2 * 64 + 3 * 64**2)
    assert "fp64_flops" not in first


def test_only_the_settings_that_differ_are_columns(recording: Recording) -> None:
    def settings(*cases: CountedCase) -> list[str]:
        keys = [column.key for column in cases_table(cases).columns]
        return keys[: keys.index("class")]

    assert settings(case(recording)) == ["context"]
    assert settings(case(recording), case(recording, num_layers=4)) == ["num_layers", "context"]
    wider = case(recording, d_model=1536, d_ff=6144, precision="bf16")
    assert settings(case(recording), wider) == ["d_model", "d_ff", "context", "precision"]


def test_fp64_has_columns_if_counted(recording: Recording) -> None:
    counted = recording.with_manifest(forward_flops=TEXTBOOK)
    for operation, value in (("dadd", 1.0), ("dmul", 10.0), ("dfma", 100.0)):
        counted = add(counted, f"sm__sass_thread_inst_executed_op_{operation}_pred_on.sum", value)
    (row,) = rows(cases_table([case(counted)]))
    assert row["fp64_flops"] == 2 * (1 + 10 + 200)
    assert row["fp64_flops_ratio"] == pytest.approx(422 / 100_663_296)


def test_formula_scales_with_the_number_of_passes(recording: Recording) -> None:
    counted = recording.with_manifest(forward_flops=TEXTBOOK)
    once, twice = (rows(cases_table([case(counted, passes=n)]))[0] for n in (1, 2))
    assert twice["textbook_flops"] == 2 * once["textbook_flops"]
    assert twice["notes_flops"] == 2 * once["notes_flops"]


def test_a_model_without_a_formula_still_has_its_counters(recording: Recording) -> None:
    built = build_case({"hf": "gpt2", "context": 128, "mode": "inference"})
    (row,) = rows(cases_table([CountedCase(name="", case=built, recording=recording)]))
    assert row["tensor_ops"] == 2 * 113_246_208
    assert (row["textbook_flops"], row["tensor_ops_ratio"], row["notes_flops"]) == (None, None, None)


def test_failed_case_is_a_row_with_a_reason(recording: Recording) -> None:
    table = cases_table([case(recording), case(None, reason="out of memory", context=8192)])
    assert rows(table)[1]["launches"] is None
    assert table.notes[-1] == "context-8192: out of memory"


def test_unfused_attention_gives_a_hint(recording: Recording) -> None:
    kernels = recording.kernels.with_columns(pl.col("name").str.replace(r"^fmha.*", "nothing"))
    table = cases_table([case(replace(recording, kernels=kernels))])
    assert rows(table)[0]["launches"] == 0
    assert "--kernel-class GEMM" in table.notes[-1]


def test_recordings_that_name_the_class_in_lower_case_are_read() -> None:
    recording = store.load(OLD)
    assert '"gemm"' in (OLD / "manifest.json").read_text()
    assert recording.manifest.forward_flops == {"GEMM": 6752403456, "attention": 25165824}
    assert counted_kernels(recording).filter(pl.col("class") == "GEMM").height


def test_classes_are_accepted_in_any_case() -> None:
    assert choose_classes(None) == ("attention",)
    assert choose_classes("gemm, Attention,GEMM") == ("GEMM", "attention")
    with pytest.raises(StepscopeError, match="unknown kernel class: `gem`") as raised:
        choose_classes("gem")
    assert raised.value.hint == "--kernel-class GEMM"


# --- Counters in explain


def test_explain_shows_counters_on_its_page_and_as_a_table(recording: Recording) -> None:
    run = Run.of(recording, Path("counted"))
    assert run.page().tables[-1].rows == kernels_table(recording, top=12).rows
    assert run.table("counters", top=4).rows == kernels_table(recording, top=4).rows


def test_recording_without_these_counters_has_no_table(recording: Recording) -> None:
    others = recording.counters.filter(pl.col("metric").str.starts_with("launch__"))
    for counters in (others, tables.empty("counters")):
        without = replace(recording, counters=counters)
        assert not has_counters(without)
        run = Run.of(without, Path("counted"))
        assert "Counters by kernel" not in [table.title for table in run.page().tables]
        with pytest.raises(StepscopeError, match="no hardware counters"):
            run.table("counters", top=4)


def test_hit_rate_above_one_is_dropped(recording: Recording) -> None:
    """Hits and lookups are counted in different replays of a kernel."""
    rated = add(recording, L2_HIT_RATE, 62.5)
    last = change(rated, L2_HIT_RATE, recording.kernels.height - 1, 502.0)
    assert rows(kernels_table(rated))[-1]["l2_hit"] == 0.625
    assert rows(kernels_table(last))[-1]["l2_hit"] is None
