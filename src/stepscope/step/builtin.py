"""The built-in Transformer as a workload asks for it: its shape, and the operations that go into it."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stepscope.nn import REFERENCE, Operations, TransformerLM
from stepscope.spec import ModelShape, Workload
from stepscope.step.own import Parts


def build_builtin(workload: Workload, shape: ModelShape) -> Parts:
    """Random tokens in, the next token as target: what matters for time and memory is their shape."""
    operations = choose_operations(workload)
    model = TransformerLM(
        vocab=shape.vocab,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        tie_embeddings=shape.tie_embeddings,
        max_context=workload.context,
        ops=operations,
    )
    tokens_BL = torch.randint(shape.vocab, (workload.batch, workload.context + 1))
    ids_BL, targets_BL = tokens_BL[:, :-1].contiguous(), tokens_BL[:, 1:].contiguous()

    def loss(logits_BLV: object) -> Tensor:
        assert isinstance(logits_BLV, Tensor)
        return operations.cross_entropy(logits_BLV, targets_BL)

    return Parts(module=model, call=lambda run: run(ids_BL), loss=loss)


def choose_operations(workload: Workload) -> Operations:
    """The one table through which kernels come into the model."""
    match workload.attention:
        case "sdpa":
            return replace(REFERENCE, attention=sdpa_attention)
        case "naive" | None:
            return REFERENCE


def sdpa_attention(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    """PyTorch's own attention. It takes its mask from the top left, so lengths that differ are not for it."""
    if causal and q_BHLD.shape[-2] != k_BGLD.shape[-2]:
        raise ValueError(
            f"sdpa aligns a causal mask at the start: lengths {q_BHLD.shape[-2]} and {k_BGLD.shape[-2]} differ"
        )
    grouped = q_BHLD.shape[-3] != k_BGLD.shape[-3]
    return scaled_dot_product_attention(q_BHLD, k_BGLD, v_BGLD, is_causal=causal, scale=scale, enable_gqa=grouped)
