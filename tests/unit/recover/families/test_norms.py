import pytest

from stepscope.recover.facts import Rows, Window, exactly
from stepscope.recover.families.grids import LARGEST
from stepscope.recover.families.rowwise import read_norm
from tests.unit.recover.families.launches import HIDDEN, seen

FORWARD = "void at::<unnamed>::vectorized_layer_norm_kernel<{kind}, float, {rms}>(int, T2, const T1 *)"
WEIGHTS = (
    f"void {HIDDEN}GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32u, {{warps}}u, {{rows}}u, false, "
    "{aligned}, false>(long, long, c10::BFloat16 const*)"
)


@pytest.mark.parametrize(
    "name",
    [
        f"void {HIDDEN}vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float, c10::BFloat16 const*)",
        f"void {HIDDEN}vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, c10::BFloat16 const*)",
        f"void {HIDDEN}layer_norm_grad_input_kernel_vectorized<float, float, false>(float const*)",
        f"void {HIDDEN}RowwiseMomentsCUDAKernel<float, float, false>(long, float, float const*)",
        "_ZN2at6native12_GLOBAL__N_126LayerNormForwardCUDAKernelIffLb0EEEvlPKT_",
    ],
)
def test_one_block_per_row(name: str) -> None:
    assert read_norm(seen(name, (600,), (32, 4))) == Rows(rows=exactly(600))


# Batch and width of real runs, and Nsight Compute's counters.
@pytest.mark.parametrize(
    ("kind", "rms", "rows", "stored", "width"),
    [
        ("c10::BFloat16", "0", 600, 600 * (640 * 2 + 8), 640),
        ("float", "0", 128, 128 * (768 * 4 + 8), 768),
        ("c10::Half", "false", 512, 512 * (512 * 2 + 8), 512),
        ("float", "1", 128, 128 * (768 * 4 + 4), 768),
        ("float", "true", 128, 128 * (768 * 4 + 4), 768),
    ],
)
def test_stored_bytes_give_the_width(kind: str, rms: str, rows: int, stored: int, width: int) -> None:
    fact = read_norm(seen(FORWARD.format(kind=kind, rms=rms), (rows,), (32, 4), stored=stored))
    assert fact == Rows(rows=exactly(rows), width=exactly(width))


@pytest.mark.parametrize("stored", [0, 8 * 128, 128 * (768 * 4 + 8) + 1, 128 * (768 * 4 + 9), 128 * 769 * 4])
def test_stored_bytes_of_partial_rows_are_ignored(stored: int) -> None:
    fact = read_norm(seen(FORWARD.format(kind="float", rms="0"), (128,), (32, 4), stored=stored))
    assert fact == Rows(rows=exactly(128))


def test_the_weight_gradient_gives_the_width() -> None:
    odd = read_norm(seen(WEIGHTS.format(warps=32, rows=256, aligned="false"), (20,), (32, 32)))
    assert odd == Rows(rows=Window(256, LARGEST), width=Window(609, 640))
    even = read_norm(seen(WEIGHTS.format(warps=32, rows=256, aligned="true"), (16,), (32, 32)))
    assert even is not None
    assert even.width == exactly(512)
    assert 512 in even.rows
    assert 600 not in even.rows
    few = read_norm(seen(WEIGHTS.format(warps=16, rows=128, aligned="true"), (24,), (32, 16)))
    assert few == Rows(rows=Window(128, 128, 128), width=exactly(768))
    fewer = read_norm(seen(WEIGHTS.format(warps=8, rows=64, aligned="false"), (24,), (32, 8)))
    assert fewer == Rows(rows=Window(64, 127), width=Window(737, 768))
    fewest = read_norm(seen(WEIGHTS.format(warps=1, rows=8, aligned="true"), (24,), (32, 1)))
    assert fewest == Rows(rows=Window(8, 56, 8), width=exactly(768))


def test_shapes_of_other_versions_are_unknown() -> None:
    assert read_norm(seen(WEIGHTS.format(warps=4, rows=256, aligned="true"), (16,), (32, 4))) is None
    assert (
        read_norm(seen(WEIGHTS.replace("32u, {warps}", "64u, {warps}").format(warps=8, rows=64, aligned="true"), (2,)))
        is None
    )
    assert read_norm(seen("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true>(int)", (16,))) is None
    assert read_norm(seen(FORWARD.format(kind="float", rms="0"), (16, 2), (32, 4))) is None
