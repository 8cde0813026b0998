"""FLOPs and bytes of operators compared with counts by hand."""

import json

import pytest

from stepscope.cost import OperatorCost, linear_cross_entropy_flops, operator_cost, product_dims, softmax_flops

B, F, I64 = "c10::BFloat16", "float", "long int"


def cost(name: str, shapes: object, dtypes: object, arguments: object = ()) -> OperatorCost:
    found = operator_cost(f"aten::{name}", json.dumps(shapes), json.dumps(dtypes), json.dumps(arguments))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "elements"),
    [
        ("mm", [[2, 3], [3, 5]], 2 * 2 * 3 * 5, 6 + 15 + 10),
        ("addmm", [[5], [2, 3], [3, 5], [], []], 2 * 2 * 3 * 5, 5 + 6 + 15 + 10),
        ("bmm", [[4, 2, 3], [4, 3, 5]], 4 * 2 * 2 * 3 * 5, 24 + 60 + 40),
        ("baddbmm", [[4, 2, 5], [4, 2, 3], [4, 3, 5], [], []], 4 * 2 * 2 * 3 * 5, 40 + 24 + 60 + 40),
        ("linear", [[7, 2, 3], [5, 3], [5]], 7 * 2 * 2 * 3 * 5, 42 + 15 + 5 + 70),
        ("matmul", [[7, 2, 3], [3, 5]], 7 * 2 * 2 * 3 * 5, 42 + 15 + 70),
        ("matmul", [[3], [3, 5]], 2 * 3 * 5, 3 + 15 + 5),
    ],
)
def test_products(name: str, shapes: list[list[int]], flops: int, elements: int) -> None:
    kinds = [B if shape else "Scalar" for shape in shapes]
    found = cost(name, shapes, kinds)
    assert found.flops == flops
    assert found.bytes == 2 * elements
    assert found.dtype == "bf16"


def test_cross_entropy_reads_logits_and_targets_and_writes_a_number_per_row() -> None:
    settings = ["Scalar"] * 5
    forward = cost("cross_entropy", [[6, 50], [6], *[[]] * 5], [B, I64, *settings])
    assert (forward.read_bytes, forward.written_bytes, forward.flops) == (2 * 6 * 50 + 8 * 6, 4 * 6, 0)
    backward = cost("cross_entropy_backward", [[], [6, 50], [6], [6], [], *[[]] * 5], [F, B, I64, F, F, *settings])
    assert backward.read_bytes == 4 + 2 * 6 * 50 + 8 * 6 + 4 * 6 + 4
    assert backward.written_bytes == 2 * 6 * 50


def test_linear_cross_entropy_counts_the_gradients_that_are_computed() -> None:
    assert linear_cross_entropy_flops(tokens=6, width=4, vocab=50, gradients=0) == 2 * 6 * 4 * 50
    assert linear_cross_entropy_flops(tokens=6, width=4, vocab=50, gradients=2) == 3 * 2 * 6 * 4 * 50


def test_convolution_and_its_backward() -> None:
    shapes = [[2, 4, 8, 8], [6, 4, 3, 3], [], [], [], [], [], [], []]
    kinds = [F, F, "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"]
    arguments = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    forward = cost("convolution", shapes, kinds, arguments)
    assert forward.flops == 2 * (2 * 6 * 4 * 4) * (4 * 3 * 3)
    assert forward.written_bytes == 4 * 2 * 6 * 4 * 4
    assert cost("cudnn_convolution", [*shapes[:2], [], [], [], []], [F, F, *["ScalarList"] * 3, "Scalar"],
                ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]).flops == forward.flops  # fmt: skip
    backward = [[2, 6, 4, 4], [2, 4, 8, 8], [6, 4, 3, 3], *[[]] * 8]
    kinds = [F, F, F, *["ScalarList"] * 4, "Scalar", "ScalarList", "Scalar", ""]
    for mask, times in (("[True, True, False]", 2), ("[False, True, True]", 1)):
        arguments = ["", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask]
        assert cost("convolution_backward", backward, kinds, arguments).flops == times * forward.flops


def test_convolution_groups_use_their_own_channels() -> None:
    shapes = [[1, 4, 8, 8], [4, 1, 3, 3], *[[]] * 7]
    arguments = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "4"]
    found = cost("convolution", shapes, [F, F, *[""] * 7], arguments)
    assert found.flops == 2 * (4 * 8 * 8) * 9


Q, K = [2, 4, 8, 16], [2, 2, 32, 16]  # batch, heads, length, width; keys of two groups
FULL = 2 * 2 * 2 * 4 * 8 * 32 * 16


@pytest.mark.parametrize(("causal", "share"), [("True", 0.5), ("False", 1.0)])
def test_attention(causal: str, share: float) -> None:
    flash = cost("_scaled_dot_product_flash_attention", [Q, K, K, [], [], []], [B, B, B, *["Scalar"] * 3],
                 ["", "", "", "0.", causal, "False"])  # fmt: skip
    assert flash.flops == FULL * share
    assert flash.written_bytes == 2 * 2 * 4 * 8 * 16
    for name, before in (("efficient", 6), ("cudnn", 6)):
        arguments = [*[""] * before, causal]
        found = cost(f"_scaled_dot_product_{name}_attention", [Q, K, K], [B, B, B], arguments)
        assert found.flops == FULL * share
    for name, before in (("flash", 11), ("efficient", 11), ("cudnn", 14)):
        arguments = [*[""] * before, causal]
        found = cost(f"_scaled_dot_product_{name}_attention_backward", [Q, Q, K, K, Q], [B] * 5, arguments)
        assert found.flops == 2.5 * FULL * share


def test_attention_with_the_length_before_the_heads() -> None:
    q, k = [2, 8, 4, 16], [2, 32, 2, 16]
    assert cost("_flash_attention_forward", [q, k, k], [B, B, B], [*[""] * 8, "True"]).flops == FULL / 2
    assert cost("_efficient_attention_forward", [q, k, k], [B, B, B], [*[""] * 9, "1"]).flops == FULL / 2
    assert cost("_efficient_attention_forward", [q, k, k], [B, B, B], [*[""] * 9, "0"]).flops == FULL


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "arguments", "read", "written"),
    [
        ("add", [[8, 4], [4], []], [F, F, "Scalar"], [], 4 * (32 + 4), 4 * 32),
        ("add_", [[8, 4], [4], []], [B, F, "Scalar"], [], 2 * 32 + 4 * 4, 2 * 32),
        ("mul", [[8, 4], []], [B, "double"], [], 2 * 32 + 8, 2 * 32),
        ("lt", [[8, 4], [8, 4]], [F, F], [], 2 * 4 * 32, 32),
        ("copy_", [[8, 4], [8, 4], []], [B, F, "Scalar"], [], 4 * 32, 2 * 32),
        ("fill_", [[8, 4], []], [F, "Scalar"], [], 0, 4 * 32),
        ("sum", [[8, 4], [], [], []], [F, "ScalarList", "Scalar", ""], ["", "[-1]", "True"], 4 * 32, 4 * 8),
        ("mean", [[8, 4]], [F], [""], 4 * 32, 4),
        ("_softmax", [[8, 4], [], []], [F, "Scalar", "Scalar"], ["", "-1", "False"], 4 * 32, 4 * 32),
        ("native_layer_norm", [[8, 4], [], [4], [4], []], [F, "", F, F, "Scalar"], [], 4 * 40, 4 * 32),
        ("embedding", [[100, 4], [8]], [F, I64], [], 4 * 32 + 8 * 8, 4 * 32),
        ("embedding_dense_backward", [[8, 4], [8]], [F, I64], ["", "", "100"], 4 * 32 + 8 * 8, 4 * 400),
        ("index_select", [[100, 4], [], [8]], [F, "Scalar", I64], ["", "0", ""], 4 * 32 + 64, 4 * 32),
        ("gather", [[8, 100], [], [8, 1]], [F, "Scalar", I64], ["", "-1", ""], 4 * 8 + 64, 4 * 8),
        ("triton_poi_fused_add_mul_3", [[8, 4], [4], [8, 4], []], [F, B, F, "int"], [], 4 * 64 + 2 * 4 + 4, 0),
    ],
)  # fmt: skip
def test_operators_that_only_move_bytes(
    name: str, shapes: object, dtypes: object, arguments: object, read: int, written: int
) -> None:
    found = cost(name, shapes, dtypes, arguments)
    assert (found.flops, found.read_bytes, found.written_bytes) == (0, read, written)


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes"),
    [
        ("aten::nobody_knows", "[[2, 3]]", '["float"]'),
        ("aten::mm", None, None),
        ("aten::mm", "[[2, 3", '["float"]'),
        ("aten::mm", "{}", '["float"]'),
        ("aten::mm", "[[2, 3], [4, 5]]", '["float", "float"]'),
        ("aten::mm", "[[2, 3]]", '["float"]'),
        ("aten::mm", '[["x", 3], [3, 5]]', '["float", "float"]'),
        ("aten::mm", "[[-2, 3], [3, 5]]", '["float", "float"]'),
        ("aten::mm", "[[2, 3], [3, 5]]", '["Unheard", "Unheard"]'),
        ("aten::add", "[[2, 3], [4, 5]]", '["float", "float"]'),
        ("aten::convolution", "[[2, 4, 8, 8], [6, 4, 3, 3]]", '["float", "float"]'),
        ("triton_poi_fused_embedding_0", "[[1000, 8], [4], [4, 8]]", '["float", "long int", "float"]'),
        ("triton_tem_fused_mm_1", "[[2, 3], [3, 5], [2, 5]]", '["float", "float", "float"]'),
        ("aten::_flash_attention_forward", "[[9, 4, 8], [9, 4, 8], [9, 4, 8]]", '["float", "float", "float"]'),
    ],
)
def test_unknown_operators_have_no_cost(name: str, shapes: str | None, dtypes: str | None) -> None:
    assert operator_cost(name, shapes, dtypes, None) is None


def test_sizes_of_gemms() -> None:
    assert product_dims("aten::addmm", "[[5], [2, 3], [3, 5]]") == (1, 2, 5, 3)
    assert product_dims("aten::bmm", "[[4, 2, 3], [4, 3, 5]]") == (4, 2, 5, 3)
    assert product_dims("aten::mm", "[[2], [3]]") is None
    assert product_dims("aten::mm", "nonsense") is None
    assert product_dims("aten::add", "[[2, 3], [3, 5]]") is None


def test_softmax_takes_five_operations_per_element() -> None:
    assert softmax_flops(100) == 500


def test_the_output_of_a_unary_operator_is_not_an_input() -> None:
    assert cost("exp", [[8, 4]], [F]).bytes == cost("exp", [[8, 4], [8, 4]], [F, F]).bytes == 4 * 2 * 32
    clamped = cost("clamp_min", [[8, 4], [], [8, 4]], [F, "Scalar", F], ["", "0.", ""])
    assert clamped.bytes == 4 * 2 * 32
    assert cost("maximum", [[8, 4], [8, 4]], [F, F]).bytes == 4 * 3 * 32
