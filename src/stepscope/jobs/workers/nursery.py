"""Forks workers and ranks: `python -m stepscope.jobs.workers.nursery SOCKET_FD PARENT_PID MODULES`.

It imports torch and MODULES, which are separated by commas, then forks a process per request on its socket, and reports
its process id and how it ended. It dies with the process that started it, and the processes it forked die with it.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

from stepscope.jobs.workers.worker import serve

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    socket_fd, parent = (int(argument) for argument in arguments[:2])
    _die_with(parent)
    _import(arguments[2])
    children: dict[int, int] = {}  # process ids by the descriptors that become ready when the process ends
    # A broken pipe: the parent needs nothing more.
    with suppress(BrokenPipeError), socket.socket(fileno=socket_fd) as requests:
        while True:
            ready, _, _ = select.select([socket_fd, *children], [], [])
            for descriptor in [one for one in ready if one in children]:
                requests.send(b"end %d %d" % _bury(children.pop(descriptor)))
                os.close(descriptor)
            if socket_fd in ready:
                message, descriptors, _, _ = socket.recv_fds(requests, 16, 3)
                if not message:
                    break
                child = _raise_one(requests, *descriptors)
                children[os.pidfd_open(child)] = child
                requests.send(b"pid %d" % child)
    for child in children.values():
        _bury(child)


def _import(modules: str) -> None:
    """If torch is missing or its import raises, a worker hits the same error and reports it."""
    gc.disable()  # what is imported stays, and the collector took a sixth of the time to find that out again and again
    with suppress(ImportError):
        import torch._dynamo  # noqa: F401  # the optimizers' base class imports it when one is made; it takes as long as torch

        for module in modules.split(","):
            import_module(module)
    # Nothing imported here is ever garbage: the collectors of forked processes need not scan it, nor copy its pages.
    gc.collect()
    gc.freeze()
    gc.enable()


def _raise_one(requests: socket.socket, request: int, answer: int, output: int) -> int:
    nursery = os.getpid()
    child = os.fork()
    if child == 0:
        requests.close()
        os.setsid()
        _die_with(nursery)
        os.dup2(output, 1)
        os.dup2(output, 2)
        serve(request, answer)
    for descriptor in (request, answer, output):
        os.close(descriptor)
    return child


def _bury(child: int) -> tuple[int, int]:
    # Until it is reaped its process id cannot be reused, so this can only hit what it left behind.
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return child, os.waitstatus_to_exitcode(status)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
