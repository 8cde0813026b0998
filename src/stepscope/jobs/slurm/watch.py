"""Waiting for jobs: what they left, what Slurm says of them, and how it ends."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from stepscope.errors import StepscopeError
from stepscope.jobs.slurm.states import JobState, read_states
from stepscope.jobs.slurm.submissions import Job, Outcome

# Slurm is asked often at first, for short jobs, then rarely: its controller serves a whole cluster.
_FIRST_LOOK_S = 0.3
_LONGEST_LOOK_S = 10.0
_SLOWER = 1.2
_FILES_LOOK_S = 1.0
# For what a job wrote last to be seen here, on a file system that both share.
_LAG_S = 3.0
_LAG_OF_COMPLETED_S = 60.0
_SILENT = "Slurm does not answer"
_FORGOTTEN = JobState(state="no longer known to Slurm")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended that did not do its work."""

    text: str
    detail: str
    hint: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs are where; `reason` is Slurm's word for why those that are queued wait."""

    queued: int
    running: int
    done: int
    failed: int
    reason: str = ""


class Watch:
    """Jobs until they are over. What they do meanwhile is theirs: `look` only looks, and sleeps a little."""

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

    def counts(self) -> Counts:
        states = [self._states.get(job.id) for job in self.waiting]
        phases = Counter("queued" if state is None else state.phase for state in states)
        reasons = Counter(state.reason for state in states if state and state.phase == "queued" and state.reason)
        return Counts(
            queued=phases["queued"],
            running=phases["running"] + phases["ended"],
            done=len(self._done),
            failed=len(self.failures),
            reason=next((reason for reason, _ in reasons.most_common(1)), "") if self._is_answering else _SILENT,
        )

    def look(self) -> None:
        """Once. Slurm's word comes before the jobs' own, so that a job that ends in between is not taken for failed."""
        now = time.monotonic()
        if now >= self._next_states:
            self._ask_slurm()
            self._next_states = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * _SLOWER, _LONGEST_LOOK_S)
        for job in self.waiting:
            self._judge(job, now)

    def rest(self) -> None:
        time.sleep(min(self._pause_s, _FILES_LOOK_S))

    def _ask_slurm(self) -> None:
        for number in dict.fromkeys(job.id.partition("_")[0] for job in self.waiting):
            states = read_states(number)
            self._is_answering = states is not None
            if states is not None:
                mine = [job for job in self.waiting if job.id.partition("_")[0] == number]
                self._states.update({job.id: states.get(job.id, _FORGOTTEN) for job in mine})

    def _judge(self, job: Job, now: float) -> None:
        """Done when all tasks say so, in one life of the job. That something was raised counts when the job has ended:
        one that queues itself again leaves its ranks without their first, and they raise."""
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
        """For how long Slurm has said that it is over; None while it says otherwise."""
        state = self._states.get(job.id)
        if state is None or (state is not _FORGOTTEN and state.phase != "ended"):
            self._ended_since.pop(job.id, None)
            return None
        with suppress(OSError):
            os.utime(job.folder)  # makes a network file system look again
        return now - self._ended_since.setdefault(job.id, now)


def _describe_raised(job: Job, outcome: Outcome, task: int) -> Failure:
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
        text = f"job {job.id} is {state.state}, and left no result"
        hint = f"sacct -j {job.id}    # where the cluster keeps accounts"
    else:
        text = f"job {job.id} ended as {state.state}"
        hint = f"less {log}"
    there = f"log: {log}" if log.exists() else f"log: {log} (there is none: the job never started)"
    return Failure(text=text, detail=there, hint=hint)


def raise_failures(failures: Sequence[Failure], *, kept: str) -> None:
    """All of them, in one error; `kept` says what was not lost."""
    if not failures:
        return
    first, *others = failures
    lines = [first.detail]
    lines += [f"{other.text}\n{other.detail}" for other in others]
    raise StepscopeError(first.text, detail="\n".join([*lines, kept]), hint=first.hint)
