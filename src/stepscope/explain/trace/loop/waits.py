"""Where the CPU waits for the GPU: calls that synchronize, and copies that return when they are done."""

import polars as pl

from stepscope.explain.trace.attribution.phases import named_ranges
from stepscope.explain.trace.loop.source_lines import find_sources
from stepscope.explain.trace.profile import Profile
from stepscope.recording.nesting import around, innermost, look_up
from stepscope.recording.store import Recording

SYNC_RANGE = "sync:"  # a range around a call that the user made to wait
_SYNCHRONISE = r"(?i)(?:Stream|Device|Event|Ctx)Synchronize"
_COPY_CALL = r"(?i)^(?:cuda|hip|cu)Memcpy"
_BLOCKING_COPY = r"(?i)DtoH|Pageable"
_TO_HOST, _FROM_PAGEABLE = r"(?i)DtoH", r"(?i)HtoD.*Pageable|Pageable.*(?:-> ?Device|to device)"
LEAST_WAIT_NS = 10_000
# What waits, by operator, then by call.
_OPERATORS = (
    (".item()", r"_local_scalar_dense|::item$|::is_nonzero$"),
    ("torch.equal", r"::equal$"),
    ("nonzero", r"::nonzero"),
    ("masked_select", r"::masked_select"),
    ("boolean mask", r"::index(?:_put_?)?$|::_index_put_impl_$"),
    ("unique", r"::_?unique"),
    ("repeat_interleave", r"::repeat_interleave"),
)
_CALLS = (
    ("torch.cuda.synchronize", r"(?i)(?:Device|Ctx)Synchronize"),
    ("Event.synchronize", r"(?i)EventSynchronize"),
    ("Stream.synchronize", r"(?i)StreamSynchronize"),
)
TO_HOST, FROM_PAGEABLE = "copy to the CPU", "copy from pageable memory"


def waiting_calls(recording: Recording, kernels: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    """Return the launches in a window that waited for `kernels` of one or more devices. Short calls do not count as
    waits."""
    process = kernels["process"].drop_nulls().unique().to_list()
    copies = kernels.filter(pl.col("name").str.contains(_BLOCKING_COPY))
    is_copy = pl.col("correlation").is_in(copies["correlation"].to_list()) | ~pl.col("name").str.contains("Async")
    blocking = pl.col("name").str.contains(_SYNCHRONISE) | (pl.col("name").str.contains(_COPY_CALL) & is_copy)
    start, end = window
    lasting = pl.col("end_ns") - pl.col("start_ns") >= LEAST_WAIT_NS
    inside = (pl.col("end_ns") > start) & (pl.col("start_ns") < end)
    ours = pl.col("process").is_in(process) | pl.lit(not process)
    # Match names last: a pattern over all calls of a long recording takes longer than everything else here.
    return recording.launches.filter(lasting & inside & ours).filter(blocking)


def find_lines(recording: Recording, points: pl.DataFrame) -> pl.Series:
    """Return the line of code that waits at each moment: that of the range around the wait, or of the operator."""
    explicit = recording.ranges.filter(pl.col("name").str.starts_with(SYNC_RANGE))
    line = around(explicit, "source_line", points)
    return line.zip_with(line.is_not_null(), find_sources(recording, points))


def locate_waits(profile: Profile, window: tuple[int, int]) -> pl.DataFrame:
    """Return the waits in a window with the operator that waits (`op_row`, `op`), `what` it is, its `line` of code and
    its `phase`. Calls of one operator, such as a copy and the wait for it, have one `op_row`."""
    recording = profile.recording
    calls = waiting_calls(recording, profile.kernels, window)
    points = calls.select("process", "thread", ns="start_ns")
    rows = innermost(recording.ops, points)
    explicit = recording.ranges.filter(pl.col("name").str.starts_with(SYNC_RANGE))
    told = around(explicit, "name", points).str.strip_prefix(SYNC_RANGE)
    named = around(named_ranges(recording.ranges), "phase", points, by_thread=False)
    located = calls.with_columns(
        op_row=rows,
        op=look_up(recording.ops, "name", rows),
        told=told,
        line=find_lines(recording, points),
        named=named,
    )
    of_ops = profile.attribute_ops(rows)["phase"] if calls.height else named
    copies = _find_copies(profile)
    return located.join(copies, on="op_row", how="left", maintain_order="left").select(
        *calls.columns,
        "op_row",
        "op",
        what=pl.coalesce("told", _match("op", _OPERATORS), "copies", _match("name", _CALLS), "op", "name"),
        line="line",
        phase=pl.coalesce(of_ops, "named"),
    )


def _match(column: str, patterns: tuple[tuple[str, str], ...]) -> pl.Expr:
    matched = pl.lit(None, pl.String)
    for word, pattern in reversed(patterns):
        matched = pl.when(pl.col(column).str.contains(pattern)).then(pl.lit(word)).otherwise(matched)
    return matched


def _find_copies(profile: Profile) -> pl.DataFrame:
    """Return the operators that copy to the CPU, or to the GPU from memory that is not pinned: `op_row`, `copies`."""
    kernels = profile.kernels.filter((pl.col("kind") == "memcpy") & pl.col("op_row").is_not_null())
    copies = _match("name", ((TO_HOST, _TO_HOST), (FROM_PAGEABLE, _FROM_PAGEABLE)))
    known = kernels.select(pl.col("op_row").cast(pl.Int64), copies=copies).filter(pl.col("copies").is_not_null())
    return known.unique("op_row", keep="first")
