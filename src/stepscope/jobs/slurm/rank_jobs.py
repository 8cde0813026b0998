"""One job whose tasks are the ranks of a process group: `stepscope train --slurm`.

What the ranks do is the verb's: it names a function, and gives it a text. Here they are started, waited for, and told
about when they fail. A job that is queued again calls the same function with the same text, which goes on from its own
checkpoint.
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
                f"`{self.ranks}` ranks do not spread evenly over `{self.resources.nodes}` nodes",
                hint=f"--ranks {self.resources.nodes * (self.ranks // self.resources.nodes + 1)}",
            )

    def script(self) -> str:
        """What would be handed to sbatch."""
        require_slurm()
        executor = make_executor(next_folder(self.folder), self.resources, name=self.name, tasks=self.ranks)
        return script(executor, 1)

    def run(self, listener: JobListener, *, wait: bool = True, prepare: Callable[[], None] = lambda: None) -> bool:
        """Submits, or finds the job that does the same already, and waits for it. False when it is not done and nobody
        waits. `prepare` is called just before a job is submitted: what it deletes is no job's of before."""
        require_slurm()
        require_torch()
        with _alone(self.folder):
            found = self._find()
            # Ctrl-C waits until what was submitted is written down.
            with holding_signals(signal.SIGINT, signal.SIGTERM):
                kept = found or self._submit(prepare)
                (job,) = kept.jobs()
                listener.begin([job.id], submitted=None if found else job.id)
            watch = JobWatch([job])
            if not watch.follow(listener, wait=wait):
                return False
            kept.with_ended(job)
        raise_failures(list(watch.failures.values()), kept="the same command goes on from the last checkpoint")
        return True

    def _find(self) -> Kept | None:
        """The job of before, where it does what this one would. Another one in the same folder would be in the way."""
        for kept in read_submissions(self.folder):
            (job,) = kept.jobs()
            if job.index in kept.submission.ended:
                continue
            if kept.submission.work == self._work():
                return kept
            raise StepscopeError(
                f"job {job.id} is at work in `{self.folder}`",
                detail=f"it was submitted by: {kept.submission.command}",
                hint=f"scancel {job.id}, then that command again to see it end; or --out FOLDER",
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
    """One command waits for a folder's jobs at a time: two could both find none, and submit. The lock is on the folder
    itself, so that no file stays behind."""
    refusal = StepscopeError(
        f"another command waits for the jobs of `{run_folder}`", hint="end that one, or --out FOLDER"
    )
    return locked(run_folder / FOLDER_NAME, refusal)
