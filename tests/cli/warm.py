"""Commands as forks of a process that has already imported what they import.

Importing torch takes most of the time of a command on a tiny model. A server imports it once, without running anything,
and forks a process per command: it has its own memory, directory, variables and streams, and ends like any other. The
Python processes that a command starts or becomes, such as the nursery of its workers, are forks as well.

Commands that tests start in the background, signal or look for are ordinary processes (`command.start`), and so are
those with variables that Python or torch reads when it starts.
"""

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn, Self

# In the command line of every process here.
FORKED = "tests.cli.warm"
_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
_LONGEST = 1 << 20  # of a request, in bytes
# What commands import while they run. The first group never imports torch.
_ANALYSIS = ("cli", "api", "explain", "render", "recording", "recover", "jobs", "cost", "spec")
_MEASURING = ("measure", "step", "nn", "kernels", "parallel", "fast", "planner")
# Before any test changes them.
_VARIABLES = dict(os.environ)
# Set in the process of the tests alone: by pytest, Inductor (one is an address), Lightning and Polars, and by us when a
# test builds a Hugging Face model or joins a group.
_ITS_OWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
_ITS_OWN |= {"PYTORCH_NVML_BASED_CUDA_CHECK", "_RJEM_MALLOC_CONF"}
_ITS_OWN |= {"HF_HUB_OFFLINE", "TORCH_NCCL_ENABLE_TIMING", "GLOO_SOCKET_IFNAME"}
_OPTIONAL = "stepscope.api.mcp_server"
# Modules that a command runs in a process of their own, and the most that it starts one after another.
_STARTED = ("stepscope.jobs.workers.nursery", "stepscope.api.finish_run")
_MOST_STARTED = dict.fromkeys(
    ("bench", "profile", "memory", "precision", "attention", "comm", "train", "optimise", "run", "doctor"), 1
)
_MOST_STARTED |= {"plan": 4, "report": 6}


# --- The side of the tests ---


def inherited_variables() -> dict[str, str]:
    """What a command gets from the tests."""
    return {name: value for name, value in os.environ.items() if name not in _ITS_OWN or name in _VARIABLES}


class Server:
    """A process that forks commands, with torch imported or not. It ends with the process that started it."""

    def __init__(self, *, with_torch: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), "torch" if with_torch else ""],
            cwd=_ROOT,
            env=_VARIABLES,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    @staticmethod
    def would_differ_in(variables: dict[str, str]) -> set[str]:
        names = _VARIABLES.keys() | variables.keys()
        return {name for name in names if _VARIABLES.get(name) != variables.get(name)} - _ITS_OWN

    def run(
        self, folder: Path, arguments: tuple[str, ...], variables: dict[str, str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """As `subprocess.run` with `capture_output`."""
        pipes = [os.pipe() for _ in range(2)]
        request = {"arguments": arguments, "folder": str(folder), "variables": variables}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs for _, theirs in pipes])
        for _, theirs in pipes:
            os.close(theirs)
        process = int(self._socket.recv(64))
        with _Reader(pipes[0][0]) as out, _Reader(pipes[1][0]) as errors:
            for reader in (out, errors):
                reader.join(timeout_s)
            if out.is_alive() or errors.is_alive():
                os.kill(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(arguments, timeout_s)
        return subprocess.CompletedProcess(arguments, int(self._socket.recv(64)), out.text, errors.text)


class _Reader(threading.Thread):
    """Reads a pipe to its end, which comes when the last process that can write to it has ended."""

    def __init__(self, pipe: int) -> None:
        super().__init__(daemon=True)
        self._pipe = os.fdopen(pipe, "r", encoding="utf-8")
        self.text = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_alive():
            self._pipe.close()

    def run(self) -> None:
        self.text = self._pipe.read()


@cache
def serve_with(*, torch: bool) -> Server:
    return Server(with_torch=torch)


# --- The server ---


def main(arguments: list[str]) -> None:
    connection, parent = (int(argument) for argument in arguments[:2])
    _die_with(parent)
    _import(_ANALYSIS)
    _parse_once()
    assert "torch" not in sys.modules
    if arguments[2]:
        import torch._dynamo  # noqa: F401

        _import(_MEASURING)
        measure_briefly()
    # Nothing imported here is ever garbage: the collectors of forked processes need not scan it, nor copy its pages.
    gc.collect()
    gc.freeze()
    command = _wait_for_command(socket.socket(fileno=connection))
    if command is not None:
        _prepare(*command)
        _run_and_exit("stepscope")


def _import(packages: tuple[str, ...]) -> None:
    for package in packages:
        found = import_module(f"stepscope.{package}")
        for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            if module.name != _OPTIONAL:
                import_module(module.name)


def _parse_once() -> None:
    """Typer imports what it needs to convert arguments when it does so first."""
    from typer.testing import CliRunner

    from stepscope.cli.main import app

    CliRunner().invoke(app, ["kernel", "gemm"])


def measure_briefly() -> None:
    """Most commands measure the peaks of the CPU, which takes over a second and only scales the shares that they print.
    The tests of `measure.environment` measure them in full. Those that record weigh the recorder for seconds, and a
    profiler needs as long again to stop."""
    from stepscope.measure import environment, timing

    timing.TURNS_S = 0.0
    environment._BUDGET_S = 0.0
    environment._COPIED_BYTES = 2**24
    environment._WIDTH = {"cpu": 512}


def _wait_for_command(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process per request and return in it, with its output and its errors; return None at the end."""
    with connection:
        while True:
            content, streams, _, _ = socket.recv_fds(connection, _LONGEST, 2)
            if not content:
                return None
            server, process = os.getpid(), os.fork()
            if process == 0:
                _die_with(server)
                return json.loads(content), streams
            for stream in streams:
                os.close(stream)
            connection.send(b"%d" % process)
            _, status = os.waitpid(process, 0)
            connection.send(b"%d" % os.waitstatus_to_exitcode(status))


def _prepare(request: dict[str, Any], streams: list[int]) -> None:
    """Make this process what `python -m stepscope` would be."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    arguments = request["arguments"]
    if "torch" in sys.modules and arguments:
        _fork_instead_of_starting([_Standby(streams) for _ in range(_MOST_STARTED.get(arguments[0], 0))])
    for stream, target in zip(streams, (1, 2), strict=True):
        os.dup2(stream, target)
        os.close(stream)
    _begin(arguments)


def _begin(arguments: list[str]) -> None:
    """What Python does before it runs a module."""
    from stepscope.loop.messages import TERMINAL  # a copy of standard error

    os.dup2(2, TERMINAL, inheritable=False)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["", *arguments]
    sys.path[0] = str(Path.cwd())


def _run(name: str) -> None:
    sys.modules.pop(name, None)  # or else it would run under two names, of which Python warns
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_and_exit(name: str) -> NoReturn:
    """Run a module and exit as Python does, but leave the memory to the kernel: to free what torch has imported takes
    three times as long as a command that refuses its arguments."""
    code: object = None
    try:
        _run(name)
    except SystemExit as end:
        code = end.code
    if not isinstance(code, int | None):  # a message: Python prints it
        sys.exit(str(code))
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and lets executors end theirs
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _fork_instead_of_starting(standbys: "list[_Standby]") -> None:
    """Let processes that wait for it run a module instead of starting a new Python."""
    from stepscope.jobs.workers import process
    from stepscope.loop import finish

    def start(command: list[str], **options: Any) -> Any:
        if standbys and command[3] in _STARTED:
            return standbys.pop().begin(command[3:], **options)
        return subprocess.Popen(command, **options)

    kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    for module in (process, finish):
        setattr(module, "subprocess", SimpleNamespace(Popen=start, **kept))  # noqa: B010  # not a module
    os.execv = _become  # type: ignore[assignment]


def _become(_program: str, command: list[str]) -> NoReturn:
    """Run another module in this process, which is what `stepscope run` becomes."""
    name, *arguments = command[command.index("-m") + 1 :]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _begin(arguments)
    _run_and_exit(name)


class _Standby:
    """A forked process that waits until it runs a module. For its parent it is like a `Popen`.

    It is forked before the command begins, because threads would not survive later.
    """

    def __init__(self, streams: list[int]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _die_with(parent)
            self._socket.close()
            code = 0
            try:
                code = _stand_by(theirs, streams)
            finally:
                os._exit(code)
        theirs.close()

    def begin(
        self,
        command: list[str],
        *,
        stdout: IO[bytes] | int,
        pass_fds: tuple[int, ...] = (),
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        **_: Any,
    ) -> Self:
        request: dict[str, Any] = {"command": command, "folder": str(cwd or Path.cwd()), "descriptors": pass_fds}
        request["variables"] = env or dict(os.environ)
        output = stdout if isinstance(stdout, int) else stdout.fileno()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [output, *pass_fds])
        self._socket.close()
        return self

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self._returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            is_ended = bool(select.select([ended], [], [], timeout)[0])
            os.close(ended)
            if not is_ended:
                raise subprocess.TimeoutExpired("python", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code


def _stand_by(requests: socket.socket, streams: list[int]) -> int:
    """Wait for the module to run, run it in its own session, and return its exit status.

    Until then it holds the streams of the command open, so that their end means that it is gone.
    """
    content, received, _, _ = socket.recv_fds(requests, _LONGEST, 2)
    if not content:
        return 0
    output, *descriptors = received
    requests.close()
    for stream in streams:
        os.close(stream)
    request = json.loads(content)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    for descriptor, target in zip(descriptors, request["descriptors"], strict=True):
        os.dup2(descriptor, target)
    for target in (1, 2):
        os.dup2(output, target)
    name, *arguments = request["command"]
    _begin(arguments)
    del sys.path[0]  # as with -P
    try:
        _run(name)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
