"""The built-in Transformer for a workload: its shape and its operations."""

# B batch, L length, V vocabulary.

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.kernels import flash_attention
from stepscope.nn import REFERENCE, Operations, TransformerLM
from stepscope.spec import ModelShape, Workload
from stepscope.step.own import Parts

TokenBatch = tuple[Tensor, Tensor]  # the tokens and the next ones


def build_builtin(workload: Workload, shape: ModelShape) -> Parts:
    """Build the model with random tokens as input and the next token as target: only shapes matter for time and
    memory."""
    operations = choose_operations(workload)
    model = build_model(workload, shape, operations)
    tokens_BL = torch.randint(shape.vocab, (workload.batch, workload.context + 1))
    ids_BL = tokens_BL[:, :-1].contiguous().chunk(workload.passes)
    targets_BL = tokens_BL[:, 1:].contiguous().chunk(workload.passes)

    def call(run: Callable[..., object], batch: TokenBatch) -> object:
        return run(batch[0])

    def loss(logits_BLV: object, batch: TokenBatch) -> Tensor:
        assert isinstance(logits_BLV, Tensor)
        return operations.cross_entropy(logits_BLV, batch[1])

    return Parts(module=model, inputs=tuple(zip(ids_BL, targets_BL, strict=True)), call=call, loss=loss)


def build_model(workload: Workload, shape: ModelShape, operations: Operations) -> TransformerLM:
    return TransformerLM(
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


def choose_operations(workload: Workload) -> Operations:
    """The operations of the model. This is the only place where kernels enter it."""
    operations = RECOGNIZED if workload.is_program else REFERENCE
    match workload.attention:
        case "naive" | None:
            return operations
        case "flash":
            return replace(operations, attention=flash_attention)
        case backend:
            return replace(operations, attention=partial(flash_attention, backend=backend))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """As PyTorch's modules compute it: the rewrites of `stepscope.fast` look for this operation, and would not know the
    reference, which transposes and multiplies."""
    return functional.linear(x, weight)


def _cross_entropy(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """As users of PyTorch write it, on fp32 logits. The rewrites would not know the reference, which is made of a
    maximum, a sum of exponentials and a gather."""
    return functional.cross_entropy(logits_BLV.flatten(0, -2).float(), targets_BL.flatten())


RECOGNIZED = replace(REFERENCE, linear=_linear, cross_entropy=_cross_entropy)
