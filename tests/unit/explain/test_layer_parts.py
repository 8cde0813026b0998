"""The parts of a layer follow from the order of its GEMMs, norms and attention, or are unknown."""

import pytest

from stepscope.explain.trace.attribution.graphs import find_repeats
from stepscope.explain.trace.attribution.layer_parts import find_parts
from tests.unit.recordings import ADD, GEMM_BF16, SOFTMAX

NORM = "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16*)"
ROTATE = "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)"
ACTIVATE = "void vllm::act_and_mul_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*, int)"
ATTEND = (
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t> >(Flash_fwd)"
)
BACKWARD = "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8> >(Flash_bwd)"
TOP_K, EXPERT, SUM = "_topk_forward", "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1", "_finalize_matmul_scatter_bf16"

BEFORE = (
    (NORM, "norm"),
    (GEMM_BF16, "q, k, v projection"),
    (ROTATE, "attention"),
    (ATTEND, "attention"),
    (GEMM_BF16, "output projection"),
    (ADD, None),
    (NORM, "norm"),
)
DENSE = (
    *BEFORE,
    (GEMM_BF16, "feed-forward"),
    (ACTIVATE, "feed-forward"),
    (GEMM_BF16, "feed-forward"),
)
EXPERTS = (
    *BEFORE,
    (GEMM_BF16, "mixture of experts"),
    (TOP_K, "mixture of experts"),
    (EXPERT, "mixture of experts"),
    (EXPERT, "mixture of experts"),
    (SUM, "mixture of experts"),
)
KERNELS = [kernel for kernel, _ in DENSE]


@pytest.mark.parametrize("layer", [DENSE, EXPERTS])
def test_parts_are_the_same_wherever_the_kernels_begin(layer: tuple[tuple[str, str | None], ...]) -> None:
    kernels, parts = [kernel for kernel, _ in layer], [part for _, part in layer]
    for start in range(len(layer)):
        found = find_parts(kernels[start:] + kernels[:start])
        assert found == (-start % len(layer), parts[start:] + parts[:start])


def test_projections_and_gates_of_their_own_are_parts_of_the_same() -> None:
    kernels = [NORM, *[GEMM_BF16] * 3, ROTATE, ATTEND, *KERNELS[4:8], *KERNELS[7:]]
    begin, parts = find_parts(kernels) or (None, [])
    assert begin == 0
    assert [parts.count(part) for part in ("q, k, v projection", "feed-forward")] == [3, 4]


def test_a_second_norm_around_a_part_belongs_to_no_other() -> None:
    kernels = [*KERNELS[:6], NORM, *KERNELS[6:], NORM]
    found = find_parts(kernels)
    assert found is not None
    begin, parts = found
    assert begin == 0
    assert [parts[6], parts[7], parts[-1]] == ["norm"] * 3


@pytest.mark.parametrize(
    "kernels",
    [
        [ATTEND, GEMM_BF16, GEMM_BF16, GEMM_BF16, NORM, GEMM_BF16],  # attention and feed-forward in parallel
        [NORM, GEMM_BF16, NORM, GEMM_BF16, NORM, GEMM_BF16, ATTEND, GEMM_BF16, NORM, GEMM_BF16],  # norms of q and of k
        [BACKWARD if one == ATTEND else one for one in KERNELS],
        [SOFTMAX if one == ATTEND else one for one in KERNELS],
        [*KERNELS, *KERNELS],
        [*KERNELS[:-1], *[GEMM_BF16] * 3],  # more GEMMs than a feed-forward layer has
        [NORM, *[GEMM_BF16] * 3, *KERNELS[1:]],  # more projections than three
        [*KERNELS[:4], GEMM_BF16, *KERNELS[4:]],  # two GEMMs between attention and the norm
        [*KERNELS[:4], GEMM_BF16, ATTEND, *KERNELS[4:]],  # a GEMM between two calls of attention
        [NORM, GEMM_BF16, ATTEND],
        [ATTEND],
    ],
)
def test_another_order_has_no_parts(kernels: list[str]) -> None:
    assert find_parts(kernels) is None


def numbers(kernels: list[str]) -> list[int | None]:
    return [one and one.number for one in find_repeats(tuple(("kernel", kernel) for kernel in kernels))]


def test_a_layer_begins_with_its_norm() -> None:
    """The first layer lacks kernels that the others have at their beginning, and the last norm is not a layer."""
    period = len(KERNELS)
    rest = numbers([*KERNELS[2:], *KERNELS * 4, NORM])
    assert rest == [*[0] * (period - 2), *(number for number in range(1, 5) for _ in KERNELS), None]
    # A few kernels at the beginning are no layer.
    few = numbers([*KERNELS[-3:], *KERNELS * 4])
    assert few == [*[None] * 3, *(number for number in range(4) for _ in KERNELS)]


def test_what_follows_a_layer_and_is_not_one_has_no_number() -> None:
    assert numbers([*KERNELS * 4, *[ADD] * len(KERNELS)])[-len(KERNELS) :] == [None] * len(KERNELS)


def test_other_layers_of_the_same_length_are_numbered_on() -> None:
    one, other = [NORM, GEMM_BF16, ADD, ACTIVATE], [ROTATE, GEMM_BF16, SOFTMAX, SUM]
    assert numbers([*one * 4, *other * 4]) == [number for number in range(8) for _ in one]
