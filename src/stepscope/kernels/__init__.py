"""Faster kernels: each is a drop-in replacement for the reference of the same name in `nn.functional`."""

from stepscope.kernels.accumulation import Accumulator
from stepscope.kernels.adamw import AdamWUpdates, Hyper, ParameterUpdate
from stepscope.kernels.attention import FlashAttention, FlashAttentionTiled, document_bounds, flash_attention
from stepscope.kernels.cross_entropy import cross_entropy
from stepscope.kernels.gated import geglu, geglu_packed, swiglu, swiglu_packed
from stepscope.kernels.linear_cross_entropy import linear_cross_entropy
from stepscope.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from stepscope.kernels.optimizer import OneLaunchAdamW
from stepscope.kernels.rotary import rope, rope_packed

__all__ = [
    "Accumulator",
    "AdamWUpdates",
    "FlashAttention",
    "FlashAttentionTiled",
    "Hyper",
    "OneLaunchAdamW",
    "ParameterUpdate",
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "document_bounds",
    "flash_attention",
    "geglu",
    "geglu_packed",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "rope_packed",
    "swiglu",
    "swiglu_packed",
]
