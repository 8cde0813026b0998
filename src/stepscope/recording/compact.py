"""A recording of one rank of many, without what no figure of a page over ranks reads.

Most of a recording is the times of operators and of calls to the driver, four bytes each however they are compressed.
Few of them matter: an operator that launches nothing and creates no autograd node is read by nothing but the timeline's
tooltips, and neither is a call that launches nothing and does not wait. Text (shapes, arguments, strides) is a tenth,
because it repeats, and names the kernels of the shown rank, so it stays. Kernels, ranges and steps stay as they are.
"""

from dataclasses import replace

import numpy as np
import polars as pl

from stepscope.recording.store import Recording

# Calls that do not launch anything and still count: waits, copies, captures of graphs.
_READ_CALLS = r"(?i)launch|synchronize|memcpy|memset|capture|graph|profiler|cupti"
# Operators that count by name, whatever they launch: gradient scaling, input, compiled regions, communication.
_READ_OPS = (
    r"(?i)_amp_|compiled|stack|load|batch|collate|optimizer|ddp|fsdp|c10d|nccl|gloo|reducer|attention|softmax"
    r"|aten::(?:item|_local_scalar_dense|to|_to_copy|copy_|nonzero|is_nonzero|equal)$"
)
_LONG_NS = 50_000  # a longer operator may be what the CPU did while the device was idle
_THREAD = ["process", "thread"]


def compact(recording: Recording) -> Recording:
    """Return the recording with fewer operators and calls. Every table of `explain`, findings and the figures of ranks
    are the same."""
    launches = _read_calls(recording)
    # A CPU's operators are its kernels.
    ops = recording.ops if _is_of_cpu(recording) else _read_ops(recording, launches)
    return replace(recording, launches=launches, ops=ops)


def _is_of_cpu(recording: Recording) -> bool:
    return bool((recording.kernels["kind"] == "cpu").any())


def _read_calls(recording: Recording) -> pl.DataFrame:
    launched = pl.col("correlation").is_in(recording.kernels["correlation"].drop_nulls().unique().implode())
    return recording.launches.filter(launched.fill_null(value=False) | _is_named(recording.launches, _READ_CALLS))


def _is_named(frame: pl.DataFrame, pattern: str) -> pl.Expr:
    """Each distinct name is matched once."""
    names = frame["name"].unique()
    return pl.col("name").is_in(names.filter(names.str.contains(pattern)).implode())


def _read_ops(recording: Recording, launches: pl.DataFrame) -> pl.DataFrame:
    ops = recording.ops
    launching = np.zeros(ops.height, dtype=np.bool_)
    calls = launches.select(*_THREAD, "start_ns").partition_by(_THREAD, as_dict=True)
    rows = ops.with_row_index("row").select("row", *_THREAD, "start_ns", "end_ns").partition_by(_THREAD, as_dict=True)
    for thread, own in rows.items():
        if thread in calls:
            starts = np.sort(calls[thread]["start_ns"].to_numpy())
            first, last = (np.searchsorted(starts, own[edge].to_numpy(), side=side) for edge, side in (("start_ns", "left"), ("end_ns", "right")))
            launching[own["row"].to_numpy()] = last > first
    lasting = pl.col("end_ns") - pl.col("start_ns") >= _LONG_NS
    has_node = pl.col("sequence").is_not_null() | pl.col("forward_thread").is_not_null()
    return ops.filter(pl.Series(launching) | has_node | lasting | _is_named(ops, _READ_OPS))
