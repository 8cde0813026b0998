from stepscope.recover.facts import Elements, Window, exactly
from stepscope.recover.families.elementwise import read_concatenation
from tests.unit.recover.families.launches import HIDDEN, seen

VECTORIZED = (
    f"void {HIDDEN}CatArrayBatchedCopy_vectorized<{HIDDEN}OpaqueType<2u>, unsigned int, 3, 128, 1, 16, 8>(char*)"
)
ALIGNED = f"void {HIDDEN}CatArrayBatchedCopy_alignedK_contig<{HIDDEN}OpaqueType<8u>, unsigned int, 2, 128, 1, 16>(int)"
PLAIN = "void at::<unnamed>::CatArrayBatchedCopy<at::<unnamed>::OpaqueType<4>, unsigned int, 4, 64, 64>(T1 *)"


def test_the_largest_tensor_bounds_the_total() -> None:
    # Three of 600 × 640 with two bytes each: eight elements per thread.
    fact = read_concatenation(seen(VECTORIZED, (375, 3)))
    assert fact == Elements(count=Window(374 * 1024 + 1, 3 * 375 * 1024))
    assert 3 * 600 * 640 in fact.count
    # 1 and 768 positions with eight bytes each: two elements per thread.
    small = read_concatenation(seen(ALIGNED, (3, 2)))
    assert small == Elements(count=Window(2 * 256 + 1, 2 * 768))
    assert 769 in small.count


def test_older_names_lack_the_bytes_per_thread() -> None:
    name = ALIGNED.replace("alignedK", "aligned16").replace(", 1, 16>", ", 1>").replace("<8u>", "<2u>")
    assert read_concatenation(seen(name, (3, 2))) == Elements(count=Window(2 * 512 + 1, 2 * 3 * 1024))


def test_a_full_gpu_is_not_a_bound() -> None:
    assert read_concatenation(seen(VECTORIZED, (132 * 32, 3))) is None
    assert read_concatenation(seen(PLAIN, (264, 2), (512,))) is None


def test_stored_bytes_give_the_count_whatever_the_grid() -> None:
    assert read_concatenation(seen(PLAIN, (264, 2), (512,), stored=4 * 98304)) == Elements(count=exactly(98304))
    assert read_concatenation(seen(VECTORIZED, (375, 3), stored=2 * 1152000)) == Elements(count=exactly(1152000))


def test_unknown_launches_have_no_fact() -> None:
    assert read_concatenation(seen("CatArrayBatchedCopy", (264, 2), (512,), stored=4096)) is None
    assert read_concatenation(seen("void at::native::other<float>(int)", (264, 2), (512,), stored=4096)) is None
