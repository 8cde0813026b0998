"""The resources a job requests from Slurm."""

import re
from collections.abc import Sequence

import msgspec

from stepscope.errors import StepscopeError

_DEFAULT_TIME_MIN = 60
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEM = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)
# Options that we write into the script ourselves, or have a flag for.
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
    """The resources of one job. GPUs and memory are per node, CPUs per task; None uses the cluster's default."""

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
        """What decides where a job lands, and so what it measures: not its time limit or account."""
        return msgspec.structs.replace(self, time_min=_DEFAULT_TIME_MIN, mem=None, account=None, qos=None)


def parse_time_min(text: str) -> int:
    """Parse Slurm's time formats into minutes, rounded up: `90`, `90:00`, `1:30:00`, `1-12`, `1-12:30:00`."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise StepscopeError(
            f"invalid time: `--time {text}`",
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
        raise StepscopeError(f"expected a time above zero, got `--time {text}`", hint="--time 2:00:00")
    return -(-total_s // 60)


def parse_mem(text: str) -> str:
    if _MEM.fullmatch(text) is None:
        raise StepscopeError(
            f"invalid memory size: `--mem {text}`", detail="expected a size such as 64G", hint="--mem 64G"
        )
    return text


def parse_sbatch(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse `--sbatch key=value` pairs, for options without a flag of their own. A key without a value is a switch."""
    parsed = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.removeprefix("--")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or (equals and not value):
            raise StepscopeError(
                f"not an sbatch option: `--sbatch {pair}`", detail="expected key=value", hint="--sbatch exclusive"
            )
        if name in _OURS:
            raise StepscopeError(
                f"`--sbatch {pair}` cannot be set",
                detail=f"stepscope sets `{name}` itself",
                hint=f"remove --sbatch {pair}",
            )
        parsed.append((name, value))
    return tuple(parsed)
