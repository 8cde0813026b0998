"""Memory of training per rank: parameters, gradients and optimizer state, replicated or sharded.

Everything is known before a run. Activations are in `cost.activations`.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from stepscope.spec import ModelShape

Sharding = Literal["none", "optimizer", "fsdp"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
ADAM_STATE_BYTES = 8  # two averages in fp32 per parameter
GATHERED_LAYERS = 2  # FSDP holds one layer in use and prefetches the next


class LayerSize(msgspec.Struct, frozen=True, kw_only=True):
    """The number of elements of each parameter in a layer: matrices, which FSDP shards, and vectors, which it
    replicates."""

    matrices: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


class TrainingBytes(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum on one rank. `gathered` is temporary: the largest full layers that FSDP holds at once."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered


def layer_sizes(shape: ModelShape) -> tuple[LayerSize, ...]:
    """Return the layers of the built-in model: embedding, blocks, final norm and head. A tied head has no
    parameters."""
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
    """Return the maximum over ranks. Parameters and gradients take `parameter_bytes` per element; FSDP gathers
    parameters with `compute_bytes`, and the optimizer keeps `state_bytes` per element.

    Matrices are split evenly, so a shard is rounded up. Optimizer state is sharded by whole parameters: the largest
    share is 1/n plus at most one parameter.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"`sharding`: expected one of {', '.join(SHARDINGS)}, got `{sharding}`")
    if ranks < 1:
        raise ValueError(f"`ranks`: expected at least 1, got `{ranks}`")
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
    """Return the size of the two largest neighboring layers."""
    sizes = [sum(layer.matrices) for layer in layers if layer.matrices]
    return max((sum(sizes[at : at + GATHERED_LAYERS]) for at in range(len(sizes))), default=0)


def _largest_share(layers: Sequence[LayerSize], ranks: int) -> int:
    parameters = [one for layer in layers for one in (*layer.matrices, *layer.vectors)]
    bound = math.ceil(sum(parameters) / ranks) + max(parameters, default=0)
    return min(sum(parameters), bound)
