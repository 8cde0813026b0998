"""The Nsight Compute metrics that stepscope knows, in all spellings."""

import polars as pl
import pytest

from stepscope.recording import tables
from stepscope.recording.readers import ncu
from stepscope.recording.readers.counter_metrics import FEW, FULL, METRICS, canonical_counters, find_exact, key_of
from tests.unit.ncu_files import COUNTED


def counters(*rows: tuple[int, str, str, float | None]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=["kernel", "metric", "unit", "value"], orient="row")
    return tables.conform("counters", frame)


def canonical(*rows: tuple[int, str, str, float | None]) -> dict[tuple[int, str], float]:
    return {(kernel, key): value for kernel, key, value in canonical_counters(counters(*rows)).iter_rows()}


def test_few_is_a_subset_of_full_without_duplicates() -> None:
    assert set(FEW) < set(FULL)
    assert len(FULL) == len(set(FULL)) == len(METRICS)
    assert not any("dmma" in name for name in FULL)


@pytest.mark.parametrize(
    ("metric", "key"),
    [
        ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", "tensor_ops"),
        ("sm__ops_path_tensor_src_fp16.sum", "tensor_ops"),
        ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", "ffma"),
        ("smsp__inst_executed_pipe_tensor.sum", "tensor_instructions"),
        ("dram__bytes_write.sum", "dram_write_bytes"),
        # Not a sum, part of another metric, and the fp64 tensor pipe, which Transformers do not use.
        ("sm__inst_executed_pipe_tensor.avg", None),
        ("sm__ops_path_tensor_src_fp16_sparsity_off.sum", None),
        ("sm__inst_executed_pipe_fp64_op_dmma.avg.pct_of_peak_sustained_active", None),
        ("gpu__time_duration.sum", None),
    ],
)
def test_metric_has_at_most_one_key(metric: str, key: str | None) -> None:
    assert key_of(metric) == key


def test_tensor_operations_of_all_types_add_up() -> None:
    kinds = ("bf16_dst_fp32", "fp16", "tf32_dst_fp32")
    rows = [(0, f"sm__ops_path_tensor_src_{kind}.sum", "", 10.0**place) for place, kind in enumerate(kinds)]
    assert canonical(*rows) == {(0, "tensor_ops"): 111.0}


def test_two_spellings_of_a_metric_count_once() -> None:
    name = "__sass_thread_inst_executed_op_fadd_pred_on.sum"
    assert canonical((0, "sm" + name, "inst", 5.0), (0, "smsp" + name, "inst", 5.0)) == {(0, "fadd"): 5.0}


def test_bytes_are_converted_from_any_unit() -> None:
    rows = [(n, "dram__bytes_read.sum", unit, 2.5) for n, unit in enumerate(("byte", "Kbyte", "Mbyte", "Gbyte"))]
    assert list(canonical(*rows).values()) == [2.5, 2500, 2_500_000, 2_500_000_000]


def test_only_counters_in_base_units_are_exact() -> None:
    units = ("byte", "", "inst", "sector", "Kbyte", "Mbyte", "Kinst")
    table = pl.DataFrame({"kernel": range(len(units)), "unit": units})
    assert find_exact(table)["unit"].to_list() == ["byte", "", "inst", "sector"]


def test_unmeasured_counter_is_missing_and_not_zero() -> None:
    fadd = "sm__sass_thread_inst_executed_op_fadd_pred_on.sum"
    assert canonical((0, fadd, "inst", 0.0), (1, fadd, "inst", None)) == {(0, "fadd"): 0.0}


def test_real_file_has_all_of_the_few_counters() -> None:
    found = canonical_counters(ncu.read(COUNTED).counters)
    assert set(found["key"]) == {metric.key for metric in METRICS if metric.key and not metric.only_full}
    assert found.height == 49 * found["key"].n_unique()
