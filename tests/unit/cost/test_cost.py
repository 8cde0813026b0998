"""Formulas compared with counts by hand."""

import pytest

from stepscope import cost
from stepscope.spec import SIZES, ModelShape

PARAMETERS = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}


@pytest.mark.parametrize(("size", "expected"), PARAMETERS.items())
def test_named_sizes_have_their_published_parameter_counts(size: str, expected: int) -> None:
    assert cost.parameters(SIZES[size]).total == expected


def test_forward_flops_match_a_count_by_hand() -> None:
    # One layer, width 2, feed-forward 3, one head, vocabulary 5; two tokens.
    shape = ModelShape(d_model=2, d_ff=3, num_layers=1, num_heads=1, num_kv_heads=1, vocab=5)
    projections = 4 * (2 * 2 * 2 * 2)  # four 2x2 matrices times two tokens, 2 operations each
    feed_forward = 3 * (2 * 2 * 2 * 3)
    head = 2 * 2 * 2 * 5
    attention = 2 * (2 * 2 * 2 * 2) // 2  # scores and values over a 2x2 square, half of it masked
    assert cost.forward_flops(shape, batch=1, context=2) == projections + feed_forward + head + attention
    assert cost.forward_flops(shape, batch=3, context=2) == 3 * cost.forward_flops(shape, batch=1, context=2)


def test_grouped_heads_and_tied_embeddings_save_parameters() -> None:
    full = ModelShape(d_model=64, d_ff=128, num_layers=2, num_heads=8, num_kv_heads=8, vocab=100)
    grouped = ModelShape(d_model=64, d_ff=128, num_layers=2, num_heads=8, num_kv_heads=2, vocab=100)
    tied = ModelShape(d_model=64, d_ff=128, num_layers=2, num_heads=8, num_kv_heads=8, vocab=100, tie_embeddings=True)
    assert cost.parameters(full).total - cost.parameters(grouped).total == 2 * 2 * 64 * 48
    assert cost.parameters(full).total - cost.parameters(tied).total == 100 * 64
    # Tying shares storage, not work.
    assert cost.forward_flops(tied, batch=1, context=8) == cost.forward_flops(full, batch=1, context=8)


def test_backward_is_twice_the_forward() -> None:
    assert cost.step_flops(10, "inference") == cost.step_flops(10, "forward") == 10
    assert cost.step_flops(10, "forward-backward") == cost.step_flops(10, "train") == 30


def test_adamw_moves_every_state_twice_and_gradients_once_more_to_clip() -> None:
    assert cost.adamw_bytes(10) == 10 * cost.ADAM_BYTES
    # Read: master, two averages, gradient. Written: master, two averages, working copy.
    assert cost.adamw_bytes(10, gradient_bytes=2, working_bytes=2) == 10 * (4 + 4 + 4 + 2 + 4 + 4 + 4 + 2)
    assert cost.adamw_bytes(10, gradient_bytes=2, clip=True) == cost.adamw_bytes(10, gradient_bytes=2) + 20
