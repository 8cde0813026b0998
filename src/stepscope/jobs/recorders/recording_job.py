"""`stepscope profile`: one case, recorded in its own process, and saved as a directory.

The worker writes a raw trace and reports its timings; this process reads the trace and writes the tables, so that the
process in which the model runs never loads the readers. The directory appears when it is complete, or not at all.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import limit_notes
from stepscope.explain.statistics import summarise
from stepscope.files import scratch_folder
from stepscope.jobs.experiments.sweep import Planned, PlannedCase, judge, look_at, place_cases
from stepscope.jobs.workers.messages import Failed, Record, StepsRecorded
from stepscope.jobs.workers.process import Ended, InputRefusedError, OnStage, Workers, require_torch
from stepscope.recording.rows.bench import RAW_TRACE_NAME, UNCAPTURED_TRACE_NAME, Environment, RecordedRun
from stepscope.recording.rows.compiled_code import load_graphs
from stepscope.spec import Case, Grid, HuggingFace, Workload, grid_from_flags

if TYPE_CHECKING:  # these load polars, which a bad flag should not have to wait for
    import polars as pl

    from stepscope.jobs.recorders.nsight_systems import NsysRun
    from stepscope.recording.store import Recording


class _RecordingJob(msgspec.Struct, frozen=True, kw_only=True):
    """How to record a case. `functions` are annotated. A failure leaves no directory behind."""

    folder: Path
    command: str
    force: bool = False
    steps: int = 3
    functions: tuple[str, ...] = ()

    def _keep(
        self, recording: "Recording", planned: Planned, run: RecordedRun, started: datetime, raw: Path | None = None
    ) -> "Recording":
        from stepscope.recording.store import save

        at = started.isoformat(timespec="seconds")
        described = describe_recording(recording, planned=planned, run=run, command=self.command, started=at)
        save(described, self.folder, raw=raw, force=self.force, command=self.command)
        return described


class ProfileJob(_RecordingJob, frozen=True, kw_only=True):
    """Record with PyTorch's profiler. `stacks` are Python stacks."""

    stacks: bool = False

    def run(self, grid: Grid, on_stage: OnStage) -> "Recording":
        """An empty grid means the default case."""
        require_torch()
        check_folder(self.folder, force=self.force, command=self.command)
        with Workers() as workers:
            return self.run_planned(plan_case(grid, workers), workers, on_stage)

    def run_planned(self, planned: Planned, workers: Workers, on_stage: OnStage) -> "Recording":
        """The same for a case that is already planned, by a caller that shares its workers."""
        started = datetime.now(UTC)
        with scratch_folder() as scratch:
            request = Record(
                case=planned.case,
                folder=str(scratch),
                steps=self.steps,
                functions=self.functions,
                stacks=self.stacks,
            )
            ended = workers.run(request, on_stage=on_stage)
            if not isinstance(ended.answer, StepsRecorded):
                raise explain_failure(ended, planned.case, "recorded")
            on_stage("reading the trace")
            return self._keep(read_traces(scratch), planned, ended.answer.run, started, scratch / RAW_TRACE_NAME)


class NsysJob(_RecordingJob, frozen=True, kw_only=True):
    """Record with Nsight Systems. Its report, and what is needed to rerun the command, stay in a directory next to the
    recording.
    """

    python_backtrace: bool = False
    pytorch: str | None = None

    @property
    def report_folder(self) -> Path:
        return self.folder.with_name(self.folder.name + "-nsys")

    def run(self, grid: Grid, on_stage: OnStage) -> tuple["Recording", "NsysRun"]:
        from stepscope.jobs.recorders.nsight_systems import record_with_nsys, require_nsys

        require_nsys()
        require_torch()
        check_folder(self.folder, force=self.force, command=self.command)
        started = datetime.now(UTC)
        with Workers() as workers:
            planned = plan_case(grid, workers)
        run = record_with_nsys(
            planned.case,
            out_folder=self.report_folder,
            functions=self.functions,
            record_steps=self.steps,
            python_backtrace=self.python_backtrace,
            pytorch=self.pytorch,
            on_stage=on_stage,
        )
        on_stage("reading the report")
        from stepscope.recording.readers import nsys

        return self._keep(nsys.read(run.exported), planned, run.recorded.run, started), run


def read_traces(folder: Path) -> "Recording":
    """Read what PyTorch's profiler wrote to the directory of a worker. If the step runs CUDA graphs, the recording has
    the kernels of the same step without them, and what they belong to."""
    from stepscope.explain.trace.attribution import attribute_kernels
    from stepscope.recording import tables
    from stepscope.recording.compiled_code import keep_calls, name_modules
    from stepscope.recording.readers import kineto

    graphs = load_graphs(folder)
    recording = keep_calls(name_modules(kineto.read(folder / RAW_TRACE_NAME), graphs), graphs)
    uncaptured = folder / UNCAPTURED_TRACE_NAME
    if not uncaptured.exists():
        return recording
    plain = name_modules(kineto.read(uncaptured), graphs)
    kernels = attribute_kernels(plain).sort("launch_ns", "start_ns", maintain_order=True)
    captured = tables.conform("captured", kernels.select(tables.SCHEMAS["captured"].keys()))
    has_modules = recording.manifest.modules_recorded or plain.manifest.modules_recorded
    return replace(recording, captured=captured).with_manifest(modules_recorded=has_modules)


def check_folder(folder: Path, *, force: bool, command: str) -> None:
    """Reject, before anything runs, a path that the recording could not be written to."""
    from stepscope.recording.store import check_place

    check_place(folder, force=force, command=command)
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StepscopeError(f"cannot write to `{parent}`", hint="--out DIR")


def plan_case(grid: Grid, workers: Workers) -> Planned:
    """Return the one case that the settings describe, and where it will run."""
    if grid == Grid():
        on_cpu = grid_from_flags({"size": "nano", "context": "128"}).cases()[0]
        if look_at([on_cpu], workers, None).environment.device == "cpu":
            grid = grid_from_flags({"size": "nano", "context": "128"})
        else:
            grid = grid_from_flags({"size": "small", "context": "256"})
    cases = [only_case(grid)]
    return place_cases(cases, look_at(cases, workers, None))[0]


def only_case(grid: Grid) -> Case:
    cases = grid.cases()
    if len(cases) == 1:
        return cases[0]
    name, values = next((name, values) for name, values in (*grid.axes, *grid.arguments) if len(set(values)) > 1)
    flag = f"--set {name}=" if name in dict(grid.arguments) else f"--{name.replace('_', '-')} "
    raise StepscopeError(
        f"expected one case to record, got {len(cases)}",
        detail=f"`{flag.strip()}` has {len(set(values))} values",
        hint=f"{flag}{values[0]}, or stepscope bench to run all of them",
    )


def explain_failure(ended: Ended, case: Case, what: str) -> StepscopeError:
    """The error for a request that failed. `what` is the participle of the verb, such as "recorded"."""
    answer = ended.answer
    if isinstance(answer, Failed) and answer.bad_input:
        return InputRefusedError(answer)
    status, reason = judge(answer)
    hint = _hint_smaller(case.workload) if status == "oom" else "stepscope doctor"
    return StepscopeError(f"nothing was {what}: {status}", detail=reason, hint=hint)


def _hint_smaller(workload: Workload) -> str:
    """Settings that need less memory. Gradient accumulation keeps the batch, which it must be able to split."""
    half = f"--batch {max(1, workload.batch // 2)}"
    if workload.mode == "train" and workload.passes == 1 and workload.batch % 2 == 0:
        return f"{half}, --grad-accumulation 2, or a smaller --context"
    return f"{half}, or a smaller --context"


class _Ran(Protocol):
    """What every recorder reports about the model it ran."""

    @property
    def parameters(self) -> int: ...

    @property
    def optimizer(self) -> str | None: ...


def describe_run(recording: "Recording", planned: PlannedCase[Case], run: _Ran, **more: object) -> "Recording":
    """Add what no recorder knows: the case, its environment, and `more` manifest fields."""
    return recording.with_manifest(
        case=planned.case,
        environment=planned.environment,
        device=planned.environment.driver_name,
        parameters=run.parameters,
        optimizer=run.optimizer,
        compiled=planned.case.workload.compile,
        **more,
    )


def versions_of(environment: Environment, workload: Workload) -> dict[str, str]:
    names = ("python", "torch", "triton", "cuda", "driver", "stepscope")
    versions = {name: value for name in names if (value := getattr(environment, name)) is not None}
    if isinstance(workload.model, HuggingFace):
        versions["transformers"] = version("transformers")
    return versions


def describe_recording(
    recording: "Recording", *, planned: Planned, run: RecordedRun, command: str, started: str
) -> "Recording":
    """Add what the trace does not contain: the case, its environment, and the unprofiled step times."""
    from stepscope.recording.store import Overhead

    plain_ns = median_ns(run.step_ns)
    recorded_ns, annotated_ns = median_ns(run.recorded_step_ns), median_ns(run.annotated_step_ns)
    described = describe_run(
        recording,
        planned,
        run,
        versions=recording.manifest.versions | versions_of(planned.environment, planned.case.workload),
        command=command,
        started=started,
        doubts=run.doubts,
        sizes=run.sizes,
        expert_tokens=run.expert_tokens,
        notes=(*recording.manifest.notes, *run.notes, *limit_notes([planned.environment])),
        overhead=Overhead(plain_ns=plain_ns, recorded_ns=recorded_ns, annotated_ns=annotated_ns) if plain_ns else None,
    )
    return replace(described, steps=_steps_table(run))


def _steps_table(run: RecordedRun) -> "pl.DataFrame":
    import polars as pl

    from stepscope.recording import tables

    rows = [
        {"phase": phase, "step": step, "duration_ns": duration, "clock": run.clock}
        for step in range(len(run.step_ns))
        for phase, durations in run.phases_ns.items()
        for duration in (durations[step],)
    ]
    return tables.conform("steps", pl.DataFrame(rows, schema=tables.SCHEMAS["steps"]))


def median_ns(samples_ns: Sequence[int]) -> int | None:
    """Return the median, or None if nothing was timed or the clock did not advance."""
    return round(summarise(samples_ns).median) or None if samples_ns else None
