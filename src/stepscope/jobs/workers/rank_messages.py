"""What ranks and the process that started them say to each other: JSON lines, over a pipe for each rank."""

import msgspec

from stepscope.recording.rows.comm import CommCase, CommOutcome
from stepscope.recording.rows.train import TrainMemory, TrainRow
from stepscope.spec import Training


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


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks are started with."""

    setup: Setup
    request: RankRequest


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    name: str


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


RankMessage = Stage | Resumed | Stepped | Saved | Accounted | CommMeasured | RankFailed | RankDone
