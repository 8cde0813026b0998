"""Submissions, recorded in the run directory, and the files their jobs leave there."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import read_document, write_atomically, writing
from stepscope.jobs.slurm.resources import Resources
from stepscope.recording.rows.bench import Retry
from stepscope.spec import Case

FOLDER_NAME = "slurm"
_MANIFEST_NAME = "submission.json"
_SCHEMA = "stepscope.slurm/1"


class ShareWork(msgspec.Struct, frozen=True, kw_only=True, tag="share"):
    """The cases of a grid, divided among the jobs of an array. `retry` and `fresh` are the command's."""

    shares: tuple[tuple[Case, ...], ...]
    retry: Retry | bool | None  # a bool in files of an earlier version, which only knew failed cases
    fresh: bool
    timeout_s: float | None

    @property
    def retried(self) -> Retry | None:
        return Retry.FAILED if self.retry is True else self.retry or None


class RankWork(msgspec.Struct, frozen=True, kw_only=True, tag="rank"):
    """One job with `ranks` tasks, each of which calls `entry` (`package.module:function`) with `request`, a JSON
    text.
    """

    entry: str
    request: str
    ranks: int


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """`ended` lists the jobs, by index, that are over and collected."""

    schema: str = _SCHEMA
    job_id: str
    resources: Resources
    work: ShareWork | RankWork
    command: str
    submitted: str
    ended: tuple[int, ...] = ()


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one task of a job: the keys of its rows in case order, or the error it raised. `life` counts how
    often the job had been requeued; `ended_ns` is the time.
    """

    life: int
    ended_ns: int
    keys: tuple[str, ...] = ()
    message: str = ""
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a submission: its Slurm id, its directory, and its number of tasks."""

    id: str
    index: int
    folder: Path
    tasks: int = 1

    @property
    def logs(self) -> tuple[Path, ...]:
        """Standard output and error of each task, under the names submitit uses."""
        return tuple(self.folder.parent / f"{self.id}_{task}_log.out" for task in range(self.tasks))

    def outcomes(self) -> tuple[TaskOutcome | None, ...]:
        paths = [outcome_path(self.folder, task) for task in range(self.tasks)]
        return tuple(
            read_document(
                path,
                TaskOutcome,
                refusal="cannot read the job result:",
                hint=f"rm {path}    # the job then counts as running",
            )
            for path in paths
        )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A submission and its directory, such as `runs/bench/slurm/3`."""

    folder: Path
    submission: Submission

    def jobs(self) -> tuple[Job, ...]:
        work, job_id = self.submission.work, self.submission.job_id
        if isinstance(work, RankWork):
            return (Job(id=job_id, index=0, folder=self.folder / "0", tasks=work.ranks),)
        count = len(work.shares)
        ids = [job_id] if count == 1 else [f"{job_id}_{index}" for index in range(count)]
        return tuple(Job(id=name, index=index, folder=self.folder / str(index)) for index, name in enumerate(ids))

    def write(self) -> None:
        write_whole(self.folder / _MANIFEST_NAME, msgspec.json.encode(self.submission) + b"\n")

    def with_ended(self, job: Job) -> "Kept":
        """Return a copy with one more finished job, and write it."""
        ended = (*self.submission.ended, job.index)
        changed = Kept(folder=self.folder, submission=msgspec.structs.replace(self.submission, ended=ended))
        changed.write()
        return changed


def keep(folder: Path, job_id: str, resources: Resources, work: ShareWork | RankWork, command: str) -> Kept:
    submitted = datetime.now(UTC).isoformat(timespec="seconds")
    submission = Submission(job_id=job_id, resources=resources, work=work, command=command, submitted=submitted)
    kept = Kept(folder=folder, submission=submission)
    kept.write()
    return kept


def read_submissions(run_folder: Path) -> list[Kept]:
    """Return the newest first. A directory without a manifest belongs to a submission that failed."""
    found = []
    for folder in sorted(_numbered(run_folder), key=lambda one: int(one.name), reverse=True):
        path = folder / _MANIFEST_NAME
        submission = read_document(
            path, Submission, refusal="cannot read the submission:", hint=f"rm {path}    # forgets these jobs"
        )
        if submission is None:
            continue
        if submission.schema != _SCHEMA:
            raise StepscopeError(
                f"submitted by an incompatible version: `{path}`",
                detail=f"expected schema `{_SCHEMA}`, got `{submission.schema}`",
                hint="--out DIR",
            )
        found.append(Kept(folder=folder, submission=submission))
    return found


def next_folder(run_folder: Path) -> Path:
    numbers = [int(folder.name) for folder in _numbered(run_folder)]
    return (run_folder / FOLDER_NAME / str(max(numbers, default=0) + 1)).absolute()


def outcome_path(folder: Path, task: int) -> Path:
    return folder / f"outcome-{task}.json"


def write_whole(path: Path, content: bytes) -> None:
    """Write atomically, so that readers and interruptions never see half a file."""
    with writing(path):
        write_atomically(path, content)


def _numbered(run_folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from (folder for folder in (run_folder / FOLDER_NAME).absolute().iterdir() if folder.name.isdigit())
