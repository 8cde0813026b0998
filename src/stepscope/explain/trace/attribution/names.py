"""Decode the names in a recording: kernels on a GPU, operators on a CPU.

This is the only place that decodes them. The result becomes columns of the kernels when a profile is made, and rules,
tables, questions and pages read those.
"""

import re

import polars as pl

from stepscope.explain.kernel_names import KernelClass, decode, describe

# Names of C++ templates run to kilobytes, and a page may have thousands. Their beginning identifies the kernel.
LONGEST_NAME = 600
# Fields of `describe` that are shown elsewhere: the short name as the label, the class as the color.
_SAID = ("part", "short", "kernel_class")

# Operators by class; the first matching pattern wins. Names come without namespace and overload.
_OPERATORS: tuple[tuple[KernelClass, str], ...] = (
    ("communication", r"c10d|nccl|gloo|all_?reduce|all_?gather|all_?to_?all|reduce_scatter|broadcast_$"),
    ("attention", r"scaled_dot_product|flash_attention|efficient_attention"),
    ("loss", r"cross_entropy|nll_loss|log_softmax|mse_loss|l1_loss|kl_div|binary_cross_entropy|huber|ctc_loss"),
    (
        "GEMM",
        r"^_?(?:add)?(?:mm|bmm|baddbmm|addmv|mv|dot|vdot|linear|matmul|addmm|addbmm)(?:_|$)|mkldnn_linear|_scaled_mm|sgemm"
        # Recurrent layers are mostly GEMMs. The fused cells (`_thnn_fused_lstm_cell`) are what is left without them.
        r"|^(?:mkldnn_rnn_layer|_?cudnn_rnn|miopen_rnn)(?:_backward)?$"
        r"|^(?:quantized_)?(?:lstm|gru|rnn_tanh|rnn_relu)(?:_cell)?$",
    ),
    ("softmax", r"softmax"),
    ("norm", r"layer_norm|rms_norm|batch_norm|group_norm|instance_norm"),
    ("convolution", r"conv(?:olution)?\d?d?|thnn_conv|mkldnn_convolution"),
    ("embedding", r"embedding"),
    ("optimizer", r"_foreach|_fused_adam|_fused_sgd|fused_adagrad"),
    ("random", r"dropout|bernoulli|normal_?$|uniform_?$|rand|multinomial|exponential_$"),
    ("sort", r"^sort|topk|argsort|unique|msort"),
    ("index", r"index|gather|scatter|take|masked_select|nonzero|one_hot"),
    (
        "copy",
        r"^copy_?$|^_to_copy$|^to$|contiguous|clone|^cat$|^stack$|repeat|^fill_diagonal|_copy$|^pad$|constant_pad",
    ),
    (
        "reduction",
        r"^(?:sum|mean|amax|amin|max|min|norm|linalg_vector_norm|prod|var|std|any|all|argmax|argmin|cumsum|logsumexp|_local_scalar_dense|item|avg_pool|max_pool)",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _OPERATORS)


def classify_operator(name: str) -> KernelClass:
    bare = name.rpartition("::")[2].partition(".")[0].casefold()
    for kind, pattern in _COMPILED:
        if pattern.search(bare):
            return kind
    return "elementwise" if name.startswith("aten::") else "other"


# What a name says, as columns of kernels; null if it does not say. An operator's name only says its class.
NAME_COLUMNS = {
    "class": pl.String,
    "short": pl.String,  # a short, readable name
    "is_cast": pl.Boolean,
    "library": pl.String,
    "dtype": pl.String,  # of the arithmetic
    "tensor_cores": pl.Boolean,
    "tile_m": pl.Int64,
    "tile_n": pl.Int64,
    "is_fused": pl.Boolean,  # by a compiler
}


def classify(kernels: pl.DataFrame) -> pl.DataFrame:
    """Add `NAME_COLUMNS`. Each distinct name is decoded once."""
    distinct = kernels.select("name", host=pl.col("kind") == "cpu").unique()
    rows = [(name, on_host, *_read(name, on_host=on_host)) for name, on_host in distinct.iter_rows()]
    known = pl.DataFrame(rows, schema={"name": pl.String, "host": pl.Boolean, **NAME_COLUMNS}, orient="row")
    return (
        kernels.with_columns(host=pl.col("kind") == "cpu")
        .join(known, on=["name", "host"], how="left", maintain_order="left")
        .drop("host")
    )


def _read(name: str, *, on_host: bool) -> tuple[str | int | bool | None, ...]:
    if on_host:
        return classify_operator(name), name, False, None, None, None, None, None, False
    decoded = decode(name)
    tile = decoded.tile or (None, None)
    return (
        decoded.kernel_class,
        decoded.short,
        decoded.is_cast,
        decoded.library,
        decoded.dtype,
        decoded.tensor_cores,
        tile[0],
        tile[1],
        bool(decoded.fused),
    )


def describe_kernel(name: str, *, on_host: bool = False) -> str:
    """Return the recorded name, its decoded fields, and notes, as lines. Computed on demand: the text is long, and only
    few names of a recording are shown."""
    recorded = cut_name(name)
    if on_host:  # an operator's name is its own description
        return recorded
    told = describe(decode(name))
    fields = "; ".join(f"{row[0]}".removeprefix("= ") + f": {row[1]}" for row in told.rows if row[2] not in _SAID)
    return "\n".join((recorded, fields, *told.notes))


def cut_name(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}… ({len(name):,} characters)"
