"""The result of `stepscope optimise`: every change to a step that was tried, how it was checked, and what it gained.

One document is what `--out` saves and what `--format json` prints, so a result from a GPU machine can be shown on a
laptop. The worker sends its changes one by one, and the file is written again after each.

JSON has no NaN or infinity: such a loss or error is None here.
"""

from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode_as, read_plain, write_atomically, writing
from stepscope.recording.rows.bench import Environment
from stepscope.spec import Case

SCHEMA = "stepscope.optimise/1"

ChangeStatus = Literal["start", "kept", "no gain", "not applied", "failed"]


class GradientCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient that is closest to its limit, or furthest beyond it. Errors are relative to the norm of the true
    gradient, and the limit is twice the error of the original step, plus half a unit in the last place."""

    parameter: str
    error: float | None
    plain_error: float | None  # of the original step in the same precision
    share_of_limit: float | None
    truth: Literal["float64", "fp32"]
    loss: float | None
    plain_loss: float | None
    true_loss: float | None

    @property
    def passes(self) -> bool:
        return self.share_of_limit is not None and self.share_of_limit <= 1.0


class MeasuredChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change, measured on top of those kept before it; the first is the step as it is. Nothing is measured if it was
    not applied or failed to run."""

    name: str
    title: str
    status: ChangeStatus
    step_ns: int | None = None
    peak_bytes: int | None = None
    prepare_s: float | None = None  # tracing, compiling and capturing
    notes: tuple[str, ...] = ()  # what was replaced, or why not
    check: GradientCheck | None = None

    def __post_init__(self) -> None:
        if self.step_ns is not None and self.step_ns <= 0:
            raise ValueError("expected positive step times")


class OptimiseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document. `stopped` says why it ends early; it is empty if every change was tried."""

    schema: str = SCHEMA
    case: Case
    environment: Environment
    command: str
    started: str
    changes: tuple[MeasuredChange, ...]
    stopped: str = ""

    @property
    def start_ns(self) -> int | None:
        """The step as it is."""
        return next((one.step_ns for one in self.changes if one.status == "start"), None)

    @property
    def final_ns(self) -> int | None:
        """The step with all changes that were kept."""
        return next((one.step_ns for one in reversed(self.changes) if one.status in ("start", "kept")), None)

    @property
    def speedup(self) -> float | None:
        return self.start_ns / self.final_ns if self.start_ns and self.final_ns else None

    @property
    def kept(self) -> tuple[MeasuredChange, ...]:
        return tuple(one for one in self.changes if one.status == "kept")

    def before_ns(self, change: MeasuredChange) -> int | None:
        """The step that a change was measured against: with all changes kept before it."""
        found: int | None = None
        for one in self.changes:
            if one is change:
                return found
            if one.status in ("start", "kept"):
                found = one.step_ns
        raise AssertionError("the change belongs to another report")


def encode_optimisation(report: OptimiseReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_optimisation(path: Path) -> OptimiseReport:
    try:
        content = read_plain(path)
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`", detail=error.strerror or "", hint="stepscope optimise") from None
    try:
        return decode_as(content, OptimiseReport, SCHEMA)
    except msgspec.DecodeError as error:
        raise StepscopeError(
            f"not a `stepscope optimise` result: `{path}`", detail=str(error), hint="stepscope optimise"
        ) from None


def write_optimisation(report: OptimiseReport, path: Path) -> None:
    """Write the file atomically."""
    with writing(path, if_full="the last complete version is intact; free some space and run the same command again"):
        write_atomically(path, encode_optimisation(report))
