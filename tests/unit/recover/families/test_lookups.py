import pytest

from stepscope.recover.facts import Gather, Window, exactly
from stepscope.recover.families.rowwise import read_lookup
from tests.unit.recover.families.launches import HIDDEN, seen

LOOKUP = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)"
BACKWARD = f"void {HIDDEN}embedding_backward_feature_kernel<{{}}, float, long>(long const*, int, long, int)"


@pytest.mark.parametrize(
    ("grid", "threads", "rows", "width_bytes"),
    [
        ((600,), 96, 600, 640 * 2),
        ((200,), 96, 200, 640 * 2),
        ((128,), 192, 128, 768 * 4),
        ((768,), 160, 768, 1200 * 2),
        ((2048,), 256, 2048, 1024 * 4),
        ((46, 2), 256, 46, 1280 * 4),
    ],
)
def test_lookups_and_their_bytes(grid: tuple[int, ...], threads: int, rows: int, width_bytes: int) -> None:
    fact = read_lookup(seen(LOOKUP, grid, (threads,)))
    assert fact is not None
    assert fact.rows == exactly(rows)
    assert fact.width_bytes is not None
    assert width_bytes in fact.width_bytes
    assert width_bytes + 8 not in fact.width_bytes
    assert fact.width_bytes.size <= 256


def test_rows_at_a_warp_boundary() -> None:
    assert read_lookup(seen(LOOKUP, (9,), (96,))) == Gather(
        rows=exactly(9), width_bytes=Window(64 * 16 + 16, 96 * 16, 16)
    )
    assert read_lookup(seen(LOOKUP, (9,), (256,))) == Gather(rows=exactly(9), width_bytes=Window(3600, 4096, 16))
    assert read_lookup(seen(LOOKUP, (9, 2), (256,))) == Gather(rows=exactly(9), width_bytes=Window(4112, 8192, 16))


def test_stored_bytes_make_the_width_exact() -> None:
    fact = read_lookup(seen(LOOKUP, (600,), (96,), stored=600 * 1280))
    assert fact == Gather(rows=exactly(600), width_bytes=exactly(1280))
    # Not the bytes of whole rows that fit the block.
    for stored in (600 * 1280 + 16, 600 * 1600):
        fact = read_lookup(seen(LOOKUP, (600,), (96,), stored=stored))
        assert fact is not None
        assert fact.width_bytes == Window(1040, 1536, 16)


def test_a_name_without_numbers_gives_the_lookups() -> None:
    assert read_lookup(seen("vectorized_gather_kernel", (9,), (96,), stored=9216)) == Gather(rows=exactly(9))


def test_an_unknown_block_leaves_the_width_open() -> None:
    assert read_lookup(seen(LOOKUP, (9,), (512,))) == Gather(rows=exactly(9))
    assert read_lookup(seen(LOOKUP, (9, 2), (128,))) == Gather(rows=exactly(9))


def test_the_gradient_of_a_table_gives_its_width() -> None:
    assert read_lookup(seen(BACKWARD.format("c10::BFloat16"), (20,), (32, 32))) == Gather(
        rows=Window(1, 3072), width_bytes=Window(609 * 2, 640 * 2, 2)
    )
    assert read_lookup(seen(BACKWARD.format("T"), (20,), (32, 32))) == Gather(rows=Window(1, 3072))


@pytest.mark.parametrize(
    "name", ["void at::native::indexSelectLargeIndex<float, long, unsigned int, 2>(int)", "gather"]
)
def test_unknown_launches_have_no_fact(name: str) -> None:
    assert read_lookup(seen(name, (10,))) is None


@pytest.mark.parametrize("width_bytes", [16, 512, 528, 1280, 3584, 3600, 4096, 4112, 8192, 8208, 65536])
def test_the_launched_width_is_in_its_window(width_bytes: int) -> None:
    threads = min(256, -(-width_bytes // 16 // 32) * 32)
    fact = read_lookup(seen(LOOKUP, (7, -(-width_bytes // 4096)), (threads,)))
    assert fact is not None
    assert fact.width_bytes is not None
    assert width_bytes in fact.width_bytes
