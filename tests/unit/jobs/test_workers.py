"""Workers: timeouts, with a fake nursery, and the wording of their errors."""

import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile
from types import SimpleNamespace

import msgspec
import pytest

from stepscope.jobs.workers.messages import Failed, Inspect
from stepscope.jobs.workers.process import Died, Workers, _Worker
from stepscope.measure.failures import say_in_a_line

ANSWER = Failed(message="no GPU", detail="", hint="")
TIMEOUT_S = 0.1


def test_importing_torch_does_not_count_against_the_timeout() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def import_for_long_and_answer() -> None:
        _, (request, answers, output), _, _ = socket.recv_fds(theirs, 16, 3)
        time.sleep(5 * TIMEOUT_S)
        os.write(answers, msgspec.json.encode(ANSWER) + b"\n")
        theirs.send(b"pid 1")
        for descriptor in (request, answers, output):
            os.close(descriptor)

    thread = threading.Thread(target=import_for_long_and_answer)
    thread.start()
    with TemporaryFile() as output:
        worker = _Worker(SimpleNamespace(socket=ours), Inspect(), output)  # type: ignore[arg-type]
        assert list(worker.listen(TIMEOUT_S)) == []
    thread.join()
    os.close(worker._answers)
    ours.close()
    theirs.close()
    assert not worker.timed_out
    assert worker.answer == ANSWER


def test_killing_ends_what_another_thread_waits_for() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def watch() -> None:
        _, descriptors, _, _ = socket.recv_fds(theirs, 16, 3)
        theirs.send(f"pid {process.pid}".encode())
        theirs.send(f"end {process.pid} {process.wait()}".encode())
        for descriptor in descriptors:
            os.close(descriptor)

    workers = Workers()
    workers.kill()  # nothing runs
    workers._nursery = SimpleNamespace(socket=ours, is_alive=lambda: True)  # type: ignore[assignment]
    with ThreadPoolExecutor() as threads:
        threads.submit(watch)
        ended = threads.submit(workers.run, Inspect())
        while (worker := workers._running) is None or worker._pid is None:
            time.sleep(0.001)
        workers.kill()
        assert ended.result(10).answer == Died(status="killed", reason="killed by SIGKILL while starting")
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no such dataset\nand more", "ValueError: no such dataset"),
        (
            "Validation error for field 'size':\n    TypeError: not an int",
            "ValueError: Validation error for field 'size': TypeError: not an int",
        ),
        ("", "ValueError"),
    ],
)
def test_one_line_error_keeps_its_reason(text: str, said: str) -> None:
    assert say_in_a_line(ValueError(text)) == said
