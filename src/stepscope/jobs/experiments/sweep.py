"""The engine behind every experiment: a grid of cases, run group by group, resumable at any moment.

The results file is the only state. A case is done when its row is in the file, under a key made of everything that
changes the measurement: the case, the device, the versions, and the source of a custom model. So rerunning the same
command resumes where it stopped, a wider grid reuses the rows it shares with a narrower one, and an upgrade or an
edited model is measured again.

An `Experiment` defines what `bench`, `memory`, `attention`, `comm` and `profile --counters` measure, in which
processes, and what they keep. This module decides which cases are left, who is notified, and when a row is on disk.
"""

import itertools
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from stepscope import cost
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.files import writing
from stepscope.jobs.workers.messages import (
    AttentionDone,
    Failed,
    Inspected,
    MeasureStep,
    MemoryRecorded,
    OutOfMemory,
    PrecisionsCompared,
    ProbeCases,
    Probed,
    Result,
    StepMeasured,
    StepOptimised,
    StepPredicted,
    StepsRecorded,
)
from stepscope.jobs.workers.process import Died, Ended, InputRefusedError, Workers, require_torch
from stepscope.recording.rows.bench import (
    BenchRow,
    CaseOutcome,
    CaseRow,
    Environment,
    Retry,
    Row,
    Status,
    case_key,
)
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import DEFAULT_CONTEXT, Case, Grid, ModelShape, grid_from_flags

C = TypeVar("C", bound=msgspec.Struct)
R = TypeVar("R", bound=Row)
CR = TypeVar("CR", bound=CaseRow)

RESULTS_NAME = "results.jsonl"
LOGS_NAME = "logs"
EXPECTED_START_S = 1.0
EXPECTED_MFU = 0.3
_MOST_CHARACTERS = 100  # of a file name


class PlannedCase(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """A case and the environment it will run in. Its row copies all fields."""

    case: C
    environment: Environment

    @property
    def key(self) -> str:
        return case_key(self.case, self.environment, None)

    @property
    def expected_s(self) -> float:
        """Return a rough estimate, for the remaining time."""
        return EXPECTED_START_S


class Planned(PlannedCase[Case], frozen=True, kw_only=True):
    """A workload and the environment it will run in. `source` is the digest of a custom model's files."""

    source: str | None

    @property
    def key(self) -> str:
        return case_key(self.case, self.environment, self.source)

    @property
    def expected_s(self) -> float:
        """A fixed startup cost, plus the steps at the share of peak that untuned models reach."""
        workload, timing = self.case.workload, self.case.timing
        peak = self.environment.hardware.peak_flops.get(workload.precision)
        if not isinstance(workload.model, ModelShape) or peak is None:
            return EXPECTED_START_S
        forward = cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
        steps_s = (timing.warmup + timing.steps) * cost.step_flops(forward, workload.mode) / peak
        return EXPECTED_START_S + steps_s / EXPECTED_MFU


class SweepListener(Protocol):
    """Receives the progress of a sweep: a progress bar, or lines in a log."""

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None: ...

    def start(self, planned: PlannedCase[Any]) -> None: ...

    def stage(self, name: str) -> None: ...

    def finish(self, row: Row) -> None: ...


class TextListener:
    """Passes the current stage to a function as text, prefixed with `describe` of the case."""

    def __init__(self, tell: Callable[[str], None], describe: Callable[[Any], str] = lambda _: "") -> None:
        self._tell = tell
        self._describe = describe
        self._case = ""

    def begin(self, planned: Sequence[PlannedCase[Any]], done: Sequence[Row], repaired_bytes: int) -> None:
        pass

    def start(self, planned: PlannedCase[Any]) -> None:
        self._case = self._describe(planned.case)

    def stage(self, name: str) -> None:
        self._tell(f"{self._case}: {name}" if self._case else name)

    def finish(self, row: Row) -> None:
        pass


class Results(Protocol[R]):
    """Stores rows. `damaged_bytes` is the length of an incomplete line that was skipped."""

    damaged_bytes: int

    def find(self, planned: PlannedCase[Any], /) -> R | None:
        """Return the row of a case from an earlier run."""
        ...

    def append(self, row: R, /) -> None: ...


class Experiment(ABC, Generic[C, R]):
    """The cases, how pending ones are run, and what a row keeps of each."""

    @property
    @abstractmethod
    def row_type(self) -> type[R]: ...

    @abstractmethod
    def plan(self, workers: Workers, timeout_s: float | None) -> Sequence[PlannedCase[C]]:
        """Return all cases with their environments."""

    def open(self, folder: Path) -> AbstractContextManager[Results[R]]:
        return ResultsFile.open(folder / RESULTS_NAME, self.row_type)

    def group_of(self, planned: PlannedCase[C]) -> object:
        """Consecutive cases of one group share a process or ranks; by default, each case has its own."""
        return planned.key

    def groups(self, waiting: Sequence[PlannedCase[C]]) -> list[list[PlannedCase[C]]]:
        return [list(alike) for _, alike in itertools.groupby(waiting, key=self.group_of)]

    @abstractmethod
    def run_group(self, turn: "Turn[C, R]", workers: Workers) -> None:
        """Run everything pending in `turn`, and report the outcome of each case as it arrives."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Generic[C, R]):
    """How to run an experiment. `retry` reruns selected finished cases and `fresh` reruns all; older rows stay in the
    file. `keeps_refusals` turns rejected input into a row, like any other failure.
    """

    experiment: Experiment[C, R]
    folder: Path
    command: str
    retry: Retry | None = None
    fresh: bool = False
    timeout_s: float | None = None
    keeps_refusals: bool = False

    def run(self, listener: SweepListener) -> tuple[R, ...]:
        """Return the rows of all cases in grid order, measured now or before."""
        require_torch()
        with self.experiment.open(self.folder) as results, Workers() as workers:
            return self._run_all(self.experiment.plan(workers, self.timeout_s), results, workers, listener)

    def run_planned(
        self, planned: Sequence[PlannedCase[C]], workers: Workers, listener: SweepListener
    ) -> tuple[R, ...]:
        """The same for cases that are already planned, by a caller that shares its workers."""
        with self.experiment.open(self.folder) as results:
            return self._run_all(planned, results, workers, listener)

    def is_done(self, row: R) -> bool:
        return not self.fresh and row.is_settled(self.retry)

    def _run_all(
        self, planned: Sequence[PlannedCase[C]], results: Results[R], workers: Workers, listener: SweepListener
    ) -> tuple[R, ...]:
        """Bad input that shows only while a model is built (a factory that raises) is an error if no case gets further,
        and a row if some do: one point that the factory cannot build must not end a long grid.
        """
        found = [] if self.fresh else [row for one in planned if (row := results.find(one)) is not None]
        rows = {row.key: row for row in found if self.is_done(row)}
        waiting = [one for one in planned if one.key not in rows]
        listener.begin(waiting, list(rows.values()), results.damaged_bytes)
        turn = Turn(sweep=self, results=results, listener=listener, rows=rows)
        for group in self.experiment.groups(waiting):
            turn.waiting.extend(group)
            self.experiment.run_group(turn, workers)
            assert not turn.waiting, "a group ended with cases left to run"
        turn.keep_refused()
        return tuple(rows[one.key] for one in planned)


@dataclass(kw_only=True)
class Turn(Generic[C, R]):
    """The pending cases of a group, the first of which is running, and their rows as they arrive."""

    sweep: Sweep[C, R]
    results: Results[R]
    listener: SweepListener
    rows: dict[str, R]
    waiting: deque[PlannedCase[C]] = field(default_factory=deque)
    _refused: list[tuple[R, StepscopeError]] = field(default_factory=list)

    def start(self) -> None:
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self.listener.start(self.waiting[0])

    def take(self, outcome: CaseOutcome[Any]) -> None:
        """The running case is done, and its process continues with the next."""
        self.finish(outcome.status, outcome.reason, measurement=outcome.measurement, doubts=outcome.doubts)
        if self.waiting:
            self.start()

    def finish(
        self,
        status: Status,
        reason: str = "",
        *,
        log: bytes | None = None,
        refusal: StepscopeError | None = None,
        **measured: object,
    ) -> None:
        """`log` is kept if given. `refusal` is set if the user's input is at fault."""
        one = self.waiting.popleft()
        if log is not None:
            keep_log(self.sweep.folder, one.key, log)
        row = self.sweep.experiment.row_type(
            key=one.key,
            **msgspec.structs.asdict(one),
            status=status,
            reason=reason,
            started=self._started.isoformat(timespec="seconds"),
            wall_s=round(time.monotonic() - self._clock, 3),
            command=self.sweep.command,
            **measured,  # type: ignore[arg-type]
        )
        if refusal is not None and not self.sweep.keeps_refusals:
            self._refused.append((row, refusal))
        else:
            self._keep(row)
        self.listener.finish(row)

    def keep_refused(self) -> None:
        if self._refused and not self.rows:
            raise self._refused[0][1]
        for row, _ in self._refused:
            self._keep(row)

    def _keep(self, row: R) -> None:
        self.results.append(row)
        self.rows[row.key] = row


# --- Workloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkloadExperiment(Experiment[Case, CR]):
    """Workloads, each in its own process. An empty grid means the default one."""

    grid: Grid = field(default_factory=Grid)

    @abstractmethod
    def default_grid(self, *, on_cpu: bool) -> Grid:
        """The default cases."""

    @abstractmethod
    def measure(self, turn: Turn[Case, CR], workers: Workers) -> tuple[Ended, dict[str, object]]:
        """Return how the first pending case ended, and the row fields that are specific to this experiment."""

    def plan(self, workers: Workers, timeout_s: float | None) -> list[Planned]:
        grid = self.grid
        if grid == Grid():
            grid = self.default_grid(on_cpu=True)
            if look_at(grid.cases()[:1], workers, timeout_s).environment.device != "cpu":
                grid = self.default_grid(on_cpu=False)
        return plan_cases(grid.cases(), workers, timeout_s)

    def run_group(self, turn: Turn[Case, CR], workers: Workers) -> None:
        turn.start()
        ended, measured = self.measure(turn, workers)
        answer = ended.answer
        refusal = InputRefusedError(answer) if isinstance(answer, Failed) and answer.bad_input else None
        status, reason = judge(answer)
        log = ended.log if status not in ("ok", "skipped") and refusal is None else None
        turn.finish(status, reason, log=log, refusal=refusal, **measured)


@dataclass(frozen=True, kw_only=True)
class BenchExperiment(WorkloadExperiment[BenchRow]):
    """`stepscope bench`: step time. With `predicts`, every case on a GPU is predicted first; with `skips_oom`, one that
    cannot fit does not run."""

    row_type = BenchRow
    predicts: bool = False
    skips_oom: bool = False

    def default_grid(self, *, on_cpu: bool) -> Grid:
        """Seconds on a laptop CPU, a minute or two on a GPU."""
        if on_cpu:
            return grid_from_flags({"size": "nano", "context": "128,256", "precision": "fp32,bf16"})
        return grid_from_flags({"size": "small,medium", "context": "256,1024", "precision": "fp32,bf16"})

    def measure(self, turn: Turn[Case, BenchRow], workers: Workers) -> tuple[Ended, dict[str, object]]:
        request = MeasureStep(case=turn.waiting[0].case)
        measured: dict[str, object] = {}
        if self.predicts or self.skips_oom:
            from stepscope.jobs.plan import predict_here

            turn.listener.stage("predicting")
            predicted, too_much = predict_here(turn.waiting[0], workers)
            measured["predicted"] = predicted
            if self.skips_oom and too_much:
                return Ended(answer=Died(status="skipped", reason=too_much), log=b""), measured
        ended = workers.run(request, on_stage=turn.listener.stage, timeout_s=turn.sweep.timeout_s)
        answer = ended.answer
        if isinstance(answer, StepMeasured):
            measured |= {"measurement": answer.measurement, "doubts": answer.doubts}
        return ended, measured


def plan_cases(cases: Sequence[Case], workers: Workers, timeout_s: float | None) -> list[Planned]:
    """Return the cases with their environments. Each device is probed once."""
    planned: dict[Case, Planned] = {}
    for device in dict.fromkeys(case.workload.device for case in cases):
        chosen = [case for case in cases if case.workload.device == device]
        answer = look_at(chosen, workers, timeout_s)
        planned |= dict(zip(chosen, place_cases(chosen, answer), strict=True))
    return list({one.key: one for one in (planned[case] for case in cases)}.values())


def place_cases(cases: Sequence[Case], probed: Probed) -> list[Planned]:
    """Return the probed cases with their results: their device, and a context length if they left it open."""
    planned = []
    for case, model in zip(cases, probed.models, strict=True):
        context = case.workload.context or (DEFAULT_CONTEXT if model.takes_context else 0)
        here = msgspec.structs.replace(case.workload, device=probed.environment.device, context=context)
        placed = msgspec.structs.replace(case, workload=here)
        planned.append(Planned(case=placed, environment=probed.environment, source=model.source))
    return planned


def slug_of(planned: Planned) -> str:
    """A name for files of a case; a long one ends in the key, so that no two cases share it."""
    words = f"{describe_case(planned.case)} {planned.case.workload.device}"
    slug = re.sub(r"[^\w.]+", "-", words).strip("-.")
    return slug if len(slug) <= _MOST_CHARACTERS else f"{slug[:_MOST_CHARACTERS]}-{planned.key}"


def look_at(cases: Sequence[Case], workers: Workers, timeout_s: float | None) -> Probed:
    """Return the environment of cases that name one device, probed in a separate process; bad input is rejected
    here.
    """
    answer = workers.run(ProbeCases(cases=tuple(cases)), timeout_s=timeout_s).answer
    if isinstance(answer, Failed):
        raise InputRefusedError(answer)
    if not isinstance(answer, Probed):
        _, reason = judge(answer)
        raise StepscopeError(f"could not probe the device: {reason}", hint="stepscope doctor")
    return answer


def judge(answer: Result | Died) -> tuple[Status, str]:
    match answer:
        case StepMeasured() | MemoryRecorded():
            return "ok", ""
        case OutOfMemory(reason=reason):
            return "oom", reason
        case Failed(message=message, detail=detail):
            return "error", f"{message} {detail}".strip()
        case Died(status=status, reason=reason):
            return status, reason
        case (
            Probed()
            | Inspected()
            | StepsRecorded()
            | PrecisionsCompared()
            | AttentionDone()
            | StepOptimised()
            | StepPredicted()
        ):
            raise AssertionError("a case was answered with the reply to another request")


def keep_log(folder: Path, key: str, log: bytes) -> None:
    """Keep the output of a failed case, traceback included, for users who need more than its reason."""
    logs = folder / LOGS_NAME
    with writing(logs):
        logs.mkdir(exist_ok=True)
        (logs / f"{key}.log").write_bytes(log)
