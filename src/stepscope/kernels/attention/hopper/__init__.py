"""Attention for Hopper in Gluon: the kernels, and what launches them."""
