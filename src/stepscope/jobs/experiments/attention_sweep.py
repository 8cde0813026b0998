"""`stepscope attention`: one process an implementation, a row a case, resumable like any sweep.

A worker has a word for each case as it is done. When one ends before its last case, the case it was at has a row that
says how, and another worker goes on behind it.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.cost.attention import flops_of_attention
from stepscope.jobs.experiments.attention_grid import AttentionGrid
from stepscope.jobs.experiments.sweep import RESULTS_NAME, Listener, judge, keep_log, look_at
from stepscope.jobs.workers.messages import AttentionDone, AttentionMeasured, Failed, MeasureAttention
from stepscope.jobs.workers.process import Ended, RefusedError, Workers, require_torch
from stepscope.recording.rows.attention import AttentionCase, AttentionOutcome, AttentionRow
from stepscope.recording.rows.bench import Environment, Retry, case_key
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import build_case

# For the time left: what a case takes besides its repetitions, and the share of the peak that they run at.
EXPECTED_EXTRA_S = 0.3
EXPECTED_SHARE = 0.1
_PROCESS_ENDED = ("crash", "killed", "timeout", "error")


class PlannedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """A case with the environment it will run in."""

    case: AttentionCase
    environment: Environment

    @property
    def key(self) -> str:
        return case_key(self.case, self.environment, None)

    @property
    def expected_s(self) -> float:
        """A guess: three timings, each of forward or backward or both."""
        peak = self.environment.hardware.peak_flops.get(self.case.precision, 1e11)
        each_s = flops_of_attention(self.case).both / (EXPECTED_SHARE * peak)
        return EXPECTED_EXTRA_S + 3 * min(self.case.seconds, self.case.repetitions * each_s)


@dataclass(frozen=True, kw_only=True)
class AttentionSweep:
    """How to run a grid. `retry` runs some cases again, `fresh` all of them; older rows stay in the file."""

    folder: Path
    command: str
    retry: Retry | None = None
    fresh: bool = False
    timeout_s: float | None = None

    def run(self, grid: AttentionGrid, listener: Listener) -> tuple[AttentionRow, ...]:
        """The rows of all cases in the grid's order, whether they were measured now or before."""
        require_torch()
        with self._open() as results, Workers() as workers:
            return self._run_all(_plan(grid, workers, self.timeout_s), results, workers, listener)

    def run_planned(
        self, planned: Sequence[PlannedAttention], workers: Workers, listener: Listener
    ) -> tuple[AttentionRow, ...]:
        """The same for cases that were planned before, by whoever has other things for these workers to do."""
        with self._open() as results:
            return self._run_all(planned, results, workers, listener)

    def _open(self) -> AbstractContextManager[ResultsFile[AttentionRow]]:
        return ResultsFile.open(self.folder / RESULTS_NAME, AttentionRow)

    def _run_all(
        self,
        planned: Sequence[PlannedAttention],
        results: ResultsFile[AttentionRow],
        workers: Workers,
        listener: Listener,
    ) -> tuple[AttentionRow, ...]:
        kept = {row.key: row for row in results.rows}
        rows = {one.key: kept[one.key] for one in planned if one.key in kept and self._is_done(kept[one.key])}
        waiting = [one for one in planned if one.key not in rows]
        listener.begin(waiting, list(rows.values()), results.damaged_bytes)
        for _, alike in itertools.groupby(waiting, key=lambda one: one.case.implementation):
            turn = _Turn(sweep=self, waiting=deque(alike), results=results, listener=listener)
            rows |= {row.key: row for row in turn.run(workers)}
        return tuple(rows[one.key] for one in planned)

    def _is_done(self, row: AttentionRow) -> bool:
        return not self.fresh and row.is_settled(self.retry)


@dataclass(kw_only=True)
class _Turn:
    """The cases of one implementation that wait, and the writing of their rows as they come."""

    sweep: AttentionSweep
    waiting: deque[PlannedAttention]
    results: ResultsFile[AttentionRow]
    listener: Listener

    def run(self, workers: Workers) -> list[AttentionRow]:
        self._rows: list[AttentionRow] = []
        while self.waiting:
            self._start()
            request = MeasureAttention(cases=tuple(one.case for one in self.waiting))
            ended = workers.run(
                request, on_stage=self.listener.stage, on_part=self._take, timeout_s=self.sweep.timeout_s
            )
            if isinstance(ended.answer, AttentionDone):
                assert not self.waiting, "a worker was done before its cases were"
            else:
                if isinstance(ended.answer, Failed) and ended.answer.bad_input:
                    raise RefusedError(ended.answer)
                self._blame(ended)
        return self._rows

    def _blame(self, ended: Ended) -> None:
        """The case that ran is the one that failed. After the last there is none: all rows are there, and stand."""
        if not self.waiting:
            return
        status, reason = judge(ended.answer)
        if status in _PROCESS_ENDED:
            keep_log(self.sweep.folder, self.waiting[0].key, ended.log)
        self._keep(AttentionOutcome(status=status, reason=reason))

    def _start(self) -> None:
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self.listener.start(self.waiting[0])

    def _take(self, measured: AttentionMeasured) -> None:
        self._keep(measured.outcome)
        if self.waiting:
            self._start()

    def _keep(self, outcome: AttentionOutcome) -> None:
        one = self.waiting.popleft()
        row = AttentionRow(
            key=one.key,
            case=one.case,
            environment=one.environment,
            status=outcome.status,
            reason=outcome.reason,
            started=self._started.isoformat(timespec="seconds"),
            wall_s=round(time.monotonic() - self._clock, 3),
            command=self.sweep.command,
            measurement=outcome.measurement,
            doubts=outcome.doubts,
        )
        self.results.append(row)
        self._rows.append(row)
        self.listener.finish(row)


def _plan(grid: AttentionGrid, workers: Workers, timeout_s: float | None) -> Sequence[PlannedAttention]:
    """The cases with what they will run on. Which precisions there are without a word depends on the device."""
    environment = _look(grid.device, grid.precision or ("fp32",), workers, timeout_s)
    cases = grid.cases(environment.device)
    needed = tuple(dict.fromkeys(case.precision for case in cases))
    if not set(needed) <= set(environment.hardware.peak_flops):
        environment = _look(grid.device, needed, workers, timeout_s)
    return [PlannedAttention(case=case, environment=environment) for case in cases]


def _look(device: str, precisions: Sequence[str], workers: Workers, timeout_s: float | None) -> Environment:
    """By way of a workload, which names a device and a precision; its model is not run."""
    stands_in = [build_case({"device": device, "precision": precision}) for precision in precisions]
    return look_at(stands_in, workers, timeout_s).environment
