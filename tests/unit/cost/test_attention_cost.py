"""Formulas of attention compared with counts by hand."""

import pytest

from stepscope.cost.attention import flops_of_attention, need_of_attention
from stepscope.recording.rows.attention_case import IMPLEMENTATIONS, AttentionCase
from stepscope.spec import Precision
from stepscope.spec.backends import Implementation


def case(
    implementation: Implementation,
    *,
    precision: Precision = "bf16",
    causal: bool = True,
    heads: int = 1,
    length: int = 100,
) -> AttentionCase:
    return AttentionCase(
        implementation=implementation,
        batch=2,
        heads=heads,
        length=length,
        head_dim=16,
        precision=precision,
        causal=causal,
        device="cuda:0",
    )


def test_flops_are_two_gemms_forward_five_backward_and_half_if_causal() -> None:
    product = 2 * 2 * 100 * 100 * 16  # multiply-adds count twice; two sequences
    full = flops_of_attention(case("triton", causal=False))
    assert (full.forward, full.backward, full.both) == (2 * product, 5 * product, 7 * product)
    half = flops_of_attention(case("naive", causal=True))
    assert (half.forward, half.backward) == (product, 5 * product // 2)


def test_unfused_attention_saves_two_squares_and_peaks_at_six() -> None:
    square, vector, number = 2 * 100 * 100, 2 * 100 * 16, 8
    kept = need_of_attention(case("naive"))
    # Output and scaled queries in bf16, mask, exponentials in fp32, weights in bf16, sums.
    assert kept.before_backward_bytes == 2 * vector * 2 + 100 * 100 + square * 4 + square * 2 + 2 * 100 * 4 + number
    # The weights are freed; five gradients in fp32 and that of v exist.
    assert kept.peak_bytes == 3 * vector * 2 + 100 * 100 + 6 * square * 4 + 2 * 100 * 4 + number
    assert (kept.before_backward_bound, kept.peak_bound) == ("exact", "exact")


def test_no_mask_is_saved_without_one() -> None:
    causal, full = need_of_attention(case("naive")), need_of_attention(case("naive", causal=False))
    assert causal.before_backward_bytes - full.before_backward_bytes == 100 * 100
    assert causal.peak_bytes - full.peak_bytes == 100 * 100


@pytest.mark.parametrize("implementation", ["tiled", "triton", "hopper", "sdpa-flash"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_flash_saves_its_output_and_one_number_per_query(implementation: Implementation, precision: Precision) -> None:
    width = {"bf16": 2, "fp32": 4}[precision]
    need = need_of_attention(case(implementation, precision=precision, heads=3))
    assert need.before_backward_bytes == 2 * 3 * 100 * (16 * width + 4)
    assert need.before_backward_bound == ("at least" if implementation == "sdpa-flash" else "exact")


def test_peaks_of_stepscope_kernels_match_their_launchers() -> None:
    queries = 2 * 100
    kept = queries * (16 * 2 + 4)
    gradients = 3 * queries * 16 * 2
    assert need_of_attention(case("triton")).peak_bytes == kept + gradients + 2 * (2 * 112) * 4
    assert need_of_attention(case("hopper")).peak_bytes == kept + gradients + 2 * (2 * 128) * 4 + queries * 16 * 4
    assert need_of_attention(case("sdpa-cudnn")).peak_bytes == kept + gradients
    assert need_of_attention(case("sdpa-cudnn")).peak_bound == "at least"


def test_only_implementations_that_save_scores_grow_quadratically() -> None:
    for implementation in IMPLEMENTATIONS:
        short, long = (need_of_attention(case(implementation, length=length)).peak_bytes for length in (2048, 4096))
        quadratic = implementation in ("naive", "compiled", "sdpa-math")
        assert (long > 3 * short) == quadratic, implementation
        assert quadratic or long == 2 * short


def test_formulas_match_their_values() -> None:
    need = need_of_attention(case("triton"))
    assert need.before_backward_formula == "B·H·L·D·2 + B·H·L·4"
    assert need.peak_formula == "4·B·H·L·D·2 + B·H·L·4 + 2·B·H·P·4"
