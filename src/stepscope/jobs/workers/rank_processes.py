"""Ranks on this machine: started, listened to, and ended together.

When one rank fails, the others fail because of it. So the first failure is not always the one to report: failures that
arrive within a moment of each other are compared, and a rank that died or raised on its own comes before those that
were waiting for it.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import scratch_folder, writing
from stepscope.jobs.workers.messages import BeRank, RankDone, RankFailed, RankMessage, RankRequest, Setup
from stepscope.jobs.workers.process import Nursery, ask, hear, require_torch
from stepscope.parallel.journal import find_culprit, read_journals

LOGS_NAME, JOURNAL_NAME = "logs", "journal"
_GRACE_S = 3.0  # for ranks that wait for a failed one to report it
Heard = Callable[[int, RankMessage], None]


def run_ranks(request: RankRequest, setup: Setup, folder: Path, on_message: Heard) -> None:
    """Run all ranks to their end, with logs in `folder`, which is ours. A `StepscopeError` names the rank that failed
    and its last collective; the others are stopped before it is raised.
    """
    require_torch()
    journal = Path(setup.journal)
    with writing(folder):
        journal.mkdir(parents=True, exist_ok=True)
        (folder / LOGS_NAME).mkdir(exist_ok=True)
        for old in [path for path in journal.glob("*.journal") if path.stem.isdigit()]:
            old.unlink()
    with scratch_folder() as meeting:
        here = msgspec.structs.replace(setup, meeting=f"{meeting}/ranks")
        with _RankProcesses(here, request, folder / LOGS_NAME) as ranks:
            ranks.listen(on_message)
            if ranks.failed:
                raise _explain(ranks, journal, folder / LOGS_NAME)


class _RankProcesses:
    """The processes, from start to end."""

    def __init__(self, setup: Setup, request: RankRequest, logs: Path) -> None:
        self.failures: dict[int, RankFailed] = {}
        self.codes: dict[int, int] = {}
        self._world = setup.world
        self._processes: list[int] = []
        self._unread: dict[int, bytes] = {}
        self._ranks: dict[int, int] = {}  # ranks by pipe
        self._nursery = Nursery(("stepscope.measure.training",), (logs / "start.log").open("wb"))
        for rank in range(setup.world):
            with (logs / f"rank-{rank}.log").open("wb") as log:
                pipe = ask(self._nursery.socket, BeRank(setup=setup, request=request, rank=rank), log)
            self._ranks[pipe] = rank
            self._unread[pipe] = b""

    @property
    def failed(self) -> bool:
        return bool(self.failures) or any(self.codes.values()) or len(self.codes) < self._world

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        # Until the nursery has seen all of them end: the next group must not meet leftovers of this one.
        deadline = time.monotonic() + _GRACE_S
        while len(self.codes) < len(self._processes):
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([self._nursery.socket], [], [], remaining)[0] or not self._hear():
                break
        self._nursery.close()
        for pipe in self._ranks:
            os.close(pipe)

    def listen(self, on_message: Heard) -> None:
        """Wait until all have ended, or until a moment after the first failure."""
        news = self._nursery.socket.fileno()
        sources = {news, *self._ranks}
        deadline: float | None = None
        while sources and len(self.codes) < self._world:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(sources, [], [], remaining)
            if not ready:
                return
            for source in ready:
                if not (self._hear() if source == news else self._read(source, on_message)):
                    sources.discard(source)
            if deadline is None and (self.failures or any(self.codes.values())):
                deadline = time.monotonic() + _GRACE_S

    def _hear(self) -> bool:
        """Read messages of the nursery; return False if it is gone."""
        word, numbers = hear(self._nursery.socket)
        if word == b"pid":
            self._processes += numbers
        elif word == b"end":
            self.codes[self._processes.index(numbers[0])] = numbers[1]
        return bool(word)

    def _read(self, pipe: int, on_message: Heard) -> bool:
        content = os.read(pipe, 1 << 16)
        *lines, self._unread[pipe] = (self._unread[pipe] + content).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line, type=RankMessage)
            if isinstance(message, RankFailed):
                self.failures[self._ranks[pipe]] = message
            elif not isinstance(message, RankDone):
                on_message(self._ranks[pipe], message)
        return bool(content)


def _explain(ranks: _RankProcesses, journal: Path, logs: Path) -> StepscopeError:
    """A rank that died comes first, then one that raised on its own, then those that were waiting."""
    last = {entry.rank: entry.last_collective for entry in read_journals(journal)}
    died = [rank for rank, code in sorted(ranks.codes.items()) if code and rank not in ranks.failures]
    by_themselves = [rank for rank, failure in sorted(ranks.failures.items()) if not failure.in_collective]
    culprit = next(iter(died + by_themselves + sorted(ranks.failures)), None)
    if culprit is None:
        return StepscopeError("the ranks exited during startup", hint=f"less {logs / 'start.log'}")
    log = f"less {logs / f'rank-{culprit}.log'}"
    at = last.get(culprit, "before joining the other ranks")
    failure = ranks.failures.get(culprit)
    if failure is None:
        code = ranks.codes[culprit]
        behind = find_culprit(read_journals(journal)) if code == -signal.SIGABRT else None
        # a backend aborts its process when another rank does not answer
        if behind is not None and behind.rank not in died:
            return StepscopeError(
                f"rank {behind.rank} fell behind, {behind.last_collective}",
                detail=f"the backend aborted rank {culprit} while it was waiting; the other ranks were stopped",
                hint=f"less {logs / f'rank-{behind.rank}.log'}",
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return StepscopeError(f"rank {culprit} {how}, {at}", detail="the other ranks were stopped", hint=log)
    if failure.in_collective:
        return StepscopeError(failure.message, detail=failure.detail, hint=log)
    detail = "\n".join(filter(None, (failure.detail, f"the rank stopped {at}")))
    return StepscopeError(f"rank {culprit}: {failure.message}", detail=detail, hint=failure.hint or log)
