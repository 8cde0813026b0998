"""Attention that never stores its scores: tiled PyTorch to learn from, Triton for every GPU, Gluon for Hopper."""

from stepscope.kernels.attention.backends import BACKENDS, chosen_backends
from stepscope.kernels.attention.extras import document_bounds
from stepscope.kernels.attention.function import FlashAttention, FlashAttentionTiled, flash_attention

__all__ = [
    "BACKENDS",
    "FlashAttention",
    "FlashAttentionTiled",
    "chosen_backends",
    "document_bounds",
    "flash_attention",
]
