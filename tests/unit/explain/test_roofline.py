"""Operators compared with the limits of a device."""

from dataclasses import replace

import pytest

from stepscope.explain.trace.profile import make_profile
from stepscope.explain.trace.roofline import measure_use, operator_calls, roofline, roofline_table, shorten_shapes
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
from tests.unit.recordings import ADD, BF16, FP32, GEMM_BF16, GEMM_FP32, GEMM_TF32, Timeline

H200_BF16, H200_TF32, H200_FP32, H200_BYTES = 989.4e12, 494.7e12, 66.9e12, 4.8e12
PRODUCT = [[4096, 4096], [4096, 4096]]
FLOPS = 2 * 4096**3


def test_gemm_is_compared_with_the_peak_of_its_precision() -> None:
    timeline = Timeline()
    for kernel, dtype, op in (
        (GEMM_BF16, BF16, "aten::mm"),
        (GEMM_FP32, FP32, "aten::mm"),
        (GEMM_TF32, FP32, "aten::mm"),
    ):
        timeline.launch(kernel, 3000, op=op, shapes=PRODUCT, dtypes=[dtype, dtype])
    found = {row["dtype"]: row for row in roofline(timeline.profile()).iter_rows(named=True)}
    assert found["bf16"]["flops"] == FLOPS
    for dtype, peak in (("bf16", H200_BF16), ("fp32", H200_FP32), ("tf32", H200_TF32)):
        assert found[dtype]["reached"] == pytest.approx(FLOPS / 3e-3 / peak)
        assert found[dtype]["flops_per_s"] == pytest.approx(FLOPS / 3e-3)
        assert found[dtype]["bound"] == "compute"


def test_gemm_faster_than_the_fp32_peak_is_compared_with_tf32() -> None:
    timeline = Timeline()
    kernel = "nvjet_sss_128x128_32x4_2x1_v_bz_NNN"
    timeline.launch(kernel, 400, op="aten::mm", shapes=PRODUCT, dtypes=[FP32, FP32])
    row = roofline(timeline.profile()).row(0, named=True)
    assert row["dtype"] == "tf32"
    assert row["reached"] == pytest.approx(FLOPS / 4e-4 / H200_TF32)


def test_split_gemm_counts_once() -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 300, op=None)
    timeline.launch("void splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)", 100, op=None)
    recording = timeline.record()
    start, end = recording.launches["start_ns"].min(), recording.launches["end_ns"].max()
    assert isinstance(start, int)
    assert isinstance(end, int)
    single = Timeline()
    single.launch(GEMM_BF16, 400, op="aten::mm", shapes=PRODUCT, dtypes=[BF16, BF16])
    ops = single.record().ops.with_columns(start_ns=start - 1, end_ns=end + 1)
    calls = operator_calls(make_profile(replace(recording, ops=ops.cast(recording.ops.schema))))
    assert calls.height == 1
    assert calls["kernels"][0] == 2
    assert calls["time_ns"][0] == 400_000
    assert calls["flops"][0] == FLOPS


@pytest.mark.parametrize(
    ("us", "rows", "bound"),
    [(100, 2**24, "memory"), (3, 64, "launch"), (40, 64, "memory")],
)
def test_bound_of_an_addition(us: float, rows: int, bound: str) -> None:
    timeline = Timeline()
    timeline.launch(ADD, us, op="aten::add", shapes=[[rows], [rows]], dtypes=[FP32, FP32])
    row = roofline(timeline.profile()).row(0, named=True)
    assert row["bound"] == bound
    assert row["bytes"] == 3 * 4 * rows
    assert row["reached"] == pytest.approx(3 * 4 * rows / H200_BYTES / (us * 1e-6))


def test_without_shapes_or_a_known_device_nothing_is_claimed() -> None:
    without_shapes, unknown_device = Timeline(), Timeline(device="Some GPU")
    without_shapes.launch(GEMM_BF16, 100, op="aten::mm")
    unknown_device.launch(GEMM_BF16, 100, op="aten::mm", shapes=PRODUCT, dtypes=[BF16, BF16])
    for timeline in (without_shapes, unknown_device):
        row = roofline(timeline.profile()).row(0, named=True)
        assert (row["bound"], row["limit_ns"], row["reached"]) == ("unknown", None, None)
    assert measure_use(without_shapes.profile()) is None
    assert "unknown device limits" in roofline_table(unknown_device.profile()).notes[0]


def test_mfu_excludes_recomputation() -> None:
    timeline = Timeline(host_us=2_000)
    with timeline.step():
        with timeline.module("layer"):
            timeline.launch(GEMM_BF16, 500, op="aten::mm", shapes=PRODUCT, dtypes=[BF16, BF16])
        with timeline.node():
            with timeline.module("layer"):
                timeline.launch(GEMM_BF16, 500, op="aten::mm", shapes=PRODUCT, dtypes=[BF16, BF16])
            timeline.launch(GEMM_BF16, 500, op="aten::mm", shapes=PRODUCT, dtypes=[BF16, BF16])
    use = measure_use(timeline.profile(overhead=Overhead(plain_ns=2_000_000)))
    assert use is not None
    assert use.source == "counted"
    assert use.step_flops == 2 * FLOPS
    assert use.mfu == pytest.approx(2 * FLOPS / 2e-3 / H200_BF16)


def test_mfu_of_the_built_in_model_uses_the_formula() -> None:
    timeline = Timeline()
    timeline.launch(GEMM_BF16, 100, op="aten::mm")
    case = build_case({"size": "small", "batch": 2, "context": 8, "precision": "bf16"})
    use = measure_use(timeline.profile(case=case, overhead=Overhead(plain_ns=1_000_000)))
    assert use is not None
    assert use.source == "formula"
    # Every weight except the embedding times 16 tokens, 3×; attention is negligible at this length.
    assert use.step_flops == pytest.approx(3 * 2 * 16 * (128_625_408 - 7_680_000), rel=1e-3)


def test_table_has_one_row_per_kind_of_call() -> None:
    timeline = Timeline()
    for _ in range(3):
        timeline.launch(GEMM_BF16, 200, op="aten::mm", shapes=PRODUCT, dtypes=[BF16, BF16])
    timeline.launch(ADD, 100, op="aten::add", shapes=[[64], [64], []], dtypes=[FP32, FP32, "Scalar"])
    table = roofline_table(timeline.profile())
    rows = [dict(zip((column.key for column in table.columns), row, strict=True)) for row in table.rows]
    assert [(row["operator"], row["calls"]) for row in rows] == [("aten::mm", 3), ("aten::add", 1)]
    assert rows[0]["time_us"] == pytest.approx(200)
    assert rows[1]["shapes"] == "[[64],[64]]"
    assert len(roofline_table(timeline.profile(), top=1).rows) == 1


def test_shapes_are_one_line() -> None:
    assert shorten_shapes("[\n[\n16, 3],\t[], []]") == "[[16,3]]"
