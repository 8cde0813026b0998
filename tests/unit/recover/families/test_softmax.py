import pytest

from stepscope.recover.facts import Rows, Window, exactly
from stepscope.recover.families.rowwise import read_softmax
from tests.unit.recover.families.launches import HIDDEN, read_rows, seen

WARP = "void (anonymous namespace)::softmax_warp_{way}<{kind}, {kind}, float, {log}, false, false>({kind}*)"
BLOCK = f"void {HIDDEN}cunn_SoftMax{{way}}<4, float, float, float, {HIDDEN}LogSoftMax{{epilogue}}>(float*, int)"
IMPOSSIBLE = WARP.format(way="forward", kind="float", log=999999999)
FORWARD = BLOCK.format(way="Forward", epilogue="ForwardEpilogue")
FORWARD_SHARED = BLOCK.format(way="ForwardSmem", epilogue="ForwardEpilogue, long")
BACKWARD_SHARED = BLOCK.format(way="BackwardSmem", epilogue="BackwardEpilogue")


@pytest.mark.parametrize(
    ("way", "kind", "log", "grid", "block", "rows", "width"),
    [
        ("forward", "c10::Half", 8, 768, (32, 4), 2 * 6 * 256, 256),
        ("forward", "float", 8, 960, (32, 4), 3 * 8 * 160, 160),
        ("backward", "float", 8, 960, (32, 4), 3 * 8 * 160, 160),
        ("forward", "c10::BFloat16", 3, 9408, (8, 16), 8 * 12 * 196 * 16, 8),
    ],
)
def test_rows_by_warp(way: str, kind: str, log: int, grid: int, block: tuple[int, int], rows: int, width: int) -> None:
    fact = read_rows(seen(WARP.format(way=way, kind=kind, log=log), (grid,), block))
    assert fact is not None
    assert fact.width == Window(2 ** (log - 1) + 1, 2**log)
    assert width in fact.width
    per_block = block[1] * (2 if log <= 7 else 1)
    assert fact.rows == Window((grid - 1) * per_block + 1, grid * per_block)
    assert rows in fact.rows


def test_widths_at_a_power_of_two() -> None:
    narrow = read_rows(seen(WARP.format(way="forward", kind="float", log=7), (10,), (32, 4)))
    wide = read_rows(seen(WARP.format(way="forward", kind="float", log=8), (10,), (32, 4)))
    single = read_rows(seen(WARP.format(way="forward", kind="float", log=0), (10,), (1, 128)))
    assert narrow is not None
    assert wide is not None
    assert single is not None
    assert narrow.rows == Window(9 * 8 + 1, 80)
    assert wide.rows == Window(9 * 4 + 1, 40)
    assert (narrow.width, wide.width, single.width) == (Window(65, 128), Window(129, 256), exactly(1))


def test_stored_bytes_leave_the_factors_that_fit() -> None:
    name = WARP.format(way="forward", kind="float", log=8)
    assert read_softmax(seen(name, (960,), (32, 4), stored=4 * 3840 * 160)) == (
        Rows(rows=exactly(3840), width=exactly(160)),
    )
    few = read_softmax(seen(name, (2,), (32, 4), stored=4 * 6 * 200))
    assert [(choice.rows.low, choice.width) for choice in few] == [
        (5, exactly(240)),
        (6, exactly(200)),
        (8, exactly(150)),
    ]
    # A prime that no width of the kernel divides: something else was stored too.
    assert read_softmax(seen(name, (2,), (32, 4), stored=4 * 1201)) == (
        Rows(rows=Window(5, 8), width=Window(129, 256)),
    )


def test_a_wide_row_has_its_width_in_shared_memory() -> None:
    assert read_rows(seen(FORWARD_SHARED, (1024,), (1024,), shared=40128)) == Rows(
        rows=exactly(1024), width=exactly(10000)
    )
    assert read_rows(seen(BACKWARD_SHARED, (512,), (512,), shared=40064)) == Rows(
        rows=exactly(512), width=exactly(10000)
    )
    # Too wide for that: shared memory has only the sums.
    assert read_rows(seen(FORWARD, (600,), (1024,), shared=128)) == Rows(rows=exactly(600))
    assert read_rows(seen(FORWARD_SHARED, (600,), (1024,))) == Rows(rows=exactly(600))


def test_stored_bytes_give_the_width_of_wide_rows() -> None:
    fact = read_rows(seen(FORWARD, (600,), (1024,), shared=128, stored=600 * 32003 * 4))
    assert fact == Rows(rows=exactly(600), width=exactly(32003))
    assert read_rows(seen(FORWARD, (600,), (1024,), stored=600 * 32003 * 4 + 4)) == Rows(rows=exactly(600))


def test_different_types_leave_the_width_open() -> None:
    mixed = FORWARD_SHARED.replace("<4, float, float, float", "<8, c10::BFloat16, float, float")
    assert read_rows(seen(mixed, (600,), (1024,), shared=40128)) == Rows(rows=exactly(600))


def test_rows_in_registers() -> None:
    name = FORWARD.replace("cunn_SoftMaxForward", "cunn_SoftMaxForwardReg").replace("Epilogue>", "Epilogue, long, 3>")
    assert read_rows(seen(name, (600,), (1024,))) == Rows(rows=exactly(600), width=Window(2049, 3072))


@pytest.mark.parametrize(
    "name", ["softmax_warp_forward", "void cunn_SpatialSoftMaxForward<float>(float*)", "softmax", IMPOSSIBLE]
)
def test_unknown_launches_have_no_fact(name: str) -> None:
    assert read_rows(seen(name, (10,), (32, 4))) is None
