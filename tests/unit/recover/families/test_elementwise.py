import pytest

from stepscope.explain.kernel_names import decode
from stepscope.recover.facts import Elements, Window, exactly
from stepscope.recover.families.elementwise import is_recent, read_elementwise
from tests.unit.recover.families.launches import (
    ADD_BF16,
    ADD_FLOAT,
    AT,
    COPY_BF16,
    MULTIPLY,
    inner_lambda,
    read_elements,
    seen,
    strided,
    vectorized,
)

ARANGE = (
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&)"
    "::{lambda(long)#1}>(int, long*)"
)
UNROLLED_CAST = (
    f"void at::native::unrolled_elementwise_kernel<{ADD_FLOAT}, std::array<char*, 3ul>, 4, TrivialOffsetCalculator<2, "
    "unsigned int>, TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<2>, "
    "at::native::memory::StoreWithCast<1> >(int)"
)
UNROLLED = UNROLLED_CAST.replace("LoadWithCast<2>", "LoadWithoutCast").replace("StoreWithCast<1>", "StoreWithoutCast")
# As spelled by Nsight Compute.
COUNTED_ADD = (
    "void native::vectorized_elementwise_kernel<4, native::CUDAFunctor_add<float>, std::array<char *, 3>>(int, T2, T3)"
)
COUNTED_FILL = (
    "void native::elementwise_kernel<128, 4, void native::gpu_kernel_impl_nocast<native::<unnamed>::masked_fill_kernel("
    "at::TensorIterator &, const c10::Scalar &)::[lambda() (instance 1)]::operator ()() const::[lambda() (instance 12)]"
    "::operator ()() const::[lambda(c10::BFloat16, bool) (instance 1)]>(at::TensorIteratorBase &, const T1 &)"
    "::[lambda(int) (instance 1)]>(int, T3)"
)


# Grids of runs with known shapes: batch 3, length 200, width 640; batch 1, length 128, width 768; and others.
@pytest.mark.parametrize(
    ("name", "grid", "count"),
    [
        (vectorized(ADD_BF16, 8), 375, 3 * 200 * 640),
        (vectorized(inner_lambda("tanh_kernel_cuda", "c10::BFloat16"), 8, 2), 1500, 3 * 200 * 2560),
        (vectorized(ADD_FLOAT), 96, 128 * 768),
        (vectorized(f"{AT}FillFunctor<bool>", 4, 1), 13, 160 * 160),
        (vectorized(f"{AT}CUDAFunctorOnSelf_add<long>", 2, 2), 1, 200),
        (strided(ADD_BF16, 4), 750, 3 * 200 * 640),
        (strided(MULTIPLY, 2), 240, 3 * 160 * 128),
        (strided(ADD_FLOAT, 4, cast=True), 6144, 4 * 12 * 256 * 256),
        (UNROLLED_CAST, 1536, 4 * 256 * 768),
        (ARANGE, 4, 200),
    ],
)
def test_the_grid_window_contains_the_elements(name: str, grid: int, count: int) -> None:
    block = 64 if name == ARANGE else 128
    fact = read_elements(seen(name, (grid,), (block,)), recent=True)
    assert fact is not None
    assert count in fact.count
    assert fact.count.size <= 2048


def test_counts_at_a_block_boundary() -> None:
    (first,) = read_elementwise(seen(vectorized(ADD_BF16, 8), (375,)))
    assert first == Elements(count=Window(374 * 1024 + 1, 375 * 1024))
    assert 375 * 1024 + 1 not in first.count
    (second,) = read_elementwise(seen(vectorized(ADD_BF16, 8), (376,)))
    assert 375 * 1024 + 1 in second.count


def test_older_versions_may_have_four_elements_per_thread() -> None:
    launch = seen(vectorized(ADD_FLOAT), (96,))
    old, new = Window(95 * 512 + 1, 96 * 512), Window(95 * 1024 + 1, 96 * 1024)
    assert [choice.count for choice in read_elementwise(launch)] == [old, new]
    assert read_elements(launch) == Elements(count=Window(old.low, new.high))
    assert read_elementwise(launch, recent=True) == (Elements(count=new),)


def test_arrays_of_old_versions_mean_four_elements_per_thread() -> None:
    name = vectorized(ADD_FLOAT, array="at::detail::Array<char*, {}>")
    assert read_elementwise(seen(name, (6272,))) == (Elements(count=Window(6271 * 512 + 1, 6272 * 512)),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)", True),
        (vectorized(ADD_BF16, 8), True),
        (COUNTED_ADD, False),
        (vectorized(ADD_FLOAT), False),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)", True),
        ("void at::<unnamed>::vectorized_layer_norm_kernel<float, float, 0>(int, T2, const T1 *)", True),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
            False,
        ),
    ],
)
def test_names_that_show_a_recent_version(name: str, *, expected: bool) -> None:
    assert is_recent([decode(name)]) is expected


# 480 elements in 1 block, 40960 in 40: the last block half empty.
@pytest.mark.parametrize(
    ("name", "grid", "stored", "count"),
    [
        (COUNTED_ADD, 96, 4 * 98304, 98304),
        (COUNTED_ADD, 1, 4 * 480, 480),
        (COUNTED_FILL, 6144, 2 * 3145728, 3145728),
        (strided(COPY_BF16, 4), 1536, 1572864, 786432),
        (vectorized(f"{AT}AUnaryFunctor<long, long, bool, {AT}CompareEqFunctor<long> >", 4, 2), 1, 600, 600),
        (vectorized(inner_lambda("where_kernel_impl", "bool, float, float"), 4, 4), 3, 4 * 3000, 3000),
        (UNROLLED, 5, 4 * 2051, 2051),
    ],
)
def test_stored_bytes_make_the_count_exact(name: str, grid: int, stored: int, count: int) -> None:
    assert read_elementwise(seen(name, (grid,), stored=stored), recent=True) == (Elements(count=exactly(count)),)


def test_a_casting_kernel_can_store_any_type() -> None:
    wide = read_elementwise(seen(UNROLLED_CAST, (1536,), stored=4 * 786432))
    assert wide == (Elements(count=exactly(786432)),)
    narrow = read_elementwise(seen(UNROLLED_CAST, (1,), stored=128))
    assert [choice.count.low for choice in narrow] == [8, 16, 32, 64, 128]


def test_stored_bytes_that_fit_no_type_are_ignored() -> None:
    launch = seen(COUNTED_ADD, (96,), stored=17)
    assert read_elements(launch, recent=True) == Elements(count=Window(95 * 1024 + 1, 96 * 1024))


TRIANGLE = "void native::triu_tril_kernel<bool, int, 0, 8, {}>(detail::TensorInfo<T1, T2>, long, long, T2)"


def test_stored_bytes_make_a_triangle_exact_unless_in_place() -> None:
    assert read_elements(seen(TRIANGLE.format(0), (25,), stored=25600)) == Elements(count=exactly(25600))
    window = Window(24 * 128 + 1, 25 * 1024)
    assert read_elements(seen(TRIANGLE.format(1), (25,), stored=12880)) == Elements(count=window)
    assert read_elements(seen(TRIANGLE.format("false"), (25,))) == Elements(count=window)


@pytest.mark.parametrize(
    ("name", "grid", "block"),
    [
        (vectorized(ADD_FLOAT), (10, 2), (128,)),  # no such launch
        (vectorized(ADD_FLOAT), (10,), (256,)),  # AMD's
        (strided(ADD_FLOAT, 4), (10,), (512,)),
        ("vectorized_elementwise_kernel", (10,), (128,)),  # a short name
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EfEEvi", (10,), (128,)),
        ("void at::native::vectorized_layer_norm_kernel<float, float, false>(int)", (10,), (32, 4)),
        ("", (10,), (128,)),
    ],
)
def test_unknown_launches_have_no_fact(name: str, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    assert read_elementwise(seen(name, grid, block)) == ()


@pytest.mark.parametrize("count", [1, 127, 128, 511, 512, 513, 1023, 1024, 1025, 4097, 777_777, 2**31 - 1])
@pytest.mark.parametrize("each", [2, 4, 8, 16])
def test_the_launched_size_is_in_its_window(count: int, each: int) -> None:
    names = {
        2: strided(MULTIPLY, 2),
        4: strided(ADD_BF16, 4),
        8: vectorized(ADD_BF16, 8),
        16: vectorized(f"{AT}FillFunctor<bool>", 4, 1),
    }
    launch = seen(names[each], (-(-count // (128 * each)),))
    fact = read_elements(launch, recent=True)
    assert fact is not None
    assert count in fact.count


def test_other_launchers_can_store_an_element_twice() -> None:
    name = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<int>::{lambda(int)#1}>(long)"
    launch = seen(name, (10,), stored=4 * 5000)
    assert read_elements(launch) == Elements(count=Window(9 * 512 + 1, 10 * 512))


@pytest.mark.parametrize(
    ("name", "each"),
    [
        (vectorized(f"{AT}FillFunctor<bool>", 4, 1), 16),
        (vectorized(f"{AT}FillFunctor<bool>", 8, 1), 16),
        (vectorized(f"{AT}FillFunctor<float>", 4, 1), 8),
        (vectorized(f"{AT}AUnaryFunctor<long, long, bool, {AT}CompareEqFunctor<long> >", 4, 2), 8),
        (UNROLLED, 4),
        (UNROLLED.replace("3ul>, 4,", "3ul>, 8,"), 8),
        (UNROLLED.replace("3ul>, 4,", "3ul>,"), 4),  # from before the number was part of the name
    ],
)
def test_elements_per_thread(name: str, each: int) -> None:
    window = Window(9 * 128 * each + 1, 10 * 128 * each)
    assert read_elementwise(seen(name, (10,)), recent=True) == (Elements(count=window),)


def test_an_unknown_type_can_have_sixteen_elements_per_thread() -> None:
    name = vectorized(f"{AT}unheard_of(at::TensorIterator&)::{{lambda()#1}}", 4, 1)
    assert [choice.count.high for choice in read_elementwise(seen(name, (10,)))] == [5120, 10240, 20480]
    untold = vectorized(f"{AT}FillFunctor<bool>", 4, 1, array="T3")
    assert [choice.count.high for choice in read_elementwise(seen(untold, (10,)))] == [5120, 10240, 20480]
