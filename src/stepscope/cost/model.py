"""Parameters and FLOPs of a model, from its shape.

Conventions, the same everywhere in stepscope:
- A multiply and an add are two operations. Only GEMMs are counted: the rest (norms, softmax, activations) is under 1%
  of the operations, though often a large part of the time.
- Causal attention counts as half of the square, because no kernel needs to compute the other half. Tools that count the
  full square report up to 2× the utilization at long contexts.
- The backward pass counts as 2× forward: one GEMM for the gradient of the inputs, one for that of the weights.
- Operations repeated by activation checkpointing do not count: they are overhead, not work of the model.
"""

import msgspec

from stepscope.spec import Mode, ModelShape

FLOP_CONVENTION = "2 operations per multiply-add, GEMMs only, causal attention as half, backward as 2× forward"
COUNTED_CONVENTION = (
    "2 operations per multiply-add, counted in a forward pass: GEMMs and fused attention (causal as half), unfused "
    "attention in full; backward as 2× forward"
)

# Bytes that an update moves per parameter, in fp32, with each read and write once: AdamW reads weight, gradient and two
# averages and writes all but the gradient; SGD reads weight and gradient and writes the weight.
ADAM_BYTES, SGD_BYTES = 28, 12


class ParameterCount(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parameters are. Tied embeddings count once, under `embedding`."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head


def parameters(shape: ModelShape) -> ParameterCount:
    d, layers = shape.d_model, shape.num_layers
    kv_width = shape.num_kv_heads * shape.head_dim
    return ParameterCount(
        embedding=shape.vocab * d,
        attention=layers * (2 * d * d + 2 * d * kv_width),  # query and output; key and value
        feed_forward=layers * 3 * d * shape.d_ff,  # gate, up, down
        norms=(2 * layers + 1) * d,
        head=0 if shape.tie_embeddings else shape.vocab * d,
    )


def forward_flops(shape: ModelShape, *, batch: int, context: int) -> int:
    """Return the operations of one forward pass: every weight matrix for every token, and the two GEMMs of
    attention."""
    counted = parameters(shape)
    weights = counted.attention + counted.feed_forward + shape.vocab * shape.d_model
    # Scores and weighted values: 2 · 2 · context² · d_model per layer, halved because the mask is a triangle.
    attention = shape.num_layers * 2 * context * context * shape.d_model
    return batch * (2 * context * weights + attention)


def adamw_bytes(
    parameters: int, *, state_bytes: int = 4, gradient_bytes: int = 4, working_bytes: int = 0, clip: bool = False
) -> int:
    """Return the bytes that an update of this many parameters moves, with elements of these sizes: `ADAM_BYTES` each in
    fp32. A working copy is only written. Clipping reads the gradients once more, because their norm comes first.
    """
    return parameters * (6 * state_bytes + gradient_bytes * (2 if clip else 1) + working_bytes)


def step_flops(forward: int, mode: Mode) -> int:
    """Return the operations of a step whose forward pass takes `forward`. The optimizer runs no GEMMs."""
    return forward * (3 if mode in ("forward-backward", "train") else 1)


# --- Decoders other than the built-in one ---


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """`query_width` and `key_width` are summed over all heads. By default only matrices, with one table for embedding
    and head."""

    num_layers: int
    d_model: int
    query_width: int
    key_width: int
    d_ff: int
    vocab_size: int
    is_gated: bool = False
    is_tied: bool = True
    positions: int = 0  # rows of a learned table
    norm_vectors: int = 0  # of each norm: a scale, and a shift where it is a layer norm
    head_norm_width: int = 0  # of the norms of queries and of keys, head by head
    has_projection_bias: bool = False
    has_output_bias: bool = False
    has_feed_forward_bias: bool = False


def decoder_matrices(shape: DecoderShape, *, are_joined: bool) -> tuple[int, ...]:
    """The elements of each matrix of one layer, with query, key and value joined, and gate and up, or all apart."""
    width = shape.d_model
    projections = (shape.query_width, shape.key_width, shape.key_width)
    into_hidden = (shape.d_ff,) * (2 if shape.is_gated else 1)
    groups = ((sum(projections),), (sum(into_hidden),)) if are_joined else (projections, into_hidden)
    return tuple(width * size for size in (*groups[0], shape.query_width, *groups[1], shape.d_ff))


def decoder_parameters(shape: DecoderShape) -> dict[str, int]:
    """Parameters of decoders of any kind: GPT-2, Llama, NeoX, Qwen and what lies between them, item by item."""
    width, layers = shape.d_model, shape.num_layers
    joint = shape.query_width + 2 * shape.key_width
    matrices = 3 if shape.is_gated else 2
    norm = width * shape.norm_vectors
    return {
        "token embedding": shape.vocab_size * width,
        "position embedding": shape.positions * width,
        "attention": layers * width * (joint + shape.query_width),
        "attention biases": layers * (joint * shape.has_projection_bias + width * shape.has_output_bias),
        "feed-forward": layers * matrices * width * shape.d_ff,
        "feed-forward biases": layers * ((matrices - 1) * shape.d_ff + width) * shape.has_feed_forward_bias,
        "norms of layers": layers * (2 * norm + 2 * shape.head_norm_width),
        "last norm": norm,
        "head": 0 if shape.is_tied else shape.vocab_size * width,
    }
