"""`stepscope bench --slurm`: a grid divided among the jobs of an array, with rows collected as they arrive.

The key of a case contains the compute node's device, which is unknown here. So each job receives the rows that may
belong to its cases, and checks. A case is skipped only if a job of an earlier submission to the same place has reported
which row belongs to it, and the software has not changed.
"""

import platform
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import stepscope
from stepscope.jobs.experiments.sweep import RESULTS_NAME, BenchExperiment, Sweep
from stepscope.jobs.slurm.executor import holding_signals, make_executor, require_slurm, script, submit
from stepscope.jobs.slurm.resources import Resources
from stepscope.jobs.slurm.row_ledger import RowLedger, seed
from stepscope.jobs.slurm.submissions import Job, Kept, ShareWork, keep, next_folder, read_submissions
from stepscope.jobs.slurm.watch import JobListener, JobWatch, raise_failures
from stepscope.jobs.workers.process import require_torch
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import Case, Grid

_JOB_NAME = "stepscope-bench"


class SweepJobListener(JobListener, Protocol):
    """Receives the progress of a sweep on a cluster."""

    def plan(self, num_done: int, num_cases: int) -> None:
        """`done` of `total` cases are finished already."""
        ...

    def finish(self, row: BenchRow) -> None: ...

    def fail(self, text: str) -> None: ...


@dataclass(frozen=True)
class _JobPlace:
    """Where a case runs: its position among the cases of its job."""

    kept: Kept
    job: Job
    position: int

    def key(self) -> str | None:
        (outcome,) = self.job.outcomes()
        return outcome.keys[self.position] if outcome is not None and outcome.keys else None


@dataclass(frozen=True, kw_only=True)
class SlurmSweep(Sweep[Case, BenchRow]):
    """A sweep on a cluster, over `array` jobs, each of which sweeps its share."""

    experiment: BenchExperiment
    resources: Resources
    array: int = 1

    def script(self) -> str:
        """Return the script that would be passed to sbatch if no case were done."""
        require_slurm()
        executor = make_executor(next_folder(self.folder), self.resources, name=_JOB_NAME)
        return script(executor, len(deal(self._cases(), self.array)))

    def run_jobs(self, listener: SweepJobListener, *, wait: bool = True) -> tuple[BenchRow, ...] | None:
        """Return the rows of all cases in grid order; None if some are pending and `wait` is False.

        If a job fails, this raises once the other jobs are done, and their rows are kept.
        """
        require_slurm()
        require_torch()
        cases = self._cases()
        with ResultsFile.open(self.folder / RESULTS_NAME, BenchRow) as results:
            ledger = RowLedger(results)
            places = self._find(cases, read_submissions(self.folder), ledger)
            missing = [case for case in cases if case not in places]
            listener.plan(sum(map(_is_closed, places.values())), len(cases))
            # Delay Ctrl-C until the submission is recorded: otherwise nobody could collect it.
            with holding_signals(signal.SIGINT, signal.SIGTERM):
                submitted = self._submit(missing, ledger) if missing else None
                if submitted is not None:
                    places |= _places_of(submitted)
                open_jobs = {place.job.id: place for place in places.values() if not _is_closed(place)}
                if open_jobs:
                    listener.begin(list(open_jobs), submitted=submitted.submission.job_id if submitted else None)
            watch = JobWatch([place.job for place in open_jobs.values()])
            collector = _Collector(watch, {name: place.kept for name, place in open_jobs.items()}, ledger, listener)
            if not watch.follow(listener, wait=wait, collect=collector.collect):
                return None
        keys = [place.key() for place in (places[case] for case in cases)]
        rows = tuple(ledger.rows[key] for key in dict.fromkeys(keys) if key is not None)
        raise_failures(
            list(watch.failures.values()), kept="finished rows are kept; run the same command again to submit the rest"
        )
        return rows

    def _cases(self) -> tuple[Case, ...]:
        """The default grid follows the requested resources: a login node has no device to probe."""
        grid = self.experiment.grid
        return (grid if grid != Grid() else self.experiment.default_grid(on_cpu=self.resources.gpus == 0)).cases()

    def _find(self, cases: Sequence[Case], submissions: Sequence[Kept], ledger: RowLedger) -> dict[Case, _JobPlace]:
        """Return where cases are running or known to be done, by the newest submission to the same place."""
        found: dict[Case, _JobPlace] = {}
        for kept in submissions:
            if isinstance(kept.submission.work, ShareWork) and kept.submission.resources.place == self.resources.place:
                for case, place in _places_of(kept).items():
                    if case not in found and (
                        self._is_known(place, ledger) if _is_closed(place) else self._is_due(kept)
                    ):
                        found[case] = place
        return {case: found[case] for case in cases if case in found}

    def _is_due(self, kept: Kept) -> bool:
        """Whether running jobs measure what this command would measure."""
        work = kept.submission.work
        assert isinstance(work, ShareWork)
        return work.fresh or (not self.fresh and self.retry in (None, work.retried))

    def _is_known(self, place: _JobPlace, ledger: RowLedger) -> bool:
        """Done, without asking a node. Never true for a custom model, whose source only workers read."""
        row = ledger.rows.get(place.key() or "")
        if row is None or not self.is_done(row) or row.source is not None:
            return False
        there = row.environment
        return (there.python, there.torch, there.triton, there.stepscope) == _software()

    def _submit(self, missing: Sequence[Case], ledger: RowLedger) -> Kept:
        # Imported only here: tasks subclass submitit's types, and everything else works without it.
        from stepscope.jobs.slurm.tasks import ShareRequest, ShareTask

        folder = next_folder(self.folder)
        shares = deal(missing, self.array)
        tasks = []
        for index, share in enumerate(shares):
            own = folder / str(index)
            own.mkdir(parents=True)
            seed(own / RESULTS_NAME, share, [row for row in ledger.rows.values() if self.is_done(row)])
            request = ShareRequest(cases=share, folder=str(own), command=self.command, timeout_s=self.timeout_s)
            tasks.append(ShareTask(request))
        job_id = submit(make_executor(folder, self.resources, name=_JOB_NAME), tasks)
        work = ShareWork(shares=shares, retry=self.retry, fresh=self.fresh, timeout_s=self.timeout_s)
        return keep(folder, job_id, self.resources, work, self.command)


@dataclass(frozen=True)
class _Collector:
    """Copy the rows of jobs as they arrive, and record which jobs are over."""

    watch: JobWatch
    kept: dict[str, Kept]
    ledger: RowLedger
    listener: SweepJobListener

    def collect(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            is_over = self.watch.is_over(job)
            for row in self.ledger.collect(job, ended=is_over):
                self.listener.finish(row)
            if is_over:
                folder = self.kept[job.id].folder
                closed = self.kept[job.id].with_ended(job)
                self.kept.update({name: closed for name, one in self.kept.items() if one.folder == folder})
                if job.id in self.watch.failures:
                    self.listener.fail(self.watch.failures[job.id].text)


def deal(cases: Sequence[Case], count: int) -> tuple[tuple[Case, ...], ...]:
    """Deal cases round-robin to at most `count` jobs, so that a slowly varying axis, such as the size, is spread over
    all.
    """
    return tuple(tuple(cases[first::count]) for first in range(min(count, len(cases))))


def _places_of(kept: Kept) -> dict[Case, _JobPlace]:
    work = kept.submission.work
    assert isinstance(work, ShareWork)
    shares = zip(kept.jobs(), work.shares, strict=True)
    return {case: _JobPlace(kept, job, position) for job, share in shares for position, case in enumerate(share)}


def _is_closed(place: _JobPlace) -> bool:
    return place.job.index in place.kept.submission.ended


def _software() -> tuple[str, str | None, str | None, str]:
    """The versions of this Python, which is the one that jobs run."""
    return platform.python_version(), _installed("torch"), _installed("triton"), stepscope.__version__


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
