"""How long a page over many ranks takes and how much memory it needs, and whether it names the late ranks.

    python bench/rank_scale.py [TRACE.json.gz] [--ranks 512] [--steps 8] [--keep DIR] [--raw] [--out FILE.jsonl]

The ranks are made from one trace of a rank with collectives (without one, from a small simulated step). Each rank has
its own clock and its own noise. One rank's CPU is late before each step, and another one computes 15% slower. Their
recordings are saved as a rank saves its own; with `--raw`, the page is made of traces instead, which it has to reduce
itself. `stepscope report DIR` then runs in a process of its own: its wall time, and the peak memory of all its
processes together, are measured from outside.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from stepscope import __version__
from stepscope.explain.ranks.activity_file import save_rank
from stepscope.recording import tables
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.rows.loop_run import LoopFacts
from stepscope.recording.store import Manifest, Recording, folder_bytes

LATE, SLOW = 0.35, 0.75  # the places of the late and of the slow rank, as shares of all ranks
LATE_NS, SLOWER, NOISE = 12_000_000, 1.15, 0.01
EPOCH_NS = 1_700_000_000_000_000_000


class Rank(msgspec.Struct, frozen=True):
    number: int
    offset_ns: int
    is_late: bool
    is_slow: bool


def simulate(*, layers: int, steps: int) -> list[dict[str, Any]]:
    """Return what every rank does, in order: `compute` with its length, or `reduce` with its bytes; a step begins with
    `step`."""
    work: list[dict[str, Any]] = []
    for _ in range(steps):
        work.append({"do": "step"})
        for phase in ("forward", "backward"):
            for layer in range(layers):
                work += [
                    {
                        "do": "compute",
                        "name": f"nvjet_tst_{64 << (place % 3)}x256_64x4_1x2_h_bz_coopA_NNT",
                        "phase": phase,
                    }
                    | {"us": 40 + 15 * (place % 5) + 40 * (phase == "backward")}
                    for place in range(12)
                ]
                if phase == "backward" and layer % 2:
                    work.append({"do": "reduce", "bytes": 25 << 20, "us": 300})
        work += [{"do": "compute", "name": "multi_tensor_apply_kernel", "phase": "optimizer", "us": 60}] * 20
    return work


def read_work(path: Path, steps: int) -> list[dict[str, Any]]:
    """Return the kernels of a trace as work, repeated for each step."""
    recording = open_recording(path)
    kernels = recording.kernels.filter(pl.col("kind") == "kernel").sort("start_ns")
    one: list[dict[str, Any]] = [{"do": "step"}]
    half = kernels.height // 2
    for place, row in enumerate(kernels.iter_rows(named=True)):
        us = max(1, (row["end_ns"] - row["start_ns"]) // 1000)
        if "nccl" in row["name"].lower():
            one.append({"do": "reduce", "bytes": row["bytes"] or 1 << 20, "us": min(us, 500)})
        else:
            one.append(
                {"do": "compute", "name": row["name"], "phase": "forward" if place < half else "backward", "us": us}
            )
    if not any(item["do"] == "reduce" for item in one):
        raise SystemExit(f"{path} has no collectives")
    return one * steps


def play(work: list[dict[str, Any]], ranks: list[Rank]) -> list[Recording]:
    """Run the work on all ranks: a collective ends on all of them after the last one has arrived."""
    random = np.random.default_rng(7)
    now = np.zeros(len(ranks), np.int64)
    late, slow = (np.array([getattr(one, name) for one in ranks]) for name in ("is_late", "is_slow"))
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    for item in work:
        if item["do"] == "step":
            marks.append(now.copy())
            now = now + 30_000 + np.where(late, LATE_NS, 0)
        elif item["do"] == "compute":
            length = item["us"] * 1000 * random.normal(1, NOISE, len(ranks)) * np.where(slow, SLOWER, 1.0)
            starts.append(now.copy())
            now = now + np.maximum(500, length).astype(np.int64)
            ends.append(now.copy())
            now = now + 1_000
        else:
            starts.append(now.copy())
            now = np.full(len(ranks), int(now.max()) + item["us"] * 1000, np.int64)
            ends.append(now.copy())
            now = now + 2_000
    marks.append(now.copy())
    begin, end, mark = (np.stack(rows) for rows in (starts, ends, marks))
    ran = [item for item in work if item["do"] != "step"]
    return [_record(ran, one, begin[:, at], end[:, at], mark[:, at], len(ranks)) for at, one in enumerate(ranks)]


def _record(
    work: list[dict[str, Any]], rank: Rank, starts: np.ndarray, ends: np.ndarray, marks: np.ndarray, world: int
) -> Recording:
    shift = EPOCH_NS + rank.offset_ns
    reduces = [item["do"] == "reduce" for item in work]
    count = len(work)
    kernels = pl.DataFrame(
        {
            "name": [
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if one else item["name"]
                for one, item in zip(reduces, work, strict=True)
            ],
            "start_ns": starts + shift,
            "end_ns": ends + shift,
            "kind": ["kernel"] * count,
            "process": [1] * count,
            "device": [0] * count,
            "stream": [20 if one else 7 for one in reduces],
            "correlation": np.arange(count),
            "graph": [False] * count,
            "bytes": [item.get("bytes") for item in work],
            "collective": ["allreduce" if one else None for one in reduces],
            "process_group": ["0" if one else None for one in reduces],
            "group_size": [world if one else None for one in reduces],
            "grid_x": [item.get("us") for item in work],
        }
    )
    launched = np.maximum(starts - 3_000, 0) + shift
    launches = pl.DataFrame(
        {"name": ["cudaLaunchKernel"] * count, "start_ns": launched, "end_ns": launched + 1_000}
        | {"process": [1] * count, "thread": [1] * count, "correlation": np.arange(count)}
    )
    phases = pl.Series([item.get("phase") for item in work]).forward_fill()
    runs = pl.DataFrame({"phase": phases, "start_ns": launched, "end_ns": launched + 1_000})
    together = runs.group_by(pl.col("phase").rle_id().alias("run"), maintain_order=True)
    named = together.agg(pl.col("phase", "start_ns").first(), pl.col("end_ns").last())
    rows = [(f"phase:{phase}", start, end) for _, phase, start, end in named.iter_rows()]
    rows += [
        (f"step:{place}", int(marks[place] + shift), int(marks[place + 1] + shift) - 1)
        for place in range(len(marks) - 1)
    ]
    ranges = pl.DataFrame(
        {
            "name": [name for name, _, _ in rows],
            "start_ns": [start for _, start, _ in rows],
            "end_ns": [end for _, _, end in rows],
            "process": [1] * len(rows),
            "thread": [1] * len(rows),
            "source": ["user"] * len(rows),
        }
    )
    manifest = Manifest(
        source="pytorch profiler",
        device="NVIDIA H100 80GB HBM3",
        rank=rank.number,
        world_size=world,
        loop=LoopFacts(script="train.py", found_by="optimizer steps", clock_mhz=1500 if rank.is_slow else 1755),
    )
    frames = {"kernels": kernels, "launches": launches, "ranges": ranges}
    return Recording(manifest=manifest, **{name: tables.conform(name, frame) for name, frame in frames.items()})


def write_trace(recording: Recording, path: Path) -> None:
    """Write a recording as a trace of PyTorch's profiler."""
    events: list[dict[str, Any]] = []
    for row in recording.kernels.iter_rows(named=True):
        args = {
            "device": 0,
            "stream": row["stream"],
            "correlation": row["correlation"],
            "grid": [row["grid_x"] or 1, 1, 1],
            "block": [128, 1, 1],
        }
        if row["collective"]:
            args |= {
                "Collective name": "allreduce",
                "In msg nelems": row["bytes"] // 2,
                "Out msg nelems": row["bytes"] // 2,
            }
            args |= {"dtype": "BFloat16", "Group size": row["group_size"], "Process Group Name": "0"}
        events.append(_event("kernel", row, 0, row["stream"], args))
    events += [
        _event("cuda_runtime", row, 1, 1, {"correlation": row["correlation"]})
        for row in recording.launches.iter_rows(named=True)
    ]
    events += [_event("user_annotation", row, 1, 1, {}) for row in recording.ranges.iter_rows(named=True)]
    manifest = recording.manifest
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": manifest.device, "numSms": 132}],
        "distributedInfo": {"backend": "nccl", "rank": manifest.rank, "world_size": manifest.world_size},
        "traceEvents": events,
    }
    with gzip.open(path, "wt", compresslevel=3) as file:
        json.dump(document, file)


def _event(category: str, row: dict[str, Any], process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    start, length = row["start_ns"] - EPOCH_NS, row["end_ns"] - row["start_ns"]
    return {
        "ph": "X",
        "cat": category,
        "name": row["name"],
        "pid": process,
        "tid": thread,
        "ts": start / 1000,
        "dur": length / 1000,
        "args": args,
    }


def watch(command: list[str], cwd: Path) -> tuple[float, float, int]:
    """Run a command. Return its wall time, its CPU time, and the peak memory of its processes together."""
    peak, stop = [0], threading.Event()
    before = os.times()
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL)

    def look() -> None:
        while not stop.wait(0.25):
            peak[0] = max(peak[0], sum(_memory(pid) for pid in _family(process.pid)))

    watcher = threading.Thread(target=look)
    watcher.start()
    code = process.wait()
    stop.set()
    watcher.join()
    after = os.times()
    if code:
        raise SystemExit(f"{command} failed with {code}")
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return time.monotonic() - began, cpu, peak[0]


def _family(pid: int) -> list[int]:
    try:
        children = [
            int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()
        ]
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(child))]


def _memory(pid: int) -> int:
    """The proportional share: pages that processes share count once."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32, help="of the simulated model")
    parser.add_argument("--keep", type=Path, help="keep the ranks and the page here")
    parser.add_argument("--raw", action="store_true", help="write traces instead of recordings")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/rank_scale.jsonl")
    options = parser.parse_args()
    work = (
        read_work(options.trace, options.steps)
        if options.trace
        else simulate(layers=options.layers, steps=options.steps)
    )
    late, slow = (round(share * options.ranks) for share in (LATE, SLOW))
    random = np.random.default_rng(1)
    ranks = [
        Rank(number, int(random.integers(0, 10**9)), number == late, number == slow) for number in range(options.ranks)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        run = folder / "run"
        run.mkdir(parents=True)
        saved_s = 0.0
        for recording in play(work, ranks):
            began = time.monotonic()
            if options.raw:
                write_trace(recording, run / f"trace_rank{recording.manifest.rank}.json.gz")
            else:
                save_rank(recording, run / f"rank-{recording.manifest.rank}")
            saved_s += time.monotonic() - began
        page = folder / "report.html"
        command = [
            sys.executable,
            "-P",
            "-m",
            "stepscope",
            "report",
            str(run),
            "--no-cache",
            "--out",
            str(page),
            "--force",
        ]
        load = os.getloadavg()[0]
        wall, cpu, peak = watch(command, folder)
        text = page.read_text()
        row = {
            "ranks": options.ranks,
            "kernels_per_rank": sum(item["do"] != "step" for item in work),
            "collectives_per_rank": sum(item["do"] == "reduce" for item in work),
            "input": "traces" if options.raw else "recordings",
            "bytes_per_rank": folder_bytes(run) // options.ranks,
            "saving_a_rank_s": None if options.raw else round(saved_s / options.ranks, 3),
            "report_s": round(wall, 2),
            "report_cpu_s": round(cpu, 2),
            "report_peak_bytes": peak,
            "page_bytes": page.stat().st_size,
            "names_late_rank": f"rank {late} (late CPU)" in text,
            "names_slow_rank": f"rank {slow} (slower at the same work)" in text,
            "cores": len(os.sched_getaffinity(0)),
            "load_average": round(load, 1),  # of other processes on the same cores
            "version": __version__,
        }
    print(json.dumps(row, indent=2))
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
