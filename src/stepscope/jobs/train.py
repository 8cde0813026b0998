"""`stepscope train`: starts ranks, or runs this process as one of them."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import claim, is_of_kind, locked, writing
from stepscope.jobs.workers.cpu_limits import limit_instructions
from stepscope.jobs.workers.messages import RankMessage, Setup, Train
from stepscope.jobs.workers.rank_processes import JOURNAL_NAME, run_ranks
from stepscope.recording.rows.checkpoints import FOLDER_NAME, forget_all, newest
from stepscope.recording.rows.training_log import (
    LOG_NAME,
    MEMORY_NAME,
    RUN_NAME,
    SCHEMA,
    TrainMemory,
    TrainRow,
    TrainRun,
    data_digest,
    read_log,
    read_memory,
    read_run,
)
from stepscope.spec import WHOLE_STEP, Grid, Strategy, Training, grid_from_flags

DEFAULT_TIMEOUT_S = 300.0
ENTRY = "stepscope.jobs.train:serve_request"  # what a rank on a cluster calls


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    run: TrainRun
    rows: tuple[TrainRow, ...]
    memory: tuple[TrainMemory, ...]


class TrainJob(msgspec.Struct, frozen=True, kw_only=True):
    """How to run. `backend` is gloo, nccl or auto: NCCL on GPUs and gloo on CPUs. `stop_on_nan` ends the run at the
    first loss that is not finite.
    """

    training: Training
    folder: Path
    command: str
    backend: str = "auto"
    fresh: bool = False
    stop_on_nan: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S

    def claim_folder(self) -> None:
        """Check before anything is written or deleted that the directory is new, empty, or holds a training run."""
        claim(self.folder, SCHEMA, knows=lambda folder: is_of_kind(folder / RUN_NAME, SCHEMA))

    def run(self, on_message: Callable[[RankMessage], None]) -> TrainResult:
        """Train with ranks that this process starts, all on this machine."""
        self.claim_folder()
        with _only_one(self.folder):
            self._prepare()
            run_ranks(self._request(), self._setup(), self.folder, lambda _, message: on_message(message))
        return read_result(self.folder)

    def run_here(self, on_message: Callable[[RankMessage], None]) -> TrainResult | None:
        """Train as a rank that an external launcher started. Only rank 0 returns the result."""
        from stepscope.jobs.workers.rank import serve_here

        limit_instructions()
        self.claim_folder()
        # left over from an earlier run; a rank that joins first must not delete what others have written by then
        with writing(self.folder):
            (self.folder / JOURNAL_NAME / f"{os.environ['RANK']}.journal").unlink(missing_ok=True)
        if os.environ["RANK"] == "0":
            with _only_one(self.folder):
                self._prepare()
                serve_here(self._setup(), self._request(), on_message)
            return read_result(self.folder)
        serve_here(self._setup(), self._request(), on_message)
        return None

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint of this run contains all steps."""
        found = None if self.fresh else newest(self.folder / FOLDER_NAME)
        if found is None or found.manifest.step != self.training.steps:
            return False
        was = found.manifest
        return was.training == self.training.identity and was.data_digest == self._data_digest()

    def prepare(self) -> None:
        """Delete what `fresh` deletes, for ranks under an external launcher, which do not know about it."""
        self.claim_folder()
        with _only_one(self.folder):
            self._prepare()

    def as_request(self) -> str:
        """Return this job as a text, for `ENTRY`. A requeued job resumes, so `fresh` is not part of it: `prepare`
        applies it once.
        """
        there = msgspec.structs.replace(self, fresh=False, folder=self.folder.absolute())
        return msgspec.json.encode(there, enc_hook=str).decode()

    def _setup(self) -> Setup:
        return Setup(
            world=self.training.ranks,
            backend=self.backend,
            device=self.training.workload.device,
            timeout_s=self.timeout_s,
            journal=str(self.folder / JOURNAL_NAME),
        )

    def _request(self) -> Train:
        return Train(
            training=self.training,
            folder=str(self.folder),
            command=self.command,
            data_digest=self._data_digest(),
            stop_on_nan=self.stop_on_nan,
        )

    def _data_digest(self) -> str:
        data = self.training.data
        return data_digest(Path(data)) if data else ""

    def _prepare(self) -> None:
        with writing(self.folder):
            # Journals of ranks that this run does not have would be read as its own. Its own ranks may be running
            # already.
            for old in (self.folder / JOURNAL_NAME).glob("*.journal"):
                if old.stem.isdigit() and int(old.stem) >= self.training.ranks:
                    old.unlink()
            if self.fresh:
                forget_all(self.folder / FOLDER_NAME)
                for name in (LOG_NAME, RUN_NAME, MEMORY_NAME):
                    (self.folder / name).unlink(missing_ok=True)


def serve_request(request: str) -> None:
    """The entry point on a cluster: this process is one rank of the job that `request` describes."""
    job = msgspec.json.decode(request, type=TrainJob, dec_hook=lambda kind, value: kind(value))
    job.run_here(lambda _: None)


def is_rank() -> bool:
    """Whether an external launcher such as `torchrun` or `srun` started this process as a rank."""
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise StepscopeError(
            f"RANK is `{os.environ['RANK']}` but WORLD_SIZE is not set",
            detail="a launcher sets both; without RANK, stepscope starts the ranks itself",
            hint="unset RANK, or torchrun --nproc-per-node 2 -m stepscope train",
        )
    return "RANK" in os.environ


def build_training(
    grid: Grid, *, ranks: int | None, strategy: Strategy | None, data: str, **settings: float | bool
) -> Training:
    """Build from command-line settings. Under an external launcher, WORLD_SIZE gives the number of ranks."""
    ranks = _count_ranks(ranks)
    strategy = strategy or ("single" if ranks == 1 else "bucketed")
    grid = _without_parts(grid, strategy)
    cases = grid.cases()
    if len(cases) != 1:
        name = next(name for name, values in grid.axes if len(values) > 1)
        raise StepscopeError(
            f"expected one value for `{name}`, got several",
            detail="a run trains one model",
            hint=f"give `{name}` one value",
        )
    if data and "vocab" not in dict(grid.axes):
        (case,) = grid.override(grid_from_flags({"vocab": "256"})).cases()
    else:
        (case,) = cases
    return Training(workload=case.workload, ranks=ranks, strategy=strategy, data=data, **settings)  # type: ignore[arg-type]


def _without_parts(grid: Grid, strategy: Strategy) -> Grid:
    """The grid without the parts of a preset that the strategy refuses."""
    given = dict(grid.axes)
    if "preset" not in given or strategy == "single":
        return grid
    refused = (*WHOLE_STEP, "compile") if strategy == "fsdp" else WHOLE_STEP
    return grid.override(Grid(axes=tuple((name, (False,)) for name in refused if name not in given)))


def _count_ranks(asked: int | None) -> int:
    if not is_rank():
        return 1 if asked is None else asked
    there = os.environ["WORLD_SIZE"]
    if asked is not None and str(asked) != there:
        raise StepscopeError(
            f"`--ranks {asked}` does not match WORLD_SIZE `{there}`",
            detail="under torchrun and srun, the launcher sets the number of ranks",
            hint="remove --ranks",
        )
    return int(there) if there.isdigit() else 1


def read_result(folder: Path) -> TrainResult:
    """Read the results in a run directory, complete or not."""
    run = read_run(folder)
    if run is None:
        raise StepscopeError(
            f"no training run in `{folder}`", detail=f"{RUN_NAME} not found", hint=f"stepscope train --out {folder}"
        )
    rows, _ = read_log(folder / LOG_NAME)
    return TrainResult(run=run, rows=tuple(rows), memory=read_memory(folder))


def _only_one(folder: Path) -> AbstractContextManager[None]:
    """Two runs in one directory would overwrite each other's checkpoints."""
    refusal = StepscopeError(
        f"another training run is writing to `{folder}`",
        hint="wait for it, or use another directory: stepscope train --out DIR",
    )
    return locked(folder, refusal, name="lock")
