"""What a person sees while a sweep runs: a bar with the time left on a terminal, a line a case anywhere else."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stepscope.explain.experiments.cases import brief, describe_case
from stepscope.jobs.experiments.sweep import LOGS_NAME, Listener, Waiting
from stepscope.recording.rows.bench import Row
from stepscope.report.formats import visible


@contextmanager
def choose_listener(
    outcome_of: Callable[[Any], str], describe: Callable[[Any], str] = describe_case
) -> Iterator[Listener]:
    """`outcome_of` is a finished row in a few words, `describe` a case."""
    console = Console(stderr=True, highlight=False)
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Lines(console, outcome_of, describe)
        return
    columns = (
        TextColumn("{task.fields[count]}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, speed_estimate_period=3600) as progress:
        yield _Bar(console, progress, outcome_of, describe)


class _Lines:
    """One line a case, as it is done."""

    def __init__(self, console: Console, outcome_of: Callable[[Any], str], describe: Callable[[Any], str]) -> None:
        self._console = console
        self._outcome_of = outcome_of
        self._describe = describe
        self._total = 0
        self._finished = 0

    def begin(self, planned: Sequence[Waiting], done: Sequence[Row], repaired_bytes: int) -> None:
        self._total = len(planned)
        if repaired_bytes:
            self._say(f"repaired: a last line cut short ({repaired_bytes} bytes) was moved to results.jsonl.damaged")
        if done:
            self._say(f"{len(done)} of {len(done) + len(planned)} cases are done already; --fresh measures them again")

    def start(self, planned: Waiting) -> None:
        pass

    def stage(self, name: str) -> None:
        pass

    def finish(self, row: Row) -> None:
        self._finished += 1
        outcome = self._outcome_of(row) if row.status == "ok" else f"{row.status}: {brief(row.reason)}"
        log = "" if row.status in ("ok", "oom", "unsupported", "wrong") else f" ({LOGS_NAME}/{row.key}.log)"
        self._say(f"[{self._finished}/{self._total}] {self._describe(row.case)}: {outcome}{log}")

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a log on a full disk must not end the sweep
            self._console.print(visible(text), markup=False, soft_wrap=True)


class _Bar(_Lines):
    """A bar below the lines of what failed. Its length is the work that the cases are expected to be."""

    def __init__(
        self,
        console: Console,
        progress: Progress,
        outcome_of: Callable[[Any], str],
        describe: Callable[[Any], str],
    ) -> None:
        super().__init__(console, outcome_of, describe)
        self._progress = progress
        self._task = progress.add_task("looking at the device", total=None, count="")
        self._running: Waiting | None = None
        self._failed = 0

    def begin(self, planned: Sequence[Waiting], done: Sequence[Row], repaired_bytes: int) -> None:
        super().begin(planned, done, repaired_bytes)
        self._progress.update(self._task, total=sum(one.expected_s for one in planned))

    def start(self, planned: Waiting) -> None:
        self._running = planned
        self._update("starting")

    def stage(self, name: str) -> None:
        self._update(name)

    def finish(self, row: Row) -> None:
        assert self._running is not None
        if row.status == "ok":
            self._finished += 1
        else:
            super().finish(row)
            self._failed += 1
        self._progress.advance(self._task, self._running.expected_s)

    def _update(self, stage: str) -> None:
        assert self._running is not None
        failed = f", {self._failed} failed" if self._failed else ""
        self._progress.update(
            self._task,
            count=f"{self._finished}/{self._total}{failed}",
            description=f"{self._describe(self._running.case)}: {stage}",
        )
