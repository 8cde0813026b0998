"""What GEMM kernels allow, compared with GEMMs of known sizes."""

import msgspec
import pytest

from stepscope.explain.kernel_names import decode
from stepscope.recover.facts import LARGEST_SIZE, Product, Sighting, Window, find_window
from stepscope.recover.families import Platform, read_fact
from stepscope.recover.families.grids import PROCESSORS
from tests.unit.recover.families.product_rows import (
    COUNTED,
    FOREIGN,
    HALF_SUM_OF_PARTS,
    TRACED,
    Seen,
    cutlass,
    nvjet,
    xmma,
    xmma_tf32,
)

AXES = ("rows", "columns", "inner")


def read(sighting: Sighting, processors: int = PROCESSORS) -> Product | None:
    fact = read_fact(sighting, Platform(processors=processors))
    assert fact is None or isinstance(fact, Product)
    return fact


def fact_of(seen: Seen, *, counters: bool = True) -> Product:
    fact = read(seen.sighting(counters=counters))
    assert fact is not None
    return fact


def window_of(fact: Product, seen: Seen, axis: str, largest: int = LARGEST_SIZE) -> Window:
    known = {name: size for name, size in zip(AXES, seen.sizes, strict=False) if name != axis}
    window = find_window(fact, **known, batch=seen.sizes[3], largest=largest)
    assert window is not None
    return window


def with_size(seen: Seen, axis: str, size: int) -> tuple[int, int, int, int]:
    rows, columns, inner = (size if name == axis else known for name, known in zip(AXES, seen.sizes, strict=False))
    return rows, columns, inner, seen.sizes[3]


@pytest.mark.parametrize("seen", [*COUNTED, *TRACED], ids=str)
def test_true_sizes_are_never_excluded(seen: Seen) -> None:
    for counters in (True, False):
        fact = fact_of(seen, counters=counters)
        assert fact.admits(*seen.sizes)
        for axis, size in zip(AXES, seen.sizes, strict=False):
            assert size in window_of(fact, seen, axis)


@pytest.mark.parametrize(("processors", "seen"), FOREIGN, ids=str)
def test_true_sizes_are_not_excluded_on_other_gpus(processors: int, seen: Seen) -> None:
    fact = read(seen.sighting(), processors)
    assert fact is not None
    assert fact.admits(*seen.sizes)


@pytest.mark.parametrize("seen", COUNTED, ids=str)
def test_counters_leave_a_window_no_wider_than_a_tile(seen: Seen) -> None:
    fact = fact_of(seen)
    widths = [window_of(fact, seen, axis) for axis in AXES]
    assert tuple(None if window.high == LARGEST_SIZE else window.size for window in widths) == seen.widths


@pytest.mark.parametrize("seen", COUNTED, ids=str)
def test_a_window_ends_where_the_fact_excludes(seen: Seen) -> None:
    fact = fact_of(seen)
    for axis in AXES:
        window = window_of(fact, seen, axis)
        assert fact.admits(*with_size(seen, axis, window.low))
        assert fact.admits(*with_size(seen, axis, window.high))
        assert window.low == 1 or not fact.admits(*with_size(seen, axis, window.low - 1))
        assert window.high == LARGEST_SIZE or not fact.admits(*with_size(seen, axis, window.high + 1))


def test_stored_bytes_give_the_exact_vocabulary() -> None:
    seen = Seen(
        cutlass("75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"), (40, 32, 1), (600, 32003, 640, 1), (),
        {"tensor_ops": 26_319_257_600, "store_bytes": 38_403_600},
    )  # fmt: skip
    fact = fact_of(seen)
    assert [size for size in range(31_900, 32_100) if fact.admits(600, size, 640, 1)] == [32_003]


def test_a_grid_counts_tiles_unless_the_gpu_is_full() -> None:
    partly = fact_of(Seen(nvjet("tst_96x64_64x10_1x2_h_bz_TNN"), (2, 64, 1), (1024, 768, 768, 1)))
    assert partly.admits(1024, 768, 99_999, 1)  # inner is unknown
    assert not partly.admits(1024, 769, 768, 1)
    assert not partly.admits(1025, 768, 768, 1)
    full = fact_of(Seen(nvjet("tst_96x64_64x10_1x2_h_bz_TNN"), (2, 66, 1), (4096, 768, 768, 1)))
    assert full.admits(4096, 768, 768, 1)
    assert not full.admits(1024, 768, 768, 1)  # too few tiles for this many blocks


def test_the_number_of_sms_decides_whether_the_gpu_was_full() -> None:
    sighting = Seen(nvjet("tst_96x64_64x10_1x2_h_bz_TNN"), (2, 57, 1), (1, 1, 1, 1)).sighting()
    large, small = read(sighting), read(sighting, processors=114)
    assert large is not None
    assert small is not None
    assert not large.admits(4096, 768, 768, 1)
    assert small.admits(4096, 768, 768, 1)


def test_large_clusters_fill_the_gpu_earlier() -> None:
    fact = fact_of(Seen(nvjet("tst_64x64_64x13_4x2_h_bz_TNT"), (8, 15, 1), (600, 640, 640, 1)))
    assert fact.admits(6000, 640, 640, 1)
    assert not fact.admits(300, 640, 640, 1)


def test_rows_and_columns_are_distinguished() -> None:
    fact = fact_of(Seen(xmma("tn", "128x64x8", "2x2x1"), (1, 786, 1), (128, 50257, 768, 1)))
    assert fact.admits(128, 50257, 768, 1)
    assert not fact.admits(50257, 128, 768, 1)


def test_the_last_grid_dimension_is_batch_times_splits() -> None:
    fact = fact_of(Seen(xmma("tn", "32x32x8", "1x2x1"), (5, 5, 24), (160, 160, 64, 24)))
    assert [batch for batch in range(1, 30) if fact.admits(160, 160, 64, batch)] == [1, 2, 3, 4, 6, 8, 12, 24]


def test_splits_divide_the_blocks_evenly() -> None:
    fact = fact_of(Seen(nvjet("tst_96x128_64x6_2x1_v_bz_splitK_NNN"), (2, 64, 1), (1024, 768, 10000, 1)))
    assert fact.admits(1024, 768, 10_000, 1)  # 64 tiles in two splits
    assert not fact.admits(1024, 1000, 10_000, 1)  # 11 tiles across, 12 with the cluster filled up: 96
    assert not fact.admits(4096, 768, 10_000, 1)  # more tiles than blocks


def test_rounding_bounds_the_work_of_splits() -> None:
    name, grid = nvjet("tst_96x128_64x6_2x1_v_bz_splitK_NNN"), (2, 64, 1)
    exact = 2 * 1024 * 768 * 10_048  # whole steps of 64
    rounding = 2 * 96 * 128 * 64 * 128  # one more step in each of 128 blocks
    for operations, fits in (
        (exact - 1, False),
        (exact, True),
        (exact + rounding, True),
        (exact + rounding + 1, False),
    ):
        fact = fact_of(Seen(name, grid, (1024, 768, 10_000, 1), (), {"tensor_ops": operations}))
        assert fact.admits(1024, 768, 10_000, 1) is fits


def test_unknown_steps_and_clusters_bound_the_tensor_work() -> None:
    name = cutlass("75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1")
    least, most = 2 * 640 * 640 * 104, 2 * 640 * 640 * 128  # 100 in steps of 8, and of 64
    for operations, fits in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
        fact = fact_of(Seen(name, (20, 2, 1), (600, 640, 100, 1), (), {"tensor_ops": operations}))
        assert fact.admits(600, 640, 100, 1) is fits
    least, most = 2 * 640 * 640 * 128, 2 * 1024 * 1024 * 128  # clusters of up to four by four
    for operations, fits in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
        fact = fact_of(Seen(xmma_tf32("128x128x32"), (25, 1, 1), (600, 640, 100, 1), (), {"tensor_ops": operations}))
        assert fact.admits(600, 640, 100, 1) is fits


def test_blocks_of_persistent_kernels_with_unknown_clusters() -> None:
    fact = fact_of(Seen(xmma_tf32("128x128x32"), (14, 2, 1), (600, 640, 640, 1)))
    assert fact.admits(600, 640, 640, 1)  # 25 tiles, or 28 with full clusters
    assert not fact.admits(600, 800, 640, 1)  # 35
    assert not fact.admits(128, 256, 640, 1)
    full = fact_of(Seen(xmma_tf32("128x128x32"), (30, 4, 1), (25088, 768, 768, 1)))
    assert full.admits(25088, 768, 768, 1)


def test_ampere_tensor_core_gemms_have_one_block_per_tile() -> None:
    name = "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x64x64_stage4_warpsize2x2x1_tensor16x8x16_kernel"
    fact = fact_of(Seen(name, (8, 10, 3), (600, 1000, 640, 3)))
    assert fact.admits(600, 1000, 640, 3)
    assert fact.admits(1000, 600, 640, 3)  # the orientation of the tile was not measured
    assert not fact.admits(600, 1000, 640, 4)  # 80 tiles each
    counted = fact_of(Seen(name, (8, 10, 1), (600, 1000, 640, 1), (), {"tensor_ops": 2 * 640 * 1024 * 640}))
    assert counted.admits(600, 1000, 640, 1)
    assert not counted.admits(600, 1000, 1000, 1)


def test_hand_named_gemms_have_one_block_per_tile() -> None:
    seen = Seen("ampere_sgemm_128x64_tn", (5, 10, 1), (600, 640, 640, 1), (), {"ffma": 640 * 640 * 641})
    fact = fact_of(seen)
    assert fact.admits(600, 640, 640, 1)
    assert fact.admits(640, 600, 640, 1)
    assert not fact.admits(600, 1000, 100, 1)
    assert not fact.admits(641, 640, 640, 1)
    assert not fact.admits(640, 640, 642, 1)
    assert not fact.admits(1, 1, 1, 1)


def test_work_of_a_batch_and_of_splits_without_tensor_cores() -> None:
    name, area = cutlass("80_simt_sgemm_64x64_8x5_nn_align1"), 128 * 768
    # Each of four, whole or in two splits, adds to the existing result or not.
    for batch in (4, 2):
        least = area * 768 * batch
        for fused, fits in ((least - 1, False), (least, True), (least + 4 * area, True), (least + 4 * area + 1, False)):
            fact = fact_of(Seen(name, (16, 2, 4), (128, 768, 768, batch), (), {"ffma": fused}))
            assert fact.admits(128, 768, 768, batch) is fits


def test_tensor_work_of_two_splits_can_be_rounded_twice() -> None:
    name = cutlass("80_tensorop_s1688gemm_128x128_32x3_nn_align4")
    operations = 2 * 640 * 640 * (2 * 320)  # 600 in two splits of 300, each a multiple of 32
    fact = fact_of(Seen(name, (20, 2, 2), (600, 640, 600, 1), (), {"tensor_ops": operations}))
    assert fact.admits(600, 640, 600, 1)
    assert not fact.admits(600, 640, 641, 1)


def test_semaphores_of_splits_are_stored_too() -> None:
    name, result, turns = cutlass("80_simt_sgemm_64x64_8x5_nn_align1"), 4 * 128 * 768 * 5, 4 * 24 * 5
    for stored, fits in ((result - 4, False), (result, True), (result + turns, True), (result + turns + 4, False)):
        fact = fact_of(Seen(name, (16, 2, 5), (128, 768, 768, 1), (), {"store_bytes": stored}))
        assert fact.admits(128, 768, 768, 1) is fits


def test_the_sum_of_splits_gives_rows_and_columns() -> None:
    fact = fact_of(Seen(HALF_SUM_OF_PARTS, (24, 22, 1), (1024, 768, 10000, 1), (), {"store_bytes": 2 * 1024 * 768}))
    assert fact.admits(1024, 768, 10_000, 1)
    assert fact.admits(1024, 768, 5, 1)
    assert not fact.admits(1024, 800, 10_000, 1)
    assert not fact.admits(300, 768, 10_000, 1)


def test_tma_makes_multiples_common_and_excludes_none() -> None:
    fact = fact_of(Seen(nvjet("tst_96x64_64x10_1x2_h_bz_TNN"), (2, 64, 1), (1024, 768, 768, 1)))
    assert fact.usual_multiples == (1, 8, 8)
    assert fact.admits(1024, 767, 767, 1)
    transposed = fact_of(Seen(nvjet("tst_192x96_64x5_1x2_h_bz_NTT"), (2, 64, 1), (768, 3072, 1024, 1)))
    assert transposed.usual_multiples == (8, 8, 1)


def test_work_bounds_a_gemm_with_unknown_tiles() -> None:
    work = 2 * 1024 * 768 * 768
    known = Sighting(
        index=0, name=decode("triton_tem_fused_mm_3"), grid=(96, 1, 1), block=(256, 1, 1), counters={"tensor_ops": work}
    )
    fact = read(known)
    assert fact is not None
    assert fact.admits(1024, 768, 768, 1)
    assert fact.admits(1000, 760, 760, 1)
    assert not fact.admits(1024, 769, 768, 1)
    assert not fact.admits(64, 64, 64, 1)
    assert not fact.admits(256, 256, 8, 1)
    assert read(Sighting(index=0, name=known.name, grid=known.grid, block=known.block)) is None


def test_a_vector_has_width_one() -> None:
    name = decode(
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParams)"
    )
    fact = read(Sighting(index=0, name=name, grid=(100, 1, 1), block=(128, 1, 1)))
    assert fact is not None
    assert fact.admits(1, 400, 768, 1)
    assert not fact.admits(2, 400, 768, 1)


def test_a_softmax_is_not_a_gemm() -> None:
    assert read(Sighting(index=0, name=decode("softmax_warp_forward"), grid=(1, 1, 1), block=(1, 1, 1))) is None


def test_a_name_with_half_a_tile_is_handled() -> None:
    name = msgspec.structs.replace(decode("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT"), tile=(128, 64))
    fact = read(Sighting(index=0, name=name, grid=(2, 64, 1), block=(384, 1, 1)))
    assert fact is None or fact.admits(1024, 1024, 1024, 1)
