"""Models of `transformers` in ways that `--hf` does not offer, for `prediction.py`: other optimizers, the library's own
gradient checkpointing, and bf16 weights without autocast.

    stepscope plan --model bench/prediction_models.py:build --set family=opt --set optimizer=sgd-momentum
"""

from collections.abc import Callable
from typing import Any

import torch

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adam-loop": (torch.optim.Adam, {"foreach": False}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def build(
    batch: int,
    context: int,
    device: torch.device,
    *,
    family: str,
    optimizer: str = "adamw-foreach",
    attention: str = "sdpa",
    recompute: bool = False,
    weights: str = "float32",
    **config: Any,
) -> tuple[torch.nn.Module, dict[str, Any], None, torch.optim.Optimizer]:
    """A causal language model and its optimizer. `config` overrides fields of the family's default config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen: Any = AutoModelForCausalLM
    settings = AutoConfig.for_model(family, **config)
    name = {"naive": "eager"}.get(attention or "sdpa", attention or "sdpa")
    model = chosen.from_config(settings, attn_implementation=name, dtype=getattr(torch, weights)).to(device).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kind, options = OPTIMIZERS[optimizer]
    tokens = torch.randint(settings.vocab_size, (batch, context))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return model, inputs, None, kind(model.parameters(), lr=1e-4, **options)
