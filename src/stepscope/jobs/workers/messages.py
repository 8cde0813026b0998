"""What a sweep says to its worker processes and to its ranks, and they to it: one JSON line a message, over a pipe for
each process.

The standard output and error of a process are left to the model that runs there; they go to a log.
"""

import msgspec

from stepscope.recording.memory.labels import MemoryRun
from stepscope.recording.rows.attention_case import AttentionCase, AttentionOutcome
from stepscope.recording.rows.bench import Doubt, Environment, Inspection, Measurement, RecordedRun
from stepscope.recording.rows.collective_case import CommCase, CommOutcome
from stepscope.recording.rows.precision_report import PrecisionComparison
from stepscope.recording.rows.training_log import TrainMemory, TrainRow
from stepscope.spec import Case, Precision, Training


class ProbeCases(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Look at the device and at the models, and run nothing. All cases name one device."""

    cases: tuple[Case, ...]


class MeasureStep(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
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


Request = ProbeCases | MeasureStep | Record | ComparePrecisions | RecordMemory | MeasureAttention | Inspect


class StageReached(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
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


class StepMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    measurement: Measurement
    doubts: tuple[Doubt, ...]


class StepsRecorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded"):
    run: RecordedRun


class PrecisionsCompared(msgspec.Struct, frozen=True, kw_only=True, tag="precisions-compared"):
    comparison: PrecisionComparison


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
    | StepMeasured
    | StepsRecorded
    | PrecisionsCompared
    | MemoryRecorded
    | AttentionDone
    | OutOfMemory
    | Failed
)
Answer = StageReached | AttentionMeasured | Result


# --- Ranks ------------------------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks meet, and how they talk."""

    world: int
    backend: str
    device: str
    timeout_s: float
    journal: str
    meeting: str | None = None  # a file; without one, the environment says where


class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """Train to the end, or to a loss that is not finite, from the newest checkpoint in `folder` on."""

    training: Training
    folder: str
    command: str
    data_digest: str = ""
    stop_on_nan: bool = False


class MeasureComm(msgspec.Struct, frozen=True, kw_only=True, tag="measure-comm"):
    """Measure the cases that rank 0 was given, with a word after each; other ranks may have been given none."""

    cases: tuple[CommCase, ...]


RankRequest = Train | MeasureComm


class BeRank(msgspec.Struct, frozen=True, kw_only=True, tag="be-rank"):
    """Join the other ranks, and serve the request with them."""

    setup: Setup
    request: RankRequest
    rank: int


class Resumed(msgspec.Struct, frozen=True, kw_only=True, tag="resumed"):
    """Training goes on after this many steps."""

    step: int


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    row: TrainRow


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    step: int


class Accounted(msgspec.Struct, frozen=True, kw_only=True, tag="accounted"):
    memory: tuple[TrainMemory, ...]


class CommMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="comm-measured"):
    """The next of the cases is done, and the ranks go on. Rank 0 alone says this."""

    outcome: CommOutcome


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It raised. `in_collective` when it may be another rank's fault."""

    message: str
    detail: str = ""
    hint: str = ""
    in_collective: bool = False


class RankDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """All that was asked for is done."""


RankMessage = StageReached | Resumed | Stepped | Saved | Accounted | CommMeasured | RankFailed | RankDone
