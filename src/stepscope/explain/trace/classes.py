"""The class of what ran: by the kernel's name on a GPU, by the operator's on a CPU."""

import re

import polars as pl

from stepscope.explain.kernel_names import KernelClass, decode

# Operators by what they do; the first pattern that fits counts. Names without their namespace and overload.
_OPERATORS: tuple[tuple[KernelClass, str], ...] = (
    ("communication", r"c10d|nccl|gloo|all_?reduce|all_?gather|reduce_scatter|broadcast_$"),
    ("attention", r"scaled_dot_product|flash_attention|efficient_attention"),
    ("loss", r"cross_entropy|nll_loss|log_softmax|mse_loss|l1_loss|kl_div|binary_cross_entropy|huber|ctc_loss"),
    (
        "gemm",
        r"^_?(?:add)?(?:mm|bmm|baddbmm|addmv|mv|dot|vdot|linear|matmul|addmm|addbmm)(?:_|$)|mkldnn_linear|_scaled_mm|sgemm",
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


def classify(kernels: pl.DataFrame) -> pl.DataFrame:
    """Adds `class`, `short` (a name for people) and `is_cast`. Each distinct name is looked at once."""
    rows = []
    for name, on_host in kernels.select("name", pl.col("kind") == "cpu").unique().iter_rows():
        if on_host:
            rows.append((name, on_host, classify_operator(name), name, False))
        else:
            decoded = decode(name)
            rows.append((name, on_host, decoded.kernel_class, decoded.short, decoded.is_cast))
    schema = {"name": pl.String, "host": pl.Boolean, "class": pl.String, "short": pl.String, "is_cast": pl.Boolean}
    known = pl.DataFrame(rows, schema=schema, orient="row")
    return (
        kernels.with_columns(host=pl.col("kind") == "cpu")
        .join(known, on=["name", "host"], how="left", maintain_order="left")
        .drop("host")
    )
