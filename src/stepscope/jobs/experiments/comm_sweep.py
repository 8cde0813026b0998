"""`stepscope comm`: all cases with the same number of ranks share processes; one row per case, resumable like any
sweep.

Rank 0 reports each case as it finishes. If ranks fail before their last case, the running case gets a row that says
why, and new ranks continue with the next one. Under an external launcher (`torchrun`, `srun`) this process is itself a
rank: rank 0 plans, displays and writes, and the others serve.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.comm_tables import fit_links
from stepscope.files import MARKER_NAME, claim, find_foreign, require_own
from stepscope.jobs.experiments.flag_grids import CommGrid, RankHost
from stepscope.jobs.experiments.sweep import Experiment, PlannedCase, Results, Sweep, SweepListener, Turn, look_at
from stepscope.jobs.workers.cpu_limits import limit_instructions
from stepscope.jobs.workers.messages import (
    CommMeasured,
    Inspect,
    Inspected,
    MeasureComm,
    RankMessage,
    Setup,
    StageReached,
)
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.jobs.workers.rank import serve_here
from stepscope.jobs.workers.rank_processes import JOURNAL_NAME, LOGS_NAME, Heard, run_ranks
from stepscope.measure.failures import mentions_out_of_memory
from stepscope.recording.rows.bench import Environment, Status
from stepscope.recording.rows.collective_case import CommCase, CommRow
from stepscope.recording.rows.links import LINKS_NAME, keep_links, links_path, read_links
from stepscope.spec import build_case

DEFAULT_TIMEOUT_S = 300.0
RANKS_NAME = "ranks"  # the directory where ranks keep their journals while they run
_RANKS_SCHEMA = "stepscope.ranks/1"
_RANK_FILES = re.compile(
    rf"{re.escape(MARKER_NAME)}|{JOURNAL_NAME}/(\d+\.journal)?|{LOGS_NAME}/((rank-\d+|start)\.log)?"
)
# For the time estimate: fixed cost of a case, without its repetitions.
EXPECTED_EXTRA_S = 0.2


class PlannedComm(PlannedCase[CommCase], frozen=True, kw_only=True):
    """A case and the environment it will run in."""

    @property
    def expected_s(self) -> float:
        return EXPECTED_EXTRA_S + self.case.seconds


@dataclass(frozen=True, kw_only=True)
class CommExperiment(Experiment[CommCase, CommRow]):
    """`world` is the number of ranks under an external launcher, where this process is one of them."""

    grid: CommGrid = field(default_factory=CommGrid)
    world: int | None = None

    row_type = CommRow

    @contextmanager
    def open(self, folder: Path) -> Iterator[Results[CommRow]]:
        with super().open(folder) as results:
            if self.world is None:  # left over from a killed run; safe to delete, because the results file is locked
                _forget_ranks(folder)
            yield results

    def plan(self, workers: Workers, timeout_s: float | None) -> list[PlannedComm]:  # noqa: ARG002
        look = _look(self.grid.device, workers) if self.world is None else _look_here(self.grid.device, self.world)
        host, environment = look
        return [PlannedComm(case=case, environment=environment) for case in self.grid.cases(host)]

    def group_of(self, planned: PlannedCase[CommCase]) -> int:
        return planned.case.ranks

    def groups(self, waiting: Sequence[PlannedCase[CommCase]]) -> list[list[PlannedCase[CommCase]]]:
        """With nothing left to run, ranks under an external launcher still need to be told."""
        return super().groups(waiting) or ([] if self.world is None else [[]])

    def run_group(self, turn: Turn[CommCase, CommRow], workers: Workers) -> None:  # noqa: ARG002
        """Ranks under an external launcher cannot be restarted by us after a failure."""
        if self.world is not None:
            self._run_ranks(turn)
        while turn.waiting:
            self._run_ranks(turn)

    def _run_ranks(self, turn: Turn[CommCase, CommRow]) -> None:
        """The case that was running when the ranks failed is the one that failed. After the last case there is none:
        every row is written and stays. A failure before the first message is not specific to a case, so the other cases
        are not tried.
        """
        begun = False

        def hear(rank: int, message: RankMessage) -> None:
            nonlocal begun
            if rank:
                return
            begun = True
            if isinstance(message, StageReached):
                turn.listener.stage(message.name)
            elif isinstance(message, CommMeasured):
                turn.take(message.outcome)

        if turn.waiting:
            turn.start()
        try:
            self._ask_ranks(turn, hear)
            assert not turn.waiting, "the ranks finished with cases left to run"
        except StepscopeError as error:
            if begun and turn.waiting:
                turn.finish(*_judge(error), log=_gather_logs(turn.sweep.folder, error))
            if not begun or self.world is not None:
                raise

    def _ask_ranks(self, turn: Turn[CommCase, CommRow], hear: Heard) -> None:
        folder, timeout_s = turn.sweep.folder, turn.sweep.timeout_s or DEFAULT_TIMEOUT_S
        request = MeasureComm(cases=tuple(one.case for one in turn.waiting))
        case = turn.waiting[0].case if turn.waiting else next(iter(turn.rows.values())).case
        setup = _setup(folder, case.ranks, case.backend, case.device, timeout_s)
        claim(folder / RANKS_NAME, _RANKS_SCHEMA)
        if self.world is not None:
            serve_here(setup, request, lambda message: hear(0, message))
        else:
            run_ranks(request, setup, folder / RANKS_NAME, hear)
        _forget_ranks(folder)


def run_comm(
    sweep: Sweep[CommCase, CommRow], listener: SweepListener, *, remark: Callable[[str], None]
) -> tuple[CommRow, ...] | None:
    """Return the rows of all cases in grid order, and save the fitted links. Returns None on ranks other than rank 0
    under an external launcher. A collective that exceeds the timeout fails. `remark` receives problems that do not end
    the sweep.
    """
    assert isinstance(sweep.experiment, CommExperiment)
    grid, folder = sweep.experiment.grid, sweep.folder
    require_torch()
    require_own(folder / RANKS_NAME, _RANKS_SCHEMA)
    for path in (links_path(), folder / LINKS_NAME):  # report unreadable files before measuring anything
        read_links(path, missing_ok=True)
    world = _started_ranks()
    if world is not None:
        grid.refuse_other_ranks(world)
        limit_instructions()
        if os.environ["RANK"] != "0":
            _serve_rank_0(grid, folder, world, sweep.timeout_s or DEFAULT_TIMEOUT_S)
            return None
    rows = replace(sweep, experiment=replace(sweep.experiment, world=world)).run(listener)
    if found := fit_links(rows):  # where predictions look for them, and next to the rows, to copy to another machine
        keep_links(found, folder / LINKS_NAME)
        try:
            keep_links(found)
        except StepscopeError as error:  # costs the predictions, not the measurements
            remark(f"could not cache the links: {error.message}")
    return rows


def _serve_rank_0(grid: CommGrid, folder: Path, world: int, timeout_s: float) -> None:
    """Rank 0 decides which cases are left; how to join the group follows from the request."""
    from stepscope.measure.environment import resolve_device

    # While a rank waits inside a library, Python signal handlers do not run.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    device = resolve_device(grid.device).type
    setup = _setup(folder, world, grid.backend_on(device), device, timeout_s)
    claim(folder / RANKS_NAME, _RANKS_SCHEMA)
    serve_here(setup, MeasureComm(cases=()), lambda _: None)


def _setup(folder: Path, world: int, backend: str, device: str, timeout_s: float) -> Setup:
    journal = str(folder / RANKS_NAME / JOURNAL_NAME)
    return Setup(world=world, backend=backend, device=device, timeout_s=timeout_s, journal=journal)


def _forget_ranks(folder: Path) -> None:
    """Remove the ranks' files, unless the directory is not ours or holds files we did not write."""
    ranks = folder / RANKS_NAME
    if (ranks / MARKER_NAME).is_file() and find_foreign(
        ranks, lambda name: _RANK_FILES.fullmatch(name) is not None
    ) is None:
        shutil.rmtree(ranks, ignore_errors=True)


def _gather_logs(folder: Path, error: StepscopeError) -> bytes:
    logs = sorted((folder / RANKS_NAME / LOGS_NAME).glob("*.log"))
    said = [f"--- {log.name}\n".encode() + log.read_bytes() for log in logs]
    return b"\n".join([f"{error}\n".encode(), *said])


def _judge(error: StepscopeError) -> tuple[Status, str]:
    text = f"{error.message} {error.detail}"
    if mentions_out_of_memory(text):
        return "oom", error.message
    if re.search("timed? ?out", text, re.IGNORECASE):
        return "timeout", error.message
    return ("killed" if " was killed by " in text else "error"), " ".join(text.split())


def _started_ranks() -> int | None:
    """Return the number of ranks if an external launcher started this process as one of them."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def _look(device: str, workers: Workers) -> tuple[RankHost, Environment]:
    """Probe through a workload, which names a device; its model does not run."""
    environment = look_at([build_case({"device": device, "precision": "fp32"})], workers, None).environment
    if environment.device == "cpu":
        return RankHost(device="cpu"), environment
    answer = workers.run(Inspect()).answer
    gpus = len(answer.inspection.devices) if isinstance(answer, Inspected) else 0
    return RankHost(device="cuda", gpus=gpus), environment


def _look_here(device: str, world: int) -> tuple[RankHost, Environment]:
    """Runs in this process, which is a rank and needs torch anyway."""
    from stepscope.measure.environment import check_torch, describe, resolve_device

    check_torch()
    environment = describe(resolve_device(device), {"fp32"})
    hosts = world // int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    kind = "cpu" if environment.device == "cpu" else "cuda"
    return RankHost(device=kind, world=world, hosts=max(1, hosts)), environment
