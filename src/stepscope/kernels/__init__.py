"""Faster kernels: each is a drop-in replacement for the reference of the same name in `nn.functional`."""

from stepscope.kernels.accumulation import Accumulator
from stepscope.kernels.adamw import AdamWUpdates, Hyper, ParameterUpdate
from stepscope.kernels.attention import FlashAttention, FlashAttentionTiled, document_bounds, flash_attention
from stepscope.kernels.cross_entropy import cross_entropy
from stepscope.kernels.linear_cross_entropy import linear_cross_entropy
from stepscope.kernels.optimizer import OneLaunchAdamW

__all__ = [
    "Accumulator",
    "AdamWUpdates",
    "FlashAttention",
    "FlashAttentionTiled",
    "Hyper",
    "OneLaunchAdamW",
    "ParameterUpdate",
    "cross_entropy",
    "document_bounds",
    "flash_attention",
    "linear_cross_entropy",
]
