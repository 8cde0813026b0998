"""The shape of a model's attention, read from fused operators and from a softmax with its GEMM."""

from typing import Any

import pytest

from stepscope.explain.experiments.attention_shapes import AttentionShape, find_attention_shape
from stepscope.explain.story import Materials
from stepscope.explain.story.missing import command_for
from stepscope.recording.store import Recording
from tests.unit.recordings import BF16, FP32, GEMM_BF16, SOFTMAX, Timeline

Call = tuple[str, Any, list[str], list[str]]


def record(*calls: Call) -> Recording:
    timeline = Timeline()
    with timeline.step():
        for op, shapes, dtypes, arguments in calls:
            kernel = SOFTMAX if op == "aten::_softmax" else GEMM_BF16
            timeline.launch(kernel, 10, op=op, shapes=shapes, dtypes=dtypes, arguments=arguments)
    return timeline.record()


def shape(**changes: Any) -> AttentionShape:
    whole: dict[str, Any] = {
        "batch": 2,
        "heads": 8,
        "kv_heads": 8,
        "length": 64,
        "head_dim": 32,
        "dtype": "bf16",
        "is_causal": True,
    }
    return AttentionShape(**(whole | changes))


HEADS_FIRST, LENGTH_FIRST = [2, 8, 64, 32], [2, 64, 8, 32]
SDPA = "aten::scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("op", "dims", "causal_at"),
    [
        (SDPA, HEADS_FIRST, 5),
        ("aten::_scaled_dot_product_flash_attention", HEADS_FIRST, 4),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", HEADS_FIRST, 4),
        ("aten::_scaled_dot_product_efficient_attention", HEADS_FIRST, 6),
        ("aten::_flash_attention_forward", LENGTH_FIRST, 8),
        ("flash_attn::_flash_attn_forward", LENGTH_FIRST, 5),
    ],
)
@pytest.mark.parametrize("causal", ["True", "False"])
def test_fused_attention(op: str, dims: list[int], causal_at: int, causal: str) -> None:
    arguments = [""] * causal_at + [causal]
    found = find_attention_shape(record((op, [dims] * 3, [BF16] * 3, arguments)))
    assert found == shape(is_causal=causal == "True")


def test_grouped_heads_and_dtype() -> None:
    keys = [2, 2, 64, 32]
    assert find_attention_shape(record((SDPA, [HEADS_FIRST, keys, keys], [FP32] * 3, []))) == shape(
        kv_heads=2, dtype="fp32", is_causal=False
    )


def test_shape_with_the_most_work_is_chosen() -> None:
    small = (SDPA, [[2, 8, 16, 32]] * 3, [BF16] * 3, [""] * 5 + ["True"])
    large = (SDPA, [HEADS_FIRST] * 3, [BF16] * 3, [""] * 5 + ["True"])
    assert find_attention_shape(record(small, small, small, large)) == shape()


def test_attention_in_single_operators() -> None:
    scores: Call = ("aten::bmm", [[16, 64, 32], [16, 32, 64]], [BF16] * 2, [])
    values: Call = ("aten::bmm", [[16, 64, 64], [16, 64, 32]], [BF16] * 2, [])
    softmax = ("aten::_softmax", [[2, 8, 64, 64], [], []], [FP32, "Scalar", "Scalar"], ["", "-1", "False"])
    assert find_attention_shape(record(scores, softmax, values)) == shape(dtype="fp32", is_causal=False)
    flat = ("aten::_softmax", [[16, 64, 64], [], []], [BF16, "Scalar", "Scalar"], ["", "-1", "False"])
    assert find_attention_shape(record(scores, flat, values)) == shape(batch=1, heads=16, kv_heads=16, is_causal=False)
    assert find_attention_shape(record(softmax)) is None  # the size of a head is unknown


@pytest.mark.parametrize(
    ("dims", "dtypes"),
    [
        ([[2, 8, 1, 32], [2, 8, 64, 32], [2, 8, 64, 32]], [BF16] * 3),  # decoding: one query
        ([[2, 8, 0, 32]] * 3, [BF16] * 3),
        ([[8, 64, 32]] * 3, [BF16] * 3),
        ([HEADS_FIRST] * 3, ["Unheard"] * 3),
        ([[], HEADS_FIRST], [BF16] * 2),
    ],
)
def test_other_shapes_are_not_self_attention(dims: list[object], dtypes: list[str]) -> None:
    assert find_attention_shape(record((SDPA, dims, dtypes, []))) is None


def test_missing_section_names_the_command_with_the_recorded_shape() -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 10, op=SDPA, shapes=[HEADS_FIRST] * 3, dtypes=[BF16] * 3)
    command = command_for(Materials(name="trace.json", profile=timeline.profile()), "attention")
    assert command == "stepscope attention --batch 2 --heads 8 --head-dim 32 --length 64 --precision bf16 --no-causal"
