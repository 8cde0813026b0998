"""Runs the command as a real process, in its own directory."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.warm import FORKED, inherited_variables, serve_with

# A generous time limit for a busy machine: it bounds hangs and does not measure speed.
PATIENCE_S = 240
TINY = ["--d-model", "16", "--d-ff", "32", "--num-layers", "1", "--num-heads", "2", "--vocab", "50"]
TINY += ["--batch", "1", "--device", "cpu", "--warmup", "1", "--steps", "2"]


# Verbs that import torch, and variables that neither Python nor torch reads when it starts.
MEASURING = {"bench", "profile", "memory", "precision", "attention", "comm", "train", "optimise", "report", "run"}
MEASURING |= {"plan", "doctor"}
HARMLESS = {"COLUMNS", "STEPSCOPE_CACHE", "SLURM_CONF", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def stepscope(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, without the time for imports where nothing depends on them."""
    variables = inherited_variables() | environment
    server = serve_with(torch=bool(MEASURING & {*arguments[:1]}))
    if server.would_differ_in(variables) <= HARMLESS:
        return server.run(folder, arguments, variables, PATIENCE_S)
    return run_anew(folder, *arguments, **environment)


def run_anew(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a new Python."""
    return subprocess.run(
        [sys.executable, "-m", "stepscope", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=inherited_variables() | environment,
    )


def start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a command in the background, with its messages in `stderr.txt`."""
    with (folder / "stderr.txt").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "stepscope", *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            # A shell that starts the tests in the background makes them, and this process, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def rows(folder: Path, out: str = "runs/bench") -> list[dict[str, Any]]:
    """The raw rows, including duplicates, without an incomplete last line."""
    path = folder / out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def workers(folder: Path, nursery: str = "stepscope.jobs.workers.nursery") -> list[int]:
    """Live processes that a command in this directory started, including the nursery."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                here = (entry / "cwd").readlink() == folder
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
                continue
            is_one = nursery.encode() in command or FORKED.encode() in command
            if is_one and state != "Z" and here:
                found.append(int(entry.name))
    return found


def kill(process: "subprocess.Popen[bytes]", with_signal: signal.Signals = signal.SIGKILL) -> int:
    process.send_signal(with_signal)
    return process.wait(timeout=PATIENCE_S)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
