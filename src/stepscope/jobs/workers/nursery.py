"""Where workers are born: `python -m stepscope.jobs.workers.nursery SOCKET_FD PARENT_PID`.

It imports what every worker needs, then forks one for each request that comes over its socket, tells its process id,
and tells how it ended. It dies with the sweep that started it, and workers die with it.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from contextlib import suppress

from stepscope.jobs.workers.worker import serve

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    socket_fd, parent = (int(argument) for argument in arguments)
    die_with(parent)
    _import_torch()
    with socket.socket(fileno=socket_fd) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 16, 3)
            if not message:
                return
            _raise_one(requests, *descriptors)


def _import_torch() -> None:
    """Where torch is missing or broken in a way that Python can tell, a worker meets the same error and reports it."""
    with suppress(ImportError):
        import torch._dynamo  # noqa: F401  # the optimizers' base class imports it when one is made; it takes as long as torch

        import stepscope.measure.bench  # noqa: F401
    # Nothing imported here is ever garbage: the workers' collectors need not look at it, nor copy its pages.
    gc.collect()
    gc.freeze()


def _raise_one(requests: socket.socket, request: int, answer: int, output: int) -> None:
    nursery = os.getpid()
    worker = os.fork()
    if worker == 0:
        requests.close()
        os.setsid()
        die_with(nursery)
        os.dup2(output, 1)
        os.dup2(output, 2)
        serve(request, answer)
    for descriptor in (request, answer, output):
        os.close(descriptor)
    requests.send(b"pid %d" % worker)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    # While it is not reaped its number cannot be another's, so this can only hit what it left behind.
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    requests.send(b"end %d" % os.waitstatus_to_exitcode(status))


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
