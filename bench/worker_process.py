"""A process that answers a line with a line of JSON, for benchmarks in which every case has a process of its own."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[1]


class WorkerProcess:
    """Runs `script` again with `--worker` and `what` as JSON. What it says outside its answers, and where it hangs, is
    in standard error."""

    def __init__(self, script: str, what: dict[str, Any], *, compile_threads: int = 4) -> None:
        self.case = what["case"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads))  # many compile at once
        command = [sys.executable, script, "--worker", json.dumps(what)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def ask(self, line: object, limit_s: float) -> Any:
        """The answer to a line, or None if the process has ended or does not answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer(limit_s)

    def answer(self, limit_s: float) -> Any:
        """The next answer, or None if the process has ended or takes too long."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(limit_s, 0))[0]:
            print(f"{self.case}: no answer; its stack is in standard error", flush=True)
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the process and wait until it has given back its memory."""
        self._process.kill()
        self._process.wait()


def open_answers() -> TextIO:
    """In the worker: the stream for answers. Whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
