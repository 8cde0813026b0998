"""Starting a worker, listening to it, and saying how it ended when it could not say so itself."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.messages import Answer, Request, Result, Stage
from stepscope.measure.failures import mentions_out_of_memory
from stepscope.recording.bench import Status

# How often to look whether the worker is still there, besides being woken by its answers.
_TICK_S = 0.2
_LOG_TAIL = 20_000


class Died(msgspec.Struct, frozen=True, kw_only=True):
    """The worker ended without an answer."""

    status: Status
    reason: str


def require_torch() -> None:
    """Said before the first worker starts, and without importing torch here."""
    if find_spec("torch") is None:
        raise StepscopeError(
            "torch is not installed",
            detail="reading and explaining recordings works without it; running a model does not",
            hint="pip install 'stepscope[train]'",
        )


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker answered, or how it died, and what it printed."""

    answer: Result | Died
    log: bytes


def run_worker(
    request: Request, *, on_stage: Callable[[str], None] = lambda _: None, timeout_s: float | None = None
) -> Ended:
    """Runs one request in a process of its own."""
    oom_kills = _kernel_oom_kills()
    stage = "starting"
    answer: Result | None = None
    timed_out = False
    deadline = time.monotonic() + timeout_s if timeout_s else None
    with TemporaryFile() as output:
        worker, answers = _start(request, output.fileno())
        try:
            for message in _listen(worker, answers, deadline):
                if message is None:
                    timed_out = True
                elif isinstance(message, Stage):
                    stage = message.name
                    on_stage(stage)
                else:
                    answer = message
        finally:
            os.close(answers)
            _end(worker)
        output.seek(0)
        log = output.read()
    if answer is not None:
        return Ended(answer=answer, log=log)
    if timed_out:
        return Ended(answer=Died(status="timeout", reason=f"not done after {timeout_s:g} s, while {stage}"), log=log)
    died = _explain_death(worker.returncode, stage, log, oom_killed=_kernel_oom_kills() > oom_kills)
    return Ended(answer=died, log=log)


def _start(request: Request, output: int) -> tuple["subprocess.Popen[bytes]", int]:
    request_out, request_in = os.pipe()
    answer_out, answer_in = os.pipe()
    # -P: the current folder is put on the path when a factory is loaded, and not before: a stray `random.py` in it must
    # not break torch. A session of its own: Ctrl-C reaches us alone, and we end it.
    command = [sys.executable, "-P", "-m", "stepscope.jobs.worker"]
    worker = subprocess.Popen(
        [*command, str(request_out), str(answer_in), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(request_out, answer_in),
        start_new_session=True,
    )
    os.close(request_out)
    os.close(answer_in)
    try:
        with os.fdopen(request_in, "wb") as pipe:
            pipe.write(msgspec.json.encode(request))
    except BrokenPipeError:
        pass  # it died at once; listening finds out how
    return worker, answer_out


def _listen(worker: "subprocess.Popen[bytes]", answers: int, deadline: float | None) -> Iterator[Answer | None]:
    """Its messages until the last one or its end; None when time is up."""
    buffered = b""
    while True:
        ready, _, _ = select.select([answers], [], [], _TICK_S)
        if ready:
            content = os.read(answers, 1 << 16)
            if not content:
                return
            *lines, buffered = (buffered + content).split(b"\n")
            for line in lines:
                message = msgspec.json.decode(line, type=Answer)
                yield message
                if not isinstance(message, Stage):
                    return
        elif worker.poll() is not None:
            return
        if deadline is not None and time.monotonic() > deadline:
            yield None
            return


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Whatever it started goes with it. After an answer it is leaving by itself and gets a moment to do so."""
    with suppress(subprocess.TimeoutExpired):
        worker.wait(timeout=0.5 if sys.exc_info()[0] is None else 0)
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _explain_death(returncode: int, stage: str, log: bytes, *, oom_killed: bool) -> Died:
    text = log[-_LOG_TAIL:].decode(errors="replace")
    last = next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "")
    said = f"; it last said: {last}" if last else ""
    if returncode == -signal.SIGKILL and oom_killed:
        return Died(status="oom", reason=f"ended by the kernel's out-of-memory killer while {stage}")
    if mentions_out_of_memory(text):
        return Died(status="oom", reason=f"out of memory while {stage}{said}")
    if returncode >= 0:
        return Died(status="crash", reason=f"exited with {returncode} while {stage}{said}")
    name = signal.Signals(-returncode).name
    if -returncode in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return Died(status="killed", reason=f"killed by {name} while {stage}")
    return Died(status="crash", reason=f"crashed with {name} while {stage}{said}")


def _kernel_oom_kills() -> int:
    """How often the kernel has ended a process for want of memory since the machine started."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
