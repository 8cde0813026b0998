"""Evidence files that can be edited kernel by kernel: Nsight Compute CSV, and traces of PyTorch's profiler.

A forger knows the formats. Numbers that a file repeats (a grid has seven columns in a CSV) are changed everywhere, so
that no forgery is detected only because it was careless. Rows that are not edited keep their text.
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Triple = tuple[int, int, int]
Kind = Literal["counters", "forward trace", "training trace"]
_PARTS = ("avg", "max", "min", "sum")
_DURATION = "gpu__time_duration"
_STATISTICS = ("dram__", "lts__", "sm__inst_", "sm__ops_", "sm__sass_")
_REGISTERS, _SHARED = "launch__registers_per_thread", "launch__shared_mem_per_block"
TENSOR_OPS = "sm__ops_path_tensor_src_"
INSTRUCTIONS = "sm__inst_executed_pipe_tensor"
STORES = "sm__sass_data_bytes_mem_global_op_st"
SECTORS = "lts__t_sectors_op_write"
READS, WRITES = "dram__bytes_read", "dram__bytes_write"
VARYING = {SECTORS: 1, READS: 32, WRITES: 32}  # differ between launches of the same kernel, by multiples of this


def kind_of(path: Path) -> Kind:
    if ".csv" in path.name:
        return "counters"
    return "training trace" if ".train." in path.name else "forward trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel in a file. `number` is the ID of a row in a CSV, or the correlation of an event in a trace."""

    name: str
    grid: Triple
    block: Triple
    duration_ns: float
    start_ns: float = 0.0  # a CSV has none
    number: int
    process: int
    device: int
    stream: int
    registers: int
    shared_bytes: int
    counters: Mapping[str, float]  # sums by metric; empty in a trace
    raw: Mapping[str, Any]

    @property
    def tensor_ops(self) -> float:
        return sum(value for name, value in self.counters.items() if name.startswith(TENSOR_OPS))

    def scale(self, factor: float, *starts: str) -> "Launch":
        """Scale the counters whose names start like this."""
        changed = {name: value * factor for name, value in self.counters.items() if name.startswith(starts)}
        return replace(self, counters={**self.counters, **changed})

    def slow_down(self, factor: float) -> "Launch":
        return replace(self, duration_ns=_tick(self.duration_ns * factor))


def _tick(duration_ns: float) -> float:
    """Return a duration that the clock of a GPU can show."""
    return max(32, 32 * round(duration_ns / 32))


@dataclass(frozen=True)
class Document:
    """The kernels of a file, in launch order, and what the file has besides."""

    path: Path
    launches: tuple[Launch, ...]

    @property
    def kind(self) -> Kind:
        return kind_of(self.path)

    @property
    def file(self) -> str:
        return self.path.name.removesuffix(".gz")

    def with_launches(self, launches: Iterable[Launch]) -> "Document":
        return replace(self, launches=tuple(launches))

    def write(self) -> bytes:
        raise NotImplementedError


def read_document(path: Path) -> Document:
    text = gzip.decompress(path.read_bytes()).decode()
    return _read_counters(path, text) if ".csv" in path.name else _read_trace(path, text)


# --- Counters


@dataclass(frozen=True)
class CounterDocument(Document):
    header: tuple[str, ...]
    units: tuple[str, ...]

    def write(self) -> bytes:
        written = io.StringIO()
        writer = csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerow(self.units)
        for one in self.launches:
            row = _counter_row(one)
            writer.writerow([row.get(column, "") for column in self.header])
        return written.getvalue().encode()


def _read_counters(path: Path, text: str) -> CounterDocument:
    header, units, *rows = csv.reader(io.StringIO(text))
    launches = tuple(_read_counter_row(dict(zip(header, row, strict=True))) for row in rows)
    return CounterDocument(path, launches, tuple(header), tuple(units))


def _read_counter_row(row: Mapping[str, str]) -> Launch:
    counters = {
        name.removesuffix(".sum"): _number(row[name])
        for name in row
        if name.startswith(_STATISTICS) and name.endswith(".sum") and row[name]
    }
    return Launch(
        name=row["Kernel Name"],
        grid=_triple(row["Grid Size"]),
        block=_triple(row["Block Size"]),
        duration_ns=_number(row[f"{_DURATION}.sum"]),
        number=int(row["ID"]),
        process=int(row["Process ID"]),
        device=int(row["Device"]),
        stream=int(row["Stream"]),
        registers=int(_number(row[_REGISTERS])),
        shared_bytes=int(_number(row[f"{_SHARED}_static"]) + _number(row[f"{_SHARED}_dynamic"])),
        counters=counters,
        raw=row,
    )


def _counter_row(launch: Launch) -> dict[str, str]:
    row = dict(launch.raw)
    before = _read_counter_row(row)
    row |= {"Kernel Name": launch.name, "ID": str(launch.number), "Process ID": str(launch.process)}
    row |= {"Stream": str(launch.stream), "launch__stream_id": str(launch.stream)}
    row |= {"Device": str(launch.device), "launch__device_id": str(launch.device)}
    if (launch.grid, launch.block) != (before.grid, before.block):
        row |= _write_geometry(launch, before, row)
    if launch.duration_ns != before.duration_ns:
        row |= {f"{_DURATION}.{part}": _say(launch.duration_ns) for part in _PARTS}
    if launch.registers != before.registers:
        row |= {
            _REGISTERS: _say(launch.registers),
            f"{_REGISTERS}_allocated": _say(8 * math.ceil(launch.registers / 8)),
        }
    if launch.shared_bytes != before.shared_bytes:
        for column in (f"{_SHARED}_dynamic", _SHARED, f"{_SHARED}_allocated"):
            row[column] = _say(_number(row[column]) + launch.shared_bytes - before.shared_bytes)
    for name, old in before.counters.items():
        if launch.counters.get(name) != old:
            row |= _write_counter(name, old, launch.counters.get(name), row)
    return row


def _write_geometry(launch: Launch, before: Launch, row: Mapping[str, str]) -> dict[str, str]:
    written = {}
    for what, sizes in (("Grid", launch.grid), ("Block", launch.block)):
        written[f"{what} Size"] = f"({', '.join(map(str, sizes))})"
        written |= {f"launch__{what.lower()}_dim_{axis}": _say(size) for axis, size in zip("xyz", sizes, strict=True)}
        written[f"launch__{what.lower()}_size"] = _say(math.prod(sizes))
    blocks = math.prod(launch.grid) / max(math.prod(before.grid), 1)
    written["launch__thread_count"] = _say(math.prod(launch.grid) * math.prod(launch.block))
    waves = "launch__waves_per_multiprocessor"
    written[waves] = _say(_number(row[waves]) * blocks)
    return written


def _write_counter(name: str, old: float, new: float | None, row: Mapping[str, str]) -> dict[str, str]:
    """Scale the average, the largest and the smallest of a counter like its sum. None removes it."""
    if new is None:
        return {f"{name}.{part}": "" for part in _PARTS}
    if not old:
        return {f"{name}.{part}": _say(new if part == "sum" else round(new / 132, 2)) for part in _PARTS}
    parts = {part: _number(row[f"{name}.{part}"]) * new / old for part in _PARTS}
    average = _number(row[f"{name}.avg"])
    units = round(old / average) if average > 0.1 else 0  # the average is rounded to two decimals
    return {f"{name}.{part}": _say(new / units if part == "avg" and units else parts[part]) for part in _PARTS}


def _number(text: str) -> float:
    return float(text.replace(",", "")) if text else 0.0


def _say(number: float) -> str:
    return f"{round(number):,}" if abs(number - round(number)) < 1e-6 else f"{number:,.2f}"


def _triple(text: str) -> Triple:
    x, y, z = map(int, text.strip("() ").split(","))
    return x, y, z


# --- Traces


@dataclass(frozen=True)
class TraceDocument(Document):
    rest: Mapping[str, Any]  # the trace without its kernels

    def write(self) -> bytes:
        events = [*map(_trace_event, self.launches), *self.rest["traceEvents"]]
        return json.dumps({**self.rest, "traceEvents": events}).encode()

    @cached_property
    def device_name(self) -> str:
        return str(self.rest["deviceProperties"][0]["name"])


def _read_trace(path: Path, text: str) -> TraceDocument:
    trace = json.loads(text)
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    others = [event for event in trace["traceEvents"] if event.get("cat") != "kernel"]
    launches = sorted(map(_read_event, kernels), key=lambda one: one.start_ns)
    return TraceDocument(path, tuple(launches), {**trace, "traceEvents": others})


def _read_event(event: Mapping[str, Any]) -> Launch:
    args = event["args"]
    return Launch(
        name=event["name"],
        grid=tuple(args["grid"]),
        block=tuple(args["block"]),
        duration_ns=1000 * event["dur"],
        start_ns=1000 * event["ts"],
        number=args["correlation"],
        process=event["pid"],
        device=args["device"],
        stream=args["stream"],
        registers=args["registers per thread"],
        shared_bytes=args["shared memory"],
        counters={},
        raw=event,
    )


def _trace_event(launch: Launch) -> dict[str, Any]:
    before = _read_event(launch.raw)
    args = dict(launch.raw["args"])
    args |= {"grid": list(launch.grid), "block": list(launch.block), "device": launch.device, "stream": launch.stream}
    args |= {"registers per thread": launch.registers, "shared memory": launch.shared_bytes}
    args |= {"correlation": launch.number, "External id": args.get("External id", 0) + launch.number - before.number}
    blocks = math.prod(launch.grid) / max(math.prod(before.grid), 1)
    for key in ("blocks per SM", "warps per SM"):
        if blocks != 1 and key in args:
            args[key] = round(args[key] * blocks, 6)
    event = {**launch.raw, "name": launch.name, "args": args, "pid": launch.process, "tid": launch.stream}
    if launch.start_ns != before.start_ns:
        event["ts"] = round(launch.start_ns / 1000, 3)
    if launch.duration_ns != before.duration_ns:
        event["dur"] = round(launch.duration_ns / 1000, 3)
    return event
