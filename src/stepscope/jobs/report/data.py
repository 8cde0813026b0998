"""The directory of a report: the results of its stages, and which case they belong to.

Sweeps find their own rows. A recording does not identify the source of a user's own model, so `report.json` keeps the
keys of every finished stage: the hash of case, environment and source that sweeps use. It also marks the directory as
one of stepscope, which never writes into any other.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.files import decode_as, lock_or_raise, read_plain, write_atomically, writing
from stepscope.findings import Missing
from stepscope.jobs.experiments.sweep import Planned
from stepscope.recording.rows.bench import Environment
from stepscope.spec import Case

SCHEMA = "stepscope.report/1"
STATE_NAME = "report.json"

_KEY = re.compile(r"[\w-]{1,64}")  # used in file names, so they must not lead out of the directory


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`done` has the result keys of each finished stage, `absent` the reasons why others are missing."""

    schema: str = SCHEMA
    key: str
    case: Case
    environment: Environment
    command: str
    done: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    absent: dict[str, Missing] = msgspec.field(default_factory=dict)


def is_data(path: Path) -> bool:
    return path.is_dir() and (path / STATE_NAME).is_file()


def read_state(folder: Path) -> State:
    path = folder / STATE_NAME
    try:
        state = decode_as(read_plain(path), State, SCHEMA)
        if all(keys and all(map(_KEY.fullmatch, keys)) for keys in state.done.values()):
            return state
        why = "a finished stage has no key or an invalid one"
    except (OSError, msgspec.DecodeError) as error:
        why = (error.strerror or "" if isinstance(error, OSError) else str(error))[:200]
    raise StepscopeError(f"not written by `stepscope report`: `{path}`", detail=why, hint="stepscope report --data DIR")


def write_state(folder: Path, state: State) -> None:
    with writing(folder / STATE_NAME, hint="--data DIR"):
        write_atomically(folder / STATE_NAME, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")


def check_data(folder: Path) -> None:
    """Raise, before anything runs, if the directory holds something else or is not writable."""
    if folder.exists() and not folder.is_dir():
        raise StepscopeError(f"`{folder}` is not a directory", hint="--data DIR")
    if folder.is_dir() and any(folder.iterdir()):
        if not is_data(folder):
            raise StepscopeError(
                f"`{folder}` is not a report directory",
                detail=f"it has files but no {STATE_NAME}; expected a new, empty or earlier report directory",
                hint="--data DIR",
            )
        read_state(folder)
    parent = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StepscopeError(f"cannot write to `{parent}`", hint="--data DIR")


@contextmanager
def open_data(folder: Path, planned: Planned, *, command: str) -> Iterator[State]:
    """Lock the directory for this process and yield which stages of the case are done. If no stage finishes, everything
    is left as before: no directory, or the results for another device or other versions."""
    check_data(folder)
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    with writing(folder, hint="--data DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_or_raise(
            descriptor,
            StepscopeError(
                f"another report is running in `{folder}`",
                detail="two reports would disturb each other's timings and files",
                hint="--data DIR, or wait until it finishes",
            ),
        )
        before = read_state(folder) if is_data(folder) else None
        if before is not None and before.case != planned.case:
            raise StepscopeError(
                f"`{folder}` belongs to another case: {describe_case(before.case)}",
                detail=f"this case is {describe_case(planned.case)}; a report never replaces the results of another",
                hint="--data DIR",
            )
        state = State(
            key=planned.key,
            case=planned.case,
            environment=planned.environment,
            command=command,
            done=before.done if before and before.key == planned.key else {},
        )
        write_state(folder, state)
        try:
            yield state
        finally:
            if not read_state(folder).done:
                _put_back(folder, before, new)
    finally:
        os.close(descriptor)


def _put_back(folder: Path, before: State | None, new: list[Path]) -> None:
    """Restore the state `before`. `new` are the directories created for this report, innermost first; they are removed
    unless they hold something, such as a log of a failure."""
    if before is not None:
        write_state(folder, before)
        return
    if {one.name for one in folder.iterdir()} == {STATE_NAME}:
        (folder / STATE_NAME).unlink()
    for one in new:
        if any(one.iterdir()):
            return
        one.rmdir()
