import pytest

from stepscope.recover.facts import Rows, Window, exactly
from stepscope.recover.families.reductions import read_scan
from tests.unit.recover.families.launches import read_rows, seen

SCAN = "void at::native::tensor_kernel_scan_innermost_dim<long, std::plus<long> >(long*, long const*, unsigned int)"
ONE = (
    "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<at_cuda_detail::cub::Policy1000, long const*, long*>(int)"
)


@pytest.mark.parametrize(
    ("block", "batch", "context"),
    [
        ((128, 4), 3, 200),
        ((128, 4), 4, 128),
        ((128, 4), 3, 160),
        ((256, 2), 2, 256),
        ((256, 2), 2, 384),
        ((256, 2), 2, 512),
        ((256, 2), 2, 192),
    ],
)
def test_the_block_of_positions_bounds_batch_and_context(block: tuple[int, int], batch: int, context: int) -> None:
    launch = seen(SCAN, (1,), block)
    held = [choice for choice in read_scan(launch) if batch in choice.rows and choice.width and context in choice.width]
    assert held
    exact = read_scan(seen(SCAN, (1,), block, stored=8 * batch * context))
    assert Rows(rows=exactly(batch), width=exactly(context)) in exact
    assert len(exact) <= 2


def test_a_block_of_two_rows_is_a_batch_of_two() -> None:
    assert read_scan(seen(SCAN, (1,), (256, 2))) == (Rows(rows=exactly(2), width=Window(129, 512)),)
    assert read_rows(seen(SCAN, (1,), (128, 4))) == Rows(rows=Window(2, 4), width=Window(33, 256))


def test_a_single_row_uses_another_kernel() -> None:
    assert read_rows(seen(ONE, (1,), (128,))) == Rows(rows=exactly(1))


def test_unknown_launches_have_no_fact() -> None:
    assert read_rows(seen(SCAN, (1,), (128, 2))) is None
    assert read_rows(seen(SCAN, (1, 2), (128, 4))) is None
    assert read_rows(seen("void at::native::tensor_kernel_scan_outer_dim<long>(int)", (1,), (128, 4))) is None


def modelled(rows: int, width: int) -> tuple[int, int, int]:
    wide, tall = (width - 1).bit_length(), (rows - 1).bit_length()
    log = min(max(4, (9 + wide - tall) // 2 if wide + 9 >= tall else 2**31), 9)
    threads = 2**log
    return -(-rows // (512 // threads)), threads, 512 // threads


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 16, 33, 1000])
@pytest.mark.parametrize("width", [1, 2, 17, 64, 65, 1000, 1024, 1025, 100_000])
def test_the_launched_sizes_are_among_the_choices(rows: int, width: int) -> None:
    blocks, threads, height = modelled(rows, width)
    launch = seen(SCAN, (blocks,), (threads, height))
    choices = read_scan(launch)
    assert any(rows in choice.rows and choice.width and width in choice.width for choice in choices)
