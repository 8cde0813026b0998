"""A grid of cases, each in its own process, resumable at any moment.

The results file is the only state. A case is done when its row is in the file, under a key made of everything that
changes what is measured: the case, the device, the versions, and the source of a model of the user's own. So running
the same command again goes on where it stopped, a wider grid reuses what it shares with a narrower one, and an
upgrade or an edited model measures anew.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from stepscope import cost
from stepscope.errors import StepscopeError
from stepscope.files import writing
from stepscope.jobs.workers.messages import (
    AttentionDone,
    Failed,
    Inspected,
    Measured,
    MemoryRecorded,
    OutOfMemory,
    PrecisionsCompared,
    Probe,
    Probed,
    Recorded,
    Result,
    Run,
)
from stepscope.jobs.workers.process import Died, Ended, RefusedError, Workers, require_torch
from stepscope.recording.rows.bench import BenchRow, CaseRow, Environment, Retry, Row, Status, case_key
from stepscope.recording.rows.results_file import ResultsFile
from stepscope.spec import DEFAULT_CONTEXT, Case, Grid, ModelShape, grid_from_flags

R = TypeVar("R", bound=CaseRow)
R_co = TypeVar("R_co", bound=CaseRow, covariant=True)

RESULTS_NAME = "results.jsonl"
LOGS_NAME = "logs"
EXPECTED_START_S = 1.0
EXPECTED_MFU = 0.3


class Waiting(Protocol):
    """What whoever watches a sweep knows of a case that has not run."""

    @property
    def case(self) -> object: ...

    @property
    def expected_s(self) -> float: ...


class Listener(Protocol):
    """Who watches a sweep: a progress bar, or lines in a log."""

    def begin(self, planned: Sequence[Waiting], done: Sequence[Row], repaired_bytes: int) -> None: ...

    def start(self, planned: Waiting) -> None: ...

    def stage(self, name: str) -> None: ...

    def finish(self, row: Row) -> None: ...


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A case with the environment it will run in."""

    case: Case
    environment: Environment
    source: str | None

    @property
    def key(self) -> str:
        return case_key(self.case, self.environment, self.source)

    @property
    def expected_s(self) -> float:
        """A guess, for the time left: a fixed start, and the steps at a share of the peak that untuned models reach."""
        workload, timing = self.case.workload, self.case.timing
        peak = self.environment.hardware.peak_flops.get(workload.precision)
        if not isinstance(workload.model, ModelShape) or peak is None:
            return EXPECTED_START_S
        forward = cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
        steps_s = (timing.warmup + timing.steps) * cost.step_flops(forward, workload.mode) / peak
        return EXPECTED_START_S + steps_s / EXPECTED_MFU


class Kind(Protocol[R_co]):
    """What a sweep does with a case, and keeps of it."""

    @property
    def row_type(self) -> type[R_co]: ...

    def default_grid(self, *, on_cpu: bool) -> Grid:
        """What runs when nothing is asked for."""
        ...

    def measure(
        self, planned: Planned, workers: Workers, on_stage: Callable[[str], None], timeout_s: float | None
    ) -> tuple[Ended, dict[str, object]]:
        """How the case ended, and the fields of its row that this kind has beyond those of every row."""
        ...


class Timed:
    """`stepscope bench`: how long a step takes."""

    row_type = BenchRow

    def default_grid(self, *, on_cpu: bool) -> Grid:
        """Seconds on a laptop's CPU, a minute or two on a GPU."""
        if on_cpu:
            return grid_from_flags({"size": "nano", "context": "128,256", "precision": "fp32,bf16"})
        return grid_from_flags({"size": "small,medium", "context": "256,1024", "precision": "fp32,bf16"})

    def measure(
        self, planned: Planned, workers: Workers, on_stage: Callable[[str], None], timeout_s: float | None
    ) -> tuple[Ended, dict[str, object]]:
        ended = workers.run(Run(case=planned.case), on_stage=on_stage, timeout_s=timeout_s)
        answer = ended.answer
        if not isinstance(answer, Measured):
            return ended, {}
        return ended, {"measurement": answer.measurement, "doubts": answer.doubts}


@dataclass(frozen=True, kw_only=True)
class Sweep(Generic[R]):
    """How to run a grid. `retry` runs some cases again that were run before, `fresh` all of them; older rows stay in
    the file."""

    kind: Kind[R]
    folder: Path
    command: str
    retry: Retry | None = None
    fresh: bool = False
    timeout_s: float | None = None

    def run(self, grid: Grid, listener: Listener) -> tuple[R, ...]:
        """The rows of all cases in the grid's order, whether they were measured now or before. An empty grid is the
        default one.

        Bad input that shows only while a model is built (a factory that raises) is an error when no case gets further,
        and rows when some do: it must not end a long grid at one point that the factory cannot do.
        """
        require_torch()
        with self._open() as results, Workers() as workers:
            grid = grid if grid != Grid() else self._default_grid(workers)
            planned = plan_cases(grid.cases(), workers, self.timeout_s)
            return self._run_all(planned, results, workers, listener)

    def run_planned(self, planned: Sequence[Planned], workers: Workers, listener: Listener) -> tuple[R, ...]:
        """The same for cases that were planned before, by whoever has other things for these workers to do."""
        with self._open() as results:
            return self._run_all(planned, results, workers, listener)

    def _open(self) -> AbstractContextManager[ResultsFile[R]]:
        return ResultsFile.open(self.folder / RESULTS_NAME, self.kind.row_type)

    def _run_all(
        self, planned: Sequence[Planned], results: ResultsFile[R], workers: Workers, listener: Listener
    ) -> tuple[R, ...]:
        refused: list[tuple[R, StepscopeError]] = []
        kept = {row.key: row for row in results.rows}
        rows = {one.key: kept[one.key] for one in planned if one.key in kept and self._is_done(kept[one.key])}
        waiting = [one for one in planned if one.key not in rows]
        listener.begin(waiting, list(rows.values()), results.damaged_bytes)
        for one in waiting:
            listener.start(one)
            row, refusal = self._run_one(one, workers, listener)
            if refusal is None:
                results.append(row)
                rows[row.key] = row
            else:
                refused.append((row, refusal))
            listener.finish(row)
        if refused and not rows:
            raise refused[0][1]
        for row, _ in refused:
            results.append(row)
            rows[row.key] = row
        return tuple(rows[one.key] for one in planned)

    def _is_done(self, row: R) -> bool:
        return not self.fresh and row.is_settled(self.retry)

    def _default_grid(self, workers: Workers) -> Grid:
        on_cpu = self.kind.default_grid(on_cpu=True)
        environment = look_at(on_cpu.cases()[:1], workers, self.timeout_s).environment
        return on_cpu if environment.device == "cpu" else self.kind.default_grid(on_cpu=False)

    def _run_one(self, one: Planned, workers: Workers, listener: Listener) -> tuple[R, StepscopeError | None]:
        """One case as a row, and as an error too where the user's input is at fault."""
        started, clock = datetime.now(UTC), time.monotonic()
        ended, measured = self.kind.measure(one, workers, listener.stage, self.timeout_s)
        answer = ended.answer
        refusal = None
        if isinstance(answer, Failed) and answer.bad_input:
            refusal = RefusedError(answer)
        status, reason = judge(answer)
        if status != "ok" and refusal is None:
            keep_log(self.folder, one.key, ended.log)
        fields = {
            "key": one.key,
            "case": one.case,
            "environment": one.environment,
            "source": one.source,
            "status": status,
            "reason": reason,
            "started": started.isoformat(timespec="seconds"),
            "wall_s": round(time.monotonic() - clock, 3),
            "command": self.command,
        }
        return self.kind.row_type(**fields, **measured), refusal  # type: ignore[arg-type]


def keep_log(folder: Path, key: str, log: bytes) -> None:
    """What a failed case printed, traceback included, for whoever wants more than its reason."""
    logs = folder / LOGS_NAME
    with writing(logs):
        logs.mkdir(exist_ok=True)
        (logs / f"{key}.log").write_bytes(log)


def plan_cases(cases: Sequence[Case], workers: Workers, timeout_s: float | None) -> list[Planned]:
    """The cases with what they will run on. Each device is looked at once."""
    planned: dict[Case, Planned] = {}
    for device in dict.fromkeys(case.workload.device for case in cases):
        chosen = [case for case in cases if case.workload.device == device]
        answer = look_at(chosen, workers, timeout_s)
        planned |= dict(zip(chosen, place_cases(chosen, answer), strict=True))
    return list({one.key: one for one in (planned[case] for case in cases)}.values())


def place_cases(cases: Sequence[Case], probed: Probed) -> list[Planned]:
    """The cases that were looked at, with what was found: their device, and a context where they left it open."""
    planned = []
    for case, model in zip(cases, probed.models, strict=True):
        context = case.workload.context or (DEFAULT_CONTEXT if model.takes_context else 0)
        here = msgspec.structs.replace(case.workload, device=probed.environment.device, context=context)
        placed = msgspec.structs.replace(case, workload=here)
        planned.append(Planned(case=placed, environment=probed.environment, source=model.source))
    return planned


def look_at(cases: Sequence[Case], workers: Workers, timeout_s: float | None) -> Probed:
    """The environment of cases that name one device, found in a process of its own; bad input comes out here."""
    answer = workers.run(Probe(cases=tuple(cases)), timeout_s=timeout_s).answer
    if isinstance(answer, Failed):
        raise RefusedError(answer)
    if not isinstance(answer, Probed):
        _, reason = judge(answer)
        raise StepscopeError(f"before the first case: {reason}", hint="stepscope doctor")
    return answer


def judge(answer: Result | Died) -> tuple[Status, str]:
    match answer:
        case Measured() | MemoryRecorded():
            return "ok", ""
        case OutOfMemory(reason=reason):
            return "oom", reason
        case Failed(message=message, detail=detail):
            return "error", f"{message} {detail}".strip()
        case Died(status=status, reason=reason):
            return status, reason
        case Probed() | Inspected() | Recorded() | PrecisionsCompared() | AttentionDone():
            raise AssertionError("a case was answered as if it were a question")
