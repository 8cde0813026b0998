"""Processes for cases: started quickly, listened to, and explained when they die.

Importing torch takes seconds, on a GPU machine as long as many cases. So one process, the nursery
(`jobs.workers.nursery`), imports it and nothing else, and every case runs in a process forked from it: each has its own
memory, GPU context and exit, and starts immediately. The nursery never touches a GPU or runs a model.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.workers.cpu_limits import limit_instructions
from stepscope.jobs.workers.messages import Answer, Failed, Part, Request, Result, StageReached
from stepscope.measure.failures import mentions_out_of_memory
from stepscope.recording.rows.bench import Status

_LOG_TAIL = 20_000
_LEAVE_S = 0.5  # for a worker that has answered to exit
_IMPORT_S = 300.0  # for the nursery to import torch, before it counts as hanging

OnStage = Callable[[str], None]  # what a case reports while it runs


class Died(msgspec.Struct, frozen=True, kw_only=True):
    """The worker ended without an answer."""

    status: Status
    reason: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker answered, or how it died, and what it printed."""

    answer: Result | Died
    log: bytes


def require_torch() -> None:
    """Checked before the first worker starts, without importing torch in this process."""
    if find_spec("torch") is None:
        raise StepscopeError(
            "torch is not installed",
            detail="reading and explaining recordings works without torch; running a model requires it",
            hint="pip install 'stepscope[train]'",
        )


class InputRefusedError(StepscopeError):
    """A worker reports that the user's input is at fault: a wrong setting, or a custom model that does not build."""

    def __init__(self, answer: Failed) -> None:
        super().__init__(answer.message, detail=answer.detail, hint=answer.hint)


class Workers:
    """Starts worker processes, one at a time, with `modules` imported. Closing it ends whatever runs. With
    `is_serial`, libraries compute with one thread."""

    def __init__(self, modules: Sequence[str] = ("stepscope.measure.bench",), *, is_serial: bool = False) -> None:
        self._modules = tuple(modules)
        self._environment = {"OMP_NUM_THREADS": "1"} if is_serial else {}
        self._nursery: Nursery | None = None
        self._running: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def start(self) -> None:
        """Start importing torch in the nursery while the caller does something else."""
        if self._nursery is not None and not self._nursery.is_alive():
            self._close()
        if self._nursery is None:
            self._nursery = Nursery(self._modules, TemporaryFile(), self._environment)  # noqa: SIM115  # it closes that

    def run(
        self,
        request: Request,
        *,
        on_stage: OnStage = lambda _: None,
        on_part: Callable[[Any], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> Ended:
        """Run one request in its own process. If its answer comes in parts, each may take `timeout_s`."""
        oom_kills = _kernel_oom_kills()
        self.start()
        assert self._nursery is not None
        with TemporaryFile() as output, _Worker(self._nursery, request, output) as worker:
            self._running = worker
            try:
                for said in worker.listen(timeout_s):
                    if isinstance(said, StageReached):
                        on_stage(said.name)
                    else:
                        on_part(said)
                worker.end()
            finally:
                self._running = None
            log = _content(output)
        if worker.answer is not None:
            return Ended(answer=worker.answer, log=log)
        if worker.timed_out:
            if worker.returncode is None:
                self._close()
            reason = f"timed out after {timeout_s:g} s while {worker.stage}"
            return Ended(answer=Died(status="timeout", reason=reason), log=log)
        returncode = worker.returncode
        if returncode is None:  # the nursery itself is gone: importing torch failed, or it was killed
            log += self._nursery.log()
            returncode = self._close()
        oom_killed = _kernel_oom_kills() > oom_kills
        return Ended(answer=_explain_death(returncode, worker.stage, log, oom_killed=oom_killed), log=log)

    def kill(self) -> None:
        """Kill the process of a request that another thread waits for, which then hears how it ended."""
        if (worker := self._running) is not None:
            worker.kill()

    def _close(self) -> int:
        returncode = self._nursery.close() if self._nursery else 0
        self._nursery = None
        return returncode


class Nursery:
    """The process that others are forked from, with torch and `modules` imported. Its output goes to `output`."""

    def __init__(
        self, modules: Sequence[str], output: IO[bytes], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        limit_instructions()
        self._output = output
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (str(theirs.fileno()), str(os.getpid()), ",".join(modules))
        # -P: the current directory goes on the path only when a factory is loaded: a stray `random.py` in it must not
        # break torch. A session of its own: Ctrl-C reaches only this process, which ends the nursery.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stepscope.jobs.workers.nursery", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, **environment},
        )
        theirs.close()

    def log(self) -> bytes:
        return _content(self._output)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> int:
        """Stop the nursery, and return its exit status if it was already gone."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_LEAVE_S)
        self._process.kill()
        self._output.close()
        return self._process.wait()


def ask(nursery: socket.socket, request: msgspec.Struct, output: IO[bytes]) -> int:
    """Fork a process that serves `request` and prints to `output`; return the pipe on which it answers."""
    request_out, request_in = os.pipe()
    answer_out, answer_in = os.pipe()
    # A broken pipe here means that it died; listening finds out how.
    with suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(nursery, [b"run"], [request_out, answer_in, output.fileno()])
    os.close(request_out)
    os.close(answer_in)
    with suppress(BrokenPipeError), os.fdopen(request_in, "wb") as pipe:
        pipe.write(msgspec.json.encode(request))
    return answer_out


def hear(nursery: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message: `pid` of a forked process, in request order; `end` of one, with its id and status;
    nothing if the nursery died.
    """
    try:
        word, *numbers = nursery.recv(64).split() or [b""]
    except ConnectionResetError:
        return b"", []
    return word, [int(number) for number in numbers]


class _Worker:
    """One forked process, from the request to its end."""

    def __init__(self, nursery: Nursery, request: Request, output: IO[bytes]) -> None:
        self.stage = "starting"
        self.answer: Result | None = None
        self.timed_out = False
        # The nursery reports the process id, and later the exit. `gone` without a returncode: the nursery is gone.
        self.returncode: int | None = None
        self._gone = False
        self._pid: int | None = None
        self._nursery = nursery
        self._unread = b""
        self._answers = ask(nursery.socket, request, output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._answers)
        if not self._gone:
            self.kill()

    def listen(self, timeout_s: float | None) -> Iterator[StageReached | Part]:
        """Yield the stages and parts the worker reports, until it has answered, ended or timed out. Time counts from
        the fork: importing torch, which is slow on a busy machine, is not part of the case.
        """
        sources = {self._answers, self._nursery.socket.fileno()}
        since = time.monotonic()
        while self.answer is None and not self._gone:
            limit_s = timeout_s and (timeout_s if self._pid is not None else max(timeout_s, _IMPORT_S))
            remaining = max(0.0, since + limit_s - time.monotonic()) if limit_s else None
            ready, _, _ = select.select(sources, [], [], remaining)
            if not ready:
                self.timed_out = True
                return
            if self._answers in ready:
                content = os.read(self._answers, 1 << 16)
                if not content:
                    sources.remove(self._answers)
                for said in self._read(content):
                    if isinstance(said, Part):
                        since = time.monotonic()
                    yield said
            else:
                is_born = self._pid is not None
                self._hear()
                if not is_born:
                    since = time.monotonic()
        while self.answer is None and select.select([self._answers], [], [], 0)[0]:
            # It has ended, and its last messages are still in the pipe.
            content = os.read(self._answers, 1 << 16)
            if not content:
                return
            yield from self._read(content)

    def end(self) -> None:
        """After an answer the worker is exiting and gets a moment to finish; then it is killed."""
        if self.answer is not None and select.select([self._nursery.socket], [], [], _LEAVE_S)[0]:
            self._hear()
        if not self._gone:
            self.kill()
        while not self._gone:
            self._hear()

    def _read(self, content: bytes) -> Iterator[StageReached | Part]:
        *lines, self._unread = (self._unread + content).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line, type=Answer)
            if isinstance(message, StageReached):
                self.stage = message.name
            if isinstance(message, StageReached | Part):
                yield message
            else:
                self.answer = message

    def _hear(self) -> None:
        word, numbers = hear(self._nursery.socket)
        if word == b"pid":
            (self._pid,) = numbers
            return
        self._gone = True
        if word == b"end":
            self.returncode = numbers[1]

    def kill(self) -> None:
        """The process and everything in its session. Before the fork, the nursery itself: importing torch is what takes
        so long.
        """
        if self._pid is None:
            self._nursery.kill()
        else:
            try:
                os.killpg(self._pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no process group yet, or is gone
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)


_PROFILER_NOISE = "USDT:"  # printed by PyTorch's profiler whenever it starts or stops


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _explain_death(returncode: int, stage: str, log: bytes, *, oom_killed: bool) -> Died:
    text = log[-_LOG_TAIL:].decode(errors="replace")
    lines = (line.strip()[:200] for line in reversed(text.splitlines()))
    last = next((line for line in lines if line and not line.startswith(_PROFILER_NOISE)), "")
    said = f"; last output: {last}" if last else ""
    if returncode == -signal.SIGKILL and oom_killed:
        return Died(status="oom", reason=f"killed by the kernel's out-of-memory killer while {stage}")
    if mentions_out_of_memory(text):
        return Died(status="oom", reason=f"out of memory while {stage}{said}")
    if returncode >= 0:
        return Died(status="crash", reason=f"exited with status {returncode} while {stage}{said}")
    name = signal.Signals(-returncode).name
    if -returncode in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return Died(status="killed", reason=f"killed by {name} while {stage}")
    return Died(status="crash", reason=f"crashed with {name} while {stage}{said}")


def _kernel_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
