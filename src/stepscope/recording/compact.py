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
_PAUSE_NS, _BEFORE_NS = 500_000, 100_000  # a long time without operators and calls, and what comes before it
_GAP_NS = 1_000  # on a device, before which the CPU's operator is named
Ints = NDArray[np.int64]
_THREAD = ["process", "thread"]


def compact(recording: Recording) -> Recording:
    """Return the recording with fewer operators and calls. Every table of `explain`, findings and the figures of ranks
    are the same."""
    if _is_of_cpu(recording):  # its operators are its kernels
        return recording
    launches = _read_calls(recording)
    ops = recording.ops.filter(_is_read(recording, launches))
    begins, ends = _find_gaps(pl.concat([frame.select("start_ns", "end_ns") for frame in (ops, launches)]))
    keeps = _is_read(recording, launches) | _touches(recording.ops, begins, ends)
    calls = recording.launches.filter(_is_call(recording) | _touches(recording.launches, begins, ends))
    return replace(recording, launches=calls, ops=recording.ops.filter(keeps))


def _find_gaps(events: pl.DataFrame) -> tuple[Ints, Ints]:
    """The long times in which nothing happens on the CPU: whatever was left out there has to come back, or a late CPU
    would seem to do nothing."""
    ordered = events.sort("start_ns")
    starts, reached = ordered["start_ns"].to_numpy(), np.maximum.accumulate(ordered["end_ns"].to_numpy())
    holes = np.flatnonzero(starts[1:] - reached[:-1] >= _PAUSE_NS)
    return reached[:-1][holes] - _BEFORE_NS, starts[1:][holes]


def _touches(frame: pl.DataFrame, begins: Ints, ends: Ints) -> pl.Series:
    """Whether each event overlaps one of these intervals, which are in order."""
    starts, stops = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    first, last = np.searchsorted(ends, starts, side="right"), np.searchsorted(begins, stops, side="left")
    return pl.Series(last > first, dtype=pl.Boolean)


def _is_of_cpu(recording: Recording) -> bool:
    return bool((recording.kernels["kind"] == "cpu").any())


def _read_calls(recording: Recording) -> pl.DataFrame:
    return recording.launches.filter(_is_call(recording))


def _is_call(recording: Recording) -> pl.Expr:
    launched = pl.col("correlation").is_in(recording.kernels["correlation"].drop_nulls().unique().implode())
    return launched.fill_null(value=False) | _is_named(recording.launches, _READ_CALLS)


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


def _is_read(recording: Recording, launches: pl.DataFrame) -> pl.Series:
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
    return ops.select(pl.Series(around) | has_node | lasting | _is_named(ops, _READ_OPS)).to_series()
