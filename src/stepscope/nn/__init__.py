"""The reference model, its operations and its optimizer, in plain PyTorch."""

from stepscope.nn.functional import REFERENCE, Operations
from stepscope.nn.model import TransformerLM
from stepscope.nn.optim import AdamW, clip_grad_norm, cosine_schedule

__all__ = ["REFERENCE", "AdamW", "Operations", "TransformerLM", "clip_grad_norm", "cosine_schedule"]
