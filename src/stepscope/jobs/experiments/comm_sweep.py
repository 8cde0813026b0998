"""`stepscope comm`: the cases of one number of ranks by the same processes, a row a case, resumable like any sweep.

Rank 0 has a word for each case as it is done. When ranks end before their last case, the case they were at has a row
that says how, and others go on behind it. Where somebody else started the ranks (`torchrun`, `srun`), this process is
one of them: rank 0 plans, shows and writes, and the others serve.
"""

import itertools
import os
import re
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.comm_tables import fit_links
from stepscope.files import MARKER_NAME, claim, find_foreign, require_own
from stepscope.jobs.experiments.comm_grid import CommGrid, Machine
from stepscope.jobs.experiments.sweep import RESULTS_NAME, Listener, keep_log, look_at
from stepscope.jobs.workers.instructions import limit_instructions
from stepscope.jobs.workers.messages import Inspect, Inspected
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.jobs.workers.rank import serve_here
from stepscope.jobs.workers.rank_messages import CommMeasured, MeasureComm, RankMessage, Setup, Stage
from stepscope.jobs.workers.ranks import JOURNAL_NAME, LOGS_NAME, run_ranks
from stepscope.measure.failures import mentions_out_of_memory
from stepscope.recording.rows.bench import Environment, Retry, Status, case_key
from stepscope.recording.rows.comm import CommCase, CommOutcome, CommRow
from stepscope.recording.rows.links import LINKS_NAME, keep_links, links_path, read_links
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import build_case

RANKS_NAME = "ranks"  # the folder in which ranks keep what they are doing, while they do it
_RANKS_SCHEMA = "stepscope.ranks/1"
_RANK_FILES = re.compile(
    rf"{re.escape(MARKER_NAME)}|{JOURNAL_NAME}/(\d+\.journal)?|{LOGS_NAME}/((rank-\d+|start)\.log)?"
)
# For the time left: what a case takes besides its repetitions.
EXPECTED_EXTRA_S = 0.2


class PlannedComm(msgspec.Struct, frozen=True, kw_only=True):
    """A case with the environment it will run in."""

    case: CommCase
    environment: Environment

    @property
    def key(self) -> str:
        return case_key(self.case, self.environment, None)

    @property
    def expected_s(self) -> float:
        return EXPECTED_EXTRA_S + self.case.seconds


@dataclass(frozen=True, kw_only=True)
class CommSweep:
    """How to run a grid. `retry` runs some cases again, `fresh` all of them; older rows stay in the file. A
    collective that takes longer than `timeout_s` has failed. `remark` is told what went wrong but does not end the
    sweep."""

    folder: Path
    command: str
    retry: Retry | None = None
    fresh: bool = False
    timeout_s: float = 300.0
    remark: Callable[[str], None]

    def run(self, grid: CommGrid, listener: Listener) -> tuple[CommRow, ...] | None:
        """The rows of all cases in the grid's order, whether they were measured now or before. None on a rank that
        somebody else started and that is not the first."""
        require_torch()
        require_own(self.folder / RANKS_NAME, _RANKS_SCHEMA)
        for path in (links_path(), self.folder / LINKS_NAME):  # what cannot be read is said before anything is measured
            read_links(path, missing_ok=True)
        world = _started_ranks()
        if world is not None:
            grid.refuse_other_ranks(world)
            limit_instructions()
            if os.environ["RANK"] != "0":
                self._serve_rank_0(grid)
                return None
        with ResultsFile.open(self.folder / RESULTS_NAME, CommRow) as results, Workers() as workers:
            if world is None:  # of a run that was killed: nobody else's, as the results file is locked
                _forget_ranks(self.folder)
            machine, environment = _look(grid.device, workers) if world is None else _look_here(grid.device, world)
            planned = [PlannedComm(case=case, environment=environment) for case in grid.cases(machine)]
            kept = {row.key: row for row in results.rows}
            rows = {one.key: kept[one.key] for one in planned if one.key in kept and self._is_done(kept[one.key])}
            waiting = [one for one in planned if one.key not in rows]
            listener.begin(waiting, list(rows.values()), results.damaged_bytes)
            for _, alike in itertools.groupby(waiting, key=lambda one: one.case.ranks):
                turn = _Turn(sweep=self, waiting=deque(alike), results=results, listener=listener)
                rows |= {row.key: row for row in turn.run(here=machine.world is not None)}
            if not waiting and machine.world is not None:  # the other ranks want to hear that
                turn = _Turn(sweep=self, waiting=deque(), results=results, listener=listener)
                turn.serve(planned[0].case)
        ordered = tuple(rows[one.key] for one in planned)
        self._keep_links(ordered)
        return ordered

    def _is_done(self, row: CommRow) -> bool:
        return not self.fresh and row.is_settled(self.retry)

    def _keep_links(self, rows: Sequence[CommRow]) -> None:
        """Where predictions find them, and beside the rows, to be carried elsewhere."""
        if found := fit_links(rows):
            keep_links(found, self.folder / LINKS_NAME)
            try:
                keep_links(found)
            except StepscopeError as error:  # it costs predictions, not what was measured
                self.remark(f"links not cached: {error.message}")

    def _serve_rank_0(self, grid: CommGrid) -> None:
        """Which cases are left is rank 0's to say; how to join the others follows from what was asked for."""
        from stepscope.measure.environment import resolve_device

        # A rank that waits for others inside of a library hears nothing of a handler in Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        device = resolve_device(grid.device).type
        backend = grid.backend or ("gloo" if device == "cpu" else "nccl")
        _claim_ranks(self.folder)
        serve_here(self.setup(backend, device), MeasureComm(cases=()), lambda _: None)

    def setup(self, backend: str, device: str) -> Setup:
        """For ranks that meet where their environment says."""
        return Setup(
            world=int(os.environ["WORLD_SIZE"]),
            backend=backend,
            device=device,
            timeout_s=self.timeout_s,
            journal=str(self.folder / RANKS_NAME / JOURNAL_NAME),
        )


@dataclass(kw_only=True)
class _Turn:
    """The cases of one number of ranks that wait, and the writing of their rows as they come."""

    sweep: CommSweep
    waiting: deque[PlannedComm]
    results: ResultsFile[CommRow]
    listener: Listener

    def run(self, *, here: bool) -> list[CommRow]:
        """`here` where this process is one of the ranks: they are not ours to start again after a failure."""
        self._rows: list[CommRow] = []
        while self.waiting:
            self._start()
            self._begun = False
            first = self.waiting[0].case
            try:
                if here:
                    self.serve(first)
                else:
                    self._run_ranks(first)
                assert not self.waiting, "the ranks were done before their cases were"
            except StepscopeError as error:
                if not self._begun:  # nothing to do with a case: no other would do better
                    raise
                self._blame(error)
                if here:
                    raise
        return self._rows

    def serve(self, first: CommCase) -> None:
        _claim_ranks(self.sweep.folder)
        setup = self.sweep.setup(first.backend, first.device)
        serve_here(setup, self._request(), lambda message: self._take(0, message))
        _forget_ranks(self.sweep.folder)

    def _run_ranks(self, first: CommCase) -> None:
        run_ranks(
            self._request(),
            world=first.ranks,
            backend=first.backend,
            device=first.device,
            folder=_claim_ranks(self.sweep.folder),
            timeout_s=self.sweep.timeout_s,
            on_message=self._take,
        )
        _forget_ranks(self.sweep.folder)

    def _request(self) -> MeasureComm:
        return MeasureComm(cases=tuple(one.case for one in self.waiting))

    def _blame(self, error: StepscopeError) -> None:
        """The case that ran is the one that failed. After the last there is none: all rows are there, and stand."""
        if not self.waiting:
            return
        logs = sorted((self.sweep.folder / RANKS_NAME / LOGS_NAME).glob("*.log"))
        said = [f"--- {log.name}\n".encode() + log.read_bytes() for log in logs]
        keep_log(self.sweep.folder, self.waiting[0].key, b"\n".join([f"{error}\n".encode(), *said]))
        status, reason = _judge(error)
        self._keep(CommOutcome(status=status, reason=reason))

    def _start(self) -> None:
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self.listener.start(self.waiting[0])

    def _take(self, rank: int, message: RankMessage) -> None:
        if rank:
            return
        self._begun = True
        if isinstance(message, Stage):
            self.listener.stage(message.name)
        elif isinstance(message, CommMeasured):
            self._keep(message.outcome)
            if self.waiting:
                self._start()

    def _keep(self, outcome: CommOutcome) -> None:
        one = self.waiting.popleft()
        row = CommRow(
            key=one.key,
            case=one.case,
            environment=one.environment,
            status=outcome.status,
            reason=outcome.reason,
            started=self._started.isoformat(timespec="seconds"),
            wall_s=round(time.monotonic() - self._clock, 3),
            command=self.sweep.command,
            measurement=outcome.measurement,
            doubts=outcome.doubts,
        )
        self.results.append(row)
        self._rows.append(row)
        self.listener.finish(row)


def _claim_ranks(folder: Path) -> Path:
    """Where the ranks of a run in `folder` keep their logs and journals, which is ours before any of them writes."""
    claim(folder / RANKS_NAME, _RANKS_SCHEMA)
    return folder / RANKS_NAME


def _forget_ranks(folder: Path) -> None:
    """What the ranks kept, unless the folder is not ours or somebody else put something there."""
    ranks = folder / RANKS_NAME
    if (ranks / MARKER_NAME).is_file() and find_foreign(
        ranks, lambda name: _RANK_FILES.fullmatch(name) is not None
    ) is None:
        shutil.rmtree(ranks, ignore_errors=True)


def _judge(error: StepscopeError) -> tuple[Status, str]:
    text = f"{error.message} {error.detail}"
    if mentions_out_of_memory(text):
        return "oom", error.message
    if re.search("timed? ?out", text, re.IGNORECASE):
        return "timeout", error.message
    return ("killed" if " was killed by " in text else "error"), " ".join(text.split())


def _started_ranks() -> int | None:
    """How many there are, where somebody else started this process as one of them."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def _look(device: str, workers: Workers) -> tuple[Machine, Environment]:
    """By way of a workload, which names a device; its model is not run."""
    environment = look_at([build_case({"device": device, "precision": "fp32"})], workers, None).environment
    if environment.device == "cpu":
        return Machine(device="cpu"), environment
    answer = workers.run(Inspect()).answer
    gpus = len(answer.inspection.devices) if isinstance(answer, Inspected) else 0
    return Machine(device="cuda", gpus=gpus), environment


def _look_here(device: str, world: int) -> tuple[Machine, Environment]:
    """In this process, which is a rank and will need torch anyway."""
    from stepscope.measure.environment import check_torch, describe, resolve_device

    check_torch()
    environment = describe(resolve_device(device), {"fp32"})
    hosts = world // int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    kind = "cpu" if environment.device == "cpu" else "cuda"
    return Machine(device=kind, world=world, hosts=max(1, hosts)), environment
