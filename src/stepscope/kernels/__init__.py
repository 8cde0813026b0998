"""The faster parts: each a drop-in for the reference of its name in `nn.functional`."""

from stepscope.kernels.attention import FlashAttention, FlashAttentionTiled, flash_attention

__all__ = ["FlashAttention", "FlashAttentionTiled", "flash_attention"]
