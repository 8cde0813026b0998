"""Workers: timeouts, with a fake nursery, and the wording of their errors."""

import os
import socket
import threading
import time
from tempfile import TemporaryFile
from types import SimpleNamespace

import msgspec
import pytest

from stepscope.jobs.workers.messages import Failed, Inspect
from stepscope.jobs.workers.process import _Worker
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
