"""`stepscope precision`: one workload in several precisions and in float64, in its own process.

All precisions run in one worker, unlike the cases of a sweep: they are compared element by element, and the gradients
of a whole model are too large for a pipe. The result is small.
"""

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.precision.precision_tables import find_speeds
from stepscope.files import check_target
from stepscope.jobs.experiments.sweep import Planned, look_at
from stepscope.jobs.recorders.recording_job import explain_failure, plan_case
from stepscope.jobs.workers.messages import ComparePrecisions, PrecisionsCompared
from stepscope.jobs.workers.process import OnStage, Workers, require_torch
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.precision_report import PrecisionReport, write_report
from stepscope.spec import PRESETS, SETTINGS, Case, Grid, Precision, Scalar, flag_of

# In table order.
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
# fp16 has no fast kernels on most CPUs: the usual 128 tokens take a minute there.
CONTEXT_ON_CPU = 32


class PrecisionJob(msgspec.Struct, frozen=True, kw_only=True):
    """How to run. Nothing is saved unless `out` names a file; `bench_rows` are timings to show next to the errors."""

    command: str
    out: Path | None = None
    force: bool = False
    bench_rows: tuple[BenchRow, ...] = ()

    def run(self, grid: Grid, on_stage: OnStage, *, precisions: Collection[Precision] = ()) -> PrecisionReport:
        require_torch()
        check_settings(grid)
        if self.out is not None:
            check_target(self.out, force=self.force, flag="--out", command=self.command)
        asked, rest = _take_precisions(_without_idle_parts(grid))
        with Workers() as workers:
            planned = _plan(rest, workers)
            chosen = choose_precisions(asked or precisions, planned.case)
            return self.run_planned(planned, chosen, workers, on_stage)

    def run_planned(
        self, planned: Planned, precisions: tuple[Precision, ...], workers: Workers, on_stage: OnStage
    ) -> PrecisionReport:
        """The same for a case that is already planned, by a caller that shares its workers."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        speeds = find_speeds(self.bench_rows, planned.case) if self.bench_rows else ()
        request = ComparePrecisions(case=planned.case, precisions=precisions)
        ended = workers.run(request, on_stage=on_stage)
        if not isinstance(ended.answer, PrecisionsCompared):
            raise explain_failure(ended, planned.case, "compared")
        report = PrecisionReport(
            case=planned.case,
            environment=planned.environment,
            command=self.command,
            started=started,
            comparison=ended.answer.comparison,
            speeds=speeds,
        )
        if self.out is not None:
            write_report(report, self.out)
        return report


def check_settings(grid: Grid) -> None:
    """Reject a setting that would be ignored: the user would read a different number than they asked for."""
    for name, _ in grid.axes:
        if not SETTINGS[name].in_precision:
            raise StepscopeError(
                f"`{flag_of(name)}` has no effect here",
                detail="every precision runs one uncompiled step, forward and backward",
                hint=f"remove {flag_of(name)}",
            )


def _without_idle_parts(grid: Grid) -> Grid:
    """The grid without the parts of a preset that have no effect here."""
    given = dict(grid.axes)
    if "preset" not in given:
        return grid
    names = [name for name in PRESETS["fast"] if name == "precision" or not SETTINGS[name].in_precision]
    axes = tuple((name, (SETTINGS[name].default,)) for name in names if name not in given)
    return grid.override(Grid(axes=axes))


def _take_precisions(grid: Grid) -> tuple[set[Scalar | None], Grid]:
    """Split off the requested precisions, the one setting that may have several values, and return the rest of the
    grid.
    """
    asked = {value for name, values in grid.axes if name == "precision" for value in values}
    axes = tuple(axis for axis in grid.axes if axis[0] != "precision")
    return asked, msgspec.structs.replace(grid, axes=axes)


def _plan(grid: Grid, workers: Workers) -> Planned:
    """Use a short context on a CPU, unless one was set or the model comes from a factory or has no tokens."""
    names = [name for name, _ in grid.axes]
    if "context" not in names and "model" not in names and not grid.listed:
        found = look_at(grid.cases()[:1], workers, None)
        if found.environment.device == "cpu" and found.models[0].takes_context:
            return plan_case(grid.override(Grid(axes=(("context", (CONTEXT_ON_CPU,)),))), workers)
    return plan_case(grid, workers)


def choose_precisions(asked: Collection[Scalar | Precision | None], case: Case) -> tuple[Precision, ...]:
    """Return every precision the device supports, unless some were requested. Requesting tf32 on a CPU is rejected
    where workloads are checked, as everywhere.
    """
    on_cpu = case.workload.device == "cpu"
    chosen = tuple(one for one in PRECISIONS if (one in asked if asked else not (on_cpu and one == "tf32")))
    for precision in chosen:
        msgspec.structs.replace(case.workload, precision=precision)
    return chosen
