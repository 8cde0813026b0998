"""A trace for Perfetto and chrome://tracing, annotated with what stepscope found.

Kernels keep their streams and get class, phase, module, layer and step as arguments. Above them are tracks with the
phases and modules as they ran on the device, which no profiler draws. CPU ranges and operators are included.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import polars as pl

from stepscope.files import PERFETTO_MARK, check_target, replacing, writing

_DEVICE_PID, _HOST_PID = 1_000_000, 2_000_000
_DETAILS = (
    "name",
    "class",
    "phase",
    "module",
    "layer",
    "part",
    "step",
    "op",
    "launched",
    "recomputed",
    "correlation",
    "bytes",
)


def write_perfetto(
    target: Path, kernels: pl.DataFrame, ops: pl.DataFrame, ranges: pl.DataFrame, *, force: bool = False
) -> None:
    """Write `target`, gzipped if its name ends in `.gz`. Times are microseconds since the first event."""
    check_target(target, force=force, flag="--perfetto")
    origin = min(frame["start_ns"].min() for frame in (kernels, ops, ranges) if frame.height)  # type: ignore[type-var]
    assert isinstance(origin, int)
    with (
        writing(target, if_full="nothing was written", hint="--perfetto FILE_ON_ANOTHER_DISK"),
        replacing(target) as new,
        _open(new, packed=target.suffix == ".gz") as file,
    ):
        _write_events(file, _events(kernels, ops, ranges, origin))


def _open(path: Path, *, packed: bool) -> "IO[bytes] | gzip.GzipFile":
    return gzip.open(path, "wb", compresslevel=4) if packed else path.open("wb")


def _write_events(file: "IO[bytes] | gzip.GzipFile", events: Iterator[dict[str, object]]) -> None:
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ns",' + PERFETTO_MARK + b',"traceEvents":[\n')
    for number, event in enumerate(events):
        file.write((b",\n" if number else b"") + encoder.encode(event))
    file.write(b"\n]}\n")


def _events(kernels: pl.DataFrame, ops: pl.DataFrame, ranges: pl.DataFrame, origin: int) -> Iterator[dict[str, object]]:
    devices = kernels["device"].unique().sort().to_list()
    for device in devices:
        yield _name("process_name", _DEVICE_PID + (device or 0), 0, f"device {device}, annotated by stepscope")
    yield _name("process_name", _HOST_PID, 0, "CPU")
    for row in kernels.iter_rows(named=True):
        details = {key: row[key] for key in _DETAILS if row.get(key) is not None}
        pid = _DEVICE_PID + (row["device"] or 0)
        yield _span(
            row["short"], row["class"], pid, row["stream"] or 0, row["start_ns"], row["end_ns"], origin, details
        )
    for track, column in enumerate(("phase", "module"), start=1):
        yield from _tracks(kernels, column, track, origin)
    for frame, category in ((ops, "operator"), (ranges, "range")):
        for row in frame.iter_rows(named=True):
            thread = row["thread"] or 0
            yield _span(row["name"], category, _HOST_PID, thread, row["start_ns"], row["end_ns"], origin, {})


def _tracks(kernels: pl.DataFrame, column: str, track: int, origin: int) -> Iterator[dict[str, object]]:
    """Merge consecutive kernels of one phase or module on a stream into one span."""
    for (device, stream), group in kernels.sort("start_ns").partition_by("device", "stream", as_dict=True).items():
        pid, tid = _DEVICE_PID + (device or 0), -(10 * (stream or 0) + track)
        yield _name("thread_name", pid, tid, f"{column}, stream {stream}")
        runs = group.with_columns(run=pl.col(column).ne_missing(pl.col(column).shift()).cum_sum())
        spans = runs.group_by("run", maintain_order=True).agg(
            pl.col(column).first(), pl.col("start_ns").min(), pl.col("end_ns").max(), count=pl.len()
        )
        last_end = None
        for row in spans.filter(pl.col(column).is_not_null()).iter_rows(named=True):
            start = row["start_ns"] if last_end is None else max(row["start_ns"], last_end)
            last_end = max(row["end_ns"], start)
            details = {"kernels": row["count"]}
            yield _span(row[column], column, pid, tid, start, last_end, origin, details)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(
    name: str, category: str, pid: int, tid: int, start: int, end: int, origin: int, details: dict[str, object]
) -> dict[str, object]:
    times = {"ts": (start - origin) / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": details}
