"""Runs one of NVIDIA's profilers, which in turn runs a program of ours.

The profilers record from outside: they start the program, and it writes its result to a file. Both run in their own
process group, so that Ctrl-C reaches only this process, which then stops both.
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

_LAST_WORDS = 1000  # characters of the output to quote in the error
_LEAVE_S = (10.0, 3.0)  # seconds for a profiler to stop its program, after SIGINT and after SIGTERM
_LOOK_S = 0.5


class Finished(NamedTuple):
    returncode: int
    last_words: str

    @property
    def in_words(self) -> str:
        if self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"exited with status {self.returncode}"


def run_outside(command: list[str], on_look: Callable[[], None] | None = None) -> Finished:
    """Run a command to the end, calling `on_look` twice per second."""
    limit_instructions()
    with TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)
        except OSError as error:
            raise StepscopeError(f"cannot run `{command[0]}`", detail=error.strerror or "") from None
        try:
            returncode = _wait(process, on_look)
        finally:
            _end(process)
        return Finished(returncode, _last_words(output))


def hear(path: Path, kind: Any) -> Any:
    """Read and delete the program's result of type `kind`; None if there is none."""
    try:
        content = read_plain(path)
        path.unlink()
        return decode(content, kind)
    except (OSError, msgspec.DecodeError):
        return None


def compress(path: Path, *, level: int = 9) -> Path:
    """Compress what a profiler wrote, next to the original. The same content always gives the same file."""
    target = path.with_name(path.name + ".gz")
    with (
        writing(path.parent, if_full="nothing was saved", hint="TMPDIR=DIR, on another disk"),
        path.open("rb") as source,
        target.open("wb") as sink,
        gzip.GzipFile(filename="", fileobj=sink, mode="wb", compresslevel=level, mtime=0) as packed,
    ):
        shutil.copyfileobj(source, packed, 1 << 20)
    return target


def _wait(process: subprocess.Popen[bytes], on_look: Callable[[], None] | None) -> int:
    """Wait with `select`, which any signal interrupts. Importing polars makes interrupted system calls restart, so a
    plain wait would ignore Ctrl-C until the profiler is done.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        while not select.select([descriptor], [], [], _LOOK_S if on_look else None)[0]:
            if on_look:
                on_look()
    finally:
        os.close(descriptor)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """On SIGINT a profiler stops the program it started and then itself; if killed outright, it would leave the program
    running.
    """
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
