"""One job whose tasks are the ranks of a process group: `stepscope train --slurm`.

The command names a function and a request text for the ranks. This module starts them, waits for them, and reports
failures. A requeued job calls the same function with the same text, which resumes from its own checkpoint.
"""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.files import locked
from stepscope.jobs.slurm.executor import holding_signals, make_executor, require_slurm, script, submit
from stepscope.jobs.slurm.resources import Resources
from stepscope.jobs.slurm.submissions import FOLDER_NAME, Kept, RankWork, keep, next_folder, read_submissions
from stepscope.jobs.slurm.watch import JobListener, JobWatch, raise_failures
from stepscope.jobs.workers.process import require_torch


@dataclass(frozen=True, kw_only=True)
class SlurmRanks:
    """`entry` is `package.module:function`; each rank calls it with `request`, with torchrun's variables set."""

    folder: Path
    command: str
    resources: Resources
    name: str
    entry: str
    request: str
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks % self.resources.nodes:
            raise StepscopeError(
                f"cannot distribute `{self.ranks}` ranks evenly over `{self.resources.nodes}` nodes",
                hint=f"--ranks {self.resources.nodes * (self.ranks // self.resources.nodes + 1)}",
            )

    def script(self) -> str:
        """Return the script that would be passed to sbatch."""
        require_slurm()
        executor = make_executor(next_folder(self.folder), self.resources, name=self.name, tasks=self.ranks)
        return script(executor, 1)

    def run(self, listener: JobListener, *, wait: bool = True, prepare: Callable[[], None] = lambda: None) -> bool:
        """Submit the job, or find a running one that does the same, and wait for it. Returns False if it is unfinished
        and `wait` is False. `prepare` is called right before submission, when no earlier job needs the files it
        deletes.
        """
        require_slurm()
        require_torch()
        with _alone(self.folder):
            found = self._find()
            # Delay Ctrl-C until the submission is recorded.
            with holding_signals(signal.SIGINT, signal.SIGTERM):
                kept = found or self._submit(prepare)
                (job,) = kept.jobs()
                listener.begin([job.id], submitted=None if found else job.id)
            watch = JobWatch([job])
            if not watch.follow(listener, wait=wait):
                return False
            kept.with_ended(job)
        raise_failures(
            list(watch.failures.values()), kept="run the same command again to resume from the last checkpoint"
        )
        return True

    def _find(self) -> Kept | None:
        """Return the earlier job if it does the same work. A different one in the same directory would conflict."""
        for kept in read_submissions(self.folder):
            (job,) = kept.jobs()
            if job.index in kept.submission.ended:
                continue
            if kept.submission.work == self._work():
                return kept
            raise StepscopeError(
                f"job {job.id} is already running in `{self.folder}`",
                detail=f"it was submitted with: {kept.submission.command}",
                hint=f"scancel {job.id}, then rerun that command to confirm that it ended; or use --out DIR",
            )
        return None

    def _work(self) -> RankWork:
        return RankWork(entry=self.entry, request=self.request, ranks=self.ranks)

    def _submit(self, prepare: Callable[[], None]) -> Kept:
        from stepscope.jobs.slurm.tasks import RankRequest, RankTask

        prepare()
        folder = next_folder(self.folder)
        own = folder / "0"
        own.mkdir(parents=True)
        executor = make_executor(folder, self.resources, name=self.name, tasks=self.ranks)
        task = RankTask(RankRequest(entry=self.entry, request=self.request, folder=str(own)))
        return keep(folder, submit(executor, [task]), self.resources, self._work(), self.command)


def _alone(run_folder: Path) -> AbstractContextManager[None]:
    """Only one command at a time waits for the jobs of a directory: two could both find none, and submit. The lock is
    on the directory itself, so no file is left behind.
    """
    refusal = StepscopeError(
        f"another command is waiting for the jobs in `{run_folder}`", hint="stop that command, or use --out DIR"
    )
    return locked(run_folder / FOLDER_NAME, refusal)
