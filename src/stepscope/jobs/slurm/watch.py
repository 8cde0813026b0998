"""Waits for jobs: the files they leave, the state Slurm reports, and how they end.

submitit asks `sacct` about states, which requires accounting: without it, a cancelled job stays in an unknown state
forever. `scontrol` asks the controller, which every cluster has. The controller forgets a job some minutes after its
end, and an array job cancelled before its start immediately, so an id that is missing from the answer has ended too.
"""

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, Protocol

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.slurm.submissions import Job, TaskOutcome

Phase = Literal["queued", "running", "ended"]

_QUEUED = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
_ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    )
)
_TIMEOUT_S = 60
# Slurm is polled often at first, for short jobs, then rarely: its controller serves a whole cluster.
_FIRST_LOOK_S = 0.3
_LONGEST_LOOK_S = 10.0
_SLOWER = 1.2
_FILES_LOOK_S = 1.0
# Time for the last files of a job to become visible on a shared file system.
_LAG_S = 3.0
_LAG_OF_COMPLETED_S = 60.0
_SILENT = "Slurm is not responding"


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """`state` as Slurm reports it; `reason` is why a queued job waits, if known."""

    state: str
    reason: str = ""

    @property
    def phase(self) -> Phase:
        """An unrecognized state counts as running: a job that ends is eventually forgotten by Slurm, which we do
        detect.
        """
        if self.state in _QUEUED:
            return "queued"
        return "ended" if self.state in _ENDED else "running"


_FORGOTTEN = JobState(state="no longer known to Slurm")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended that did not finish its work."""

    text: str
    detail: str
    hint: str


class JobCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of jobs per state; `reason` is Slurm's reason why queued jobs wait."""

    queued: int
    running: int
    done: int
    failed: int
    reason: str = ""


class JobListener(Protocol):
    """Receives the progress of jobs."""

    def begin(self, job_ids: Sequence[str], *, submitted: str | None) -> None:
        """Called with the jobs that are waited for, and the id of the job or array that was just submitted, if any."""
        ...

    def news(self, counts: JobCounts) -> None: ...


class JobWatch:
    """Follows jobs until they are over. `look` polls once and sleeps briefly; it never changes a job."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self.failures: dict[str, Failure] = {}
        self._done: set[str] = set()
        self._states: dict[str, JobState] = {}
        self._ended_since: dict[str, float] = {}
        self._pause_s = _FIRST_LOOK_S
        self._next_states = 0.0
        self._is_answering = True

    @property
    def waiting(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if not self.is_over(job))

    def is_over(self, job: Job) -> bool:
        return job.id in self._done or job.id in self.failures

    def counts(self) -> JobCounts:
        states = [self._states.get(job.id) for job in self.waiting]
        phases = Counter("queued" if state is None else state.phase for state in states)
        reasons = Counter(state.reason for state in states if state and state.phase == "queued" and state.reason)
        return JobCounts(
            queued=phases["queued"],
            running=phases["running"] + phases["ended"],
            done=len(self._done),
            failed=len(self.failures),
            reason=next((reason for reason, _ in reasons.most_common(1)), "") if self._is_answering else _SILENT,
        )

    def look(self) -> None:
        """Poll once. Slurm's state is read before the jobs' files, so that a job that ends in between does not count as
        failed.
        """
        now = time.monotonic()
        if now >= self._next_states:
            self._ask_slurm()
            self._next_states = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * _SLOWER, _LONGEST_LOOK_S)
        for job in self.waiting:
            self._judge(job, now)

    def follow(
        self, listener: JobListener, *, wait: bool, collect: Callable[[Sequence[Job]], None] = lambda _: None
    ) -> bool:
        """Return whether all jobs are over. Polls until they are, or once if `wait` is False. `collect` is called after
        each poll with the jobs that were not over before it.
        """
        while waiting := self.waiting:
            self.look()
            collect(waiting)
            listener.news(self.counts())
            if not wait:
                break
            if self.waiting:
                time.sleep(min(self._pause_s, _FILES_LOOK_S))
        return not self.waiting

    def _ask_slurm(self) -> None:
        for number in dict.fromkeys(job.id.partition("_")[0] for job in self.waiting):
            states = read_states(number)
            self._is_answering = states is not None
            if states is not None:
                mine = [job for job in self.waiting if job.id.partition("_")[0] == number]
                self._states.update({job.id: states.get(job.id, _FORGOTTEN) for job in mine})

    def _judge(self, job: Job, now: float) -> None:
        """Done when all tasks report success in the same life of the job. An error counts once the job has ended: when
        a job requeues itself, its ranks lose rank 0 and raise.
        """
        outcomes = job.outcomes()
        there = [(outcome, task) for task, outcome in enumerate(outcomes) if outcome is not None]
        lives = {outcome.life for outcome, _ in there}
        raised = [(outcome, task) for outcome, task in there if outcome.message and outcome.life == max(lives)]
        if len(there) == job.tasks and len(lives) == 1 and not raised:
            self._done.add(job.id)
        elif (waited_s := self._ended_for_s(job, now)) is not None:
            state = self._states[job.id]
            if raised:
                self.failures[job.id] = _describe_raised(job, *min(raised, key=lambda one: one[0].ended_ns))
            elif waited_s > (_LAG_OF_COMPLETED_S if state.state == "COMPLETED" else _LAG_S):
                self.failures[job.id] = _describe_end(job, state)

    def _ended_for_s(self, job: Job, now: float) -> float | None:
        """Return how long Slurm has reported the job as over; None while it reports otherwise."""
        state = self._states.get(job.id)
        if state is None or (state is not _FORGOTTEN and state.phase != "ended"):
            self._ended_since.pop(job.id, None)
            return None
        with suppress(OSError):
            os.utime(job.folder)  # makes a network file system refresh
        return now - self._ended_since.setdefault(job.id, now)


def _describe_raised(job: Job, outcome: TaskOutcome, task: int) -> Failure:
    who = f"rank {task} of job {job.id}" if job.tasks > 1 else f"job {job.id}"
    log = f"log: {job.logs[task]}"
    return Failure(
        text=f"{who}: {outcome.message}",
        detail=f"{outcome.detail}\n{log}" if outcome.detail else log,
        hint=outcome.hint or f"less {job.logs[task]}",
    )


def _describe_end(job: Job, state: JobState) -> Failure:
    log = job.logs[0]
    if state is _FORGOTTEN:
        text = f"job {job.id} is {state.state} and left no result"
        hint = f"sacct -j {job.id}    # if the cluster keeps accounting"
    else:
        text = f"job {job.id} ended with state {state.state}"
        hint = f"less {log}"
    there = f"log: {log}" if log.exists() else f"log: {log} (not found: the job never started)"
    return Failure(text=text, detail=there, hint=hint)


def raise_failures(failures: Sequence[Failure], *, kept: str) -> None:
    """Raise one error for all failures; `kept` says what was saved."""
    if not failures:
        return
    first, *others = failures
    lines = [first.detail]
    lines += [f"{other.text}\n{other.detail}" for other in others]
    raise StepscopeError(first.text, detail="\n".join([*lines, kept]), hint=first.hint)


# --- What Slurm says --------------------------------------------------------------------------------------------------


def read_states(job_id: str) -> dict[str, JobState] | None:
    """Return states by id, for a job or all jobs of an array, without those that Slurm has forgotten. None if Slurm
    does not respond, which says nothing about the jobs.
    """
    # Otherwise a long list of tasks is cut off.
    environment = os.environ | {"SLURM_BITSTR_LEN": "0"}
    command = ["scontrol", "--oneliner", "show", "job", job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return parse_states(done.stdout)
    return {} if "Invalid job id" in done.stderr else None


def parse_states(text: str) -> dict[str, JobState]:
    """Parse `scontrol --oneliner show job`. Array jobs that wait for the same reason share a line."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(?:^| )(JobId|ArrayJobId|ArrayTaskId|JobState|Reason)=(\S+)", line))
        if "JobState" in fields:
            reason = fields.get("Reason", "None")
            state = JobState(state=fields["JobState"], reason="" if reason == "None" else reason)
            found.update(dict.fromkeys(_ids(fields), state))
    return found


def _ids(fields: dict[str, str]) -> Iterator[str]:
    if "ArrayTaskId" not in fields:
        yield fields["JobId"]
        return
    for part in fields["ArrayTaskId"].partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is not None:
            first, last, step = (int(number) if number else None for number in match.groups())
            assert first is not None
            for index in range(first, (first if last is None else last) + 1, step or 1):
                yield f"{fields['ArrayJobId']}_{index}"
