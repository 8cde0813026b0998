from itertools import product

import pytest

from stepscope.recover.facts import Rows, Window, exactly
from stepscope.recover.families.reductions import read_reduction
from tests.unit.recover.families.launches import read_rows, seen

MEAN = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>"
    ", unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)"
)
SUM = (
    "void at::native::reduce_kernel<{threads}, {each}, at::native::ReduceOp<{kind}, at::native::func_wrapper_t<{kind}, "
    "at::native::sum_functor<{kind}, float, {kind}>::operator()(at::TensorIterator&)::{{lambda(float, float)#1}}>, "
    "unsigned int, {kind}, 4, {vector}> >(at::native::ReduceOp<{kind}>)"
)
COLUMN_SUM = SUM.format(threads=128, each=4, kind="c10::BFloat16", vector=8)
VARIANCE = MEAN.replace(
    "MeanOps<float, float, float, float>", "WelfordOps<float, float, int, std::pair<float, float> >"
)
_WARP, _LARGEST_BLOCK = 32, 512


# Rows and width of real runs, with the block and shared memory that PyTorch's profiler recorded.
@pytest.mark.parametrize(
    ("grid", "block", "shared", "rows", "width"),
    [
        ((64,), (32, 16), 16, 1024, 768),
        ((30,), (32, 16), 16, 480, 512),
        ((24,), (32, 16), 16, 384, 896),
        ((512,), (32, 16), 16, 8192, 128),  # a norm over heads
    ],
)
def test_a_mean_over_the_last_dimension_has_one_warp_per_row(
    grid: tuple[int], block: tuple[int, int], shared: int, rows: int, width: int
) -> None:
    by_warps, by_threads = read_reduction(seen(MEAN, grid, block, shared=shared))
    assert by_warps.rows == Window(grid[0] * 16 - 15, grid[0] * 16)
    assert rows in by_warps.rows
    assert by_warps.width == Window(32, 255 * 32)
    assert width in by_warps.width
    # The other interpretation: a mean over another dimension, one thread per result, fewer than 256 elements each.
    assert by_threads.rows == Window(grid[0] * 512 - 511, grid[0] * 512)
    assert by_threads.width == Window(16, 255)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "rows", "width"),
    [
        ((5,), (32, 4), 2064, 640, 600),
        ((20,), (32, 4), 2064, 2560, 600),
        ((8, 16), (32, 4), 2064, 1024, 1024),
        ((250,), (64, 2), 16, 128000, 3),  # the gradient of positions, over a batch of three
    ],
)
def test_a_sum_over_rows_gives_the_columns(
    grid: tuple[int, ...], block: tuple[int, int], shared: int, rows: int, width: int
) -> None:
    (choice,) = read_reduction(seen(COLUMN_SUM, grid, block, shared=shared))
    assert rows in choice.rows
    assert choice.rows.step == 4
    assert choice.rows.size <= 128
    assert choice.width is None or width in choice.width
    if block == (64, 2):
        assert choice.width == Window(2, 3)


def test_shared_memory_shows_whether_a_block_has_one_row() -> None:
    assert Rows(rows=exactly(64)) in read_reduction(seen(MEAN, (64,), (32, 16), shared=2064))
    assert all(choice.rows.low > 64 for choice in read_reduction(seen(MEAN, (64,), (32, 16), shared=16)))
    assert len(read_reduction(seen(MEAN, (64,), (32, 16)))) == 4


def test_stored_bytes_make_the_rows_exact() -> None:
    launch = seen(MEAN, (64,), (32, 16), shared=16, stored=4 * 1013)
    assert read_reduction(launch) == (Rows(rows=exactly(1013), width=Window(32, 255 * 32)),)


def test_stored_bytes_of_pairs_and_partial_results_are_ignored() -> None:
    assert len(read_reduction(seen(VARIANCE, (64,), (32, 16), shared=16, stored=4 * 1013))) == 2
    split = read_reduction(seen(COLUMN_SUM, (8, 16), (32, 4), shared=2064, stored=2 * 900))
    assert split[0].rows == Window(900, 1024, 4)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("reduce_kernel", (64,)), (MEAN.replace("512, 1,", "T1, T2,"), (64,)), (MEAN, (64, 1, 2))],
)
def test_unknown_launches_have_no_fact(name: str, grid: tuple[int, ...]) -> None:
    assert read_rows(seen(name, grid, (32, 16))) is None


def last_power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def modelled(results: int, reduced: int, *, lanes_reduce: bool, vector: int, processors: int = 132) -> tuple[int, ...]:
    """Return block, grid and shared memory as PyTorch chooses them for contiguous input: the inverse of the reader."""
    each = 1
    first, second = (reduced, results) if lanes_reduce else (results, reduced)
    if lanes_reduce:
        first = first // vector if first >= 128 else first
    else:
        each = next(number for number in (4, 2, 1) if results % number == 0)
        first //= each
    most = _LARGEST_BLOCK // each
    first_power = last_power_of_two(first) if first < most else most
    second_power = last_power_of_two(second) if second < most else most
    height = min(second_power, most // min(first_power, _WARP))
    width = min(first_power, most // height)
    lanes = width if lanes_reduce else 1
    per_block = 1 if lanes_reduce else width
    values = -(-reduced // lanes)
    warps_reduce = values >= min(height * 16, 256)
    per_block *= 1 if warps_reduce else height
    blocks = -(-(results // each) // per_block)
    values = -(-reduced // (lanes * (height if warps_reduce else 1)))
    target = processors * (2048 // (width * height))
    split = 1
    if warps_reduce and values >= 256 and blocks <= target:
        split = max(min(-(-target // blocks), -(-values // 16)), -(-values // 256))
    through_memory = warps_reduce or (lanes_reduce and width > _WARP)
    return each, width, height, blocks, split, 16 + through_memory * 4 * width * height * each


SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 128, 129, 255, 256, 257, 600, 1000, 1024, 4097, 9000, 50257)


@pytest.mark.parametrize("lanes_reduce", [True, False])
def test_the_launched_sizes_are_among_the_choices(*, lanes_reduce: bool) -> None:
    for (results, reduced), know_memory in product(product(SIZES, SIZES), (True, False)):
        each, width, height, blocks, split, shared = modelled(results, reduced, lanes_reduce=lanes_reduce, vector=4)
        name = SUM.format(threads=512 // each, each=each, kind="float", vector=4)
        launch = seen(name, (blocks, split), (width, height), shared=shared if know_memory else None)
        held = [
            results in choice.rows and (choice.width is None or reduced in choice.width)
            for choice in read_reduction(launch)
        ]
        assert any(held), (results, reduced)
        whole = read_rows(launch)
        assert whole is not None
        assert results in whole.rows


def test_a_partly_filled_block_bounds_both_sizes() -> None:
    # All of three, and the same kernel as earlier versions named it, without the last number.
    for name in (MEAN, MEAN.replace("float, 4, 4> >", "float, 4> >")):
        assert read_reduction(seen(name, (1,), (2, 1), shared=16)) == (
            Rows(rows=exactly(1), width=Window(2, 15)),
            Rows(rows=Window(2, 2), width=exactly(1)),
        )
    eight = MEAN.replace("float, 4, 4> >", "float, 4, 8> >")
    # Here the limit is less than 16 elements per thread.
    assert read_reduction(seen(eight, (1,), (2, 1), shared=16))[0] == Rows(rows=exactly(1), width=Window(2, 30))
    # 640 results of 600 elements: warps share them, so their number has no bound.
    assert read_reduction(seen(COLUMN_SUM, (5,), (32, 4), shared=2064)) == (Rows(rows=Window(516, 640, 4)),)


def test_blocks_that_share_a_result_bound_its_elements() -> None:
    (choice,) = read_reduction(seen(COLUMN_SUM, (8, 16), (32, 4), shared=2064))
    assert choice == Rows(rows=Window(900, 1024, 4), width=Window(255 * 4 + 1, 16 * 256 * 4))
    (alone,) = read_reduction(seen(MEAN, (1, 6), (512, 1), shared=2064))
    assert alone == Rows(rows=exactly(1), width=Window(255 * 512 + 1, 6 * 256 * 512))
