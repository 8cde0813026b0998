"""What training keeps on each rank: parameters, gradients and optimizer state, whole or shared out.

Counted in elements that are known before anything runs. Activations are not here; `cost.activations` has them.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from stepscope.spec import ModelShape

Sharding = Literal["none", "optimizer", "fsdp"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
ADAM_STATE_BYTES = 8  # two averages in fp32, for each parameter
GATHERED_LAYERS = 2  # FSDP has one in use and the next one on its way


class LayerSize(msgspec.Struct, frozen=True, kw_only=True):
    """The elements of each parameter that is used together: matrices, which FSDP shards, and vectors, which it does
    not."""

    matrices: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


class TrainingBytes(msgspec.Struct, frozen=True, kw_only=True):
    """On one rank, at most. `gathered` comes and goes: whole layers that FSDP puts together, where it has most."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered


def layer_sizes(shape: ModelShape) -> tuple[LayerSize, ...]:
    """The built-in model's: embedding, blocks, final norm and head. A tied head has no parameters of its own."""
    d, kv_width = shape.d_model, shape.num_kv_heads * shape.head_dim
    block = LayerSize(matrices=(d * d, d * kv_width, d * kv_width, d * d, *[d * shape.d_ff] * 3), vectors=(d, d))
    embedding = LayerSize(matrices=(shape.vocab * d,))
    head = LayerSize(matrices=() if shape.tie_embeddings else (shape.vocab * d,), vectors=(d,))
    return (embedding, *[block] * shape.num_layers, head)


def training_bytes(
    layers: Sequence[LayerSize],
    *,
    ranks: int,
    sharding: Sharding,
    parameter_bytes: int = 4,
    compute_bytes: int | None = None,
    state_bytes: int = ADAM_STATE_BYTES,
) -> TrainingBytes:
    """The largest that any rank keeps. Gradients have the dtype of the parameters, of `parameter_bytes` an element;
    `compute_bytes` is what FSDP gathers them in, and `state_bytes` what the optimizer keeps for each element.

    Matrices are cut into equal parts, so a shard is rounded up. An optimizer's state is shared out by whole parameters:
    the largest share is an n-th and at most one parameter more.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"`sharding` must be one of {', '.join(SHARDINGS)}, not {sharding!r}")
    if ranks < 1:
        raise ValueError(f"`ranks` must be positive, not {ranks}")
    elements = sum(layer.elements for layer in layers)
    if sharding == "fsdp":
        kept = sum(math.ceil(one / ranks) for layer in layers for one in layer.matrices)
        kept += sum(sum(layer.vectors) for layer in layers)
        return TrainingBytes(
            parameters=kept * parameter_bytes,
            gradients=kept * parameter_bytes,
            optimizer=kept * state_bytes,
            gathered=_gathered_elements(layers) * (compute_bytes or parameter_bytes),
        )
    return TrainingBytes(
        parameters=elements * parameter_bytes,
        gradients=elements * parameter_bytes,
        optimizer=(elements if sharding == "none" else _largest_share(layers, ranks)) * state_bytes,
    )


def _gathered_elements(layers: Sequence[LayerSize]) -> int:
    """The two neighbours that are largest together."""
    sizes = [sum(layer.matrices) for layer in layers if layer.matrices]
    return max((sum(sizes[at : at + GATHERED_LAYERS]) for at in range(len(sizes))), default=0)


def _largest_share(layers: Sequence[LayerSize], ranks: int) -> int:
    parameters = [one for layer in layers for one in (*layer.matrices, *layer.vectors)]
    bound = math.ceil(sum(parameters) / ranks) + max(parameters, default=0)
    return min(sum(parameters), bound)
