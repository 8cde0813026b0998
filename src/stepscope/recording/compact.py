"""A recording of one rank of many, without what no figure of a page over ranks reads.

Most of a recording is the times of operators and of calls to the driver, four bytes each however they are compressed.
Few of them matter: an operator counts if it launches something, creates an autograd node, or runs when the device
becomes idle, and a call if it launches something or waits. That leaves about half of both, and two thirds of the bytes.
Text (shapes, arguments, strides) is a tenth, because it repeats, and names the kernels of the shown rank, so it stays.
Kernels, ranges and steps stay as they are.
"""

from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stepscope.recording.store import Recording

# Calls that do not launch anything and still count: waits, copies, captures of graphs.
_READ_CALLS = r"(?i)launch|synchronize|memcpy|memset|capture|graph|profiler|cupti"
# Operators that count by name, whatever they launch: gradient scaling, input, compiled regions, communication.
_READ_OPS = (
    r"(?i)_amp_|compiled|stack|load|batch|collate|optimizer|ddp|fsdp|c10d|nccl|gloo|reducer|attention|softmax"
    r"|aten::(?:item|_local_scalar_dense|to|_to_copy|copy_|nonzero|is_nonzero|equal)$"
)
_LONG_NS = 50_000  # a longer operator may be what the CPU did while the device was idle
_GAP_NS = 1_000  # on a device, before which the CPU's operator is named
Ints = NDArray[np.int64]
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


def _idle_since(kernels: pl.DataFrame) -> Ints:
    """When each gap on a device begins, and when the recording of the device does."""
    begins = []
    for device in kernels.sort("start_ns").partition_by("process", "device"):
        starts, reached = device["start_ns"].to_numpy(), np.maximum.accumulate(device["end_ns"].to_numpy())
        begins.append(reached[:-1][starts[1:] - reached[:-1] >= _GAP_NS])
        begins.append(reached[-1:])
    return np.concatenate([np.empty(0, np.int64), *begins])


def _read_ops(recording: Recording, launches: pl.DataFrame) -> pl.DataFrame:
    ops, idle = recording.ops, _idle_since(recording.kernels)
    around = np.zeros(ops.height, dtype=np.bool_)  # a call that counts, or the beginning of a gap on a device
    calls = launches.select(*_THREAD, "start_ns").partition_by(_THREAD, as_dict=True)
    rows = ops.with_row_index("row").select("row", *_THREAD, "start_ns", "end_ns").partition_by(_THREAD, as_dict=True)
    for thread, own in rows.items():
        here = [calls[thread]["start_ns"].to_numpy()] if thread in calls else []
        moments = np.sort(np.concatenate([idle, *here]))
        first = np.searchsorted(moments, own["start_ns"].to_numpy(), side="left")
        last = np.searchsorted(moments, own["end_ns"].to_numpy(), side="right")
        around[own["row"].to_numpy()] = last > first
    lasting = pl.col("end_ns") - pl.col("start_ns") >= _LONG_NS
    has_node = pl.col("sequence").is_not_null() | pl.col("forward_thread").is_not_null()
    return ops.filter(pl.Series(around) | has_node | lasting | _is_named(ops, _READ_OPS))
