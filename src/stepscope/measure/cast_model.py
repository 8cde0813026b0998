"""A `transformers` model with its weights in half precision, as a factory for `--model`.

A workload's precision keeps fp32 weights and casts them in every step, as training does. Models that only run forward
usually store their weights in half precision, and launch fewer kernels.
"""

from typing import Any

import torch
from torch import nn

from stepscope.spec import Attention, HuggingFace, Mode, Workload
from stepscope.step.hf import build_hf

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def build(
    config: str, dtype: str, batch: int, context: int, attention: Attention | None = None, *, with_loss: bool = False
) -> tuple[nn.Module, dict[str, Any], None]:
    """Return the model of a config, its input, and no loss function: with labels, its output has the loss."""
    model = HuggingFace(config=config)
    mode: Mode = "train" if with_loss else "inference"
    parts = build_hf(Workload(model=model, batch=batch, context=context, attention=attention, mode=mode), model)
    return parts.module.to(_DTYPES[dtype]), parts.inputs[0], None
