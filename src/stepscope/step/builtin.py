"""The built-in Transformer for a workload: its shape and its operations."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stepscope.kernels import flash_attention
from stepscope.nn import REFERENCE, Operations, TransformerLM
from stepscope.spec import ModelShape, Workload
from stepscope.step.own import Parts


def build_builtin(workload: Workload, shape: ModelShape) -> Parts:
    """Build the model with random tokens as input and the next token as target: only shapes matter for time and memory.
    Each call takes the next micro-batch, and the loss is that of the last call."""
    operations = choose_operations(workload)
    model = build_model(workload, shape, operations)
    tokens_BL = torch.randint(shape.vocab, (workload.batch, workload.context + 1))
    ids_BL = tokens_BL[:, :-1].contiguous().chunk(workload.passes)
    targets_BL = tokens_BL[:, 1:].contiguous().chunk(workload.passes)
    numbers = itertools.cycle(range(workload.passes))
    number = 0

    def call(run: Callable[..., object]) -> object:
        nonlocal number
        number = next(numbers)
        return run(ids_BL[number])

    def loss(logits_BLV: object) -> Tensor:
        assert isinstance(logits_BLV, Tensor)
        return operations.cross_entropy(logits_BLV, targets_BL[number])

    return Parts(module=model, call=call, loss=loss)


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
    match workload.attention:
        case "naive" | None:
            return REFERENCE
        case "flash":
            return replace(REFERENCE, attention=flash_attention)
        case backend:
            return replace(REFERENCE, attention=partial(flash_attention, backend=backend))
