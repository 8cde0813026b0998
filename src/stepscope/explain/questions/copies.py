"""Why backward copies tensors: which autograd node launched each copy, and why such a node copies."""

import re

import polars as pl

from stepscope.explain.questions.answers import Answer, in_phases, missing, share_by, time_of, why_unknown
from stepscope.explain.trace.clock import Clock
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.findings import Column, Table
from stepscope.recording import EVALUATE
from stepscope.recording.nesting import around
from stepscope.units import count_noun, say_share, say_time

_KEY, _QUESTION = "copies", "Why does backward copy tensors?"
_COPIES = ("copy", "memcpy")
_ROWS = 12
_CASTING_OPS = ("aten::_to_copy", "aten::to")
# Operators that only perform a copy; the operators around them requested it.
_COPYING_OPS = (*_CASTING_OPS, "aten::copy_", "aten::clone", "aten::contiguous", "aten::empty_like", "aten::empty")
_CAST = "cast: a gradient is cast back to the dtype of the forward input"
_BUCKETS = "buckets: data-parallel training copies gradients into communication buckets between autograd nodes"
_AGAIN = "recomputation: activation checkpointing runs forward again, including its copies"
# By autograd node; the first matching pattern counts.
_REASONS = (
    (r"AccumulateGrad", "accumulation: a parameter's gradient is written to, or added to, its `.grad`"),
    (r"ToCopyBackward|ToBackward|^_to_copy", _CAST),
    (
        r"CloneBackward|CopyBackward|CopySlices|ContiguousBackward",
        "layout: the gradient of a contiguous copy made in forward is copied back",
    ),
    (
        r"TransposeBackward|PermuteBackward|^TBackward|MovedimBackward|ViewBackward|ReshapeAlias|UnsafeView|ReshapeBackward",
        "layout: the gradient of a transposed or reshaped tensor is made contiguous",
    ),
    (
        r"ExpandBackward|RepeatBackward|SumBackward|MeanBackward|BroadcastBackward",
        "broadcast: a gradient is summed or expanded along the dimension that forward broadcast or summed",
    ),
    (
        r"SliceBackward|SelectBackward|IndexBackward|SplitBackward|NarrowBackward|UnbindBackward|ChunkBackward|GatherBackward|PadNdBackward|AsStrided",
        "slices: the gradient of a slice is written into a tensor of the full size",
    ),
    (r"CatBackward|StackBackward", "slices: the gradient of a concatenated tensor is split"),
    (
        r"MmBackward|BmmBackward|AddmmBackward|LinearBackward|MatmulBackward|EinsumBackward",
        "layout: an operand whose strides the GEMM cannot use is made contiguous first",
    ),
    (r"Convolution|Conv", "layout: an operand of a convolution is converted to the layout its algorithm needs"),
    (r"Norm", "layout: an operand of a normalization is made contiguous or copied between buffers"),
    (r"CheckpointFunction|Checkpoint", _AGAIN),
    (r"CompiledFunction", "compiled code: a compiled kernel is named after a copy, and its operators are not recorded"),
)
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|_\d+(?=\.|$)")


def copies_in_backward(profile: Profile) -> Answer:
    backward = in_phases(profile, "backward")
    if reason := why_unknown(profile, "backward"):
        return missing(_KEY, _QUESTION, reason, "stepscope profile --mode train")
    copies = backward.filter(pl.col("class").is_in(_COPIES))
    forward = in_phases(profile, "forward")
    share, steps = time_of(copies) / max(1, time_of(backward)), profile.num_steps
    if not copies.height:
        return Answer(key=_KEY, question=_QUESTION, figure="0%", sentence="It does not: backward launches no copies.")
    explained = _explain(profile, copies)
    reasons = share_by(explained, "reason")
    first = reasons.row(0, named=True)
    before = time_of(forward.filter(pl.col("class").is_in(_COPIES))) / max(1, time_of(forward))
    words = share_by(explained.with_columns(word=pl.col("reason").str.extract(r"^([^:]+)")), "word")
    said = ", ".join(f"{row['word']} {say_share(row['share'])}" for row in words.head(3).iter_rows(named=True))
    count = count_noun(copies.height / steps, f"copy {kernel_word(profile)}")
    sentence = (
        f"{_say_first(first['reason'])}. {count} {profile.clock.say_per_step}, {say_time(time_of(copies) / steps)}, "
        f"{say_share(share)} of backward (copies take {say_share(before)} of forward): {said}"
    )
    return Answer(
        key=_KEY,
        question=_QUESTION,
        figure=f"{say_share(share)} of backward",
        sentence=sentence + ".",
        evidence=_table(explained, profile.clock),
    )


def _say_first(reason: str) -> str:
    word, _, why = reason.partition(": ")
    return f"The main cause is unknown ({why})" if word == "unknown" else f"Mostly because {why}"


def _explain(profile: Profile, copies: pl.DataFrame) -> pl.DataFrame:
    """Adds `node` and `reason`."""
    at = copies.select("process", "thread", ns="launch_ns")
    names = profile.recording.ops["name"]
    node, copier, asker = (
        around(profile.recording.ops.filter(chosen), "name", at)
        for chosen in (names.str.starts_with(EVALUATE), names != "aten::copy_", ~names.is_in(_COPYING_OPS))
    )
    framed = copies.with_columns(
        node=node.str.strip_prefix(EVALUATE),
        asked=asker.str.strip_prefix(EVALUATE),
        cast=pl.col("is_cast").fill_null(value=False) | copier.is_in(_CASTING_OPS).fill_null(value=False),
    )
    # Hooks that exchange gradients run between nodes, on the autograd thread.
    exchanging = bool((profile.kernels["class"] == "communication").any())
    hooked = pl.col("node").is_null() & (pl.col("op") == "aten::copy_") & pl.lit(exchanging)
    wanted = framed.select("node", "op", "asked", "cast", "recomputed", "name", "launched")
    reason = pl.Series([explain_copy(**row) for row in wanted.iter_rows(named=True)], dtype=pl.String)
    return framed.with_columns(reason=pl.when(hooked).then(pl.lit(_BUCKETS)).otherwise(reason))


def explain_copy(
    *,
    name: str,
    node: str | None = None,  # the autograd node under evaluation
    op: str | None = None,
    asked: str | None = None,  # the innermost enclosing operator that does more than copy
    cast: bool = False,
    recomputed: bool | None = None,
    launched: str = "op",
) -> str:
    if recomputed:
        return _AGAIN
    if cast:
        return _CAST
    for pattern, reason in _REASONS:
        if node and re.search(pattern, node):
            return reason
    if "HtoD" in name or "DtoH" in name:
        return "transfer: data moves between CPU and GPU memory"
    if op and re.search(r"c10d|all_?reduce|reduce_scatter|bucket", op):
        return "communication: gradients are copied into and out of buckets"
    if launched == "graph":
        return "unknown: launched by a CUDA graph, which records no autograd nodes"
    if node and asked == "aten::pow":
        return "powers: the gradient of a square needs the first power, which is a copy"
    if node and asked and re.search(r"masked_fill|index_fill|index_put|scatter|fill$", asked):
        return "in place: a gradient is copied before a part of it is overwritten"
    if op and not node:
        return f"unknown: launched by {op} outside any autograd node"
    return f"unknown: launched for {asked or node} in {node}" if node else "unknown: the launch was not recorded"


def _table(explained: pl.DataFrame, clock: Clock) -> Table:
    steps = clock.num_steps
    named = explained.with_columns(
        where=pl.col("module").map_elements(lambda path: _LAYER.sub("*", path), return_dtype=pl.String),
        node=pl.col("node").str.replace(r"^torch::autograd::", ""),
    )
    groups = share_by(named, "reason", "op", "node", "where")
    rows = [
        (
            row["reason"].partition(": ")[0],
            row["op"],
            row["node"],
            row["where"],
            row["count"] / steps,
            row["time_ns"] / steps / 1e6,
            row["share"],
        )
        for row in groups.head(_ROWS).iter_rows(named=True)
    ]
    notes = list(dict.fromkeys(groups["reason"]))
    if groups.height > _ROWS:
        notes.append(f"{count_noun(groups.height - _ROWS, 'smaller row')} not shown")
    return Table(
        title=f"Copies in backward, {clock.say_per_step}",
        columns=(
            Column(key="reason", label="reason"),
            Column(key="op", label="operator"),
            Column(key="node", label="autograd node"),
            Column(key="module", label="module"),
            Column(key="per_step", label="calls", kind="number"),
            Column(key="per_step_ms", label="time", kind="ms"),
            Column(key="share", label="of copies", kind="share"),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )
