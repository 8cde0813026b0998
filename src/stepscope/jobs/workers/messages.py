"""The messages between a sweep and its worker and rank processes: one JSON line per message, over one pipe per process.

The standard output and error of a process belong to the model that runs there; they go to a log.
"""

import msgspec

from stepscope.planner.assumptions import Accelerator
from stepscope.recording.memory.labels import MemoryRun
from stepscope.recording.rows.attention_case import AttentionCase, AttentionOutcome
from stepscope.recording.rows.bench import Doubt, Environment, Inspection, Measurement, RecordedRun
from stepscope.recording.rows.calibration import Calibration
from stepscope.recording.rows.collective_case import CommCase, CommOutcome
from stepscope.recording.rows.optimisation import MeasuredChange
from stepscope.recording.rows.plan_result import ALONE, PlannedRanks, StepPrediction
from stepscope.recording.rows.precision_report import PrecisionComparison
from stepscope.recording.rows.training_log import TrainMemory, TrainRow
from stepscope.spec import Case, Precision, Training


class ProbeCases(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Probe the device and the models, and run nothing. All cases name one device."""

    cases: tuple[Case, ...]


class MeasureStep(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    case: Case


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """Record `steps` steps with PyTorch's profiler and write the trace to `folder`. `functions` are annotated."""

    case: Case
    folder: str
    steps: int
    functions: tuple[str, ...] = ()
    stacks: bool = False


class ComparePrecisions(msgspec.Struct, frozen=True, kw_only=True, tag="compare-precisions"):
    """Run one step in each precision, and in float64."""

    case: Case
    precisions: tuple[Precision, ...]


class RecordMemory(msgspec.Struct, frozen=True, kw_only=True, tag="record-memory"):
    """Record the memory of the case's steps, from the first, and write the snapshot to `folder`."""

    case: Case
    folder: str


class MeasureAttention(msgspec.Struct, frozen=True, kw_only=True, tag="measure-attention"):
    """Measure one implementation at each case in turn, all on one device, with a message after each."""

    cases: tuple[AttentionCase, ...]


class OptimiseStep(msgspec.Struct, frozen=True, kw_only=True, tag="optimise"):
    """Try changes to a step, with a message after each. `compiler` is a backend of `torch.compile`."""

    case: Case
    compiler: str = "inductor"


class PredictStep(msgspec.Struct, frozen=True, kw_only=True, tag="predict"):
    """Predict the memory of a step on a GPU, without one, and its time if there is a table of that GPU. The case is
    that of one rank; there is a prediction for each of `ranks`."""

    case: Case
    gpu: Accelerator
    calibration: Calibration | None = None
    ranks: tuple[PlannedRanks, ...] = (ALONE,)


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Report what torch sees of this machine."""


Request = (
    ProbeCases
    | MeasureStep
    | Record
    | ComparePrecisions
    | RecordMemory
    | MeasureAttention
    | OptimiseStep
    | PredictStep
    | Inspect
)


class StageReached(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """The worker has reached this stage: for the progress bar, and for the reason if it gets no further."""

    name: str


class AttentionMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="attention-measured"):
    """One more case is done, and the worker continues."""

    outcome: AttentionOutcome


class ChangeMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="change-measured"):
    """One more change was tried, and the worker continues."""

    change: MeasuredChange


Part = AttentionMeasured | ChangeMeasured  # of an answer that comes in parts


class ProbedModel(msgspec.Struct, frozen=True, kw_only=True):
    """`source` is the digest of a model's files, None for the built-in one; `takes_context` is false if a step has no
    tokens.
    """

    source: str | None
    takes_context: bool


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    """`models` has one entry per case."""

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
    """Every case has been reported."""


class StepOptimised(msgspec.Struct, frozen=True, kw_only=True, tag="step-optimised"):
    """Every change has been reported."""


class StepPredicted(msgspec.Struct, frozen=True, kw_only=True, tag="step-predicted"):
    predictions: tuple[StepPrediction, ...]


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True, tag="oom"):
    reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """An exception. `bad_input` if the user can fix it: a wrong setting, or a custom model that does not build."""

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
    | StepOptimised
    | StepPredicted
    | OutOfMemory
    | Failed
)
Answer = StageReached | Part | Result


# --- Ranks ------------------------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks meet and communicate."""

    world: int
    backend: str
    device: str
    timeout_s: float
    journal: str
    meeting: str | None = None  # a file; without one, the environment variables say where


class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """Train to the last step, or to a loss that is not finite, resuming from the newest checkpoint in `folder`."""

    training: Training
    folder: str
    command: str
    data_digest: str = ""
    stop_on_nan: bool = False


class MeasureComm(msgspec.Struct, frozen=True, kw_only=True, tag="measure-comm"):
    """Measure the cases that rank 0 received, with a message after each; other ranks may receive none."""

    cases: tuple[CommCase, ...]


RankRequest = Train | MeasureComm


class BeRank(msgspec.Struct, frozen=True, kw_only=True, tag="be-rank"):
    """Join the other ranks, and serve the request with them."""

    setup: Setup
    request: RankRequest
    rank: int


class Resumed(msgspec.Struct, frozen=True, kw_only=True, tag="resumed"):
    """Training resumes after this many steps."""

    step: int


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    row: TrainRow


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    step: int


class Accounted(msgspec.Struct, frozen=True, kw_only=True, tag="accounted"):
    memory: tuple[TrainMemory, ...]


class CommMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="comm-measured"):
    """One more case is done, and the ranks continue. Sent by rank 0 only."""

    outcome: CommOutcome


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """An exception. `in_collective` if another rank may be the cause."""

    message: str
    detail: str = ""
    hint: str = ""
    in_collective: bool = False


class RankDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Everything requested is done."""


RankMessage = StageReached | Resumed | Stepped | Saved | Accounted | CommMeasured | RankFailed | RankDone
