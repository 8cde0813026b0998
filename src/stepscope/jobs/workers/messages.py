"""What a sweep and its worker processes say to each other: one JSON line a message, over a pipe of their own.

The worker's standard output and error are left to the model that runs there; they go to a log.
"""

import msgspec

from stepscope.recording.memory.labels import MemoryRun
from stepscope.recording.recorded import RecordedRun
from stepscope.recording.rows.attention import AttentionCase, AttentionOutcome
from stepscope.recording.rows.bench import Doubt, Environment, Measurement
from stepscope.recording.rows.inspection import Inspection
from stepscope.recording.rows.precision import Comparison
from stepscope.spec import Case, Precision


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Look at the device and at the models, and run nothing. All cases name one device."""

    cases: tuple[Case, ...]


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    case: Case


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """Record `steps` steps with PyTorch's profiler and leave the trace in `folder`. `functions` are annotated."""

    case: Case
    folder: str
    steps: int
    functions: tuple[str, ...] = ()
    stacks: bool = False


class ComparePrecisions(msgspec.Struct, frozen=True, kw_only=True, tag="compare-precisions"):
    """Run one step in each of the precisions, and in float64."""

    case: Case
    precisions: tuple[Precision, ...]


class RecordMemory(msgspec.Struct, frozen=True, kw_only=True, tag="record-memory"):
    """Record the memory of the case's steps, from the cold, and leave the snapshot in `folder`."""

    case: Case
    folder: str


class MeasureAttention(msgspec.Struct, frozen=True, kw_only=True, tag="measure-attention"):
    """Measure one implementation at each case in turn, all on one device, with a word after each."""

    cases: tuple[AttentionCase, ...]


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Say what torch sees of this machine."""


Request = Probe | Run | Record | ComparePrecisions | RecordMemory | MeasureAttention | Inspect


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """The worker has come this far: for the progress bar, and for the reason if it goes no further."""

    name: str


class AttentionMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="attention-measured"):
    """The next of the cases is done, and the worker goes on."""

    outcome: AttentionOutcome


class ProbedModel(msgspec.Struct, frozen=True, kw_only=True):
    """`source` is the digest of the files behind a model, None for the built-in one; `takes_context` is false where a
    step has no tokens."""

    source: str | None
    takes_context: bool


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    """`models` are those of the cases, one for each."""

    environment: Environment
    models: tuple[ProbedModel, ...]


class Inspected(msgspec.Struct, frozen=True, kw_only=True, tag="inspected"):
    inspection: Inspection


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    measurement: Measurement
    doubts: tuple[Doubt, ...]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded"):
    run: RecordedRun


class PrecisionsCompared(msgspec.Struct, frozen=True, kw_only=True, tag="precisions-compared"):
    comparison: Comparison


class MemoryRecorded(msgspec.Struct, frozen=True, kw_only=True, tag="memory-recorded"):
    run: MemoryRun


class AttentionDone(msgspec.Struct, frozen=True, kw_only=True, tag="attention-done"):
    """Every case has had its word."""


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True, tag="oom"):
    reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It raised. `bad_input` when the user can mend it: a wrong setting, or a model of theirs that does not build."""

    message: str
    detail: str = ""
    hint: str = ""
    bad_input: bool = False


Result = (
    Probed
    | Inspected
    | Measured
    | Recorded
    | PrecisionsCompared
    | MemoryRecorded
    | AttentionDone
    | OutOfMemory
    | Failed
)
Answer = Stage | AttentionMeasured | Result
