"""Faster kernels: each is a drop-in replacement for the reference of the same name in `nn.functional`."""

from stepscope.kernels.attention import FlashAttention, FlashAttentionTiled, flash_attention

__all__ = ["FlashAttention", "FlashAttentionTiled", "flash_attention"]
