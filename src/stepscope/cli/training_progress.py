"""What a person sees while a model trains: a bar on a terminal, a line now and then anywhere else."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stepscope.cli.output import say
from stepscope.explain.experiments.train_tables import say_step
from stepscope.jobs.workers.rank_messages import RankMessage, Resumed, Saved, Stepped
from stepscope.recording.rows.train import TrainRow

_EVERY_S = 5.0  # between lines where there is no terminal


@contextmanager
def watching(steps: int) -> Iterator[Callable[[RankMessage], None]]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Lines(steps).hear
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        yield _Bar(progress, steps).hear


class _Lines:
    """The first step, then one every few seconds, the first whose loss is not finite, and the last."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._said_at = float("-inf")
        self._was_finite = True

    def hear(self, message: RankMessage) -> None:
        match message:
            case Resumed(step=step) if step:
                say(f"going on after step {step}" if step < self._steps else f"all {step} steps are done already")
            case Stepped(row=row) if self._is_worth_a_line(row):
                self._said_at = time.monotonic()
                self._was_finite = row.is_finite
                say(f"[{row.step}/{self._steps}] {say_step(row)}")

    def _is_worth_a_line(self, row: TrainRow) -> bool:
        diverged = self._was_finite and not row.is_finite
        return diverged or row.step == self._steps or time.monotonic() - self._said_at > _EVERY_S


class _Bar:
    """All steps as they come. The first whose loss is not finite stays on the screen."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=steps)
        self._saved = ""
        self._was_finite = True

    def hear(self, message: RankMessage) -> None:
        match message:
            case Resumed(step=step):
                self._progress.update(self._task, completed=step, description="building")
            case Stepped(row=row):
                if self._was_finite and not row.is_finite:
                    self._progress.console.print(f"step {row.step}: {say_step(row)}")
                self._was_finite = row.is_finite
                self._progress.update(self._task, completed=row.step, description=say_step(row) + self._saved)
            case Saved(step=step):
                self._saved = f", saved at {step}"
