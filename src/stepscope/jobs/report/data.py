"""The folder of a report: what its stages made, and a note of which of it belongs to which case.

Sweeps find their rows again by themselves. A recording and a document do not say what model of the user's own they are
of, so `report.json` keeps, for every stage, the keys under which it was done: the same hash of case, environment and
source that sweeps go by. It also marks the folder as one of ours, and nothing is ever written into another.
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

_KEY = re.compile(r"[\w-]{1,64}")  # names of files, of which none leads out of the folder


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`done` has for each finished stage the keys of what it made, `absent` why there is nothing of another."""

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
        why = "a stage is done under no key, or under none of ours"
    except (OSError, msgspec.DecodeError) as error:
        why = (error.strerror or "" if isinstance(error, OSError) else str(error))[:200]
    raise StepscopeError(
        f"not a file of `stepscope report`: `{path}`", detail=why, hint="another folder: stepscope report --data FOLDER"
    )


def write_state(folder: Path, state: State) -> None:
    with writing(folder / STATE_NAME, hint="--data FOLDER"):
        write_atomically(folder / STATE_NAME, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")


def check_data(folder: Path) -> None:
    """Refuses, before anything runs, a place that holds something else or cannot be written to."""
    if folder.exists() and not folder.is_dir():
        raise StepscopeError(f"`{folder}` is no folder", hint="--data FOLDER")
    if folder.is_dir() and any(folder.iterdir()):
        if not is_data(folder):
            raise StepscopeError(
                f"`{folder}` is no folder of a report",
                detail=f"it has files and no {STATE_NAME}; a report only goes into a folder of its own",
                hint="--data FOLDER, one that is new or empty",
            )
        read_state(folder)
    parent = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StepscopeError(f"cannot write to `{parent}`", hint="--data FOLDER")


@contextmanager
def open_data(folder: Path, planned: Planned, *, command: str) -> Iterator[State]:
    """The folder for this process alone, with what it says is done of this case. A report of which no stage gets done
    leaves things as they were: no folder, or what was there of the case on another device or with other versions."""
    check_data(folder)
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    with writing(folder, hint="--data FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_or_raise(
            descriptor,
            StepscopeError(
                f"another report is being made in `{folder}`",
                detail="two would disturb each other's timings as well as the files",
                hint="wait for it, or --data FOLDER",
            ),
        )
        before = read_state(folder) if is_data(folder) else None
        if before is not None and before.case != planned.case:
            raise StepscopeError(
                f"`{folder}` is of another case: {describe_case(before.case)}",
                detail=f"this one is {describe_case(planned.case)}; a report never replaces what another one measured",
                hint="another folder: --data FOLDER",
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
    """`new` are the folders that were made for this report, innermost first. They go unless something is in them, such
    as a log of what failed."""
    if before is not None:
        write_state(folder, before)
        return
    if {one.name for one in folder.iterdir()} == {STATE_NAME}:
        (folder / STATE_NAME).unlink()
    for one in new:
        if any(one.iterdir()):
            return
        one.rmdir()
