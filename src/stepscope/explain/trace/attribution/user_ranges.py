"""The ranges that people put around their code with `record_function` or NVTX: where each one is nested, and what its
name says about modules and the parts of attention. (What it says about phases is in `phases`.)"""

import polars as pl

from stepscope.explain.trace.attribution.modules import join_ancestors

BETWEEN = "\x1f"  # between the names of nested ranges
PARTS = ("scores", "softmax", "values")
# Ranges of PyTorch, its compiler and libraries, and those with which stepscope names modules, phases and steps.
_NOT_FROM_USERS = (
    r"^(?:module:|phase:|part:|sync:|ProfilerStep#|Optimizer\.|nccl|gloo:|record_param_comms|## Call CompiledFxGraph"
    r"|Torch-Compiled Region|CompiledFunction|AOTDispatcher|AOTAutograd|TorchDynamo|Pregraph bytecode|PyTorch Profiler"
    r"|enumerate\(DataLoader\)|DistributedDataParallel\.|FullyShardedDataParallel\.|Inductor|cu[A-Z]|cuda[A-Z]|cublas"
    r"|cudnn|\w+::)"
)
_STEP = r"(?i)^(?:step|iteration|iter)[:_ ]?\d+$"
# Pipeline codes mark the forward pass, the gradients of inputs and those of weights: `mlp(F)`, `mlp(B)`, `mlp(W)`.
_PASS = r"\s*\([FBW]\)\s*$"
_BACKWARD_PASS = r"\([BW]\)\s*$"
_LAYER = r"(?i)^(?:(?:transformer|decoder|encoder)[ _.]?)?(?:layer|block)[ _.:#-]*(\d{1,4})$"
_FORWARD_OF = r"^#*\s*forward:\s*([^#]+?)\s*#*$"
_PART_NAMES = (
    ("softmax", r"(?i)^(?:\w+ing |attn[ _]|attention[ _])?softmax$"),
    (
        "scores",
        r"(?i)^(?:\w+ing )?(?:attention|attn)[ _](?:scores?|logits)$|^scores?$|^q ?@ ?k"
        r"|^qk(?:t|\^t)?[ _]?(?:matmul|mm|scores?)?$",
    ),
    (
        "values",
        r"(?i)^final[ _]matmul$|^(?:attn|attention|softmax|weights|probs|p|a) ?[@x*] ?v(?:alues?)?$"
        r"|^(?:av|pv|sv)[ _]?(?:matmul|mm)$|^(?:attention|attn)[ _](?:values?|output[ _]matmul)$",
    ),
)


def find_user_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the ranges that users put there, with the `module` and the `part` of attention that their names say, if
    any. Each distinct name is read once."""
    theirs = ranges.filter(pl.col("source").is_in(["user", "nvtx"]))
    names = theirs.select(pl.col("name").unique())
    names = names.filter(~pl.col("name").str.contains(_NOT_FROM_USERS) & ~pl.col("name").str.contains(_STEP))
    told = names.with_columns(module=_module_of(pl.col("name")), part=_part_of(pl.col("name")))
    return theirs.join(told, on="name", how="inner", maintain_order="left")


def range_paths(ranges: pl.DataFrame) -> pl.DataFrame:
    """Add `path`: the names of the ranges around each range and its own, outermost first."""
    return ranges.with_columns(path=join_ancestors(ranges, pl.col("name"), BETWEEN))


def _module_of(name: pl.Expr) -> pl.Expr:
    layer = pl.concat_str(pl.lit("layer."), name.str.extract(_LAYER))
    of_pass = pl.when(name.str.contains(_PASS)).then(name.str.replace(_PASS, ""))
    return pl.coalesce(layer, of_pass, name.str.extract(_FORWARD_OF))


def is_backward_pass() -> pl.Expr:
    """Whether the name of a range marks a part of backward."""
    return pl.col("name").str.contains(_BACKWARD_PASS)


def _part_of(name: pl.Expr) -> pl.Expr:
    part = pl.lit(None, pl.String)
    for label, pattern in _PART_NAMES:
        part = pl.when(name.str.contains(pattern)).then(pl.lit(label)).otherwise(part)
    return part
