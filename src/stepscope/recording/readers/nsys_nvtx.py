"""Read NVTX ranges: operators if PyTorch wrote them, and named ranges of CPU time otherwise.

With `torch.autograd.profiler.emit_nvtx` (or `nsys profile --pytorch autograd-nvtx`) every operator is a range whose
text has fields in a fixed order. All but the name may be missing:

    aten::mm, seq = 12, op_id = 34, sizes = [[2, 3], [3, 4]], input_op_ids = [(31,0), (0,-1)]

`seq` is the autograd node that the operator created, or, in the backward pass, the node that is evaluated:

    autograd::engine::evaluate_function: MmBackward0, op_id = 56
      MmBackward0, seq = 12, op_id = 57, sizes = [[2, 4]]
        aten::mm, op_id = 58, sizes = [[3, 2], [2, 4]]

Nodes are numbered per thread, and the text does not name the thread. It is found here: the thread whose operators
created a node with that number.
"""

import polars as pl

from stepscope.recording import EVALUATE
from stepscope.recording.readers.nsys_database import Database, drop_invalid, latest
from stepscope.units import count_noun

# Push/pop and start/end, from the program itself and imported from text files.
_RANGE_TYPES = (59, 60, 70, 71)
_MADE_BY_PYTORCH = r", (seq|op_id) = \d+"
_PARTS = (
    r"(?s)^(?P<name>.*?)(?:, seq = (?P<sequence>\d+))?(?:, op_id = \d+)?"
    r"(?:, sizes = (?P<shapes>[\[\]0-9, -]*)…?)?(?:, input_op_ids = .*)?$"
)
_SHAPES = r"^\[(\[[0-9, -]*\](, )?)*\]$"
# `record_function` has the same form, but no node and no operator name. Operator names have a namespace, except for
# `detach`, which is older than namespaces.
_OPERATOR = r"::|^detach_?$|Backward\d*$"
_EVALUATES = rf"^{EVALUATE}|Backward\d*$"
_THREAD = ["process", "thread"]


def read_nvtx(
    database: Database, strings: pl.DataFrame, last_ns: int, notes: list[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return operators and other ranges. A range that was open when the recording stopped ends at `last_ns`, or at the
    last NVTX event if that is later."""
    frame = _read_ranges(database, strings)
    if still_open := frame["end_ns"].null_count():
        notes.append(
            f"{count_noun(still_open, 'NVTX range was', 'NVTX ranges were')} still open when the recording stopped"
        )
        last_ns = max(last_ns, latest(frame["start_ns"], frame["end_ns"]))
    frame = drop_invalid(
        "ranges", frame.with_columns(pl.col("end_ns").fill_null(last_ns)), ("NVTX range", "NVTX ranges"), notes
    )
    from_pytorch = frame["name"].str.contains(_MADE_BY_PYTORCH)
    parsed = _parse(frame.filter(from_pytorch).rename({"name": "text"}))
    is_operator = pl.col("sequence").is_not_null() | pl.col("name").str.contains(_OPERATOR)
    ops, unmatched = _find_backward(parsed.filter(is_operator))
    if unmatched:
        bare = count_noun(unmatched, "backward operator has", "backward operators have")
        notes.append(f"{bare} no unique forward operator in this file")
    others = parsed.filter(~is_operator).select(frame.columns)
    ranges = pl.concat([frame.filter(~from_pytorch), others]).sort("start_ns", maintain_order=True)
    return ops, ranges.with_columns(pl.lit("nvtx").alias("source"))


def _read_ranges(database: Database, strings: pl.DataFrame) -> pl.DataFrame:
    types = ", ".join(map(str, _RANGE_TYPES))
    found = database.fetch(
        "NVTX_EVENTS", ["start", "end", "textId", "globalTid"], ["text"], where=f"WHERE eventType IN ({types})"
    )
    found = found.join(strings.rename({"id": "textId", "value": "registered"}), on="textId", how="left")
    return found.select(
        pl.coalesce("text", "registered", pl.lit("(unnamed)")).alias("name"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
        (pl.col("globalTid") // 2**24 & 0xFFFFFF).alias("process"),
        (pl.col("globalTid") & 0xFFFFFF).alias("thread"),
    )


def _parse(frame: pl.DataFrame) -> pl.DataFrame:
    """Split PyTorch's texts into their fields. Truncated shapes are null."""
    shapes = pl.col("shapes")
    return (
        frame.with_columns(pl.col("text").str.extract_groups(_PARTS).alias("parts"))
        .unnest("parts")
        .with_columns(
            pl.coalesce("name", "text").alias("name"),
            pl.col("sequence").cast(pl.Int64, strict=False),
            pl.when(shapes.str.contains(_SHAPES)).then(shapes).alias("shapes"),
        )
        .drop("text")
    )


def _find_backward(ops: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return `ops` with `forward_thread`, and the number of backward operators whose node has no unique forward
    operator."""
    ops = _number_evaluations(ops)
    ops = ops.with_columns(pl.col("name").str.contains(_EVALUATES).alias("evaluates")).with_row_index("row")
    ops = _find_evaluated(ops)
    ops = ops.join(_forward_threads(ops), on="row", how="left", maintain_order="left")
    lost = pl.col("backward") & pl.col("forward_thread").is_null()
    unmatched = ops.filter(lost & pl.col("sequence").is_not_null()).height
    # A node number without a thread would look like an operator that created the node.
    ops = ops.with_columns(pl.when(~lost).then("sequence").alias("sequence"))
    return ops.select("name", "start_ns", "end_ns", *_THREAD, "sequence", "forward_thread", "shapes"), unmatched


def _find_evaluated(ops: pl.DataFrame) -> pl.DataFrame:
    """Mark the operators that are `backward`, with the node that they evaluate as `sequence`. Everything that runs
    inside the evaluation of a node belongs to it, except operators that create nodes and what runs inside those: they
    are a forward pass that activation checkpointing runs again."""
    own, is_aten = pl.col("sequence"), pl.col("name").str.starts_with("aten::")
    ops = _join_around(ops, ops.filter("evaluates"), "evaluation")
    is_node = pl.col("evaluates") | (own.eq(pl.col("evaluation")) & ~is_aten).fill_null(value=False)
    makers = ops.filter(own.is_not_null() & ~is_node).drop("evaluation", "outer_evaluation", "in_evaluation")
    ops = _join_around(ops, makers, "maker").with_columns(
        (is_node | (own.is_null() & pl.col("in_evaluation") & ~pl.col("in_maker"))).alias("backward"),
        # A backward pass inside a backward pass runs nodes that this thread created.
        pl.col("outer_evaluation").ne(pl.coalesce(own, "evaluation")).fill_null(value=False).alias("nested"),
    )
    return ops.with_columns(
        pl.when(pl.col("backward") & own.is_null()).then("evaluation").otherwise(own).alias("sequence")
    )


def _join_around(ops: pl.DataFrame, others: pl.DataFrame, name: str) -> pl.DataFrame:
    """For each operator, find the innermost of `others` that contains it, possibly itself: its number as `name`, that
    of the outermost as `outer_name`, and whether there is one as `in_name`."""
    others = others.select(*_THREAD, "start_ns", pl.col("end_ns").alias("until"), pl.col("sequence").alias("number"))
    before = pl.col("until").cum_max().shift(1).over(_THREAD)
    outermost = others.filter(before.is_null() | (pl.col("start_ns") >= before))
    # The ranges of a thread are nested or disjoint. The last one to start contains the operator or has ended; in that
    # case only ranges that contain both can contain it, and the outermost of them is used.
    outermost = outermost.rename({"until": "outer_until", "number": "outer_number"})
    for found in (others, outermost):
        ops = ops.join_asof(found, on="start_ns", by=_THREAD, strategy="backward", check_sortedness=False)
    inner = (pl.col("until") >= pl.col("end_ns")).fill_null(value=False)
    outer = (pl.col("outer_until") >= pl.col("end_ns")).fill_null(value=False)
    return ops.with_columns(
        pl.when(inner).then("number").when(outer).then("outer_number").alias(name),
        pl.when(outer).then("outer_number").alias(f"outer_{name}"),
        (inner | outer).alias(f"in_{name}"),
    ).drop("until", "number", "outer_until", "outer_number")


def _number_evaluations(ops: pl.DataFrame) -> pl.DataFrame:
    """Number evaluations without a number: they get that of the node inside, which has the name after the colon."""
    node = pl.col("name").str.strip_prefix(EVALUATE).alias("node_name")
    nodes = ops.filter(pl.col("sequence").is_not_null()).select(
        *_THREAD, "start_ns", node, pl.col("end_ns").alias("node_end"), pl.col("sequence").alias("number")
    )
    ops = ops.with_columns(node).join_asof(
        nodes, on="start_ns", by=[*_THREAD, "node_name"], strategy="forward", check_sortedness=False
    )
    inside = pl.col("name").str.starts_with(EVALUATE) & (pl.col("node_end") <= pl.col("end_ns"))
    return ops.with_columns(pl.coalesce("sequence", pl.when(inside).then("number")).alias("sequence")).drop(
        "node_name", "node_end", "number"
    )


def _forward_threads(ops: pl.DataFrame) -> pl.DataFrame:
    """For each backward operator, find the thread that created its node: the only other thread with a node of this
    number, or its own thread. With several other threads it is unknown."""
    numbered = ops.filter(pl.col("sequence").is_not_null())
    makers = (
        numbered.filter(~pl.col("backward"))
        .select("process", "sequence", pl.col("thread").alias("forward_thread"))
        .unique(maintain_order=True)
    )
    pairs = numbered.filter("backward").select("row", *_THREAD, "sequence", "nested")
    pairs = pairs.join(makers, on=["process", "sequence"])
    is_other = pl.col("forward_thread") != pl.col("thread")
    chosen = pairs.group_by("row").agg(
        is_other.sum().alias("others"),
        pl.col("forward_thread").filter(is_other).first().alias("other"),
        pl.col("forward_thread").filter(~is_other).first().alias("own"),
        pl.col("nested").first(),
    )
    prefers_own = pl.col("own").is_not_null() & (pl.col("nested") | (pl.col("others") == 0))
    thread = pl.when(prefers_own).then("own").when(pl.col("others") == 1).then("other")
    return chosen.select("row", thread.alias("forward_thread"))
