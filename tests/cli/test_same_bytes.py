"""The same input gives the same bytes, whatever seed Python and Polars hash with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stepscope.recording.store import save
from tests.cli.command import PATIENCE_S
from tests.unit.recordings import ADD, BF16, COPY, FP32, GEMM_BF16, GEMM_FP32, MULTIPLY, SOFTMAX, STREAM, Timeline

SNAPSHOT = Path(__file__).parents[1] / "fixtures" / "h200_tiny_train.pickle.gz"
# Runs each command in one process and prints a digest of everything it wrote.
SCRIPT = """
import contextlib, hashlib, io, json, pathlib, sys
from stepscope.cli.main import app, fill_bare_flags

for number, command in enumerate(json.loads(sys.argv[1])):
    sys.argv[1:], said = command, io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(said):
        app(args=fill_bare_flags(command), standalone_mode=False)
    said.flush()
    print(number, hashlib.sha256(said.buffer.getvalue()).hexdigest())
for path in sorted(pathlib.Path().rglob("*")):
    if path.is_file():
        print(path, hashlib.sha256(path.read_bytes()).hexdigest())
"""


def record(folder: Path, layers: int) -> Path:
    """Two devices with the same work, and kinds of everything that take equally long."""
    timeline = Timeline(host_us=20)
    for _ in range(2):
        with timeline.step():
            for phase in ("forward", "backward"):
                with timeline.phase(phase):
                    for layer in range(layers):
                        run_layer(timeline, f"blocks.{layer}")
            timeline.wait()
    save(timeline.record(), folder)
    return folder


def run_layer(timeline: Timeline, path: str) -> None:
    for device in range(2):
        place: dict[str, Any] = {"stream": STREAM + 100 * device, "device": device}
        for size in (1023, 1021, 1019):
            with timeline.module(f"{path}.part{size}"):
                shapes = [[size, size]] * 2
                timeline.launch(GEMM_BF16, 60, op="aten::mm", shapes=shapes, dtypes=[BF16] * 2, **place)
                timeline.launch(GEMM_FP32, 60, op="aten::mm", shapes=shapes, dtypes=[FP32] * 2, **place)
                timeline.launch(GEMM_BF16, 60, op="aten::mm", shapes=[[8, size], [size, 8]], dtypes=[BF16] * 2, **place)
                for kernel, op in ((ADD, "add"), (MULTIPLY, "mul"), (SOFTMAX, "_softmax"), (COPY, "copy_")):
                    timeline.launch(kernel, 30, op=f"aten::{op}", shapes=shapes, dtypes=[FP32] * 2, **place)


def run(folder: Path, commands: list[list[str]], seed: int) -> list[str]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONHASHSEED": str(seed)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    one, other = (str(record(tmp_path / f"layers-{layers}", layers)) for layers in (2, 3))
    commands = [
        *([["explain", one, *flags] for flags in ([], ["--format", "json"], ["--questions", "--detail"])]),
        ["explain", str(SNAPSHOT), "--format", "json"],
        ["explain", one, other, "--format", "json"],  # as two ranks
        ["compare", one, other, "--by", "module"],
        ["report", one, "--out", "page.html"],
        ["report", one, str(SNAPSHOT), "--out", "memory.html"],
        ["report", one, other, "--out", "pair.html"],
    ]
    first, *others = (run(tmp_path / str(seed), commands, seed) for seed in (1, 2, 3))
    assert len(first) == len(commands) + 3
    for lines in others:
        differing = [line for line, again in zip(first, lines, strict=True) if line != again]
        assert not differing, [commands[int(line.split()[0])] if line[0].isdigit() else line for line in differing]
