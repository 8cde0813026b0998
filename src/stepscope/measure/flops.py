"""Counts the operations of a forward pass of any model as they are dispatched.

The built-in model has formulas (`cost`). For a custom model, one forward pass runs under PyTorch's counter, with one
correction: its formulas for fused attention ignore `is_causal` and count the full square, twice what is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from stepscope.cost import attention_flops
from stepscope.step import Step

_aten = torch.ops.aten
# The position of `is_causal` differs between the backends' operators, and it may be passed by name.
_CAUSAL_POSITION = {
    _aten._scaled_dot_product_flash_attention: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu: 4,
    _aten._scaled_dot_product_efficient_attention: 6,
    _aten._scaled_dot_product_cudnn_attention: 6,
}


def count_forward_flops(step: Step) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=_attention_formulas())
    # Without gradients, PyTorch's attention layers use one fused operator that the counter does not support.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter:
            step.forward_without_graph()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops()


def _attention_formulas() -> dict[Any, Any]:
    return {operator: _formula(position) for operator, position in _CAUSAL_POSITION.items()}


def _formula(position: int) -> Callable[..., int]:
    def formula(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **kwargs: Any) -> int:
        index = position - 3
        causal = kwargs.get("is_causal", args[index] if index < len(args) else False)
        batch, heads, queries, head_dim = query_shape
        full = 2 * batch * heads * queries * key_shape[-2] * (head_dim + value_shape[-1])
        return int(full) // 2 if causal else int(full)

    return formula


def count_operations(step: Step) -> dict[str, int]:
    """Return the operations of one pass, as dispatched. Attention counts in full, as in the textbook: how much a causal
    kernel skips is up to the counters.
    """

    def in_full(query_shape: Any, key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
        batch, heads, queries, head_dim = query_shape
        return attention_flops(
            batch=batch,
            heads=heads,
            queries=queries,
            keys=key_shape[2],
            head_dim=head_dim,
            value_dim=value_shape[3],
            causal=False,
        )

    # Operators that PyTorch's counter does not support, or counts as half if causal.
    operators = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]
    if hasattr(torch.ops.stepscope, "flash_attention_forward"):
        operators.append(torch.ops.stepscope.flash_attention_forward)
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(operators, in_full))
    with counter:
        step.forward_without_graph()
    flops: dict[str, int] = {}
    for operator, counted in counter.get_flop_counts().get("Global", {}).items():
        kind = _class_of(str(operator))
        flops[kind] = flops.get(kind, 0) + counted
    return flops


def _class_of(operator: str) -> str:
    return "attention" if "attention" in operator else "convolution" if "conv" in operator else "GEMM"
