"""How long stepscope, the floor below it and HolisticTraceAnalysis take to read one large trace, on this machine.

    python bench/trace_speed.py TRACE.json.gz [--copies 35] [--peer NAME=PYTHON …] [--repeat 3] [--out FILE.jsonl]
    python bench/trace_speed.py TRACE.json.gz --bounded-gb 1 2 4 10 [--out FILE.jsonl]

The trace is multiplied first (`--copies`, shifted in time with their own ids) so that a small one becomes large. Every
tool reads the file in its own process, and all take turns, so that a busy machine slows all of them alike. Wall time,
CPU time (of all processes of a tool) and peak memory (of all its processes together, sampled) are measured from
outside.

The floor is what any reader has to do: decompress the file and parse its events into typed objects, in one process, as
fast as Python can (msgspec, without garbage collection); it keeps the objects and computes nothing. stepscope computes
the whole analysis and may use all cores. A peer is a name and the interpreter of an environment that has it:
`hta-0.5.0=/path/to/python`. It loads the file and breaks down its kernels once.

With `--bounded-gb`, traces of these sizes are read with `explain --bounded` instead: time per gigabyte and memory
should not depend on the size.
"""

import argparse
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

PEER = """
import sys
try:
    from hta.trace_analysis import TraceAnalysis
except ImportError:
    from traceinsight.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_temporal_breakdown(visualize=False)
"""
FLOOR = """
import gzip, sys, msgspec
class Args(msgspec.Struct, gc=False, rename={
    "sequence": "Sequence number", "forward_thread": "Fwd thread id", "shapes": "Input Dims", "dtypes": "Input type"}):
    correlation: int = -1
    sequence: int = -1
    forward_thread: int = -1
    stream: int = -1
    device: int = -1
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shapes: list | None = None
    dtypes: list[str] | None = None
class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0
    dur: float = 0
    pid: int | str = 0
    tid: int | str = 0
    id: int | str = 0
    args: Args | None = None
class Trace(msgspec.Struct):
    traceEvents: list[Event]
with gzip.open(sys.argv[1]) as file:
    assert msgspec.json.decode(file.read(), type=Trace).traceEvents
"""
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_IDS = ("correlation", "External id", "external id", "Ev Idx", "Sequence number", "Record function id")
_GAP_US = 100
# Stands for a number that differs between copies, in the text of an event.
_HOLE = 7_654_321_000_000_000
_HOLES = re.compile(rb"7654321\d{9}")


def multiply(source: Path, target: Path, *, copies: int | None = None, size: int | None = None) -> tuple[int, int, int]:
    """Write copies of the trace, one after another in time, until there are `copies` or `size` bytes of text. Return
    the number of copies, events and bytes."""
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rb") as file:
        trace = json.loads(file.read(), parse_float=Decimal)
    events = [one for one in trace.pop("traceEvents") if one.get("cat") != "Trace"]
    moving = [one for one in events if one.get("ph") != "M"]
    once = [one for one in events if one.get("ph") == "M"]
    parts, numbers, steps = _template(moving)
    written = made = 0
    # Fast compression: the time to decompress hardly depends on it.
    with gzip.open(target, "wb", compresslevel=3) as file:
        head = json.dumps(trace, default=float).encode()[:-1] + b', "traceEvents": [\n'
        written += file.write(head + b",\n".join(map(_ENCODER.encode, once)))
        while made < copies if copies is not None else written < (size or 0):
            moved = [b"%d" % (number + made * step) for number, step in zip(numbers, steps, strict=True)]
            text = [b""] * (2 * len(parts) - 1)
            text[::2], text[1::2] = parts, moved
            written += file.write((b",\n" if made or once else b"") + b"".join(text))
            made += 1
        written += file.write(b"\n]}\n")
    return made, len(once) + made * len(moving), written


def _template(events: list[dict[str, Any]]) -> tuple[list[bytes], list[int], list[int]]:
    """Return the text of the events in parts, the numbers between the parts, and how much each grows per copy."""
    timed = [one for one in events if one.get("ph") == "X"]
    span = int(max(one["ts"] + one["dur"] for one in timed) - min(one["ts"] for one in timed)) + _GAP_US
    step = max((value for one in events for value in _numbers(one)), default=0) + 1
    numbers: list[int] = []
    steps: list[int] = []

    def hole(number: int, grows: int) -> int:
        numbers.append(number)
        steps.append(grows)
        return _HOLE + len(numbers)

    texts = []
    for event in events:
        moved = {key: value for key, value in event.items() if key not in ("ts", "id", "args", "name")}
        if found := re.fullmatch(r"ProfilerStep#(\d+)", str(event.get("name", ""))):
            moved["name"] = f"ProfilerStep#{hole(int(found[1]), step)}"
        elif "name" in event:
            moved["name"] = event["name"]
        if "ts" in event:
            whole, _, fraction = str(event["ts"]).partition(".")
            moved["ts"] = Decimal(f"{hole(int(whole), span)}.{fraction or 0}")
        if "id" in event:
            moved["id"] = hole(event["id"], step) if isinstance(event["id"], int) else event["id"]
        if "args" in event:
            moved["args"] = {
                key: hole(value, step) if key in _IDS and isinstance(value, int) and 0 < value < 2**40 else value
                for key, value in (event["args"] or {}).items()
            }
        texts.append(_ENCODER.encode(moved))
    return _HOLES.split(b",\n".join(texts)), numbers, steps


def _numbers(event: dict[str, Any]) -> list[int]:
    args = event.get("args") or {}
    values = [event.get("id"), *(args.get(key) for key in _IDS)]
    return [value for value in values if isinstance(value, int) and value < 2**40]


def measure(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Return seconds of wall and CPU time, the peak memory of all processes together, and whether it succeeded."""
    # An installed package has its bytecode; some environments forbid to keep that of a checkout.
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **(environment or {})}
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
    ended = threading.Event()
    peaks = [0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peaks, ended))
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": max(usage.ru_maxrss * 1024, *peaks),
        "ok": status == 0,
    }


def _watch(pid: int, peaks: list[int], ended: threading.Event) -> None:
    while not ended.wait(0.05):
        peaks.append(sum(map(_resident_bytes, _with_children(pid))))


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # ended meanwhile
            continue
        for child in children:
            yield from _with_children(int(child))


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):  # ended meanwhile
        return 0


def compare(trace: Path, copies: int, peers: list[str], repeats: int, folder: Path) -> list[dict[str, Any]]:
    large = folder / "large.json.gz"
    _, events, size = multiply(trace, large, copies=copies)
    print(f"{size / 1e6:.0f} MB, {large.stat().st_size / 1e6:.0f} MB gzipped, {events:,} events")
    ours = [sys.executable, "-m", "stepscope", "explain", str(large), "--format", "json"]
    cache = {"STEPSCOPE_CACHE": str(folder / "cache")}
    tools: dict[str, tuple[list[str], dict[str, str]]] = {
        "stepscope": ([*ours, "--no-cache"], {}),
        "gunzip + typed parse": ([sys.executable, "-c", FLOOR, str(large)], {}),
        "stepscope, second look": (ours, cache),
    }
    for peer in peers:
        name, _, python = peer.partition("=")
        tools[name] = ([python, "-c", PEER, str(large)], {})
    kept = measure(ours, cache)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tools}
    for _ in range(repeats):
        for name, (command, environment) in tools.items():
            runs[name].append(measure(command, environment))
    about = {"bytes": size, "events": events, "cores": len(os.sched_getaffinity(0))}
    rows = [_summary(name, of_tool) | about for name, of_tool in runs.items()]
    rows.append(_summary("stepscope, first look, kept", [kept]) | about)
    floor = rows[1]
    for row in rows:
        row["ratio_to_floor"] = _median(row["seconds"]) / _median(floor["seconds"])
    return rows


def read_bounded(trace: Path, gigabytes: list[float], folder: Path) -> list[dict[str, Any]]:
    rows = []
    for goal in gigabytes:
        large = folder / "large.json.gz"
        _, events, size = multiply(trace, large, size=int(goal * 1e9))
        command = [sys.executable, "-m", "stepscope", "explain", str(large), "--bounded", "--format", "json"]
        run = measure(command, {"STEPSCOPE_CACHE": str(folder / "cache")})
        row = _summary("stepscope --bounded", [run])
        row |= {"bytes": size, "events": events, "cores": len(os.sched_getaffinity(0))}
        rows.append(row | {"cpu_seconds_per_gb": run["cpu_seconds"] / (size / 1e9)})
        print(f"{size / 1e9:.1f} GB, {events:,} events: {rows[-1]['cpu_seconds_per_gb']:.2f} s of CPU time per GB")
    return rows


def _summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row = {
        "tool": name,
        "seconds": sorted(one["seconds"] for one in runs),
        "cpu_seconds": sorted(one["cpu_seconds"] for one in runs),
        "peak_bytes": max(one["peak_bytes"] for one in runs),
        "ok": all(one["ok"] for one in runs),
    }
    wall, cpu = _median(row["seconds"]), _median(row["cpu_seconds"])
    print(
        f"{name:28} {wall:7.2f} s  CPU {cpu:7.2f} s  peak {row['peak_bytes'] / 1e9:.2f} GB  ok {row['ok']}", flush=True
    )
    return row


def _median(values: list[float]) -> float:
    return values[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--copies", type=int, default=35)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bounded-gb", type=float, nargs="+", metavar="GB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.bounded_gb:
            rows = read_bounded(options.trace, options.bounded_gb, Path(name))
        else:
            rows = compare(options.trace, options.copies, options.peer, options.repeat, Path(name))
    if options.out:
        ours = ["--out", str(options.out), str(options.trace)]
        flags = [flag for flag in sys.argv[1:] if flag not in ours]
        command = " ".join(["python bench/trace_speed.py", options.trace.name, *flags])
        with options.out.open("a") as file:
            file.writelines(json.dumps({**row, "command": command}) + "\n" for row in rows)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
