"""`stepscope bench --slurm`: a grid dealt to the jobs of an array, and their rows collected as they come.

Whether a case is done shows in its key, and the key has the compute node's device in it, which is not known here. So a
job is given the rows that may be those of its cases, and finds out. Only where a job of an earlier submission to the
same place has said which row is whose, and the software is still the same, is nothing submitted for a case.
"""

import platform
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import stepscope
from stepscope.jobs.experiments.sweep import RESULTS_NAME, Timed
from stepscope.jobs.slurm.executor import holding_signals, make_executor, require_slurm, script, submit
from stepscope.jobs.slurm.resources import Resources
from stepscope.jobs.slurm.rows import Ledger, seed
from stepscope.jobs.slurm.submissions import Job, Kept, ShareWork, keep, next_folder, read_submissions
from stepscope.jobs.slurm.watch import Counts, Watch, raise_failures
from stepscope.jobs.workers.process import require_torch
from stepscope.recording.rows.bench import BenchRow, Retry
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import Case, Grid

_JOB_NAME = "stepscope-bench"


class SlurmListener(Protocol):
    """Who watches jobs from here."""

    def plan(self, num_done: int, num_cases: int) -> None:
        """So many cases are done already, of so many."""
        ...

    def begin(self, job_ids: Sequence[str], *, submitted: str | None) -> None:
        """The jobs that are waited for, and the number of the job or array among them that was submitted just now."""
        ...

    def finish(self, row: BenchRow) -> None: ...

    def news(self, counts: Counts) -> None: ...

    def fail(self, text: str) -> None: ...


@dataclass(frozen=True)
class _Place:
    """Where a case is done: which of its job's cases it is."""

    kept: Kept
    job: Job
    position: int

    def key(self) -> str | None:
        (outcome,) = self.job.outcomes()
        return outcome.keys[self.position] if outcome is not None and outcome.keys else None


@dataclass(frozen=True, kw_only=True)
class SlurmBench:
    """How to run a grid on a cluster, over `array` jobs. `retry` and `fresh` are as for a sweep that runs here."""

    folder: Path
    command: str
    resources: Resources
    array: int = 1
    retry: Retry | None = None
    fresh: bool = False
    timeout_s: float | None = None

    def script(self, grid: Grid) -> str:
        """What would be handed to sbatch if nothing of the grid were done."""
        require_slurm()
        executor = make_executor(next_folder(self.folder), self.resources, name=_JOB_NAME)
        return script(executor, len(deal(self._cases(grid), self.array)))

    def run(self, grid: Grid, listener: SlurmListener, *, wait: bool = True) -> tuple[BenchRow, ...] | None:
        """The rows of all cases in the grid's order; None when some are still to come and nobody waits for them.

        A job that fails ends this with an error when the others are done, and their rows are kept.
        """
        require_slurm()
        require_torch()
        cases = self._cases(grid)
        with ResultsFile.open(self.folder / RESULTS_NAME, BenchRow) as results:
            ledger = Ledger(results)
            places = self._find(cases, read_submissions(self.folder), ledger)
            missing = [case for case in cases if case not in places]
            listener.plan(sum(map(_is_closed, places.values())), len(cases))
            # Ctrl-C waits until what was submitted is written down: nobody could collect it.
            with holding_signals(signal.SIGINT, signal.SIGTERM):
                submitted = self._submit(missing, ledger) if missing else None
                if submitted is not None:
                    places |= _places_of(submitted)
                open_jobs = {place.job.id: place for place in places.values() if not _is_closed(place)}
                if open_jobs:
                    listener.begin(list(open_jobs), submitted=submitted.submission.job_id if submitted else None)
            watch = Watch([place.job for place in open_jobs.values()])
            self._collect(watch, {name: place.kept for name, place in open_jobs.items()}, ledger, listener, wait=wait)
        if watch.waiting:
            return None
        keys = [place.key() for place in (places[case] for case in cases)]
        rows = tuple(ledger.rows[key] for key in dict.fromkeys(keys) if key is not None)
        raise_failures(
            list(watch.failures.values()), kept="what was measured is kept, and the same command submits the rest"
        )
        return rows

    def _cases(self, grid: Grid) -> tuple[Case, ...]:
        """The default grid goes by what was asked for: there is no device here to look at."""
        return (grid if grid != Grid() else Timed().default_grid(on_cpu=self.resources.gpus == 0)).cases()

    def _find(self, cases: Sequence[Case], submissions: Sequence[Kept], ledger: Ledger) -> dict[Case, _Place]:
        """Where cases are being done, or are known to have been, by the newest submission to the same place."""
        found: dict[Case, _Place] = {}
        for kept in submissions:
            if isinstance(kept.submission.work, ShareWork) and kept.submission.resources.place == self.resources.place:
                for case, place in _places_of(kept).items():
                    if case not in found and (
                        self._is_done(place, ledger) if _is_closed(place) else self._is_due(kept)
                    ):
                        found[case] = place
        return {case: found[case] for case in cases if case in found}

    def _is_due(self, kept: Kept) -> bool:
        """Whether jobs that are under way measure what this command would have measured."""
        work = kept.submission.work
        assert isinstance(work, ShareWork)
        return work.fresh or (not self.fresh and self.retry in (None, work.retried))

    def _is_done(self, place: _Place, ledger: Ledger) -> bool:
        """Known without asking a node. Never so with a model of the user's own, whose source only workers read."""
        row = ledger.rows.get(place.key() or "")
        if row is None or self.fresh or not row.is_settled(self.retry) or row.source is not None:
            return False
        there = row.environment
        return (there.python, there.torch, there.triton, there.stepscope) == _software()

    def _submit(self, missing: Sequence[Case], ledger: Ledger) -> Kept:
        # Only here: the tasks are made of submitit's parts, and everything else works without it.
        from stepscope.jobs.slurm.tasks import ShareRequest, ShareTask

        folder = next_folder(self.folder)
        shares = deal(missing, self.array)
        tasks = []
        for index, share in enumerate(shares):
            own = folder / str(index)
            own.mkdir(parents=True)
            old = [row for row in ledger.rows.values() if row.is_settled(self.retry)]
            seed(own / RESULTS_NAME, share, [] if self.fresh else old)
            request = ShareRequest(cases=share, folder=str(own), command=self.command, timeout_s=self.timeout_s)
            tasks.append(ShareTask(request))
        job_id = submit(make_executor(folder, self.resources, name=_JOB_NAME), tasks)
        work = ShareWork(shares=shares, retry=self.retry, fresh=self.fresh, timeout_s=self.timeout_s)
        return keep(folder, job_id, self.resources, work, self.command)

    def _collect(
        self, watch: Watch, kept: dict[str, Kept], ledger: Ledger, listener: SlurmListener, *, wait: bool
    ) -> None:
        while waiting := watch.waiting:
            watch.look()
            for job in waiting:
                for row in ledger.collect(job, ended=watch.is_over(job)):
                    listener.finish(row)
                if watch.is_over(job):
                    folder = kept[job.id].folder
                    closed = kept[job.id].with_ended(job)
                    kept.update({name: closed for name, one in kept.items() if one.folder == folder})
                    if job.id in watch.failures:
                        listener.fail(watch.failures[job.id].text)
            listener.news(watch.counts())
            if not wait:
                return
            if watch.waiting:
                watch.rest()


def deal(cases: Sequence[Case], count: int) -> tuple[tuple[Case, ...], ...]:
    """Dealt like cards to at most `count` jobs: an axis that turns slowly, the size for one, is spread over all."""
    return tuple(tuple(cases[first::count]) for first in range(min(count, len(cases))))


def _places_of(kept: Kept) -> dict[Case, _Place]:
    work = kept.submission.work
    assert isinstance(work, ShareWork)
    shares = zip(kept.jobs(), work.shares, strict=True)
    return {case: _Place(kept, job, position) for job, share in shares for position, case in enumerate(share)}


def _is_closed(place: _Place) -> bool:
    return place.job.index in place.kept.submission.ended


def _software() -> tuple[str, str | None, str | None, str]:
    """Of this Python, which is the one that jobs run."""
    return platform.python_version(), _installed("torch"), _installed("triton"), stepscope.__version__


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
