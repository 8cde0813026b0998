"""Closed forms: what a model has, what a step of it must compute, and what one operator computes and moves. The only
place such formulas live."""

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
    "OperatorCost",
    "ParameterCount",
    "attention_flops",
    "forward_flops",
    "operator_cost",
    "parameters",
    "product_dims",
    "softmax_flops",
    "step_flops",
]
