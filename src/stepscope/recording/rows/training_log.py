"""A training run on disk: what ran (`run.json`), one line per step (`log.jsonl`), and memory by rank (`memory.json`).

A run that was killed resumes from its last checkpoint and repeats the steps after it, so their lines are removed first:
the log of an interrupted run equals that of an uninterrupted one.
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
from stepscope.units import count_noun

LOG_NAME, RUN_NAME, MEMORY_NAME = "log.jsonl", "run.json", "memory.json"
SCHEMA = "stepscope.train/1"
_BEGINNING = b'{"step":'  # of every line: a truncated line that begins differently is not removed
IF_FULL = "the last checkpoint is intact; free some space and run the same command to resume from it"

# When the memory of a rank is measured: with the model, with gradients, and with optimizer state.
Moment = Literal["model built", "before the update", "after the update"]


# A loss in JSON, which has no NaN or infinity. Earlier versions wrote null for these.
KeptLoss = float | Literal["nan", "inf", "-inf"] | None


class TrainRow(msgspec.Struct, frozen=True, kw_only=True, rename={"kept_loss": "loss"}):
    """One step. Times have one entry per rank: the step, the time that collectives ran, and the time the rank waited
    for them (exposed communication)."""

    step: int  # counted from 1
    kept_loss: KeptLoss
    tokens: int
    learning_rate: float
    step_ns: tuple[int, ...]
    communication_ns: tuple[int, ...]
    exposed_ns: tuple[int, ...]
    # A run may resume with another strategy.
    strategy: str = "single"
    schema: str = SCHEMA

    @property
    def loss(self) -> float:
        """The mean over all sequences of the batch; NaN or infinite if training diverged."""
        return math.nan if self.kept_loss is None else float(self.kept_loss)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def times(self) -> tuple[tuple[int, ...], ...]:
        return self.step_ns, self.communication_ns, self.exposed_ns


def keep_loss(loss: float) -> KeptLoss:
    """Convert a loss for `TrainRow`."""
    if math.isfinite(loss):
        return loss
    return "nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf"


class TrainMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank at one moment, in bytes. `gathered` is the maximum of gathered weights since the start;
    `peak` is the peak of the allocator, or of the process on a CPU."""

    rank: int
    moment: Moment
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    peak: int


class TrainRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was requested, and where it runs."""

    training: Training
    environment: Environment
    command: str
    data_digest: str = ""
    schema: str = SCHEMA


class LogFile:
    """The log of a run. Opening it removes the lines after step `after` and a truncated last line."""

    def __init__(self, path: Path, *, after: int) -> None:
        self.path = path
        steps = [row.step for row in read_log(path)[0]] if path.exists() else []
        if steps[:after] != list(range(1, after + 1)):
            raise StepscopeError(
                f"the log `{path}` does not match the checkpoint",
                detail=f"expected steps 1 to {after}, got {count_noun(len(steps), 'line')}",
                hint="stepscope train --fresh, or --out DIR",
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
        """Sync to disk. Called before a checkpoint, so that the log has every step of the checkpoint."""
        with writing(self.path, if_full=IF_FULL):
            self._file.flush()
            os.fsync(self._file.fileno())


def read_log(path: Path) -> tuple[list[TrainRow], int]:
    """Return the steps in order, and the size of a truncated last line that was skipped."""
    try:
        content = read_plain(path)
    except OSError as error:
        raise StepscopeError(
            f"cannot read the log: `{path}`", detail=error.strerror or "", hint="stepscope train --out DIR"
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
                hint=f"expected a `{LOG_NAME}` written by stepscope train",
            ) from None
        if not row.step_ns or min(row.step_ns) <= 0 or len({len(times) for times in row.times}) > 1:
            raise StepscopeError(
                f"invalid step times: `{path}`, line {number}",
                detail="expected positive step times, and the same number of ranks for all times",
                hint=f"fix or delete that line: {path}",
            )
        if row.schema != SCHEMA:
            raise StepscopeError(
                f"not a training log from this version of stepscope: `{path}`, line {number}",
                detail=f"expected schema `{SCHEMA}`, got `{row.schema}`",
                hint="stepscope train --out DIR",
            )
        rows.append(row)
    return rows, 0


def data_digest(path: Path) -> str:
    """Return the digest of a text file, so that a run does not resume with another text."""
    if path.exists() and not path.is_file():
        raise StepscopeError(f"`{path}` is not a regular file", detail="expected a text file", hint="--data FILE")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise StepscopeError(
            f"cannot read the data: `{path}`",
            detail=error.strerror or "",
            hint="--data FILE, or leave it out for synthetic tokens",
        ) from None


def read_run(folder: Path) -> TrainRun | None:
    """Return the run in a directory, or None if there is none."""
    path = folder / RUN_NAME
    hint = f"rm {path}  # stepscope train writes it again"
    run = read_document(path, TrainRun, refusal="cannot read the run:", hint=hint)
    if run is None:
        return None
    if run.schema != SCHEMA:
        raise StepscopeError(
            f"not a run from this version of stepscope: `{path}`",
            detail=f"expected schema `{SCHEMA}`, got `{run.schema}`",
            hint="stepscope train --from DIR",
        )
    return run


def read_memory(folder: Path) -> tuple[TrainMemory, ...]:
    path = folder / MEMORY_NAME
    return read_document(path, tuple[TrainMemory, ...], refusal="cannot read", hint=f"rm {path}") or ()
