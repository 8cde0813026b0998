"""Saved activations compared with counts by hand. tests/cpu compares them with real graphs."""

from typing import Any

import msgspec
import pytest

from stepscope import cost
from stepscope.cost.activations import PARTS
from stepscope.spec import SIZES, HuggingFace, ModelShape, Precision, Scalar, Workload, build_case

MIB = 2**20
# The sizes of a feed-forward layer, counted by hand below.
FEED_FORWARD: dict[str, Any] = {"batch": 10, "context": 200, "d_model": 512, "d_ff": 1344}


def workload(**settings: Scalar) -> Workload:
    return build_case(settings).workload


def test_feed_forward_saves_three_times_the_inputs_of_its_gemms() -> None:
    terms = cost.feed_forward_activations(**FEED_FORWARD)
    assert {term.tensor: term.bytes for term in terms} == {
        "input of gate and up": 10 * 200 * 512 * 4,
        "gate": 10 * 200 * 1344 * 4,
        "sigmoid(gate)": 10 * 200 * 1344 * 4,
        "silu(gate)": 10 * 200 * 1344 * 4,
        "up": 10 * 200 * 1344 * 4,
        "silu(gate) · up": 10 * 200 * 1344 * 4,
    }
    assert cost.join_formulas(terms) == "B·L·d·4 + 5·B·L·d_ff·4"
    assert cost.total_bytes(terms) == 57_856_000
    assert cost.product_inputs_bytes(**FEED_FORWARD) == 18_944_000
    assert cost.product_inputs_bytes(**FEED_FORWARD) / MIB == pytest.approx(18.07, abs=0.005)


def test_autocast_halves_a_feed_forward_but_copies_its_input_twice() -> None:
    terms = cost.feed_forward_activations(**FEED_FORWARD, precision="bf16")
    assert cost.total_bytes(terms) == 2 * 10 * 200 * (2 * 512 + 5 * 1344)


def test_small_model_matches_a_count_by_hand() -> None:
    # One sequence of two tokens; one block of width 4, feed-forward 3, two heads of 2 that share one key/value head.
    shape = ModelShape(d_model=4, d_ff=3, num_layers=1, num_heads=2, num_kv_heads=1, vocab=5)
    kept = cost.saved_activations(shape, batch=1, context=2)
    norm = 2 * (4 + 1 + 4)  # input, inverse root, normalised
    attention = 2 * 4 + 2 * 2 + 2 * 2 + 2 * (2 * 2 * 2) + 2 * 2  # q, k, v, exponentials and weights, sums
    block = 4 * (2 * norm + 2 * (2 * 4) + attention + 2 * (4 + 5 * 3)) + 2 * 2 * 2 + 8  # mask and scale
    outside = 4 * (norm + 2 * 4 + 2 * (2 * 5) + 2)  # last norm, head's input, exponentials and logits, sums
    assert (kept.block_bytes, kept.outside_bytes, kept.bytes) == (block, outside, block + outside)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_parts_add_up_and_scale_with_the_batch(precision: Precision, attention: str) -> None:
    one, two = (
        cost.activations_of(workload(size="small", batch=batch, precision=precision, attention=attention))
        for batch in (1, 2)
    )
    assert sum(one.part_bytes(part) for part in PARTS) == one.bytes
    fixed = one.part_bytes("weights") + (12 * (128 * 128 + 8) if attention == "naive" else 0)  # masks and scales
    assert two.bytes - fixed == 2 * (one.bytes - fixed)


def test_fused_attention_saves_nothing_quadratic_in_length() -> None:
    kept = cost.activations_of(workload(size="small", attention="sdpa"))
    assert not any("L·L" in term.formula for term in kept.block)


def test_copies_of_weights_take_two_bytes_per_parameter() -> None:
    counted = cost.parameters(SIZES["medium"])
    kept = cost.activations_of(workload(size="medium", precision="bf16"))
    assert kept.part_bytes("weights") == 2 * (counted.attention + counted.feed_forward + counted.head)
    assert cost.activations_of(workload(size="medium")).part_bytes("weights") == 0


def test_formula_shows_blocks_and_the_rest() -> None:
    kept = cost.activations_of(workload())
    assert kept.part_formula("norm") == "N·(4·B·L·d·4 + 2·B·L·4) + 2·B·L·d·4 + B·L·4"
    assert kept.part_formula("rope") == "0"


def test_checkpoint_saves_the_inputs_of_its_groups() -> None:
    residual = cost.residual_bytes(SIZES["nano"], batch=4, context=128)
    assert residual == 4 * 128 * 128 * 4
    outside = cost.activations_of(workload()).outside_bytes
    for setting, groups in (("block", 4), ("2", 2), ("3", 2), ("nested:2", 2), ("9", 1)):
        assert cost.saved_bytes(workload(checkpoint=setting)) == groups * residual + outside + 4 * 8


def test_peak_names_its_moment() -> None:
    assert cost.step_peak(workload(size="small", mode="forward")).moment == "forward"
    assert cost.step_peak(workload(size="nano")).moment == "loss"
    # Many weights and few tokens: all gradients exist together with the activations of the first block.
    assert cost.step_peak(workload(size="medium", vocab=100, batch=8, checkpoint="block")).moment == "blocks.0"
    # Few weights and many tokens: all inputs exist together with the activations of the last block.
    many = workload(size="nano", vocab=10, num_layers=12, batch=64, checkpoint="block")
    assert cost.step_peak(many).moment == "blocks.11"
    plain = workload(size="2.7B", vocab=10, batch=1, context=8)
    assert cost.step_peak(plain).moment == "embedding"
    assert cost.step_peak(plain).gradient_bytes == 4 * cost.parameters(SIZES["2.7B"]).total - 2 * 9990 * 2560 * 4


def test_state_and_gradients_depend_on_the_mode() -> None:
    trained, plain = (cost.step_peak(workload(size="small", mode=mode)) for mode in ("train", "forward-backward"))
    assert trained.optimizer_bytes == 2 * trained.parameter_bytes
    assert plain.optimizer_bytes == cost.step_peak(workload(size="small", optimizer="sgd")).optimizer_bytes == 0
    assert trained.bytes - plain.bytes == trained.optimizer_bytes


def test_micro_batches_hold_fewer_activations_and_all_gradients() -> None:
    split, small = workload(batch=8, grad_accumulation=4), workload(batch=2)
    assert cost.activations_of(split) == cost.activations_of(small)
    assert cost.saved_bytes(split) == cost.saved_bytes(small)
    assert cost.step_peak(split).gradient_bytes == 4 * cost.parameters(SIZES["nano"]).total
    assert cost.step_peak(split).activation_bytes == cost.step_peak(small).activation_bytes


def test_best_group_is_small_and_nesting_pays_for_many_tokens_and_blocks() -> None:
    few = cost.best_checkpoint(workload(size="medium", vocab=100, batch=8, context=256))
    assert few.checkpoint == "block"
    many = workload(num_layers=48, vocab=10, batch=512, attention="sdpa")
    best = cost.best_checkpoint(many)
    # Inputs of 48/k groups and of k blocks are fewest at k = sqrt(48).
    assert best.checkpoint in ("nested:6", "nested:7", "nested:8")
    assert best.bytes < cost.step_peak(msgspec.structs.replace(many, checkpoint="block")).bytes


def test_nothing_is_recomputed_if_it_does_not_pay() -> None:
    assert cost.best_checkpoint(workload(size="2.7B", num_layers=1, vocab=10, batch=1, context=8)).checkpoint == "none"


def test_other_models_have_no_formula() -> None:
    with pytest.raises(ValueError, match="got `gpt2`"):
        cost.activations_of(Workload(model=HuggingFace(config="gpt2")))
