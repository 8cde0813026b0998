"""What Slurm knows of jobs, by `scontrol`.

submitit asks `sacct`, which needs accounting: without it a cancelled job is in an unknown state for ever. `scontrol`
asks the controller, which every cluster has. It forgets a job some minutes after its end, and a job of an array that is
cancelled before it started at once, so an id that is not in the answer means an end too.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from typing import Literal

import msgspec

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


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """`state` in Slurm's words; `reason` why it waits, where it does."""

    state: str
    reason: str = ""

    @property
    def phase(self) -> Phase:
        """A word that is new to us counts as running: whatever ends leaves Slurm's memory, and then we know."""
        if self.state in _QUEUED:
            return "queued"
        return "ended" if self.state in _ENDED else "running"


def read_states(job_id: str) -> dict[str, JobState] | None:
    """By id, for a job or all jobs of an array; none of those that Slurm has forgotten. None when it does not answer,
    which says nothing about the jobs."""
    # Otherwise a long list of tasks is cut off in the middle.
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
    """The lines of `scontrol --oneliner show job`. Jobs of an array that wait for the same thing share a line."""
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
