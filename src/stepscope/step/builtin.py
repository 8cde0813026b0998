"""The built-in Transformer as a workload asks for it: its shape, and the operations that go into it."""

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
    """Random tokens in, the next token as target: what matters for time and memory is their shape. Each call takes the
    next micro-batch of the step's sequences, and the loss is that of the last call."""
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
    """The one table through which kernels come into the model."""
    match workload.attention:
        case "naive" | None:
            return REFERENCE
        case "flash":
            return replace(REFERENCE, attention=flash_attention)
        case backend:
            return replace(REFERENCE, attention=partial(flash_attention, backend=backend))
