"""What runs on the compute node: small objects that submitit pickles, which contain only text.

A requeued task (preempted, `scontrol requeue`, or at its time limit) is called again with the same text, and resumes
from the files in its directory.
"""

import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from submitit import JobEnvironment
from submitit.helpers import Checkpointable, TorchDistributedEnvironment

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.jobs.experiments.sweep import RESULTS_NAME, BenchExperiment, PlannedCase, Sweep, plan_cases
from stepscope.jobs.slurm.executor import holding_signals
from stepscope.jobs.slurm.row_ledger import forget_killed
from stepscope.jobs.slurm.submissions import TaskOutcome, outcome_path, write_whole
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.recording.rows.bench import Row
from stepscope.spec import Case
from stepscope.units import count_noun

_PORTS = range(20_000, 32_768)
_MEETING_S = 300.0


class ShareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a grid. `folder` is absolute and belongs to this job."""

    cases: tuple[Case, ...]
    folder: str
    command: str
    timeout_s: float | None


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`entry` is `package.module:function`, called with `request`."""

    entry: str
    request: str
    folder: str


class ShareTask(Checkpointable):
    """Runs a share of a grid into the job's own results file."""

    def __init__(self, request: ShareRequest) -> None:
        self._text = msgspec.json.encode(request).decode()

    def __call__(self) -> None:
        request = msgspec.json.decode(self._text, type=ShareRequest)
        folder = Path(request.folder)
        _run(folder, 0, lambda: _run_aside(lambda: _measure(request, folder)))


class RankTask(Checkpointable):
    """Turns a task of the job into a rank, as torchrun would: sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT, and calls the entry. Rank 0 chooses the port, unless the environment does.
    """

    def __init__(self, request: RankRequest) -> None:
        self._text = msgspec.json.encode(request).decode()

    def __call__(self) -> None:
        request = msgspec.json.decode(self._text, type=RankRequest)
        folder, rank = Path(request.folder), JobEnvironment().global_rank
        module, _, name = request.entry.partition(":")

        def call() -> tuple[str, ...]:
            if "MASTER_PORT" not in os.environ:
                os.environ["MASTER_PORT"] = str(agree_on_port(folder, rank))
            # Not through CUDA_VISIBLE_DEVICES: a rank uses the device of its LOCAL_RANK, as under torchrun.
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
            getattr(import_module(module), name)(request.request)
            return ()

        _run(folder, rank, call)


def agree_on_port(folder: Path, rank: int, timeout_s: float = _MEETING_S) -> int:
    """Return the port that rank 0 chose, which it leaves in the job's directory.

    submitit derives a port from the job id: it may be in use, and two clusters with one node in common count alike.
    """
    path = folder / f"port-{_life()}"
    if rank == 0:
        write_whole(path, str(_find_port()).encode())
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise StepscopeError(
                f"rank 0 did not choose a port within {timeout_s:g} s",
                detail=f"rank {rank} expected it in `{path}`",
                hint="MASTER_PORT=29500 before the same command, if the nodes do not share this directory",
            )
        time.sleep(0.1)
    return int(path.read_text())


def _find_port() -> int:
    """Return a free port. It must stay free until torch listens on it, so it is outside the range that Linux uses for
    outgoing connections.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return port
    raise StepscopeError(
        f"all ports from {_PORTS.start} to {_PORTS.stop - 1} are in use",
        hint="MASTER_PORT=29500 before the same command",
    )


class _Log:
    """Writes the sweep's progress to the job's log."""

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None:  # noqa: ARG002
        self._say(f"{count_noun(len(planned), 'case')} to run, {len(done)} already done")

    def start(self, planned: PlannedCase[Any]) -> None:
        self._say(f"running {describe_case(planned.case)}")

    def stage(self, name: str) -> None:
        pass

    def finish(self, row: Row) -> None:
        self._say(f"{row.key}: {row.status} {row.reason}".rstrip())

    def _say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _measure(request: ShareRequest, folder: Path) -> tuple[str, ...]:
    """Return the keys of the rows, in case order.

    Runs one device at a time: `auto` and `cuda` may resolve to the same device, and a sweep over both would then have
    fewer rows than cases, without a way to match them.
    """
    forget_killed(folder / RESULTS_NAME)
    require_torch()
    # A share cannot distinguish a model that never builds from one that fails at these points.
    sweep = Sweep(
        experiment=BenchExperiment(),
        folder=folder,
        command=request.command,
        timeout_s=request.timeout_s,
        keeps_refusals=True,
    )
    keys: dict[Case, str] = {}
    with Workers() as workers:
        for device in dict.fromkeys(case.workload.device for case in request.cases):
            chosen = tuple(case for case in request.cases if case.workload.device == device)
            rows = sweep.run_planned(plan_cases(chosen, workers, request.timeout_s), workers, _Log())
            keys |= {case: row.key for case, row in zip(chosen, rows, strict=True)}
    return tuple(keys[case] for case in request.cases)


def _run(folder: Path, task: int, work: Callable[[], tuple[str, ...]]) -> None:
    """The process boundary: the outcome is written to the directory in every case, and Slurm sees a failure."""
    path = outcome_path(folder, task)
    path.unlink(missing_ok=True)  # from an earlier life of this job
    try:
        keys = work()
    except StepscopeError as error:
        _leave(path, message=error.message, detail=error.detail, hint=error.hint)
        raise
    except Exception as error:
        _leave(path, message=traceback.format_exception_only(error)[-1].strip())
        raise
    _leave(path, keys=keys)


def _leave(path: Path, *, keys: tuple[str, ...] = (), message: str = "", detail: str = "", hint: str = "") -> None:
    outcome = TaskOutcome(life=_life(), ended_ns=time.time_ns(), keys=keys, message=message, detail=detail, hint=hint)
    write_whole(path, msgspec.json.encode(outcome))


def _life() -> int:
    """Return how often the job was requeued."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _run_aside(work: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Run on a thread that blocks signals, as do the processes it starts.

    Slurm sends a job's signals to all of its processes. They would kill a worker, and its case would get a `killed` row
    although the job continues or is requeued. Signals are handled by the main thread: submitit makes it requeue the job
    at the time limit, and ignores SIGTERM. SIGKILL follows after a grace period that is better spent measuring.
    """
    results: list[tuple[str, ...]] = []
    errors: list[BaseException] = []

    def run() -> None:
        with holding_signals(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
                errors.append(error)

    # A daemon thread: the main thread exits immediately after it has requeued the job.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
