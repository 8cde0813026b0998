"""How long stepscope and HolisticTraceAnalysis take to read one large trace, on this machine.

    python bench/trace_speed.py TRACE.json.gz [--copies 35] [--peer NAME=PYTHON …] [--repeat 3] [--out FILE.jsonl]

The trace is multiplied first (`--copies`, shifted in time with their own ids) so that a small one becomes large. A peer
is a name and the interpreter of an environment that has it: `hta-0.5.0=/path/to/python`. Every tool loads the file and
breaks down its kernels once, in a separate process, one after the other; wall time and the peak memory of the largest
process are measured from outside. stepscope is also timed on the second read.
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
import time
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
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_IDS = ("correlation", "External id", "external id", "Ev Idx", "Sequence number", "Record function id")


def multiply(source: Path, target: Path, copies: int) -> int:
    """Write `copies` of the trace, one after another in time; return the number of events."""
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rb") as file:
        trace = json.loads(file.read(), parse_float=Decimal)
    events = [one for one in trace.pop("traceEvents") if one.get("cat") != "Trace"]
    timed = [one for one in events if one.get("ph") == "X"]
    span = max(one["ts"] + one["dur"] for one in timed) - min(one["ts"] for one in timed) + 100
    numbers = [value for one in events for value in _numbers(one)]
    step, written = max(numbers, default=0) + 1, 0
    with gzip.open(target, "wb", compresslevel=6) as file:
        file.write(json.dumps(trace, default=float).encode()[:-1] + b', "traceEvents": [\n')
        for copy in range(copies):
            for event in events:
                text = _shifted(event, copy * span, copy * step) if copy and event.get("ph") != "M" else event
                if copy == 0 or event.get("ph") != "M":
                    file.write((b",\n" if written else b"") + _encode(text))
                    written += 1
        file.write(b"\n]}\n")
    return written


def _numbers(event: dict[str, Any]) -> list[int]:
    args = event.get("args") or {}
    values = [event.get("id"), *(args.get(key) for key in _IDS)]
    return [value for value in values if isinstance(value, int) and value < 2**40]


def _shifted(event: dict[str, Any], time_us: Decimal, number: int) -> dict[str, Any]:
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] += time_us
    if isinstance(moved.get("id"), int):
        moved["id"] += number
    if "args" in moved:
        args = dict(moved["args"] or {})
        known = {key: args[key] for key in _IDS if isinstance(args.get(key), int)}
        args.update({key: value + number for key, value in known.items() if 0 < value < 2**40})
        moved["args"] = args
    if found := re.fullmatch(r"ProfilerStep#(\d+)", str(moved.get("name", ""))):
        moved["name"] = f"ProfilerStep#{int(found[1]) + number}"
    return moved


def _encode(event: dict[str, Any]) -> bytes:
    return _ENCODER.encode(event)


def measure(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, int, bool]:
    """Seconds, peak bytes of the largest process, and whether it succeeded."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
    )
    _, status, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - started, usage.ru_maxrss * 1024, status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--copies", type=int, default=35)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder, "large.json.gz")
        events = multiply(options.trace, large, options.copies)
        size = int(subprocess.run(f"gzip -dc {large} | wc -c", shell=True, capture_output=True, check=True).stdout)
        print(f"{size / 1e6:.0f} MB, {large.stat().st_size / 1e6:.0f} MB gzipped, {events:,} events")
        ours = [sys.executable, "-m", "stepscope", "explain", str(large), "--format", "json"]
        cache = {"STEPSCOPE_CACHE": str(Path(folder, "cache"))}
        tools: dict[str, tuple[list[str], dict[str, str]]] = {"stepscope": ([*ours, "--no-cache"], {})}
        for peer in options.peer:
            name, _, python = peer.partition("=")
            tools[name] = ([python, "-c", PEER, str(large)], {})
        tools["stepscope, first look, kept"] = (ours, cache)
        tools["stepscope, second look"] = (ours, cache)
        rows = []
        for name, (command, environment) in tools.items():
            repeats = 1 if "first look" in name else options.repeat
            runs = [measure(command, environment) for _ in range(repeats)]
            good = all(ok for _, _, ok in runs)
            seconds = sorted(one[0] for one in runs)
            peak = max(one[1] for one in runs)
            row = {"tool": name, "seconds": seconds, "peak_bytes": peak, "ok": good}
            rows.append({**row, "bytes": size, "events": events, "cores": len(os.sched_getaffinity(0))})
            median = seconds[len(seconds) // 2]
            print(f"{name:28} median {median:7.2f} s  peak {peak / 1e9:.2f} GB  ok {good}", flush=True)
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
