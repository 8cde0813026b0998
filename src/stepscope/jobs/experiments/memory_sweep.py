"""`stepscope memory`: cases with their memory history recorded, each in its own process.

A worker writes a memory snapshot; this process parses it with the reader that `stepscope explain` uses for any
snapshot. Every case keeps a row, so that a grid can resume, and the recording itself, so that it can be read again
without running anything.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case, limit_notes
from stepscope.files import scratch_folder
from stepscope.jobs.experiments.sweep import PlannedCase, Turn, WorkloadExperiment
from stepscope.jobs.recorders.external import compress
from stepscope.jobs.recorders.recording_job import describe_run, median_ns
from stepscope.jobs.workers.messages import Failed, MemoryRecorded, RecordMemory
from stepscope.jobs.workers.process import Ended, Workers
from stepscope.recording.memory.labels import SNAPSHOT_NAME, MemoryRun
from stepscope.recording.rows.memory_summary import MemoryRow
from stepscope.spec import Case, Grid, grid_from_flags

if TYPE_CHECKING:  # loads polars, which a bad flag should not have to wait for
    from stepscope.recording.store import Recording

RECORDINGS_NAME = "recordings"


@dataclass(frozen=True, kw_only=True)
class MemoryExperiment(WorkloadExperiment[MemoryRow]):
    """`snapshots` keeps each case's snapshot next to its tables: other viewers can read it, and it can be large. The
    snapshot of a single case is always kept.
    """

    snapshots: bool = False

    row_type = MemoryRow

    def default_grid(self, *, on_cpu: bool) -> Grid:
        size, context = ("nano", "128") if on_cpu else ("small", "256")
        return grid_from_flags({"size": size, "context": context})

    def measure(self, turn: Turn[Case, MemoryRow], workers: Workers) -> tuple[Ended, dict[str, object]]:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        with scratch_folder() as scratch:
            request = RecordMemory(case=turn.waiting[0].case, folder=str(scratch))
            ended = workers.run(request, on_stage=turn.listener.stage, timeout_s=turn.sweep.timeout_s)
            if not isinstance(ended.answer, MemoryRecorded):
                return ended, {}
            turn.listener.stage("reading the snapshot")
            try:
                return ended, self._keep(scratch / SNAPSHOT_NAME, turn, ended.answer.run, started)
            except StepscopeError as error:  # costs this case, not the ones after it
                failed = Failed(message=error.message, detail=error.detail, hint=error.hint)
                return msgspec.structs.replace(ended, answer=failed), {}

    def _keep(self, snapshot: Path, turn: Turn[Case, MemoryRow], run: MemoryRun, started: str) -> dict[str, object]:
        from stepscope.explain.memory import make_memory_profile
        from stepscope.recording.memory import reader as memory
        from stepscope.recording.store import save

        planned, sweep = turn.waiting[0], turn.sweep
        recording = _describe(memory.read(snapshot), planned, run, command=sweep.command, started=started)
        raw = compress(snapshot, level=1) if self.snapshots or len(self.grid.cases()) == 1 else None
        save(recording, recording_folder(sweep.folder, planned.key), raw=raw, force=True)
        return {"summary": make_memory_profile(recording).summary, "run": run}


def recording_folder(folder: Path, key: str) -> Path:
    return folder / RECORDINGS_NAME / key


def _describe(
    recording: "Recording", planned: PlannedCase[Case], run: MemoryRun, *, command: str, started: str
) -> "Recording":
    """Add what the snapshot does not contain: the case, its environment, and the recording overhead."""
    from stepscope.recording.store import Overhead

    environment = planned.environment
    return describe_run(
        recording,
        planned,
        run,
        file=describe_case(planned.case),
        versions={"python": environment.python, "torch": environment.torch, "stepscope": environment.stepscope},
        command=command,
        started=started,
        notes=(*recording.manifest.notes, *run.notes, *limit_notes([environment])),
        overhead=Overhead(
            plain_ns=median_ns(run.step_ns) or 0,
            recorded_ns=median_ns(run.recorded_step_ns) or 0,
            annotated_ns=median_ns(run.watched_step_ns) or 0,
        ),
    )


def choose_grid(grid: Grid, *, study: bool) -> Grid:
    """What to record. A checkpoint study is one workload with every way to recompute its activations."""
    if "warmup" in dict(grid.axes):
        raise StepscopeError(
            "`--warmup` has no effect here",
            detail="memory is recorded from the first step",
            hint="--steps 10",
        )
    return _study_grid(grid) if study else grid


def _study_grid(grid: Grid) -> Grid:
    from stepscope.explain.memory.grid import study_values

    cases = grid.cases()
    if len(cases) != 1 or "checkpoint" in dict(grid.axes):
        raise StepscopeError(
            "`--checkpoint-study` takes a single workload and sets --checkpoint itself",
            hint="give each setting one value, and remove --checkpoint",
        )
    replace, case = msgspec.structs.replace, cases[0]
    workloads = (replace(case.workload, checkpoint=value) for value in study_values(case.workload))
    return Grid(listed=tuple(replace(case, workload=one) for one in workloads))
