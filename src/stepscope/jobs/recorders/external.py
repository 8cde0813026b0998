"""Running one of NVIDIA's profilers, which in turn runs a program of ours.

They record from outside: they start the program, and it leaves an answer in a file. The pair runs in a process group of
its own, so that Ctrl-C reaches us alone, and we end both.
"""

import gzip
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, read_plain, writing
from stepscope.jobs.workers.cpu_limits import limit_instructions

_LAST_WORDS = 1000  # characters of what was printed, for the error
_LEAVE_S = (10.0, 3.0)  # how long a profiler gets to end its program, after being asked and after being told
_LOOK_S = 0.5


class Finished(NamedTuple):
    returncode: int
    last_words: str

    @property
    def in_words(self) -> str:
        if self.returncode < 0:
            return f"was ended by {signal.Signals(-self.returncode).name}"
        return f"exited with {self.returncode}"


def run_outside(command: list[str], on_look: Callable[[], None] | None = None) -> Finished:
    """Runs to the end. `on_look` is called twice a second meanwhile."""
    limit_instructions()
    with TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)
        except OSError as error:
            raise StepscopeError(f"`{command[0]}` does not run", detail=error.strerror or "") from None
        try:
            returncode = _wait(process, on_look)
        finally:
            _end(process)
        return Finished(returncode, _last_words(output))


def hear(path: Path, kind: Any) -> Any:
    """The answer of type `kind` that the program left, which is taken away; None where it left none."""
    try:
        content = read_plain(path)
        path.unlink()
        return decode(content, kind)
    except (OSError, msgspec.DecodeError):
        return None


def compress(path: Path, *, level: int = 9) -> Path:
    """What a profiler wrote, as it came but smaller, next to it. The same content makes the same file."""
    target = path.with_name(path.name + ".gz")
    with (
        writing(path.parent, if_full="nothing was kept", hint="TMPDIR=FOLDER, on another disk"),
        path.open("rb") as source,
        target.open("wb") as sink,
        gzip.GzipFile(filename="", fileobj=sink, mode="wb", compresslevel=level, mtime=0) as packed,
    ):
        shutil.copyfileobj(source, packed, 1 << 20)
    return target


def _wait(process: subprocess.Popen[bytes], on_look: Callable[[], None] | None) -> int:
    """By `select`, which any signal ends. Importing polars has calls restarted that Ctrl-C interrupts, and a plain wait
    then goes on until the profiler is done."""
    descriptor = os.pidfd_open(process.pid)
    try:
        while not select.select([descriptor], [], [], _LOOK_S if on_look else None)[0]:
            if on_look:
                on_look()
    finally:
        os.close(descriptor)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked by the signal that Ctrl-C sends, a profiler ends the program it started and then itself; killed at once it
    would leave that behind."""
    for number, patience in zip((signal.SIGINT, signal.SIGTERM), _LEAVE_S, strict=True):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read()[-4 * _LAST_WORDS :].decode(errors="replace").strip()[-_LAST_WORDS:]
