"""Faster kernels: each is a drop-in replacement for the reference of the same name in `nn.functional`."""

from stepscope.kernels.attention import FlashAttention, FlashAttentionTiled, document_bounds, flash_attention

__all__ = ["FlashAttention", "FlashAttentionTiled", "document_bounds", "flash_attention"]
