"""A training run, on one of its ranks: steps, timings, log and checkpoints.

Every rank calls `train` and runs the same loop. Rank 0 writes the log and the checkpoints, the log first, so that no
checkpoint contains a step that the log does not. A step's time ends when its update is done on this rank; what ranks
exchange for the log comes after it and does not count.
"""

import os
import pickle
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from stepscope.errors import StepscopeError
from stepscope.files import write_atomically, writing
from stepscope.measure.environment import describe
from stepscope.measure.memory.limits import HostMemory
from stepscope.parallel import FSDP, Communicator
from stepscope.parallel.agreement import require_agreement
from stepscope.parallel.group import choose_device
from stepscope.recording.rows.checkpoints import FOLDER_NAME, IF_FULL, Checkpoint, newest, save
from stepscope.recording.rows.training_log import (
    LOG_NAME,
    MEMORY_NAME,
    RUN_NAME,
    LogFile,
    Moment,
    TrainMemory,
    TrainRow,
    TrainRun,
    keep_loss,
    read_run,
)
from stepscope.spec import Training
from stepscope.step.learner import Learner, held_bytes
from stepscope.step.tokens import Tokens


class TrainingListener(Protocol):
    """Receives the progress of a run. Only rank 0 reports steps and checkpoints."""

    def resumed(self, step: int) -> None: ...

    def stepped(self, row: TrainRow) -> None: ...

    def saved(self, step: int) -> None: ...

    def accounted(self, memory: tuple[TrainMemory, ...]) -> None: ...


def train(
    training: Training,
    folder: Path,
    communicator: Communicator,
    *,
    device: str,
    command: str,
    data_digest: str = "",
    stop_on_nan: bool = False,
    listener: TrainingListener,
) -> None:
    """Train to the last step, from the newest checkpoint in `folder`; with `stop_on_nan`, to the first loss that is not
    finite, which is never saved in a checkpoint.
    """
    local = int(os.environ.get("LOCAL_RANK", communicator.rank))
    place = choose_device(device, local_rank=local)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif "OMP_NUM_THREADS" not in os.environ:  # ranks on one machine share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // communicator.world))
    is_first = communicator.rank == 0
    require_agreement(
        communicator, _say_settings(training, data_digest), "training", hint="run the same command on all ranks"
    )
    run = _TrainingRun(training, folder, communicator, place, data_digest)
    done = run.resume()
    if is_first:
        _keep_run(training, folder, place, command, data_digest)
        listener.resumed(done)
    with LogFile(folder / LOG_NAME, after=done) if is_first else nullcontext() as log:
        for step in range(done + 1, training.steps + 1):
            row = run.step(step)
            if log is not None:
                log.append(row)
                listener.stepped(row)
            if step == done + 1:
                memory = run.share_memory()
                if is_first:
                    _keep(folder / MEMORY_NAME, memory)
                    listener.accounted(memory)
            if stop_on_nan and not row.is_finite:  # the same on all ranks
                break
            if step % training.save_every == 0 or step == training.steps:
                if log is not None:
                    log.sync()
                run.save(step)
                if is_first:
                    listener.saved(step)


def _say_settings(training: Training, data_digest: str) -> list[str]:
    """One line per setting. Each rank has its own device."""
    workload = msgspec.structs.replace(training.workload, device="auto")
    fields = msgspec.structs.asdict(training) | {"workload": workload, "data": data_digest}
    return [f"{name}: {value}" for name, value in fields.items()]


def _keep_run(training: Training, folder: Path, device: torch.device, command: str, data_digest: str) -> None:
    before = read_run(folder)
    # With a different number of ranks, each has a different share of the cores.
    known = before.environment.hardware if before and before.training.ranks == training.ranks else None
    environment = describe(device, {training.workload.precision}, known=known)
    run = TrainRun(training=training, environment=environment, command=command, data_digest=data_digest)
    _keep(folder / RUN_NAME, run)


def _keep(path: Path, value: object) -> None:
    with writing(path, if_full=IF_FULL):
        write_atomically(path, msgspec.json.encode(value))


class _TrainingRun:
    """The learner, its data and its clocks."""

    def __init__(
        self, training: Training, folder: Path, communicator: Communicator, device: torch.device, data_digest: str
    ) -> None:
        self._training = training
        self._checkpoints = folder / FOLDER_NAME
        self._communicator = communicator
        self._device = device
        self._data_digest = data_digest
        self._host = HostMemory() if device.type == "cpu" else None
        self._memory: list[TrainMemory] = []
        self._learner = Learner(training, communicator, device)
        self._tokens = Tokens(training)
        self._account("model built")

    def resume(self) -> int:
        """Return how many steps are done. Rank 0 verifies the checkpoint; the others read the one it names."""
        found = newest(self._checkpoints) if self._communicator.rank == 0 else None
        self._check(found)
        path = self._communicator.share_objects(str(found.path) if found else "", "the checkpoint to resume from")[0]
        if not path:
            return 0
        if not Path(path).exists():
            raise StepscopeError(
                f"rank {self._communicator.rank} cannot see the checkpoint `{path}`",
                detail="every rank reads it, so it must be on a file system that all ranks share",
                hint="stepscope train --out DIR",
            )
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            self._learner.load_full_state(state)
            return int(state["step"])
        except (KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            raise StepscopeError(
                f"the checkpoint `{path}` does not match this model",
                detail=f"{type(error).__name__}: {error}".splitlines()[0][:200],
                hint=f"rm {path}",
            ) from error

    def step(self, step: int) -> TrainRow:
        tokens_BC = self._own_part(self._tokens.batch(step))
        self._communicator.take_time()
        begin_ns = self._now()
        self._learner.begin(self._learning_rate(step))
        loss = self._pass_over(tokens_BC)
        self._learner.finish_gradients()
        if not self._has("before the update"):
            self._account("before the update")
        self._learner.update()
        step_ns = self._now() - begin_ns
        if not self._has("after the update"):
            self._account("after the update")
        self._learner.forget_gradients()
        return self._make_row(step, loss, step_ns)

    def save(self, step: int) -> None:
        state = self._learner.full_state(step)
        if state is not None:
            save(self._checkpoints, step, self._training, self._data_digest, lambda file: torch.save(dict(state), file))

    def share_memory(self) -> tuple[TrainMemory, ...]:
        shared = self._communicator.share_objects(self._memory, "the memory of each rank")
        return tuple(row for rows in shared for row in rows)

    def _pass_over(self, tokens_BC: Tensor) -> Tensor:
        passes = tokens_BC.chunk(self._training.passes)
        losses = [
            self._learner.add_gradients(part_BC, is_last=number == len(passes))
            for number, part_BC in enumerate(passes, start=1)
        ]
        return torch.stack(losses).double().mean()

    def _own_part(self, tokens_BC: Tensor) -> Tensor:
        own = tokens_BC.chunk(self._communicator.world)[self._communicator.rank]
        return own.to(self._device)

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant: extending a run does not change its earlier steps."""
        return self._training.learning_rate * min(1.0, step / (self._training.warmup_steps or 1))

    def _make_row(self, step: int, loss: Tensor, step_ns: int) -> TrainRow:
        time_taken = self._communicator.take_time()
        own = torch.tensor([float(loss), step_ns, time_taken.busy_ns, time_taken.exposed_ns], dtype=torch.float64)
        world = self._communicator.world
        all_R4 = torch.empty(world * 4, dtype=torch.float64, device=self._device)
        self._communicator.all_gather(all_R4, own.to(self._device), f"loss and times of step {step}").wait()
        losses, steps, busy, exposed = all_R4.view(world, 4).T.tolist()
        return TrainRow(
            step=step,
            kept_loss=keep_loss(sum(losses) / world),
            tokens=self._training.workload.tokens,
            learning_rate=self._learning_rate(step),
            strategy=self._training.way,
            step_ns=tuple(int(value) for value in steps),
            communication_ns=tuple(int(value) for value in busy),
            exposed_ns=tuple(int(value) for value in exposed),
        )

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def _check(self, found: Checkpoint | None) -> None:
        if found is None:
            return
        was, now = found.manifest, self._training.identity
        if was.training != now or was.data_digest != self._data_digest:
            raise StepscopeError(
                f"the checkpoint `{found.path}` belongs to another run",
                detail=_differences(was.training, now) or "the text in the data file has changed",
                hint="stepscope train --fresh, or --out DIR",
            )
        if was.step > self._training.steps:
            raise StepscopeError(
                f"the checkpoint `{found.path}` is past step `{self._training.steps}`",
                detail="a run cannot go back to an earlier step",
                hint=f"--steps {was.step}, or --fresh",
            )

    def _has(self, moment: Moment) -> bool:
        return any(row.moment == moment for row in self._memory)

    def _account(self, moment: Moment) -> None:
        parameters, gradients, optimizer = held_bytes(self._learner)
        model = self._learner.model
        self._memory.append(
            TrainMemory(
                rank=self._communicator.rank,
                moment=moment,
                parameters=parameters,
                gradients=gradients,
                optimizer=optimizer,
                gathered=model.ledger.peak_bytes if isinstance(model, FSDP) else 0,
                peak=self._host.peak_bytes() if self._host else torch.cuda.max_memory_allocated(self._device),
            )
        )


def _differences(was: Training, now: Training) -> str:
    """Describe the first setting in which two runs differ."""
    for before, after in ((was.workload.model, now.workload.model), (was.workload, now.workload), (was, now)):
        for name in before.__struct_fields__:
            if name not in ("model", "workload") and getattr(before, name) != getattr(after, name, None):
                return f"{name} was `{getattr(before, name)}` and is now `{getattr(after, name, None)}`"
    return ""
