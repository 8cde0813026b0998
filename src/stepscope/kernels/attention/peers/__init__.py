"""Attention kernels of others, with the functions of our own: cuDNN's, and FlashAttention-4's where it is installed."""
