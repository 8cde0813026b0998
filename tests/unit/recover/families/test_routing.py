"""Launches as PyTorch's source defines them; none was recorded."""

import msgspec
import pytest

from stepscope.recover.facts import Groups, Rows, Window, exactly, find_window
from stepscope.recover.families import read_fact
from stepscope.recover.families.routing import read_grouped
from tests.unit.recover.families.launches import seen
from tests.unit.recover.variant_runs import GROUPED, HISTOGRAM, PREPARE, TOP_K, multiply_grouped

CUBLAS = "at::native::(anonymous namespace)::populate_cublas_grouped_args_kernel(int const*, long, long)"


@pytest.mark.parametrize("name", [PREPARE, CUBLAS])
@pytest.mark.parametrize("groups", [2, 8, 60, 128, 1024])
def test_a_grouped_gemm_is_prepared_by_a_thread_for_each_group(name: str, groups: int) -> None:
    assert read_fact(seen(name, (1,), (groups,))) == Groups(count=exactly(groups))
    assert read_fact(seen(name, (2,), (groups,))) is None


@pytest.mark.parametrize(("experts", "threads"), [(8, 32), (32, 32), (33, 64), (60, 64), (256, 256)])
def test_a_top_k_has_a_block_for_each_token(experts: int, threads: int) -> None:
    fact = read_fact(seen(TOP_K, (640,), (threads,)))
    assert fact == Rows(rows=exactly(640), width=Window(threads - 31, threads))
    assert experts in Window(threads - 31, threads)


def test_wide_rows_of_a_top_k_are_not_read() -> None:
    assert read_fact(seen(TOP_K, (640,), (1024,))) is None
    assert read_fact(seen(TOP_K, (65_535,), (64,))) is None


@pytest.mark.parametrize("bins", [2, 8, 60, 99])
def test_shared_memory_of_a_histogram_shows_its_bins(bins: int) -> None:
    assert read_fact(seen(HISTOGRAM, (10,), (512,), shared=4 * bins + 8)) == Groups(count=exactly(bins))
    assert read_fact(seen(HISTOGRAM, (10,), (512,), shared=4 * bins + 9)) is None
    assert read_fact(seen(HISTOGRAM, (10,), (512,))) is None


@pytest.mark.parametrize("sizes", [[100, 0, 1, 539], [1] * 60, [320, 320], [129, 700, 64]])
def test_a_grouped_gemm_never_excludes_its_sizes(sizes: list[int]) -> None:
    rows, columns, inner = sum(sizes), 2816, 1000
    product = read_grouped(multiply_grouped(sizes, columns, inner), len(sizes))
    assert product is not None
    assert product.admits(rows, columns, inner, 1)
    window = find_window(product, rows=rows, inner=inner)
    assert window is not None
    assert columns in window
    assert 200 * columns not in window


def test_a_grouped_gemm_without_counters_says_nothing() -> None:
    launch = msgspec.structs.replace(multiply_grouped([64, 64], 512, 512), counters={})
    assert read_grouped(launch, 2) is None
    assert read_fact(multiply_grouped([64, 64], 512, 512)) is None
    assert launch.name.operation == "grouped GEMM"
    assert launch.name.tile == (64, 128, 128)
    assert "Pingpong" in launch.name.name
    assert GROUPED.partition("{")[0] in launch.name.name
