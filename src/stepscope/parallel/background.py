"""Threads that wait for messages, so that nobody else has to.

Python's own pools wait for their threads when the interpreter ends. A thread that waits for a dead rank would hold the
end of one that has failed up until the timeout, so these are left behind.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

# One may be adding up what it received while the other hears of a message that is there.
_THREADS = 2
Task = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class Background:
    """Does what it is given, in order, two things at a time."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        for number in range(_THREADS):
            Thread(target=_work, args=(self._tasks,), name=f"stepscope-{number}", daemon=True).start()

    def submit(self, function: Callable[..., None], *arguments: Any) -> "Future[None]":
        future: Future[None] = Future()
        self._tasks.put((future, function, arguments))
        return future


def _work(tasks: "SimpleQueue[Task]") -> None:
    while True:
        future, function, arguments = tasks.get()
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  # whoever waits for the result raises it
            future.set_exception(error)
        else:
            future.set_result(None)
