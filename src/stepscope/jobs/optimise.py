"""`stepscope optimise`: try changes to the step of one workload, in a process of its own.

The result is written again after every change, so that an interruption (Ctrl-C, a kill, a crash of the driver) costs
only the change that was being tried.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import claim, is_of_kind
from stepscope.jobs.experiments.sweep import Planned, judge, look_at, place_cases, slug_of
from stepscope.jobs.recorders.recording_job import explain_failure, only_case
from stepscope.jobs.workers.messages import ChangeMeasured, OptimiseStep, StepOptimised
from stepscope.jobs.workers.process import OnStage, Workers, require_torch
from stepscope.recording.rows.optimisation import SCHEMA, MeasuredChange, OptimiseReport, write_optimisation
from stepscope.spec import Case, Grid, Scalar, Workload, build_case, flag_of

INTERRUPTED = "interrupted"
_WITHOUT_EFFECT = ("steps", "warmup")

OnChange = Callable[[OptimiseReport, MeasuredChange], None]


class OptimisationInterrupted(KeyboardInterrupt):
    """Ctrl-C after at least one change was measured. `report` has those that are done."""

    def __init__(self, report: OptimiseReport, path: Path | None) -> None:
        super().__init__()
        self.report, self.path = report, path


class OptimisationJob(msgspec.Struct, frozen=True, kw_only=True):
    """How to run. Nothing is saved unless `folder` names a directory. `compiler` is a backend of `torch.compile`."""

    command: str
    folder: Path | None = None
    compiler: str = "inductor"

    def run(self, grid: Grid, on_stage: OnStage, on_change: OnChange) -> tuple[OptimiseReport, Path | None]:
        """Return the result and its file. An empty grid means the default case."""
        require_torch()
        check_settings(grid)
        if self.folder is not None:
            claim(self.folder, SCHEMA)
        with Workers() as workers:
            planned = _plan(grid, workers)
            path = None if self.folder is None else self._choose_file(self.folder, planned)
            return self.run_planned(planned, workers, on_stage, on_change, path=path), path

    def run_planned(
        self, planned: Planned, workers: Workers, on_stage: OnStage, on_change: OnChange, *, path: Path | None
    ) -> OptimiseReport:
        """The same for a case that is already planned, by a caller that shares its workers and names the file."""
        check_workload(planned.case.workload)
        report = OptimiseReport(
            case=planned.case,
            environment=planned.environment,
            command=self.command,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            changes=(),
            stopped=INTERRUPTED,  # what the file says if this process is killed
        )

        def take(part: ChangeMeasured) -> None:
            nonlocal report
            report = msgspec.structs.replace(report, changes=(*report.changes, part.change))
            _save(report, path)
            on_change(report, part.change)

        try:
            request = OptimiseStep(case=planned.case, compiler=self.compiler)
            ended = workers.run(request, on_stage=on_stage, on_part=take)
        except KeyboardInterrupt:
            if not report.changes:
                raise
            raise OptimisationInterrupted(report, path) from None
        if not isinstance(ended.answer, StepOptimised) and not report.changes:
            raise explain_failure(ended, planned.case, "measured")
        stopped = "" if isinstance(ended.answer, StepOptimised) else ": ".join(judge(ended.answer))
        report = msgspec.structs.replace(report, stopped=stopped)
        _save(report, path)
        return report

    def _choose_file(self, folder: Path, planned: Planned) -> Path:
        path = folder / f"{slug_of(planned)}.json"
        if path.exists() and not is_of_kind(path, SCHEMA):
            raise StepscopeError(
                f"`{path}` already exists", detail="`stepscope optimise` did not write it", hint="--out DIR"
            )
        return path


def _save(report: OptimiseReport, path: Path | None) -> None:
    if path is not None:
        write_optimisation(report, path)


def check_settings(grid: Grid) -> None:
    """Reject a setting that would be ignored."""
    for name, _ in grid.axes:
        if name in _WITHOUT_EFFECT:
            raise StepscopeError(
                f"`{flag_of(name)}` has no effect here",
                detail="every change is measured over as many steps as fit into a few seconds",
                hint=f"remove {flag_of(name)}",
            )


def check_workload(workload: Workload) -> None:
    """Raise StepscopeError for a step that is not optimized."""
    if workload.mode != "train":
        raise StepscopeError(
            f"mode `{workload.mode}` cannot be optimized", detail="expected a whole training step", hint="--mode train"
        )
    if workload.precision == "fp16":
        raise StepscopeError(
            "precision `fp16` cannot be optimized",
            detail="the loss scale of fp16 is decided on the CPU, which waits for the GPU",
            hint="--precision bf16",
        )
    if workload.checkpoint != "none":
        raise StepscopeError(
            f"checkpoint `{workload.checkpoint}` cannot be optimized",
            detail="a step that recomputes activations is not traced as a whole",
            hint="--checkpoint none",
        )


def _plan(grid: Grid, workers: Workers) -> Planned:
    """The one case that the settings describe, and where it will run."""
    case = only_case(grid) if grid != Grid() else _default_case("cpu")
    check_workload(case.workload)
    probed = look_at([case], workers, None)
    if grid == Grid():
        case = _default_case(probed.environment.device)
    return place_cases([case], probed)[0]


def _default_case(device: str) -> Case:
    size: dict[str, Scalar] = (
        {"size": "nano", "context": 128} if device == "cpu" else {"size": "small", "context": 1024}
    )
    return build_case({**size, "precision": "bf16"})
