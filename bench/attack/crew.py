"""Processes that work through a list of tasks, and that are replaced if a task takes too long, too much, or kills one.

A pool of the standard library cannot end a single task. Forgeries that exhaust time or memory are the reason to have
bounds, so each process gets one task at a time, and the parent watches it.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

Lost = Literal["too slow", "too large", "crashed"]
Task = TypeVar("Task")
Result = TypeVar("Result")
_LOOK_SECONDS = 0.2
_PAGE = 4096


@dataclass(slots=True)
class _Worker(Generic[Task, Result]):
    work: Callable[[Task], Result]
    spawn: multiprocessing.context.SpawnContext = field(default_factory=lambda: multiprocessing.get_context("spawn"))
    task: Task | None = None
    began: float = 0.0

    def __post_init__(self) -> None:
        self.start()

    process: multiprocessing.context.SpawnProcess = field(init=False)
    pipe: "multiprocessing.connection.Connection[object, object]" = field(init=False)

    def start(self) -> None:
        self.pipe, theirs = self.spawn.Pipe()
        self.process = self.spawn.Process(target=_serve, args=(theirs, self.work), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()  # it has imported what it needs, and its time starts now

    def give(self, task: Task) -> None:
        self.task, self.began = task, self.used_seconds()
        self.pipe.send(task)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def resident_bytes(self) -> int:
        statistics = Path(f"/proc/{self.process.pid}/statm")
        return int(statistics.read_text().split()[1]) * _PAGE if statistics.exists() else 0

    def used_seconds(self) -> float:
        """Return the CPU time of the process, which does not depend on other programs, or the time if unknown."""
        statistics = Path(f"/proc/{self.process.pid}/stat")
        if not statistics.exists():
            return time.monotonic()
        user, system = statistics.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _serve(pipe: "multiprocessing.connection.Connection[Result, Task]", work: Callable[[Task], Result]) -> None:
    pipe.send(None)  # type: ignore[arg-type]
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(work(task))


def work_through(
    tasks: Sequence[Task],
    work: Callable[[Task], Result],
    *,
    jobs: int,
    most_seconds: float,
    most_bytes: int,
    title: str,
) -> Iterator[tuple[Task, Result | Lost]]:
    """Yield each task with its result, or with why there is none, in the order in which they finish."""
    waiting, done = deque(tasks), 0
    workers = [_Worker[Task, Result](work) for _ in range(min(jobs, len(tasks)))]
    try:
        while waiting or any(one.task is not None for one in workers):
            for one in workers:
                if one.task is None and waiting:
                    one.give(waiting.popleft())
            multiprocessing.connection.wait([one.pipe for one in workers if one.task is not None], _LOOK_SECONDS)
            for one in workers:
                if one.task is None:
                    continue
                finished = _collect(one, most_seconds, most_bytes)
                if finished is None:
                    continue
                yield one.task, finished[0]
                one.task, done = None, done + 1
                _show(f"{title}: {done:,} of {len(tasks):,}", is_last=done == len(tasks))
    finally:
        for one in workers:
            one.stop()


def _collect(worker: _Worker[Task, Result], most_seconds: float, most_bytes: int) -> tuple[Result | Lost] | None:
    """Return what a worker has, or None if it is still within its bounds."""
    lost: Lost | None = None
    if worker.pipe.poll():
        try:
            return (worker.pipe.recv(),)  # type: ignore[return-value]
        except (EOFError, ConnectionResetError):
            lost = "crashed"
    elif not worker.process.is_alive():
        lost = "crashed"
    elif worker.resident_bytes() > most_bytes:
        lost = "too large"
    elif worker.used_seconds() - worker.began > most_seconds:
        lost = "too slow"
    if lost is None:
        return None
    worker.stop()
    worker.start()
    return (lost,)


def _show(text: str, *, is_last: bool) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if is_last else "", file=sys.stderr, flush=True)
    elif is_last or text.split()[-3].replace(",", "").endswith("00"):
        print(text, file=sys.stderr, flush=True)
