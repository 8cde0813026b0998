"""A model that reads its activations on the CPU in every block, as leftover debugging code does, and the same without:
the pair behind the check of the finding on CPU synchronization (`bench/findings_check.py`).
"""

import torch
from torch import Tensor, nn

from stepscope.nn import TransformerLM


class _Watched(nn.Module):
    def __init__(self, block: nn.Module, *, looks: bool) -> None:
        super().__init__()
        self.block = block
        self.looks = looks

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.block(*inputs)
        if self.looks and not out.detach().abs().amax().item() < float("inf"):
            raise FloatingPointError("an activation is not finite")
        return out


def build(batch: int, context: int, looks: bool = True) -> tuple[nn.Module, Tensor, object]:
    """The built-in `small` shape, with or without a check of every block's output."""
    model = TransformerLM(vocab=10_000, d_model=768, d_ff=3072, num_layers=12, num_heads=12, max_context=context)
    model.blocks = nn.ModuleList(_Watched(block, looks=looks) for block in model.blocks)
    tokens = torch.randint(10_000, (batch, context + 1))
    targets = tokens[:, 1:].contiguous()
    return model, tokens[:, :-1].contiguous(), lambda logits: model.ops.cross_entropy(logits, targets)
