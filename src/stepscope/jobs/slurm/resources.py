"""What a job asks of Slurm."""

import re
from collections.abc import Sequence

import msgspec

from stepscope.errors import StepscopeError

_DEFAULT_TIME_MIN = 60
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEM = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)
# What we write into the script ourselves, or have an option for.
_OURS = (
    "array",
    "error",
    "open-mode",
    "output",
    "signal",
    "time",
    "job-name",
    "ntasks",
    "ntasks-per-node",
    "no-requeue",
)


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """One job's share of the cluster. GPUs and memory count by node, CPUs by task; None leaves it to the cluster."""

    partition: str | None = None
    nodes: int = 1
    gpus: int = 0
    cpus: int | None = None
    mem: str | None = None
    time_min: int = _DEFAULT_TIME_MIN
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> "Resources":
        """What decides where a job lands and so what it measures: a longer time or another account does not."""
        return msgspec.structs.replace(self, time_min=_DEFAULT_TIME_MIN, mem=None, account=None, qos=None)


def parse_time_min(text: str) -> int:
    """Slurm's ways of writing a time, in minutes rounded up: `90`, `90:00`, `1:30:00`, `1-12`, `1-12:30:00`."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise StepscopeError(
            f"not a time: `--time {text}`",
            detail="expected minutes, hours:minutes:seconds, or days-hours:minutes:seconds",
            hint="--time 2:00:00",
        )
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"]:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    total_s = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s == 0:
        raise StepscopeError(f"no time at all: `--time {text}`", hint="--time 2:00:00")
    return -(-total_s // 60)


def parse_mem(text: str) -> str:
    if _MEM.fullmatch(text) is None:
        raise StepscopeError(
            f"not an amount of memory: `--mem {text}`", detail="expected such as 64G", hint="--mem 64G"
        )
    return text


def parse_sbatch(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`--sbatch key=value` pairs, for what has no option of its own. A key without a value is a switch of sbatch's."""
    parsed = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.removeprefix("--")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or (equals and not value):
            raise StepscopeError(
                f"not an option of sbatch: `--sbatch {pair}`", detail="expected key=value", hint="--sbatch exclusive"
            )
        if name in _OURS:
            raise StepscopeError(
                f"`--sbatch {pair}` is not yours to set",
                detail=f"`{name}` is written by stepscope",
                hint="leave it out",
            )
        parsed.append((name, value))
    return tuple(parsed)
