"""How long a large memory snapshot takes to read and replay, and how much memory that takes, on this machine.

    python bench/snapshot_speed.py [--megabytes 1000] [--depth 8] [--repeat 1] [--out FILE.jsonl]

The snapshot is written opcode by opcode, because pickling it from objects would take more memory than reading it. It
has what PyTorch's own snapshots have: a dict per event, with its own list of frames (`--depth` of them, from a common
store), a pool, a compile context and a time. Each reading is a separate process; the wall time of its parts is measured
inside, its peak memory from outside. `--collect` leaves the garbage collector on, to measure its cost.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
SLOTS = 64  # blocks per step, each in its own segment
FRAMES = 2000
READING = """
import json, sys, time
from pathlib import Path
from stepscope.recording.memory import snapshot_pickle
if sys.argv[2] == "collect":
    snapshot_pickle.gc.disable = lambda: None
from stepscope.recording.memory.allocator import replay
from stepscope.recording.memory.snapshot import read_snapshot
started = time.perf_counter()
load = snapshot_pickle.load
def timed(path):
    content = load(path)
    print(json.dumps({"load_s": time.perf_counter() - started}))
    return content
snapshot_pickle.load = timed
trace = read_snapshot(Path(sys.argv[1])).traces[0]
read = time.perf_counter()
replayed = replay(trace)
assert replayed.exact and replayed.allocated_bytes[-1] == 0, replayed.notes
print(json.dumps({"read_s": read - started, "replay_s": time.perf_counter() - read, "events": trace.events.height}))
"""


class Writer:
    """A pickle being written, protocol 4, that memoizes as PyTorch's writer does."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=MIB)
        self.file.write(b"\x80\x04")
        self._remembered = 0

    def remember(self, content: bytes) -> bytes:
        """Write what is referenced later; return the reference."""
        self.file.write(content + b"\x94")
        self._remembered += 1
        return self.reference(self._remembered - 1)

    @staticmethod
    def reference(at: int) -> bytes:
        return b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def write(path: Path, size: int, depth: int) -> None:
    """Write a snapshot of about `size` bytes."""
    writer = Writer(path)
    file, names = writer.file, ("action", "addr", "size", "stream", "time_us", "frames", "pool_id", "compile_context")
    # What is memoized must be on the stack once; it is pushed and popped again.
    key = {
        name: _dropped(writer, text(name))
        for name in (*names, "alloc", "free_requested", "free_completed", "segment_alloc")
    }
    frames = [
        _dropped(writer, _plain({"filename": f"/opt/site-packages/torch/nn/m{at % 90}.py", "line": at, "name": "call"}))
        for at in range(FRAMES)
    ]
    file.write(b"}(" + text("segments") + b"](")
    for slot in range(SLOTS):
        address = _address(slot)
        block = {"address": address, "size": 20 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
        segment = {
            "device": 0,
            "address": address,
            "total_size": 20 * MIB,
            "stream": 0,
            "segment_type": "large",
            "blocks": [block],
        }
        file.write(_plain(segment))
    file.write(b"e" + text("device_traces") + b"](](")
    head = b"}\x94(" + key["action"]
    tail = (
        key["stream"]
        + b"K\x00"
        + key["pool_id"]
        + b"K\x00K\x00\x86\x94"
        + key["compile_context"]
        + text("N/A")
        + b"\x94"
    )
    events, now = 0, 1_700_000_000_000_000
    while file.tell() < size:
        for action, slots in (
            ("alloc", range(SLOTS)),
            ("free_requested", range(SLOTS)),
            ("free_completed", range(SLOTS)),
        ):
            for slot in slots:
                now += 3
                chosen = b"".join(frames[(events * 7 + slot * 13 + at) % FRAMES] for at in range(depth))
                file.write(
                    b"".join(
                        (
                            head,
                            key[action],
                            key["addr"],
                            b"\x8a\x06",
                            _address(slot).to_bytes(6, "little"),
                            key["size"],
                            b"J",
                            struct.pack("<i", 18 * MIB + slot),
                            key["time_us"],
                            b"\x8a\x07",
                            now.to_bytes(7, "little"),
                            key["frames"],
                            b"]\x94(",
                            chosen,
                            b"e",
                            tail,
                            b"u",
                        )
                    )
                )
        events = (events + 1) % 50
    file.write(b"eeu.")
    file.close()


def _dropped(writer: Writer, content: bytes) -> bytes:
    reference = writer.remember(content)
    writer.file.write(b"0")
    return reference


def _plain(value: object) -> bytes:
    """Without memoizing, so that the count of memoized objects stays known."""
    if isinstance(value, dict):
        return b"}(" + b"".join(text(name) + _plain(one) for name, one in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_plain, value)) + b"e"
    return text(value) if isinstance(value, str) else b"\x8a\x08" + int(str(value)).to_bytes(8, "little", signed=True)


def _address(slot: int) -> int:
    return 0x7F00_0000_0000 + slot * 20 * MIB


def measure(path: Path, collector: str) -> dict[str, float]:
    """Read it in a separate process; the peak is that of the process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READING, str(path), collector]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the reader exited with status {process.returncode}")
    found: dict[str, float] = {"peak_bytes": usage.ru_maxrss * 1024}
    for line in lines:
        found |= json.loads(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    collector = "collect" if options.collect else "off"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        started = time.perf_counter()
        write(path, options.megabytes * 10**6, options.depth)
        print(f"{path.stat().st_size / 1e6:.0f} MB written in {time.perf_counter() - started:.1f} s", flush=True)
        for _ in range(options.repeat):
            row = {**measure(path, collector), "bytes": path.stat().st_size, "depth": options.depth}
            row |= {"collector": collector, "cores": len(os.sched_getaffinity(0))}
            reading = f"read in {row['read_s']:.1f} s, including {row['load_s']:.1f} s to load"
            print(f"{row['events']:,.0f} events: {reading}; replayed in {row['replay_s']:.1f} s", flush=True)
            print(f"peak {row['peak_bytes'] / 2**30:.2f} GiB", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
