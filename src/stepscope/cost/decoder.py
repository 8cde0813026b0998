"""Parameters of decoders of any kind: GPT-2, Llama, NeoX, Qwen and what lies between them, item by item."""

import msgspec


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """`query_width` and `key_width` are those of all heads together. By default the matrices alone, with one table for
    the embedding and the head."""

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


def decoder_parameters(shape: DecoderShape) -> dict[str, int]:
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
