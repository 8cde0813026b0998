"""What a rank does: join the others, serve one request, and report the outcome."""

import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.jobs.workers.messages import (
    Accounted,
    BeRank,
    CommMeasured,
    MeasureComm,
    RankDone,
    RankFailed,
    RankMessage,
    RankRequest,
    Resumed,
    Saved,
    Setup,
    StageReached,
    Stepped,
    Train,
)
from stepscope.measure.failures import say_in_a_line
from stepscope.parallel.journal import FOLDER_VARIABLE
from stepscope.recording.rows.training_log import TrainMemory, TrainRow

if TYPE_CHECKING:
    from stepscope.parallel.communicator import Communicator

Tell = Callable[[RankMessage], None]


def serve_rank(birth: BeRank, tell: Tell) -> int:
    """Serve in a separate process; return its exit status. The process boundary: every exception is reported, and
    becomes the parent's error.
    """
    try:
        with _joined(birth.setup, birth.rank) as communicator:
            _serve(birth.request, birth.setup, communicator, tell)
    except StepscopeError as error:
        from stepscope.parallel.communicator import CollectiveError

        traceback.print_exc()
        in_collective = isinstance(error, CollectiveError)
        tell(RankFailed(message=error.message, detail=error.detail, hint=error.hint, in_collective=in_collective))
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        tell(RankFailed(message=say_in_a_line(error)))
    else:
        tell(RankDone())
        return 0
    return 1


def serve_here(setup: Setup, request: RankRequest, tell: Tell) -> None:
    """Serve in this process, which an external launcher (`torchrun`, Slurm) started as a rank."""
    with _joined(setup, 0) as communicator:  # the environment variables say which rank
        _serve(request, setup, communicator, tell)


def _joined(setup: Setup, rank: int) -> "AbstractContextManager[Communicator]":
    from stepscope.parallel.group import choose_backend, join

    os.environ[FOLDER_VARIABLE] = setup.journal
    meeting = Path(setup.meeting) if setup.meeting else None
    backend = choose_backend(setup.backend, setup.device, setup.world)
    return join(backend=backend, timeout_s=setup.timeout_s, meeting=meeting, rank=rank, world=setup.world)


def _serve(request: RankRequest, setup: Setup, communicator: "Communicator", tell: Tell) -> None:
    match request:
        case Train():
            from stepscope.measure.training import train

            train(
                request.training,
                Path(request.folder),
                communicator,
                device=setup.device,
                command=request.command,
                data_digest=request.data_digest,
                stop_on_nan=request.stop_on_nan,
                listener=_Telling(tell),
            )
        case MeasureComm():
            from stepscope.measure.collectives import measure_collectives

            def on_stage(name: str) -> None:
                if communicator.rank == 0:
                    tell(StageReached(name=name))

            outcomes = measure_collectives(request.cases, communicator, device=setup.device, on_stage=on_stage)
            for outcome in outcomes:
                if communicator.rank == 0:
                    tell(CommMeasured(outcome=outcome))


class _Telling:
    """Forwards the progress of a run as messages."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def resumed(self, step: int) -> None:
        self._tell(Resumed(step=step))

    def stepped(self, row: TrainRow) -> None:
        self._tell(Stepped(row=row))

    def saved(self, step: int) -> None:
        self._tell(Saved(step=step))

    def accounted(self, memory: tuple[TrainMemory, ...]) -> None:
        self._tell(Accounted(memory=memory))
