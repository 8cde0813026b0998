"""Where ranks are born: `python -m MODULE SOCKET_FD REQUEST_FD PARENT_PID ANSWER_FD,LOG_FD ...`.

Importing torch takes seconds, so one process imports it for all ranks and forks them. It tells how each of them ended.
It dies with the process that started it, and the ranks die with it.
"""

import os
import socket
import sys
from contextlib import suppress

import msgspec

from stepscope.jobs.workers.messages import Birth
from stepscope.jobs.workers.nursery import die_with
from stepscope.jobs.workers.rank import serve


def main(arguments: list[str]) -> None:
    socket_fd, request_fd, parent = (int(argument) for argument in arguments[:3])
    descriptors = [tuple(int(part) for part in pair.split(",")) for pair in arguments[3:]]
    die_with(parent)
    with os.fdopen(request_fd, "rb") as pipe:
        birth = msgspec.json.decode(pipe.read(), type=Birth)
    with suppress(ImportError):  # each rank meets the same error, and tells it
        import torch._dynamo  # noqa: F401

        import stepscope.measure.training  # noqa: F401
    with socket.socket(fileno=socket_fd) as news:
        ranks = {_raise_one(birth, rank, answer, log, news): rank for rank, (answer, log) in enumerate(descriptors)}
        for answer, log in descriptors:
            os.close(answer)
            os.close(log)
        news.send(b"pids " + b" ".join(b"%d" % process for process in ranks))
        while ranks:
            process, status = os.wait()
            news.send(b"end %d %d" % (ranks.pop(process), os.waitstatus_to_exitcode(status)))


def _raise_one(birth: Birth, rank: int, answer: int, log: int, news: socket.socket) -> int:
    nursery = os.getpid()
    process = os.fork()
    if process == 0:
        news.close()
        os.setsid()
        die_with(nursery)
        os.dup2(log, 1)
        os.dup2(log, 2)
        serve(birth.setup, birth.request, rank, answer)
    return process


if __name__ == "__main__":
    main(sys.argv[1:])
