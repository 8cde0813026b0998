"""Closed forms: what a model has, what a step of it must compute, and what one operator computes and moves. The only
place such formulas live."""

from stepscope.cost.activations import (
    Activations,
    StepPeak,
    Term,
    activations_of,
    best_checkpoint,
    feed_forward_activations,
    join_formulas,
    product_inputs_bytes,
    residual_bytes,
    saved_activations,
    saved_bytes,
    step_peak,
    total_bytes,
)
from stepscope.cost.calls import OperatorCost
from stepscope.cost.model import (
    ADAM_BYTES,
    COUNTED_CONVENTION,
    FLOP_CONVENTION,
    SGD_BYTES,
    ParameterCount,
    forward_flops,
    parameters,
    step_flops,
)
from stepscope.cost.operators import (
    SOFTMAX_CONVENTION,
    attention_flops,
    operator_cost,
    product_dims,
    softmax_flops,
)

__all__ = [
    "ADAM_BYTES",
    "COUNTED_CONVENTION",
    "FLOP_CONVENTION",
    "SGD_BYTES",
    "SOFTMAX_CONVENTION",
    "Activations",
    "OperatorCost",
    "ParameterCount",
    "StepPeak",
    "Term",
    "activations_of",
    "attention_flops",
    "best_checkpoint",
    "feed_forward_activations",
    "forward_flops",
    "join_formulas",
    "operator_cost",
    "parameters",
    "product_dims",
    "product_inputs_bytes",
    "residual_bytes",
    "saved_activations",
    "saved_bytes",
    "softmax_flops",
    "step_flops",
    "step_peak",
    "total_bytes",
]
