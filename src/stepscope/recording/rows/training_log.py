"""A training run as it is kept: what ran (`run.json`), a line for each step (`log.jsonl`), and memory by rank.

A run that was killed goes on from its last checkpoint and does the steps after it again, so their lines are cut off
first: the log of a run that was stopped ten times is that of one that was not.
"""

import hashlib
import itertools
import math
import os
from pathlib import Path
from typing import IO, Literal, Self

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, read_document, read_plain, writing
from stepscope.recording.rows.bench import Environment
from stepscope.spec import Training

LOG_NAME, RUN_NAME, MEMORY_NAME = "log.jsonl", "run.json", "memory.json"
SCHEMA = "stepscope.train/1"
_BEGINNING = b'{"step":'  # of every line: one cut short that begins otherwise is not ours to cut off
IF_FULL = "the last checkpoint is whole; free some space and the same command goes on from it"

# When a rank's memory is looked at: the model is there; the gradients are; the optimizer has made its state.
Moment = Literal["model built", "before the update", "after the update"]


# A loss as JSON, which has no number that is not finite. Earlier versions wrote null for all of these.
KeptLoss = float | Literal["nan", "inf", "-inf"] | None


class TrainRow(msgspec.Struct, frozen=True, kw_only=True, rename={"kept_loss": "loss"}):
    """One step. Times are a figure for each rank: the whole step, how long collectives were under way, and how long the
    rank stood still for them."""

    step: int  # counted from 1
    kept_loss: KeptLoss
    tokens: int
    learning_rate: float
    step_ns: tuple[int, ...]
    communication_ns: tuple[int, ...]
    exposed_ns: tuple[int, ...]
    # How the step was done: a run may go on in another way.
    strategy: str = "single"
    schema: str = SCHEMA

    @property
    def loss(self) -> float:
        """The mean over all sequences of the batch. NaN or infinite where training diverged."""
        return math.nan if self.kept_loss is None else float(self.kept_loss)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def times(self) -> tuple[tuple[int, ...], ...]:
        return self.step_ns, self.communication_ns, self.exposed_ns


def keep_loss(loss: float) -> KeptLoss:
    """As `TrainRow` has it."""
    if math.isfinite(loss):
        return loss
    return "nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf"


class TrainMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds at one moment, in bytes. `gathered` is the most that there was of gathered weights at a time,
    since the start; `peak` is what the allocator, or the system for a CPU, saw at most."""

    rank: int
    moment: Moment
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    peak: int


class TrainRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and where it runs."""

    training: Training
    environment: Environment
    command: str
    data_digest: str = ""
    schema: str = SCHEMA


class LogFile:
    """The lines of a run. Those after step `after`, and a last one cut short, are cut off when it is opened."""

    def __init__(self, path: Path, *, after: int) -> None:
        self.path = path
        steps = [row.step for row in read_log(path)[0]] if path.exists() else []
        if steps[:after] != list(range(1, after + 1)):
            raise StepscopeError(
                f"the log `{path}` does not have the steps of the checkpoint",
                detail=f"expected 1 to {after}, found {len(steps)} lines",
                hint="stepscope train --fresh, or --out FOLDER",
            )
        with writing(path, if_full=IF_FULL):
            self._file: IO[bytes] = path.open("a+b")
            self._file.seek(0)
            self._file.truncate(sum(len(line) for line in itertools.islice(self._file, after)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with writing(self.path, if_full=IF_FULL):
            self._file.close()

    def append(self, row: TrainRow) -> None:
        with writing(self.path, if_full=IF_FULL):
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Before a checkpoint, so that no checkpoint knows of a step that the log does not."""
        with writing(self.path, if_full=IF_FULL):
            self._file.flush()
            os.fsync(self._file.fileno())


def read_log(path: Path) -> tuple[list[TrainRow], int]:
    """The steps in order, and how many bytes of a last line cut short were left out."""
    try:
        content = read_plain(path)
    except OSError as error:
        raise StepscopeError(
            f"cannot read the log: `{path}`", detail=error.strerror or "", hint="stepscope train --out FOLDER"
        ) from None
    rows: list[TrainRow] = []
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = decode(line, TrainRow)
        except msgspec.DecodeError as error:
            if number == len(lines) and not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                return rows, len(line)
            raise StepscopeError(
                f"not a training log: `{path}`, line {number}",
                detail=str(error),
                hint=f"expected `{LOG_NAME}` from a folder of stepscope train",
            ) from None
        if not row.step_ns or min(row.step_ns) <= 0 or len({len(times) for times in row.times}) > 1:
            raise StepscopeError(
                f"not a step's times: `{path}`, line {number}",
                detail="expected the same number of ranks in each, and steps that took time",
                hint=f"fix or delete that line: {path}",
            )
        if row.schema != SCHEMA:
            raise StepscopeError(
                f"not a training log of this version: `{path}`, line {number}",
                detail=f"expected schema `{SCHEMA}`, found `{row.schema}`",
                hint="stepscope train --out FOLDER",
            )
        rows.append(row)
    return rows, 0


def data_digest(path: Path) -> str:
    """Of a text file, so that a run does not go on with another."""
    if path.exists() and not path.is_file():
        raise StepscopeError(f"`{path}` is not a file", detail="a text is read from a file", hint="--data FILE")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise StepscopeError(
            f"cannot read the data: `{path}`", detail=error.strerror or "", hint="--data FILE, or none for made tokens"
        ) from None


def read_run(folder: Path) -> TrainRun | None:
    """None where no run has begun."""
    path = folder / RUN_NAME
    hint = f"rm {path}  # the command that trains writes it anew"
    run = read_document(path, TrainRun, refusal="cannot read the run:", hint=hint)
    if run is None:
        return None
    if run.schema != SCHEMA:
        raise StepscopeError(
            f"not a run of this version: `{path}`",
            detail=f"expected schema `{SCHEMA}`, found `{run.schema}`",
            hint="stepscope train --from FOLDER",
        )
    return run


def read_memory(folder: Path) -> tuple[TrainMemory, ...]:
    path = folder / MEMORY_NAME
    return read_document(path, tuple[TrainMemory, ...], refusal="cannot read", hint=f"rm {path}") or ()
