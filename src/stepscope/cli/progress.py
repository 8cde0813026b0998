"""Progress of a sweep or a training run: a bar with the time left on a terminal, lines of text anywhere else."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from stepscope.cli.output import say
from stepscope.explain.experiments.cases import brief, describe_case
from stepscope.explain.experiments.train_tables import say_step
from stepscope.jobs.experiments.sweep import LOGS_NAME, PlannedCase, SweepListener
from stepscope.jobs.workers.messages import RankMessage, Resumed, Saved, Stepped
from stepscope.recording.rows.bench import Row
from stepscope.recording.rows.training_log import TrainRow
from stepscope.render.formats import visible

_EVERY_S = 5.0  # between lines of training progress without a terminal
_INSPECTING = "inspecting the device"


def _make_bar(count: ProgressColumn, console: Console, *, estimate_s: float = 30.0) -> Progress:
    """A bar with `count` in front of it. The time left is estimated from the last `estimate_s` seconds."""
    columns = (
        count,
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console, transient=True, speed_estimate_period=estimate_s)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


# --- A sweep ----------------------------------------------------------------------------------------------------------


def say_end(row: Row, outcome_of: Callable[[Any], str]) -> str:
    """The outcome of a case, with the path of its log if it has one."""
    outcome = outcome_of(row) if row.status == "ok" else f"{row.status}: {brief(row.reason)}"
    log = "" if row.status in ("ok", "oom", "unsupported", "wrong") else f" ({LOGS_NAME}/{row.key}.log)"
    return outcome + log


@contextmanager
def choose_listener(
    outcome_of: Callable[[Any], str], describe: Callable[[Any], str] = describe_case
) -> Iterator[SweepListener]:
    """Yield a listener that shows a bar or lines. `outcome_of` summarizes a finished row, and `describe` a case."""
    console = Console(stderr=True, highlight=False)
    if not _is_terminal():
        lines = _SweepLines(console, outcome_of, describe)
        if os.environ.get("RANK", "0") == "0":  # under torchrun, only rank 0 prints
            lines.say(_INSPECTING)  # loading PyTorch and a model takes many seconds
        yield lines
        return
    with _make_bar(TextColumn("{task.fields[count]}"), console, estimate_s=3600) as progress:
        yield _SweepBar(console, progress, outcome_of, describe)


class _SweepLines:
    """One line when cases start to run, and one per finished case."""

    def __init__(self, console: Console, outcome_of: Callable[[Any], str], describe: Callable[[Any], str]) -> None:
        self._console = console
        self._outcome_of = outcome_of
        self._describe = describe
        self._total = 0
        self._finished = 0

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None:
        self._total = len(planned)
        if repaired_bytes:
            self.say(f"repaired: moved an incomplete last line ({repaired_bytes} bytes) to results.jsonl.damaged")
        if done:
            self.say(f"{len(done)} of {len(done) + len(planned)} cases are already done; --fresh measures them again")

    def start(self, planned: PlannedCase[Any]) -> None:
        if not self._finished:
            self.say(f"[1/{self._total}] {self._describe(planned.case)}: running")

    def stage(self, name: str) -> None:
        pass

    def finish(self, row: Row) -> None:
        self._finished += 1
        ended = say_end(row, self._outcome_of)
        self.say(f"[{self._finished}/{self._total}] {self._describe(row.case)}: {ended}")

    def say(self, text: str) -> None:
        with suppress(OSError):  # a full disk must not end the sweep
            self._console.print(visible(text), markup=False, soft_wrap=True)


class _SweepBar(_SweepLines):
    """A bar below one line per failed case. Its length is the expected time of all cases."""

    def __init__(
        self,
        console: Console,
        progress: Progress,
        outcome_of: Callable[[Any], str],
        describe: Callable[[Any], str],
    ) -> None:
        super().__init__(console, outcome_of, describe)
        self._progress = progress
        self._task = progress.add_task(_INSPECTING, total=None, count="")
        self._running: PlannedCase[Any] | None = None
        self._failed = 0

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None:
        super().begin(planned, done, repaired_bytes)
        self._progress.update(self._task, total=sum(one.expected_s for one in planned))

    def start(self, planned: PlannedCase[Any]) -> None:
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


# --- Training ---------------------------------------------------------------------------------------------------------


@contextmanager
def watching_training(steps: int) -> Iterator[Callable[[RankMessage], None]]:
    if not _is_terminal():
        yield _TrainingLines(steps).hear
        return
    with _make_bar(MofNCompleteColumn(), Console(stderr=True, highlight=False)) as progress:
        yield _TrainingBar(progress, steps).hear


class _TrainingLines:
    """A line for the first step, one every few seconds, the first step with a non-finite loss, and the last step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._said_at = float("-inf")
        self._was_finite = True

    def hear(self, message: RankMessage) -> None:
        match message:
            case Resumed(step=step) if step:
                say(f"resuming after step {step}" if step < self._steps else f"all {step} steps are already done")
            case Stepped(row=row) if self._is_worth_a_line(row):
                self._said_at = time.monotonic()
                self._was_finite = row.is_finite
                say(f"[{row.step}/{self._steps}] {say_step(row)}")

    def _is_worth_a_line(self, row: TrainRow) -> bool:
        diverged = self._was_finite and not row.is_finite
        return diverged or row.step == self._steps or time.monotonic() - self._said_at > _EVERY_S


class _TrainingBar:
    """A bar over all steps. The first step with a non-finite loss stays on the screen."""

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
