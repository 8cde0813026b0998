"""A baseline: what later runs of the same workload are compared with.

A baseline is one JSON document, small enough to commit: the step times of each run, times per class and phase, counts,
and what must be equal in a later run. It has no kernels, so a recording is not needed once its baseline is saved. The
runs of a baseline are repeated measurements of the same thing, because only the variation between runs says how far two
runs of unchanged code differ.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from stepscope.errors import StepscopeError, nearest
from stepscope.files import decode_as, is_of_kind, read_plain, write_atomically, writing

SCHEMA = "stepscope.baseline/1"
STORE = Path(".stepscope/baselines")
MOST_STEPS = 500  # per run; more would make the file large and the median no better
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".json"

StepNs = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=2**62)]
# Whether a profiler was active during the steps that were timed.
StepClockKind = Literal["unprofiled", "profiled"]
Metric = Literal["step", "kernels", "peak-memory", "idle"]
METRICS: tuple[Metric, ...] = get_args(Metric)


class BaselineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are nanoseconds per step; what is unknown is None or empty."""

    file: str  # the name of the recording
    identity: str  # a digest of the recording: the same recording twice is not two runs
    started: str = ""
    clock: StepClockKind = "unprofiled"
    step_ns: tuple[StepNs, ...] = ()
    idle_ns: Amount | None = None
    kernels: Amount | None = None  # per step
    peak_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    peak_is_exact: bool = True  # counted by an allocator; the resident memory of a process varies
    classes: dict[str, Amount] = msgspec.field(default_factory=dict)
    phases: dict[str, Amount] = msgspec.field(default_factory=dict)


class RunConditions(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal in two runs for their times to be comparable, and the other versions, which are only named if
    they differ. Empty if unknown."""

    device: str = ""
    torch: str = ""
    world_size: int = 1
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)

    def differences(self, other: "RunConditions") -> list[str]:
        """What makes a run under the `other` conditions incomparable."""
        found = [
            f"{name} {left} → {right}"
            for name, left, right in (("device", self.device, other.device), ("torch", self.torch, other.torch))
            if left and right and left != right
        ]
        if self.world_size != other.world_size:
            found.append(f"ranks {self.world_size} → {other.world_size}")
        if self.settings and other.settings:
            found += _list_changes(self.settings, other.settings)
        return found

    def remarks(self, other: "RunConditions") -> list[str]:
        """Differences that are allowed, and conditions that are unknown."""
        found = []
        if changes := _list_changes(self.versions, other.versions):
            found.append(f"versions differ: {', '.join(changes)}")
        for name, left, right in (("device", self.device, other.device), ("torch version", self.torch, other.torch)):
            if not (left and right):
                found.append(f"not checked: the {name} is unknown in {'the baseline' if not left else 'the new run'}")
        return found


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    saved: str = ""
    stepscope: str = ""
    conditions: RunConditions
    runs: Annotated[tuple[BaselineRun, ...], msgspec.Meta(min_length=1)]


def thin_out(samples: Sequence[int]) -> tuple[int, ...]:
    """At most `MOST_STEPS` samples, evenly spaced over the run."""
    count = min(len(samples), MOST_STEPS)
    return tuple(samples[index * len(samples) // count] for index in range(count))


def refuse_repeated(runs: Sequence[BaselineRun]) -> None:
    """Raise StepscopeError if a recording is given twice: two copies do not differ, so the noise would seem to be
    zero."""
    seen: dict[str, str] = {}
    for run in runs:
        if run.identity in seen:
            raise StepscopeError(
                f"`{run.file}` and `{seen[run.identity]}` are the same recording",
                detail="the runs of a baseline show how much repeated runs differ; each must be a run of its own",
                hint="record the step again into another directory",
            )
        seen[run.identity] = run.file


def parse_metric(text: str) -> Metric:
    for known in METRICS:
        if text == known:
            return known
    close = nearest(text, METRICS) or METRICS[0]
    raise StepscopeError(
        f"unknown metric: `{text}`", detail=f"expected one of {', '.join(METRICS)}", hint=f"--metric {close}"
    )


# --- The store --------------------------------------------------------------------------------------------------------


def baseline_path(store: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise StepscopeError(
            f"invalid baseline name: `{name}`",
            detail="expected letters, digits, `.`, `_` and `-`, starting with a letter or digit",
            hint="stepscope baseline save main runs/a",
        )
    return store / f"{name}{_SUFFIX}"


def list_names(store: Path) -> list[str]:
    """The names of all baselines in a store; empty if it does not exist."""
    if not store.is_dir():
        return []
    named = (path for path in store.iterdir() if path.suffix == _SUFFIX and _NAME.fullmatch(path.stem))
    return sorted(path.stem for path in named if is_of_kind(path, SCHEMA))


def read_baseline(store: Path, name: str) -> Baseline:
    path = baseline_path(store, name)
    try:
        return decode_as(read_plain(path), Baseline, SCHEMA)
    except FileNotFoundError:
        raise missing(store, name) from None
    except (OSError, msgspec.DecodeError) as error:
        raise StepscopeError(
            f"cannot read the baseline `{path}`",
            detail=str(error)[:300],
            hint=f"save it again: stepscope baseline save {name} RUN... --force",
        ) from None


def missing(store: Path, name: str) -> StepscopeError:
    known = list_names(store)
    close = nearest(name, known)
    return StepscopeError(
        f"baseline `{name}` not found in `{store}`",
        detail=f"it has {', '.join(known)}" if known else "it has none yet",
        hint=f"--baseline {close}" if close else f"stepscope baseline save {name} RUN...",
    )


def write_baseline(store: Path, name: str, baseline: Baseline, *, force: bool) -> Path:
    """Write a baseline. Only another baseline is replaced, and only with `force`."""
    path = baseline_path(store, name)
    if path.exists() and not is_of_kind(path, SCHEMA):
        raise StepscopeError(
            f"`{path}` exists and is not a baseline", detail="nothing was changed", hint="choose another name"
        )
    if path.exists() and not force:
        raise StepscopeError(
            f"baseline `{name}` already exists", hint="--force to replace it, or --add to add runs to it"
        )
    content = msgspec.json.format(msgspec.json.encode(baseline), indent=1)
    with writing(path, if_full="nothing was saved", hint="--store DIR"):
        write_atomically(path, content + b"\n")
    return path


def remove_baseline(store: Path, name: str) -> Path:
    path = baseline_path(store, name)
    if not path.exists():
        raise missing(store, name)
    if not is_of_kind(path, SCHEMA):
        raise StepscopeError(f"`{path}` is not a baseline", detail="nothing was changed")
    with writing(path, hint="--store DIR"):
        path.unlink()
    return path


def _list_changes(left: dict[str, str], right: dict[str, str]) -> list[str]:
    names = dict.fromkeys((*left, *right))
    return [
        f"{name} {left.get(name, '–')} → {right.get(name, '–')}" for name in names if left.get(name) != right.get(name)
    ]
