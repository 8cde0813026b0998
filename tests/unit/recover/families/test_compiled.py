import pytest

from stepscope.recover.facts import Elements, Rows, Window, exactly
from stepscope.recover.families import read_fact
from stepscope.recover.families.compiled import read_compiled
from tests.unit.recover.families.launches import seen

ACTIVATION = "triton_poi_fused_add_mul_pow_tanh_view_4"
NORM = "triton_per_fused_add_native_layer_norm_view_7"
LOOPED_NORM = "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_0"


@pytest.mark.parametrize(
    ("name", "grid", "threads", "count"),
    [
        (ACTIVATION, 3072, 128, 4 * 256 * 3072),
        (ACTIVATION, 6144, 256, 4 * 256 * 3072),
        ("triton_poi_fused__unsafe_view_mul_silu_9", 11264, 128, 2 * 1024 * 5632),
        ("triton_poi_fused_mm_t_8", 37698, 128, 768 * 50264),
        ("triton_poi_fused_add_arange_0", 1, 128, 256),
    ],
)
def test_one_block_size_explains_the_elements(name: str, grid: int, threads: int, count: int) -> None:
    choices = read_compiled(seen(name, (grid,), (threads,)))
    assert isinstance(choices[0], Elements)
    assert any(count in choice.count for choice in choices if isinstance(choice, Elements))
    # The first is Inductor's default.
    assert count in choices[0].count
    assert read_fact(seen(name, (grid,), (threads,))) == Elements(count=Window(grid, grid * 4096))


@pytest.mark.parametrize(
    ("name", "grid", "rows"), [(NORM, 1024, 1024), (NORM, 512, 512), (LOOPED_NORM, 1024, 2048), (LOOPED_NORM, 256, 512)]
)
def test_one_block_size_explains_the_rows(name: str, grid: int, rows: int) -> None:
    choices = read_compiled(seen(name, (grid,), (32,)))
    assert [choice.rows for choice in choices if isinstance(choice, Rows)][:2] == [
        exactly(grid),
        Window(2 * grid - 1, 2 * grid),
    ]
    assert any(rows in choice.rows for choice in choices if isinstance(choice, Rows))


def test_stored_bytes_are_a_multiple_of_the_size() -> None:
    choices = read_compiled(seen(ACTIVATION, (3072,), (128,), stored=6291456))
    assert choices[0] == Elements(count=exactly(4 * 256 * 3072))
    assert {choice.count.low for choice in choices if isinstance(choice, Elements)} == {
        3072 << log for log in range(12)
    }
    rows = read_compiled(seen(NORM, (1021,), (32,), stored=1021 * 770 * 2))
    assert Rows(rows=exactly(1021)) in rows
    assert Rows(rows=exactly(2042)) in rows
    assert all(choice.rows.is_exact for choice in rows if isinstance(choice, Rows))


@pytest.mark.parametrize(
    "name",
    ["triton_per_fused_native_layer_norm_native_layer_norm_backward_view_2", "triton_red_fused_add_mul_pow_sum_view_6"],
)
def test_stored_bytes_of_a_gradient_can_include_another(name: str) -> None:
    launch = seen(name, (1021,), (32,), stored=1021 * 770 * 2)
    assert read_compiled(launch) == read_compiled(seen(name, (1021,), (32,)))


def test_stored_bytes_that_no_size_divides_are_ignored() -> None:
    plain = read_compiled(seen(NORM, (1021,), (32,)))
    assert read_compiled(seen(NORM, (1021,), (32,), stored=7)) == plain
    assert read_compiled(seen(NORM, (1021,), (32,), stored=0)) == plain


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        (ACTIVATION, (1, 4096)),  # two-dimensional tiles
        (NORM, (64,)),  # possibly blocks that share a row
        ("triton_for_fused_0", (100,)),
        ("triton_tem_fused_mm_3", (100,)),
        ("triton_mm", (100,)),
        ("void at::native::elementwise_kernel<128, 4, int>(int)", (100,)),
    ],
)
def test_unknown_launches_have_no_fact(name: str, grid: tuple[int, ...]) -> None:
    assert read_compiled(seen(name, grid, (128,))) == ()


@pytest.mark.parametrize("per_block", [1, 2, 8, 128, 1024, 4096])
@pytest.mark.parametrize("count", [1, 1000, 1024, 1025, 786_432, 12_345_677])
def test_the_launched_size_is_among_the_choices(per_block: int, count: int) -> None:
    for stored in (None, 2 * count, 4 * count, 6 * count):
        choices = read_compiled(seen(ACTIVATION, (-(-count // per_block),), (128,), stored=stored))
        assert any(count in choice.count for choice in choices if isinstance(choice, Elements))


def test_common_block_sizes_come_first() -> None:
    choices = read_compiled(seen(ACTIVATION, (10,), (128,)))
    highs = [choice.count.high // 10 for choice in choices if isinstance(choice, Elements)]
    assert highs == [1024, 512, 256, 128, 1, 2, 4, 8, 16, 32, 64, 2048, 4096]


# Kernels of recorded runs, with the grids that autotuning chose in a trace and under Nsight Compute.
@pytest.mark.parametrize(
    ("name", "grid", "threads", "count"),
    [
        (ACTIVATION, 3072, 128, 4 * 256 * 3072),
        (ACTIVATION, 6144, 256, 4 * 256 * 3072),
        ("triton_poi_fused__unsafe_view_mul_silu_9", 3525, 256, 600 * 3008),
        ("triton_poi_fused__unsafe_view_mul_silu_9", 1763, 128, 600 * 3008),
        ("triton_poi_fused_mm_t_8", 37698, 128, 768 * 50264),
        ("triton_poi_fused_add_arange_0", 2, 128, 256),
        ("triton_poi_fused_ones_triu_3", 256, 128, 256 * 256),
    ],
)
def test_rules_leave_few_elements(name: str, grid: int, threads: int, count: int) -> None:
    choices = read_compiled(seen(name, (grid,), (threads,)), usual=True)
    assert any(count in choice.count for choice in choices if isinstance(choice, Elements))
    assert len(choices) == (1 if grid > 256 else len(choices)) <= 4


@pytest.mark.parametrize(
    ("name", "grid", "threads", "rows", "width"),
    [
        (NORM, 1024, 32, 1024, 768),
        (NORM, 512, 256, 512, 1024),
        (LOOPED_NORM, 1024, 512, 2048, 2048),
        (LOOPED_NORM, 300, 512, 600, 1152),
        (LOOPED_NORM, 512, 256, 1024, 768),
        ("triton_per_fused__to_copy_amax_div_exp_masked_fill_sub_sum_view_4", 3072, 32, 4 * 12 * 256, 256),
    ],
)
def test_rules_leave_few_rows(name: str, grid: int, threads: int, rows: int, width: int) -> None:
    choices = [one for one in read_compiled(seen(name, (grid,), (threads,)), usual=True) if isinstance(one, Rows)]
    assert any(rows in one.rows and one.width is not None and width in one.width for one in choices)
    assert len(choices) <= 3


def test_rules_do_not_apply_to_other_reductions() -> None:
    launch = seen("triton_red_fused_add_mul_pow_sum_view_6", (1021,), (256,))
    assert read_compiled(launch, usual=True) == read_compiled(launch)


def test_a_block_size_without_a_rule_leaves_all_choices() -> None:
    launch = seen(ACTIVATION, (3072,), (64,))
    assert read_compiled(launch, usual=True) == read_compiled(launch)
