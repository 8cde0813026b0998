"""`stepscope profile`: one case, recorded in a process of its own, and kept as a folder.

The worker leaves a raw trace and says what it timed; reading the trace and writing the tables is done here, so that the
process in which the model runs never loads what reads it. The folder appears when it is whole, or not at all.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import limit_notes
from stepscope.explain.statistics import summarise
from stepscope.files import scratch_folder
from stepscope.jobs.experiments.sweep import Planned, judge, look_at, place_cases
from stepscope.jobs.workers.messages import Failed, Record, StepsRecorded
from stepscope.jobs.workers.process import Ended, InputRefusedError, Workers, require_torch
from stepscope.recording.recorded import RAW_NAME, RecordedRun
from stepscope.spec import Case, Grid, grid_from_flags

if TYPE_CHECKING:  # they load polars, which a bad flag need not wait for
    import polars as pl

    from stepscope.jobs.recorders.nsys import NsysRun
    from stepscope.recording.store import Recording

OnStage = Callable[[str], None]


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True):
    """How to record a case with PyTorch's profiler. `functions` are annotated, `stacks` are Python's."""

    folder: Path
    command: str
    force: bool = False
    steps: int = 3
    functions: tuple[str, ...] = ()
    stacks: bool = False

    def run(self, grid: Grid, on_stage: OnStage) -> "Recording":
        """An empty grid is the default case. Whatever goes wrong leaves no folder behind."""
        require_torch()
        check_folder(self.folder, force=self.force, command=self.command)
        with Workers() as workers:
            return self.run_planned(plan_case(grid, workers), workers, on_stage)

    def run_planned(self, planned: Planned, workers: Workers, on_stage: OnStage) -> "Recording":
        """The same for a case that was planned before, by whoever has other things for these workers to do."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        with scratch_folder() as scratch:
            run = self._record(planned, scratch, workers, on_stage)
            on_stage("reading the trace")
            from stepscope.recording.readers import kineto

            raw = scratch / RAW_NAME
            recording = describe_recording(
                kineto.read(raw), planned=planned, run=run, command=self.command, started=started
            )
            save_recording(recording, self.folder, raw=raw, force=self.force, command=self.command)
        return recording

    def _record(self, planned: Planned, scratch: Path, workers: Workers, on_stage: OnStage) -> RecordedRun:
        request = Record(
            case=planned.case,
            folder=str(scratch),
            steps=self.steps,
            functions=self.functions,
            stacks=self.stacks,
        )
        ended = workers.run(request, on_stage=on_stage)
        if isinstance(ended.answer, StepsRecorded):
            return ended.answer.run
        raise explain_failure(ended, planned.case)


class NsysJob(msgspec.Struct, frozen=True, kw_only=True):
    """How to record a case with Nsight Systems. Its report, and what is needed to type the command again, stay in a
    folder beside the recording."""

    folder: Path
    command: str
    force: bool = False
    steps: int = 3
    functions: tuple[str, ...] = ()
    python_backtrace: bool = False
    pytorch: str | None = None

    @property
    def report_folder(self) -> Path:
        return self.folder.with_name(self.folder.name + "-nsys")

    def run(self, grid: Grid, on_stage: OnStage) -> tuple["Recording", "NsysRun"]:
        from stepscope.jobs.recorders.nsys import record_with_nsys, require_nsys

        require_nsys()
        require_torch()
        check_folder(self.folder, force=self.force, command=self.command)
        started = datetime.now(UTC).isoformat(timespec="seconds")
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
        from stepscope.recording import store
        from stepscope.recording.readers import nsys

        recording = describe_recording(
            nsys.read(run.exported), planned=planned, run=run.recorded.run, command=self.command, started=started
        )
        store.save(recording, self.folder, force=self.force, command=self.command)
        return recording, run


def check_folder(folder: Path, *, force: bool, command: str) -> None:
    """Refuses, before anything runs, a place that the recording could not go to."""
    from stepscope.recording.store import check_place

    check_place(folder, force=force, command=command)
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StepscopeError(f"cannot write to `{parent}`", hint="--out FOLDER")


def plan_case(grid: Grid, workers: Workers) -> Planned:
    """The one case that the settings make, and where it will run."""
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
        f"these settings make {len(cases)} cases, and a recording is of one",
        detail=f"`{flag.strip()}` has {len(set(values))} values",
        hint=f"{flag}{values[0]}, or stepscope bench for all of them",
    )


def explain_failure(ended: Ended, case: Case) -> StepscopeError:
    """Why there is no recording, with the last lines that the worker printed where it died without a word."""
    answer = ended.answer
    if isinstance(answer, Failed) and answer.bad_input:
        return InputRefusedError(answer)
    assert not isinstance(answer, StepsRecorded), "this one did not fail"
    status, reason = judge(answer)
    smaller = f"--batch {max(1, case.workload.batch // 2)}, or a smaller --context"
    return StepscopeError(
        f"nothing was recorded: {status}", detail=reason, hint=smaller if status == "oom" else "stepscope doctor"
    )


def describe_recording(
    recording: "Recording", *, planned: Planned, run: RecordedRun, command: str, started: str
) -> "Recording":
    """What the trace cannot know: the case, where it ran, and the steps that were timed without a recorder."""
    from stepscope.recording.store import Overhead

    environment = planned.environment
    plain_ns = _median(run.step_ns)
    versions = {
        name: value
        for name in ("python", "torch", "triton", "cuda", "driver", "stepscope")
        if (value := getattr(environment, name)) is not None
    }
    described = recording.with_manifest(
        case=planned.case,
        environment=environment,
        device=environment.driver_name,
        versions=recording.manifest.versions | versions,
        command=command,
        started=started,
        doubts=run.doubts,
        notes=(*recording.manifest.notes, *run.notes, *limit_notes([environment])),
        overhead=None
        if plain_ns is None
        else Overhead(
            plain_ns=plain_ns,
            recorded_ns=_median(run.recorded_step_ns),
            annotated_ns=_median(run.annotated_step_ns),
        ),
        parameters=run.parameters,
        optimizer=run.optimizer,
        compiled=planned.case.workload.compile,
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


def _median(samples_ns: Sequence[int]) -> int | None:
    """None where nothing was timed, be it that the clock did not advance."""
    return round(summarise(samples_ns).median) or None if samples_ns else None


def save_recording(recording: "Recording", folder: Path, *, raw: Path, force: bool, command: str) -> None:
    from stepscope.recording.store import save

    save(recording, folder, raw=raw, force=force, command=command)
